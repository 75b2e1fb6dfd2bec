//! Drives an 8-byte iputSignal and its test through the RMA v16 or the GIN v13 table of a plugin library, for
//! `tests/bench/instructions` to count under callgrind: `table_instructions LIBRARY one|window rma-v16|gin-v13`.
//! Prints the number of operations.
//!
//! One rank puts to itself, which takes the same way through the library as a put to any other rank.

use nccl_plugin_api::gin_v13::{self, GinV13};
use nccl_plugin_api::rma_v14::ConfigV14;
use nccl_plugin_api::rma_v16::{RmaV16, SYMBOL};
use nccl_plugin_api::NcclResult;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};

/// Times that the operations in flight are started and tested.
const ROUNDS: usize = 2000;

/// What the calls need. Set-up goes through the RMA table; the handles are good for both.
struct Target {
    table: RmaV16,
    /// Whose iputSignal and test are counted, if not those of `table`.
    gin: Option<GinV13>,
    coll: *mut c_void,
    contexts: *mut c_void,
    data: *mut c_void,
    signals: *mut c_void,
}

mod measured {
    use super::*;

    /// Starts and tests as many operations as there are places for requests; returns how many were done at once.
    #[inline(never)]
    pub fn round(t: &Target, requests: &mut [*mut c_void]) -> usize {
        let test = t.gin.as_ref().map_or(t.table.test, |gin| gin.test);
        let (Some(start), Some(test)) = (t.table.iput_signal, test) else { return 0 };
        let gin = t.gin.as_ref().and_then(|gin| gin.iput_signal);
        for request in requests.iter_mut() {
            // SAFETY: the handles came from the library; the windows outlive the operations.
            unsafe {
                match gin {
                    None => start(t.contexts, 0, 0, t.data, 8, 64, t.data, 0, 8, t.signals, 1, 2, true, 0, request),
                    Some(start) => start(t.contexts, 0, 0, t.data, 8, 64, t.data, 0, 8, t.signals, 1, 2, request),
                }
            };
        }
        let mut finished = 0;
        for &mut request in requests {
            let mut done = 0;
            // SAFETY: the request came from the library.
            unsafe { test(t.coll, request, &mut done) };
            finished += done as usize;
        }
        finished
    }
}

fn good(what: &str, rc: NcclResult) {
    assert_eq!(rc, NcclResult::SUCCESS, "{what}");
}

fn main() {
    let arguments: Vec<_> = std::env::args().collect();
    let in_flight = match arguments.get(2).map(String::as_str) {
        Some("one") => 1,
        Some("window") => 32,
        _ => {
            eprintln!("usage: table_instructions LIBRARY one|window");
            std::process::exit(2);
        }
    };
    // SAFETY: the caller names a plugin; its tables have the types that their names say.
    let (library, table, gin) = unsafe {
        let library = libloading::Library::new(&arguments[1]).unwrap();
        let table = *library.get::<*const RmaV16>(SYMBOL.to_bytes()).unwrap().cast::<RmaV16>();
        let gin = match arguments.get(3).map(String::as_str) {
            Some("gin-v13") => {
                Some(*library.get::<*const GinV13>(gin_v13::SYMBOL.to_bytes()).unwrap().cast::<GinV13>())
            }
            _ => None,
        };
        (library, table, gin)
    };
    let memory: Vec<AtomicU64> = (0..32).map(|_| AtomicU64::new(0)).collect();
    let (mut context, mut listen, mut coll, mut contexts) = (null_mut(), null_mut(), null_mut(), null_mut());
    let (mut data, mut signals) = (null_mut(), null_mut());
    let mut handle = [0u8; 128];
    // SAFETY: called as NCCL does, with memory that outlives the communicator.
    unsafe {
        good("init", table.init.unwrap()(&mut context, 1, None));
        good("listen", table.listen.unwrap()(context, 0, handle.as_mut_ptr().cast(), &mut listen));
        let mut handles = [handle.as_mut_ptr().cast()];
        good("connect", table.connect.unwrap()(context, handles.as_mut_ptr(), 1, 0, listen, &mut coll));
        good("closeListen", table.close_listen.unwrap()(listen));
        let mut config = ConfigV14 { n_contexts: 1, traffic_class: -1, rank_stride: 1 };
        good("createContext", table.create_context.unwrap()(coll, &mut config, &mut contexts));
        let base = memory.as_ptr() as *mut c_void;
        good("regMrSym", table.reg_mr_sym.unwrap()(coll, base, 128, 1, 0, &mut data));
        good("regMrSym", table.reg_mr_sym.unwrap()(coll, base.byte_add(128), 128, 1, 1, &mut signals));
    }
    let target = Target { table, gin, coll, contexts, data, signals };
    memory[0].store(77, Ordering::Relaxed);
    let mut requests = vec![null_mut(); in_flight];
    let finished: usize = (0..ROUNDS).map(|_| measured::round(&target, &mut requests)).sum();
    let operations = ROUNDS * in_flight;
    assert_eq!(finished, operations, "a verbs library that completes at once leaves nothing unfinished");
    assert_eq!(memory[8].load(Ordering::Acquire), 77);
    assert_eq!(memory[17].load(Ordering::Acquire), operations as u64);
    // SAFETY: ends what was begun above.
    unsafe {
        good("deregMrSym", table.dereg_mr_sym.unwrap()(coll, signals));
        good("deregMrSym", table.dereg_mr_sym.unwrap()(coll, data));
        good("destroyContext", table.destroy_context.unwrap()(contexts));
        good("closeColl", table.close_coll.unwrap()(coll));
        good("finalize", table.finalize.unwrap()(context));
    }
    drop(library);
    println!("{operations}");
}
