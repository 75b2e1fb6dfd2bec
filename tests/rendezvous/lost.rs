//! Ranks that are late, dead or out of reach in a collective step, over real sockets.

use crate::ranks::*;
use oxygin::comm::handle::{Handle, Token};
use oxygin::comm::rendezvous::{wire, Contribution, Exchange, Listener};
use oxygin::config::Config;
use oxygin::fabric::World;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Barrier};
use std::time::Duration;

/// Runs `test` on all cases at once: each only waits.
fn at_once<C: Send>(cases: impl IntoIterator<Item = C>, test: impl Fn(C) + Sync) {
    std::thread::scope(|scope| {
        for case in cases {
            scope.spawn(|| test(case));
        }
    });
}

#[test]
fn a_missing_rank_is_named_by_all() {
    // A rank that a busy machine holds up is not missing.
    let exchanges = exchanges(&config(5.0), 4);
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
        assert!(sentence.contains("did not come within 5 s"), "{sentence}");
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

/// As `config`, and a host that should answer may be silent for `silence` seconds.
fn impatient(timeout: f64, silence: f64) -> Config {
    Config { peer_timeout: Some(Duration::from_secs_f64(silence)), ..config(timeout) }
}

/// Takes one request of `regMrSym` with `len` bytes for all, and answers it.
fn answer(one: &mut TcpStream, len: usize) {
    one.read_exact(&mut vec![0; 44 + "regMrSym".len() + len]).unwrap();
    let list = wire::encode_list([&b"a"[..], b"b"].into_iter());
    let mut answer = wire::gathered_head(1, list.len(), list.len());
    answer.extend(list.iter().chain(&list));
    one.write_all(&answer).unwrap();
}

/// Makes room for one connection in a listener's queue, and takes it.
fn crowd(socket: &TcpListener) -> Vec<TcpStream> {
    // SAFETY: plain call on an open socket, which listens already.
    assert_eq!(unsafe { libc::listen(socket.as_raw_fd(), 0) }, 0);
    vec![TcpStream::connect(socket.local_addr().unwrap()).unwrap()]
}

#[test]
fn a_rank_0_whose_queue_of_connections_is_full_is_waited_for() {
    const SILENCE: f64 = 1.0;
    // No attempt gets through, or one of which rank 0's kernel then knows nothing.
    at_once([false, true], |loses| {
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let exchange = before(&socket, &impatient(60.0, SILENCE));
        let crowd = if loses { Vec::new() } else { crowd(&socket) };
        if loses {
            lose(&socket, 64);
        }
        let rank_0 = std::thread::spawn(move || {
            // It comes later than its host may be silent.
            std::thread::sleep(Duration::from_secs_f64(SILENCE * 4.0));
            lose_no_more(&socket);
            loop {
                let (mut one, _) = socket.accept().unwrap();
                lose_no_more(&one);
                let mut first = [0];
                if one.peek(&mut first).is_ok_and(|n| n > 0) {
                    return answer(&mut one, 4);
                }
            }
        });
        std::thread::scope(|scope| {
            let rank_1 =
                scope.spawn(|| exchange.step("regMrSym", Ok(Contribution { common: vec![7; 4], addressed: vec![] })));
            std::thread::sleep(Duration::from_secs_f64(SILENCE * 4.0));
            drop(crowd);
            assert_eq!(rank_1.join().unwrap().unwrap().common(1), b"b");
        });
        rank_0.join().unwrap();
    });
}

/// Takes back what `lose` did, if it was.
fn lose_no_more(socket: &impl AsRawFd) {
    let zero = 0 as libc::c_int;
    // SAFETY: an option of the size of an int, which lives through the call.
    let code = unsafe {
        let fd = socket.as_raw_fd();
        libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_DETACH_FILTER, (&raw const zero).cast(), 4)
    };
    let error = std::io::Error::last_os_error();
    assert!(code == 0 || error.raw_os_error() == Some(libc::ENOENT), "{error}");
}

#[test]
fn a_rank_0_that_nothing_is_heard_of_is_named_at_the_deadline() {
    // Nothing arrives, or the handshake does and the request does not.
    at_once([0, 64], |from| {
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let exchange = before(&socket, &impatient(4.0, 0.5));
        lose(&socket, from);
        let error = sentence(exchange.step("regMrSym", Ok(brings(1, 2))));
        assert!(error.contains("rank 0 (127.0.0.1:") && error.contains("did not come within 4 s"), "{error}");
        assert!(from == 0 || error.contains("(last: nothing answers there"), "{error}");
    });
}

#[test]
fn a_host_of_rank_0_that_vanishes_in_the_step_is_not_waited_for_until_the_deadline() {
    // The last: it vanishes with most of the request on its way.
    at_once([(1, 1), (20 << 10, 20 << 10), (32 << 20, 20 << 10)], |(len, reads)| {
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let exchange = before(&socket, &impatient(60.0, 2.0));
        let vanishes = std::thread::spawn(move || {
            let (mut one, _) = socket.accept().unwrap();
            one.read_exact(&mut vec![0; 44 + "regMrSym".len() + reads]).unwrap();
            lose(&one, 0);
            (socket, one)
        });
        let mine = Contribution { common: vec![7; len], addressed: vec![] };
        let error = sentence(exchange.step("regMrSym", Ok(mine)));
        assert!(error.contains("rank 0 (127.0.0.1:") && error.contains("has not answered for 2 s"), "{len}: {error}");
        drop(vanishes.join().unwrap());
    });
}

#[test]
fn a_large_request_waits_for_a_rank_0_that_has_no_room_for_it_yet() {
    const LEN: usize = 32 << 20;
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let exchange = before(&socket, &impatient(60.0, 0.5));
    let late = std::thread::spawn(move || {
        let (mut one, _) = socket.accept().unwrap();
        // Its kernel is there all the while, and takes only some of it.
        std::thread::sleep(Duration::from_secs(4));
        answer(&mut one, LEN);
    });
    let mine = Contribution { common: vec![7; LEN], addressed: vec![] };
    assert_eq!(exchange.step("regMrSym", Ok(mine)).unwrap().common(1), b"b");
    late.join().unwrap();
}

#[test]
fn a_rank_whose_host_vanishes_in_the_step_is_not_waited_for_until_the_deadline() {
    // Rank 0 speaks to those who wait more often than its kernel looks after an idle connection.
    let (exchanges, root) = joined(&impatient(60.0, 4.0), 1, 4);
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
