//! Contexts of one rank, each with a thread of its own, towards the same peer.

use super::*;

const CONTEXTS: usize = 4;
const AREA: usize = 128 << 10;

/// Puts of all sizes, each with a signal: whoever sees the signal sees the bytes, whatever other contexts do meanwhile.
fn side_by_side(transport: SoftTransport) {
    let ranks = join(2, 2, transport);
    let areas: Vec<_> = (0..CONTEXTS as u32)
        .map(|c| (ranks[0].window(3 * c, AREA), ranks[1].window(3 * c + 1, AREA), ranks[1].window(3 * c + 2, 8)))
        .collect();
    let contexts: Vec<_> = areas.iter().map(|_| ranks[0].context()).collect();
    std::thread::scope(|scope| {
        for (n, (context, (from, to, word))) in contexts.iter().zip(&areas).enumerate() {
            scope.spawn(move || {
                for turn in 1..=60u64 {
                    let len = [8, 4096, 4104, AREA][(turn as usize + n) % 4];
                    let value = turn << 8 | n as u64;
                    (0..len / 8).for_each(|i| from.word(i).store(value, Ordering::Relaxed));
                    // SAFETY: windows are never freed.
                    let seq = unsafe { context.put(1, &put(from, to, len, Some((word, 1)))) }.unwrap();
                    until("a signal", || {
                        context.progress().unwrap();
                        word.word(0).load(Ordering::Acquire) == turn
                    });
                    assert!((0..len / 8).all(|i| to.word(i).load(Ordering::Relaxed) == value), "turn {turn}");
                    wait(context, 1, seq);
                }
            });
        }
    });
}

#[test]
fn what_several_contexts_put_at_once_comes_before_its_signals() {
    [SoftTransport::Auto, SoftTransport::NoCma, SoftTransport::Tcp].into_iter().for_each(side_by_side);
}

/// A thread that has one context, and stands, delays nobody who has another one.
#[test]
fn a_lane_that_somebody_has_delays_no_other() {
    let ranks = join(2, 2, SoftTransport::Auto);
    let (from, to) = (ranks[0].window(0, 64), ranks[1].window(1, 64));
    let contexts = [ranks[0].context(), ranks[0].context()];
    for context in &contexts {
        // SAFETY: windows are never freed.
        let seq = unsafe { context.put(1, &put(&from, &to, 8, None)) }.unwrap();
        wait(context, 1, seq);
    }
    let held = contexts[0].hold(1);
    from.fill(7);
    // SAFETY: windows are never freed.
    let seq = unsafe { contexts[1].put(1, &put(&from, &to, 64, None)) }.unwrap();
    wait(&contexts[1], 1, seq);
    until("the bytes", || to.holds(7));
    drop(held);
}
