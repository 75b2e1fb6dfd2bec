//! The rendezvous over real sockets: every rank is a thread with its own listener and exchange.

use crate::ranks::*;
use nccl_plugin_api::NcclResult;
use oxygin::comm::rendezvous::{wire, Contribution, Exchange, Listener};
use oxygin::error::Error;
use oxygin::fabric::World;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Instant;

#[test]
fn sixty_four_ranks_take_many_steps() {
    const N: u32 = 64;
    let exchanges = exchanges(&config(60.0), N);
    let started = Instant::now();
    each(&exchanges, |exchange, rank| {
        for step in 0..20 {
            let name = format!("step {step}");
            check(&exchange.step(&name, Ok(brings(rank, N))).unwrap(), rank, N);
        }
    });
    println!("64 ranks: {:?} a step", started.elapsed() / 20);
}

#[test]
fn one_rank_needs_nobody() {
    let exchanges = exchanges(&config(1.0), 1);
    check(&exchanges[0].step("connect", Ok(brings(0, 1))).unwrap(), 0, 1);
}

#[test]
fn a_failure_on_one_rank_fails_all_and_the_next_step_works() {
    let exchanges = exchanges(&config(60.0), 5);
    each(&exchanges, |exchange, rank| {
        let failure = Error::usage("no window 7");
        let mine = if rank == 3 { Err(&failure) } else { Ok(brings(rank, 5)) };
        let error = exchange.step("regMrSym", mine).unwrap_err();
        assert!(error.message().contains("rank 3 (127.0.0.1:") && error.message().ends_with("no window 7"), "{error}");
        assert_eq!(error.code() == failure.code(), rank == 3);
        check(&exchange.step("regMrSym", Ok(brings(rank, 5))).unwrap(), rank, 5);
    });
}

#[test]
fn what_fails_before_a_step_or_between_two_fails_all_at_once_and_the_next_call_works() {
    const N: u32 = 4;
    let exchanges = exchanges(&config(30.0), N);
    for (wrong, at) in [(0, 0), (2, 0), (0, 1), (3, 1)] {
        for panics in [false, true] {
            let sentences = each(&exchanges, |exchange, rank| {
                let fails = |step| match (rank == wrong && step == at, panics) {
                    (true, true) => panic!("size = 0"),
                    (true, false) => Err(Error::argument("size = 0")),
                    (false, _) => Ok(()),
                };
                let result = exchange.call("regMrSym", |call| {
                    fails(0)?;
                    check(&call.step(brings(rank, N))?, rank, N);
                    fails(1)?;
                    call.step(brings(rank, N))
                });
                let error = result.expect_err("the call should have failed");
                assert_eq!(error.code() == NcclResult::REMOTE_ERROR, rank != wrong, "{error}");
                error.message().to_owned()
            });
            let what = if panics { "failed: a fault inside oxygin: size = 0" } else { "refused: size = 0" };
            for sentence in &sentences {
                assert!(sentence.starts_with(&format!("regMrSym: rank {wrong} (127.0.0.1:")), "{sentence}");
                assert!(sentence.contains(what) && sentence == &sentences[0], "{sentence}");
            }
            each(&exchanges, |exchange, rank| {
                check(&exchange.step("createContext", Ok(brings(rank, N))).unwrap(), rank, N);
            });
        }
    }
}

/// One rank alone knows that a call has failed, as where it is told that an answer has not arrived: the others are in
/// the call's next step while it is in another call, of the same name.
#[test]
fn a_call_that_ends_early_on_one_rank_keeps_no_rank_from_the_next() {
    let brings = |what: u8| Contribution { common: vec![what], addressed: vec![] };
    for early in [0, 1, 2] {
        let exchanges = exchanges(&config(20.0), 3);
        each(&exchanges, |exchange, rank| {
            let first = exchange.call("regMrSym", |call| {
                call.step(brings(1))?;
                if rank == early {
                    call.end();
                    return Err(Error::remote("an answer has not arrived"));
                }
                call.step(brings(2))
            });
            assert!(first.is_err(), "the call of rank {rank} where that of rank {early} has failed");
            for what in [3, 4] {
                let all = exchange.step("regMrSym", Ok(brings(what))).unwrap();
                assert!((0..3).all(|from| all.common(from) == [what]), "another call's");
            }
        });
    }
}

#[test]
fn what_fails_after_the_last_step_is_the_rank_s_own_affair() {
    let exchanges = exchanges(&config(30.0), 3);
    each(&exchanges, |exchange, rank| {
        let result = exchange.call("connect", |call| {
            call.step(brings(rank, 3))?;
            call.end();
            if rank == 1 {
                return Err(Error::usage("later"));
            }
            Ok(())
        });
        assert_eq!(result.err().map(|e| e.message().to_owned()), (rank == 1).then(|| "later".into()));
        check(&exchange.step("regMrSym", Ok(brings(rank, 3))).unwrap(), rank, 3);
    });
}

