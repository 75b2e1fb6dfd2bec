//! A peer closes its communicator in good order: what it has done is done, what it leaves undone fails, and what it no
//! longer wants is nobody's fault.

use super::deregistration::Standing;
use super::*;

/// Longer than the time between two looks at peers.
const LOOK: Duration = Duration::from_millis(110);

/// Two ranks that know the way to each other, with a window each.
fn pair(transport: SoftTransport, bytes: usize) -> (Vec<Rank>, [Window; 2], [Context; 2]) {
    let ranks = join(2, 2, transport);
    let windows = [0, 1].map(|r: usize| ranks[r].window(1, bytes));
    let contexts = [0, 1].map(|r: usize| ranks[r].context());
    for (me, context) in (0..).zip(&contexts) {
        let other: usize = 1 - me;
        // SAFETY: windows are never freed.
        let seq = unsafe { context.get(other as u32, &get(&windows[me], &windows[other], 8)) }.unwrap();
        wait(context, other as u32, seq);
    }
    (ranks, windows, contexts)
}

/// A peer asks, through its ring, for all of a window of this rank's.
fn ask_for_all(own: &Progress, peer: &Progress, context: &Context, (to, from): (&Window, &Window)) {
    // SAFETY: windows are never freed.
    unsafe { context.get(0, &get(to, from, to.bytes)) }.unwrap();
    peer.link(0).advance(peer);
    until("the question", || own.link(1).owes());
}

/// An operation is posted between a look that finds nothing unfinished and the closing of the link: it waits for a
/// turn, or has asked the peer for what that one never answers.
#[test]
fn what_is_posted_while_a_link_closes_fails() {
    [false, true].into_iter().for_each(posted_while_a_link_closes);
}

fn posted_while_a_link_closes(has_asked: bool) {
    let (ranks, [mine, its], [context, _other]) = pair(SoftTransport::NoCma, 64);
    let [own, peer] = [0, 1].map(|r: usize| ranks[r].fabric.shared().unwrap());
    let standing = Standing::of(peer);
    // SAFETY: windows are never freed.
    let seq = unsafe { context.get(1, &get(&mine, &its, 64)) }.unwrap();
    if has_asked {
        own.link(1).advance(own);
    }
    own.link(1).close_idle();
    let mut told = None;
    until("the failure", || {
        told = context.test(1, seq).err();
        told.is_some()
    });
    drop(standing);
    let told = told.unwrap();
    assert!(told.message().contains("rank 1 has closed its communicator"), "{told}");
}

/// The peer has answered before it closed, and whoever reads the answer is late.
#[test]
fn what_a_peer_has_done_before_it_closed_is_done() {
    let (ranks, [mine, its], [context, other]) = pair(SoftTransport::NoCma, 64);
    let own = ranks[0].fabric.shared().unwrap();
    its.fill(7);
    let mut receiver = own.hold_receiver();
    // SAFETY: windows are never freed.
    let seq = unsafe { context.get(1, &get(&mine, &its, 64)) }.unwrap();
    // The helper thread may wait for the receiver, to see whether it can sleep.
    own.link(1).advance(own);
    until("the answer", || {
        let marks = receiver.marks(&own.inbox);
        !receiver.has_passed(&marks)
    });
    drop(other);
    ranks[1].fabric.close();
    for _ in 0..4 {
        std::thread::sleep(LOOK);
        own.look_at_peers();
    }
    drop(receiver);
    wait(&context, 1, seq);
    assert!(mine.holds(7) && !context.has_error());
}

/// The peer asked for more than its ring holds, gave that up and closed: this rank's answer finds no room any more, and
/// nothing of this rank's has failed.
#[test]
fn an_answer_that_a_peer_gave_up_fails_nobody() {
    let (ranks, [mine, its], [context, other]) = pair(SoftTransport::NoCma, 1 << 20);
    let [own, peer] = [0, 1].map(|r: usize| ranks[r].fabric.shared().unwrap());
    let standing = Standing::of(peer);
    ask_for_all(own, peer, &other, (&its, &mine));
    drop(other);
    // It reads nothing on its way out.
    peer.request_stop();
    drop(standing);
    ranks[1].fabric.close();
    for _ in 0..4 {
        std::thread::sleep(LOOK);
        own.look_at_peers();
        assert!(!context.has_error());
    }
    until("the end of what is owed", || !own.link(1).has_backlog());
}

/// A peer fails while the kernel copies for an operation to it: callers are told when that is over, and no other copy
/// begins.
#[test]
fn a_failure_is_told_once_nothing_is_copied() {
    let (ranks, [mine, its], [context, _other]) = pair(SoftTransport::Auto, 1 << 20);
    let own = ranks[0].fabric.shared().unwrap();
    let standing = Standing::of(own);
    let mut seq = Seq(0);
    context.copy_while(1, its.id, || {
        // SAFETY: windows are never freed.
        seq = unsafe { context.get(1, &get(&mine, &its, mine.bytes)) }.unwrap();
        own.link(1).health.fail(crate::error::Error::remote("lost"));
        assert!(!context.test(1, seq).unwrap() && !context.has_error());
        // It will be told of this one, too.
        // SAFETY: as above.
        seq = unsafe { context.get(1, &get(&mine, &its, mine.bytes)) }.unwrap();
        assert!(!context.test(1, seq).unwrap());
    });
    assert!(context.test(1, seq).is_err() && context.has_error());
    context.copy_while(1, its.id, || panic!("callers know of the failure"));
    drop(standing);
}

/// A refusal that finds no room in the ring of a peer that has failed, and then ends: nobody waits to send it.
#[test]
fn a_refusal_that_nobody_reads_any_more_is_dropped() {
    let (ranks, [mine, its], [context, other]) = pair(SoftTransport::NoCma, 1 << 20);
    let [own, peer] = [0, 1].map(|r: usize| ranks[r].fabric.shared().unwrap());
    let standing = Standing::of(peer);
    ask_for_all(own, peer, &other, (&its, &mine));
    let told = || crate::error::Error::remote("told in a test");
    own.link(1).refuse(own, 0, told());
    own.link(1).health.fail(told());
    context.progress().unwrap();
    assert!(own.link(1).owes(), "it is told while it may read");
    drop(other);
    peer.request_stop();
    drop(standing);
    ranks[1].fabric.close();
    until("the end of what is owed", || {
        context.progress().unwrap();
        !own.link(1).has_backlog()
    });
}
