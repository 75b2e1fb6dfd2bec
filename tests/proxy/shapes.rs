//! Sets of contexts in the shapes that programs ask for.

use crate::support::common::{job, ok, Rank};
use crate::support::device::{entry, own, Ask, Device};
use crate::support::processes::processes;
use nccl_plugin_api::descriptor::*;
use nccl_plugin_api::*;
use oxygin::comm::contexts::Contexts;
use oxygin::sys::handles;
use oxygin::vtable::gin_v14::ncclGinPlugin_v14 as GIN;
use std::ptr::null_mut;
use std::sync::atomic::Ordering;

/// The ways that bytes can go: what the soft fabric takes by itself, and sockets.
const WAYS: [&str; 2] = ["auto", "tcp"];

/// One rank of two, in the shapes that programs ask for: DeepEP V2, NCCL EP, the default. On each context everybody
/// adds to a signal of everybody.
fn shapes_of_programs(r: &Rank, barrier: impl Fn()) {
    for (contexts, depth, size) in [(17, 1024, 1024), (65, 193, 256), (129, 1024, 1024), (4, 0, 256)] {
        let device = Device::new(r, Ask { contexts, depth, signals: 6, ..Ask::default() });
        for c in 0..contexts as usize {
            let v1 = device.context(c).v1;
            assert_eq!((v1.nranks, v1.queue_size), (2, size));
            for peer in 0..2 {
                device.post(c, peer, entry(OP_PUT | OP_SIGNAL_ADD, 0).with_signal(5, c as u64 + 1, true));
            }
        }
        for c in 0..contexts as usize {
            device.wait_signal(c, 5, 2 * (c as u64 + 1));
            device.flush(c, 1 - r.rank);
        }
        barrier();
        for c in 0..contexts as usize {
            assert_eq!(device.signal(c, 5), 2 * (c as u64 + 1));
            assert!((0..5).all(|id| device.signal(c, id) == 0));
        }
        assert!(!device.has_error());
        device.destroy();
    }
}

#[test]
fn contexts_and_depths_of_real_programs() {
    let _turn = own();
    for way in WAYS {
        std::env::set_var("OXYGIN_SOFT_TRANSPORT", way);
        job(2, 1, |r| shapes_of_programs(r, || r.job.barrier.wait()));
    }
    std::env::remove_var("OXYGIN_SOFT_TRANSPORT");
}

#[test]
fn contexts_and_depths_of_real_programs_between_processes() {
    processes("contexts_and_depths_of_real_programs_between_processes", 2, &[], |place| {
        std::env::set_var("OXYGIN_ENGINE", "own");
        for way in WAYS {
            std::env::set_var("OXYGIN_SOFT_TRANSPORT", way);
            let r = place.join(1);
            shapes_of_programs(&r, || place.barrier());
            place.barrier();
            r.leave();
        }
    });
}

/// Peers that a stride leaves out have no queue: device code gets no credit for one, and never writes an entry that
/// would stand in somebody else's; a flush, which it does over all ranks, has nothing to wait for.
#[test]
fn a_stride_leaves_peers_out() {
    let _turn = own();
    for (nranks, stride, contexts) in [(4, 2, 1), (4, 2, 5), (5, 3, 4), (3, 7, 9)] {
        job(nranks, 1, |r| {
            let device = Device::new(r, Ask { stride, contexts, depth: 16, ..Ask::default() });
            let (contexts, stride) = (contexts as usize, stride as usize);
            let value = |rank: usize, c: usize| 1 << (8 * rank) | (c as u64) << 48;
            let peers: Vec<_> = (0..nranks).filter(|peer| peer % stride == r.rank % stride).collect();
            // Each queue wraps several times.
            for n in 1..=100 {
                for c in 0..contexts {
                    for &peer in &peers {
                        let add = entry(OP_PUT | OP_SIGNAL_ADD, 0).with_signal(c as u32 % 8, value(r.rank, c), true);
                        device.post(c, peer, add);
                    }
                }
                for c in (0..contexts).filter(|_| n % 10 == 0) {
                    let sum = peers.iter().map(|&rank| n * value(rank, c)).fold(0, u64::wrapping_add);
                    device.wait_signal(c, c % 8, sum);
                }
            }
            for c in 0..contexts {
                for peer in 0..nranks {
                    let is_peer = peers.contains(&peer);
                    device.flush(c, peer);
                    assert_eq!(device.has_credit(c, peer), is_peer, "context {c} to rank {peer}");
                    assert_eq!(device.pi(c, peer).load(Ordering::Relaxed), if is_peer { 100 } else { 0 });
                }
            }
            r.job.barrier.wait();
            let sum = |c: usize| peers.iter().map(|&rank| 100 * value(rank, c)).fold(0, u64::wrapping_add);
            for c in 0..contexts {
                assert_eq!(device.signal(c, c % 8), sum(c), "context {c}");
                assert!((0..8).all(|id| id == c % 8 || device.signal(c, id) == 0), "context {c}");
            }
            assert!(!device.has_error());
            device.destroy();
        });
    }
}

