//! The rendezvous over real sockets: every rank is a thread with its own listener and exchange.

use nccl_plugin_api::NcclResult;
use oxygin::comm::handle::{Handle, Token};
use oxygin::comm::rendezvous::{wire, Contribution, Exchange, Gathered, Listener};
use oxygin::config::Config;
use oxygin::error::{Error, Result};
use oxygin::fabric::World;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

fn config(timeout: f64) -> Config {
    Config { timeout: Duration::from_secs_f64(timeout), socket_ifname: Some("lo".into()), ..Config::default() }
}

/// One exchange a rank, with the listeners gone but rank 0's.
fn exchanges(config: &Config, nranks: u32) -> Vec<Exchange> {
    joined(config, nranks, nranks).0
}

/// The same of the first `joined` ranks alone, and where rank 0 is for those that stand in for the others.
fn joined(config: &Config, joined: u32, nranks: u32) -> (Vec<Exchange>, Handle) {
    let listeners: Vec<_> = (0..nranks).map(|_| Arc::new(Listener::open(config).unwrap())).collect();
    let handles: Vec<_> = listeners.iter().map(|l| Some(l.handle())).collect();
    let root = Handle::decode(&handles[0].unwrap()).unwrap();
    let exchanges = (0..joined)
        .zip(listeners)
        .map(|(rank, listener)| Exchange::new(config, World { rank, nranks }, &handles, listener).unwrap())
        .collect();
    (exchanges, root)
}

/// Stands in for a rank: contributes to the first step of `connect`.
fn contribute(root: &Handle, rank: u32, nranks: u32) -> TcpStream {
    let sender = wire::Sender { token: root.token, step: 1, name: "connect", rank, nranks };
    let mut socket = TcpStream::connect(root.address).unwrap();
    socket.write_all(&wire::encode_request(&sender, Ok(b""), b"").unwrap()).unwrap();
    socket
}

/// What `rank` brings: its rank to all, and to each a slice that names both.
fn brings(rank: u32, nranks: u32) -> Contribution {
    let addressed = (0..nranks).flat_map(|to| [rank as u8, to as u8]).collect();
    Contribution { common: vec![rank as u8; rank as usize % 5], addressed }
}

fn check(gathered: &Gathered, rank: u32, nranks: u32) {
    for from in 0..nranks {
        assert_eq!(gathered.common(from), vec![from as u8; from as usize % 5]);
        assert_eq!(gathered.addressed(from), [from as u8, rank as u8]);
    }
}

