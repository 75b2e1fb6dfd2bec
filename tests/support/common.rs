//! Ranks as threads of one process, driven through the RMA v16 table as NCCL drives it.

use super::device::wait;
use nccl_plugin_api::rma_v14::ConfigV14;
use nccl_plugin_api::*;
use oxygin::vtable::gin_v14::ncclGinPlugin_v14 as GIN;
use oxygin::vtable::rma_v16::ncclRmaPlugin_v16 as T;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Nothing that ranks do between two barriers takes nearly as long. A test that hangs says where.
pub const BARRIER_WITHIN: Duration = Duration::from_secs(300);

/// A barrier that gives up when a rank has panicked, so that a failing test ends.
pub struct Barrier {
    n: usize,
    state: Mutex<(usize, usize, bool)>,
    changed: Condvar,
}

impl Barrier {
    fn new(n: usize) -> Self {
        Self { n, state: Mutex::new((0, 0, false)), changed: Condvar::new() }
    }

    pub fn wait(&self) {
        let mut s = self.state.lock().unwrap();
        s.0 += 1;
        if s.0 == self.n {
            *s = (0, s.1 + 1, s.2);
            self.changed.notify_all();
            return;
        }
        let round = s.1;
        let (s, late) = self.changed.wait_timeout_while(s, BARRIER_WITHIN, |s| s.1 == round && !s.2).unwrap();
        let (failed, come) = (s.2, s.0);
        drop(s);
        assert!(!late.timed_out(), "{come} of {} ranks have come to a barrier in {BARRIER_WITHIN:?}", self.n);
        assert!(!failed, "another rank failed");
    }

    /// Ends the waits of all: this rank has failed.
    pub fn fail(&self) {
        self.state.lock().unwrap().2 = true;
        self.changed.notify_all();
    }

    pub fn has_failed(&self) -> bool {
        self.state.lock().unwrap().2
    }
}

/// What the ranks of one job share.
pub struct Job {
    pub nranks: usize,
    handles: Mutex<Vec<[u8; HANDLE_BYTES]>>,
    pub barrier: Barrier,
    /// Memory of windows that ended before their job.
    kept: Mutex<Vec<Vec<u64>>>,
}

impl Job {
    /// For a rank whose peers are in other processes.
    pub fn apart(nranks: usize) -> Arc<Self> {
        Arc::new(Self { nranks, handles: Mutex::default(), barrier: Barrier::new(1), kept: Mutex::default() })
    }
}

/// Memory that a rank registered. It stays as long as the job: a put that is complete at its source may arrive after
/// the test has let go of the window.
pub struct Window {
    pub words: Vec<u64>,
    pub handle: *mut c_void,
    job: Arc<Job>,
}

impl Drop for Window {
    fn drop(&mut self) {
        let words = std::mem::take(&mut self.words);
        self.job.kept.lock().unwrap_or_else(PoisonError::into_inner).push(words);
    }
}

/// One rank, from init to finalize.
pub struct Rank {
    pub job: Arc<Job>,
    pub rank: usize,
    pub instance: *mut c_void,
    pub coll: *mut c_void,
    pub ctx: *mut c_void,
}

pub fn ok(r: NcclResult) {
    assert_eq!(r, NcclResult::SUCCESS);
}

impl Job {
    /// A job of `nranks`, none of which has joined.
    pub fn new(nranks: usize) -> Arc<Self> {
        let handles = Mutex::new(vec![[0; HANDLE_BYTES]; nranks]);
        Arc::new(Self { nranks, handles, barrier: Barrier::new(nranks), kept: Mutex::default() })
    }
}

impl Rank {
    pub fn join(job: &Arc<Job>, rank: usize, contexts: c_int) -> Self {
        Self::try_join(job, rank, contexts, || ()).expect("connect")
    }

    /// Joins, where connect may refuse it; `begun` runs behind `init`.
    pub fn try_join(job: &Arc<Job>, rank: usize, contexts: c_int, begun: impl FnOnce()) -> Result<Self, NcclResult> {
        Self::try_join_by(job, rank, contexts, |handle| {
            begun();
            job.handles.lock().unwrap()[rank] = handle;
            job.barrier.wait();
            job.handles.lock().unwrap().clone()
        })
    }

