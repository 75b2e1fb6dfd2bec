//! Everything flows while the application's queues stand, on every way between ranks: on the fake CUDA driver, where
//! nothing that needs the GPU's processors begins in the primary context.

mod common;
mod gpu_support;

use common::*;
use gpu_support::*;
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Around every size where something changes.
const SIZES: [usize; 12] = [0, 1, 2, 3, 4, 8, 9, 8193, 100 << 10, 1 << 20, 3 << 20, 5 << 20];
/// What lies around each transfer.
const GAP: usize = 64;
const BYTES: usize = (5 << 20) + 2 * GAP;
/// A bit less than a third of what the lower half of a signal holds.
const STEP: u64 = 0x5000_0001;
/// Whether source and destination are on a GPU.
const WAYS: [(bool, bool); 3] = [(true, true), (false, true), (true, false)];
/// Signals in GPU memory: one for each put, one that grows fast, one for bursts.
const SIGNALS: usize = 3;

/// Registered memory of a rank, and where the CPU sees it.
struct Mem {
    gpu: Option<GpuWindow>,
    host: Option<Window>,
    at: *mut u8,
    len: usize,
}

impl Mem {
    fn on_gpu(fake: &Fake, r: &Rank, gpu: i32, len: usize) -> Self {
        let at = fake.alloc(gpu, len, false, false);
        Self { gpu: Some(fake.register_at(r, at, len / 8, 0)), host: None, at: fake.peek(at), len }
    }

    fn on_host(r: &Rank) -> Self {
        let window = r.window(BYTES / 8, 0);
        let at = window.words.as_ptr().cast_mut().cast();
        Self { gpu: None, host: Some(window), at, len: BYTES }
    }

    fn window(&self) -> &Window {
        match (&self.gpu, &self.host) {
            (Some(w), _) => w.as_window(),
            (_, Some(w)) => w,
            _ => unreachable!("memory is somewhere"),
        }
    }

    fn is_on_gpu(&self) -> bool {
        self.gpu.is_some()
    }

    /// Bytes that nobody else touches now.
    #[allow(
        clippy::mut_from_ref,
        reason = "other threads' memory, as a GPU's is; each caller holds it for one statement"
    )]
    fn bytes(&self, from: usize, n: usize) -> &mut [u8] {
        assert!(from + n <= self.len);
        // SAFETY: inside the memory, which stays mapped; operations on it are complete, and ranks take turns by barriers.
        unsafe { std::slice::from_raw_parts_mut(self.at.add(from), n) }
    }

    /// Checks that exactly these bytes of a pattern arrived among zeroes, and makes them zeroes again.
    fn took(&self, to: usize, expected: &[u8], what: &str) {
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
fn pattern(rank: usize, len: usize) -> Vec<u8> {
    const PRIME: usize = 65_521;
    let block: Vec<_> = (0..PRIME).map(|i| ((i * 31 + i / 256 * 7 + rank * 101) % 255 + 1) as u8).collect();
    let mut all = block.repeat(len.div_ceil(PRIME));
    all.truncate(len);
    all
}

/// All of one rank's memory, and what it has signalled so far.
struct Traffic<'a> {
    r: &'a Rank,
    arrived: &'a AtomicU64,
    gpu: Mem,
    host: Mem,
    to_gpu: Mem,
    to_host: Mem,
    sig: GpuWindow,
    host_sig: Window,
    /// Kernels reset signals.
    resets: bool,
    sums: [Cell<u64>; SIGNALS],
    on_host: Cell<u64>,
    mine: Vec<u8>,
    peers: Vec<u8>,
}

