//! Who sees what of whom, and what a stray write can do.

use super::super::shm::inbox::Inbox;
use super::alive::Liveness;
use super::*;
use std::os::fd::AsRawFd;
use std::sync::mpsc::{channel, Sender};
use std::sync::Arc;
use std::thread::JoinHandle;

const TOKEN: [u8; 16] = [7; 16];

fn pair() -> (Arc<Status>, PeerStatus) {
    let own = Arc::new(Status::create(3, TOKEN).unwrap());
    let peer = PeerStatus::attach(own.fd(), 3, &TOKEN).unwrap();
    (own, peer)
}

/// A thread that holds a rank's life.
pub struct Life {
    end: Sender<()>,
    thread: JoinHandle<()>,
}

impl Life {
    /// Takes up the life of this rank.
    pub fn of(status: &Arc<Status>) -> Self {
        let ((up, is_up), (end, ends), status) = (channel(), channel(), status.clone());
        let thread = std::thread::spawn(move || {
            assert!(status.hold_life() && !status.hold_life());
            up.send(()).unwrap();
            if ends.recv().is_ok() {
                status.release_life();
            }
        });
        is_up.recv().unwrap();
        Self { end, thread }
    }

    /// Ends in good order.
    pub fn release(self) {
        self.end.send(()).unwrap();
        self.thread.join().unwrap();
    }

    /// Ends without a word: a thread that ends while it holds the mutex is what a killed process looks like.
    pub fn die(self) {
        drop(self.end);
        self.thread.join().unwrap();
    }
}

#[test]
fn only_this_communicators_is_taken() {
    let (own, _) = pair();
    assert!(PeerStatus::attach(own.fd(), 4, &TOKEN).is_err());
    assert!(PeerStatus::attach(own.fd(), 3, &[8; 16]).is_err());
    assert!(PeerStatus::attach(create(PAGE).unwrap().as_fd(), 3, &TOKEN).is_err());
    assert!(PeerStatus::attach(create(bytes(3)).unwrap().as_fd(), 3, &TOKEN).is_err());
}

#[test]
fn what_a_rank_says_is_seen() {
    let (own, peer) = pair();
    // SAFETY: `peer` lives.
    let sleeps = || unsafe { load(peer.sleeping()) } != 0;
    assert!(!sleeps() && !own.is_sleeping());
    own.set_sleeping(true);
    assert!(sleeps() && own.is_sleeping());
    let last = WINDOW_BITS as u32 - 1;
    for id in [0, 63, 64, last] {
        assert!(!peer.has_window(id));
        own.set_window(id, true);
        assert!(peer.has_window(id));
    }
    own.set_window(64, false);
    assert_eq!([63, 64, last, last + 1, u32::MAX].map(|id| peer.has_window(id)), [true, false, true, false, false]);
    own.set_window(last + 1, true);
}

#[test]
fn life_and_death_show() {
    let (own, peer) = pair();
    assert_eq!(peer.look(), Liveness::Closed);
    let life = Life::of(&own);
    assert_eq!(peer.look(), Liveness::Alive);
    life.release();
    assert_eq!(peer.look(), Liveness::Closed);
    Life::of(&own).die();
    for _ in 0..5 {
        assert_eq!(peer.look(), Liveness::Dead);
    }
}

/// Fills all of a file that a peer gets with nonsense, as far as that can be done. `false`: it cannot.
fn scribble(fd: BorrowedFd<'_>, bytes: usize) -> bool {
    let Ok(all) = Mapping::new(fd, 0, bytes) else { return false };
    // SAFETY: the mapping has so many bytes; whoever else uses them expects anything (that is what is tested).
    (0..bytes / 8).for_each(|i| unsafe { all.ptr().cast::<u64>().add(i).write_volatile(0x4141_4141_4141_4141) });
    true
}

/// A peer writes where it likes. This rank's life goes on and ends in good order: a lock that it could reach would
/// end the process in glibc.
#[test]
fn a_stray_write_reaches_nothing_that_is_followed() {
    let (own, peer) = pair();
    let inbox = Inbox::create(3, TOKEN).unwrap();
    let bytes = sealed_len(inbox.fd()).unwrap();
    std::thread::spawn(move || {
        assert!(own.hold_life());
        assert!(scribble(inbox.fd(), bytes));
        assert!(!scribble(own.fd(), sealed_len(own.fd()).unwrap()), "a peer can write a status");
        own.release_life();
    })
    .join()
    .unwrap();
    assert_eq!(peer.look(), Liveness::Closed);
}

#[test]
fn no_way_leads_to_writing() {
    let (own, peer) = pair();
    // SAFETY: changes no access that anybody uses, since it fails.
    assert_eq!(unsafe { libc::mprotect(peer.page.ptr().cast(), PAGE, libc::PROT_READ | libc::PROT_WRITE) }, -1);
    // SAFETY: plain call with one valid byte.
    assert_eq!(unsafe { libc::pwrite(own.fd().as_raw_fd(), [1u8].as_ptr().cast(), 1, 0) }, -1);
    own.set_window(1, true);
    assert!(peer.has_window(1), "the owner still can");
}

#[test]
fn copies_show_while_they_last() {
    let (own, peer) = pair();
    let all = |me, id| peer.announced(me, id).collect::<Vec<_>>();
    assert!(all(2, 5).is_empty());
    own.begin_copy(2, 0, 5);
    assert!(all(1, 5).is_empty() && all(2, 4).is_empty());
    let [first] = all(2, 5)[..] else { panic!("not one copy") };
    assert!(peer.goes_on(&first));
    own.end_copy(2, 0);
    assert!(!peer.goes_on(&first) && all(2, 5).is_empty());
    own.begin_copy(2, 0, 5);
    assert!(!peer.goes_on(&first), "another one");
    (1..COPIES).for_each(|place| own.begin_copy(2, place, 5));
    assert_eq!(all(2, 5).len(), COPIES);
    own.end_copy(2, 3);
    own.begin_copy(2, 3, WINDOW_BITS as u32 - 1);
    assert_eq!((all(2, 5).len(), all(2, WINDOW_BITS as u32 - 1).len()), (COPIES - 1, 1));
}
