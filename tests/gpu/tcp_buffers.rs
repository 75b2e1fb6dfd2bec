//! Pinned buffers that are all taken, and peers that stop or are reset in the middle of a message for GPU memory: TCP
//! alone, on the fake CUDA driver.

use crate::harness::Fake;
use crate::tcp_harness::{localhost, token, until};
use oxygin::config::Config;
use oxygin::fabric::soft::gpu::{Engine, PinnedBuffer, PinnedPools, Received};
use oxygin::fabric::soft::lane::{Health, Lane, Task};
use oxygin::fabric::soft::tcp::wire::{Frame, Hello, WindowBytes};
use oxygin::fabric::soft::tcp::{PeerInfo, Tcp, Timing};
use oxygin::fabric::World;
use oxygin::memory::gpu::inspect;
use oxygin::memory::key::Key;
use oxygin::memory::registry::{Extent, Registry};
use oxygin::rma::op::{Get, Op, Put};
use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The window, and its key.
const BYTES: usize = 1 << 20;
const KEY: u32 = Key::gpu(1, false).0;
/// A put and a get that need a large buffer, and such that need a small one.
const LARGE: usize = 64 << 10;
const SMALL: usize = 100;
/// A put that is sent from its small buffer.
const PUT: usize = 4 << 10;
/// Small buffers of a direction.
const SMALL_SLOTS: usize = 128;
/// Connections that a rank opens, and the one for bulk.
const CONNS: u16 = 3;
const STRIPE: u16 = 2;

/// Rank 0 of two, with a GPU window; rank 1 is the test.
struct Target<'a> {
    tcp: Tcp,
    health: Arc<Health>,
    at: u64,
    fake: &'a Fake,
}

impl<'a> Target<'a> {
    /// Rank 1 listens at `peer`.
    fn new(fake: &'a Fake, peer: SocketAddr) -> Self {
        Self::with(fake, peer, Timing::default())
    }

    fn with(fake: &'a Fake, peer: SocketAddr, timing: Timing) -> Self {
        let registry: Arc<Registry> = Arc::default();
        let tcp = Tcp::open_with(&[localhost()], token(0), 1, registry.clone(), timing).unwrap();
        let engine = Engine::new(0, token(0), registry, &Config::default());
        tcp.gpu().set_engine(engine.clone(), Arc::new(Received::new(2)));
        let _context = fake.enter(0);
        let at = fake.alloc(0, BYTES, false);
        let memory = inspect(at, BYTES as u64, false).unwrap().unwrap();
        let extent = Extent { base: at, len: BYTES as u64 };
        engine.add_window(1, extent, &memory).unwrap();
        tcp.gpu().add_window(1, extent, 1).unwrap();
        let health: Arc<Health> = Arc::default();
        let info = |addresses, rank, health| PeerInfo { addresses, token: token(rank), health };
        let peers = vec![info(tcp.addresses(), 0, Arc::default()), info(vec![peer], 1, health.clone())];
        tcp.join(World { rank: 0, nranks: 2 }, peers).unwrap();
        Self { tcp, health, at, fake }
    }

    fn until(&self, what: &str, mut done: impl FnMut() -> bool) {
        until(what, || {
            self.tcp.progress();
            done()
        });
    }

    /// Rank 1's connection for bulk.
    fn called(&self) -> TcpStream {
        let mut s = TcpStream::connect(self.tcp.addresses()[0]).unwrap();
        let (stripe, stripes) = (STRIPE, CONNS);
        let hello = Hello { answer: false, token: token(0), from: 1, to: 0, nranks: 2, stripe, stripes, silence: 0 };
        s.write_all(&hello.emit()).unwrap();
        s.set_nonblocking(true).unwrap();
        self.until("the greeting", || s.read_exact(&mut [0; 48]).is_ok());
        s.set_nonblocking(false).unwrap();
        s
    }

    /// Asks rank 1 for `len` bytes; the connection on which that came there.
    fn asks(&self, len: usize, mut theirs: Vec<TcpStream>) -> TcpStream {
        let lane = Arc::new(Lane::new(0, 1, self.health.clone()));
        let get = Get { local: self.at, lkey: KEY, rkey: 1, remote: 0, len: len as u64, more: false };
        let seq = lane.number();
        self.tcp.post(Task { lane, seq, work: Op::Get(get) });
        let mut at = None;
        self.until("the request", || {
            at = theirs.iter_mut().position(|s| s.read_exact(&mut [0; 48]).is_ok());
            at.is_some()
        });
        let asked = theirs.swap_remove(at.unwrap());
        asked.set_nonblocking(false).unwrap();
        // The others stay open.
        std::mem::forget(theirs);
        asked
    }

