//! Ranks forked and joined over TCP: what they hand each other, and what is said when one is missing, fails, dies or
//! hangs. A program of its own, because ranks may only be forked by a process with one thread.

#[path = "support/port.rs"]
mod port;

use oxygin_cli::ranks::{run, End, Outcome, Place, Plan, Ranks, RanksError};
use std::error::Error;
use std::time::{Duration, Instant};

type Body = fn(&mut Ranks) -> Result<Vec<u8>, Box<dyn Error>>;

fn local(nranks: u32, deadline_ms: u64, body: Body) -> Outcome {
    run(&Plan::local(nranks, Duration::from_millis(deadline_ms)), body).expect("ranks start")
}

fn failure(outcome: Outcome) -> String {
    outcome.results().expect_err("the run must fail").to_string()
}

fn gathers_by_rank() {
    let outcome = local(5, 20_000, |ranks| {
        let mine = vec![ranks.rank() as u8; ranks.rank() as usize];
        let all = ranks.gather("one", &mine)?;
        ranks.barrier("two")?;
        let numbers = ranks.gather_values("three", &(ranks.rank() * 10))?;
        Ok([all.concat(), numbers.iter().map(|&n| n as u8).collect()].concat())
    });
    let results = outcome.results().expect("all is well");
    assert_eq!(results.len(), 5);
    for result in results {
        assert_eq!(result, [1, 2, 2, 3, 3, 3, 4, 4, 4, 4, 0, 10, 20, 30, 40]);
    }
}

fn a_late_rank_is_named() {
    let why = failure(local(3, 300, |ranks| {
        if ranks.rank() == 1 {
            std::thread::sleep(Duration::from_secs(60));
        }
        ranks.barrier("meeting")?;
        Ok(vec![])
    }));
    assert!(why.contains("'meeting'") && why.contains("rank 1") && !why.contains("rank 2"), "{why}");
}

fn a_failing_rank_is_named_once() {
    let why = failure(local(4, 20_000, |ranks| {
        if ranks.rank() == 2 {
            return Err("the bytes are wrong".into());
        }
        ranks.barrier("meeting")?;
        Ok(vec![])
    }));
    assert_eq!(why, "rank 2: the bytes are wrong");
}

fn a_killed_rank_is_named_with_its_signal() {
    let why = failure(local(3, 20_000, |ranks| {
        if ranks.rank() == 1 {
            // SAFETY: kills this very process.
            unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
        }
        ranks.barrier("meeting")?;
        Ok(vec![])
    }));
    assert!(why.contains("rank 1 died") && why.contains("SIGKILL"), "{why}");
}

fn a_panic_is_a_failure() {
    std::panic::set_hook(Box::new(|_| {}));
    let why = failure(local(2, 20_000, |ranks| {
        assert!(ranks.rank() == 0, "rank one panics");
        ranks.barrier("meeting")?;
        Ok(vec![])
    }));
    drop(std::panic::take_hook());
    assert!(why.contains("rank 1") && why.contains("rank one panics"), "{why}");
}

fn the_living_go_on_where_deaths_are_tolerated() {
    let mut plan = Plan::local(4, Duration::from_secs(20));
    plan.tolerate_deaths = true;
    let outcome = run(&plan, |ranks| {
        ranks.barrier("before")?;
        if ranks.rank() == 3 {
            // SAFETY: kills this very process.
            unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
        }
        let all = ranks.gather("after", &[1])?;
        assert!(!ranks.alive(3) && ranks.alive(2) && all[3].is_empty());
        Ok(all.concat())
    })
    .expect("ranks start");
    for (rank, end) in outcome.ends {
        match rank {
            3 => assert!(matches!(&end, End::Died(why) if why.contains("SIGKILL")), "{end:?}"),
            _ => assert_eq!(end, End::Done(vec![1, 1, 1])),
        }
    }
}

fn hung_ranks_are_killed() {
    let start = Instant::now();
    let why = failure(local(2, 20_000, |ranks| {
        if ranks.rank() == 1 {
            return Err("first to fail".into());
        }
        loop {
            std::thread::sleep(Duration::from_secs(1));
        }
    }));
    assert_eq!(why, "rank 1: first to fail");
    assert!(start.elapsed() < Duration::from_secs(60), "the hung rank was waited for");
    // SAFETY: a plain system call; no child may be left.
    assert_eq!(unsafe { libc::waitpid(-1, std::ptr::null_mut(), libc::WNOHANG) }, -1, "a child was not reaped");
}

