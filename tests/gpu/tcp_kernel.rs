//! Short puts over TCP between GPU windows go by the copy kernels at both ends while these run, and nothing else about
//! them changes: through the RMA v16 table, on the fake CUDA driver.

use crate::harness::tcp::apart;
use crate::harness::*;
use crate::support::common::*;
use nccl_plugin_api::*;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Words of the windows, and of the longest put that a copy kernel moves.
const WORDS: usize = 2064;
const LONGEST: usize = 2048;
/// Puts at once that a copy kernel is worth a launch for.
const MANY: usize = 16;

/// A rank's windows on its GPU.
struct Ends {
    src: GpuWindow,
    dst: GpuWindow,
    /// Where nobody looks.
    aside: GpuWindow,
    sig: GpuWindow,
}

impl Ends {
    fn on(fake: &Fake, r: &Rank, flags: u64) -> Self {
        let gpu = r.rank as i32;
        let [src, dst, aside] = [(), (), ()].map(|()| fake.window(r, gpu, WORDS, 0));
        Self { src, dst, aside, sig: fake.signals(r, gpu, 1, flags) }
    }

    /// Many at once, for which a copy kernel is launched.
    fn call_copy_kernel(&self, r: &Rank) {
        let put = |_| r.put(0, (self.src.as_window(), 0), 64, (self.aside.as_window(), 0), 1 - r.rank, None);
        let all: Vec<_> = (0..MANY).map(put).collect();
        all.into_iter().for_each(|request| r.wait(request));
    }

    /// A round trip of `bytes` from byte `shift` on: the source says which one, and the rest of the target is as it
    /// was.
    fn round_trip(&self, r: &Rank, round: u64, bytes: usize, shift: u64) {
        (0..WORDS).for_each(|i| self.src.set(i, round << 16 | i as u64));
        let put = || {
            let signal = Some((self.sig.as_window(), 0, 1));
            r.put(0, (self.src.as_window(), shift), bytes, (self.dst.as_window(), shift), 1 - r.rank, signal)
        };
        let request = (r.rank == 0).then(put);
        self.sig.wait(r, 0, round);
        let bytes_of =
            |words: &dyn Fn(usize) -> u64| (0..WORDS).flat_map(|i| words(i).to_le_bytes()).collect::<Vec<_>>();
        let (sent, found) = (bytes_of(&|i| self.src.get(i)), bytes_of(&|i| self.dst.get(i)));
        let (from, to) = (shift as usize, shift as usize + bytes);
        assert_eq!(found[from..to], sent[from..to], "round {round}, {bytes} bytes from {shift} on");
        assert!(found[..from].iter().chain(&found[to..]).all(|&b| b == 0), "round {round}: more than {bytes} bytes");
        (0..WORDS).for_each(|i| self.dst.set(i, 0));
        r.wait(request.unwrap_or_else(put));
    }
}

