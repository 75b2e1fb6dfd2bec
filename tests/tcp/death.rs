//! Ranks in processes of their own, over TCP, that are stopped or killed, some of them with a child that has a copy
//! of all their descriptors.

use crate::support::children::{fork, sleep_for_ever};
use crate::support::common::*;
use crate::support::logged;
use crate::support::processes::{processes, Place};
use nccl_plugin_api::*;
use oxygin::vtable::rma_v16::ncclRmaPlugin_v16 as T;
use std::ptr::null_mut;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

fn over_tcp(peer_timeout: &str) {
    for (name, value) in [
        ("OXYGIN_FABRIC", "soft"),
        ("OXYGIN_SOFT_TRANSPORT", "tcp"),
        ("NCCL_SOCKET_IFNAME", "lo"),
        ("OXYGIN_TIMEOUT", "3600"),
        ("OXYGIN_PEER_TIMEOUT", peer_timeout),
    ] {
        std::env::set_var(name, value);
    }
    logged::collect();
}

/// Longer than any test takes: what shows only after that does not show.
const NEVER: &str = "3600";

/// A child of which the C library knows nothing.
fn fork_past_the_c_library() -> libc::pid_t {
    // SAFETY: a copy of this process, as `fork` makes one; the child makes system calls alone.
    match unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) } {
        0 => sleep_for_ever(),
        pid => pid as libc::pid_t,
    }
}

fn kill_self() {
    // SAFETY: ends this process.
    unsafe { libc::raise(libc::SIGKILL) };
}

/// Stops a process, all of its threads.
fn stop(place: &Place, pid: u64) {
    place.signal(pid, libc::SIGSTOP);
    // Behind the name, which is in parentheses.
    let is_stopped = |stat: String| stat.rsplit(") ").next().is_some_and(|s| s.starts_with('T'));
    let all = || {
        let mut threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
        threads.all(|t| std::fs::read_to_string(t.unwrap().path().join("stat")).is_ok_and(is_stopped))
    };
    while !all() {
        std::thread::yield_now();
    }
}

/// The test of a request: done, not done, or failed.
fn test(r: &Rank, request: *mut std::ffi::c_void) -> Option<bool> {
    let mut done = 0;
    // SAFETY: an unfinished request of this rank.
    let result = unsafe { T.test.unwrap()(r.coll, request, &mut done) };
    (result == NcclResult::SUCCESS).then_some(done != 0)
}

fn has_error(r: &Rank) -> bool {
    let mut error = false;
    // SAFETY: plain call.
    ok(unsafe { T.query_last_error.unwrap()(r.ctx, &mut error) });
    error
}

/// Rank 1 makes a child and is killed. Rank 0 asks it for something and sends to it all the while.
fn killed_with_a_child(place: &Place, child: fn() -> libc::pid_t, peer_timeout: &str, said: &[&str]) {
    over_tcp(peer_timeout);
    let r = place.join(1);
    logged::listen();
    let (data, signals) = (r.window(1024, 0), r.window(2, 1));
    let to = 1 - r.rank;
    r.wait(r.put(0, (&data, 0), 64, (&data, 1024), to, Some((&signals, 0, 1))));
    r.wait_signal(&signals, 0, 1);
    place.barrier();
    if r.rank == 1 {
        place.word(0).store(child() as u64, SeqCst);
        kill_self();
    }
    while place.word(0).load(SeqCst) == 0 {
        std::thread::yield_now();
    }
    let end = Instant::now() + Duration::from_secs(50);
    let wait_until = |what: &str, done: &mut dyn FnMut() -> bool| {
        while !done() {
            assert!(Instant::now() < end, "{what}: not noticed; {:?}", logged::lines());
        }
    };
    let mut request = null_mut();
    // SAFETY: registered windows.
    let began = unsafe { T.iget.unwrap()(r.ctx, 0, 0, data.handle, 64, 2048, data.handle, 1, 0, &mut request) };
    if began == NcclResult::SUCCESS {
        wait_until("get", &mut || test(&r, request).is_none());
    }
    wait_until("put", &mut || {
        let (s, d) = (signals.handle, data.handle);
        // SAFETY: registered windows.
        let put = unsafe {
            T.iput_signal.unwrap()(r.ctx, 0, 0, d, 8, 1024, d, 1, 0, s, 1, SIGNAL_OP_ADD, true, 0, &mut request)
        };
        put != NcclResult::SUCCESS || test(&r, request).is_none()
    });
    assert!(has_error(&r));
    let lines = logged::lines();
    let found = |words: &str| lines.iter().any(|(_, l)| l.contains("rank 1") && l.contains(words));
    assert!(said.iter().any(|words| found(words)), "{lines:?}");
    drop(lines);
    r.leave();
    place.signal(place.word(0).load(SeqCst), libc::SIGKILL);
}

#[test]
fn a_rank_that_is_killed_leaves_no_connection_to_its_child() {
    processes("a_rank_that_is_killed_leaves_no_connection_to_its_child", 2, &[1], |place| {
        killed_with_a_child(place, fork, NEVER, &["closed without a FIN", "reset by peer"]);
    });
}

#[test]
fn a_rank_that_is_killed_is_missed_though_its_connections_stay() {
    processes("a_rank_that_is_killed_is_missed_though_its_connections_stay", 2, &[1], |place| {
        killed_with_a_child(place, fork_past_the_c_library, "3", &["has said nothing for 3 s"]);
    });
}

/// A collective step.
fn step(coll: usize) -> NcclResult {
    let memory = Box::leak(vec![0u64; 64].into_boxed_slice());
    let mut window = null_mut();
    // SAFETY: memory that lives as long as the process.
    unsafe { T.reg_mr_sym.unwrap()(coll as _, memory.as_mut_ptr().cast(), 512, PTR_HOST, 0, &mut window) }
}