fn ranks_that_do_not_end_are_named() {
    let why = failure(local(2, 500, |ranks| {
        ranks.barrier("end")?;
        if ranks.rank() == 1 {
            std::thread::sleep(Duration::from_secs(60));
        }
        Ok(vec![])
    }));
    assert!(why.contains("rank 1 to end"), "{why}");
    let why = failure(local(2, 500, |_| {
        std::thread::sleep(Duration::from_secs(60));
        Ok(vec![])
    }));
    assert!(why.contains("ranks 0, 1 to come to the next step"), "{why}");
}

fn ranks_may_work_as_long_as_they_say() {
    let outcome = local(2, 500, |ranks| {
        ranks.allow(Duration::from_secs(20));
        ranks.barrier("before work")?;
        std::thread::sleep(Duration::from_millis(1200));
        ranks.barrier("end")?;
        Ok(vec![])
    });
    outcome.results().expect("the work was announced");
}

/// Forks a process that joins as `rank`, then runs the root here.
fn over_tcp(joins: &[(u32, u32, &str)], deadline: Duration, nranks: u32) -> Result<Vec<Vec<u8>>, RanksError> {
    let root = format!("127.0.0.1:{}", port::free());
    let body: Body = |ranks| Ok(ranks.gather("over TCP", &[ranks.rank() as u8 + 1])?.concat());
    let plan = |place, options: &str| Plan { options: options.into(), place, ..Plan::local(0, deadline) };
    let mut children = Vec::new();
    for &(rank, nranks, options) in joins {
        // SAFETY: this process has one thread.
        match unsafe { libc::fork() } {
            0 => {
                let joined = run(&plan(Place::Join { rank, nranks, root: root.clone() }, options), body);
                let ok = joined.and_then(Outcome::results).is_ok();
                // SAFETY: ends the child without the parent's exit handlers.
                unsafe { libc::_exit(if ok { 0 } else { 1 }) }
            }
            pid => children.push(pid),
        }
    }
    let garbage = std::thread::spawn({
        let root = root.clone();
        move || {
            use std::io::Write;
            for _ in 0..100 {
                if let Ok(mut stream) = std::net::TcpStream::connect(&root) {
                    return drop(stream.write_all(b"GET / HTTP/1.1\r\n\r\n"));
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    });
    // The thread above only touches its socket; the rank forked here uses nothing of it.
    let outcome = run(&plan(Place::Root { nranks, listen: root }, "same"), body);
    garbage.join().expect("the scanner");
    for pid in children {
        // SAFETY: our own children.
        unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) };
    }
    outcome.and_then(Outcome::results)
}

fn ranks_meet_over_tcp() {
    let results = over_tcp(&[(2, 3, "same"), (1, 3, "same")], Duration::from_secs(20), 3).expect("all is well");
    assert_eq!(results[0], [1, 2, 3]);
}

fn other_options_are_refused() {
    let why = over_tcp(&[(1, 2, "different")], Duration::from_millis(800), 2).expect_err("rank 1 is refused");
    assert!(why.to_string().contains("rank 1 (never connected)"), "{why}");
}

fn main() {
    let tests: [(&str, fn()); 11] = [
        ("gathers_by_rank", gathers_by_rank),
        ("a_late_rank_is_named", a_late_rank_is_named),
        ("a_failing_rank_is_named_once", a_failing_rank_is_named_once),
        ("a_killed_rank_is_named_with_its_signal", a_killed_rank_is_named_with_its_signal),
        ("a_panic_is_a_failure", a_panic_is_a_failure),
        ("the_living_go_on_where_deaths_are_tolerated", the_living_go_on_where_deaths_are_tolerated),
        ("hung_ranks_are_killed", hung_ranks_are_killed),
        ("ranks_that_do_not_end_are_named", ranks_that_do_not_end_are_named),
        ("ranks_may_work_as_long_as_they_say", ranks_may_work_as_long_as_they_say),
        ("ranks_meet_over_tcp", ranks_meet_over_tcp),
        ("other_options_are_refused", other_options_are_refused),
    ];
    for (name, test) in tests {
        test();
        println!("test {name} ... ok");
    }
}