#[test]
fn short_puts_go_by_the_copy_kernels_at_both_ends() {
    for threads in [0, 2] {
        let fake = apart(1, threads);
        let flags = Signals::NeverReset.set_up(&fake);
        let done = AtomicBool::new(false);
        job(2, 1, |r| {
            let _context = fake.enter(r.rank as i32);
            let ends = Ends::on(&fake, r, flags);
            r.job.barrier.wait();
            let mut round = 0;
            // Not in words, those go by the streams; in between all the same.
            for (bytes, shift) in [(4, 4), (12, 4), (100, 0), (LONGEST * 8, 8), (7, 1), (4096, 2), (LONGEST * 8 + 4, 0)]
            {
                for _ in 0..10 {
                    round += 1;
                    ends.round_trip(r, round, bytes, shift);
                }
            }
            for bytes in [64, LONGEST * 8] {
                let by_copies = |_: ()| fake.calls("cuMemcpyBatchAsync") + fake.calls("cuMemcpyAsync");
                const ROUNDS: u64 = 50;
                let end = Instant::now() + Duration::from_secs(60);
                // On a busy machine copy kernels come late, and the copies of some rounds go otherwise.
                while !done.load(Ordering::SeqCst) {
                    assert!(Instant::now() < end, "no {ROUNDS} round trips by copy kernels in 60 s");
                    r.job.barrier.wait();
                    let (commands, copies) = (fake.commands(), by_copies(()));
                    for n in 0..ROUNDS {
                        round += 1;
                        if n % 8 == 0 {
                            ends.call_copy_kernel(r);
                        }
                        ends.round_trip(r, round, bytes, 0);
                    }
                    r.job.barrier.wait();
                    // Each put is fetched by one command and brought to its place by another.
                    let puts = 2 * (ROUNDS + ROUNDS.div_ceil(8) * MANY as u64);
                    let are_by_kernels = fake.commands() - commands > puts && by_copies(()) - copies < puts;
                    if r.rank == 0 {
                        done.store(are_by_kernels, Ordering::SeqCst);
                    }
                    r.job.barrier.wait();
                }
                r.job.barrier.wait();
                done.store(false, Ordering::SeqCst);
                r.job.barrier.wait();
            }
        });
        fake.check();
    }
}

/// Many unfinished ones of several contexts, more than there are buffers, with copy kernels that end at any moment.
#[test]
fn floods_arrive_whenever_copy_kernels_end() {
    flood(apart(1, 0));
}

/// The same with the helper thread at what arrives, the callers at what they fetch and threads for bulk at neither.
#[test]
fn floods_arrive_with_the_helper_thread_beside_the_callers() {
    let fake = apart(1, 2);
    fake.set_issue("helper=2");
    flood(fake);
}

fn flood(fake: Fake) {
    const CONTEXTS: usize = 4;
    const EACH: usize = 500;
    let flags = Signals::NeverReset.set_up(&fake);
    fake.kernel_limits(0, 40);
    job(2, CONTEXTS as i32, |r| {
        let gpu = r.rank as i32;
        let _context = fake.enter(gpu);
        let [src, dst] = [(), ()].map(|()| fake.window(r, gpu, CONTEXTS * EACH * 4, 0));
        let sig = fake.signals(r, gpu, CONTEXTS, flags);
        let word = |rank: usize, i: usize| (rank as u64 + 1) << 32 | i as u64;
        (0..CONTEXTS * EACH * 4).for_each(|i| src.set(i, word(r.rank, i)));
        r.job.barrier.wait();
        as_the_proxy_does(r, CONTEXTS, EACH, 64, |c, n| {
            let at = ((c * EACH + n as usize) * 32) as u64;
            let bytes = [32, 4, 20][n as usize % 3];
            let signal = Some((sig.as_window(), 8 * c as u64, 1));
            r.put(c as i32, (src.as_window(), at), bytes, (dst.as_window(), at), 1 - r.rank, signal)
        });
        for c in 0..CONTEXTS {
            sig.wait(r, c, EACH as u64);
            for n in 0..EACH {
                let i = (c * EACH + n) * 4;
                let wanted = [word(1 - r.rank, i), word(1 - r.rank, i) & 0xffff_ffff][usize::from(n % 3 == 1)];
                assert_eq!(dst.get(i), wanted, "put {n} of context {c}");
            }
        }
        r.job.barrier.wait();
    });
    fake.kernel_limits(0, 0);
    fake.check();
}

