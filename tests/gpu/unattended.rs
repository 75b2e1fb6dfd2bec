//! A caller posts and does not call again: its rank's helper thread sees to the rest. Through the RMA v16 table, on the
//! fake CUDA driver.

use crate::harness::*;
use crate::support::common::*;
use crate::support::logged::{collect, lines, listen};
use nccl_plugin_api::*;
use std::time::Duration;

const SIGNALS: u64 = MR_FLAG_FORCE_SO | MR_FLAG_SIGNALS_NEVER_RESET;
/// Puts without a poll among them, more than go to the driver at once.
const PUTS: u64 = 40;
/// What each piece of the GPU's work takes, µs: longer than all calls together.
const SLOW: u64 = 20_000;
/// More than enough for a helper thread to find nothing to do and to go to sleep.
const TO_BED: Duration = Duration::from_millis(100);

/// Rank 0 puts to rank 1 out of GPU memory and makes no call until all has arrived.
fn posted_and_left(fake: &Fake, words: usize) {
    job(2, 1, |r| {
        let gpu = r.rank as i32;
        let _context = fake.enter(gpu);
        let src = fake.window(r, gpu, words, 0);
        let dst = fake.window(r, gpu, PUTS as usize * words, 0);
        let sig = fake.signals(r, gpu, 1, SIGNALS);
        (0..words).for_each(|i| src.set(i, 7 + i as u64));
        // Each finds its way to the other.
        let first = r.put(0, (src.as_window(), 0), 8, (dst.as_window(), 0), 1 - r.rank, Some((sig.as_window(), 0, 1)));
        r.wait(first);
        sig.wait(r, 0, 1);
        r.job.barrier.wait();
        fake.settings(false, SLOW);
        if r.rank == 0 {
            std::thread::sleep(TO_BED);
            let put = |i: u64| {
                let to = (dst.as_window(), i * words as u64 * 8);
                r.put(0, (src.as_window(), 0), words * 8, to, 1, Some((sig.as_window(), 0, 1)))
            };
            let all: Vec<_> = (0..PUTS).map(put).collect();
            r.job.barrier.wait();
            all.into_iter().for_each(|q| r.wait(q));
        } else {
            sig.wait(r, 0, 1 + PUTS);
            (0..PUTS as usize * words).for_each(|i| assert_eq!(dst.get(i), 7 + (i % words) as u64, "word {i}"));
            r.job.barrier.wait();
        }
        r.job.barrier.wait();
    });
    fake.check();
}

#[test]
fn within_a_process() {
    let fake = Fake::take();
    fake.set_issue("kernel=0");
    posted_and_left(&fake, 8);
}

/// Small ones and large ones, served by callers or by threads of their own.
#[test]
fn over_tcp() {
    for (words, threads) in [(8, 0), (16 << 10, 0), (8, 2), (16 << 10, 2)] {
        let fake = Fake::take();
        fake.set_issue("kernel=0");
        fake.set_transport("tcp");
        std::env::set_var("OXYGIN_TCP_STRIPES", "2");
        std::env::set_var("OXYGIN_TCP_THREADS", threads.to_string());
        posted_and_left(&fake, words);
    }
}

/// A rank's GPU stands while the rank makes no call: whoever reaches for it for the first time is answered.
#[test]
fn a_new_peer_is_answered_while_a_gpu_stands() {
    const BYTES: usize = 16 << 10;
    let fake = Fake::take();
    fake.set_issue("kernel=0");
    fake.set_transport("staged");
    collect();
    job(3, 1, |r| {
        let gpu = r.rank as i32;
        let _context = fake.enter(gpu);
        let host = r.window(BYTES / 8, 0);
        let dst = fake.window(r, gpu, BYTES / 8, 0);
        let sig = r.window(1, MR_FLAG_FORCE_SO);
        r.job.barrier.wait();
        if r.rank == 0 {
            listen();
            fake.hold(BYTES);
            r.wait(r.put(0, (&host, 0), BYTES, (dst.as_window(), 0), 1, Some((&sig, 0, 1))));
            std::thread::sleep(TO_BED);
        }
        r.job.barrier.wait();
        if r.rank == 2 {
            r.wait(r.put(0, (&host, 0), 8, (&host, 0), 1, None));
            fake.hold(0);
            let unanswered = lines().iter().find(|(_, line)| line.contains("does not answer")).cloned();
            assert_eq!(unanswered, None);
        }
        r.job.barrier.wait();
        if r.rank == 1 {
            r.wait_signal(&sig, 0, 1);
        }
        r.job.barrier.wait();
    });
    fake.check();
}

/// A rank makes no call while another gets from its GPU by way of host memory: each get waits for a copy, none for
/// more.
#[test]
fn gets_are_answered_as_soon_as_their_bytes_are_there() {
    const GETS: usize = 2000;
    let fake = Fake::take();
    fake.set_issue("kernel=0");
    fake.set_transport("staged");
    job(2, 1, |r| {
        let gpu = r.rank as i32;
        let _context = fake.enter(gpu);
        let src = fake.window(r, gpu, 1, 0);
        let host = r.window(1, 0);
        src.set(0, 7);
        r.job.barrier.wait();
        if r.rank == 0 {
            // Longer than the other's helper thread stays up for nothing.
            fake.settings(false, 200);
            let end = std::time::Instant::now() + Duration::from_secs(60);
            for n in 0..GETS {
                r.wait(r.get(0, (src.as_window(), 0), 8, (&host, 0), 1));
                assert!(std::time::Instant::now() < end, "{n} gets in 60 s");
            }
            assert_eq!(host.words[0], 7);
        }
        r.job.barrier.wait();
    });
    fake.check();
}
