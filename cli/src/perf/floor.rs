//! This machine's own limits between the same two processes, for ratios.

use super::lane::{Fault, Lane};
use super::latency::Role;
use super::samples::Samples;
use crate::ranks::{Memory, Ranks};
use serde::{Deserialize, Serialize};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Bytes apart: two flags must not share a cache line, nor a prefetched pair of lines.
const APART: usize = 256;

/// What the machine can do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Floor {
    /// Bare flag ping-pong in shared memory: median half round trip, microseconds.
    pub flag_typical: f64,
    /// `process_vm_writev` of the size at hand into the other process, MiB/s; `None` where the kernel forbids it.
    pub copy: Option<f64>,
    /// The same, microseconds a call.
    pub copy_typical: Option<f64>,
    /// A copy of the size inside one process, MiB/s.
    pub memcpy: f64,
}

/// Bytes of shared memory that [`measure`] needs, mapped before ranks are forked.
pub const SHARED_BYTES: usize = 4096;

/// Measures between the first and the second rank; the others only meet. `size` is that of the copies.
pub fn measure(
    shared: &Memory,
    lane: &Lane,
    ranks: &mut Ranks,
    role: Role,
    size: usize,
    time: Duration,
) -> Result<Floor, Fault> {
    let size = size.max(1);
    // The address of this rank's inbox for the one that copies, and its process.
    let own = (std::process::id(), lane.session.data.base() as u64);
    let all = ranks.gather_values("floor: addresses", &own)?;
    if matches!(role, Role::Second(_)) {
        // SAFETY: a plain system call. Yama's ptrace_scope 1 lets only ancestors copy unless the target allows it.
        unsafe { libc::prctl(libc::PR_SET_PTRACER, -1i64 as libc::c_ulong) };
    }
    let mut floor = Floor::default();
    ranks.barrier("floor: flags")?;
    flags(shared, lane, role, time, &mut floor)?;
    ranks.barrier("floor: copies")?;
    if let Role::First(peer) = role {
        let (pid, base) = all[peer as usize];
        let remote = base + lane.inbox(lane.session.rank()) as u64;
        // Memory that was never written is one page of zeros, which is read from the nearest cache.
        // SAFETY: the outbox is inside the window; nobody else uses it now.
        unsafe { lane.session.data.bytes_mut(0, size) }.fill(0x5a);
        if let Some((rate, typical)) = across(lane.session.data.base(), pid, remote, size, time) {
            (floor.copy, floor.copy_typical) = (Some(rate), Some(typical));
        }
        // SAFETY: outbox and inbox are inside the window and apart; nobody else uses them now.
        let (from, to) = unsafe { (lane.session.data.base(), lane.session.data.base().add(lane.inbox(peer))) };
        // Many small copies to a reading of the clock.
        let burst = (65536 / size).max(1);
        floor.memcpy = repeat(size * burst, time, || {
            for _ in 0..burst {
                // SAFETY: as above.
                unsafe { std::ptr::copy_nonoverlapping(from, to, size) };
                std::hint::black_box(to);
            }
            true
        })
        .map_or(0.0, |(rate, _)| rate);
    }
    ranks.barrier("floor: done")?;
    Ok(floor)
}

fn flags(shared: &Memory, lane: &Lane, role: Role, time: Duration, floor: &mut Floor) -> Result<(), Fault> {
    let (ping, pong, stop) = (shared.word(0), shared.word(APART), shared.word(2 * APART));
    match role {
        Role::Idle => {}
        Role::First(_) => {
            let mut samples = Samples::default();
            let base = ping.load(Ordering::Acquire);
            let start = Instant::now();
            let mut clock = start;
            for i in base + 1.. {
                // The last ping carries the news that it is the last.
                let last = i % 1024 == 0 && start.elapsed() >= time;
                if last {
                    stop.store(i, Ordering::Release);
                }
                ping.store(i, Ordering::Release);
                let mut wait = Default::default();
                while pong.load(Ordering::Acquire) != i {
                    lane.pause(&mut wait, || "the other rank's flag".into())?;
                }
                let now = Instant::now();
                samples.record((now - clock).as_nanos() as u64);
                clock = now;
                if last {
                    break;
                }
            }
            floor.flag_typical = samples.summary(2.0).typical;
        }
        Role::Second(_) => {
            for i in pong.load(Ordering::Acquire) + 1.. {
                let mut wait = Default::default();
                while ping.load(Ordering::Acquire) != i {
                    lane.pause(&mut wait, || "the other rank's flag".into())?;
                }
                pong.store(i, Ordering::Release);
                if stop.load(Ordering::Acquire) == i {
                    break;
                }
            }
        }
    }
    Ok(())
}

/// Copies into another process; MiB/s and the median call in microseconds.
fn across(from: *mut u8, pid: u32, remote: u64, size: usize, time: Duration) -> Option<(f64, f64)> {
    repeat(size, time, || {
        let local = libc::iovec { iov_base: from.cast(), iov_len: size };
        let remote = libc::iovec { iov_base: remote as *mut libc::c_void, iov_len: size };
        // SAFETY: reads our own window; the other side is the inbox that the other rank keeps for this one.
        let n = unsafe { libc::process_vm_writev(pid as libc::pid_t, &local, 1, &remote, 1, 0) };
        n == size as isize
    })
}

/// Does it for about `time`; `None` once it fails.
fn repeat(size: usize, time: Duration, mut once: impl FnMut() -> bool) -> Option<(f64, f64)> {
    for _ in 0..3 {
        once().then_some(())?;
    }
    let mut samples = Samples::default();
    let start = Instant::now();
    let mut clock = start;
    let mut n = 0u64;
    while clock - start < time {
        once().then_some(())?;
        let now = Instant::now();
        samples.record((now - clock).as_nanos() as u64);
        clock = now;
        n += 1;
    }
    let rate = n as f64 / (clock - start).as_secs_f64() * size as f64 / (1u64 << 20) as f64;
    Some((rate, samples.summary(1.0).typical))
}
