//! Ping-pong, and one operation at a time until it is done.

use super::args::{Op, Test};
use super::lane::{Fault, Lane};
use super::samples::Samples;
use std::sync::atomic::{fence, AtomicU8, Ordering};
use std::time::{Duration, Instant};

/// What a rank does in a measurement between two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Measures.
    First(u32),
    /// Answers.
    Second(u32),
    /// Waits elsewhere.
    Idle,
}

/// Runs `n` rounds on the lane; the first rank records into `samples`. Clears and fills before, verifies after. `meet`
/// waits for all ranks once buffers are ready.
#[allow(clippy::too_many_arguments)]
pub fn run(
    lane: &Lane,
    role: Role,
    test: Test,
    op: Op,
    size: usize,
    n: u64,
    epoch: u64,
    samples: &mut Samples,
    meet: &mut dyn FnMut() -> Result<(), Fault>,
) -> Result<Duration, Fault> {
    if let Some(queue) = &lane.queue {
        return queue.latency(lane, role, test, op, size, n, epoch, samples, meet);
    }
    let (peer, first) = match role {
        Role::Idle => return meet().map(|()| Duration::ZERO),
        Role::First(peer) => (peer, true),
        Role::Second(peer) => (peer, false),
    };
    lane.prepare(peer, size, epoch);
    meet()?;
    let start = Instant::now();
    match (test, op) {
        (Test::Latency, Op::Put) => bounce_by_byte(lane, peer, first, size, n, samples)?,
        (Test::Latency, Op::PutSignal | Op::Signal) => bounce_by_signal(lane, peer, first, op, size, n, samples)?,
        _ if first => one_at_a_time(lane, peer, op, size, n, samples)?,
        _ => {}
    }
    let took = start.elapsed();
    lane.settle(peer)?;
    let both_write = test == Test::Latency && op != Op::Get;
    let received = match op {
        Op::Signal => 0,
        // The last byte carries the round's number.
        Op::Put if both_write => size - 1,
        Op::Get => size * usize::from(first),
        _ => size * usize::from(both_write || !first),
    };
    lane.verify(peer, 0, received, epoch)?;
    if both_write && op == Op::Put && last_byte(lane, peer, size).load(Ordering::Acquire) != tag(n - 1) {
        return Err(format!("wrong data: the last byte from rank {peer} is not that of the last round").into());
    }
    if op != Op::Put && op != Op::Get {
        let word = lane.ping_word(peer);
        if !both_write && !first {
            lane.expect(word, n);
        }
        lane.verify_signal(word, peer)?;
    }
    Ok(took)
}

/// Each waits for the other's signal, then sends its own.
fn bounce_by_signal(
    lane: &Lane,
    peer: u32,
    first: bool,
    op: Op,
    size: usize,
    n: u64,
    samples: &mut Samples,
) -> Result<(), Fault> {
    let there = lane.ping_word(lane.session.rank());
    let here = lane.ping_word(peer);
    let mut clock = Instant::now();
    for i in 0..n {
        let context = i as usize % lane.contexts;
        let value = lane.expect(here, 1);
        let wait = |request| {
            let now = || lane.session.signals.signal(here);
            let what =
                || format!("round {i} of {n}: signal word {here} is {} and should be {value}, from rank {peer}", now());
            lane.until(request, peer, || now() >= value, what)
        };
        if first {
            let request = lane.start(op, context, peer, 0, size, there, false)?;
            if !wait(request)? {
                lane.finish(request, peer, op.label())?;
            }
            let now = Instant::now();
            samples.record((now - clock).as_nanos() as u64);
            clock = now;
        } else {
            wait(std::ptr::null_mut())?;
            let request = lane.start(op, context, peer, 0, size, there, false)?;
            lane.finish(request, peer, op.label())?;
        }
    }
    Ok(())
}

/// What the last byte is in round `i`: never 0, never the same twice in a row.
fn tag(i: u64) -> u8 {
    (i % 255) as u8 + 1
}

fn last_byte(lane: &Lane, peer: u32, size: usize) -> &AtomicU8 {
    // SAFETY: inside the inbox: `size` is at least 1 and at most a slot; atomic access to memory that lives as long
    // as the lane.
    unsafe { AtomicU8::from_ptr(lane.session.data.base().add(lane.inbox(peer) + size - 1)) }
}

/// Each waits for the other's last byte, as perftest's write test does, then puts its own.
fn bounce_by_byte(
    lane: &Lane,
    peer: u32,
    first: bool,
    size: usize,
    n: u64,
    samples: &mut Samples,
) -> Result<(), Fault> {
    let arrived = last_byte(lane, peer, size);
    // SAFETY: inside the outbox, as above.
    let outgoing = unsafe { AtomicU8::from_ptr(lane.session.data.base().add(size - 1)) };
    let mut clock = Instant::now();
    for i in 0..n {
        let context = i as usize % lane.contexts;
        let wait = |request| {
            let what = || format!("round {i} of {n}: last byte of a put of {size} bytes from rank {peer}");
            lane.until(request, peer, || arrived.load(Ordering::Acquire) == tag(i), what)
        };
        let send = || {
            outgoing.store(tag(i), Ordering::Relaxed);
            fence(Ordering::Release);
            lane.start(Op::Put, context, peer, 0, size, 0, false)
        };
        if first {
            let request = send()?;
            if !wait(request)? {
                lane.finish(request, peer, "put")?;
            }
            let now = Instant::now();
            samples.record((now - clock).as_nanos() as u64);
            clock = now;
        } else {
            wait(std::ptr::null_mut())?;
            lane.finish(send()?, peer, "put")?;
        }
    }
    Ok(())
}

/// Starts one, waits until it is done; a get also flushes.
fn one_at_a_time(lane: &Lane, peer: u32, op: Op, size: usize, n: u64, samples: &mut Samples) -> Result<(), Fault> {
    let word = lane.ping_word(lane.session.rank());
    let mut clock = Instant::now();
    for i in 0..n {
        let context = i as usize % lane.contexts;
        let request = lane.start(op, context, peer, 0, size, word, false)?;
        lane.finish(request, peer, op.label())?;
        if op == Op::Get {
            lane.finish(lane.start_flush(context, peer)?, peer, "flush")?;
        }
        let now = Instant::now();
        samples.record((now - clock).as_nanos() as u64);
        clock = now;
    }
    Ok(())
}
