//! A forked child has its parent's handles and nothing that they stand for: whatever it sets up, moves or ends with
//! them is refused, with one line in the log, and the parent's communicator goes on.

#[path = "../verbs/harness/mod.rs"]
mod harness;
#[path = "../support/mod.rs"]
mod support;

use nccl_plugin_api::gin_v11::GinV11;
use nccl_plugin_api::rma_v14::ConfigV14;
use nccl_plugin_api::*;
use oxygin::vtable::gin_v11::ncclGinPlugin_v11 as OLD;
use oxygin::vtable::gin_v12::ncclGinPlugin_v12 as ANY;
use oxygin::vtable::gin_v13::ncclGinPlugin_v13 as V13;
use oxygin::vtable::rma_v16::ncclRmaPlugin_v16 as T;
use std::ffi::c_void;
use std::ptr::null_mut;
use support::common::*;
use support::logged;

/// What the child does with its parent's handles. Every call must be refused.
fn calls(r: &Rank, listen: *mut c_void, set: *mut c_void, w: &Window) -> Vec<(&'static str, NcclResult)> {
    const OLD_TABLE: &GinV11 = &OLD;
    let (mut made, mut bytes) = (null_mut(), [0u64; 8]);
    let mut config = ConfigV14 { n_contexts: 1, traffic_class: -1, rank_stride: 1 };
    let mut handle = [0u8; HANDLE_BYTES];
    let mut all: [*mut c_void; 1] = [handle.as_mut_ptr().cast()];
    // SAFETY: all pointers are to locals that live through the calls.
    unsafe {
        let at = bytes.as_mut_ptr().cast();
        vec![
            ("deregMrSym", T.dereg_mr_sym.unwrap()(r.coll, w.handle)),
            ("regMrSym", T.reg_mr_sym.unwrap()(r.coll, at, 64, PTR_HOST, 0, &mut made)),
            ("createContext", T.create_context.unwrap()(r.coll, &mut config, &mut made)),
            ("createContext of v11", OLD_TABLE.create_context.unwrap()(r.coll, 1, 1, &mut made, null_mut())),
            ("destroyContext", T.destroy_context.unwrap()(r.ctx)),
            ("destroyContext of v11", OLD_TABLE.destroy_context.unwrap()(set)),
            ("listen", T.listen.unwrap()(r.instance, 0, handle.as_mut_ptr().cast(), &mut made)),
            ("connect", T.connect.unwrap()(null_mut(), all.as_mut_ptr(), 1, 0, listen, &mut made)),
            ("closeListen", T.close_listen.unwrap()(listen)),
            ("closeColl", T.close_coll.unwrap()(r.coll)),
            ("finalize", T.finalize.unwrap()(r.instance)),
            ("finalize of v12", ANY.finalize.unwrap()(r.instance)),
        ]
    }
}

/// Operations of its parent's: each way that they go in the library, and a request that is done. Every call must be
/// refused.
fn operations(r: &Rank, w: &Window, sig: &Window, request: *mut c_void) -> Vec<(&'static str, NcclResult)> {
    let (mut made, mut done, mut has_error) = (null_mut(), 0, false);
    // SAFETY: all pointers are to locals that live through the calls, or to windows.
    unsafe {
        let mut put_signal = |size| {
            let (s, w) = (sig.handle, w.handle);
            let put = T.iput_signal.unwrap();
            put(r.ctx, 0, 0, w, size, 8, w, 1, 0, s, 1, SIGNAL_OP_ADD, true, 0, &mut made)
        };
        let mut all = vec![("iputSignal", put_signal(8)), ("iputSignal, no bytes", put_signal(0))];
        all.extend([
            ("iput", T.iput.unwrap()(r.ctx, 0, 0, w.handle, 8, 8, w.handle, 1, 0, &mut made)),
            ("iget", T.iget.unwrap()(r.ctx, 0, 0, w.handle, 8, 8, w.handle, 1, 0, &mut made)),
            ("iflush", T.iflush.unwrap()(r.ctx, 0, w.handle, 1, &mut made)),
            ("test", T.test.unwrap()(r.coll, request, &mut done)),
            ("rmaProgress", T.rma_progress.unwrap()(r.ctx)),
            ("queryLastError", T.query_last_error.unwrap()(r.ctx, &mut has_error)),
            ("queryLastError of v13", V13.query_last_error.unwrap()(r.ctx, &mut has_error)),
        ]);
        all
    }
}

