//! All kinds of traffic between two ranks, through the RMA v16 table, verified: on the fake CUDA driver.

use super::*;
use crate::support::common::*;
use oxygin::sys::wait;
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Around every size where something changes.
pub const SIZES: [usize; 12] = [0, 1, 2, 3, 4, 8, 9, 8193, 100 << 10, 1 << 20, 3 << 20, 5 << 20];
/// What lies around each transfer.
pub const GAP: usize = 64;
pub const BYTES: usize = (5 << 20) + 2 * GAP;
/// A bit less than a third of what the lower half of a signal holds.
pub const STEP: u64 = 0x5000_0001;
/// Whether source and destination are on a GPU.
pub const WAYS: [(bool, bool); 3] = [(true, true), (false, true), (true, false)];
/// Signals in GPU memory: one for each put, one that grows fast, one for bursts.
pub const SIGNALS: usize = 3;

/// Registered memory of a rank, and where the CPU sees it.
pub struct Mem {
    pub gpu: Option<GpuWindow>,
    pub host: Option<Window>,
    pub at: *mut u8,
    pub len: usize,
}

impl Mem {
    pub fn on_gpu(fake: &Fake, r: &Rank, gpu: i32, len: usize) -> Self {
        let at = fake.alloc(gpu, len, false);
        Self { gpu: Some(fake.register_at(r, at, len / 8, 0)), host: None, at: fake.peek(at), len }
    }

    pub fn on_host(r: &Rank) -> Self {
        let window = r.window(BYTES / 8, 0);
        let at = window.words.as_ptr().cast_mut().cast();
        Self { gpu: None, host: Some(window), at, len: BYTES }
    }

    pub fn window(&self) -> &Window {
        match (&self.gpu, &self.host) {
            (Some(w), _) => w.as_window(),
            (_, Some(w)) => w,
            _ => unreachable!("memory is somewhere"),
        }
    }

    pub fn is_on_gpu(&self) -> bool {
        self.gpu.is_some()
    }

    /// Bytes that nobody else touches now.
    #[allow(
        clippy::mut_from_ref,
        reason = "other threads' memory, as a GPU's is; each caller holds it for one statement"
    )]
    pub fn bytes(&self, from: usize, n: usize) -> &mut [u8] {
        assert!(from + n <= self.len);
        // SAFETY: inside the memory, which stays mapped; operations on it are complete, and ranks take turns by
        // barriers.
        unsafe { std::slice::from_raw_parts_mut(self.at.add(from), n) }
    }

    /// Checks that exactly these bytes of a pattern arrived among zeroes, and makes them zeroes again.
    pub fn took(&self, to: usize, expected: &[u8], what: &str) {
        let around = self.bytes(to - GAP / 2, expected.len() + GAP);
        let (before, rest) = around.split_at_mut(GAP / 2);
        let (data, after) = rest.split_at_mut(expected.len());
        assert!(before.iter().chain(after.iter()).all(|&b| b == 0), "{what}: bytes beside it changed");
        if data != expected {
            let first = data.iter().zip(expected).position(|(a, b)| a != b);
            panic!("{what}: byte {first:?} of {} differs", expected.len());
        }
        data.fill(0);
    }
}

/// What `rank`'s sources hold; never 0, and at no two places the same that a piece of a transfer lies apart.
pub fn pattern(rank: usize, len: usize) -> Vec<u8> {
    const PRIME: usize = 65_521;
    let block: Vec<_> = (0..PRIME).map(|i| ((i * 31 + i / 256 * 7 + rank * 101) % 255 + 1) as u8).collect();
    let mut all = block.repeat(len.div_ceil(PRIME));
    all.truncate(len);
    all
}

/// All of one rank's memory, and what it has signalled so far.
pub struct Traffic<'a> {
    pub r: &'a Rank,
    pub arrived: &'a AtomicU64,
    pub gpu: Mem,
    pub host: Mem,
    pub to_gpu: Mem,
    pub to_host: Mem,
    pub sig: GpuWindow,
    pub host_sig: Window,
    /// Kernels reset signals.
    pub resets: bool,
    pub sums: [Cell<u64>; SIGNALS],
    pub on_host: Cell<u64>,
    pub mine: Vec<u8>,
    pub peers: Vec<u8>,
}

