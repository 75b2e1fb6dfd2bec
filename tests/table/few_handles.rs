//! The table of handles runs out on one rank alone, in the middle of a collective call. Alone in this file: the ranks
//! of a process share that table.

#[path = "../support/mod.rs"]
mod support;

use nccl_plugin_api::rma_v14::ConfigV14;
use nccl_plugin_api::*;
use oxygin::comm::instance::Instance;
use oxygin::sys::handles::{reserve, Reserved};
use oxygin::vtable::rma_v16::ncclRmaPlugin_v16 as T;
use std::ptr::null_mut;
use std::sync::Mutex;
use support::common::{job, ok, Rank};

const N: usize = 3;

fn register(rank: &Rank) -> NcclResult {
    let (mut data, mut mh) = ([0_u64; 8], null_mut());
    // SAFETY: memory of this frame, deregistered before it ends.
    unsafe {
        let code = T.reg_mr_sym.unwrap()(rank.coll, data.as_mut_ptr().cast(), 64, PTR_HOST, 0, &mut mh);
        if code == NcclResult::SUCCESS {
            ok(T.dereg_mr_sym.unwrap()(rank.coll, mh));
        }
        code
    }
}

fn create(rank: &Rank) -> NcclResult {
    let mut ctx = null_mut();
    let mut config = ConfigV14 { n_contexts: 1, traffic_class: -1, rank_stride: 1 };
    // SAFETY: plain calls.
    unsafe {
        let code = T.create_context.unwrap()(rank.coll, &mut config, &mut ctx);
        if code == NcclResult::SUCCESS {
            ok(T.destroy_context.unwrap()(ctx));
        }
        code
    }
}

#[test]
fn a_handle_that_one_rank_does_not_get_fails_the_call_on_all() {
    let places: Mutex<Vec<Reserved<Instance>>> = Mutex::default();
    job(N, 1, |rank| {
        for call in [register, create] {
            rank.job.barrier.wait();
            if rank.rank == 0 {
                // Room for all ranks but one.
                let mut places = places.lock().unwrap();
                places.extend(std::iter::from_fn(|| reserve().ok()));
                let all = places.len();
                places.truncate(all - (N - 1));
            }
            rank.job.barrier.wait();
            assert_ne!(call(rank), NcclResult::SUCCESS, "rank {}", rank.rank);
            rank.job.barrier.wait();
            places.lock().unwrap().clear();
            rank.job.barrier.wait();
            ok(call(rank));
        }
    });
}
