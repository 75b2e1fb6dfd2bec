//! Gets that the peer answers through the ring: many of a lane at once, done in their order, each with its own bytes.

use super::batches::{self, configs};
use super::deregistration::Standing;
use super::*;

const PIECE: usize = 64;
const PIECES: usize = 128;
/// Asked for of one lane at once.
const AT_ONCE: u32 = 32;

/// Two ranks without copies by the kernel, a window of each, and a context of the first one that has met the second.
fn pair() -> (Vec<Rank>, [Window; 2], Context) {
    let ranks = join_with(2, configs(2, SoftTransport::NoCma));
    let windows = [0, 1].map(|r: usize| ranks[r].window(1, PIECE * PIECES));
    let context = ranks[0].context();
    let last = post(&context, &[piece(&windows, 0)]);
    wait(&context, 1, last);
    (ranks, windows, context)
}

/// A get of a piece of the second rank's window for the same place of the first one's.
fn piece([mine, its]: &[Window; 2], nth: usize) -> Op {
    let at = (nth * PIECE) as u64;
    let whole = get(mine, its, PIECE);
    Op::Get(Get { local: whole.local + at, remote: whole.remote + at, ..whole })
}

/// Gets of so many pieces.
fn pieces(windows: &[Window; 2], n: usize) -> Vec<Op> {
    (0..n).map(|nth| piece(windows, nth)).collect()
}

/// Posts all of them. Returns the last one's number.
fn post(context: &Context, ops: &[Op]) -> Seq {
    let posted = batches::post(context, 1, ops);
    assert_eq!(posted.taken, ops.len());
    posted.last
}

fn paint(window: &Window, round: u64) {
    (0..PIECE * PIECES / 8).for_each(|i| window.word(i).store(round << 32 | i as u64, Ordering::Relaxed));
}

fn check(window: &Window, round: u64) {
    let wrong = (0..PIECE * PIECES / 8).find(|&i| window.word(i).load(Ordering::Relaxed) != round << 32 | i as u64);
    assert_eq!(wrong, None, "round {round}");
}

#[test]
fn the_peer_is_asked_for_many_at_once() {
    let (ranks, windows, context) = pair();
    let [own, peer] = [0, 1].map(|r: usize| ranks[r].fabric.shared().unwrap());
    let all = pieces(&windows, PIECES);
    for round in 1..20 {
        paint(&windows[1], round);
        let standing = Standing::of(peer);
        let last = post(&context, &all);
        own.link(1).advance(own);
        assert_eq!(own.link(1).asked(), AT_ONCE);
        drop(standing);
        wait(&context, 1, last);
        assert_eq!(own.link(1).asked(), 0);
        check(&windows[0], round);
    }
}

/// Puts between them: a get behind a put has what that brought, one in front of it what was there before.
#[test]
fn what_lies_between_them_keeps_its_place() {
    let (ranks, windows, context) = pair();
    let [mine, its] = &windows;
    let source = ranks[0].window(2, 8 * 64);
    (0..64).for_each(|i| source.word(i).store(100 + i as u64, Ordering::Relaxed));
    for round in 0..50 {
        let mut ops = Vec::new();
        let mut expected = Vec::new();
        for i in 0..64 {
            let whole = put(&source, its, 8, None);
            ops.push(Op::Put(Put { local: whole.local + 8 * i, ..whole }));
            // Some alone, some together.
            for _ in 0..(i + round) % 4 {
                let to = 8 * expected.len() as u64;
                let whole = get(mine, its, 8);
                ops.push(Op::Get(Get { local: whole.local + to, ..whole }));
                expected.push(100 + i);
            }
        }
        let last = post(&context, &ops);
        wait(&context, 1, last);
        for (i, value) in expected.into_iter().enumerate() {
            assert_eq!(mine.word(i).load(Ordering::Relaxed), value, "round {round}, get {i}");
        }
    }
}

/// A context goes while the peer owes it many answers: they go nowhere, and its place is free once all have come.
#[test]
fn answers_for_a_context_that_is_gone_go_nowhere() {
    let (ranks, windows, context) = pair();
    let [own, peer] = [0, 1].map(|r: usize| ranks[r].fabric.shared().unwrap());
    let all = pieces(&windows, PIECES);
    paint(&windows[0], 1);
    paint(&windows[1], 2);
    let places = own.link(1).places();
    let standing = Standing::of(peer);
    post(&context, &all);
    own.link(1).advance(own);
    assert_eq!(own.link(1).asked(), AT_ONCE);
    drop(context);
    drop(standing);
    let next = ranks[0].context();
    let last = post(&next, &[piece(&windows, 3)]);
    wait(&next, 1, last);
    until("the place", || {
        own.poll();
        drop(ranks[0].context());
        own.link(1).places() <= places
    });
    windows[1].word(8 * 3).store((1 << 32) | (8 * 3), Ordering::Relaxed);
    let last = post(&next, &[piece(&windows, 3)]);
    wait(&next, 1, last);
    let wrong = (0..PIECE * PIECES / 8).filter(|&i| windows[0].word(i).load(Ordering::Relaxed) >> 32 != 1);
    let wrong: Vec<_> = wrong.collect();
    assert_eq!(wrong, (8 * 3 + 1..8 * 4).collect::<Vec<_>>(), "words of others than the last get");
}

/// One of many is refused: those in front of it are done, the context fails with the sentence, and another one goes on.
#[test]
fn a_refusal_among_many_fails_its_context() {
    let (ranks, windows, context) = pair();
    let [own, peer] = [0, 1].map(|r: usize| ranks[r].fabric.shared().unwrap());
    paint(&windows[1], 1);
    let mut all = pieces(&windows, 40);
    if let Op::Get(get) = &mut all[7] {
        get.rkey = 77;
    }
    let standing = Standing::of(peer);
    let last = post(&context, &all);
    own.link(1).advance(own);
    assert_eq!(own.link(1).asked(), AT_ONCE);
    drop(standing);
    let mut error = None;
    until("the refusal", || match context.test(1, last) {
        Ok(done) => done,
        Err(why) => error.insert(why).message().contains("77"),
    });
    assert!(error.is_some(), "what was refused is done");
    assert!((0..7 * PIECE / 8).all(|i| windows[0].word(i).load(Ordering::Relaxed) == 1 << 32 | i as u64));
    assert_eq!(own.link(1).asked(), 0);
    let next = ranks[0].context();
    let all = pieces(&windows, PIECES);
    let last = post(&next, &all);
    wait(&next, 1, last);
    check(&windows[0], 1);
}
