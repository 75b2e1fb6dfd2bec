//! What a target does with bytes that nobody vouches for.

use super::super::wire::{Bell, Frame, WindowBytes};
use super::limit::HELD;
use super::*;
use crate::fabric::soft::gpu::{Engine, Received};
use crate::memory::registry::Extent;
use proptest::prelude::*;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

const WORDS: usize = 1024;
/// Words on either side of the window, which nobody may touch.
const MARGIN: usize = 64;
const UNTOUCHED: u64 = 0x5a5a_5a5a_5a5a_5a5a;

struct Target {
    serving: Serving,
    registry: Registry,
    memory: Vec<u64>,
    initiator: UnixStream,
}

/// The initiator's end of a new connection, which has this number among so many.
fn connect(serving: &Serving, stripe: usize, stripes: usize) -> UnixStream {
    let (initiator, ours) = UnixStream::pair().unwrap();
    assert!(serving.admit(Private::new(ours.into()), stripe, stripes, 0));
    initiator
}

fn target(stripes: usize) -> Target {
    target_of(Serving::default(), stripes)
}

fn target_of(serving: Serving, stripes: usize) -> Target {
    let memory = vec![UNTOUCHED; WORDS + 2 * MARGIN];
    let registry = Registry::default();
    let base = memory[MARGIN..].as_ptr() as u64;
    registry.insert(1, Extent { base, len: 8 * WORDS as u64 });
    let initiator = connect(&serving, 0, stripes);
    initiator.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    Target { serving, registry, memory, initiator }
}

impl Target {
    fn advance(&self, stripe: usize) -> io::Result<Outcome> {
        let mut slot = self.serving.slot(stripe).lock();
        self.serving.advance(slot.as_mut().expect("a connection"), stripe, &self.registry, false, true)
    }

    fn base(&self) -> u64 {
        self.memory[MARGIN..].as_ptr() as u64
    }

    /// Hands over bytes; `false`: the connection is over.
    fn take(&mut self, bytes: &[u8]) -> bool {
        self.initiator.write_all(bytes).unwrap();
        loop {
            match self.advance(0) {
                Ok(Outcome::Open(true)) => {}
                Ok(Outcome::Open(false)) => return true,
                Ok(Outcome::Parting | Outcome::Closed) | Err(_) => return false,
            }
        }
    }

    fn window(&self) -> Vec<u64> {
        // Volatile: written through raw pointers behind the Vec's back.
        // SAFETY: inside `memory`.
        (MARGIN..MARGIN + WORDS).map(|i| unsafe { self.memory.as_ptr().add(i).read_volatile() }).collect()
    }

    fn margins_are_untouched(&self) -> bool {
        let outside = (0..MARGIN).chain(MARGIN + WORDS..2 * MARGIN + WORDS);
        // SAFETY: inside `memory`.
        outside.map(|i| unsafe { self.memory.as_ptr().add(i).read_volatile() }).all(|w| w == UNTOUCHED)
    }
}

fn put(addr: u64, len: u32, bell: Option<Bell>) -> Vec<u8> {
    let mut b = Frame::Put { context: 0, place: WindowBytes { rkey: 1, addr, len }, bell }.emit().to_vec();
    b.resize(HEADER + len as usize, 7);
    b
}

#[derive(Clone, Debug)]
enum Piece {
    Put { at: i64, len: u32, bell: Option<(i64, bool)> },
    Get { at: i64, len: u32 },
    Bytes(Vec<u8>),
}

