//! Strangers at the port, peers that refuse, vanish or leave, and what stays behind.

use super::harness::*;
use crate::support::apart::is_elsewhere;
use crate::support::logged;
use oxygin::error::Kind;
use oxygin::fabric::soft::tcp::wire::{Frame, Hello, WindowBytes};
use oxygin::fabric::soft::tcp::{PeerInfo, Tcp, Timing};
use oxygin::fabric::World;
use oxygin::memory::registry::Registry;
use oxygin::rma::op::{Op, Put};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::atomic::AtomicBool;
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

fn refused(work: impl Fn(&Rank, &Rank) -> Op, wanted: &str) {
    let _guard = alone();
    let all = ranks(3, 1, 1 << 17);
    let (a, b) = (&all[0], &all[1]);
    signal_works(a, b);
    let lane = a.lane(3, 1);
    let seq = a.post(&lane, work(a, b));
    until("failure", || lane.has_failed());
    let e = lane.test(seq).and_then(|_| lane.check()).unwrap_err();
    assert_eq!(e.kind(), Kind::RemoteAccess);
    assert!(e.message().contains("rank 1 refused") && e.message().contains(wanted), "{e}");
    assert!(b.data.iter().all(|w| w.load(SeqCst) == 0), "refused bytes were written");
    assert_eq!(b.signals[0].load(SeqCst), 0, "a refused put rang");
    // Later operations fail; nothing hangs.
    let later = a.post(&lane, Op::Put(put(address(&a.data), address(&b.data), 8)));
    assert!(lane.test(later).is_err());
    // Other contexts to the same peer lost nothing, and neither did the peer and others.
    assert!(!a.health[1].has_failed());
    let other = a.lane(4, 1);
    let bulk = Put { signal: bell(&b.signals[1], 1, true), ..put(address(&a.data), address(&b.data), 8 << 17) };
    let seqs =
        [a.post(&other, Op::Get(get(address(&a.data), address(&b.data), 8 << 17))), a.post(&other, Op::Put(bulk))];
    until("another context", || seqs.iter().all(|&seq| other.test(seq).unwrap()));
    until("its signal", || b.signals[1].load(SeqCst) == 1);
    signal_works(a, b);
    signal_works(b, a);
    signal_works(&all[2], b);
    signal_works(a, &all[2]);
    assert!(!b.health[0].has_failed());
}

#[test]
fn a_put_past_the_window_is_refused() {
    refused(
        |a, b| {
            let mut p = put(address(&a.data), address(&b.data) + 8 * (1 << 17) - 4, 8);
            p.signal = bell(&b.signals[0], 1, true);
            Op::Put(p)
        },
        "put to 8 bytes",
    );
}

#[test]
fn a_large_put_to_no_window_is_refused() {
    refused(
        |a, b| {
            let mut p = put(address(&a.data), address(&b.data), 1 << 20);
            p.rkey = 77;
            p.signal = bell(&b.signals[0], 1, true);
            Op::Put(p)
        },
        "window 77",
    );
}

#[test]
fn a_put_that_wraps_around_is_refused() {
    refused(|a, _| Op::Put(put(address(&a.data), u64::MAX - 3, 8)), "0xfffffffffffffffc");
}

#[test]
fn a_get_of_nobodys_memory_is_refused() {
    refused(|a, b| Op::Get(get(address(&a.data), address(&b.data) - 8, 1 << 20)), "get from");
}

#[test]
fn a_misaligned_signal_is_refused() {
    refused(
        |_, b| {
            let mut p = put(0, 0, 0);
            p.signal = bell(&b.signals[0], 1, true);
            p.signal.as_mut().unwrap().remote += 4;
            Op::Put(p)
        },
        "signal at 8 bytes",
    );
}

/// Answers rank 0's greetings for rank `rank`: the express connection, the middle one and the stripe.
fn greet(rank: u32, listener: &TcpListener) -> [TcpStream; 3] {
    let mut conns = [None, None, None];
    for _ in 0..3 {
        let (mut s, _) = listener.accept().unwrap();
        let mut hello = [0; 48];
        s.read_exact(&mut hello).unwrap();
        let h = Hello::parse(&hello).unwrap();
        s.write_all(&Hello { answer: true, token: token(0), from: rank, to: 0, ..h }.emit()).unwrap();
        conns[h.stripe as usize] = Some(s);
    }
    conns.map(Option::unwrap)
}

