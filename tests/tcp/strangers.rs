//! Strangers at the port, peers that break the protocol, and peers that are not there, late, or silent.

use super::harness::*;
use crate::support::apart::is_elsewhere;
use crate::support::logged;
use nix::sys::socket;
use oxygin::fabric::soft::tcp::wire::{Frame, Hello, WindowBytes};
use oxygin::fabric::soft::tcp::{PeerInfo, Tcp, Timing};
use oxygin::fabric::World;
use oxygin::rma::op::Op;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[test]
fn strangers_are_dropped_and_delay_nobody() {
    let _guard = alone();
    let all = ranks_with(2, 1, 8, quick(), &[localhost()]);
    let at = all[1].tcp.addresses()[0];
    let hello = Hello { answer: false, token: token(1), from: 0, to: 1, nranks: 2, stripe: 0, stripes: 1, silence: 0 };
    let wrong_world = Hello { nranks: 3, ..hello }.emit();
    let wrong_token = Hello { token: [99; 16], ..hello }.emit();
    let mut strangers: Vec<TcpStream> = (0..200).map(|_| TcpStream::connect(at).unwrap()).collect();
    for (i, s) in strangers.iter_mut().enumerate() {
        // The oldest are gone already: writing may fail.
        let _ = match i % 5 {
            0 => s.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: everything there is\r\n\r\n"),
            1 => s.write_all(&wrong_token),
            2 => s.write_all(&wrong_world),
            3 => s.write_all(&hello.emit()[..20]),
            _ => Ok(()),
        };
    }
    let start = Instant::now();
    signal_works(&all[0], &all[1]);
    signal_works(&all[1], &all[0]);
    assert!(start.elapsed() < Duration::from_secs(2));
    for s in &mut strangers {
        s.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        match s.read(&mut [0; 64]) {
            Ok(n) => assert_eq!(n, 0, "a stranger was answered"),
            Err(e) => assert_eq!(e.kind(), std::io::ErrorKind::ConnectionReset),
        }
    }
    assert!(all.iter().all(|r| r.health.iter().all(|h| !h.has_failed())));
}

/// One sentence says that descriptors have run out, and who came meanwhile is let in once there are some.
#[test]
fn want_of_descriptors_is_said_once() {
    if is_elsewhere(concat!(module_path!(), "::want_of_descriptors_is_said_once")) {
        return;
    }
    let _guard = alone();
    logged::collect();
    let all = ranks(2, 1, 8);
    let inet = (socket::AddressFamily::Inet, socket::SockType::Stream);
    let caller = socket::socket(inet.0, inet.1, socket::SockFlag::empty(), None).unwrap();
    let free = caller.try_clone().unwrap().as_raw_fd();
    let limit = |soft| {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: a limit, borrowed mutably.
        unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) };
        let before = std::mem::replace(&mut limit.rlim_cur, soft);
        // SAFETY: a limit, borrowed.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) }, 0);
        before
    };
    let before = limit(free as libc::rlim_t);
    let at = socket::SockaddrStorage::from(all[1].tcp.addresses()[0]);
    socket::connect(caller.as_raw_fd(), &at).unwrap();
    std::thread::sleep(Duration::from_millis(2500));
    limit(before);
    let said = logged::said(&["raise the limit of open files"]);
    assert_eq!(said, 1);
    let hello = Hello { answer: false, token: token(1), from: 0, to: 1, nranks: 2, stripe: 0, stripes: 3, silence: 0 };
    let mut caller = TcpStream::from(caller);
    caller.write_all(&hello.emit()).unwrap();
    caller.set_read_timeout(Some(PATIENCE)).unwrap();
    caller.read_exact(&mut [0; 48]).unwrap();
}

#[test]
fn garbage_behind_a_right_greeting_ends_that_peer_alone() {
    let _guard = alone();
    let all = ranks(3, 1, 8);
    let hello = Hello { answer: false, token: token(1), from: 0, to: 1, nranks: 3, stripe: 0, stripes: 1, silence: 0 };
    let mut s = TcpStream::connect(all[1].tcp.addresses()[0]).unwrap();
    s.write_all(&hello.emit()).unwrap();
    let mut answer = [0; 48];
    s.read_exact(&mut answer).unwrap();
    assert_eq!(
        Hello::parse(&answer).unwrap(),
        Hello { answer: true, token: token(0), from: 1, to: 0, silence: 35_000, ..hello }
    );
    s.write_all(&[0x55; 100]).unwrap();
    until("failure", || all[1].health[0].has_failed());
    let e = all[1].health[0].check().unwrap_err();
    assert!(e.message().contains("rank 0") && e.message().contains("unknown kind"), "{e}");
    signal_works(&all[2], &all[1]);
    signal_works(&all[1], &all[2]);
}

