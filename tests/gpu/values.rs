//! Payloads inside operations, to GPU memory by every way of the soft fabric. No table has such operations yet: these
//! go to the fabric itself.

use crate::harness::Fake;
use oxygin::config::{Config, SoftTransport};
use oxygin::fabric::soft::{Context as SoftContext, SoftFabric};
use oxygin::fabric::{Context, ContextSpec, Fabric, Region, World};
use oxygin::memory::gpu::inspect;
use oxygin::memory::registry::Registry;
use oxygin::memory::window::Registration;
use oxygin::rma::op::{Op, Payload, Signal, Value, VALUE_MAX};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

fn pair(transport: SoftTransport) -> Vec<SoftFabric> {
    let config = Arc::new(Config { soft_transport: transport, ..Config::default() });
    let open = || SoftFabric::open(&config, Arc::new(Registry::default())).unwrap();
    let fabrics = vec![open(), open()];
    let hellos: Vec<_> = fabrics.iter().map(Fabric::hello).collect();
    let hellos: Vec<&[u8]> = hellos.iter().map(Vec::as_slice).collect();
    for (rank, fabric) in (0..).zip(&fabrics) {
        fabric.join(World { rank, nranks: 2 }, &hellos).unwrap();
    }
    fabrics
}

fn window(fake: &Fake, fabric: &SoftFabric, id: u32, bytes: usize) -> (u64, Registration) {
    let base = fake.alloc(1, bytes, false);
    let region = Region { id, base, len: bytes as u64, strict: false, dma_buf: None };
    let memory = inspect(base, bytes as u64, false).unwrap().unwrap();
    (base, fabric.register_gpu(&region, &memory).unwrap())
}

fn context(fabric: &SoftFabric) -> SoftContext {
    let spec = ContextSpec { contexts: 1, queue_depth: 0, traffic_class: None, rank_stride: 1 };
    let (mut made, _) = fabric.prepare_contexts(&spec).unwrap();
    made.pop().unwrap()
}

#[test]
fn payloads_come_to_gpu_memory_after_their_operations_are_gone() {
    const N: u64 = 130;
    for transport in [SoftTransport::Auto, SoftTransport::Staged, SoftTransport::Tcp] {
        let fake = Fake::take();
        fake.settings(true, 100);
        {
            let _current = fake.enter(1);
            let fabrics = pair(transport);
            let ((data, to), (signals, sig)) =
                (window(&fake, &fabrics[1], 1, 64 * N as usize), window(&fake, &fabrics[1], 2, 64));
            let (from, receiver) = (context(&fabrics[0]), context(&fabrics[1]));
            // SAFETY: where a kernel sees the aligned word.
            let word = unsafe { AtomicU64::from_ptr(fake.peek(signals).cast()) };
            let mut sum = 0;
            for round in 0..5 {
                let mut expected = Vec::new();
                let mut ops = Vec::new();
                for i in 0..N {
                    let bytes: Vec<u8> = (0..i % (VALUE_MAX as u64 + 1)).map(|b| (b ^ i ^ round) as u8).collect();
                    let signal = Some(Signal { remote: signals, rkey: sig.rkey, value: i + 1, strong: true });
                    let (payload, remote) = (Payload::new(&bytes).unwrap(), data + 64 * i);
                    ops.push(Op::Value(Value { payload, rkey: to.rkey, remote, signal, more: false }));
                    expected.push((remote, bytes));
                    sum += i + 1;
                }
                // SAFETY: the operations name no memory of this rank's.
                let posted = unsafe { from.post(1, &ops) }.unwrap();
                assert_eq!(posted.taken, N as usize);
                drop(ops);
                let end = Instant::now() + Duration::from_secs(60);
                while word.load(Ordering::Acquire) != sum || !from.test(1, posted.last).unwrap() {
                    receiver.progress().unwrap();
                    assert!(Instant::now() < end, "{transport:?}: {} of {sum}", word.load(Ordering::Acquire));
                }
                for (at, bytes) in expected {
                    // SAFETY: where a kernel sees so many bytes of the window, which nobody writes now.
                    let arrived = unsafe { std::slice::from_raw_parts(fake.peek(at), bytes.len()) };
                    assert_eq!(arrived, bytes, "{transport:?}");
                }
            }
            drop((from, receiver, to, sig));
        }
        fake.check();
    }
}
