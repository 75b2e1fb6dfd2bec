//! What ends while other threads are in calls with it, as NCCL has it. Where it aborts a communicator, windows that the
//! program did not deregister go first, while threads are in calls that name them, then these threads end, then the
//! communicator. And it asks for errors from any thread.

use crate::support::common::{ok, Job, Rank};
use crate::support::device::{entry, own, Ask, Device};
use crate::support::turn;
use nccl_plugin_api::descriptor::*;
use nccl_plugin_api::*;
use oxygin::vtable::gin_v13::ncclGinPlugin_v13 as V13;
use oxygin::vtable::gin_v14::ncclGinPlugin_v14 as GIN;
use oxygin::vtable::rma_v16::ncclRmaPlugin_v16 as T;
use std::collections::VecDeque;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::Arc;
use std::time::Duration;

const RANKS: usize = 2;
/// Windows for data that each rank has.
const WINDOWS: usize = 6;
/// Operations that NCCL's proxy has under way.
const UNDER_WAY: usize = 32;

/// Memory of a window, which is gone at once when it is freed.
struct Pages(*mut c_void);

impl Pages {
    const LEN: usize = 4096;

    fn new() -> Self {
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping.
        let at = unsafe { libc::mmap(null_mut(), Self::LEN, access, kind, -1, 0) };
        assert_ne!(at, libc::MAP_FAILED);
        Self(at)
    }

    /// # Safety
    /// Once, and nobody touches it any more.
    unsafe fn free(&self) {
        // SAFETY: this mapping; the caller's promise.
        assert_eq!(unsafe { libc::munmap(self.0, Self::LEN) }, 0);
    }
}

/// What a rank's threads know.
struct Place<'a> {
    rank: &'a Rank,
    /// Windows for data, by the names that operations have for them.
    data: Vec<u64>,
    /// Their memory.
    memory: Vec<Pages>,
    signals: u64,
    ends: AtomicBool,
}

// SAFETY: handles are numbers.
unsafe impl Sync for Place<'_> {}

impl Place<'_> {
    fn peer(&self) -> usize {
        1 - self.rank.rank
    }

    fn goes_on(&self) -> bool {
        !self.ends.load(Ordering::Acquire)
    }

    /// From one window to another, always others.
    fn way(&self, n: usize) -> (u64, u64) {
        (self.data[n % WINDOWS], self.data[(n + 1) % WINDOWS])
    }

    /// NCCL's proxy: it goes on, whatever it is told of windows that are gone.
    fn proxy(&self) {
        let handle = |name: u64| name as *mut c_void;
        let mut under_way = VecDeque::new();
        for n in (0..).take_while(|_| self.goes_on()) {
            let ((from, to), mut request, mut bad) = (self.way(n), null_mut(), false);
            // SAFETY: places for the answers; the windows' memory stays.
            let code = unsafe {
                ok(T.query_last_error.unwrap()(self.rank.ctx, &mut bad));
                T.iput_signal.unwrap()(
                    self.rank.ctx,
                    n as i32 % 2,
                    0,
                    handle(from),
                    64,
                    64,
                    handle(to),
                    self.peer() as u32,
                    8,
                    handle(self.signals),
                    1,
                    SIGNAL_OP_ADD,
                    true,
                    0,
                    &mut request,
                )
            };
            under_way.extend((code == NcclResult::SUCCESS).then_some(request));
            while under_way.len() >= UNDER_WAY && self.goes_on() {
                let mut done = 0;
                // SAFETY: a place for the answer.
                let code = unsafe { T.test.unwrap()(self.rank.coll, under_way[0], &mut done) };
                if done == 1 || code != NcclResult::SUCCESS {
                    under_way.pop_front();
                }
            }
        }
    }

    /// A kernel that does not know of the abort yet.
    fn kernel(&self, device: &Device) {
        for n in (0..).take_while(|_| self.goes_on()) {
            if device.has_credit(n % 4, self.peer()) {
                let (from, to) = self.way(n);
                let put = entry(OP_PUT | OP_SIGNAL_INC, 64).first(0, from).second(64, to);
                device.post(n % 4, self.peer(), put.with_signal(0, 0, true));
                device.has_error();
            }
        }
    }

    /// Ends the rank beside the thread that `works` is.
    fn abort_beside(&self, round: u64, works: impl FnOnce() + Send) {
        std::thread::scope(|s| {
            s.spawn(works);
            std::thread::sleep(Duration::from_millis(round * 7 % 5));
            for (&window, memory) in self.data.iter().zip(&self.memory) {
                // SAFETY: plain calls; nobody may touch the memory any more.
                unsafe {
                    ok(T.dereg_mr_sym.unwrap()(self.rank.coll, window as *mut c_void));
                    memory.free();
                }
            }
            if self.signals != 0 {
                // SAFETY: a plain call.
                ok(unsafe { T.dereg_mr_sym.unwrap()(self.rank.coll, self.signals as *mut c_void) });
            }
            self.ends.store(true, Ordering::Release);
        });
        // SAFETY: plain calls in NCCL's order: it destroys no contexts here.
        unsafe {
            ok(T.close_coll.unwrap()(self.rank.coll));
            ok(T.finalize.unwrap()(self.rank.instance));
        }
    }
}

