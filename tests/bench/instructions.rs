//! What callgrind counts: 8-byte puts with a signal through the RMA v16 table of the shipped library, each tested
//! until done, over a verbs library that completes at once. `tests/bench/instructions` runs it.
//!
//! `instructions LIBRARY IN_FLIGHT ROUNDS`; only what runs inside [`counted`] is of interest. Both ranks are in this
//! process.

use nccl_plugin_api::rma_v14::ConfigV14;
use nccl_plugin_api::rma_v16::RmaV16;
use nccl_plugin_api::*;
use std::error::Error;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::{Barrier, Mutex};

/// What ranks 0 and 1 share.
struct Meeting {
    handles: Mutex<[[u8; HANDLE_BYTES]; 2]>,
    barrier: Barrier,
}

/// One rank's communicator. Objects of the plugin.
struct Rank {
    instance: *mut c_void,
    coll: *mut c_void,
    ctx: *mut c_void,
    data: *mut c_void,
    signals: *mut c_void,
    memory: Box<[u64; 1024]>,
}

fn ok(what: &str, code: NcclResult) {
    assert_eq!(code, NcclResult::SUCCESS, "{what}");
}

impl Rank {
    fn join(table: &RmaV16, rank: usize, meeting: &Meeting) -> Self {
        let mut listening = null_mut();
        let mut r = Rank {
            instance: null_mut(),
            coll: null_mut(),
            ctx: null_mut(),
            data: null_mut(),
            signals: null_mut(),
            memory: Box::new([0; 1024]),
        };
        let mut handle = [0; HANDLE_BYTES];
        // SAFETY: all pointers are to locals and fields that outlive the calls.
        unsafe {
            ok("init", table.init.unwrap()(&mut r.instance, 7, None));
            ok("listen", table.listen.unwrap()(r.instance, 0, handle.as_mut_ptr().cast(), &mut listening));
            meeting.handles.lock().unwrap()[rank] = handle;
            meeting.barrier.wait();
            let mut all = *meeting.handles.lock().unwrap();
            let mut pointers = all.each_mut().map(|h| h.as_mut_ptr().cast());
            let connect = table.connect.unwrap();
            ok("connect", connect(null_mut(), pointers.as_mut_ptr(), 2, rank as i32, listening, &mut r.coll));
            ok("closeListen", table.close_listen.unwrap()(listening));
            let mut config = ConfigV14 { n_contexts: 1, traffic_class: -1, rank_stride: 1 };
            ok("createContext", table.create_context.unwrap()(r.coll, &mut config, &mut r.ctx));
            let register = table.reg_mr_sym.unwrap();
            let base = r.memory.as_mut_ptr();
            ok("regMrSym", register(r.coll, base.cast(), 4096, PTR_HOST, 0, &mut r.data));
            let signals = base.add(512).cast();
            ok("regMrSym", register(r.coll, signals, 4096, PTR_HOST, MR_FLAG_FORCE_SO, &mut r.signals));
        }
        meeting.barrier.wait();
        r
    }

    fn leave(self, table: &RmaV16) {
        // SAFETY: the rank's own objects, ended once each.
        unsafe {
            ok("deregMrSym", table.dereg_mr_sym.unwrap()(self.coll, self.signals));
            ok("deregMrSym", table.dereg_mr_sym.unwrap()(self.coll, self.data));
            ok("destroyContext", table.destroy_context.unwrap()(self.ctx));
            ok("closeColl", table.close_coll.unwrap()(self.coll));
            ok("finalize", table.finalize.unwrap()(self.instance));
        }
    }
}

/// Posts one operation for each request, then tests each until done. Callgrind collects while this runs.
#[inline(never)]
fn counted(table: &RmaV16, rank: &Rank, requests: &mut [*mut c_void]) {
    let (put, test) = (table.iput_signal.unwrap(), table.test.unwrap());
    for request in requests.iter_mut() {
        // SAFETY: the windows and the communicator are alive.
        let code = unsafe {
            put(rank.ctx, 0, 0, rank.data, 8, 8, rank.data, 1, 0, rank.signals, 1, SIGNAL_OP_ADD, true, 0, request)
        };
        assert_eq!(code, NcclResult::SUCCESS);
    }
    for &request in requests.iter() {
        let mut done = 0;
        while done == 0 {
            // SAFETY: the request is outstanding.
            assert_eq!(unsafe { test(rank.coll, request, &mut done) }, NcclResult::SUCCESS);
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, path, in_flight, rounds] = arguments.as_slice() else {
        return Err("usage: instructions LIBRARY IN_FLIGHT ROUNDS".into());
    };
    let (in_flight, rounds): (usize, u64) = (in_flight.parse()?, rounds.parse()?);
    // SAFETY: the library under test.
    let library = unsafe { libloading::Library::new(path)? };
    // SAFETY: the symbol is this table, and lives as long as the library.
    let table = unsafe { &**library.get::<*const RmaV16>(b"ncclRmaPlugin_v16")? };
    let meeting = Meeting { handles: Mutex::new([[0; HANDLE_BYTES]; 2]), barrier: Barrier::new(2) };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let peer = Rank::join(table, 1, &meeting);
            meeting.barrier.wait();
            // SAFETY: inside the memory; the peer writes it behind the compiler's back.
            let seen = unsafe { peer.memory.as_ptr().add(512).read_volatile() };
            assert_eq!(seen, in_flight as u64 * rounds, "every signal arrived");
            peer.leave(table);
        });
        let rank = Rank::join(table, 0, &meeting);
        let mut requests = vec![null_mut(); in_flight];
        for _ in 0..rounds {
            counted(table, &rank, &mut requests);
        }
        meeting.barrier.wait();
        rank.leave(table);
    });
    Ok(())
}
