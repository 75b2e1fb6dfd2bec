//! What the soft fabric's TCP transport does over loopback, beside iperf3 (one stream) and bare sockets.
//!
//! `cargo run --release --example tcp_bench [ROUNDS] [WHAT]`; `threads` tries stripes and threads for bulk. Two
//! processes: this one, and a child that is the other rank.

use oxygin::fabric::soft::lane::{Health, Lane, Task};
use oxygin::fabric::soft::tcp::{PeerInfo, Tcp};
use oxygin::fabric::World;
use oxygin::memory::registry::{Extent, Registry};
use oxygin::rma::op::{Get, Op, Put, Signal};
use oxygin::rma::seq::Seq;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::Arc;
use std::time::{Duration, Instant};

const WINDOW: usize = 64 << 20;
const LARGE: usize = 16 << 20;

struct Rank {
    tcp: Arc<Tcp>,
    memory: Vec<u64>,
    lane: Arc<Lane>,
    remote: u64,
}

fn open(rank: u32, stripes: u32, movers: u32, mut tell: impl Write, mut hear: impl BufRead) -> Rank {
    // Written, so that no page is the shared zero page; signals start at 0.
    let mut memory = vec![1u64; WINDOW / 8];
    memory[WINDOW / 8 - 8..].fill(0);
    let registry = Arc::new(Registry::default());
    registry.insert(0, Extent { base: memory.as_ptr() as u64, len: WINDOW as u64 });
    let mut tcp = Tcp::open(&["127.0.0.1:0".parse().unwrap()], [rank as u8; 16], stripes, registry).unwrap();
    tcp.set_movers(movers, stripes).unwrap();
    writeln!(tell, "{} {}", tcp.addresses()[0], memory.as_ptr() as u64).unwrap();
    tell.flush().unwrap();
    let mut line = String::new();
    hear.read_line(&mut line).unwrap();
    let (address, remote) = line.trim().split_once(' ').unwrap();
    let theirs: SocketAddr = address.parse().unwrap();
    let info = |r: u32| PeerInfo {
        addresses: if r == rank { tcp.addresses() } else { vec![theirs] },
        token: [r as u8; 16],
        health: Arc::new(Health::default()),
    };
    let peers = vec![info(0), info(1)];
    let lane = Arc::new(Lane::new(0, 1 - rank, peers[1 - rank as usize].health.clone()));
    tcp.join(World { rank, nranks: 2 }, peers).unwrap();
    let tcp = Arc::new(tcp);
    for number in 0..movers as usize {
        let tcp = tcp.clone();
        std::thread::spawn(move || tcp.move_bulk(number, || false));
    }
    Rank { tcp, memory, lane, remote: remote.parse().unwrap() }
}

impl Rank {
    /// The last words of the window are for signals.
    fn word(&self, n: usize) -> &AtomicU64 {
        // SAFETY: an aligned word of our own memory, used atomically by everybody.
        unsafe { AtomicU64::from_ptr(self.memory.as_ptr().add(WINDOW / 8 - 1 - n).cast_mut()) }
    }

    fn post(&self, len: usize, signal: Option<usize>, more: bool) -> Seq {
        let signal = signal.map(|n| Signal {
            remote: self.remote + (WINDOW - 8 * (n + 1)) as u64,
            rkey: 0,
            value: 1,
            strong: true,
        });
        let local = self.memory.as_ptr() as u64;
        let put = Put { local, lkey: 0, rkey: 0, remote: self.remote, len: len as u64, signal, more };
        let seq = self.lane.number();
        self.tcp.post(Task { lane: self.lane.clone(), seq, work: Op::Put(put) });
        seq
    }

    fn get(&self, len: usize) -> Seq {
        let local = self.memory.as_ptr() as u64;
        let get = Get { local, lkey: 0, rkey: 0, remote: self.remote, len: len as u64, more: false };
        let seq = self.lane.number();
        self.tcp.post(Task { lane: self.lane.clone(), seq, work: Op::Get(get) });
        seq
    }

