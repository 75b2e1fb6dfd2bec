//! The rendezvous over real sockets: every rank is a thread with its own listener and exchange.

use oxygin::comm::handle::{Handle, Token};
use oxygin::comm::rendezvous::{wire, Contribution, Exchange, Gathered, Listener};
use oxygin::config::Config;
use oxygin::error::{Error, Result};
use oxygin::fabric::World;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

fn config(timeout: f64) -> Config {
    Config { timeout: Duration::from_secs_f64(timeout), socket_ifname: Some("lo".into()), ..Config::default() }
}

/// One exchange a rank, with the listeners gone but rank 0's.
fn exchanges(config: &Config, nranks: u32) -> Vec<Exchange> {
    let listeners: Vec<_> = (0..nranks).map(|_| Arc::new(Listener::open(config).unwrap())).collect();
    let handles: Vec<_> = listeners.iter().map(|l| l.handle()).collect();
    (0..nranks)
        .zip(listeners)
        .map(|(rank, listener)| Exchange::new(config, World { rank, nranks }, &handles, listener).unwrap())
        .collect()
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
    let handles = [root.encode(), listener.handle()];
    let exchange = Exchange::new(&config, World { rank: 1, nranks: 2 }, &handles, listener).unwrap();
    let dies = std::thread::spawn(move || drop(socket.accept().unwrap()));
    let error = sentence(exchange.step("connect", Ok(brings(1, 2))));
    assert!(error.contains("rank 0 (127.0.0.1:") && error.ends_with("went away: its process ended"), "{error}");
    dies.join().unwrap();
}

#[test]
fn a_rank_that_dies_in_the_step_is_known_at_once() {
    let config = config(3600.0);
    let listeners: Vec<_> = (0..4).map(|_| Arc::new(Listener::open(&config).unwrap())).collect();
    let handles: Vec<_> = listeners.iter().map(|l| l.handle()).collect();
    let exchanges: Vec<_> = (0..3)
        .map(|rank| Exchange::new(&config, World { rank, nranks: 4 }, &handles, listeners[rank as usize].clone()))
        .map(Result::unwrap)
        .collect();
    // Stands in for rank 3: contributes and is gone. Rank 2 never comes.
    let root = Handle::decode(&handles[0]).unwrap();
    let sender = wire::Sender { token: root.token, step: 1, name: "connect", rank: 3, nranks: 4 };
    let request = wire::encode_request(&sender, Ok(b""), b"").unwrap();
    TcpStream::connect(root.address).unwrap().write_all(&request).unwrap();
    let sentences = each(&exchanges[..2], |exchange, rank| sentence(exchange.step("connect", Ok(brings(rank, 4)))));
    for sentence in sentences {
        assert!(sentence.starts_with("connect: rank 3 (127.0.0.1:") && sentence.contains("went away"), "{sentence}");
    }
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
    let config = config(60.0);
    let listeners: Vec<_> = (0..N).map(|_| Arc::new(Listener::open(&config).unwrap())).collect();
    let handles: Vec<_> = listeners.iter().map(|l| l.handle()).collect();
    let address = listeners[0].address();
    let exchanges: Vec<_> = (0..N)
        .zip(&listeners)
        .map(|(rank, l)| Exchange::new(&config, World { rank, nranks: N }, &handles, l.clone()).unwrap())
        .collect();
    // More than rank 0 tolerates at a time: silent, talkative, half a head, a good head with another token.
    let strangers: Vec<_> = (0..200)
        .map(|i| {
            let mut socket = TcpStream::connect(address).unwrap();
            let bytes: &[u8] = match i % 4 {
                0 => b"",
                1 => b"GET / HTTP/1.1\r\n\r\n",
                2 => b"oxyQ\x01\0\0",
                _ => b"oxyQ\x01\0\0\0................\x01\0\0\0\x01\0\0\0\x08\0\0\0\0\0\0\0\0\0\0\0",
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
    let world = World { rank: 0, nranks: 2 };
    let open = |handles: &[[u8; 128]]| Exchange::new(&config, world, handles, listener.clone()).map(|_| ());
    assert!(open(&[listener.handle()]).unwrap_err().message().contains("1 handles"));
    assert!(open(&[listener.handle(), [0; 128]]).unwrap_err().message().starts_with("connect: rank 1: "));
    let other = Listener::open(&config).unwrap();
    assert!(open(&[other.handle(), listener.handle()]).unwrap_err().message().contains("rank 0 is not the one"));
}
