//! Waking a helper thread that sleeps.

use super::deregistration::Standing;
use super::*;
use crate::fabric::soft::peer::contact::{Contact, Event};

/// Whoever waits for an answer at the contact socket reads what else comes there: what was to wake the helper thread
/// wakes it.
#[test]
fn a_wake_up_that_another_thread_reads_still_wakes() {
    let ranks = join(2, 2, SoftTransport::Auto);
    let [from, to] = [0, 1].map(|r: usize| ranks[r].fabric.shared().unwrap());
    // The test is the helper thread, asleep, and then the other one.
    ranks[1].fabric.close();
    to.calm();
    to.status.set_sleeping(true);
    from.wake(1);
    to.answer_contacts();
    assert!(!to.status.is_sleeping());
    let mut count = [0u8; 8];
    assert_eq!(nix::unistd::read(std::os::fd::AsRawFd::as_raw_fd(&to.stirred_fd()), &mut count), Ok(8));
}

/// Others receive nothing, so that this rank's socket takes no more: who sleeps is woken once it does.
#[test]
fn who_cannot_be_woken_now_is_woken_later() {
    let ranks = join(2, 2, SoftTransport::Auto);
    let [from, to] = [0, 1].map(|r: usize| ranks[r].fabric.shared().unwrap());
    let [one, other] = [0, 1].map(|r: usize| ranks[r].window(1, 64));
    let context = ranks[0].context();
    let put_once = || {
        // SAFETY: windows are never freed.
        let seq = unsafe { context.put(1, &put(&one, &other, 8, None)) }.unwrap();
        wait(&context, 1, seq);
    };
    put_once();
    // The test is the helper thread, asleep.
    let standing = Standing::of(to);
    let woken = || std::iter::from_fn(|| to.contact.receive()).filter(|event| matches!(event, Event::Woken)).count();
    // First: what is read makes room in the socket that it came from.
    woken();
    let (token, strangers) = ([5; 16], Contact::open([5; 16]).unwrap());
    from.contact.fill(&strangers, &token);
    to.status.set_sleeping(true);
    (0..3).for_each(|_| put_once());
    assert_eq!(woken(), 0);
    drop(strangers);
    until("it is woken", || {
        // Any thread of its rank may be the one that looks.
        context.progress().unwrap();
        woken() > 0
    });
    drop(standing);
}