    fn doze(&self) {
        if !self.tcp.progress() {
            let mut p = libc::pollfd { fd: self.tcp.as_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: one pollfd.
            unsafe { libc::poll(&mut p, 1, 100) };
        }
    }

    fn wait(&self, seq: Seq) {
        while !self.lane.test(seq).unwrap() {
            self.doze();
        }
    }

    /// Everything posted so far is applied there: signal 1 is answered on signal 1.
    fn sync(&self) {
        let before = self.word(1).load(SeqCst);
        self.post(0, Some(1), false);
        while self.word(1).load(SeqCst) == before {
            self.doze();
        }
    }
}

/// Answers signal 1 on signal 1, sleeping, and signal 0 on signal 0, spinning.
fn child(stripes: u32, movers: u32, spin: bool) {
    let r = open(1, stripes, movers, std::io::stdout(), std::io::stdin().lock());
    let mut seen = [0, 0];
    let parent = std::os::unix::process::parent_id();
    while std::os::unix::process::parent_id() == parent {
        for _ in 0..1000 {
            for (n, seen) in seen.iter_mut().enumerate() {
                if r.word(n).load(SeqCst) != *seen {
                    *seen += 1;
                    r.post(8 * (1 - n), Some(n), false);
                }
            }
            if spin {
                r.tcp.progress();
            } else {
                r.doze();
            }
        }
    }
}

struct Pair {
    rank: Rank,
    child: std::process::Child,
}

impl Pair {
    fn new(stripes: u32, movers: u32, spin: bool) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["child", &stripes.to_string(), &movers.to_string(), &spin.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (tell, hear) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let rank = open(0, stripes, movers, tell, BufReader::new(hear));
        rank.sync();
        Self { rank, child }
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Puts of 16 MiB, Gbit/s.
fn bandwidth(stripes: u32, movers: u32) -> f64 {
    let pair = Pair::new(stripes, movers, false);
    let r = &pair.rank;
    let (start, mut n, mut pending) = (Instant::now(), 0u64, std::collections::VecDeque::new());
    while start.elapsed() < Duration::from_secs(3) {
        pending.push_back(r.post(LARGE, None, false));
        n += 1;
        if pending.len() >= 4 {
            r.wait(pending.pop_front().unwrap());
        }
    }
    r.sync();
    (n * LARGE as u64 * 8) as f64 / start.elapsed().as_secs_f64() / 1e9
}

fn get_bandwidth() -> f64 {
    let pair = Pair::new(1, 0, false);
    let r = &pair.rank;
    let (start, mut n, mut pending) = (Instant::now(), 0u64, std::collections::VecDeque::new());
    while start.elapsed() < Duration::from_secs(2) {
        pending.push_back(r.get(LARGE));
        n += 1;
        if pending.len() >= 4 {
            r.wait(pending.pop_front().unwrap());
        }
    }
    pending.drain(..).for_each(|s| r.wait(s));
    (n * LARGE as u64 * 8) as f64 / start.elapsed().as_secs_f64() / 1e9
}

fn rate(more: bool, signal: bool) -> f64 {
    let pair = Pair::new(1, 0, false);
    let r = &pair.rank;
    let (start, mut n) = (Instant::now(), 0u64);
    while start.elapsed() < Duration::from_secs(2) {
        let mut last = Seq(0);
        for i in 0..1024 {
            last = r.post(8, signal.then_some(2), more && i < 1023);
        }
        n += 1024;
        r.wait(last);
    }
    r.sync();
    n as f64 / start.elapsed().as_secs_f64() / 1e6
}

/// Half a round trip, µs.
fn latency(spin: bool) -> f64 {
    const N: u64 = 5_000;
    let pair = Pair::new(1, 0, spin);
    let r = &pair.rank;
    let mut best = f64::MAX;
    for round in 0..3 {
        let start = Instant::now();
        for i in 0..N {
            r.post(8, Some(0), false);
            while r.word(0).load(SeqCst) != round * N + i + 1 {
                if spin {
                    r.tcp.progress();
                } else {
                    r.doze();
                }
            }
        }
        best = best.min(start.elapsed().as_secs_f64() / N as f64 / 2.0 * 1e6);
    }
    best
}

/// Round trips of a signal while another context keeps large puts going: median and 99th percentile, µs.
fn latency_behind_bulk() -> (f64, f64) {
    let pair = Pair::new(1, 0, false);
    let r = &pair.rank;
    let bulk = Arc::new(Lane::new(1, 1, r.lane.health.clone()));
    let (mut pending, mut took) = (std::collections::VecDeque::new(), Vec::new());
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(3) {
        while pending.len() < 2 {
            let local = r.memory.as_ptr() as u64;
            let len = LARGE as u64;
            let put = Put { local, lkey: 0, rkey: 0, remote: r.remote, len, signal: None, more: false };
            let seq = bulk.number();
            r.tcp.post(Task { lane: bulk.clone(), seq, work: Op::Put(put) });
            pending.push_back(seq);
        }
        let ping = Instant::now();
        r.sync();
        took.push(ping.elapsed().as_secs_f64() * 1e6);
        while pending.front().is_some_and(|&s| bulk.test(s).unwrap()) {
            pending.pop_front();
        }
    }
    while !bulk.is_idle() {
        r.doze();
    }
    took.sort_by(f64::total_cmp);
    (took[took.len() / 2], took[took.len() * 99 / 100])
}

/// [`latency`] with bare sockets and messages of the same length.
fn raw_latency(spin: bool) -> f64 {
    const N: u32 = 5_000;
    const LEN: usize = 56;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["raw", &listener.local_addr().unwrap().to_string(), &spin.to_string()])
        .spawn()
        .unwrap();
    let (mut s, _) = listener.accept().unwrap();
    s.set_nodelay(true).unwrap();
    s.set_nonblocking(spin).unwrap();
    let mut best = f64::MAX;
    for _ in 0..3 {
        let start = Instant::now();
        for _ in 0..N {
            s.write_all(&[1; LEN]).unwrap();
            take(&mut s, &mut [0; LEN]);
        }
        best = best.min(start.elapsed().as_secs_f64() / f64::from(N) / 2.0 * 1e6);
    }
    drop(s);
    child.wait().unwrap();
    best
}

fn take(s: &mut TcpStream, buf: &mut [u8]) -> bool {
    let mut have = 0;
    while have < buf.len() {
        match s.read(&mut buf[have..]) {
            Ok(0) => return false,
            Ok(n) => have += n,
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(_) => return false,
        }
    }
    true
}

fn raw(at: &str, spin: bool) {
    let mut s = TcpStream::connect(at).unwrap();
    s.set_nodelay(true).unwrap();
    s.set_nonblocking(spin).unwrap();
    let mut buf = [0; 56];
    while take(&mut s, &mut buf) {
        s.write_all(&buf).unwrap();
    }
}

/// Gbit/s of one iperf3 stream; `None`: not installed.
fn iperf() -> Option<f64> {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let mut server = Command::new("iperf3").args(["-s", "-1", "-p", &port]).stdout(Stdio::null()).spawn().ok()?;
    std::thread::sleep(Duration::from_millis(300));
    let out = Command::new("iperf3").args(["-c", "127.0.0.1", "-p", &port, "-t", "3", "-f", "g"]).output().ok()?;
    let _ = server.wait();
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let line = text.lines().find(|l| l.ends_with("receiver"))?;
    let words: Vec<_> = line.split_whitespace().collect();
    let at = words.iter().position(|w| w.ends_with("bits/sec"))?;
    words[at - 1].parse().ok()
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    match args.get(1).map(String::as_str) {
        Some("child") => return child(args[2].parse().unwrap(), args[3].parse().unwrap(), args[4] == "true"),
        Some("raw") => return raw(&args[2], args[3] == "true"),
        _ => {}
    }
    let only = args.get(2).cloned().unwrap_or_default();
    let rounds: u32 = args.get(1).and_then(|a| a.parse().ok()).unwrap_or(3);
    let wants = |what: &str| only.is_empty() || only == what;
    for _ in 0..rounds {
        if only == "threads" {
            for (stripes, movers) in [(1, 0), (1, 1), (1, 2), (2, 2), (2, 4), (4, 4), (4, 8)] {
                let gbits = bandwidth(stripes, movers);
                println!("put 16 MiB: {stripes} stripes, {movers} threads a rank: {gbits:.1} Gbit/s");
            }
        }
        if wants("bw") {
            let (ours, theirs) = (bandwidth(1, 0), iperf());
            let ratio = theirs.map_or(String::new(), |t| format!(", iperf3 {t:.1}, ratio {:.2}", ours / t));
            println!("put 16 MiB: {ours:.1} Gbit/s{ratio}");
        }
        if wants("more") {
            println!("put 16 MiB, 2 stripes: {:.1} Gbit/s; get 16 MiB: {:.1} Gbit/s", bandwidth(2, 0), get_bandwidth());
        }
        if wants("rate") {
            let (plain, hinted, rung) = (rate(false, false), rate(true, false), rate(false, true));
            println!("put 8 B: {plain:.2} M/s, with the more hint {hinted:.2}, with a signal {rung:.2}");
        }
        if wants("mixed") {
            let (half, most) = latency_behind_bulk();
            println!("signal round trip beside 16 MiB puts: median {half:.0} µs, 99 % {most:.0} µs");
        }
        if wants("lat") {
            for (spin, how) in [(true, "spinning"), (false, "sleeping")] {
                let (ours, bare) = (latency(spin), raw_latency(spin));
                println!("put+signal 8 B, {how}: {ours:.1} µs, bare socket {bare:.1}, ratio {:.2}", ours / bare);
            }
        }
    }
}
