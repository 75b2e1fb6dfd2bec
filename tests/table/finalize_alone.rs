//! A caller that ends an instance and nothing that it made with it leaves nothing behind. Alone in its program, because
//! it counts what the process has open.

#[path = "../support/mod.rs"]
mod support;

use nccl_plugin_api::NcclResult;
use oxygin::vtable::rma_v16::ncclRmaPlugin_v16 as T;
use std::ffi::c_void;
use std::path::PathBuf;
use support::common::*;

/// What the process has open, by what it is.
fn open() -> Vec<PathBuf> {
    let links = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let mut all: Vec<_> = links.filter_map(|fd| std::fs::read_link(fd.path()).ok()).collect();
    // The folder that is being read has gone with it.
    all.retain(|one| !one.starts_with("/proc"));
    all.sort();
    all
}

#[test]
fn finalize_closes_all_that_is_open() {
    let before = open();
    let mut ended = std::sync::Mutex::new(Vec::new());
    job(2, 1, |r| {
        let src = r.window(8, 0);
        let sig = r.window(1, 1);
        r.wait(r.put(0, (&src, 0), 0, (&src, 0), 1 - r.rank, Some((&sig, 0, 1))));
        r.wait_signal(&sig, 0, 1);
        r.job.barrier.wait();
        // Another one beside it, which is not left in order.
        let other = Rank::join(&r.job, r.rank, 1);
        let window = other.window(8, 0);
        r.job.barrier.wait();
        // SAFETY: a live handle.
        ok(unsafe { T.finalize.unwrap()(other.instance) });
        drop(window);
        ended.lock().unwrap().push([other.coll as usize, other.ctx as usize]);
    });
    assert_eq!(open(), before);
    for [coll, ctx] in ended.get_mut().unwrap() {
        // SAFETY: these are looked up only.
        let again =
            unsafe { [T.close_coll.unwrap()(*coll as *mut c_void), T.destroy_context.unwrap()(*ctx as *mut c_void)] };
        assert_eq!(again, [NcclResult::INVALID_ARGUMENT; 2], "they went with the instance");
    }
}