fn piece() -> impl Strategy<Value = Piece> {
    let at = || -64i64..8 * WORDS as i64 + 64;
    let bell = proptest::option::of((at(), any::<bool>()));
    prop_oneof![
        8 => (at(), 0u32..300, bell).prop_map(|(at, len, bell)| Piece::Put { at, len, bell }),
        2 => (at(), 0u32..300).prop_map(|(at, len)| Piece::Get { at, len }),
        1 => proptest::collection::vec(any::<u8>(), 1..100).prop_map(Piece::Bytes),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Whatever frames come, cut wherever: nothing outside the window is touched.
    #[test]
    fn nothing_outside_the_window_is_touched(
        pieces in proptest::collection::vec(piece(), 1..30),
        stripes in 1usize..3,
        cut in 1usize..400,
    ) {
        let mut t = target(stripes);
        let base = t.base() as i64;
        let mut stream = Vec::new();
        for p in &pieces {
            match p {
                Piece::Put { at, len, bell } => {
                    let counted = bell.is_some_and(|b| b.1);
                    let bell = bell.map(|(b, counted)| Bell { rkey: 1, addr: (base + b) as u64, value: 1, counted });
                    let frame = put((base + at) as u64, *len, bell);
                    stream.extend_from_slice(&frame[..HEADER]);
                    stream.resize(stream.len() + if counted { 4 * stripes } else { 0 }, 0);
                    stream.extend_from_slice(&frame[HEADER..]);
                }
                Piece::Get { at, len } => {
                    let place = WindowBytes { rkey: 1, addr: (base + at) as u64, len: *len };
                    stream.extend_from_slice(&Frame::Get { context: 0, place }.emit());
                }
                Piece::Bytes(b) => stream.extend_from_slice(b),
            }
        }
        for part in stream.chunks(cut) {
            if !t.take(part) {
                break;
            }
        }
        prop_assert!(t.margins_are_untouched());
    }

    /// The same puts, cut in different places, have the same effect.
    #[test]
    fn where_the_stream_is_cut_does_not_matter(
        puts in proptest::collection::vec((0usize..WORDS - 64, 0u32..512), 1..20),
        cut in 1usize..700,
    ) {
        let mut t = target(1);
        let mut model = vec![UNTOUCHED; WORDS].into_iter().flat_map(u64::to_le_bytes).collect::<Vec<u8>>();
        let mut stream = Vec::new();
        for &(at, len) in &puts {
            let bell = Bell { rkey: 1, addr: t.base() + 8 * (WORDS as u64 - 1), value: 1, counted: false };
            stream.extend(put(t.base() + 8 * at as u64, len, Some(bell)));
            model[8 * at..8 * at + len as usize].fill(7);
        }
        for part in stream.chunks(cut) {
            prop_assert!(t.take(part));
        }
        let model = model.chunks(8).map(|b| u64::from_le_bytes(b.try_into().unwrap()));
        let mut model: Vec<u64> = model.collect();
        *model.last_mut().unwrap() = UNTOUCHED + puts.len() as u64;
        prop_assert_eq!(t.window(), model);
    }
}

#[test]
fn refused_bytes_are_drained_and_the_next_frame_is_understood() {
    let mut t = target(1);
    let (good, bad) = (t.base(), t.base() + 8 * WORDS as u64 - 8);
    assert!(t.take(&put(bad, 100_000, None)[..60_000]));
    assert!(t.take(&put(bad, 100_000, None)[60_000..]));
    // Of the same context: thrown away, though it is right. Another context's is taken.
    assert!(t.take(&put(good + 16, 16, None)));
    let place = WindowBytes { rkey: 1, addr: good, len: 16 };
    assert!(t.take(&[&Frame::Put { context: 1, place, bell: None }.emit()[..], &[7; 16]].concat()));
    let mut answer = [0; HEADER];
    t.initiator.read_exact(&mut answer).unwrap();
    let place = WindowBytes { rkey: 1, addr: bad, len: 100_000 };
    assert_eq!(Frame::parse(&answer), Ok(Frame::Refused { why: Refusal::Put, context: 0, place }));
    assert_eq!(t.window()[..3], [0x0707_0707_0707_0707, 0x0707_0707_0707_0707, UNTOUCHED]);
}

#[test]
fn a_window_that_goes_while_a_put_arrives_takes_no_more() {
    let mut t = target(1);
    let frame = put(t.base(), 4096, None);
    assert!(t.take(&frame[..HEADER + 1024]));
    t.registry.remove(1);
    assert!(t.take(&frame[HEADER + 1024..]));
    let window = t.window();
    assert!(window[..128].iter().all(|&w| w == 0x0707_0707_0707_0707));
    assert!(window[128..].iter().all(|&w| w == UNTOUCHED));
}

/// A window goes between two system calls of one turn: what is not out yet is refused, and the connection stays.
#[test]
fn a_window_that_goes_while_gets_are_answered_ends_no_connection() {
    const GETS: usize = 64;
    const LEN: usize = 256;
    for _ in 0..500 {
        let mut t = target(1);
        let place = WindowBytes { rkey: 1, addr: t.base(), len: LEN as u32 };
        t.initiator.write_all(&Frame::Get { context: 0, place }.emit().repeat(GETS)).unwrap();
        std::thread::scope(|s| {
            let (mut peer, registry) = (t.initiator.try_clone().unwrap(), &t.registry);
            let reader = s.spawn(move || {
                let (mut header, mut data, mut any_refused) = ([0; HEADER], [0; LEN], false);
                for n in 0..GETS {
                    peer.read_exact(&mut header).unwrap();
                    if n == 0 {
                        registry.remove(1);
                    }
                    match Frame::parse(&header) {
                        Ok(Frame::Data { len }) if !any_refused && len as usize == LEN => {
                            peer.read_exact(&mut data).unwrap();
                        }
                        frame => {
                            assert_eq!(frame, Ok(Frame::Refused { why: Refusal::Get, context: 0, place }));
                            any_refused = true;
                        }
                    }
                }
            });
            while !reader.is_finished() {
                assert!(matches!(t.advance(0), Ok(Outcome::Open(_))));
            }
            reader.join().unwrap();
        });
    }
}

#[test]
fn a_signal_waits_for_what_its_counts_name() {
    let mut t = target(2);
    let other = connect(&t.serving, 1, 2);
    let word = t.base() + 8 * (WORDS as u64 - 1);
    let bell = Bell { rkey: 1, addr: word, value: 1, counted: true };
    let mut ring = put(t.base(), 0, Some(bell));
    ring.extend([0u32, 1].iter().flat_map(|c| c.to_le_bytes()));
    assert!(t.take(&ring));
    assert_eq!(t.window()[WORDS - 1], UNTOUCHED);
    (&other).write_all(&put(t.base(), 8, None)).unwrap();
    t.advance(1).unwrap();
    assert_eq!(t.window()[WORDS - 1], UNTOUCHED + 1);
}

/// A peer rings for what it never sends: it is read no more, before its signals fill this rank's memory. Once it
/// sends, all is as if nothing had been.
#[test]
fn signals_that_wait_are_only_so_many() {
    const MORE: usize = 2 * HELD;
    let mut t = target(2);
    let other = connect(&t.serving, 1, 2);
    let word = t.base() + 8 * (WORDS as u64 - 1);
    let bell = Bell { rkey: 1, addr: word, value: 1, counted: true };
    let mut ring = put(t.base(), 0, Some(bell));
    ring.extend([0u32, 1].iter().flat_map(|c| c.to_le_bytes()));
    let all = ring.repeat(MORE);
    t.initiator.set_nonblocking(true).unwrap();
    let mut sent = 0;
    let mut go_on = |t: &mut Target| loop {
        let n = t.initiator.write(&all[sent..]).unwrap_or(0);
        sent += n;
        let Ok(Outcome::Open(moved)) = t.advance(0) else { panic!("the connection is over") };
        if n == 0 && !moved {
            return sent;
        }
    };
    assert!(go_on(&mut t) < all.len(), "all were read");
    assert_eq!(t.serving.held.count(), HELD);
    let wanted = |t: &Target| t.serving.slot(0).lock().as_ref().unwrap().wanted();
    assert_eq!(wanted(&t), Some(0), "epoll goes on telling of them");
    assert!(!t.serving.was_relieved());
    (&other).write_all(&put(t.base(), 8, None)).unwrap();
    t.advance(1).unwrap();
    assert!(t.serving.was_relieved() && !t.serving.was_relieved());
    assert_eq!(go_on(&mut t), all.len());
    assert_eq!(t.window()[WORDS - 1], UNTOUCHED + MORE as u64);
    assert_eq!((t.serving.held.count(), wanted(&t)), (0, Some(libc::EPOLLIN as u32)));
}

#[test]
fn a_context_that_is_over_is_forgotten() {
    let mut t = target(3);
    let others = [1, 2].map(|stripe| connect(&t.serving, stripe, 3));
    let (base, all) = (t.base(), 0b111);
    let known = |t: &Target| t.serving.orders.lock().len();
    let send = |t: &Target, stripe: usize, bytes: &[u8]| {
        (&others[stripe - 1]).write_all(bytes).unwrap();
        t.advance(stripe).unwrap();
    };
    let end = |context, conns| Frame::End { context, conns }.emit();
    send(&t, 1, &put(base, 8, None));
    send(&t, 1, &end(0, all));
    assert!(t.take(&end(0, all)));
    assert_eq!(known(&t), 1, "more may come");
    send(&t, 2, &put(base + 8, 8, None));
    send(&t, 2, &end(0, all));
    assert_eq!(known(&t), 0);
    // A signal that waits for what will never come does not ring, and is no more.
    let bell = Bell { rkey: 1, addr: base + 8 * (WORDS as u64 - 1), value: 1, counted: true };
    let mut ring = put(base, 0, Some(bell));
    ring.extend([0u32, 9, 0].iter().flat_map(|c| c.to_le_bytes()));
    assert!(t.take(&ring));
    assert_eq!(known(&t), 1);
    send(&t, 1, &end(0, 0b11));
    assert!(t.take(&end(0, 0b11)));
    assert_eq!((known(&t), t.window()[WORDS - 1]), (0, UNTOUCHED));
}

/// More contexts than a peer may have at a time.
#[test]
fn contexts_may_come_and_go_for_ever() {
    let mut t = target(2);
    let mut other = connect(&t.serving, 1, 2);
    let place = WindowBytes { rkey: 1, addr: t.base(), len: 0 };
    for first in (0..70_000).step_by(100) {
        let chunk = |context| Frame::Put { context, place, bell: None }.emit();
        let end = |context| Frame::End { context, conns: 0b11 }.emit();
        let bulk: Vec<u8> = (first..first + 100).flat_map(|c| [chunk(c), end(c)].concat()).collect();
        other.write_all(&bulk).unwrap();
        t.advance(1).unwrap();
        assert!(t.take(&(first..first + 100).flat_map(end).collect::<Vec<_>>()));
        assert_eq!(t.serving.orders.lock().len(), 0);
    }
    other.set_nonblocking(true).unwrap();
    assert_eq!(other.read(&mut [0; HEADER]).unwrap_err().kind(), io::ErrorKind::WouldBlock, "nothing was refused");
}

#[test]
fn a_fin_is_an_orderly_end_and_silence_is_not() {
    let mut t = target(1);
    t.initiator.write_all(&Frame::Fin.emit()).unwrap();
    assert!(matches!(t.advance(0), Ok(Outcome::Closed)));
    let t = target(1);
    t.initiator.shutdown(std::net::Shutdown::Both).unwrap();
    assert!(t.advance(0).is_err());
}

/// They are gathered on their way, more than go together among them; none stays behind when the turn is over.
#[test]
fn signals_behind_a_put_for_the_gpu_are_with_its_engine_at_the_end_of_the_turn() {
    const SIGNALS: u64 = 100;
    let (gpu, received) = (Arc::new(Gpu::default()), Arc::new(Received::new(2)));
    let engine = Engine::new(0, [0; 16], Arc::default(), &Default::default());
    gpu.set_engine(engine.clone(), received.clone());
    let mut target = target_of(Serving::new(1, gpu), 3);
    let base = target.base();
    let signal = |n| put(base, 0, Some(Bell { rkey: 1, addr: base + 8 * n, value: 1, counted: false }));
    assert!(target.take(&signal(0)) && target.window()[0] != UNTOUCHED && received.arrivals() == 0);
    // The engine has no GPU yet: what it is given stays with it.
    received.put(&engine, Source::far(1, 7), vec![0; 8].into(), Key::gpu(2, false).0, 0);
    let all: Vec<u8> = (1..=SIGNALS).flat_map(signal).collect();
    assert!(target.take(&all));
    assert_eq!(received.arrivals(), 1 + SIGNALS);
    assert!(target.window()[1..].iter().all(|&word| word == UNTOUCHED), "before the put that they follow");
}

/// The engine has all that it takes at a time: signals for it stay in the socket, others pass.
#[test]
fn signals_that_the_engine_has_no_room_for_are_not_read() {
    for (on_gpu, sender, waits) in [(true, 1, true), (false, 1, true), (false, 2, false)] {
        let (gpu, received) = (Arc::new(Gpu::default()), Arc::new(Received::new(3)));
        let engine = Engine::new(0, [0; 16], Arc::default(), &Default::default());
        gpu.set_engine(engine.clone(), received.clone());
        let mut target = target_of(Serving::new(1, gpu), 3);
        // The engine has no GPU yet: what it is given stays with it.
        while !received.is_full() {
            received.put(&engine, Source::far(sender, 7), vec![0; 8].into(), Key::gpu(2, false).0, 0);
        }
        let full = received.arrivals();
        let rkey = if on_gpu { Key::gpu(2, false).0 } else { 1 };
        let signal = put(target.base(), 0, Some(Bell { rkey, addr: target.base(), value: 1, counted: false }));
        assert!(target.take(&signal.repeat(100)));
        assert_eq!(target.window()[0] == UNTOUCHED + 100, !waits, "{on_gpu} {sender}");
        assert_eq!(received.arrivals(), full);
        assert_eq!(target.serving.slot(0).lock().as_ref().unwrap().is_staging(), waits);
        target.initiator.set_nonblocking(true).unwrap();
        assert_eq!(target.initiator.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::WouldBlock, "it was refused");
    }
}