    fn pools(&self) -> &PinnedPools {
        self.tcp.gpu().pools().unwrap()
    }

    /// Takes all buffers for small messages that come from the GPU.
    fn slots_from_gpu(&self) -> Vec<impl Sized + '_> {
        std::iter::from_fn(|| self.pools().fetch(KEY, self.at, SMALL as u64).unwrap()).collect()
    }

    /// Posts so many small puts from the GPU on each of these lanes; the i-th of one has the i-th piece of the window
    /// over and over.
    fn puts(&self, lanes: &[Arc<Lane>], count: usize) {
        for (lane, i) in lanes.iter().flat_map(|lane| (0..count).map(move |i| (lane, i))) {
            let (local, remote) = (self.at + (i * PUT % BYTES) as u64, i as u64);
            let put = Put { local, lkey: KEY, remote, rkey: 1, len: PUT as u64, signal: None, more: false };
            self.tcp.post(Task { lane: lane.clone(), seq: lane.number(), work: Op::Put(put) });
        }
    }

    fn lanes(&self) -> [Arc<Lane>; 4] {
        [10, 11, 12, 13].map(|context| Arc::new(Lane::new(context, 1, self.health.clone())))
    }

    /// Takes all buffers for messages of this length that go to the GPU.
    fn buffers(&self, len: usize) -> Vec<impl Sized + '_> {
        std::iter::from_fn(|| self.pools().buffer(len as u64).unwrap()).collect()
    }

    /// Waits until everything that was sent is there, and until nothing asks for a call any more.
    fn takes(&self, sent: &TcpStream) {
        self.until("the bytes", || {
            let mut n: libc::c_int = 0;
            // SAFETY: TIOCOUTQ writes an int to `n`.
            assert_eq!(unsafe { libc::ioctl(sent.as_raw_fd(), libc::TIOCOUTQ, &mut n) }, 0);
            n == 0
        });
        self.falls_quiet();
    }

    fn falls_quiet(&self) {
        self.until("rest", || {
            let mut p = libc::pollfd { fd: self.tcp.as_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: one pollfd.
            unsafe { libc::poll(&mut p, 1, 50) == 0 }
        });
    }

    /// Waits until the window begins with so many bytes of the message.
    fn holds(&self, len: usize) {
        let memory = self.fake.peek(self.at);
        // SAFETY: bytes of the window, which the GPU writes as well.
        let byte = |i: usize| unsafe { AtomicU8::from_ptr(memory.add(i)) }.load(Ordering::Acquire);
        self.until("the message", || (0..len).all(|i| byte(i) == i as u8));
    }

    fn end(self) {
        self.tcp.close();
        self.tcp.gpu().close();
        self.fake.check();
    }
}

fn message(len: usize) -> Vec<u8> {
    (0..len).map(|i| i as u8).collect()
}

fn put(t: &Target, len: usize) -> Vec<u8> {
    let place = WindowBytes { rkey: KEY, addr: t.at, len: len as u32 };
    [&Frame::Put { context: 0, place, bell: None }.emit()[..], &message(len)].concat()
}

fn answer(len: usize) -> Vec<u8> {
    [&Frame::Data { len: len as u32 }.emit()[..], &message(len)].concat()
}

/// Nobody at rank 1's address.
fn nobody() -> SocketAddr {
    TcpListener::bind(localhost()).unwrap().local_addr().unwrap()
}

/// Rank 1, which greets whoever calls: its address, and the connections.
fn callee() -> (SocketAddr, std::thread::JoinHandle<Vec<TcpStream>>) {
    let listener = TcpListener::bind(localhost()).unwrap();
    let greet = |listener: &TcpListener| {
        let (mut s, _) = listener.accept().unwrap();
        let mut hello = [0; 48];
        s.read_exact(&mut hello).unwrap();
        let h = Hello::parse(&hello).unwrap();
        s.write_all(&Hello { answer: true, token: token(0), from: 1, to: 0, ..h }.emit()).unwrap();
        s.set_nonblocking(true).unwrap();
        s
    };
    let at = listener.local_addr().unwrap();
    (at, std::thread::spawn(move || (0..CONNS).map(|_| greet(&listener)).collect()))
}

