//! Everything flows while the application stands in calls of the driver that wait for its kernels, and hold a lock of
//! its context all the while: on the fake CUDA driver, where every call in that context then waits.

use crate::harness::traffic::*;
use crate::harness::*;
use crate::support::apart::is_elsewhere;
use crate::support::common::*;
use crate::support::logged;
use nccl_plugin_api::{NcclResult, PTR_CUDA};
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The fake, and the log from the first call on: the library's own logger would be the one that stays.
fn take() -> Fake {
    let fake = Fake::take();
    logged::collect();
    fake
}

/// Whether a line of the log holds a text.
fn said(text: &str) -> bool {
    logged::lines().iter().any(|(_, line)| line.contains(text))
}

fn busy(fake: &Fake, gpus: i32, on: bool) {
    (0..gpus).for_each(|gpu| fake.busy(gpu, on));
}

/// All kinds of traffic between two ranks while their application stands; no thread of ours waits for it but the one
/// for it.
fn flows(transport: &str, gpus: i32, kind: Signals, issue: Option<&str>) {
    println!("{transport}, {gpus} GPUs, {kind:?}, {issue:?}");
    let fake = take();
    fake.set_transport(transport);
    issue.inspect(|how| fake.set_issue(how));
    let flags = kind.set_up(&fake);
    let (arrived, waits) = (AtomicU64::new(0), fake.waits());
    job(2, 2, |r| {
        let gpu = r.rank as i32 % gpus;
        let _context = fake.enter(gpu);
        let traffic = Traffic::new(&fake, r, gpu, kind, flags, &arrived);
        // NCCL's progress thread has device 0 current.
        let _other = fake.enter(0);
        r.job.barrier.wait();
        if r.rank == 0 {
            busy(&fake, gpus, true);
        }
        r.job.barrier.wait();
        traffic.all();
        r.job.barrier.wait();
        assert_eq!(fake.waits(), waits, "{transport}: threads of ours waited for the application");
        if r.rank == 0 {
            busy(&fake, gpus, false);
        }
        r.job.barrier.wait();
        // Launches that stood come up, and others after them.
        traffic.bursts();
    });
    wait_until("launches that were left have ended", || fake.launched() == 0);
    fake.check();
}

#[test]
fn between_two_gpus() {
    KINDS.into_iter().for_each(|kind| flows("auto", 2, kind, None));
}

#[test]
fn within_one_gpu() {
    KINDS.into_iter().for_each(|kind| flows("auto", 1, kind, None));
}

#[test]
fn without_the_copy_kernel() {
    flows("auto", 2, Signals::NeverReset, Some("kernel=0"));
}

#[test]
fn through_host_memory() {
    flows("staged", 2, Signals::NeverReset, None);
    flows("staged", 1, Signals::Added, None);
}

#[test]
fn over_tcp() {
    flows("tcp", 2, Signals::NeverReset, None);
    flows("tcp", 1, Signals::Added, None);
}

/// A launch that stands is given up, and the copy kernel carries again when the application has left the driver.
#[test]
fn a_launch_that_stood_is_followed_by_others() {
    let fake = take();
    let flags = Signals::NeverReset.set_up(&fake);
    let arrived = AtomicU64::new(0);
    job(2, 2, |r| {
        let _context = fake.enter(0);
        let traffic = Traffic::new(&fake, r, 0, Signals::NeverReset, flags, &arrived);
        if r.rank == 0 {
            wait_until("the first launches have ended", || fake.launched() == 0);
            fake.busy(0, true);
        }
        r.job.barrier.wait();
        let before = fake.commands();
        (0..4).for_each(|_| traffic.bursts());
        r.job.barrier.wait();
        assert_eq!(fake.commands(), before, "a kernel ran although its launch stands");
        r.job.barrier.wait();
        if r.rank == 0 {
            fake.busy(0, false);
        }
        traffic.bursts_until_dispatched(&fake, before);
        traffic.all();
    });
    assert_eq!(fake.launched(), 0);
    fake.check();
}

