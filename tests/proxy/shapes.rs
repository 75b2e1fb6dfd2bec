//! Sets of contexts in the shapes that programs ask for.

use crate::support::common::{job, ok};
use crate::support::device::{entry, own, Ask, Device};
use nccl_plugin_api::descriptor::*;
use nccl_plugin_api::*;
use oxygin::vtable::gin_v14::ncclGinPlugin_v14 as GIN;
use std::ptr::null_mut;

#[test]
fn contexts_and_depths_of_real_programs() {
    let _turn = own();
    // DeepEP V2, NCCL EP, the default.
    for (contexts, depth, size) in [(17, 1024, 1024), (65, 193, 256), (129, 1024, 1024), (4, 0, 256)] {
        job(2, 1, |r| {
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
            r.job.barrier.wait();
            for c in 0..contexts as usize {
                assert_eq!(device.signal(c, 5), 2 * (c as u64 + 1));
                assert!((0..5).all(|id| device.signal(c, id) == 0));
            }
            assert!(!device.has_error());
            device.destroy();
        });
    }
}

/// Peers that a stride excludes have no queue, and their memory is never touched.
#[test]
fn a_stride_leaves_peers_out() {
    let _turn = own();
    job(4, 1, |r| {
        let device = Device::new(r, Ask { stride: 2, ..Ask::default() });
        let (near, far) = ((r.rank + 2) % 4, (r.rank + 1) % 4);
        let signal = || entry(OP_PUT | OP_SIGNAL_INC, 0).with_signal(0, 0, true);
        device.post(0, far, signal());
        for n in 1..=100 {
            device.post(0, near, signal());
            device.wait_signal(0, 0, n);
        }
        device.flush(0, near);
        r.job.barrier.wait();
        assert_eq!((device.ci(0, near), device.ci(0, far), device.signal(0, 0)), (100, 0, 100));
        device.destroy();
    });
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
