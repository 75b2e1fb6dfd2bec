//! Several ranks in one process, each with its own TCP transport, driven by threads that sleep on its descriptor; and
//! peers made of listeners.

#![allow(dead_code, reason = "programs that have it for themselves use a part")]

use super::support::turn::{self, Turn};
use oxygin::fabric::soft::lane::{Health, Lane, Task};
use oxygin::fabric::soft::tcp::wire::Hello;
use oxygin::fabric::soft::tcp::{PeerInfo, Tcp, Timing};
use oxygin::fabric::World;
use oxygin::memory::registry::{Extent, Registry};
use oxygin::rma::op::{Get, Op, Put, Signal};
use oxygin::rma::seq::Seq;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Everything in these tests is over long before.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub const DATA: u32 = 1;
pub const SIGNALS: u32 = 2;

/// Memory of one rank: a data window and a signal window.
pub struct Rank {
    pub tcp: Arc<Tcp>,
    pub registry: Arc<Registry>,
    pub health: Vec<Arc<Health>>,
    pub data: Box<[AtomicU64]>,
    pub signals: Box<[AtomicU64]>,
    pub rank: u32,
    stop: Arc<AtomicBool>,
    driver: Option<JoinHandle<()>>,
    movers: Vec<JoinHandle<()>>,
}

/// Threads of a rank for bulk: `threads` and `threads_contexts` repeat the tests of other files with some.
fn movers() -> u32 {
    if module_path!().contains("threads") {
        2
    } else {
        0
    }
}

pub fn words(n: usize) -> Box<[AtomicU64]> {
    (0..n).map(|_| AtomicU64::new(0)).collect()
}

fn extent(w: &[AtomicU64]) -> Extent {
    Extent { base: w.as_ptr() as u64, len: 8 * w.len() as u64 }
}

pub fn address(w: &[AtomicU64]) -> u64 {
    w.as_ptr() as u64
}

pub fn token(rank: usize) -> [u8; 16] {
    [rank as u8 + 1; 16]
}

pub fn localhost() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

pub fn quick() -> Timing {
    Timing { connect: Duration::from_secs(2), greeting: Duration::from_millis(300), ..Timing::default() }
}

/// Drives a transport until told to stop, as a helper thread would.
pub fn drive(tcp: Arc<Tcp>, stop: Arc<AtomicBool>) -> JoinHandle<()> {
    std::thread::spawn(move || {
        while !stop.load(Ordering::Acquire) {
            if !tcp.progress() {
                let mut p = libc::pollfd { fd: tcp.as_fd(), events: libc::POLLIN, revents: 0 };
                // SAFETY: one pollfd.
                unsafe { libc::poll(&mut p, 1, 20) };
            }
        }
    })
}

pub fn ranks(n: usize, stripes: u32, data_words: usize) -> Vec<Rank> {
    ranks_with(n, stripes, data_words, Timing::default(), &[localhost()])
}

pub fn ranks_with(n: usize, stripes: u32, data_words: usize, timing: Timing, bind: &[SocketAddr]) -> Vec<Rank> {
    ranks_each(n, stripes, data_words, |_| timing, bind)
}

/// Each with deadlines of its own.
pub fn ranks_each(
    n: usize,
    stripes: u32,
    data_words: usize,
    timing: impl Fn(usize) -> Timing,
    bind: &[SocketAddr],
) -> Vec<Rank> {
    let mut all: Vec<Rank> = (0..n)
        .map(|r| {
            let registry = registry();
            let (data, signals) = (words(data_words), words(64));
            registry.insert(DATA, extent(&data));
            registry.insert(SIGNALS, extent(&signals));
            let mut tcp = Tcp::open_with(bind, token(r), stripes, registry.clone(), timing(r)).unwrap();
            tcp.set_movers(movers(), stripes).unwrap();
            Rank {
                tcp: Arc::new(tcp),
                registry,
                health: (0..n).map(|_| Arc::default()).collect(),
                data,
                signals,
                rank: r as u32,
                stop: Arc::default(),
                driver: None,
                movers: Vec::new(),
            }
        })
        .collect();
    let addresses: Vec<_> = all.iter().map(|r| r.tcp.addresses()).collect();
    for rank in &mut all {
        let peers = (0..n)
            .map(|p| PeerInfo { addresses: addresses[p].clone(), token: token(p), health: rank.health[p].clone() })
            .collect();
        rank.tcp.join(World { rank: rank.rank, nranks: n as u32 }, peers).unwrap();
        rank.start();
    }
    all
}

impl Rank {
    pub fn lane(&self, context: u32, peer: u32) -> Arc<Lane> {
        Arc::new(Lane::new(context, peer, self.health[peer as usize].clone()))
    }

    pub fn post(&self, lane: &Arc<Lane>, work: Op) -> Seq {
        let seq = lane.number();
        self.tcp.post(Task { lane: lane.clone(), seq, work });
        seq
    }