/// What is wrong with how the child was answered.
fn faults(calls: impl FnOnce() -> Vec<(&'static str, NcclResult)>, parent: u32) -> Vec<String> {
    let mut faults = Vec::new();
    logged::lines().clear();
    let results = calls();
    let lines = logged::lines();
    for (call, result) in &results {
        if *result != NcclResult::INVALID_USAGE {
            faults.push(format!("{call} returned {}", result.0));
        }
    }
    let said = lines.iter().filter(|(_, line)| line.contains(&format!("forked from {parent}, which made the"))).count();
    if said != results.len() || lines.len() != results.len() {
        faults.push(format!("{} calls, {said} of {} lines: {lines:#?}", results.len(), lines.len()));
    }
    drop(lines);
    // What the child makes itself is its own.
    let mut instance = null_mut();
    // SAFETY: a local that lives through the call; the instance is live.
    let own = unsafe { [T.init.unwrap()(&mut instance, 1, None), T.finalize.unwrap()(instance)] };
    if own != [NcclResult::SUCCESS; 2] {
        faults.push(format!("its own init and finalize returned {} and {}", own[0].0, own[1].0));
    }
    faults
}

/// Forks; the child does `body` and is killed if that takes too long. Says what it found wrong.
fn in_a_child(body: impl FnOnce() -> Vec<String>) -> String {
    const WITHIN: libc::c_uint = 60;
    let (read, write) = nix::unistd::pipe().unwrap();
    // SAFETY: the child has one thread; what the others of this process may hold locked, loggers and allocator, they
    // hold briefly, and they are idle now.
    match unsafe { libc::fork() } {
        0 => {
            // SAFETY: plain call.
            unsafe { libc::alarm(WITHIN) };
            let found = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
            let text = found.map_or("it panicked".into(), |faults| faults.join("\n"));
            let _ = nix::unistd::write(&write, format!("{text}.").as_bytes());
            // SAFETY: plain call; nothing of the parent's is to be run.
            unsafe { libc::_exit(0) }
        }
        child => {
            assert!(child > 0, "{}", std::io::Error::last_os_error());
            drop(write);
            let mut said = String::new();
            std::io::Read::read_to_string(&mut std::fs::File::from(read), &mut said).unwrap();
            // SAFETY: a child of ours that nobody else waits for.
            unsafe { libc::waitpid(child, null_mut(), 0) };
            said
        }
    }
}

#[test]
fn a_child_can_neither_use_nor_end_what_its_parent_uses() {
    let _fake = harness::Fake::take();
    logged::collect();
    // In this order: what devices there are is asked once.
    for fabric in ["verbs", "soft"] {
        std::env::set_var("OXYGIN_FABRIC", fabric);
        forks();
    }
}

fn forks() {
    job(2, 1, |r| {
        let src = r.window(8, 0);
        let sig = r.window(1, 1);
        let (mut listen, mut handle) = (null_mut(), [0u8; HANDLE_BYTES]);
        // SAFETY: pointers to locals that live through the call.
        ok(unsafe { T.listen.unwrap()(r.instance, 0, handle.as_mut_ptr().cast(), &mut listen) });
        let mut set = null_mut();
        // SAFETY: as above.
        ok(unsafe { OLD.create_context.unwrap()(r.coll, 1, 1, &mut set, null_mut()) });
        let meet = |n: u64| {
            let request = r.put(0, (&src, 0), 8, (&src, 8), 1 - r.rank, Some((&sig, 0, 1)));
            r.wait(request);
            r.wait_signal(&sig, 0, n);
            r.job.barrier.wait();
            request
        };
        meet(1);
        // As the one before: the library knows the way already.
        let request = meet(2);
        if r.rank == 0 {
            logged::listen();
            let parent = std::process::id();
            let said = in_a_child(|| {
                let all = || [operations(r, &src, &sig, request), calls(r, listen, set, &src)].concat();
                faults(all, parent)
            });
            assert_eq!(said, ".", "the child's faults, and a period if it came to its end");
        }
        r.job.barrier.wait();
        // Nothing has happened to it.
        meet(3);
        let another = r.window(8, 0);
        r.wait(r.put(0, (&another, 0), 64, (&another, 0), 1 - r.rank, Some((&sig, 0, 1))));
        r.wait_signal(&sig, 0, 4);
        r.job.barrier.wait();
        r.dereg(&another);
        // SAFETY: live handles.
        unsafe {
            ok(OLD.destroy_context.unwrap()(set));
            ok(T.close_listen.unwrap()(listen));
        }
    });
}