/// Rank 0 is killed while rank 1 waits in a step for rank 2, which never comes.
fn killed_in_a_step(place: &Place, child: fn() -> libc::pid_t, peer_timeout: &str, said: &str) {
    over_tcp(peer_timeout);
    let r = place.join(1);
    place.barrier();
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let coll = r.coll as usize;
    match r.rank {
        0 => {
            let before = descriptors();
            std::thread::spawn(move || step(coll));
            // Its epoll instance, and rank 1's connection.
            while descriptors() < before + 2 {
                std::thread::yield_now();
            }
            if peer_timeout != NEVER {
                // Time for a first beat: before that there is nothing to miss.
                std::thread::sleep(Duration::from_secs_f64(peer_timeout.parse::<f64>().unwrap() / 2.0));
            }
            place.word(0).store(child() as u64, SeqCst);
            kill_self();
        }
        1 => {
            logged::listen();
            assert_eq!(step(coll), NcclResult::REMOTE_ERROR);
            let lines = logged::lines();
            assert!(lines.iter().any(|(_, l)| l.contains("rank 0") && l.contains(said)), "{lines:?}");
            place.signal(place.word(0).load(SeqCst), libc::SIGKILL);
            place.word(1).store(1, SeqCst);
        }
        _ => {
            while place.word(1).load(SeqCst) == 0 {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
}

#[test]
fn a_rank_0_that_is_killed_in_a_step_leaves_no_connection_to_its_child() {
    processes("a_rank_0_that_is_killed_in_a_step_leaves_no_connection_to_its_child", 3, &[0], |place| {
        killed_in_a_step(place, fork, NEVER, "went away");
    });
}

#[test]
fn a_rank_0_that_is_killed_in_a_step_is_missed_though_its_connections_stay() {
    processes("a_rank_0_that_is_killed_in_a_step_is_missed_though_its_connections_stay", 3, &[0], |place| {
        killed_in_a_step(place, fork_past_the_c_library, "2", "has said nothing for 2 s");
    });
}

/// Rank 1 is stopped for less than it may be, with bulk on its way, and goes on; then for longer.
#[test]
fn a_rank_that_is_stopped_goes_on_within_the_limit_and_is_given_up_beyond() {
    processes("a_rank_that_is_stopped_goes_on_within_the_limit_and_is_given_up_beyond", 2, &[], |place| {
        const WORDS: usize = 1 << 20;
        const PUTS: u64 = 8;
        over_tcp("4");
        let r = place.join(1);
        let (data, signals) = (r.window(WORDS, 0), r.window(2, 1));
        place.word(r.rank).store(std::process::id() as u64, SeqCst);
        place.barrier();
        logged::listen();
        if r.rank == 0 {
            let other = place.word(1).load(SeqCst);
            let put = || r.put(0, (&data, 0), 8 * WORDS, (&data, 0), 1, Some((&signals, 0, 1)));
            r.wait(put());
            stop(place, other);
            let requests: Vec<_> = (0..PUTS).map(|_| put()).collect();
            std::thread::sleep(Duration::from_millis(1500));
            place.signal(other, libc::SIGCONT);
            requests.into_iter().for_each(|q| r.wait(q));
            place.barrier();
            assert!(!has_error(&r), "{:?}", logged::lines());
            // For good.
            let start = Instant::now();
            stop(place, other);
            while !has_error(&r) {
                assert!(start.elapsed() < Duration::from_secs(40), "not noticed: {:?}", logged::lines());
                std::thread::sleep(Duration::from_millis(10));
            }
            assert!(start.elapsed() >= Duration::from_secs(4), "{:?}: {:?}", start.elapsed(), logged::lines());
            let lines = logged::lines();
            assert!(
                lines.iter().any(|(_, l)| l.contains("rank 1") && l.contains("has said nothing for 4 s")),
                "{lines:?}"
            );
            place.signal(other, libc::SIGCONT);
        } else {
            r.wait_signal(&signals, 0, 1 + PUTS);
            assert!(!has_error(&r), "{:?}", logged::lines());
            place.barrier();
            while !has_error(&r) {
                // SAFETY: plain call.
                ok(unsafe { T.rma_progress.unwrap()(r.ctx) });
            }
        }
        place.barrier();
        r.leave();
    });
}

/// Rank 1 is stopped before rank 0 has met it, and for longer than it may be. On one host, where it is asked
/// otherwise first.
#[test]
fn a_first_meeting_waits_no_longer_than_is_set() {
    processes("a_first_meeting_waits_no_longer_than_is_set", 2, &[], |place| {
        over_tcp("1");
        std::env::set_var("OXYGIN_SOFT_TRANSPORT", "auto");
        let r = place.join(1);
        let data = r.window(64, 0);
        place.word(r.rank).store(std::process::id() as u64, SeqCst);
        place.barrier();
        logged::listen();
        if r.rank == 0 {
            let other = place.word(1).load(SeqCst);
            stop(place, other);
            let start = Instant::now();
            let request = r.put(0, (&data, 0), 8, (&data, 8), 1, None);
            while let Some(done) = test(&r, request) {
                assert!(!done, "it was met before: {:?}", logged::lines());
                assert!(start.elapsed() < Duration::from_secs(15), "still waiting: {:?}", logged::lines());
            }
            place.signal(other, libc::SIGCONT);
            let lines = logged::lines();
            let said = "no data connection to rank 1 within 1 s (OXYGIN_PEER_TIMEOUT)";
            assert!(lines.iter().any(|(_, l)| l.starts_with(said)), "{lines:?}");
        }
        place.barrier();
        r.leave();
    });
}