/// A context goes while the copy kernel reads its memory: once it is gone the memory may go, too.
#[test]
fn a_context_that_goes_waits_for_the_copy_kernel() {
    let fake = apart(1, 0);
    let flags = Signals::NeverReset.set_up(&fake);
    let released = AtomicBool::new(false);
    job(2, 1, |r| {
        let _context = fake.enter(r.rank as i32);
        let ends = Ends::on(&fake, r, flags);
        let mut config = rma_v14::ConfigV14 { n_contexts: 1, traffic_class: -1, rank_stride: 1 };
        let mut ctx = null_mut();
        // SAFETY: pointers to locals; a collective call.
        ok(unsafe { T.create_context.unwrap()(r.coll, &mut config, &mut ctx) });
        let other = Rank { job: r.job.clone(), rank: r.rank, instance: r.instance, coll: r.coll, ctx };
        r.job.barrier.wait();
        hold_up_a_fetch(&fake, r, &ends, &other);
        let round = ROUNDS_BEFORE.load(Ordering::SeqCst);
        if r.rank == 1 {
            std::thread::sleep(Duration::from_millis(100));
            released.store(true, Ordering::SeqCst);
            fake.hold(0);
        }
        // SAFETY: destroyed once.
        ok(unsafe { T.destroy_context.unwrap()(ctx) });
        assert!(released.load(Ordering::SeqCst), "rank {}: the copy is still on its way", r.rank);
        r.job.barrier.wait();
        // What is left of it harms nobody.
        ends.round_trip(r, round + 1, 64, 0);
        r.job.barrier.wait();
    });
    fake.check();
}

/// The GPU fails while the copy kernel fills a buffer for TCP: that may still be written when the communicator is gone.
#[test]
fn a_buffer_that_a_copy_kernel_may_still_fill_is_never_freed() {
    let fake = apart(1, 0);
    std::env::set_var("OXYGIN_DEREG_TIMEOUT", "0.1");
    let flags = Signals::NeverReset.set_up(&fake);
    job(2, 1, |r| {
        let _context = fake.enter(r.rank as i32);
        let ends = Ends::on(&fake, r, flags);
        r.job.barrier.wait();
        let request = hold_up_a_fetch(&fake, r, &ends, r);
        if let Some(request) = request {
            let end = Instant::now() + Duration::from_secs(60);
            let mut done = 0;
            // SAFETY: plain call.
            while unsafe { T.test.unwrap()(r.coll, request, &mut done) } == NcclResult::SUCCESS {
                assert!(done == 0 && Instant::now() < end, "the put has not failed");
                // The engine asks its streams, as nothing moves; so do others.
                fake.inject("cuStreamQuery", 700);
            }
        }
        r.job.barrier.wait();
    });
    std::env::remove_var("OXYGIN_DEREG_TIMEOUT");
    fake.hold(0);
    wait_until("the copy kernel has ended", || fake.launched() == 0);
    fake.check();
}

/// Rank 0 puts 4 KiB by `other`, and its copy kernel fetches them and is held up there; rank 1 takes part.
fn hold_up_a_fetch(fake: &Fake, r: &Rank, ends: &Ends, other: &Rank) -> Option<*mut c_void> {
    // Copies that are held up are the copy kernel's, or the test tries again.
    for round in 1.. {
        ends.call_copy_kernel(r);
        ends.round_trip(r, round, 64, 0);
        r.job.barrier.wait();
        let mut held = None;
        if r.rank == 0 {
            let copies = fake.calls("cuMemcpyBatchAsync") + fake.calls("cuMemcpyAsync");
            fake.hold(4096);
            let request = other.put(0, (ends.src.as_window(), 0), 4096, (ends.aside.as_window(), 0), 1, None);
            wait_until("the copy is held up", || {
                assert!(!test(r, request), "it was not");
                fake.is_holding()
            });
            held = (fake.calls("cuMemcpyBatchAsync") + fake.calls("cuMemcpyAsync") == copies).then_some(request);
            if held.is_none() {
                fake.hold(0);
                r.wait(request);
            }
            HELD.store(held.is_some(), Ordering::SeqCst);
        }
        r.job.barrier.wait();
        let by_kernel = HELD.load(Ordering::SeqCst);
        r.job.barrier.wait();
        if by_kernel {
            ROUNDS_BEFORE.store(round, Ordering::SeqCst);
            return held;
        }
    }
    None
}

/// Whether rank 0's copy is held up in its copy kernel, for rank 1.
static HELD: AtomicBool = AtomicBool::new(false);

/// Round trips until it was.
static ROUNDS_BEFORE: AtomicU64 = AtomicU64::new(0);
