//! Puts that are complete only when they are visible at the peer, so that whoever signals it next tells of them, too.

use super::deregistration::Standing;
use super::*;

const WAYS: [SoftTransport; 3] = [SoftTransport::Auto, SoftTransport::NoCma, SoftTransport::Tcp];

/// As many ranks, whose contexts confirm or do not.
fn ranks(n: u32, way: SoftTransport, confirms: bool) -> Vec<Rank> {
    let ranks = join(n, n, way);
    if confirms {
        ranks.iter().for_each(|rank| rank.fabric.confirm_puts());
    }
    ranks
}

/// The peer's threads stand: what it was sent lies in its ring, or in its socket.
#[test]
fn a_put_that_nobody_has_read_is_not_complete() {
    for (way, confirms, bytes) in WAYS.iter().flat_map(|&way| [(way, true, 8), (way, true, 4096), (way, false, 8)]) {
        let ranks = ranks(2, way, confirms);
        let (mine, its) = (ranks[0].window(1, 4096), ranks[1].window(2, 4096));
        let (context, _other) = (ranks[0].context(), ranks[1].context());
        // SAFETY: windows are never freed.
        let post = |bytes| unsafe { context.put(1, &put(&mine, &its, bytes, None)) }.unwrap();
        wait(&context, 1, post(8));
        mine.fill(7);
        let standing = Standing::of(ranks[1].fabric.shared().unwrap());
        let seq = post(bytes);
        if !confirms {
            wait(&context, 1, seq);
            continue;
        }
        let end = Instant::now() + Duration::from_millis(30);
        while Instant::now() < end {
            assert!(!context.test(1, seq).unwrap(), "{way:?}, {bytes} bytes");
        }
        drop(standing);
        wait(&context, 1, seq);
        assert!((0..bytes / 8).all(|i| its.word(i).load(Ordering::Relaxed) == 7), "{way:?}, {bytes} bytes");
    }
}

/// Puts of all sizes, many at a time, with signals and without, by all ways that bytes go: what is complete is there,
/// and what is not is on its way.
#[test]
fn what_is_complete_is_in_place() {
    const AREA: usize = 600_000;
    const SIZES: [usize; 6] = [8, 304, 8192, 40_000, 300_000, AREA];
    for way in WAYS {
        let ranks = ranks(2, way, true);
        let areas: Vec<_> = (0..24).map(|n| (ranks[0].window(2 * n, AREA), ranks[1].window(2 * n + 1, AREA))).collect();
        let word = ranks[1].window(100, 8);
        let (context, _other) = (ranks[0].context(), ranks[1].context());
        for round in 1..=3u64 {
            let mut posted = Vec::new();
            for (n, (from, to)) in areas.iter().enumerate() {
                let len = SIZES[(n + round as usize) % SIZES.len()];
                (0..len / 8).for_each(|i| from.word(i).store(round << 8 | n as u64, Ordering::Relaxed));
                let signal = (n % 3 == 0).then_some((&word, 1));
                // SAFETY: windows are never freed.
                posted.push((unsafe { context.put(1, &put(from, to, len, signal)) }.unwrap(), len));
            }
            for (n, (seq, len)) in posted.into_iter().enumerate() {
                wait(&context, 1, seq);
                let (value, to) = (round << 8 | n as u64, &areas[n].1);
                let is_there = |i| to.word(i).load(Ordering::Relaxed) == value;
                assert!((0..len / 8).all(is_there), "{way:?}: put {n} of round {round}, {len} bytes");
            }
        }
        assert_eq!(word.word(0).load(Ordering::Relaxed), 3 * 8, "{way:?}");
        until("the end of all", || !ranks[0].fabric.shared().unwrap().link(1).has_backlog());
    }
}

/// What one rank has put, and knows to be complete, another one's signal tells of.
#[test]
fn a_signal_tells_of_what_others_have_completed() {
    for way in WAYS {
        let ranks = ranks(3, way, true);
        let (data, word) = (ranks[0].window(1, 64), ranks[0].window(2, 8));
        let sources = [1, 2].map(|r: usize| ranks[r].window(3, 64));
        let _own = ranks[0].context();
        let contexts = [1, 2].map(|r: usize| ranks[r].context());
        for round in 1..=200 {
            sources[0].fill(round);
            // SAFETY: windows are never freed.
            let seq = unsafe { contexts[0].put(0, &put(&sources[0], &data, 64, None)) }.unwrap();
            wait(&contexts[0], 0, seq);
            // SAFETY: as above.
            unsafe { contexts[1].put(0, &put(&sources[1], &data, 0, Some((&word, 1)))) }.unwrap();
            until("the signal", || {
                contexts[1].progress().unwrap();
                word.word(0).load(Ordering::Acquire) == round
            });
            assert!(data.holds(round), "{way:?}: round {round}");
        }
    }
}

/// The peer closes before it was asked, or has answered: what it was sent is complete.
#[test]
fn a_peer_that_closes_in_good_order_fails_nothing() {
    let ranks = ranks(2, SoftTransport::Tcp, true);
    let (mine, its) = (ranks[0].window(1, 64), ranks[1].window(2, 64));
    let (context, other) = (ranks[0].context(), ranks[1].context());
    // SAFETY: windows are never freed.
    let post = || unsafe { context.put(1, &put(&mine, &its, 64, None)) }.unwrap();
    wait(&context, 1, post());
    let standing = Standing::of(ranks[1].fabric.shared().unwrap());
    let seq = post();
    ranks[1].fabric.shared().unwrap().request_stop();
    drop((other, standing));
    ranks[1].fabric.close();
    wait(&context, 1, seq);
    assert!(!context.has_error());
}