impl<'a> Traffic<'a> {
    /// `arrived`: a zero that both ranks share.
    pub fn new(fake: &Fake, r: &'a Rank, gpu: i32, kind: Signals, flags: u64, arrived: &'a AtomicU64) -> Self {
        let this = Self {
            r,
            arrived,
            gpu: Mem::on_gpu(fake, r, gpu, BYTES),
            host: Mem::on_host(r),
            to_gpu: Mem::on_gpu(fake, r, gpu, BYTES),
            to_host: Mem::on_host(r),
            sig: fake.signals(r, gpu, SIGNALS, flags),
            host_sig: r.window(1, 1),
            resets: !matches!(kind, Signals::NeverReset),
            sums: Default::default(),
            on_host: Cell::new(0),
            mine: pattern(r.rank, BYTES),
            peers: pattern(1 - r.rank, BYTES),
        };
        for source in [&this.gpu, &this.host] {
            source.bytes(0, BYTES).copy_from_slice(&this.mine);
        }
        this.r.job.barrier.wait();
        this
    }

    /// Waits for the other rank, as NCCL's proxy does: making progress.
    pub fn barrier(&self) {
        let all = self.arrived.fetch_add(1, Ordering::AcqRel) / 2 * 2 + 2;
        let has_come = wait::until(Instant::now() + BARRIER_WITHIN, || {
            // SAFETY: plain call.
            ok(unsafe { T.rma_progress.unwrap()(self.r.ctx) });
            assert!(!self.r.job.barrier.has_failed(), "another rank failed");
            self.arrived.load(Ordering::Acquire) >= all
        });
        assert!(has_come, "the other rank has not come to a barrier in {BARRIER_WITHIN:?}");
    }

    pub fn source(&self, is_on_gpu: bool) -> &Mem {
        if is_on_gpu {
            &self.gpu
        } else {
            &self.host
        }
    }

    pub fn target(&self, is_on_gpu: bool) -> &Mem {
        if is_on_gpu {
            &self.to_gpu
        } else {
            &self.to_host
        }
    }

    pub fn peer(&self) -> usize {
        1 - self.r.rank
    }

    /// A signal of this rank grows by so much, since its peer does what this rank does.
    pub fn expect(&self, signal: usize, by: u64) {
        self.sums[signal].set(self.sums[signal].get() + by);
    }

    /// Waits for signals, looks whether they are exact, and resets them where kernels may.
    pub fn meet(&self) {
        for (i, sum) in self.sums.iter().enumerate() {
            self.sig.wait(self.r, i, sum.get());
            assert_eq!(self.sig.get(i), sum.get(), "signal {i}");
        }
        self.r.wait_signal(&self.host_sig, 0, self.on_host.get());
    }

    /// Both ranks have seen everything.
    pub fn turn(&self) {
        self.barrier();
        if self.resets {
            for (i, sum) in self.sums.iter().enumerate() {
                sum.set(0);
                self.sig.set(i, 0);
            }
            self.barrier();
        }
    }

    /// Puts of every size, each with a signal behind it, and the data is there when the signal is.
    pub fn puts(&self) {
        for (from, to) in WAYS {
            let (from, to) = (self.source(from), self.target(to));
            for (i, n) in SIZES.into_iter().enumerate() {
                let what = format!("{n} bytes put, from GPU: {}, to GPU: {}", from.is_on_gpu(), to.is_on_gpu());
                // Lengths of words at their own multiples, others anywhere.
                let (at, there) = if n % 8 == 1 { (3, GAP + 5) } else { (8, GAP) };
                let (signal, by) = match i % 4 {
                    3 => (None, 1),
                    i => (Some(i % 2), if i % 2 == 1 { STEP } else { 1 }),
                };
                let to_signal = match signal {
                    None => (&self.host_sig, 0, by),
                    Some(s) => (self.sig.as_window(), 8 * s as u64, by),
                };
                let (src, dst) = ((from.window(), at as u64), (to.window(), there as u64));
                let put = self.r.put(0, src, n, dst, self.peer(), Some(to_signal));
                match signal {
                    None => self.on_host.set(self.on_host.get() + by),
                    Some(s) => self.expect(s, by),
                }
                self.meet();
                to.took(there, &self.peers[at..at + n], &what);
                self.r.wait(put);
                self.turn();
            }
        }
    }

