//! Batches, room and payloads on this fabric.

use super::*;
use crate::fabric::Posted;
use crate::rma::op::{Payload, Value, VALUE_MAX};

pub(super) fn post(context: &Context, peer: u32, ops: &[Op]) -> Posted {
    // SAFETY: windows are never freed.
    unsafe { context.post(peer, ops) }.unwrap()
}

pub(super) fn configs(n: usize, transport: SoftTransport) -> Vec<Config> {
    let config = || Config { soft_transport: transport, max_operations: 1024, ..Config::default() };
    (0..n).map(|_| config()).collect()
}

/// Payloads of all lengths with signals, whose operations are gone as soon as they are posted, many at once.
#[test]
fn payloads_arrive_after_their_operations_are_gone() {
    for transport in [SoftTransport::NoCma, SoftTransport::Tcp] {
        let ranks = join_with(2, configs(2, transport));
        let context = ranks[0].context();
        for (peer, rank) in (0..).zip(&ranks) {
            let (to, signals) = (rank.window(5, 1 << 16), rank.window(6, 8));
            let (mut sum, mut last) = (0, 0);
            for round in 0..8u64 {
                let mut expected = Vec::new();
                let mut ops: Vec<Op> = (0..1000u64)
                    .map(|i| {
                        let bytes: Vec<u8> = (0..i % (VALUE_MAX as u64 + 1)).map(|b| (b ^ i ^ round) as u8).collect();
                        let signal = Some(Signal { remote: signals.base, rkey: 6, value: i, strong: i % 2 == 0 });
                        let (payload, remote) = (Payload::new(&bytes).unwrap(), to.base + 64 * i);
                        expected.push((remote, bytes));
                        sum += i;
                        Op::Value(Value { payload, rkey: 5, remote, signal, more: false })
                    })
                    .collect();
                let mut posted = post(&context, peer, &ops);
                assert_eq!(posted.taken, 1000);
                last += 1000;
                assert_eq!(posted.last, Seq(last));
                ops.fill(Op::Put(put(&to, &to, 0, None)));
                // A bare put behind them, with the next number.
                posted = post(&context, peer, &ops[..1]);
                last += 1;
                assert_eq!(posted, Posted { taken: 1, last: Seq(last) });
                wait(&context, peer, posted.last);
                until("all signals", || signals.word(0).load(Ordering::Acquire) == sum);
                for (at, bytes) in expected {
                    // SAFETY: inside the window, and nobody writes any more.
                    let arrived = unsafe { std::slice::from_raw_parts(at as *const u8, bytes.len()) };
                    assert_eq!(arrived, bytes);
                }
            }
        }
    }
}

/// What the peer has not taken counts against `OXYGIN_MAX_OPERATIONS`, whichever way it goes, and nobody else.
#[test]
fn a_peer_that_takes_nothing_takes_no_room_from_others() {
    for transport in [SoftTransport::NoCma, SoftTransport::Tcp] {
        // The addresses of both are here; rank 2 never answers.
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let ranks = join_beside(3, configs(2, transport), silent.local_addr().unwrap());
        let context = ranks[0].context();
        let (from, to) = (ranks[0].window(5, 64), ranks[1].window(6, 64));
        let ops = vec![Op::Put(put(&from, &to, 64, None)); 700];
        assert_eq!(post(&context, 2, &ops), Posted { taken: 700, last: Seq(700) });
        assert_eq!(post(&context, 2, &ops), Posted { taken: 324, last: Seq(1024) });
        assert_eq!(post(&context, 2, &ops), Posted::NONE);
        // Neither another context to it nor this one to others.
        assert_eq!(post(&ranks[0].context(), 2, &ops).taken, 700);
        let mut done = 0;
        while done < 3000 {
            let posted = post(&context, 1, &ops);
            done += posted.taken;
            context.progress().unwrap();
        }
        wait(&context, 1, Seq(done as u32));
        assert_eq!(post(&context, 2, &ops), Posted::NONE);
    }
}