/// Rank 0 has asked for so much; the connection for the answer.
fn asked(fake: &Fake, len: usize) -> (Target<'_>, TcpStream) {
    let (at, greeter) = callee();
    let t = Target::new(fake, at);
    let lane = Arc::new(Lane::new(1, 1, t.health.clone()));
    let seq = lane.number();
    // Has it connect.
    let get = Get { local: t.at, lkey: KEY, rkey: 1, remote: 0, len: 0, more: false };
    t.tcp.post(Task { lane: lane.clone(), seq, work: Op::Get(get) });
    t.until("connections", || greeter.is_finished() && lane.test(seq).unwrap());
    let s = t.asks(len, greeter.join().unwrap());
    (t, s)
}

fn reset(s: TcpStream) {
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    let size = size_of::<libc::linger>() as libc::socklen_t;
    let (level, name) = (libc::SOL_SOCKET, libc::SO_LINGER);
    // SAFETY: `linger` lives through the call; `size` is its size.
    assert_eq!(unsafe { libc::setsockopt(s.as_raw_fd(), level, name, (&raw const linger).cast(), size) }, 0);
}

/// The rest of the message never comes: there is nothing to wait for.
fn fails_at_once(t: Target, mut s: TcpStream, bytes: &[u8]) {
    let buffers = t.buffers(LARGE);
    s.write_all(&bytes[..bytes.len() / 2]).unwrap();
    t.takes(&s);
    assert!(t.tcp.is_staging() && !t.health.has_failed());
    reset(s);
    t.until("failure", || t.health.has_failed());
    let e = t.health.check().unwrap_err();
    assert!(e.message().contains("lost the TCP connection with rank 1"), "{e}");
    drop(buffers);
    t.end();
}

/// The message is complete: it is taken when there is a buffer, and nobody is called for it before.
fn waits_in_silence(t: Target, mut s: TcpStream, bytes: &[u8]) {
    let buffers = t.buffers(LARGE);
    s.write_all(bytes).unwrap();
    t.takes(&s);
    assert!(t.tcp.is_staging());
    reset(s);
    // The reset is there once the next call would look at it.
    std::thread::sleep(std::time::Duration::from_millis(100));
    t.falls_quiet();
    assert!(!t.health.has_failed());
    drop(buffers);
    // As whoever gives buffers back.
    t.tcp.gpu().renew();
    t.holds(LARGE);
    t.until("failure", || t.health.has_failed());
    t.end();
}

/// A peer that stops in the middle of a small message holds no buffer.
fn holds_no_slot(t: Target, mut s: TcpStream, bytes: &[u8]) {
    // More than the header.
    let (front, back) = bytes.split_at(bytes.len() - SMALL / 2);
    s.write_all(front).unwrap();
    t.takes(&s);
    assert_eq!(t.buffers(SMALL).len(), SMALL_SLOTS);
    let buffers = t.buffers(SMALL);
    s.write_all(back).unwrap();
    t.takes(&s);
    assert!(t.tcp.is_staging(), "it waits for one once it is here");
    drop(buffers);
    t.holds(SMALL);
    assert!(!t.health.has_failed());
    t.end();
}

#[test]
fn a_peer_that_is_reset_in_a_put_without_a_slot_fails_at_once() {
    let fake = Fake::take();
    let t = Target::new(&fake, nobody());
    let (s, bytes) = (t.called(), put(&t, LARGE));
    fails_at_once(t, s, &bytes);
}

#[test]
fn a_peer_that_is_reset_in_an_answer_without_a_slot_fails_at_once() {
    let fake = Fake::take();
    let (t, s) = asked(&fake, LARGE);
    fails_at_once(t, s, &answer(LARGE));
}

#[test]
fn a_put_that_is_whole_waits_for_a_slot_in_silence_whatever_became_of_its_sender() {
    let fake = Fake::take();
    let t = Target::new(&fake, nobody());
    let (s, bytes) = (t.called(), put(&t, LARGE));
    waits_in_silence(t, s, &bytes);
}

#[test]
fn an_answer_that_is_whole_waits_for_a_slot_in_silence_whatever_became_of_its_sender() {
    let fake = Fake::take();
    let (t, s) = asked(&fake, LARGE);
    waits_in_silence(t, s, &answer(LARGE));
}

#[test]
fn a_peer_that_stops_in_a_small_put_holds_no_slot() {
    let fake = Fake::take();
    let t = Target::new(&fake, nobody());
    let (s, bytes) = (t.called(), put(&t, SMALL));
    holds_no_slot(t, s, &bytes);
}