/// Contexts and windows of other memory come and go while the application stands: what needs no call of the driver
/// waits for none.
#[test]
fn contexts_come_and_go_meanwhile() {
    let fake = take();
    let flags = Signals::NeverReset.set_up(&fake);
    let arrived = AtomicU64::new(0);
    job(2, 1, |r| {
        let _context = fake.enter(r.rank as i32);
        let traffic = Traffic::new(&fake, r, r.rank as i32, Signals::NeverReset, flags, &arrived);
        r.job.barrier.wait();
        if r.rank == 0 {
            busy(&fake, 2, true);
        }
        r.job.barrier.wait();
        for _ in 0..3 {
            let mut config = nccl_plugin_api::rma_v14::ConfigV14 { n_contexts: 1, traffic_class: -1, rank_stride: 1 };
            let mut ctx = null_mut();
            // SAFETY: pointers to locals; a collective call.
            ok(unsafe { T.create_context.unwrap()(r.coll, &mut config, &mut ctx) });
            let host = r.window(8, 0);
            traffic.puts();
            r.dereg(&host);
            // SAFETY: destroyed once.
            ok(unsafe { T.destroy_context.unwrap()(ctx) });
        }
        r.job.barrier.wait();
        if r.rank == 0 {
            busy(&fake, 2, false);
        }
        r.job.barrier.wait();
    });
    fake.check();
}

/// A communicator closes while its application stands in the driver for longer than closing waits: it closes, and says
/// so.
#[test]
fn closing_is_bounded() {
    if is_elsewhere(concat!(module_path!(), "::closing_is_bounded")) {
        return;
    }
    let fake = take();
    let flags = Signals::NeverReset.set_up(&fake);
    let [began, released] = [(); 2].map(|()| AtomicBool::new(false));
    std::thread::scope(|s| {
        s.spawn(|| {
            wait_until("it is being closed", || began.load(Ordering::SeqCst));
            let end = Instant::now() + Duration::from_secs(60);
            // Until it is closed all the same.
            while !released.load(Ordering::SeqCst) && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(10));
            }
            fake.busy(0, false);
        });
        job(1, 1, |r| {
            logged::listen();
            let _context = fake.enter(0);
            let window = fake.window(r, 0, 64, 0);
            let sig = fake.signals(r, 0, 1, flags);
            r.wait(r.put(0, (window.as_window(), 0), 8, (window.as_window(), 64), 0, Some((sig.as_window(), 0, 1))));
            fake.busy(0, true);
            began.store(true, Ordering::SeqCst);
        });
        released.store(true, Ordering::SeqCst);
    });
    wait_until("the thread has ended by itself", || fake.launched() == 0);
    assert!(said("has not returned"), "{:?}", *logged::lines());
    fake.check();
}

/// Memory of cudaMalloc, to which copies would wait for the application, is refused with a sentence.
#[test]
fn memory_of_cuda_malloc_is_refused() {
    let fake = take();
    job(1, 1, |r| {
        logged::listen();
        let _context = fake.enter(0);
        let at = fake.malloc(0, 4096, false);
        let mut handle = null_mut();
        // SAFETY: memory of the fake that stays.
        let result = unsafe {
            T.reg_mr_sym.unwrap()(r.coll, at as *mut c_void, 4096, nccl_plugin_api::PTR_CUDA, 0, &mut handle)
        };
        assert_eq!(result, NcclResult::INVALID_USAGE);
    });
    assert!(said("is memory of cudaMalloc") && said("ncclMemAlloc"), "{:?}", *logged::lines());
    fake.check();
}

/// The watch names a call that does not return, and a GPU on which nothing moves.
#[test]
fn what_stands_is_named() {
    if is_elsewhere(concat!(module_path!(), "::what_stands_is_named")) {
        return;
    }
    let fake = take();
    fake.set_transport("auto");
    let flags = Signals::NeverReset.set_up(&fake);
    let arrived = AtomicU64::new(0);
    job(2, 2, |r| {
        let _context = fake.enter(0);
        let traffic = Traffic::new(&fake, r, 0, Signals::NeverReset, flags, &arrived);
        r.job.barrier.wait();
        logged::listen();
        if r.rank == 0 {
            fake.busy(0, true);
        }
        r.job.barrier.wait();
        traffic.bursts();
        r.job.barrier.wait();
        wait_until("a call that stands is named", || said("in thread") && said("has not returned for 4 s"));
        r.job.barrier.wait();
        if r.rank == 0 {
            fake.busy(0, false);
            fake.hold(1);
            let put = r.put(0, (traffic.gpu.window(), 0), 64, (traffic.to_gpu.window(), 0), 1, None);
            wait_until("a GPU that stands is named", || {
                test(r, put);
                said("nothing has moved on its GPU for 4 s")
            });
            fake.hold(0);
            r.wait(put);
        }
        r.job.barrier.wait();
    });
    fake.check();
}

