//! Malformed descriptors, and peers that go: what fails, and what goes on.

use crate::support::common::job;
use crate::support::device::{entry, own, Ask, Device};
use crate::support::logged::{collect, lines, listen, said};
use crate::support::variable::Variable;
use nccl_plugin_api::descriptor::*;
use std::time::{Duration, Instant};

/// A malformed descriptor fails its context alone: nothing moves, credits go on, the others work.
#[test]
fn a_malformed_descriptor_fails_its_context_alone() {
    let _turn = own();
    collect();
    job(2, 1, |r| {
        let window = r.window(64, 0);
        listen();
        let handle = window.handle as u64;
        let put = |op, size| entry(OP_PUT | op, size).first(0, handle).second(0, handle);
        let bad = [
            (Descriptor::new(Form::Bytes128, 9, OP_PUT, 8).first(0, handle).second(0, handle), "version 9"),
            (entry(0, 8), "op = 0x0"),
            (put(OP_SIGNAL_INC | OP_SIGNAL_ADD, 8), "op = 0x19"),
            (put(OP_GET, 8), "op = 0x41"),
            (put(1 << 9, 8), "op = 0x201"),
            (entry(OP_VA_SIGNAL, 0).first(0, handle), "op = 0x20"),
            (put(0, 8).first(0, 0xdead_beef), "srcMhandle"),
            (put(0, 8).second(0, 0xdead_bee0), "dstMhandle"),
            (put(0, 513), "srcOff"),
            (put(0, 8).second(505, handle), "dstOff"),
            (put(0, (1 << 57) - 1), "srcOff"),
            (put(OP_INLINE, 9), "inline value"),
            (put(OP_INLINE, 0), "inline value"),
            (put(OP_COUNTER, 8).with_counter(8), "counter 8 of 8"),
            (put(OP_SIGNAL_INC, 8).with_signal(8, 0, true), "signal 8 of 8"),
            (entry(OP_VA_SIGNAL | OP_SIGNAL_INC, 0).first(4, handle), "signalOff"),
            (entry(OP_GET, 8).first(508, handle).second(0, handle), "remoteOff"),
        ];
        let peer = 1 - r.rank;
        let device = Device::new(r, Ask { contexts: bad.len() as i32 + 1, depth: 8, ..Ask::default() });
        let last = bad.len();
        assert!(!device.has_error());
        r.job.barrier.wait();
        for (c, (descriptor, _)) in bad.iter().enumerate() {
            device.post(c, peer, *descriptor);
            // More than the ring holds: credits go on, and so do counters, since sources are free.
            for _ in 0..30 {
                device.post(c, peer, put(OP_SIGNAL_INC | OP_COUNTER, 64).with_signal(1, 0, true).with_counter(2));
            }
            device.flush(c, peer);
            assert_eq!(device.counter(c, 2), 30, "context {c}");
            device.post(last, peer, entry(OP_PUT | OP_SIGNAL_INC, 0).with_signal(1, 0, true));
            device.wait_signal(last, 1, c as u64 + 1);
            assert!(device.has_error());
        }
        r.job.barrier.wait();
        for (c, (_, why)) in bad.iter().enumerate() {
            assert_eq!(device.signal(c, 1), 0, "context {c} does nothing any more");
            assert!(said(&[&format!("context {c}, "), why]) >= 1, "context {c}: {why}: {:#?}", lines());
        }
        assert!(window.words.iter().all(|w| *w == 0));
        device.destroy();
    });
}

/// Windows that were deregistered are refused as any other.
#[test]
fn a_deregistered_window_is_refused() {
    let _turn = own();
    job(2, 1, |r| {
        let window = r.window(64, 0);
        let handle = window.handle as u64;
        let device = Device::new(r, Ask::default());
        let peer = 1 - r.rank;
        device.post(0, peer, entry(OP_PUT, 8).first(0, handle).second(8, handle));
        device.flush(0, peer);
        assert!(!device.has_error());
        r.job.barrier.wait();
        r.dereg(&window);
        r.job.barrier.wait();
        device.post(0, peer, entry(OP_PUT, 8).first(0, handle).second(8, handle));
        device.flush(0, peer);
        assert!(device.has_error());
        r.job.barrier.wait();
        device.destroy();
    });
}

/// A small put is complete before its peer has seen it. That the peer refuses it shows although nothing is under way
/// then and device code writes nothing more: whoever asks looks at all lanes.
#[test]
fn what_a_peer_refuses_behind_its_completion_is_told_of() {
    const WITHIN: Duration = Duration::from_secs(3);
    for transport in ["auto", "tcp"] {
        let _turn = own();
        let _way = Variable::set("OXYGIN_SOFT_TRANSPORT", transport);
        job(2, 1, |r| {
            let window = r.window(64, 0);
            let handle = window.handle as u64;
            // The last of several contexts.
            let device = Device::new(r, Ask { contexts: 5, ..Ask::default() });
            if r.rank == 1 {
                r.dereg(&window);
            }
            r.job.barrier.wait();
            if r.rank == 0 {
                device.post(4, 1, entry(OP_PUT, 8).first(0, handle).second(8, handle));
                device.flush(4, 1);
                let end = Instant::now() + WITHIN;
                while !device.has_error() {
                    assert!(Instant::now() < end, "{transport}");
                    std::thread::sleep(Duration::from_millis(10));
                }
            }
            r.job.barrier.wait();
            assert_eq!(device.has_error(), r.rank == 0, "{transport}");
            device.destroy();
        });
    }
}
