//! GIN v12, of NCCL 2.29.7, whose connect makes the connections of NCCL's proxy.

use crate::harness::{here, Fake, Registered};
use crate::support::common::{ok, Job, Rank};
use crate::support::kernel::{Kernel, WAYS};
use crate::support::nic::{write, Ask};
use nccl_plugin_api::{NcclResult, HANDLE_BYTES};
use oxygin::vtable::gin_v12::ncclGinPlugin_v12 as V12;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, Mutex};

/// Joins with four connections of 64 slots.
fn join(job: &Arc<Job>, rank: usize, handles: &Mutex<Vec<[u8; HANDLE_BYTES]>>) -> Rank {
    let (mut instance, mut listen, mut coll) = (null_mut(), null_mut(), null_mut());
    let mut handle = [0; HANDLE_BYTES];
    // SAFETY: pointers to locals that live through the calls.
    unsafe {
        ok(V12.init.unwrap()(&mut instance, 1, None));
        ok(V12.listen.unwrap()(instance, 0, handle.as_mut_ptr().cast(), &mut listen));
        handles.lock().unwrap()[rank] = handle;
        job.barrier.wait();
        let mut all = handles.lock().unwrap().clone();
        let mut pointers: Vec<*mut c_void> = all.iter_mut().map(|h| h.as_mut_ptr().cast()).collect();
        let ranks = job.nranks as c_int;
        let connect = V12.connect.unwrap();
        ok(connect(null_mut(), pointers.as_mut_ptr(), ranks, rank as c_int, 4, 64, listen, &mut coll));
        ok(V12.close_listen.unwrap()(listen));
    }
    Rank { job: job.clone(), rank, instance, coll, ctx: null_mut() }
}

/// What this table lets the caller do by himself: it names the communicator.
fn put_of_the_caller(r: &Rank, window: *mut c_void) -> NcclResult {
    let mut request = null_mut();
    // SAFETY: live handles, and a pointer to a local.
    unsafe { V12.iput.unwrap()(r.coll, 0, window, 8, 0, window, 1 - r.rank as u32, 0, &mut request) }
}

fn one_rank(r: &Rank) {
    let through = WAYS[0];
    assert_eq!(through.table, 12);
    let (src, dst) = (Registered::new(r, through), Registered::new(r, through));
    assert_eq!(put_of_the_caller(r, src.mhandle), NcclResult::INVALID_USAGE);
    let mut ctx = null_mut();
    // SAFETY: a pointer to a local; there is no place for the device handle.
    let refused = unsafe { V12.create_context.unwrap()(r.coll, 4, 4, 2, &mut ctx, null_mut()) };
    assert_eq!((refused, ctx), (NcclResult::INVALID_ARGUMENT, null_mut()));
    let kernel = Kernel::new(r, through, Ask { contexts: 2, ..Ask::default() }, &here);
    assert_eq!(kernel.qp(1, 0).view.size, 64, "the depth that connect was told");
    r.job.barrier.wait();
    src.set(0, 7 + r.rank as u64);
    let put = write(kernel.at(dst.gin, 1 - r.rank, 8), kernel.own(src.gin, 0), 8);
    kernel.qp(1, 1 - r.rank).post(&[put, kernel.add_signal(1, 1 - r.rank, 0, 1)]);
    kernel.wait_signal(1, 0, 1);
    assert_eq!((dst.get(1), kernel.has_error()), (8 - r.rank as u64, false));
    assert_ne!(put_of_the_caller(r, src.mhandle), NcclResult::SUCCESS);
    r.job.barrier.wait();
    kernel.destroy();
}

#[test]
fn gin_v12_connects_and_gives_kernels_queue_pairs() {
    const RANKS: usize = 2;
    let fake = Fake::take();
    let (job, handles) = (Job::new(RANKS), Mutex::new(vec![[0; HANDLE_BYTES]; RANKS]));
    std::thread::scope(|s| {
        for rank in 0..RANKS {
            let (job, handles) = (&job, &handles);
            s.spawn(move || {
                let done = std::panic::catch_unwind(|| {
                    let rank = join(job, rank, handles);
                    one_rank(&rank);
                    job.barrier.wait();
                    rank.leave();
                });
                if let Err(panic) = done {
                    job.barrier.fail();
                    std::panic::resume_unwind(panic);
                }
            });
        }
    });
    fake.check_clean();
}