/// A window in GPU memory on rank 0 and in host memory on rank 1.
fn mixed(fake: &Fake, r: &Rank) -> (Option<GpuWindow>, Window) {
    let gpu = (r.rank == 0).then(|| fake.window(r, 0, 64, 0));
    let host = if gpu.is_none() { r.window(64, 0) } else { r.not_registered(64) };
    (gpu, host)
}

/// The first operation of a rank with GPU memory to one of its process without any makes that one's streams: it does
/// not wait for the application either, and that rank may have a window of that GPU afterwards, with a copy kernel, and
/// is told why not of another.
#[test]
fn the_first_operation_to_a_rank_without_gpu_memory() {
    let fake = take();
    let waits = fake.waits();
    job(2, 1, |r| {
        let _context = fake.enter(0);
        let (gpu, host) = mixed(&fake, r);
        r.job.barrier.wait();
        if let Some(src) = &gpu {
            fake.busy(0, true);
            src.set(0, 77);
            r.wait(r.put(0, (src.as_window(), 0), 64, (src.as_window(), 0), 1, None));
            assert_eq!(fake.waits(), waits, "a post or a poll waited for the application");
            fake.busy(0, false);
        }
        r.job.barrier.wait();
        assert!(r.rank == 0 || host.words[0] == 77);
        let loads = fake.calls("cuModuleLoadData");
        r.job.barrier.wait();
        let _own = fake.window(r, 0, 64, 0);
        r.job.barrier.wait();
        assert!(fake.calls("cuModuleLoadData") > loads, "rank 1 has no copy kernel");
        r.job.barrier.wait();
        logged::listen();
        // All are told if one may not.
        let (other, mut handle) = (fake.alloc(r.rank as i32, 64, false), null_mut());
        // SAFETY: device memory that stays; what is refused is not used.
        let refused = unsafe { T.reg_mr_sym.unwrap()(r.coll, other as *mut c_void, 64, PTR_CUDA, 0, &mut handle) };
        assert_ne!(refused, NcclResult::SUCCESS);
    });
    assert!(said("what this rank does on a GPU for this communicator it does on GPU 0"));
    fake.check();
}

/// A rank closes its communicator and has not destroyed its context: who puts there from GPU memory only then is told,
/// and opens nothing that nobody would close.
#[test]
fn nothing_is_opened_for_a_rank_that_has_closed() {
    let fake = take();
    let streams = || fake.calls("cuStreamCreateWithPriority");
    let (job, is_closed, is_over) = (Job::new(2), AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|s| {
        for rank in 0..2 {
            let (fake, job, is_closed, is_over) = (&fake, &job, &is_closed, &is_over);
            s.spawn(move || {
                let r = Rank::join(job, rank, 1);
                let _context = fake.enter(0);
                let (gpu, _host) = mixed(fake, &r);
                let made = streams();
                job.barrier.wait();
                if rank == 1 {
                    // SAFETY: plain call; its context's handle stays.
                    ok(unsafe { T.close_coll.unwrap()(r.coll) });
                    is_closed.store(true, Ordering::SeqCst);
                    wait_until("rank 0 is through", || is_over.load(Ordering::SeqCst));
                }
                wait_until("rank 1 has closed", || is_closed.load(Ordering::SeqCst));
                if let Some(src) = &gpu {
                    let (handle, mut request) = (src.as_window().handle, null_mut());
                    // SAFETY: a registered window.
                    let put = unsafe { T.iput.unwrap()(r.ctx, 0, 0, handle, 64, 0, handle, 1, 0, &mut request) };
                    assert!(put != NcclResult::SUCCESS || !comes_out(&r, request), "it came out well");
                    assert_eq!(streams(), made, "streams for a rank that has closed");
                }
                is_over.store(true, Ordering::SeqCst);
                // SAFETY: plain calls.
                unsafe {
                    if rank == 0 {
                        ok(T.destroy_context.unwrap()(r.ctx));
                        ok(T.close_coll.unwrap()(r.coll));
                    } else {
                        T.destroy_context.unwrap()(r.ctx);
                    }
                    ok(T.finalize.unwrap()(r.instance));
                }
            });
        }
    });
    fake.check();
}