#[test]
fn a_peer_that_stops_in_a_small_answer_holds_no_slot() {
    let fake = Fake::take();
    let (t, s) = asked(&fake, SMALL);
    holds_no_slot(t, s, &answer(SMALL));
}

/// Its host takes the connections, and it never greets back.
#[test]
fn a_peer_that_is_not_there_yet_keeps_no_slots_from_others() {
    let fake = Fake::take();
    let silent = TcpListener::bind(localhost()).unwrap();
    let t = Target::new(&fake, silent.local_addr().unwrap());
    t.puts(&t.lanes(), 32);
    t.tcp.progress();
    assert_eq!(t.slots_from_gpu().len(), SMALL_SLOTS);
    t.end();
}

/// Whether what one peer does not take is in the sockets, staged or fetched: its buffers are the others' after a beat,
/// and it gets everything once it reads.
#[test]
fn a_peer_that_takes_nothing_gives_its_slots_to_others() {
    const COUNT: usize = 1000;
    let fake = Fake::take();
    let (at, greeter) = callee();
    let t = Target::with(&fake, at, Timing::of(Duration::from_secs(16)));
    let memory = fake.peek(t.at);
    // SAFETY: bytes of the window, which nobody else touches by now.
    (0..BYTES).for_each(|i| unsafe { memory.add(i).write_volatile((i / PUT + i) as u8) });
    let lanes = t.lanes();
    t.puts(&lanes, 1);
    t.until("connections", || greeter.is_finished() && lanes.iter().all(|lane| lane.is_idle()));
    t.puts(&lanes, COUNT);
    t.until("slots", || {
        assert!(!t.health.has_failed() && lanes.iter().all(|lane| !lane.is_idle()));
        // Those that were taken to count them come back with their copies.
        !t.pools().poll() && t.slots_from_gpu().len() == SMALL_SLOTS
    });
    let mut theirs = greeter.join().unwrap();
    let express = theirs.iter().position(|s| s.peek(&mut [0]).is_ok_and(|n| n > 0)).unwrap();
    let mut express = theirs.swap_remove(express);
    express.set_nonblocking(false).unwrap();
    let reader = std::thread::spawn(move || {
        let mut next = [0; 4];
        for _ in 0..4 * (1 + COUNT) {
            let (mut header, mut bytes) = ([0; 48], [0; PUT]);
            express.read_exact(&mut header).unwrap();
            express.read_exact(&mut bytes).unwrap();
            let Ok(Frame::Put { context, place, bell: None }) = Frame::parse(&header) else { panic!("no put") };
            let (next, i) = (&mut next[context as usize - 10], place.addr as usize);
            // The first one was alone.
            assert_eq!((i, place.len as usize), (usize::max(*next, 1) - 1, PUT));
            *next += 1;
            let first = i * PUT % BYTES;
            assert!((first..).zip(bytes).all(|(at, byte)| byte == (at / PUT + at) as u8), "put {i} of {context}");
        }
        express
    });
    t.until("the rest", || reader.is_finished() && lanes.iter().all(|lane| lane.is_idle()));
    reader.join().unwrap();
    t.end();
}

/// A window goes while others' copies are always under way: what is under way to or from itself is all that is waited
/// for.
#[test]
fn a_window_goes_beside_traffic_of_others() {
    let fake = Fake::take();
    // Slow enough that the next copy is queued before one has landed.
    fake.settings(false, 5000);
    let t = Target::new(&fake, nobody());
    t.tcp.gpu().add_window(2, Extent { base: t.at, len: BYTES as u64 }, 1).unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|s| {
        let (pools, over) = (t.pools(), &over);
        let (at, fetch) = (t.at, |key, at| pools.fetch(key, at, LARGE as u64).unwrap().unwrap());
        s.spawn(move || {
            let mut on_their_way = VecDeque::new();
            while !over.load(Ordering::Acquire) {
                if on_their_way.len() < 8 {
                    on_their_way.push_back(fetch(KEY, at));
                }
                pools.poll();
                if on_their_way.front().is_some_and(|buffer: &PinnedBuffer| buffer.has_landed().unwrap()) {
                    on_their_way.pop_front();
                }
                std::thread::yield_now();
            }
        });
        until("copies of the other window", || pools.landed() > 4);
        let own = fetch(Key::gpu(2, false).0, at);
        let began = Instant::now();
        let is_over = pools.remove_window(2, Duration::from_secs(3));
        let has_landed = own.has_landed().unwrap();
        over.store(true, Ordering::Release);
        assert!(is_over && has_landed && began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    });
    t.end();
}
