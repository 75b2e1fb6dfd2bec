//! Posting beside another thread that makes progress.

use super::super::{PeerInfo, Tcp};
use super::*;
use crate::fabric::soft::lane::{Health, Lane};
use crate::memory::registry::{Extent, Registry};
use crate::rma::op::{Op, Put, Signal};
use std::sync::atomic::AtomicU64;

const PATIENCE: Duration = Duration::from_secs(30);

/// Two ranks of one communicator, each with its own registry; and the lane from rank 0 to rank 1.
fn joined() -> ([Tcp; 2], [Arc<Registry>; 2], Arc<Lane>) {
    let registries = [(); 2].map(|()| Arc::new(Registry::default()));
    let tcps = [0, 1]
        .map(|r: usize| Tcp::open(&["127.0.0.1:0".parse().unwrap()], [r as u8; 16], 1, registries[r].clone()).unwrap());
    let healths: [[Arc<Health>; 2]; 2] = Default::default();
    for (r, tcp) in tcps.iter().enumerate() {
        let info = |i: usize| {
            let (addresses, health) = (tcps[i].addresses(), healths[r][i].clone());
            PeerInfo { addresses, token: [i as u8; 16], health }
        };
        tcp.join(World { rank: r as u32, nranks: 2 }, vec![info(0), info(1)]).unwrap();
    }
    let lane = Arc::new(Lane::new(0, 1, healths[0][1].clone()));
    (tcps, registries, lane)
}

/// A peer that fails, or a communicator that is closed, between the caller's look and the post: the caller waits for
/// the operation that it posted, which never completes, and not for the one before.
#[test]
fn what_is_posted_as_its_peer_fails_has_a_number_that_never_completes() {
    for is_closed in [false, true] {
        let ([from, _to], _registries, lane) = joined();
        match is_closed {
            false => lane.health.fail(Error::remote("rank 1 has ended".to_owned())),
            true => from.close(),
        }
        let signal = Some(Signal { remote: 8, rkey: 1, value: 1, strong: true });
        let put = Put { local: 0, lkey: 1, remote: 8, rkey: 1, len: 0, signal, more: false };
        let task = |seq| Task { lane: lane.clone(), seq, work: Op::Put(put) };
        from.post_all(&lane, (0..2).map(|_| task(lane.number())));
        assert_eq!(lane.unfinished(), 2, "closed: {is_closed}");
        assert!(lane.test(lane.last()).is_err(), "closed: {is_closed}");
    }
}

/// A posting that has found the communicator open meets its close: it is this rank that has closed, not the other one.
#[test]
fn what_meets_the_close_of_its_own_rank_says_so() {
    let ([from, _to], _registries, lane) = joined();
    let peer = from.make_peer(1).unwrap();
    from.close();
    let put = Put { local: 0, lkey: 1, remote: 8, rkey: 1, len: 0, signal: None, more: false };
    from.post_to(peer, std::iter::once(Task { lane: lane.clone(), seq: lane.number(), work: Op::Put(put) }));
    let told = lane.test(lane.last()).unwrap_err();
    assert!(told.message().contains("on a closed communicator"), "{told}");
}

/// A thread that has to send what was deferred, and finds another one with the link, leaves it to that one, which
/// must not defer it once more: nobody would come back to it.
#[test]
fn who_is_asked_to_send_does_not_defer_again() {
    let ([from, to], registries, lane) = joined();
    let word = AtomicU64::new(0);
    let at = word.as_ptr() as u64;
    registries[1].insert(1, Extent { base: at, len: 8 });
    let mut posted = 0;
    let mut post = || {
        let signal = Some(Signal { remote: at, rkey: 1, value: 1, strong: true });
        let put = Put { local: 0, lkey: 1, remote: at, rkey: 1, len: 0, signal, more: true };
        from.post(Task { lane: lane.clone(), seq: lane.number(), work: Op::Put(put) });
        posted += 1;
        posted
    };
    let arrive = |count: u64| {
        let end = Instant::now() + PATIENCE;
        while word.load(Ordering::Acquire) < count {
            assert!(Instant::now() < end, "{} of {count} signals have arrived", word.load(Ordering::Acquire));
            from.progress();
            to.progress();
        }
    };
    arrive(post());
    let peer = from.peer(1).unwrap();
    for _ in 0..200 {
        post();
        // The other thread takes what was deferred off the list, and asks whoever has the link.
        from.any_deferred.store(false, Ordering::SeqCst);
        from.deferred.lock().clear();
        peer.pending.store(true, Ordering::SeqCst);
        // Not so long ago that it would be sent for that.
        peer.link.lock().deferred = Some(Instant::now());
        arrive(post());
    }
}
