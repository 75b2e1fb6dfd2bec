//! Peers that are stopped, for less and for more than they may be: their hosts go on to acknowledge what comes, so it
//! takes a word of their own to tell.

use super::harness::*;
use oxygin::fabric::soft::tcp::Timing;
use oxygin::rma::op::Op;
use std::time::{Duration, Instant};

fn secs(s: f64) -> Duration {
    Duration::from_secs_f64(s)
}

/// Rank 1 stops with connections that `from` opened to the other. Only rank 0 says how that ends: it is the one to
/// look.
fn stops(from: usize) {
    let _guard = alone();
    let mut all = ranks_with(2, 1, 8, Timing::of(secs(1.0)), &[localhost()]);
    signal_works(&all[from], &all[1 - from]);
    let start = Instant::now();
    all[1].freeze();
    // What is posted is taken by its host, as before.
    if from == 0 {
        let lane = all[0].lane(0, 1);
        let seq = all[0].post(&lane, Op::Put(put(address(&all[0].data), address(&all[1].data), 8)));
        wait(&lane, seq);
    }
    until("failure", || all[0].health[1].has_failed());
    assert!(start.elapsed() >= secs(1.0), "{:?}", start.elapsed());
    let e = all[0].health[1].check().unwrap_err();
    let said = format!("rank 1 at {} has said nothing for 1 s", all[1].tcp.addresses()[0]);
    assert!(e.message().starts_with(&said) && e.message().contains("OXYGIN_PEER_TIMEOUT"), "{e}");
    // It lives after all, and learns that it was given up.
    all[1].thaw();
    until("failure", || all[1].health[0].has_failed());
    let e = all[1].health[0].check().unwrap_err();
    assert!(!e.message().contains("process ended"), "{e}");
}

#[test]
fn a_peer_that_stops_is_given_up() {
    stops(0);
}

#[test]
fn a_peer_that_stops_is_given_up_by_whom_it_writes_to() {
    stops(1);
}

/// A third of the time that it may be stopped for, and then idle for longer than that.
#[test]
fn a_pause_within_the_limit_and_silence_of_the_callers_are_no_failure() {
    let _guard = alone();
    let mut all = ranks_with(2, 1, 1 << 17, Timing::of(secs(4.0)), &[localhost()]);
    signal_works(&all[0], &all[1]);
    signal_works(&all[1], &all[0]);
    all[1].freeze();
    let lane = all[0].lane(0, 1);
    let seq = all[0].post(&lane, Op::Get(get(address(&all[0].data), address(&all[1].data), 1 << 20)));
    std::thread::sleep(secs(1.4));
    all[1].thaw();
    wait(&lane, seq);
    std::thread::sleep(secs(6.0));
    signal_works(&all[0], &all[1]);
    signal_works(&all[1], &all[0]);
    assert!(all.iter().all(|r| r.health.iter().all(|h| !h.has_failed())));
}

/// A rank that was stopped itself has heard nobody meanwhile: it blames nobody. And who has more patience than others
/// beats as often as they need it.
#[test]
fn who_was_stopped_itself_or_waits_for_less_than_others_blames_nobody() {
    let _guard = alone();
    let timing = |rank: usize| Timing::of(secs([3.0, 3600.0][rank]));
    let mut all = ranks_each(2, 1, 8, timing, &[localhost()]);
    signal_works(&all[1], &all[0]);
    all[0].freeze();
    std::thread::sleep(secs(4.0));
    all[0].thaw();
    std::thread::sleep(secs(5.0));
    signal_works(&all[0], &all[1]);
    std::thread::sleep(secs(5.0));
    signal_works(&all[1], &all[0]);
    assert!(all.iter().all(|r| r.health.iter().all(|h| !h.has_failed())));
}

/// A rank whose descriptors have run out opens no life line and accepts none; its host takes what comes on one. What it
/// sends on its data connections says as well that it lives.
#[test]
fn a_peer_that_sends_is_not_silent() {
    use oxygin::fabric::soft::tcp::wire::{Frame, Hello, WindowBytes};
    use std::io::{Read, Write};
    let _guard = alone();
    let listener = std::net::TcpListener::bind(localhost()).unwrap();
    let a = believer_with(&[listener.local_addr().unwrap()], Timing::of(secs(1.0)));
    let mut conns = [0, 1, 2].map(|stripe| {
        let mut s = std::net::TcpStream::connect(a.tcp.addresses()[0]).unwrap();
        let hello = Hello { answer: false, token: token(0), from: 1, to: 0, nranks: 2, stripe, stripes: 3, silence: 0 };
        s.write_all(&hello.emit()).unwrap();
        s.read_exact(&mut [0; 48]).unwrap();
        s
    });
    let nothing = Frame::Put { context: 0, place: WindowBytes { rkey: DATA, addr: 0, len: 0 }, bell: None }.emit();
    let start = Instant::now();
    while start.elapsed() < secs(3.0) {
        conns[0].write_all(&nothing).unwrap();
        std::thread::sleep(secs(0.1));
        assert!(!a.health[1].has_failed(), "{:?} after {:?}", a.health[1].check(), start.elapsed());
    }
    until("failure", || a.health[1].has_failed());
    assert!(a.health[1].check().unwrap_err().message().contains("has said nothing for 1 s"));
}

/// The word of a connection that was closed does not say more than is known.
#[test]
fn a_connection_that_is_closed_is_no_process_that_ended() {
    use oxygin::fabric::soft::tcp::wire::Hello;
    use std::io::{Read, Write};
    let _guard = alone();
    let all = ranks(2, 1, 8);
    let mut express = std::net::TcpStream::connect(all[1].tcp.addresses()[0]).unwrap();
    let hello = Hello { answer: false, token: token(1), from: 0, to: 1, nranks: 2, stripe: 0, stripes: 3, silence: 0 };
    express.write_all(&hello.emit()).unwrap();
    express.read_exact(&mut [0; 48]).unwrap();
    // As a rank does whose descriptors ran out before it had all of its connections.
    express.shutdown(std::net::Shutdown::Write).unwrap();
    until("failure", || all[1].health[0].has_failed());
    let e = all[1].health[0].check().unwrap_err();
    assert!(e.message().contains("closed without a FIN") && !e.message().contains("process"), "{e}");
}
