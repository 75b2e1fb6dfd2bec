//! Copies within a GPU by way of pinned memory, with a stream for each direction.

use crate::harness::traffic::*;
use crate::harness::*;
use crate::support::common::*;
use std::time::Duration;

const MIB: usize = 1 << 20;

/// How often a stream has been told to wait for another one.
fn waits(fake: &Fake) -> u64 {
    fake.calls("cuStreamWaitEvent")
}

/// Two ranks of one GPU without the copy kernel; each has so many bytes, rank 0's in a pattern, and a signal.
fn pair(fake: &Fake, bytes: usize, run: impl Fn(&Rank, &Mem, &GpuWindow) + Sync) {
    fake.set_issue("kernel=0");
    let flags = Signals::NeverReset.set_up(fake);
    job(2, 1, |r| {
        let _context = fake.enter(0);
        let memory = Mem::on_gpu(fake, r, 0, bytes);
        let sig = fake.signals(r, 0, 1, flags);
        if r.rank == 0 {
            memory.bytes(0, bytes).iter_mut().enumerate().for_each(|(i, b)| *b = pattern(i));
        }
        r.job.barrier.wait();
        run(r, &memory, &sig);
        r.job.barrier.wait();
    });
    fake.check();
}

fn pattern(i: usize) -> u8 {
    (i / 8 % 251) as u8 + 1
}

/// Several pieces go by two streams, which wait for each other once a piece. Only a copy's beginning waits for what was
/// started before, so that the way out is never empty; one piece alone is not worth a second stream.
#[test]
fn pieces_go_out_while_others_come_back() {
    let fake = Fake::take();
    pair(&fake, 12 * MIB, |r, memory, sig| {
        let mut signals = 0;
        for (bytes, times) in [(MIB, 0), (3 * MIB, 1 + 3), (12 * MIB, 1 + 12), (2 * MIB + 100_000, 1 + 3)] {
            signals += 1;
            if r.rank == 0 {
                let before = waits(&fake);
                r.wait(r.put(0, (memory.window(), 0), bytes, (memory.window(), 0), 1, Some((sig.as_window(), 0, 1))));
                assert_eq!(waits(&fake) - before, times, "{bytes} bytes");
            } else {
                sig.wait(r, 0, signals);
                let there = memory.bytes(0, 12 * MIB);
                assert!((0..bytes).all(|i| there[i] == pattern(i)), "{bytes} bytes");
                there.fill(0);
            }
            r.job.barrier.wait();
        }
    });
}

/// Nothing comes back before it is out, and the signal last.
#[test]
fn what_comes_back_waits_for_what_goes_out() {
    let fake = Fake::take();
    pair(&fake, 3 * MIB, |r, memory, sig| {
        if r.rank == 0 {
            fake.hold(MIB);
            let put = r.put(0, (memory.window(), 0), 3 * MIB, (memory.window(), 0), 1, Some((sig.as_window(), 0, 1)));
            r.job.barrier.wait();
            r.job.barrier.wait();
            fake.hold(0);
            r.wait(put);
        } else {
            r.job.barrier.wait();
            std::thread::sleep(Duration::from_millis(30));
            assert_eq!((sig.get(0), memory.bytes(0, 3 * MIB).iter().filter(|&&b| b != 0).count()), (0, 0));
            r.job.barrier.wait();
            sig.wait(r, 0, 1);
            assert!((0..3 * MIB).all(|i| memory.bytes(0, 3 * MIB)[i] == pattern(i)));
        }
    });
}
