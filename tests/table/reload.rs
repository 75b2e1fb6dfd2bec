//! Loading, using and unloading the shipped library a hundred times leaves nothing behind.
//!
//! One test in this file, so that nothing else in the process opens files or starts threads meanwhile.

#[path = "../support/mod.rs"]
mod support;

use nccl_plugin_api::rma_v14::ConfigV14;
use nccl_plugin_api::rma_v16::RmaV16;
use nccl_plugin_api::*;
use std::ffi::c_void;
use std::path::Path;
use std::ptr::null_mut;
use support::{release, tasks};

const TIMES: usize = 100;

/// What a process owns that a library could leave behind.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Belongings {
    threads: usize,
    descriptors: usize,
    /// Lines of /proc/self/maps, without anonymous memory: the allocator keeps some of that.
    mappings: Vec<String>,
}

impl Belongings {
    fn now() -> Self {
        let threads = tasks::running().len();
        let descriptors = std::fs::read_dir("/proc/self/fd").expect("descriptors").count();
        let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
        let mut mappings: Vec<String> = maps
            .lines()
            .filter_map(|line| line.split_whitespace().nth(5))
            .filter(|name| !name.starts_with('['))
            .map(str::to_owned)
            .collect();
        mappings.sort();
        Self { threads, descriptors, mappings }
    }
}

fn ok(what: &str, result: NcclResult) {
    assert_eq!(result, NcclResult::SUCCESS, "{what}");
}

/// A process that is forked from this one ends in good order: nothing in it calls code that is not there.
fn a_child_ends() {
    // SAFETY: the child ends at once; its status is read from a local.
    unsafe {
        let pid = libc::fork();
        if pid == 0 {
            libc::_exit(7);
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(pid, &mut status, 0), pid);
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 7, "status {status:#x}");
    }
}

/// One life of the library: load, a communicator of one rank, a put with a signal to itself, and the way back.
fn live(path: &Path) {
    // SAFETY: the library is ours; its constructors are those of Rust's runtime.
    let library = unsafe { libloading::Library::new(path) }.expect("the library loads");
    // SAFETY: the symbol is this table.
    let table = unsafe { *library.get::<*const RmaV16>(b"ncclRmaPlugin_v16").expect("the table") };
    // SAFETY: the table lives as long as the library, which is dropped last.
    let table = unsafe { &*table };
    let (mut ctx, mut listening, mut coll, mut rma) = (null_mut(), null_mut(), null_mut(), null_mut());
    let (mut data_mh, mut signal_mh) = (null_mut(), null_mut());
    let mut handle = [0u8; HANDLE_BYTES];
    let mut handles = [handle.as_mut_ptr().cast::<c_void>()];
    let mut config = ConfigV14 { n_contexts: 2, traffic_class: -1, rank_stride: 1 };
    let (mut data, mut signals) = (vec![7u8; 8192], vec![0u64; 8]);
    // SAFETY: all pointers are to locals that outlive the calls; objects are used in NCCL's order.
    unsafe {
        ok("init", table.init.unwrap()(&mut ctx, 1, None));
        ok("listen", table.listen.unwrap()(ctx, 0, handle.as_mut_ptr().cast(), &mut listening));
        ok("connect", table.connect.unwrap()(ctx, handles.as_mut_ptr(), 1, 0, listening, &mut coll));
        ok("closeListen", table.close_listen.unwrap()(listening));
        ok("createContext", table.create_context.unwrap()(coll, &mut config, &mut rma));
        let register = table.reg_mr_sym.unwrap();
        ok("regMrSym", register(coll, data.as_mut_ptr().cast(), data.len(), PTR_HOST, 0, &mut data_mh));
        let bytes = signals.len() * 8;
        ok("regMrSym", register(coll, signals.as_mut_ptr().cast(), bytes, PTR_HOST, MR_FLAG_FORCE_SO, &mut signal_mh));
        let mut request = null_mut();
        let put = table.iput_signal.unwrap();
        ok(
            "iputSignal",
            put(rma, 1, 0, data_mh, 4096, 4096, data_mh, 0, 8, signal_mh, 1, SIGNAL_OP_INC, true, 0, &mut request),
        );
        let mut done = 0;
        while done == 0 {
            ok("test", table.test.unwrap()(coll, request, &mut done));
        }
        while signals.as_ptr().add(1).read_volatile() != 1 {
            ok("rmaProgress", table.rma_progress.unwrap()(rma));
        }
        a_child_ends();
        ok("deregMrSym", table.dereg_mr_sym.unwrap()(coll, signal_mh));
        ok("deregMrSym", table.dereg_mr_sym.unwrap()(coll, data_mh));
        ok("destroyContext", table.destroy_context.unwrap()(rma));
        ok("closeColl", table.close_coll.unwrap()(coll));
        ok("finalize", table.finalize.unwrap()(ctx));
    }
    library.close().expect("dlclose");
    a_child_ends();
}

#[test]
fn a_hundred_lives_leave_nothing_behind() {
    let path = release::library();
    // The first life may bring in what the C library and the dynamic linker keep for themselves.
    std::thread::scope(|s| s.spawn(|| live(&path)).join().unwrap());
    let before = Belongings::now();
    assert!(!before.mappings.iter().any(|name| name.contains("liboxygin")), "still mapped after dlclose");
    for _ in 0..TIMES {
        // Threads of their own, as NCCL's are: what a thread keeps of the library goes when the thread does.
        std::thread::scope(|s| s.spawn(|| live(&path)).join().unwrap());
    }
    assert_eq!(Belongings::now(), before);
}