    /// The same rank with another transport.
    pub fn adopt(mut self, tcp: Arc<Tcp>) -> Self {
        self.freeze();
        self.tcp.close();
        self.stop = Arc::default();
        self.tcp = tcp;
        self.start();
        self
    }

    fn start(&mut self) {
        self.driver = Some(drive(self.tcp.clone(), self.stop.clone()));
        for number in 0..self.tcp.movers() {
            let (tcp, stop) = (self.tcp.clone(), self.stop.clone());
            let mover = std::thread::spawn(move || tcp.move_bulk(number, || stop.load(Ordering::Acquire)));
            self.movers.push(mover);
        }
    }

    /// Ends the driver without closing: a process that hangs.
    pub fn freeze(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.tcp.wake_movers();
        self.movers.drain(..).for_each(|m| m.join().unwrap());
        if let Some(d) = self.driver.take() {
            d.join().unwrap();
        }
    }

    /// Ends that.
    pub fn thaw(&mut self) {
        self.stop.store(false, Ordering::Release);
        self.start();
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        self.freeze();
        self.tcp.close();
    }
}

pub fn put(local: u64, remote: u64, len: usize) -> Put {
    Put { local, lkey: 0, rkey: DATA, remote, len: len as u64, signal: None, more: false }
}

pub fn bell(word: &AtomicU64, value: u64, strong: bool) -> Option<Signal> {
    Some(Signal { remote: word.as_ptr() as u64, rkey: SIGNALS, value, strong })
}

pub fn get(local: u64, remote: u64, len: usize) -> Get {
    Get { local, lkey: 0, rkey: DATA, remote, len: len as u64, more: false }
}

pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        std::thread::yield_now();
    }
}

/// Takes the turn of a test: machines that are busy stop everybody.
pub fn alone() -> Turn {
    turn::take()
}

pub fn wait(lane: &Lane, seq: Seq) {
    until("local completion", || lane.test(seq).unwrap());
}

pub fn wait_error(lane: &Lane, seq: Seq) -> String {
    let mut error = None;
    until("failure", || match lane.test(seq) {
        Ok(done) => {
            assert!(!done, "completed");
            false
        }
        Err(e) => {
            error = Some(e);
            true
        }
    });
    error.unwrap().message().to_string()
}

/// A signal of `from` arrives at `to`, once.
pub fn signal_works(from: &Rank, to: &Rank) {
    let lane = from.lane(9, to.rank);
    let before = to.signals[9].load(Ordering::SeqCst);
    let mut ring = put(0, 0, 0);
    ring.signal = bell(&to.signals[9], 1, true);
    let seq = from.post(&lane, Op::Put(ring));
    wait(&lane, seq);
    until("signal", || to.signals[9].load(Ordering::SeqCst) == before + 1);
}

/// Bytes of words.
pub fn bytes(w: &[AtomicU64]) -> Vec<u8> {
    w.iter().flat_map(|x| x.load(Ordering::Acquire).to_le_bytes()).collect()
}

/// Fills words with bytes that tell their place.
pub fn pattern(w: &[AtomicU64], seed: u64) {
    for (i, x) in w.iter().enumerate() {
        x.store((i as u64 ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15), Ordering::Relaxed);
    }
}

/// Answers rank 0's greetings for rank `rank`: the express connection, the middle one and the stripe.
pub fn greet(rank: u32, listener: &TcpListener) -> [TcpStream; 3] {
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
pub fn believer(others: &[SocketAddr]) -> Rank {
    believer_with(others, quick())
}

/// With deadlines of its own.
pub fn believer_with(others: &[SocketAddr], timing: Timing) -> Rank {
    let mut all = ranks(1, 1, 1 << 17);
    let mut real = all.pop().unwrap();
    real.freeze();
    let registry = registry();
    let tcp = Arc::new(Tcp::open_with(&[localhost()], token(0), 1, registry, timing).unwrap());
    real.health.resize_with(1 + others.len(), Default::default);
    let at = tcp.addresses().into_iter().chain(others.iter().copied()).zip(&real.health).enumerate();
    let peers = at.map(|(p, (a, h))| PeerInfo { addresses: vec![a], token: token(p), health: h.clone() }).collect();
    tcp.join(World { rank: 0, nranks: 1 + others.len() as u32 }, peers).unwrap();
    real.adopt(tcp)
}

/// A peer made of a listener: it greets like rank 1, then does what the test says with the express connection and the
/// stripe.
pub fn impostor(then: impl FnOnce(TcpStream, TcpStream) + Send + 'static) -> (Rank, std::thread::JoinHandle<()>) {
    let listener = TcpListener::bind(localhost()).unwrap();
    let at = listener.local_addr().unwrap();
    let thread = std::thread::spawn(move || {
        let [express, middle, stripe] = greet(1, &listener);
        then(express, stripe);
        drop(middle);
    });
    (believer(&[at]), thread)
}

/// A registry where the own ends of operations are in window 0, which is all memory.
pub fn registry() -> Arc<Registry> {
    let registry = Registry::default();
    registry.insert(0, Extent { base: 0, len: u64::MAX });
    Arc::new(registry)
}