#[test]
fn nobody_at_the_address_is_an_error_that_says_so() {
    let _guard = alone();
    let mut all = ranks_with(2, 1, 8, quick(), &[localhost()]);
    let gone = all.pop().unwrap();
    let at = gone.tcp.addresses()[0];
    drop(gone);
    let lane = all[0].lane(0, 1);
    let seq = all[0].post(&lane, Op::Put(put(address(&all[0].data), 4096, 8)));
    let e = wait_error(&lane, seq);
    assert!(e.contains("rank 1") && e.contains(&at.to_string()) && e.contains("refused (os error 111)"), "{e}");
}

#[test]
fn a_refusing_address_is_not_waited_for_as_long_as_a_silent_one() {
    let _guard = alone();
    // Nothing here lasts as long as that.
    let timing = Timing { connect: 10 * PATIENCE, ..Timing::default() };
    let mut all = ranks_with(2, 1, 8, timing, &[localhost(), "127.0.0.2:0".parse().unwrap()]);
    let gone = all.pop().unwrap();
    let at = gone.tcp.addresses();
    drop(gone);
    let lane = all[0].lane(0, 1);
    let seq = all[0].post(&lane, Op::Put(put(address(&all[0].data), 4096, 8)));
    let e = wait_error(&lane, seq);
    assert!(at.iter().all(|a| e.contains(&a.to_string())), "{e}");
    assert!(e.contains("rank 1 refuses") && e.contains("refused (os error 111)"), "{e}");
}

#[test]
fn a_peer_that_listens_late_is_reached() {
    let _guard = alone();
    let mut all = ranks(2, 1, 8);
    let mut late = all.pop().unwrap();
    let at = late.tcp.addresses();
    late.freeze();
    late.tcp.close();
    let lane = all[0].lane(9, 1);
    let mut ring = put(0, 0, 0);
    ring.signal = bell(&late.signals[9], 1, true);
    let seq = all[0].post(&lane, Op::Put(ring));
    // Long enough for a few refusals.
    std::thread::sleep(Duration::from_millis(100));
    assert!(!lane.test(seq).unwrap());
    let tcp = Arc::new(Tcp::open(&at, token(1), 1, late.registry.clone()).unwrap());
    let peers = [all[0].tcp.addresses(), at].into_iter().enumerate();
    let peers = peers.map(|(r, addresses)| PeerInfo { addresses, token: token(r), health: late.health[r].clone() });
    tcp.join(World { rank: 1, nranks: 2 }, peers.collect()).unwrap();
    let late = late.adopt(tcp);
    wait(&lane, seq);
    until("signal", || late.signals[9].load(SeqCst) == 1);
}

#[test]
fn a_peer_that_accepts_in_silence_is_an_error_that_says_so() {
    let _guard = alone();
    let mut all = ranks_with(2, 1, 8, quick(), &[localhost()]);
    all[1].freeze();
    let lane = all[0].lane(0, 1);
    let seq = all[0].post(&lane, Op::Put(put(address(&all[0].data), 4096, 8)));
    let e = wait_error(&lane, seq);
    assert!(e.contains("rank 1") && e.contains("never greeted back"), "{e}");
}

#[test]
fn a_get_is_answered_by_nothing_but_data() {
    let _guard = alone();
    let (a, thread) = impostor(|mut s, _stripe| {
        s.read_exact(&mut [0; 48]).unwrap();
        let place = WindowBytes { rkey: 0, addr: 0, len: 8 };
        s.write_all(&Frame::Put { context: 0, place, bell: None }.emit()).unwrap();
        let _ = s.read(&mut [0; 64]);
    });
    let lane = a.lane(0, 1);
    let seq = a.post(&lane, Op::Get(get(address(&a.data), 4096, 8)));
    let e = wait_error(&lane, seq);
    assert!(e.contains("fits no request"), "{e}");
    thread.join().unwrap();
}
