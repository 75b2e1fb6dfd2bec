//! What peers see of a rank's life: a process that is killed, one that becomes another program, one with forked
//! children.

use crate::support::children::{adopt, again, end, fork};
use oxygin::fabric::soft::peer::contact::Contact;
use oxygin::fabric::soft::status::alive::Liveness;
use oxygin::fabric::soft::status::{PeerStatus, Status};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Set for the process that is the rank: what it does.
const ENV: &str = "OXYGIN_TEST_LIFE";
const TOKEN: [u8; 16] = [3; 16];
const WITHIN: Duration = Duration::from_secs(30);

/// A process that holds its life, and how a peer sees it.
struct Rank {
    process: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
    status: PeerStatus,
}

impl Rank {
    fn start(name: &str) -> Self {
        let mut process = again(name).env(ENV, name).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let fd = said(&mut lines, "fd");
        let path = format!("/proc/{}/fd/{fd}", process.id());
        let file = File::options().read(true).write(true).open(path).unwrap();
        let status = PeerStatus::attach(file.as_fd(), 2, &TOKEN).unwrap();
        assert_eq!(status.look(), Liveness::Alive);
        Self { process, lines, status }
    }

    /// Has the process go on.
    fn go(&mut self) {
        drop(self.process.stdin.take());
    }

    fn until(&self, state: Liveness) {
        let end = Instant::now() + WITHIN;
        while self.status.look() != state {
            assert!(Instant::now() < end, "{:?}, not {state:?}", self.status.look());
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The number that the process printed behind this word. (The harness prints as well.)
fn said(lines: &mut std::io::Lines<BufReader<std::process::ChildStdout>>, what: &str) -> i32 {
    let number = |line: String| line.rsplit_once(what)?.1.trim().parse().ok();
    lines.find_map(|line| number(line.unwrap())).expect("a number")
}

/// In the rank's process: lives on a thread of its own, says where the status is, and does `then` once told to.
fn live(then: impl FnOnce(&Status)) {
    let status = Status::create(2, TOKEN).unwrap();
    std::thread::scope(|scope| {
        let (up, is_up) = std::sync::mpsc::channel();
        let (down, is_down) = std::sync::mpsc::channel::<()>();
        let status = &status;
        scope.spawn(move || {
            assert!(status.hold_life());
            up.send(()).unwrap();
            let _ = is_down.recv();
            status.release_life();
        });
        is_up.recv().unwrap();
        println!("\nfd {}", status.fd().as_raw_fd());
        std::io::stdin().read_line(&mut String::new()).unwrap();
        then(status);
        drop(down);
    });
    std::process::exit(0);
}

fn is_rank() -> bool {
    std::env::var_os(ENV).is_some()
}

#[test]
fn ends_in_good_order() {
    if is_rank() {
        live(|_| {});
    }
    let mut rank = Rank::start("ends_in_good_order");
    rank.go();
    rank.until(Liveness::Closed);
    assert!(rank.process.wait().unwrap().success());
    assert_eq!(rank.status.look(), Liveness::Closed);
}

/// The mark is there before anybody can get the process number: `wait` gives it back.
#[test]
fn is_killed() {
    if is_rank() {
        live(|_| {});
    }
    for _ in 0..20 {
        let mut rank = Rank::start("is_killed");
        rank.process.kill().unwrap();
        rank.process.wait().unwrap();
        assert_eq!(rank.status.look(), Liveness::Dead);
    }
}

#[test]
fn becomes_another_program() {
    if is_rank() {
        live(|_| panic!("{}", Command::new("sleep").arg("60").exec()));
    }
    let mut rank = Rank::start("becomes_another_program");
    rank.go();
    rank.until(Liveness::Dead);
    assert_eq!(rank.process.try_wait().unwrap(), None, "it has the same number");
}

#[test]
fn a_forked_child_is_not_its_parent() {
    if is_rank() {
        live(|_| {
            let children = [fork(), fork()];
            end(children[0]);
            println!("child {}", children[1]);
            std::thread::sleep(WITHIN);
        });
    }
    adopt();
    let mut rank = Rank::start("a_forked_child_is_not_its_parent");
    rank.go();
    let child = said(&mut rank.lines, "child");
    assert_eq!(rank.status.look(), Liveness::Alive, "a child's end is not its parent's");
    rank.process.kill().unwrap();
    rank.process.wait().unwrap();
    assert_eq!(rank.status.look(), Liveness::Dead, "a child does not live for its parent");
    // The killed process has left it behind.
    end(child);
}

/// Descriptors on their way are limited for each user: with many ranks on a host some questions have to be asked again.
#[test]
fn questions_that_cannot_be_asked_now_are_asked_later() {
    const NAME: &str = "questions_that_cannot_be_asked_now_are_asked_later";
    if !is_rank() {
        return assert!(again(NAME).env(ENV, NAME).status().unwrap().success());
    }
    let status = Status::create(2, TOKEN).unwrap();
    let contacts: Vec<_> = (0..8).map(|_| Contact::open(TOKEN).unwrap()).collect();
    let few = libc::rlimit { rlim_cur: 16, rlim_max: 16 };
    // SAFETY: plain calls; nobody else depends on what this process may do.
    unsafe {
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &few), 0);
        // The limit is not for root.
        if libc::geteuid() == 0 {
            assert_eq!(libc::setuid(65_534), 0);
        }
    }
    let mut asked = 0;
    for to in &contacts {
        while contacts[0].ask(to.name(), &TOKEN, 1, status.fd()).unwrap() {
            asked += 1;
        }
    }
    assert!((1..40).contains(&asked), "{asked} asked");
    // What is received makes room.
    while contacts[0].receive().is_some() {}
    assert!(contacts[0].ask(contacts[0].name(), &TOKEN, 1, status.fd()).unwrap());
}
