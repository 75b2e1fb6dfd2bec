//! What a refusal ends, and what it does not.

use super::*;
use crate::error::Kind;

/// What one context may ask that is refused.
#[derive(Clone, Copy, Debug)]
enum Wrong {
    Put(usize),
    Get(usize),
    /// The data has a place, its signal has none.
    Signal,
}

fn post(context: &Context, peer: u32, put: &Put) -> Result<Seq> {
    // SAFETY: windows are never freed.
    unsafe { context.put(peer, put) }
}

fn fetch(context: &Context, peer: u32, get: &Get) -> Result<Seq> {
    // SAFETY: windows are never freed.
    unsafe { context.get(peer, get) }
}

/// An operation of one context names what is not there, or no longer: that context says why, others to the same peer
/// go on both ways, and once it is gone new ones reach the peer.
#[test]
fn a_refusal_fails_its_context_alone() {
    let wrongs = [Wrong::Put(64), Wrong::Put(1 << 20), Wrong::Get(64), Wrong::Get(1 << 20), Wrong::Signal];
    for transport in [SoftTransport::Auto, SoftTransport::NoCma, SoftTransport::Tcp] {
        let ranks = join(3, 3, transport);
        for (wrong, gone) in wrongs.into_iter().flat_map(|wrong| [(wrong, false), (wrong, true)]) {
            refused(&ranks, transport, wrong, gone);
        }
    }
}

/// `gone`: the window was there before; else it is a key that nobody knows.
fn refused(ranks: &[Rank], transport: SoftTransport, wrong: Wrong, gone: bool) {
    const BYTES: usize = 1 << 20;
    let what = format!("{transport:?}, {wrong:?}, gone: {gone}");
    let windows: Vec<_> = ranks.iter().map(|r| r.window(1, BYTES)).collect();
    let signals: Vec<_> = ranks.iter().map(|r| r.window(2, 64)).collect();
    let mut nowhere = ranks[1].window(3, BYTES);
    let [bad, good, far] = [1, 1, 2].map(|_| ranks[0].context());
    let back = ranks[1].context();
    let seq = post(&bad, 1, &put(&windows[0], &nowhere, 8, None)).unwrap();
    wait(&bad, 1, seq);
    match gone {
        true => ranks[1].deregister(&mut nowhere),
        false => nowhere.id = 77,
    }
    let ring = Some((&signals[1], 1));
    // Puts behind a get are carried out, and their signals may come at any time.
    let behind = ring.filter(|_| !matches!(wrong, Wrong::Get(_)));
    let first = match wrong {
        Wrong::Put(len) => post(&bad, 1, &put(&windows[0], &nowhere, len, ring)),
        Wrong::Get(len) => fetch(&bad, 1, &get(&windows[0], &nowhere, len)),
        Wrong::Signal => post(&bad, 1, &put(&windows[0], &windows[1], 8, Some((&nowhere, 1)))),
    }
    .unwrap();
    // What follows is not done: its signal would announce what is not there. Small puts may be complete before.
    let mut last = first;
    until(&format!("the failure, {what}"), || {
        bad.progress().unwrap();
        match post(&bad, 1, &put(&windows[0], &windows[1], 8, behind)) {
            Ok(seq) => last = seq,
            Err(_) => return true,
        }
        bad.test(1, last).is_err()
    });
    let e = bad.flush(1, None).unwrap_err();
    assert_eq!((e.kind(), e.code()), (Kind::RemoteAccess, nccl_plugin_api::NcclResult::REMOTE_ERROR), "{what}: {e}");
    assert!(e.message().contains("rank 1"), "{what}: {e}");
    let later = post(&bad, 1, &put(&windows[0], &windows[1], 8, None));
    assert_eq!(later.unwrap_err().message(), e.message(), "{what}");
    assert!(bad.has_error() && !good.has_error() && !back.has_error(), "{what}");
    assert_eq!(signals[1].word(0).load(Ordering::Acquire), 0, "{what}: a signal announces what is not there");
    let before = signals[1].word(0).load(Ordering::Acquire);
    // The same context to another peer, another one to the same, and the peer's own.
    let others = [(&bad, 0, 2), (&far, 0, 2), (&good, 0, 1), (&back, 1, 0)];
    for (round, (context, from, to)) in (1..).zip(others) {
        windows[from].fill(round);
        let ring = Some((&signals[to], 1));
        let was = signals[to].word(0).load(Ordering::Acquire);
        for len in [8, BYTES] {
            let seq = post(context, to as u32, &put(&windows[from], &windows[to], len, ring)).unwrap();
            wait(context, to as u32, seq);
        }
        until(&format!("the signals, {what}"), || signals[to].word(0).load(Ordering::Acquire) == was + 2);
        assert!(windows[to].holds(round), "{what}");
        windows[from].fill(0);
        let seq = fetch(context, to as u32, &get(&windows[from], &windows[to], BYTES)).unwrap();
        wait(context, to as u32, seq);
        assert!(windows[from].holds(round), "{what}");
    }
    assert_eq!(signals[1].word(0).load(Ordering::Acquire), before + 2, "{what}");
    drop((bad, good, back));
    let [fresh, back] = [0, 1].map(|r: usize| ranks[r].context());
    for (context, from, to) in [(&fresh, 0, 1), (&back, 1, 0)] {
        let seq = post(context, to as u32, &put(&windows[from], &windows[to], BYTES, None)).unwrap();
        wait(context, to as u32, seq);
        assert!(!context.has_error(), "{what}");
    }
    let mut all: Vec<_> = windows.into_iter().zip(0..).chain(signals.into_iter().zip(0..)).collect();
    all.iter_mut().for_each(|(window, rank)| ranks[*rank].deregister(window));
    if !gone {
        nowhere.id = 3;
        ranks[1].deregister(&mut nowhere);
    }
}

/// A context goes while the peer is asked for what it refuses: its place is free once that is said.
#[test]
fn a_context_that_is_gone_keeps_no_place_for_a_refusal() {
    let ranks = join(2, 2, SoftTransport::NoCma);
    let [own, peer] = [0, 1].map(|r: usize| ranks[r].fabric.shared().unwrap());
    let [mine, its] = [0, 1].map(|r: usize| ranks[r].window(1, 64));
    let context = ranks[0].context();
    let seq = fetch(&context, 1, &get(&mine, &its, 64)).unwrap();
    wait(&context, 1, seq);
    let places = own.link(1).places();
    let standing = super::deregistration::Standing::of(peer);
    fetch(&context, 1, &get(&mine, &Window { id: 77, ..its }, 64)).unwrap();
    own.link(1).advance(own);
    drop(context);
    drop(standing);
    until("the place", || {
        own.poll();
        // Those that nothing comes of any more go when others come.
        drop(ranks[0].context());
        own.link(1).places() < places
    });
}