/// So many communicators, one after another.
fn communicators(rounds: u64, life: impl Fn(&Arc<Job>, usize, u64) + Sync) {
    std::env::set_var("OXYGIN_FABRIC", "soft");
    for round in 0..rounds {
        let job = Job::new(RANKS);
        std::thread::scope(|s| {
            for rank in 0..RANKS {
                let (job, life) = (&job, &life);
                s.spawn(move || life(job, rank, round));
            }
        });
    }
    std::env::remove_var("OXYGIN_FABRIC");
}

/// The same by each way to a rank of this host.
fn communicators_by_each_way(rounds: u64, life: impl Fn(&Arc<Job>, usize, u64) + Sync) {
    for transport in ["auto", "tcp"] {
        std::env::set_var("OXYGIN_SOFT_TRANSPORT", transport);
        communicators(rounds, &life);
    }
    std::env::remove_var("OXYGIN_SOFT_TRANSPORT");
}

#[test]
fn windows_go_while_nccls_proxy_names_them() {
    let _turn = turn::take();
    std::env::set_var("OXYGIN_ENGINE", "nccl");
    communicators_by_each_way(200, |job, rank, round| {
        let rank = Rank::join(job, rank, 2);
        let memory: Vec<_> = (0..WINDOWS).map(|_| Pages::new()).collect();
        let data = memory.iter().map(|pages| {
            let mut handle = null_mut();
            // SAFETY: the memory stays until it is deregistered.
            ok(unsafe { T.reg_mr_sym.unwrap()(rank.coll, pages.0, Pages::LEN, PTR_HOST, 0, &mut handle) });
            handle as u64
        });
        let (data, signals) = (data.collect(), rank.window(8, MR_FLAG_FORCE_SO));
        let ends = AtomicBool::new(false);
        let place = Place { rank: &rank, data, memory, signals: signals.handle as u64, ends };
        job.barrier.wait();
        place.abort_beside(round, || place.proxy());
    });
    std::env::remove_var("OXYGIN_ENGINE");
}

#[test]
fn windows_go_while_a_kernel_names_them() {
    let _turn = own();
    communicators_by_each_way(60, |job, rank, round| {
        let rank = Rank::join(job, rank, 0);
        let memory: Vec<_> = (0..WINDOWS).map(|_| Pages::new()).collect();
        let data = memory.iter().map(|pages| {
            let (mut handle, mut name) = (null_mut(), null_mut());
            // SAFETY: the memory stays until it is deregistered.
            ok(unsafe { GIN.reg_mr_sym.unwrap()(rank.coll, pages.0, Pages::LEN, PTR_HOST, 0, &mut handle, &mut name) });
            name as u64
        });
        let data = data.collect();
        let place = Place { rank: &rank, data, memory, signals: 0, ends: AtomicBool::new(false) };
        let device = Device::new(&rank, Ask { contexts: 4, depth: 64, ..Ask::default() });
        job.barrier.wait();
        place.abort_beside(round, || place.kernel(&device));
    });
}

/// `ncclCommGetAsyncError` in one thread, device communicators that come and go in another.
#[test]
fn sets_go_while_they_are_asked_for_errors() {
    let _turn = own();
    for asked in [GIN.query_last_error.unwrap(), V13.query_last_error.unwrap()] {
        communicators(1, |job, rank, _| {
            let rank = Rank::join(job, rank, 0);
            let (newest, ends) = (AtomicPtr::new(null_mut::<c_void>()), AtomicBool::new(false));
            std::thread::scope(|s| {
                s.spawn(|| {
                    while !ends.load(Ordering::Acquire) {
                        let (ctx, mut bad) = (newest.load(Ordering::Acquire), false);
                        if ctx.is_null() {
                            continue;
                        }
                        // SAFETY: a place for the answer; the handle may be one that is gone.
                        let code = unsafe { asked(ctx, &mut bad) };
                        assert!(!bad && (code == NcclResult::SUCCESS || newest.load(Ordering::Acquire) != ctx));
                    }
                });
                for _ in 0..200 {
                    let device = Device::new(&rank, Ask { depth: 16, ..Ask::default() });
                    newest.store(device.ctx, Ordering::Release);
                    std::thread::yield_now();
                    // It is off NCCL's list when it is destroyed; who has found it there may still come.
                    newest.store(null_mut(), Ordering::Release);
                    device.destroy();
                }
                ends.store(true, Ordering::Release);
            });
            job.barrier.wait();
            rank.leave();
        });
    }
}