    /// Joins; `exchange` gives this rank's handle to the others and returns those of all.
    pub fn join_by(
        job: &Arc<Job>,
        rank: usize,
        contexts: c_int,
        exchange: impl FnOnce([u8; HANDLE_BYTES]) -> Vec<[u8; HANDLE_BYTES]>,
    ) -> Self {
        Self::try_join_by(job, rank, contexts, exchange).expect("connect")
    }

    /// Joins, where connect may refuse it. It connects through a GIN table, because there ranks agree on who executes
    /// what device code writes: with an RMA table in use that is NCCL, unless `OXYGIN_ENGINE` says otherwise. With 0
    /// contexts it has no set of its own.
    pub fn try_join_by(
        job: &Arc<Job>,
        rank: usize,
        contexts: c_int,
        exchange: impl FnOnce([u8; HANDLE_BYTES]) -> Vec<[u8; HANDLE_BYTES]>,
    ) -> Result<Self, NcclResult> {
        let (mut instance, mut listen, mut coll, mut ctx) = (null_mut(), null_mut(), null_mut(), null_mut());
        let mut handle = [0u8; HANDLE_BYTES];
        // SAFETY: all pointers are to locals that live through the calls.
        unsafe {
            ok(T.init.unwrap()(&mut instance, 1, None));
            ok(T.listen.unwrap()(instance, 0, handle.as_mut_ptr().cast(), &mut listen));
            let mut all = exchange(handle);
            let mut pointers: Vec<*mut c_void> = all.iter_mut().map(|h| h.as_mut_ptr().cast()).collect();
            let n = job.nranks as c_int;
            let connect = GIN.connect.unwrap();
            let connected = connect(null_mut(), pointers.as_mut_ptr(), n, rank as c_int, listen, &mut coll);
            ok(T.close_listen.unwrap()(listen));
            if connected != NcclResult::SUCCESS {
                ok(T.finalize.unwrap()(instance));
                return Err(connected);
            }
            if contexts > 0 {
                let mut config = ConfigV14 { n_contexts: contexts, traffic_class: -1, rank_stride: 1 };
                ok(T.create_context.unwrap()(coll, &mut config, &mut ctx));
            }
        }
        Ok(Self { job: job.clone(), rank, instance, coll, ctx })
    }

    /// Memory that the test registers itself.
    pub fn not_registered(&self, words: usize) -> Window {
        Window { words: vec![0; words], handle: null_mut(), job: self.job.clone() }
    }

    pub fn window(&self, words: usize, flags: u64) -> Window {
        let mut w = self.not_registered(words);
        // SAFETY: the vector does not move or shrink while registered.
        unsafe {
            ok(T.reg_mr_sym.unwrap()(
                self.coll,
                w.words.as_mut_ptr().cast(),
                words * 8,
                PTR_HOST,
                flags,
                &mut w.handle,
            ));
        }
        w
    }

    #[allow(clippy::too_many_arguments)]
    pub fn put(
        &self,
        context: i32,
        src: (&Window, u64),
        size: usize,
        dst: (&Window, u64),
        peer: usize,
        signal: Option<(&Window, u64, u64)>,
    ) -> *mut c_void {
        let mut request = null_mut();
        // SAFETY: windows are registered; the caller waits before it reuses the source.
        ok(unsafe {
            match signal {
                None => T.iput.unwrap()(
                    self.ctx,
                    context,
                    src.1,
                    src.0.handle,
                    size,
                    dst.1,
                    dst.0.handle,
                    peer as u32,
                    0,
                    &mut request,
                ),
                Some((w, off, value)) => T.iput_signal.unwrap()(
                    self.ctx,
                    context,
                    src.1,
                    src.0.handle,
                    size,
                    dst.1,
                    dst.0.handle,
                    peer as u32,
                    off,
                    w.handle,
                    value,
                    SIGNAL_OP_ADD,
                    true,
                    0,
                    &mut request,
                ),
            }
        });
        request
    }