#[test]
fn a_refusal_that_nobody_could_hear_is_still_told_here() {
    let exchanges = exchanges(&config(0.2), 2);
    let error = sentence(exchanges[1].step("regMrSym", Err(&Error::argument("size = 0"))));
    assert!(error.starts_with("size = 0; the other ranks may not know: regMrSym: rank 0 ("), "{error}");
}

#[test]
fn a_call_takes_all_its_steps_over_one_connection() {
    // Stands in for rank 0 and never accepts twice.
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let exchange = before(&socket, &config(8.0));
    let rank_0 = std::thread::spawn(move || {
        let (mut one, _) = socket.accept().unwrap();
        for step in 1..=3 {
            one.read_exact(&mut [0; 44 + "connect".len() + 1]).unwrap();
            let list = wire::encode_list([&b"a"[..], b"b"].into_iter());
            let mut answer = wire::gathered_head(step, list.len(), list.len());
            answer.extend(list.iter().chain(&list));
            one.write_all(&answer).unwrap();
        }
    });
    let mine = || Contribution { common: vec![1], addressed: vec![] };
    let result = exchange.call("connect", |call| {
        call.step(mine())?;
        call.step(mine())?;
        call.step(mine())
    });
    assert_eq!(result.unwrap().common(1), b"b");
    rank_0.join().unwrap();
}

#[test]
fn different_steps_fail_both() {
    let exchanges = exchanges(&config(60.0), 2);
    let sentences = each(&exchanges, |exchange, rank| {
        sentence(exchange.step(["createContext", "regMrSym"][rank as usize], Ok(brings(rank, 2))))
    });
    assert_eq!(sentences[0], sentences[1]);
    assert!(sentences[0].contains(") is in regMrSym while rank 0 is in createContext"), "{}", sentences[0]);
}

#[test]
fn strangers_delay_nobody() {
    const N: u32 = 8;
    let (exchanges, root) = joined(&config(60.0), N, N);
    // More than rank 0 tolerates at a time: silent, talkative, half a head, a good head with another token.
    let strangers: Vec<_> = (0..200)
        .map(|i| {
            let mut socket = TcpStream::connect(root.address).unwrap();
            let bytes: &[u8] = match i % 4 {
                0 => b"",
                1 => b"GET / HTTP/1.1\r\n\r\n",
                2 => b"oxyQ\x02\0\0",
                _ => b"oxyQ\x02\0\0\0................\x01\0\0\0\x01\0\0\0\x08\0\0\0\0\0\0\0\0\0\0\0",
            };
            socket.write_all(bytes).unwrap();
            socket
        })
        .collect();
    each(&exchanges, |exchange, rank| {
        for _ in 0..3 {
            check(&exchange.step("connect", Ok(brings(rank, N))).unwrap(), rank, N);
        }
    });
    drop(strangers);
}

#[test]
fn large_contributions_pass() {
    const LEN: usize = 3 << 20;
    let exchanges = exchanges(&config(60.0), 3);
    each(&exchanges, |exchange, rank| {
        let mine = Contribution { common: vec![rank as u8; LEN], addressed: vec![rank as u8; 3 * LEN] };
        let gathered = exchange.step("connect", Ok(mine)).unwrap();
        for from in 0..3 {
            for bytes in [gathered.common(from), gathered.addressed(from)] {
                assert!(bytes.len() == LEN && bytes.iter().all(|&b| b == from as u8));
            }
        }
    });
}

#[test]
fn wrong_contributions_are_a_failure_of_that_rank() {
    let exchanges = exchanges(&config(60.0), 3);
    let sentences = each(&exchanges, |exchange, rank| {
        let addressed = if rank == 1 { vec![0; 4] } else { vec![0; 6] };
        sentence(exchange.step("connect", Ok(Contribution { common: vec![], addressed })))
    });
    assert!(sentences.iter().all(|s| s.contains("rank 1 (") && s.contains("not equal slices")), "{}", sentences[0]);
}

#[test]
fn handles_are_checked() {
    let config = config(1.0);
    let listener = Arc::new(Listener::open(&config).unwrap());
    let open = |rank, handles: &[Option<[u8; 128]>]| {
        let world = World { rank, nranks: 2 };
        let result = Exchange::new(&config, world, handles, listener.clone()).map(|e| e.check_handles());
        result.map_err(|e| e.message().to_owned())
    };
    let own = Some(listener.handle());
    assert!(open(0, &[own]).unwrap_err().contains("1 handles"));
    assert!(open(0, &[own, Some([0; 128])]).unwrap_err().starts_with("connect: rank 1: "));
    let other = Some(Listener::open(&config).unwrap().handle());
    assert!(open(0, &[other, own]).unwrap().unwrap_err().message().contains("rank 0 is not the one"));
    // Some ranks' handles need not be known, to be told so.
    assert!(open(0, &[None, None]).unwrap().is_ok() && open(1, &[other, None]).unwrap().is_ok());
    assert!(open(1, &[None, own]).unwrap_err().contains("no handle of rank 0"));
}
