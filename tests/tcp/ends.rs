//! Peers that vanish or leave: what they promised arrives, who is to blame is said, and nothing stays open.

use super::harness::*;
use crate::support::apart::is_elsewhere;
use crate::support::logged;
use oxygin::fabric::soft::tcp::wire::{Frame, Hello, WindowBytes};
use oxygin::rma::op::Op;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

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

/// What is sent to a peer that has left has its host reset the connection before anybody has read that it left.
#[test]
fn a_peer_that_left_in_order_is_known_by_its_last_word() {
    let _guard = alone();
    let listener = TcpListener::bind(localhost()).unwrap();
    let mut a = believer(&[listener.local_addr().unwrap()]);
    let greeter = std::thread::spawn(move || greet(1, &listener));
    let lane = a.lane(0, 1);
    let small = || a.post(&lane, Op::Put(put(address(&a.data), 4096, 8)));
    wait(&lane, small());
    let [mut express, _middle, _stripe] = greeter.join().unwrap();
    // What was staged until the connections were up.
    express.read_exact(&mut [0; 48 + 8]).unwrap();
    a.freeze();
    let small = || a.post(&lane, Op::Put(put(address(&a.data), 4096, 8)));
    small();
    express.peek(&mut [0]).unwrap();
    express.write_all(&Frame::Fin.emit()).unwrap();
    // With that put unread: a reset, at once.
    drop(express);
    until("failure", || {
        small();
        std::thread::sleep(Duration::from_millis(10));
        a.health[1].has_failed()
    });
    let e = a.health[1].check().unwrap_err();
    assert!(e.message().contains("rank 1 has closed its communicator"), "{e}");
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

/// Answers that nobody wants any more are on their way when a rank closes: what it promised arrives nevertheless.
#[test]
fn what_was_promised_arrives_beside_answers_that_nobody_wants() {
    const SIZE: usize = 256 << 10;
    let _guard = alone();
    let listener = TcpListener::bind(localhost()).unwrap();
    take_little(&listener);
    let mut a = believer(&[listener.local_addr().unwrap()]);
    pattern(&a.data, 3);
    let greeter = std::thread::spawn(move || greet(1, &listener));
    let [gone, lane] = [0, 1].map(|context| a.lane(context, 1));
    a.post(&gone, Op::Get(get(address(&a.data), 4096, SIZE)));
    let [_express, _middle, mut stripe] = greeter.join().unwrap();
    stripe.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut request = [0; 48];
    stripe.read_exact(&mut request).unwrap();
    assert!(matches!(Frame::parse(&request), Ok(Frame::Get { context: 0, .. })));
    a.freeze();
    a.tcp.drop_lane(&gone, Instant::now() + Duration::from_secs(10));
    stripe.write_all(&[&Frame::Data { len: SIZE as u32 }.emit()[..], &[0; 64 << 10]].concat()).unwrap();
    a.post(&lane, Op::Put(put(address(&a.data), 4096, SIZE)));
    std::thread::scope(|s| {
        let tcp = &a.tcp;
        let closer = s.spawn(move || tcp.close());
        std::thread::sleep(Duration::from_millis(300));
        let mut all = vec![0; 48 + SIZE + 48];
        stripe.read_exact(&mut all).expect("cut off");
        assert!(all[48..48 + SIZE] == bytes(&a.data)[..SIZE]);
        assert_eq!(Frame::parse(all[48 + SIZE..].try_into().unwrap()), Ok(Frame::Fin));
        // As a rank does that has read it.
        drop(stripe);
        closer.join().unwrap();
    });
}

/// Has connections that come to it take few bytes at a time.
fn take_little(listener: &TcpListener) {
    let (bytes, size) = (32 << 10, size_of::<libc::c_int>() as libc::socklen_t);
    let (level, name) = (libc::SOL_SOCKET, libc::SO_RCVBUF);
    // SAFETY: an int that lives through the call, and its size.
    unsafe { libc::setsockopt(listener.as_raw_fd(), level, name, (&raw const bytes).cast(), size) };
}

/// One peer takes nothing any more, another one is slow: it gets everything nevertheless.
#[test]
fn close_serves_the_slow_beside_those_that_hang() {
    const SIZE: usize = 8 << 10;
    let _guard = alone();
    logged::collect();
    let listeners = [1, 2].map(|_| {
        let l = TcpListener::bind(localhost()).unwrap();
        take_little(&l);
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

/// Each has promised the other one more than the connection holds, and neither reads any more.
#[test]
fn two_that_close_at_once_do_not_wait_for_each_other() {
    const SIZE: usize = 8 << 10;
    let _guard = alone();
    logged::collect();
    let mut all = ranks(2, 1, SIZE);
    let lanes: Vec<_> = all.iter().map(|a| a.lane(0, 1 - a.rank)).collect();
    // Connected both ways.
    for (a, lane) in all.iter().zip(&lanes) {
        let (own, theirs) = (address(&a.data), address(&all[1 - a.rank as usize].data));
        wait(lane, a.post(lane, Op::Put(put(own, theirs, 8))));
    }
    all.iter_mut().for_each(Rank::freeze);
    for (a, lane) in all.iter().zip(&lanes) {
        let (own, theirs) = (address(&a.data), address(&all[1 - a.rank as usize].data));
        // Until nothing is complete at once any more: the buffers here and in the kernel are full.
        let is_full = (0..100_000).any(|_| {
            let seq = a.post(lane, Op::Put(put(own, theirs, SIZE)));
            !lane.test(seq).unwrap()
        });
        assert!(is_full);
    }
    std::thread::scope(|s| all.iter().for_each(|a| drop(s.spawn(|| a.tcp.close()))));
    let lines = logged::lines();
    assert!(!lines.iter().any(|(_, l)| l.contains("closes its communicator although")), "{lines:#?}");
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