    pub fn get(
        &self,
        context: i32,
        remote: (&Window, u64),
        size: usize,
        local: (&Window, u64),
        peer: usize,
    ) -> *mut c_void {
        let mut request = null_mut();
        // SAFETY: as for `put`.
        ok(unsafe {
            T.iget.unwrap()(
                self.ctx,
                context,
                remote.1,
                remote.0.handle,
                size,
                local.1,
                local.0.handle,
                peer as u32,
                0,
                &mut request,
            )
        });
        request
    }

    pub fn wait(&self, request: *mut c_void) {
        let is_done = || {
            let mut done = 0;
            // SAFETY: plain call.
            ok(unsafe { T.test.unwrap()(self.coll, request, &mut done) });
            assert!(!self.job.barrier.has_failed(), "another rank failed");
            done != 0
        };
        wait(|| format!("rank {}: the end of a request", self.rank), is_done);
    }

    pub fn wait_signal(&self, w: &Window, index: usize, value: u64) {
        // SAFETY: an aligned word of the window.
        let word = unsafe { AtomicU64::from_ptr(w.words.as_ptr().add(index).cast_mut()) };
        self.await_signal(index, value, || word.load(Ordering::Acquire));
    }

    /// Makes progress until a signal, which `read` reads, has a value.
    pub fn await_signal(&self, index: usize, value: u64, read: impl Fn() -> u64) {
        let has_come = || {
            if read() >= value {
                return true;
            }
            // SAFETY: plain call.
            ok(unsafe { T.rma_progress.unwrap()(self.ctx) });
            assert!(!self.job.barrier.has_failed(), "another rank failed");
            read() >= value
        };
        wait(|| format!("rank {}: signal {index} >= {value} (it is {})", self.rank, read()), has_come);
    }

    pub fn dereg(&self, w: &Window) {
        // SAFETY: plain call.
        ok(unsafe { T.dereg_mr_sym.unwrap()(self.coll, w.handle) });
    }

    pub fn leave(self) {
        // SAFETY: plain calls in NCCL's order.
        unsafe {
            if !self.ctx.is_null() {
                ok(T.destroy_context.unwrap()(self.ctx));
            }
            ok(T.close_coll.unwrap()(self.coll));
            ok(T.finalize.unwrap()(self.instance));
        }
    }
}

/// Ranks on threads that connect refuses, all of them as `INVALID_USAGE`; `begun` runs in each between `init` and that.
/// `why`: said if one is not.
pub fn refused_job(nranks: usize, contexts: c_int, why: &str, begun: impl Fn() + Send + Sync) {
    let job = Job::new(nranks);
    std::thread::scope(|s| {
        for rank in 0..nranks {
            let (job, begun) = (&job, &begun);
            s.spawn(move || {
                let refused = Rank::try_join(job, rank, contexts, begun).err();
                assert_eq!(refused, Some(NcclResult::INVALID_USAGE), "rank {rank}: {why}");
            });
        }
    });
}

/// Runs `body` on `nranks` threads, each a rank with a set of `contexts` contexts, or with none.
pub fn job(nranks: usize, contexts: c_int, body: impl Fn(&Rank) + Send + Sync) {
    job_begun(nranks, contexts, |_| (), body);
}

/// The same; `begun` runs in each rank's thread between `init` and connect, and what it returns is held for the job's
/// time.
pub fn job_begun<G>(
    nranks: usize,
    contexts: c_int,
    begun: impl Fn(usize) -> G + Send + Sync,
    body: impl Fn(&Rank) + Send + Sync,
) {
    let job = Job::new(nranks);
    std::thread::scope(|s| {
        for r in 0..nranks {
            let (job, body, begun) = (job.clone(), &body, &begun);
            s.spawn(move || {
                let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                    let mut held = None;
                    let rank = Rank::try_join(&job, r, contexts, || held = Some(begun(r))).expect("connect");
                    body(&rank);
                    job.barrier.wait();
                    rank.leave();
                }));
                if let Err(panic) = result {
                    job.barrier.fail();
                    std::panic::resume_unwind(panic);
                }
            });
        }
    });
}
