//! A stopped peer, and operations to it until there is no room: what others do goes on.

use crate::support::common::{Rank, Window};
use crate::support::processes::{processes, Place};
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Bytes of an operation to the stopped peer.
const BYTES: usize = 16 << 10;
/// Operations to it that are taken in any case: `OXYGIN_MAX_OPERATIONS`.
const ROOM: u64 = 1024;
/// Operations to the other one, each with its answer, meanwhile.
const TURNS: u64 = 300;

/// Operations to the stopped peer: more than there is room for, with what the ring takes, or the buffers of sockets.
/// Those grow on both sides as the kernel likes, up to a limit that differs from machine to machine.
fn many(transport: &str) -> u64 {
    let most = |name: &str| -> u64 {
        let three = std::fs::read_to_string(format!("/proc/sys/net/ipv4/tcp_{name}")).unwrap();
        three.split_whitespace().next_back().unwrap().parse().unwrap()
    };
    // One connection for messages, one for bulk, and as much again for what the kernel does not count.
    let buffers = if transport == "tcp" { 4 * (most("rmem") + most("wmem")) } else { 8 << 20 };
    2 * ROOM + buffers / BYTES as u64
}

const SENDER: usize = 0;
const OTHER: usize = 1;
const STOPPED: usize = 2;

/// The rank's requests and its table are good for any thread.
struct Shared<'a>(&'a Rank);

// SAFETY: the table's functions may be called from any thread.
unsafe impl Sync for Shared<'_> {}

impl Shared<'_> {
    fn rank(&self) -> &Rank {
        self.0
    }
}

/// A window of the other process, in a form that threads share.
struct Windows<'a>(&'a Window, &'a Window);

// SAFETY: handles are numbers; nobody touches the words but through atomics.
unsafe impl Sync for Windows<'_> {}

impl Windows<'_> {
    fn both(&self) -> (&Window, &Window) {
        (self.0, self.1)
    }
}

fn sends(place: &Place, r: &Rank, windows: (&Window, &Window), many: u64) {
    let (started, ended) = (AtomicU64::new(0), AtomicBool::new(false));
    let (shared, windows) = (&Shared(r), &Windows(windows.0, windows.1));
    let (started, ended) = (&started, &ended);
    std::thread::scope(|s| {
        s.spawn(move || {
            let (r, (data, signals)) = (shared.rank(), windows.both());
            let mut last: *mut c_void = std::ptr::null_mut();
            for _ in 0..many {
                last = r.put(0, (data, 0), BYTES, (data, 0), STOPPED, Some((signals, 0, 1)));
                started.fetch_add(1, Ordering::SeqCst);
            }
            r.wait(last);
            ended.store(true, Ordering::SeqCst);
        });
        // Until nothing is taken any more, or everything was.
        let (mut before, mut since) = (0, Instant::now());
        while since.elapsed() < Duration::from_millis(500) && before < many {
            let now = started.load(Ordering::SeqCst);
            if now != before {
                (before, since) = (now, Instant::now());
            }
            std::thread::yield_now();
        }
        let (data, signals) = windows.both();
        for turn in 1..=TURNS {
            r.wait(r.put(1, (data, 0), 64, (data, BYTES as u64), OTHER, Some((signals, 8, 1))));
            r.wait_signal(signals, 1, turn);
        }
        let stuck = started.load(Ordering::SeqCst);
        assert!(!ended.load(Ordering::SeqCst));
        place.signal(place.word(0).load(Ordering::SeqCst), libc::SIGCONT);
        assert!((ROOM..many).contains(&stuck), "{stuck} of {many} operations were taken, for {ROOM} there is room");
    });
}

fn answers(r: &Rank, windows: (&Window, &Window)) {
    let (data, signals) = windows;
    for turn in 1..=TURNS {
        r.wait_signal(signals, 1, turn);
        r.wait(r.put(1, (data, 0), 64, (data, BYTES as u64), SENDER, Some((signals, 8, 1))));
    }
}

fn beside_a_stopped_peer(name: &str, transport: &'static str) {
    processes(name, 3, &[], |place| {
        std::env::set_var("OXYGIN_FABRIC", "soft");
        std::env::set_var("OXYGIN_SOFT_TRANSPORT", transport);
        std::env::set_var("OXYGIN_TCP_STRIPES", "1");
        std::env::set_var("OXYGIN_MAX_OPERATIONS", ROOM.to_string());
        std::env::set_var("OXYGIN_PEER_TIMEOUT", "600");
        let r = place.join(2);
        let (data, signals) = (r.window(BYTES / 4, 0), r.window(2, 1));
        // Everybody has found the way to everybody.
        for peer in 0..3 {
            r.wait(r.put(0, (&data, 0), 8, (&data, BYTES as u64), peer, None));
        }
        if place.rank == STOPPED {
            place.word(0).store(std::process::id().into(), Ordering::SeqCst);
        }
        place.barrier();
        if place.rank == SENDER {
            place.signal(place.word(0).load(Ordering::SeqCst), libc::SIGSTOP);
            place.word(1).store(1, Ordering::SeqCst);
        }
        while place.rank != STOPPED && place.word(1).load(Ordering::SeqCst) == 0 {
            std::thread::yield_now();
        }
        match place.rank {
            SENDER => sends(place, &r, (&data, &signals), many(transport)),
            OTHER => answers(&r, (&data, &signals)),
            _ => r.wait_signal(&signals, 0, many(transport)),
        }
        place.barrier();
        r.leave();
    });
}

#[test]
fn a_stopped_peer_delays_nobody_over_shared_memory() {
    beside_a_stopped_peer("a_stopped_peer_delays_nobody_over_shared_memory", "no-cma");
}

#[test]
fn a_stopped_peer_delays_nobody_over_tcp() {
    beside_a_stopped_peer("a_stopped_peer_delays_nobody_over_tcp", "tcp");
}