/// Rank 0, which takes whoever listens at these addresses for ranks 1 and so on.
fn believer(others: &[SocketAddr]) -> Rank {
    let mut all = ranks(1, 1, 1 << 17);
    let mut real = all.pop().unwrap();
    real.freeze();
    let registry = Arc::new(Registry::default());
    let tcp = Arc::new(Tcp::open_with(&[localhost()], token(0), 1, registry, quick()).unwrap());
    real.health.resize_with(1 + others.len(), Default::default);
    let at = tcp.addresses().into_iter().chain(others.iter().copied()).zip(&real.health).enumerate();
    let peers = at.map(|(p, (a, h))| PeerInfo { addresses: vec![a], token: token(p), health: h.clone() }).collect();
    tcp.join(World { rank: 0, nranks: 1 + others.len() as u32 }, peers).unwrap();
    real.adopt(tcp)
}

/// A peer made of a listener: it greets like rank 1, then does what the test says with the express connection and the
/// stripe.
fn impostor(then: impl FnOnce(TcpStream, TcpStream) + Send + 'static) -> (Rank, std::thread::JoinHandle<()>) {
    let listener = TcpListener::bind(localhost()).unwrap();
    let at = listener.local_addr().unwrap();
    let thread = std::thread::spawn(move || {
        let [express, middle, stripe] = greet(1, &listener);
        then(express, stripe);
        drop(middle);
    });
    (believer(&[at]), thread)
}

#[test]
fn a_peer_that_drops_its_connection_fails_at_once() {
    let _guard = alone();
    let (a, thread) = impostor(|express, mut stripe| {
        stripe.read_exact(&mut [0; 48]).unwrap();
        drop(stripe);
        // The other one stays.
        let _ = (&express).read(&mut [0; 48]);
    });
    let lane = a.lane(0, 1);
    let start = Instant::now();
    let seq = a.post(&lane, Op::Get(get(address(&a.data), 4096, 1 << 20)));
    let e = wait_error(&lane, seq);
    assert!(e.contains("rank 1") && e.contains("lost the TCP connection"), "{e}");
    assert!(start.elapsed() < Duration::from_secs(8));
    thread.join().unwrap();
}

#[test]
fn a_peer_that_leaves_in_order_is_no_error_until_asked() {
    let _guard = alone();
    let all = ranks(2, 2, 8);
    signal_works(&all[0], &all[1]);
    signal_works(&all[1], &all[0]);
    all[1].tcp.close();
    let lane = all[0].lane(0, 1);
    // Time for the FIN to arrive; whether it has or not, there is no error before somebody asks.
    std::thread::sleep(Duration::from_millis(100));
    assert!(!all[0].health[1].has_failed());
    let mut ring = put(0, 0, 0);
    ring.signal = bell(&all[1].signals[0], 1, true);
    let seq = all[0].post(&lane, Op::Put(ring));
    until("failure", || all[0].health[1].has_failed());
    let e = all[0].health[1].check().unwrap_err();
    assert!(e.message().contains("rank 1 has closed its communicator"), "{e}");
    let _ = seq;
}

#[test]
fn who_was_refused_still_leaves_in_order() {
    let _guard = alone();
    let all = ranks(2, 1, 1 << 10);
    let lane = all[0].lane(0, 1);
    let wrong = Put { rkey: 77, ..put(address(&all[0].data), address(&all[1].data), 64) };
    all[0].post(&lane, Op::Put(wrong));
    until("refusal", || lane.has_failed());
    all[0].tcp.close();
    // Time for the end to arrive.
    std::thread::sleep(Duration::from_millis(100));
    assert!(!all[1].health[0].has_failed(), "{:?}", all[1].health[0].check());
}

/// A peer that leaves in the middle of a frame sends its FIN on its other connections.
#[test]
fn a_peer_that_leaves_with_bytes_unsent_is_an_error() {
    let _guard = alone();
    let all = ranks(2, 1, 1 << 10);
    let at = all[1].tcp.addresses()[0];
    let mut conns = [0, 1, 2].map(|stripe| {
        let mut s = TcpStream::connect(at).unwrap();
        s.set_read_timeout(Some(PATIENCE)).unwrap();
        let hello = Hello { answer: false, token: token(1), from: 0, to: 1, nranks: 2, stripe, stripes: 3, silence: 0 };
        s.write_all(&hello.emit()).unwrap();
        s.read_exact(&mut [0; 48]).unwrap();
        s
    });
    let place = WindowBytes { rkey: DATA, addr: address(&all[1].data), len: 64 };
    let half = [&Frame::Put { context: 0, place, bell: None }.emit()[..], &[7; 8]].concat();
    conns[0].write_all(&half).unwrap();
    for s in &mut conns[1..] {
        s.write_all(&Frame::Fin.emit()).unwrap();
        assert_eq!(s.read(&mut [0; 8]).unwrap(), 0);
    }
    assert!(!all[1].health[0].has_failed());
    drop(conns);
    until("failure", || all[1].health[0].has_failed());
    let e = all[1].health[0].check().unwrap_err();
    assert!(e.message().contains("rank 0 has closed its communicator"), "{}", e.message());
}