    /// Gets of every size.
    pub fn gets(&self) {
        for (from, to) in WAYS {
            let (from, to) = (self.source(from), self.target(to));
            for n in SIZES {
                let what = format!("{n} bytes got, from GPU: {}, to GPU: {}", from.is_on_gpu(), to.is_on_gpu());
                let (at, here) = if n % 8 == 1 { (3, GAP + 5) } else { (8, GAP) };
                let (src, dst) = ((from.window(), at as u64), (to.window(), here as u64));
                self.r.wait(self.r.get(1, src, n, dst, self.peer()));
                to.took(here, &self.peers[at..at + n], &what);
            }
        }
        self.turn();
    }

    /// Small ones in crowds, values among them, on two contexts; sums pass 2^32 on the way.
    pub fn bursts(&self) {
        const PUTS: usize = 120;
        let mut all = Vec::new();
        for i in 0..PUTS {
            let from = if i % 3 == 0 { &self.host } else { &self.gpu };
            let (n, at) = ([1, 2, 4, 8, 8, 24][i % 6], 32 * i as u64);
            let signal = Some((self.sig.as_window(), 16, STEP));
            let to = (self.to_gpu.window(), at + GAP as u64);
            all.push(self.r.put((i % 2) as i32, (from.window(), at), n, to, self.peer(), signal));
            self.expect(2, STEP);
        }
        self.meet();
        for i in 0..PUTS {
            let (n, at) = ([1, 2, 4, 8, 8, 24][i % 6], 32 * i);
            let data = self.to_gpu.bytes(at + GAP, 32);
            assert_eq!(data[..n], self.peers[at..at + n], "put {i} of a burst, {n} bytes");
            assert!(data[n..].iter().all(|&b| b == 0), "put {i} of a burst: beyond its {n} bytes");
            data.fill(0);
        }
        all.into_iter().for_each(|q| self.r.wait(q));
        self.turn();
    }

    /// Bursts until the copy kernel has taken more commands than those `before`.
    pub fn bursts_until_dispatched(&self, fake: &Fake, before: u64) {
        let end = Instant::now() + Duration::from_secs(60);
        loop {
            self.bursts();
            // Nothing is under way: both see the same.
            let carries = fake.commands() > before;
            self.r.job.barrier.wait();
            if carries {
                return;
            }
            assert!(Instant::now() < end, "no kernel after 60 s");
        }
    }

    pub fn all(&self) {
        self.puts();
        self.gets();
        self.bursts();
    }
}

/// Four ranks add 3 to one signal of rank 0 `n` times each, with a put in front, all unfinished at once. `see` waits,
/// as a rank, for its requests, and rank 0 for the sum, each in its way; then the sum is compared.
pub fn fan_in(
    fake: &Fake,
    signals: Signals,
    n: i32,
    see: impl Fn(&Rank, &GpuWindow, u64, Vec<*mut c_void>) + Send + Sync,
) {
    let flags = signals.set_up(fake);
    let sum = 3 * 4 * n as u64;
    job(4, 2, |r| {
        let gpu = r.rank as i32;
        let _context = fake.enter(gpu);
        let src = fake.window(r, gpu, 8, 0);
        let dst = fake.window(r, gpu, 8, 0);
        let sig = fake.signals(r, gpu, 1, flags);
        let put = |i| {
            let to = (dst.as_window(), r.rank as u64 * 8);
            r.put(i % 2, (src.as_window(), 0), 8, to, 0, Some((sig.as_window(), 0, 3)))
        };
        see(r, &sig, sum, (0..n).map(put).collect());
        r.job.barrier.wait();
        assert!(r.rank != 0 || sig.get(0) == sum, "{} instead of {sum}", sig.get(0));
    });
    fake.check();
}