/// Runs `what` for each rank of `exchanges` in a thread of its own and returns what they return, by rank.
fn each<T: Send>(exchanges: &[Exchange], what: impl Fn(&Exchange, u32) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            exchanges.iter().map(|exchange| scope.spawn(|| what(exchange, exchange.world().rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn sentence(result: Result<Gathered>) -> String {
    result.expect_err("the step should have failed").message().to_owned()
}

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
fn a_missing_rank_is_named_by_all() {
    let exchanges = exchanges(&config(1.0), 4);
    let together = Barrier::new(3);
    let sentences = each(&exchanges, |exchange, rank| {
        if rank == 2 {
            return None;
        }
        together.wait();
        Some(sentence(exchange.step("createContext", Ok(brings(rank, 4)))))
    });
    for sentence in sentences.into_iter().flatten() {
        assert!(sentence.starts_with("createContext: rank 2 (127.0.0.1:"), "{sentence}");
        assert!(sentence.contains("did not come within 1 s"), "{sentence}");
    }
}

#[test]
fn a_missing_rank_0_is_named_by_all() {
    let exchanges = exchanges(&config(0.2), 3);
    let sentences = each(&exchanges[1..], |exchange, rank| sentence(exchange.step("connect", Ok(brings(rank, 3)))));
    for sentence in &sentences {
        assert!(sentence.starts_with("connect: rank 0 (127.0.0.1:"), "{sentence}");
    }
    // Rank 0 comes when the others have left.
    let error = sentence(exchanges[0].step("connect", Ok(brings(0, 3))));
    assert!(error.contains("gave up after 0.2 s before rank 0 came"), "{error}");
}

#[test]
fn a_rank_0_that_dies_in_the_step_is_known_at_once() {
    // Stands in for rank 0: takes the connection, and then the process is gone with all its sockets.
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let root = Handle { address: socket.local_addr().unwrap(), token: Token::random().unwrap() };
    let config = config(3600.0);
    let listener = Arc::new(Listener::open(&config).unwrap());
    let handles = [Some(root.encode()), Some(listener.handle())];
    let exchange = Exchange::new(&config, World { rank: 1, nranks: 2 }, &handles, listener).unwrap();
    let dies = std::thread::spawn(move || drop(socket.accept().unwrap()));
    let error = sentence(exchange.step("connect", Ok(brings(1, 2))));
    assert!(
        error.contains("rank 0 (127.0.0.1:") && error.ends_with("went away: nobody listens there any more"),
        "{error}"
    );
    dies.join().unwrap();
}

#[test]
fn a_rank_0_that_died_before_the_step_is_known_at_once() {
    let mut exchanges = exchanges(&config(30.0), 4);
    each(&exchanges, |exchange, rank| check(&exchange.step("connect", Ok(brings(rank, 4))).unwrap(), rank, 4));
    // With its process go its sockets.
    drop(exchanges.remove(0));
    let sentences = each(&exchanges, |exchange, rank| sentence(exchange.step("regMrSym", Ok(brings(rank, 4)))));
    for sentence in sentences {
        assert!(sentence.starts_with("regMrSym: rank 0 (127.0.0.1:") && sentence.contains("went away"), "{sentence}");
    }
}

/// From here on the kernel throws away segments of `from` bytes and more, header included, that come for this socket,
/// or for one that is accepted on it. With 0 its host has vanished, to the other end.
fn lose(socket: &impl AsRawFd, from: u32) {
    let step = |code, jf, k| libc::sock_filter { code, jt: 0, jf, k };
    // Load the length; below `from`: take it all, else nothing.
    let mut filter = [step(0x80, 0, 0), step(0x35, 1, from), step(0x06, 0, 0), step(0x06, 0, u32::MAX)];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the kernel copies the program, which outlives the call.
    let result = unsafe {
        let (at, len) = (&raw const program, size_of_val(&program));
        libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, at.cast(), len as u32)
    };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

/// An exchange of rank 1 of 2 whose rank 0 listens at `socket`, and that gives a silent host 4 s, and a step 8.
fn before(socket: &TcpListener) -> Exchange {
    let root = Handle { address: socket.local_addr().unwrap(), token: Token::random().unwrap() };
    let config = config(8.0);
    let listener = Arc::new(Listener::open(&config).unwrap());
    let handles = [Some(root.encode()), Some(listener.handle())];
    Exchange::new(&config, World { rank: 1, nranks: 2 }, &handles, listener).unwrap()
}

#[test]
fn a_host_of_rank_0_that_vanished_before_the_step_is_not_waited_for_until_the_deadline() {
    // Nothing arrives, or the handshake does and the request does not.
    for from in [0, 64] {
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let exchange = before(&socket);
        lose(&socket, from);
        let error = sentence(exchange.step("regMrSym", Ok(brings(1, 2))));
        assert!(error.contains("rank 0 (127.0.0.1:") && error.contains("has not answered for 4 s"), "{error}");
    }
}

#[test]
fn a_host_of_rank_0_that_vanishes_in_the_step_is_not_waited_for_until_the_deadline() {
    for len in [1, 20 << 10] {
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let exchange = before(&socket);
        let vanishes = std::thread::spawn(move || {
            let (mut one, _) = socket.accept().unwrap();
            one.read_exact(&mut vec![0; 44 + "regMrSym".len() + len]).unwrap();
            lose(&one, 0);
            (socket, one)
        });
        let mine = Contribution { common: vec![7; len], addressed: vec![] };
        let error = sentence(exchange.step("regMrSym", Ok(mine)));
        assert!(error.contains("rank 0 (127.0.0.1:") && error.contains("has not answered for 4 s"), "{error}");
        drop(vanishes.join().unwrap());
    }
}

#[test]
fn a_rank_whose_host_vanishes_in_the_step_is_not_waited_for_until_the_deadline() {
    let (exchanges, root) = joined(&config(8.0), 1, 4);
    // Rank 3 contributes and is gone. The others never come.
    let socket = contribute(&root, 3, 4);
    lose(&socket, 0);
    let error = sentence(exchanges[0].step("connect", Ok(brings(0, 4))));
    assert!(error.starts_with("connect: rank 3 (127.0.0.1:") && error.contains("went away"), "{error}");
}

#[test]
fn a_rank_that_dies_in_the_step_is_known_at_once() {
    let (exchanges, root) = joined(&config(3600.0), 2, 4);
    // Rank 3 contributes and is gone. Rank 2 never comes.
    drop(contribute(&root, 3, 4));
    let sentences = each(&exchanges, |exchange, rank| sentence(exchange.step("connect", Ok(brings(rank, 4)))));
    for sentence in sentences {
        assert!(sentence.starts_with("connect: rank 3 (127.0.0.1:") && sentence.contains("went away"), "{sentence}");
    }
}

#[test]
fn a_rank_that_dies_between_two_steps_of_a_call_is_known_at_once() {
    let (exchanges, root) = joined(&config(30.0), 2, 3);
    // Rank 2 takes one step, and is gone when it has the answer.
    let stand_in = std::thread::spawn(move || {
        let mut socket = contribute(&root, 2, 3);
        let mut answer = Vec::new();
        while wire::ReplyHead::parse(&answer).unwrap().is_none_or(|head| answer.len() < head.total()) {
            let mut byte = [0];
            socket.read_exact(&mut byte).unwrap();
            answer.push(byte[0]);
        }
    });
    let sentences = each(&exchanges, |exchange, rank| {
        let result = exchange.call("connect", |call| {
            call.step(brings(rank, 3))?;
            call.step(brings(rank, 3))
        });
        sentence(result)
    });
    for sentence in sentences {
        assert!(sentence.starts_with("connect: rank 2 (127.0.0.1:") && sentence.contains("between two"), "{sentence}");
    }
    stand_in.join().unwrap();
}

#[test]
fn a_call_takes_all_its_steps_over_one_connection() {
    // Stands in for rank 0 and never accepts twice.
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let exchange = before(&socket);
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