impl<'a> Traffic<'a> {
    /// `arrived`: a zero that both ranks share.
    fn new(fake: &Fake, r: &'a Rank, gpu: i32, kind: Signals, flags: u64, arrived: &'a AtomicU64) -> Self {
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
    fn barrier(&self) {
        let all = self.arrived.fetch_add(1, Ordering::AcqRel) / 2 * 2 + 2;
        while self.arrived.load(Ordering::Acquire) < all {
            // SAFETY: plain call.
            ok(unsafe { T.rma_progress.unwrap()(self.r.ctx) });
            assert!(!self.r.job.barrier.has_failed(), "another rank failed");
            std::thread::yield_now();
        }
    }

    fn source(&self, is_on_gpu: bool) -> &Mem {
        if is_on_gpu {
            &self.gpu
        } else {
            &self.host
        }
    }

    fn target(&self, is_on_gpu: bool) -> &Mem {
        if is_on_gpu {
            &self.to_gpu
        } else {
            &self.to_host
        }
    }

    fn peer(&self) -> usize {
        1 - self.r.rank
    }

    /// A signal of this rank grows by so much, since its peer does what this rank does.
    fn expect(&self, signal: usize, by: u64) {
        self.sums[signal].set(self.sums[signal].get() + by);
    }

    /// Waits for signals, looks whether they are exact, and resets them where kernels may.
    fn meet(&self) {
        for (i, sum) in self.sums.iter().enumerate() {
            self.sig.wait(self.r, i, sum.get());
            assert_eq!(self.sig.get(i), sum.get(), "signal {i}");
        }
        self.r.wait_signal(&self.host_sig, 0, self.on_host.get());
    }

    /// Both ranks have seen everything.
    fn turn(&self) {
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
    fn puts(&self) {
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
    fn gets(&self) {
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
    fn bursts(&self) {
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

    fn all(&self) {
        self.puts();
        self.gets();
        self.bursts();
    }
}

/// When the application's queues begin to stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum From {
    /// Before the first window is registered.
    SetUp,
    /// After.
    Use,
}

fn block(fake: &Fake, gpus: i32, on: bool) {
    (0..gpus).for_each(|gpu| fake.block(gpu, on));
}

/// All kinds of traffic between two ranks, and their end, while the queues stand.
fn flows(transport: &str, gpus: i32, kind: Signals, from: From, issue: Option<&str>) {
    println!("{transport}, {gpus} GPUs, {kind:?}, from {from:?} on, {issue:?}");
    let fake = Fake::take();
    fake.set_transport(transport);
    issue.inspect(|how| fake.set_issue(how));
    let (flags, carried) = (kind.set_up(&fake), fake.commands());
    block(&fake, gpus, from == From::SetUp);
    let arrived = AtomicU64::new(0);
    job(2, 2, |r| {
        let gpu = r.rank as i32 % gpus;
        let _context = fake.enter(gpu);
        let traffic = Traffic::new(&fake, r, gpu, kind, flags, &arrived);
        if from == From::Use && r.rank == 0 {
            wait_until("warm-ups of the courier have ended", || fake.launched() == 0);
            block(&fake, gpus, true);
        }
        r.job.barrier.wait();
        {
            // NCCL's progress thread has device 0 current; no call may wait for the application's kernels.
            let _other = fake.enter(0);
            fake.kernel(1);
            traffic.all();
            r.job.barrier.wait();
            fake.kernel(-1);
        }
        r.job.barrier.wait();
    });
    // Both have closed, the queues still standing.
    assert_eq!(fake.commands(), carried, "a courier ran where queues stand");
    let has_courier = issue.is_none_or(|how| !how.contains("courier=0"));
    assert!(fake.launched() > 0 || from == From::Use || !has_courier);
    block(&fake, gpus, false);
    wait_until("launches that were left have ended", || fake.launched() == 0);
    fake.check();
}

#[test]
fn between_two_gpus() {
    KINDS.into_iter().for_each(|kind| flows("auto", 2, kind, From::Use, None));
}

#[test]
fn within_one_gpu() {
    KINDS.into_iter().for_each(|kind| flows("auto", 1, kind, From::Use, None));
}

#[test]
fn without_the_courier() {
    for (gpus, kind) in [(1, Signals::NeverReset), (2, Signals::Added), (1, Signals::ReadBack)] {
        flows("auto", gpus, kind, From::Use, Some("courier=0"));
    }
}

#[test]
fn from_the_first_window_on() {
    flows("auto", 2, Signals::NeverReset, From::SetUp, None);
    flows("auto", 1, Signals::ReadBack, From::SetUp, None);
    flows("auto", 1, Signals::Added, From::SetUp, Some("courier=0"));
}

#[test]
fn through_host_memory() {
    flows("staged", 2, Signals::NeverReset, From::Use, None);
    flows("staged", 1, Signals::Added, From::SetUp, None);
    flows("staged", 1, Signals::ReadBack, From::Use, Some("courier=0"));
}

#[test]
fn over_tcp() {
    flows("tcp", 2, Signals::NeverReset, From::Use, None);
    flows("tcp", 1, Signals::Added, From::SetUp, None);
    flows("tcp", 2, Signals::ReadBack, From::Use, Some("courier=0"));
}

/// Flights that are not merged, one at a time, large copies with the others: no way of gathering needs processors.
#[test]
fn however_operations_gather() {
    flows("auto", 1, Signals::NeverReset, From::Use, Some("merge=0,flights=1,bulk=0"));
    flows("auto", 2, Signals::Added, From::Use, Some("merge=0,flights=4,gather=1,bulk=65536"));
}

/// Once an engine's first store has waited for a time slice, what copy engines can do waits for none: here everything but
/// single bytes and additions.
#[test]
fn only_the_first_store_waits_for_processors() {
    for (transport, gpus) in ["auto", "staged", "tcp"].into_iter().flat_map(|t| [(t, 1), (t, 2)]) {
        let fake = Fake::take();
        fake.set_transport(transport);
        fake.set_issue("courier=0");
        let flags = Signals::NeverReset.set_up(&fake);
        let arrived = AtomicU64::new(0);
        job(2, 1, |r| {
            let gpu = r.rank as i32 % gpus;
            let _context = fake.enter(gpu);
            let traffic = Traffic::new(&fake, r, gpu, Signals::NeverReset, flags, &arrived);
            if r.rank == 0 {
                // Warm-ups are over.
                fake.rest();
                block(&fake, gpus, true);
            }
            r.job.barrier.wait();
            // A get of a word from host memory is a store too, by the engine of the one that has it.
            let (host, word) = (&traffic.host, (traffic.to_gpu.window(), GAP as u64));
            if r.rank == 0 {
                r.wait(r.put(0, (host.window(), 8), 4, word, 1, Some((traffic.sig.as_window(), 0, 1))));
            } else {
                traffic.sig.wait(r, 0, 1);
                r.wait(r.get(0, (host.window(), 8), 4, word, 0));
                traffic.to_gpu.took(GAP, &traffic.peers[8..12], "4 bytes");
            }
            traffic.barrier();
            let (mut sum, slices) = (1, fake.slices());
            traffic.barrier();
            for (from, to) in WAYS {
                let (from, to) = (traffic.source(from), traffic.target(to));
                for n in SIZES.into_iter().filter(|&n| n != 1) {
                    let what = format!(
                        "{transport}, {gpus} GPUs, {n} bytes, on GPU: {}, {}",
                        from.is_on_gpu(),
                        to.is_on_gpu()
                    );
                    sum += 1;
                    if r.rank == 0 {
                        let signal = Some((traffic.sig.as_window(), 0, 1));
                        r.wait(r.put(0, (from.window(), 8), n, (to.window(), GAP as u64), 1, signal));
                    } else {
                        traffic.sig.wait(r, 0, sum);
                        to.took(GAP, &traffic.peers[8..8 + n], &what);
                        r.wait(r.get(0, (from.window(), 8), n, (to.window(), GAP as u64), 0));
                        to.took(GAP, &traffic.peers[8..8 + n], &what);
                    }
                    traffic.barrier();
                    assert_eq!(fake.slices(), slices, "{what}: waited for processors");
                }
            }
        });
        block(&fake, gpus, false);
        fake.check();
    }
}

/// A store that finds the staging memory full waits for room there, not for the processors.
#[test]
fn stores_wait_for_room_in_the_staging_memory() {
    const STAGING: usize = 4 << 20;
    let fake = Fake::take();
    fake.set_issue("courier=0");
    let flags = Signals::NeverReset.set_up(&fake);
    let arrived = AtomicU64::new(0);
    job(2, 1, |r| {
        let _context = fake.enter(0);
        let traffic = Traffic::new(&fake, r, 0, Signals::NeverReset, flags, &arrived);
        let (from, to, signal) = (traffic.host.window(), traffic.to_gpu.window(), (traffic.sig.as_window(), 0, 1));
        if r.rank == 0 {
            fake.rest();
            block(&fake, 1, true);
            // The first one learns that the processors are busy.
            r.wait(r.put(0, (from, 0), 8, (to, GAP as u64), 1, Some(signal)));
            let slices = fake.slices();
            fake.hold(64 << 10);
            // SAFETY: plain call.
            let progress = || ok(unsafe { T.rma_progress.unwrap()(r.ctx) });
            let large = r.put(0, (from, 0), STAGING, (to, GAP as u64), 1, None);
            (0..1000).for_each(|_| progress());
            let small = r.put(0, (from, STAGING as u64), 8, (to, (GAP + STAGING) as u64), 1, Some(signal));
            (0..1000).for_each(|_| progress());
            fake.hold(0);
            [large, small].into_iter().for_each(|q| r.wait(q));
            assert_eq!(fake.slices(), slices, "it waited for processors");
        } else {
            traffic.sig.wait(r, 0, 2);
            traffic.to_gpu.took(GAP, &traffic.peers[..STAGING + 8], "all");
        }
        traffic.barrier();
    });
    block(&fake, 1, false);
    fake.check();
}

/// Many at once share the staging memory, whose places do not always fit: those that find none come later, and not by the
/// processors.
#[test]
fn many_copies_within_the_gpu_wait_for_no_processors() {
    let fake = Fake::take();
    fake.set_issue("courier=0");
    let flags = Signals::NeverReset.set_up(&fake);
    let arrived = AtomicU64::new(0);
    job(2, 2, |r| {
        let _context = fake.enter(0);
        let traffic = Traffic::new(&fake, r, 0, Signals::NeverReset, flags, &arrived);
        if r.rank == 0 {
            fake.rest();
            block(&fake, 1, true);
        }
        r.job.barrier.wait();
        let (from, to, signal) = (&traffic.gpu, &traffic.to_gpu, (traffic.sig.as_window(), 0, 1));
        let sizes = [8, 5 << 20, 8193, 3 << 20, 100 << 10, 4 << 20, 8, (1 << 20) + 1, 5 << 20, 16, 5 << 20, 2 << 20];
        if r.rank == 0 {
            // The first store waits for a time slice, and none after it.
            r.wait(r.put(0, (from.window(), 8), 8, (to.window(), GAP as u64), 1, Some(signal)));
            let slices = fake.slices();
            let put = |i: usize| {
                let n = sizes[i % sizes.len()];
                r.put(i as i32 % 2, (from.window(), 8), n, (to.window(), GAP as u64), 1, Some(signal))
            };
            let requests: Vec<_> = (0..3 * sizes.len()).map(put).collect();
            requests.into_iter().for_each(|q| r.wait(q));
            assert_eq!(fake.slices(), slices, "waited for processors");
        } else {
            traffic.sig.wait(r, 0, 1 + 3 * sizes.len() as u64);
            to.took(GAP, &traffic.peers[8..8 + (5 << 20)], "the longest");
        }
        traffic.barrier();
    });
    block(&fake, 1, false);
    fake.check();
}

/// Copies within the GPU that are too large for the way by host memory wait for a time slice, no longer.
#[test]
fn a_very_large_copy_within_the_gpu() {
    let fake = Fake::take();
    let n = 33 << 20;
    job(2, 1, |r| {
        let _context = fake.enter(0);
        let memory = Mem::on_gpu(&fake, r, 0, n);
        let sig = fake.signals(r, 0, 1, Signals::NeverReset.set_up(&fake));
        memory.bytes(0, n).fill(r.rank as u8 + 1);
        r.job.barrier.wait();
        fake.block(0, true);
        if r.rank == 0 {
            r.wait(r.put(0, (memory.window(), 0), n, (memory.window(), 0), 1, Some((sig.as_window(), 0, 1))));
        } else {
            sig.wait(r, 0, 1);
            assert!(memory.bytes(0, n).iter().all(|&b| b == 1));
        }
    });
    fake.block(0, false);
    wait_until("launches that were left have ended", || fake.launched() == 0);
    fake.check();
}

/// Queues that go again: launches that waited come up and end, and later ones carry.
#[test]
fn when_queues_go_again_the_courier_carries() {
    let fake = Fake::take();
    let flags = Signals::NeverReset.set_up(&fake);
    let before = fake.commands();
    fake.block(0, true);
    let arrived = AtomicU64::new(0);
    job(2, 2, |r| {
        let _context = fake.enter(0);
        let traffic = Traffic::new(&fake, r, 0, Signals::NeverReset, flags, &arrived);
        (0..4).for_each(|_| traffic.bursts());
        if r.rank == 0 {
            assert_eq!(fake.commands(), before);
            fake.block(0, false);
        }
        let end = Instant::now() + Duration::from_secs(60);
        loop {
            traffic.bursts();
            // Nothing is under way: both see the same.
            let carries = fake.commands() > before;
            r.job.barrier.wait();
            if carries {
                break;
            }
            assert!(Instant::now() < end, "no courier after 60 s");
        }
        traffic.all();
    });
    assert_eq!(fake.launched(), 0);
    fake.check();
}

/// In the application's context the same stands still, which shows that the fake's queues do stand.
#[test]
fn in_the_applications_context_it_stands_still() {
    for transport in ["auto", "staged", "tcp"] {
        let fake = Fake::take();
        fake.set_transport(transport);
        fake.set_issue("own=0,courier=0");
        let flags = Signals::NeverReset.set_up(&fake);
        job(2, 1, |r| {
            let _context = fake.enter(0);
            let src = fake.window(r, 0, 8, 0);
            let dst = fake.window(r, 0, 8, 0);
            let sig = fake.signals(r, 0, 1, flags);
            src.set(0, 7);
            r.job.barrier.wait();
            fake.block(0, true);
            r.job.barrier.wait();
            let put = (r.rank == 0)
                .then(|| r.put(0, (src.as_window(), 0), 64, (dst.as_window(), 0), 1, Some((sig.as_window(), 0, 1))));
            let end = Instant::now() + Duration::from_millis(300);
            while Instant::now() < end {
                // SAFETY: plain call.
                ok(unsafe { T.rma_progress.unwrap()(r.ctx) });
                // Through host memory it is locally complete before the GPU has seen it.
                assert!(transport != "auto" || put.is_none_or(|put| !test(r, put)), "{transport}: it is done");
                assert!(r.rank == 0 || sig.get(0) == 0, "{transport}: it arrived");
            }
            r.job.barrier.wait();
            fake.block(0, false);
            match put {
                Some(put) => r.wait(put),
                None => {
                    sig.wait(r, 0, 1);
                    assert_eq!(dst.get(0), 7);
                }
            }
        });
        fake.check();
    }
}
