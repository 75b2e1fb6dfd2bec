//! A host that goes silent: two network namespaces, and the cable between them pulled. Needs root and iproute2:
//! `sudo -E cargo test --test tcp -- cut:: --ignored`.

use super::harness::*;
use oxygin::fabric::soft::lane::{Health, Lane, Task};
use oxygin::rma::op::Op;

use oxygin::fabric::soft::tcp::{PeerInfo, Tcp, Timing};
use oxygin::fabric::World;
use oxygin::memory::registry::{Extent, Registry};
use std::fs::File;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::process::Command;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{mpsc, Arc};
use std::time::{Duration, Instant};

/// How long a host may be silent.
const SILENCE: Duration = Duration::from_secs(6);

fn ip(args: &str) {
    let out = Command::new("ip").args(args.split_whitespace()).output().expect("ip, from iproute2");
    assert!(out.status.success(), "ip {args}: {}", String::from_utf8_lossy(&out.stderr));
}

/// Two namespaces and a cable. Gone when dropped.
struct Hosts(String);

impl Hosts {
    fn new() -> Self {
        let this = Self(format!("oxy{}", std::process::id()));
        for n in 0..2 {
            ip(&format!("netns add {}{n}", this.0));
        }
        ip(&format!("link add c0 netns {0}0 type veth peer name c1 netns {0}1", this.0));
        for n in 0..2 {
            ip(&format!("-n {}{n} addr add 10.77.0.{}/24 dev c{n}", this.0, n + 1));
            ip(&format!("-n {}{n} link set c{n} up", this.0));
        }
        this
    }

    /// Packets are lost without a word, as behind a switch: neither end sees its link go down.
    fn pull(&self) {
        ip(&format!("-n {}1 addr del 10.77.0.2/24 dev c1", self.0));
        ip(&format!("-n {}1 link set c1 address 02:00:00:00:00:77", self.0));
        ip(&format!("-n {}0 neigh replace 10.77.0.2 lladdr 02:00:00:00:00:99 dev c0", self.0));
    }
}

fn enter(hosts: &str, n: usize) {
    let ns = File::open(format!("/var/run/netns/{hosts}{n}")).unwrap();
    // SAFETY: plain system call; this thread alone changes its namespace.
    assert_eq!(unsafe { libc::setns(ns.as_raw_fd(), libc::CLONE_NEWNET) }, 0);
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for n in 0..2 {
            let _ = Command::new("ip").args(["netns", "del", &format!("{}{n}", self.0)]).status();
        }
    }
}

/// One rank in its namespace, driven by its own thread until its sender is dropped.
fn host(
    hosts: &Hosts,
    n: usize,
    registry: Arc<Registry>,
    healths: [Arc<Health>; 2],
) -> (mpsc::Receiver<Arc<Tcp>>, mpsc::Sender<SocketAddr>) {
    let (give, take) = mpsc::channel();
    let (tell, hear) = mpsc::channel::<SocketAddr>();
    let hosts = hosts.0.clone();
    std::thread::spawn(move || {
        enter(&hosts, n);
        let bind: SocketAddr = format!("10.77.0.{}:0", n + 1).parse().unwrap();
        let tcp = Arc::new(Tcp::open_with(&[bind], token(n), 1, registry, Timing::of(SILENCE)).unwrap());
        give.send(tcp.clone()).unwrap();
        let theirs = hear.recv().unwrap();
        let peers = healths.into_iter().enumerate().map(|(p, health)| PeerInfo {
            addresses: if p == n { tcp.addresses() } else { vec![theirs] },
            token: token(p),
            health,
        });
        tcp.join(World { rank: n as u32, nranks: 2 }, peers.collect()).unwrap();
        give.send(tcp.clone()).unwrap();
        // Until the test hangs up.
        while hear.try_recv() != Err(mpsc::TryRecvError::Disconnected) {
            if !tcp.progress() {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
        tcp.close();
    });
    (take, tell)
}

/// With bytes in flight, and with idle connections.
#[test]
#[ignore = "needs root for network namespaces"]
fn a_silent_host_fails_within_ten_seconds() {
    for in_flight in [true, false] {
        let hosts = Hosts::new();
        let data = words(1 << 17);
        let extent = Extent { base: address(&data), len: 1 << 20 };
        let registries = [registry(), registry()];
        registries.iter().for_each(|r| r.insert(DATA, extent));
        let healths: [[Arc<Health>; 2]; 2] = Default::default();
        let (take0, tell0) = host(&hosts, 0, registries[0].clone(), healths[0].clone());
        let (take1, tell1) = host(&hosts, 1, registries[1].clone(), healths[1].clone());
        let (a, b) = (take0.recv().unwrap(), take1.recv().unwrap());
        tell0.send(b.addresses()[0]).unwrap();
        tell1.send(a.addresses()[0]).unwrap();
        take0.recv().unwrap();
        take1.recv().unwrap();

        let lane = Arc::new(Lane::new(0, 1, healths[0][1].clone()));
        let post = |work| {
            let seq = lane.number();
            a.post(Task { lane: lane.clone(), seq, work });
            seq
        };
        // The local window holds the peer's, in this one process: signal its last word.
        let mut ring = put(0, 0, 0);
        ring.signal = bell(&data[(1 << 17) - 1], 1, true);
        ring.signal.as_mut().unwrap().rkey = DATA;
        wait(&lane, post(Op::Put(ring)));
        until("signal", || data[(1 << 17) - 1].load(SeqCst) == 1);

        hosts.pull();
        let start = Instant::now();
        if in_flight {
            post(Op::Put(ring));
        }
        until("failure at the sender", || healths[0][1].has_failed());
        until("failure at the receiver", || healths[1][0].has_failed());
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
        let e = healths[0][1].check().unwrap_err();
        assert!(e.message().contains("rank 1 at 10.77.0.2"), "{e}");
        drop((tell0, tell1));
        // The transports close while their windows still live.
        std::thread::sleep(Duration::from_millis(200));
    }
}