#[test]
fn what_was_promised_before_close_arrives() {
    let _guard = alone();
    let all = ranks(2, 1, 1 << 17);
    let (a, b) = (&all[0], &all[1]);
    signal_works(a, b);
    let source = words(1 << 17);
    pattern(&source, 4);
    let lane = a.lane(0, 1);
    let mut p = put(address(&source), address(&b.data), 1 << 20);
    p.signal = bell(&b.signals[0], 1, true);
    let seq = a.post(&lane, Op::Put(p));
    wait(&lane, seq);
    for _ in 0..1000 {
        let mut ring = put(0, 0, 0);
        ring.signal = bell(&b.signals[0], 1, true);
        ring.more = true;
        let seq = a.post(&lane, Op::Put(ring));
        wait(&lane, seq);
    }
    a.tcp.close();
    until("signals", || b.signals[0].load(SeqCst) == 1001);
    assert!(bytes(&b.data) == bytes(&source));
    assert!(!b.health[0].has_failed());
}

/// One peer takes nothing any more, another one is slow: it gets everything nevertheless.
#[test]
fn close_serves_the_slow_beside_those_that_hang() {
    const SIZE: usize = 8 << 10;
    let _guard = alone();
    logged::collect();
    let listeners = [1, 2].map(|_| {
        let l = TcpListener::bind(localhost()).unwrap();
        let (bytes, size) = (32 << 10, size_of::<libc::c_int>() as libc::socklen_t);
        let (level, name) = (libc::SOL_SOCKET, libc::SO_RCVBUF);
        // SAFETY: an int that lives through the call, and its size.
        unsafe { libc::setsockopt(l.as_raw_fd(), level, name, (&raw const bytes).cast(), size) };
        l
    });
    let at = listeners.each_ref().map(|l| l.local_addr().unwrap());
    let a = believer(&at);
    // Both take the greetings and, for now, nothing else. Puts go as long as they are complete at once.
    let source = words(SIZE / 8);
    let mut conns = Vec::new();
    let mut sent = 0;
    for (peer, listener) in (1..).zip(listeners) {
        let greeter = std::thread::spawn(move || greet(peer, &listener));
        let lane = a.lane(0, peer);
        let seq = a.post(&lane, Op::Put(put(address(&source), 4096, SIZE)));
        wait(&lane, seq);
        conns.push(greeter.join().unwrap());
        for n in 1.. {
            let seq = a.post(&lane, Op::Put(put(address(&source), 4096, SIZE)));
            let start = Instant::now();
            while !lane.test(seq).unwrap() && start.elapsed() < Duration::from_millis(300) {
                std::thread::sleep(Duration::from_millis(1));
            }
            if !lane.test(seq).unwrap() {
                sent = n;
                break;
            }
        }
    }
    // More slowly than 256 KiB, which are staged, within the time for those that hang.
    let [mut slow, _middle, _stripe] = conns.pop().unwrap();
    let closed = AtomicBool::new(false);
    std::thread::scope(|s| {
        let reader = s.spawn(|| {
            let (mut all, mut piece) = (Vec::new(), [0; 16 << 10]);
            loop {
                let n = slow.read(&mut piece).expect("cut off");
                if n == 0 {
                    return all;
                }
                all.extend_from_slice(&piece[..n]);
                if !closed.load(SeqCst) {
                    std::thread::sleep(Duration::from_millis(200));
                }
            }
        });
        a.tcp.close();
        closed.store(true, SeqCst);
        let all = reader.join().unwrap();
        let (frames, end) = all.split_at(all.len().saturating_sub(48));
        assert!(frames.len() >= sent * (48 + SIZE), "{} bytes of {sent} puts", frames.len());
        assert_eq!(Frame::parse(end.try_into().unwrap()), Ok(Frame::Fin));
    });
    let lines = logged::lines();
    let said = lines.iter().find(|(_, l)| l.contains("closes its communicator")).expect("a line on who hangs");
    assert!(said.1.contains("taken by rank 1:"), "{}", said.1);
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

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn nothing_is_left_after_close() {
    if is_elsewhere(concat!(module_path!(), "::nothing_is_left_after_close")) {
        return;
    }
    let _guard = alone();
    let round = || {
        let all = ranks(4, 2, 8);
        for a in &all {
            for b in &all {
                signal_works(a, b);
            }
        }
        let _stranger = TcpStream::connect(all[0].tcp.addresses()[0]).unwrap();
    };
    round();
    let before = descriptors();
    for _ in 0..5 {
        round();
    }
    assert_eq!(descriptors(), before);
}

#[test]
fn a_deregistered_window_takes_no_more_bytes() {
    let _guard = alone();
    let all = ranks(2, 1, 1 << 20);
    let (a, b) = (&all[0], &all[1]);
    let source = words(1 << 20);
    pattern(&source, 2);
    let lane = a.lane(0, 1);
    for _ in 0..50 {
        a.post(&lane, Op::Put(put(address(&source), address(&b.data), 8 << 20)));
    }
    until("first bytes", || b.data[0].load(SeqCst) != 0);
    b.registry.remove(DATA);
    for w in &b.data {
        w.store(0, SeqCst);
    }
    until("refusal", || lane.has_failed());
    assert!(b.data.iter().all(|w| w.load(SeqCst) == 0), "written after deregistration");
    signal_works(b, a);
    signal_works(a, b);
}

/// A context goes in the middle of a large get: nothing more comes into its memory, and others' gets are theirs.
#[test]
fn what_comes_for_a_context_that_is_gone_is_thrown_away() {
    const WORDS: usize = 4 << 20;
    let _guard = alone();
    let mut all = ranks(2, 2, WORDS);
    pattern(&all[1].data, 7);
    let theirs = address(&all[1].data);
    let stays = all[0].lane(1, 1);
    let (first, second) = (words(WORDS), words(WORDS / 8));
    // A machine that is slow at the wrong moment lets all of it through.
    let mut gone = None;
    for context in 2..50 {
        first.iter().for_each(|w| w.store(0, SeqCst));
        let lane = all[0].lane(context, 1);
        let seq = all[0].post(&lane, Op::Get(get(address(&first), theirs, 8 * WORDS)));
        until("the first bytes", || first[0].load(SeqCst) != 0);
        // What it has sent so far may arrive.
        all[1].freeze();
        if !lane.test(seq).unwrap() {
            gone = Some(lane);
            break;
        }
        all[1].thaw();
    }
    let gone = gone.expect("a get that is unfinished");
    let other = all[0].post(&stays, Op::Get(get(address(&second), theirs, WORDS)));
    all[0].tcp.drop_lane(&gone);
    let before: Vec<u64> = first.iter().map(|w| w.load(SeqCst)).collect();
    all[1].thaw();
    wait(&stays, other);
    assert!(second.iter().zip(&all[1].data).all(|(a, b)| a.load(SeqCst) == b.load(SeqCst)));
    // Behind everything that the first had asked for.
    let seq = all[0].post(&stays, Op::Get(get(address(&second), theirs, WORDS)));
    wait(&stays, seq);
    assert!(first.iter().zip(&before).all(|(now, before)| now.load(SeqCst) == *before), "bytes came");
    signal_works(&all[0], &all[1]);
    assert!(!all[0].health[1].has_failed() && !all[1].health[0].has_failed());
}

/// A context goes in the middle of a large put: its memory is not read any more, and others' frames are whole.
#[test]
fn what_a_context_that_is_gone_was_sending_is_not_read() {
    const WORDS: usize = 8 << 20;
    const OTHER: usize = WORDS / 8;
    let _guard = alone();
    let mut all = ranks(2, 2, WORDS);
    let theirs = address(&all[1].data);
    let [gone, stays] = [1, 2].map(|c| all[0].lane(c, 1));
    let (first, second) = (words(WORDS - OTHER), words(OTHER));
    pattern(&second, 7);
    for w in &first {
        w.store(1, SeqCst);
    }
    signal_works(&all[0], &all[1]);
    all[1].freeze();
    let seq = all[0].post(&gone, Op::Put(put(address(&first), theirs + 8 * OTHER as u64, 8 * (WORDS - OTHER))));
    let mut whole = put(address(&second), theirs, 8 * OTHER);
    whole.signal = bell(&all[1].signals[0], 1, true);
    let other = all[0].post(&stays, Op::Put(whole));
    assert!(!gone.test(seq).unwrap());
    all[0].tcp.drop_lane(&gone);
    for w in &first {
        w.store(2, SeqCst);
    }
    all[1].thaw();
    wait(&stays, other);
    until("the signal", || all[1].signals[0].load(SeqCst) == 1);
    assert!(second.iter().zip(&all[1].data).all(|(a, b)| a.load(SeqCst) == b.load(SeqCst)));
    let again = all[0].post(&stays, Op::Put(whole));
    wait(&stays, again);
    until("the signal", || all[1].signals[0].load(SeqCst) == 2);
    let came = |what| all[1].data[OTHER..].iter().filter(|w| w.load(SeqCst) == what).count();
    assert_eq!(came(2), 0, "words that were written after its end");
    assert!(came(0) > 0, "all of it went");
    signal_works(&all[0], &all[1]);
    assert!(!all[0].health[1].has_failed() && !all[1].health[0].has_failed());
}