/// Queues of peers that a stride leaves out take no memory, but for gaps in the last group of contexts.
#[test]
fn what_a_set_takes_by_its_stride() {
    let _turn = own();
    let depth = 64;
    // Ranks, contexts and stride; queues of each rank.
    for (nranks, contexts, stride, queues) in [
        (4, 6, 1, [24; 4]),
        (4, 6, 0, [24; 4]),
        (4, 6, 2, [12; 4]),
        (4, 6, 4, [6; 4]),
        (4, 6, 9, [6; 4]),
        // A group of two, and one context whose two queues have a gap between them.
        (4, 3, 2, [7; 4]),
        (3, 4, 2, [8, 4, 8, 0]),
    ] {
        job(nranks, 1, |r| {
            let device = Device::new(r, Ask { contexts, stride, depth, ..Ask::default() });
            let set = handles::clone::<Contexts>(device.ctx).expect("a set");
            let fixed = contexts as usize * (128 + 8 * 8);
            let taken = queues[r.rank] * depth as usize * 128 + fixed;
            assert_eq!(set.device().map(|queues| queues.shared_bytes()), Some(taken), "{contexts} by {stride}");
            device.destroy();
        });
    }
}

/// closeColl and finalize end what destroyContext did not, and a new communicator starts afresh.
#[test]
fn contexts_that_nobody_destroys_end_with_the_communicator() {
    let _turn = own();
    for _ in 0..3 {
        job(2, 1, |r| {
            let device = Device::new(r, Ask::default());
            let other = Device::new(r, Ask { contexts: 5, ..Ask::default() });
            device.post(0, 1 - r.rank, entry(OP_PUT | OP_SIGNAL_INC, 0).with_signal(0, 0, true));
            device.wait_signal(0, 0, 1);
            r.job.barrier.wait();
            other.destroy();
        });
    }
}

#[test]
fn what_cannot_be_is_refused_on_every_rank() {
    let _turn = own();
    job(2, 1, |r| {
        let bad = [
            ConfigWith { contexts: 0, ..ConfigWith::GOOD },
            ConfigWith { signals: -1, ..ConfigWith::GOOD },
            ConfigWith { counters: 1 << 23 | 1, ..ConfigWith::GOOD },
            ConfigWith { depth: 40_000, ..ConfigWith::GOOD },
            ConfigWith { version: 3, ..ConfigWith::GOOD },
        ];
        for (i, bad) in bad.into_iter().enumerate() {
            // One rank alone is wrong; the other one is told.
            let what = if i % 2 == r.rank { bad } else { ConfigWith::GOOD };
            let ask = Ask {
                contexts: what.contexts,
                signals: what.signals,
                counters: what.counters,
                depth: what.depth,
                stride: 1,
            };
            let mut config = ask.config();
            config.backend_version = what.version;
            let (mut ctx, mut handle) = (null_mut(), null_mut());
            // SAFETY: pointers to locals.
            let result = unsafe { GIN.create_context.unwrap()(r.coll, &mut config, &mut ctx, &mut handle) };
            assert_ne!(result, NcclResult::SUCCESS, "case {i}");
            assert!(ctx.is_null() && handle.is_null());
        }
        let mut config = Ask::default().config();
        let mut ctx = null_mut();
        // SAFETY: pointers to locals, or NULL.
        unsafe {
            let refused = GIN.create_context.unwrap()(r.coll, &mut config, &mut ctx, null_mut());
            assert_eq!(refused, NcclResult::INVALID_ARGUMENT);
        }
        let device = Device::new(r, Ask::default());
        device.post(0, 1 - r.rank, entry(OP_PUT | OP_SIGNAL_INC, 0).with_signal(0, 0, true));
        device.wait_signal(0, 0, 1);
        r.job.barrier.wait();
        device.destroy();
        let mut props = std::mem::MaybeUninit::<PropertiesV12>::uninit();
        // SAFETY: a place for the answer, filled on success.
        unsafe {
            ok(GIN.get_properties.unwrap()(0, props.as_mut_ptr()));
            assert_eq!(props.assume_init().net_device_type, DEVICE_GIN_GDAKI);
        }
    });
}

#[derive(Clone, Copy)]
struct ConfigWith {
    contexts: i32,
    signals: i32,
    counters: i32,
    depth: i32,
    version: i32,
}

impl ConfigWith {
    const GOOD: Self = Self { contexts: 1, signals: 4, counters: 4, depth: 64, version: 2 };
}
