//! The hub: the process that every rank talks to. It gathers what they say, notices who is missing or dead, and says
//! so to the others.

use super::frame::{put_bytes, take_bytes, take_u32, Frame, Kind};
use super::wire::Wire;
use super::{End, Plan, MAGIC};
use std::collections::BTreeMap;
use std::net::TcpListener;
use std::os::fd::{AsRawFd, RawFd};
use std::time::{Duration, Instant};

/// How long local ranks may take to leave after the run was aborted, before they are killed.
const GRACE: Duration = Duration::from_secs(3);
/// What a rank hears that waits for one that is over.
pub const ENDED: &str = "has ended and will not come to step";
/// What is said of a rank that did not come in time.
pub(super) const ABSENT: &str = "(never connected)";
/// How long a connection may take to say who it is.
const HELLO_TIME: Duration = Duration::from_secs(5);

/// What is known of one rank.
enum State {
    /// Has not connected yet (other hosts).
    Absent,
    /// Doing its work; in a step if it contributed.
    Running { wire: Wire, contribution: Option<Vec<u8>> },
    /// Has ended.
    Ended(End),
}

/// The step that some ranks have reached and others not.
struct Step {
    name: String,
    since: Instant,
    within: Duration,
}

pub(super) struct Hub {
    ranks: Vec<State>,
    /// Process ids of the ranks that this process forked.
    children: BTreeMap<u32, libc::pid_t>,
    listener: Option<TcpListener>,
    strangers: Vec<(Wire, Instant)>,
    options: String,
    tolerate_deaths: bool,
    step: Option<Step>,
    /// When a rank was last heard of.
    heard: Instant,
    /// How long all may be silent where no step is under way: as long as the last one could have taken, since ranks ask
    /// for the time of the work that follows. `None`: for any time.
    silence: Option<Duration>,
    /// When and why the run was aborted.
    aborted: Option<(Instant, String)>,
}

impl Hub {
    pub(super) fn new(nranks: u32, plan: &Plan, listener: Option<TcpListener>) -> Self {
        Self {
            ranks: (0..nranks).map(|_| State::Absent).collect(),
            children: BTreeMap::new(),
            listener,
            strangers: Vec::new(),
            options: plan.options.clone(),
            tolerate_deaths: plan.tolerate_deaths,
            step: None,
            heard: Instant::now(),
            silence: plan.between_steps.then_some(plan.deadline),
            aborted: None,
        }
    }

    pub(super) fn add_child(&mut self, rank: u32, pid: libc::pid_t, wire: Wire) {
        self.children.insert(rank, pid);
        self.ranks[rank as usize] = State::Running { wire, contribution: None };
    }

    /// Serves until every rank has ended; all children are reaped then.
    pub(super) fn serve(mut self) -> Vec<End> {
        while self.ranks.iter().any(|r| !matches!(r, State::Ended(_))) {
            self.wait_for_traffic();
            self.admit();
            self.identify();
            for rank in 0..self.ranks.len() {
                self.listen_to(rank);
            }
            self.finish_step();
            self.enforce_deadlines();
        }
        for (_, pid) in std::mem::take(&mut self.children) {
            reap(pid, GRACE);
        }
        self.ranks
            .into_iter()
            .map(|r| match r {
                State::Ended(end) => end,
                _ => unreachable!("the loop above ran until all had ended"),
            })
            .collect()
    }

    fn wait_for_traffic(&self) {
        let mut fds: Vec<libc::pollfd> = Vec::new();
        let mut watch = |fd: RawFd| fds.push(libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
        for rank in &self.ranks {
            if let State::Running { wire, .. } = rank {
                watch(wire.as_raw_fd());
            }
        }
        self.strangers.iter().for_each(|(wire, _)| watch(wire.as_raw_fd()));
        self.listener.iter().for_each(|l| watch(l.as_raw_fd()));
        // 50 ms: the grain of deadlines. Traffic wakes it at once.
        // SAFETY: the array is that long and lives during the call.
        unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, 50) };
    }

    fn admit(&mut self) {
        let Some(listener) = &self.listener else { return };
        while let Ok((stream, _)) = listener.accept() {
            self.strangers.push((Wire::from(stream), Instant::now()));
        }
    }

    /// Reads the hello of connections that have not said who they are; drops those that say nonsense or nothing.
    fn identify(&mut self) {
        for (mut wire, since) in std::mem::take(&mut self.strangers) {
            match wire.poll_frame() {
                Ok(None) if since.elapsed() < HELLO_TIME => self.strangers.push((wire, since)),
                Ok(Some(Frame { kind: Kind::Hello, payload })) => match self.claimed_rank(&payload) {
                    Ok(rank) if wire.send(Kind::Welcome, Vec::new()).is_ok() => {
                        self.ranks[rank] = State::Running { wire, contribution: None };
                    }
                    // It hung up before it heard that it may stay, and tries again.
                    Ok(_) => {}
                    Err(why) => drop(wire.send(Kind::Abort, why.into_bytes())),
                },
                _ => {}
            }
        }
    }

    /// The rank that a hello claims, if it may have it.
    fn claimed_rank(&self, hello: &[u8]) -> Result<usize, String> {
        let mut rest = hello.strip_prefix(MAGIC).ok_or("another version of oxygin runs at the root")?;
        let fields = (take_u32(&mut rest), take_u32(&mut rest), take_bytes(&mut rest));
        let (Some(rank), Some(nranks), Some(options)) = fields else { return Err("malformed greeting".into()) };
        let options = String::from_utf8_lossy(options);
        let known = self.ranks.len();
        if nranks as usize != known {
            return Err(format!("this rank was started for {nranks} ranks, the root for {known}"));
        }
        if options != self.options {
            let (here, there) = differences(&options, &self.options);
            return Err(format!("started with other options than the root: here `{here}`, there `{there}`"));
        }
        match self.ranks.get(rank as usize) {
            None => Err(format!("rank {rank} does not exist: there are {known} ranks, from 0")),
            Some(State::Absent) => Ok(rank as usize),
            Some(_) => Err(format!("rank {rank} is taken: another process has it")),
        }
    }

    fn listen_to(&mut self, rank: usize) {
        loop {
            let State::Running { wire, contribution } = &mut self.ranks[rank] else { return };
            let frame = match wire.poll_frame() {
                Ok(None) => return,
                Ok(Some(frame)) => frame,
                Err(_) => return self.lost(rank),
            };
            self.heard = Instant::now();
            match frame.kind {
                Kind::Gather => {
                    let mut rest = &frame.payload[..];
                    let fields = (take_bytes(&mut rest), take_u32(&mut rest), take_bytes(&mut rest));
                    let (Some(name), Some(within), Some(data)) = fields else { return self.lost(rank) };
                    *contribution = Some(data.to_vec());
                    let name = String::from_utf8_lossy(name).into_owned();
                    self.reached(rank, name, Duration::from_millis(within.into()));
                }
                Kind::Done => return self.end(rank, End::Done(frame.payload)),
                Kind::Fail => {
                    let why = String::from_utf8_lossy(&frame.payload).into_owned();
                    let told = self.aborted.as_ref().is_some_and(|(_, reason)| why.contains(reason.as_str()));
                    let end = if told { End::Aborted(why.clone()) } else { End::Failed(why.clone()) };
                    self.end(rank, end);
                    return self.abort(&format!("rank {rank}: {why}"));
                }
                _ => return self.lost(rank),
            }
        }
    }

    fn reached(&mut self, rank: usize, name: String, within: Duration) {
        match &mut self.step {
            None => self.step = Some(Step { name, since: Instant::now(), within }),
            Some(step) if step.name == name => step.within = step.within.max(within),
            Some(step) => {
                let why = format!("rank {rank} is at step '{name}' while others are at '{}'", step.name);
                self.abort(&why);
            }
        }
    }

    /// A rank's connection ended without a word.
    fn lost(&mut self, rank: usize) {
        let why = match self.children.remove(&(rank as u32)) {
            Some(pid) => reap(pid, GRACE),
            None => "its connection broke".into(),
        };
        self.end(rank, End::Died(why.clone()));
        if !self.tolerate_deaths {
            self.abort(&format!("rank {rank} died: {why}"));
        }
    }

    fn end(&mut self, rank: usize, end: End) {
        self.ranks[rank] = State::Ended(end);
    }

    /// Answers everybody once the last living rank has contributed.
    fn finish_step(&mut self) {
        if self.step.is_none() || self.aborted.is_some() {
            return;
        }
        let mut answer = Vec::new();
        for (r, rank) in self.ranks.iter().enumerate() {
            match rank {
                State::Absent | State::Running { contribution: None, .. } => return,
                State::Running { contribution: Some(bytes), .. } => {
                    answer.push(1);
                    put_bytes(&mut answer, bytes);
                }
                State::Ended(End::Died(_)) if self.tolerate_deaths => answer.push(0),
                State::Ended(_) => {
                    let step = self.step.as_ref().map_or("", |s| &s.name);
                    let why = format!("rank {r} {ENDED} '{step}'");
                    return self.abort(&why);
                }
            }
        }
        if let Some(step) = self.step.take() {
            self.silence = self.silence.map(|_| step.within);
        }
        for rank in 0..self.ranks.len() {
            if let State::Running { wire, contribution } = &mut self.ranks[rank] {
                *contribution = None;
                if wire.send(Kind::Gathered, answer.clone()).is_err() {
                    self.lost(rank);
                }
            }
        }
    }

    fn enforce_deadlines(&mut self) {
        if let Some((since, _)) = &self.aborted {
            if since.elapsed() > GRACE {
                self.kill_the_rest();
            }
            return;
        }
        let Some(step) = &self.step else { return self.enforce_signs_of_life() };
        if step.since.elapsed() < step.within {
            return;
        }
        let missing: Vec<_> = self
            .ranks
            .iter()
            .enumerate()
            .filter_map(|(r, state)| match state {
                State::Absent => Some(format!("rank {r} {ABSENT}")),
                State::Running { contribution: None, .. } => Some(format!("rank {r}")),
                _ => None,
            })
            .collect();
        let why = format!("step '{}': not reached within {:?} by {}", step.name, step.within, missing.join(", "));
        self.abort(&why);
    }

    /// Where nobody waits in a step, ranks are at work, in a call that does not return, or at an end that never comes.
    fn enforce_signs_of_life(&mut self) {
        let Some(silence) = self.silence.filter(|&silence| self.heard.elapsed() > silence) else { return };
        let running = self.ranks.iter().enumerate().filter(|(_, state)| matches!(state, State::Running { .. }));
        let numbers: Vec<_> = running.map(|(r, _)| r.to_string()).collect();
        let plural = if numbers.len() == 1 { "" } else { "s" };
        let over = self.ranks.iter().any(|state| matches!(state, State::Ended(_)));
        let late = if over { "to end, as others have" } else { "to come to the next step" };
        self.abort(&format!("nothing for {silence:?}: waiting for rank{plural} {} {late}", numbers.join(", ")));
    }

    /// Tells every rank that the run is over.
    fn abort(&mut self, why: &str) {
        if self.aborted.is_some() {
            return;
        }
        self.aborted = Some((Instant::now(), why.to_owned()));
        for rank in &mut self.ranks {
            match rank {
                State::Absent => *rank = State::Ended(End::Aborted(why.to_owned())),
                // A wire that cannot be written to shows when it is read.
                State::Running { wire, .. } => drop(wire.send(Kind::Abort, why.as_bytes().to_vec())),
                State::Ended(_) => {}
            }
        }
    }

    fn kill_the_rest(&mut self) {
        let why = self.aborted.as_ref().map(|(_, why)| why.clone()).unwrap_or_default();
        for rank in 0..self.ranks.len() {
            if matches!(self.ranks[rank], State::Running { .. }) {
                if let Some(pid) = self.children.remove(&(rank as u32)) {
                    // SAFETY: our own child, not reaped yet.
                    unsafe { libc::kill(pid, libc::SIGKILL) };
                    reap(pid, GRACE);
                }
                self.end(rank, End::Aborted(why.clone()));
            }
        }
    }
}

/// Waits for a child, kills it if it stays, and says how it ended.
fn reap(pid: libc::pid_t, patience: Duration) -> String {
    let start = Instant::now();
    let mut killed = false;
    loop {
        let mut status = 0;
        // SAFETY: our own child; status is ours.
        let got = unsafe { libc::waitpid(pid, &mut status, libc::WNOHANG) };
        if got == pid {
            return match (libc::WIFSIGNALED(status), killed) {
                (true, false) => {
                    let signal = libc::WTERMSIG(status);
                    format!("killed by signal {signal} ({})", signal_name(signal))
                }
                (true, true) => "hung at exit and was killed".into(),
                _ => format!("exited with status {} without a result", libc::WEXITSTATUS(status)),
            };
        }
        if got < 0 {
            return format!("lost: {}", std::io::Error::last_os_error());
        }
        if start.elapsed() > patience && !killed {
            killed = true;
            // SAFETY: our own child, not reaped yet.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Those of the options that differ, of both sides; all, where the sides have other names.
fn differences<'a>(here: &'a str, there: &'a str) -> (String, String) {
    let name = |option: &'a str| option.split(' ').next();
    let (ours, theirs): (Vec<_>, Vec<_>) = (here.split("; ").collect(), there.split("; ").collect());
    if !ours.iter().copied().map(name).eq(theirs.iter().copied().map(name)) {
        return (here.into(), there.into());
    }
    let (ours, theirs): (Vec<_>, Vec<_>) = ours.into_iter().zip(theirs).filter(|(a, b)| a != b).unzip();
    (ours.join("; "), theirs.join("; "))
}

fn signal_name(signal: i32) -> &'static str {
    match signal {
        libc::SIGKILL => "SIGKILL",
        libc::SIGSEGV => "SIGSEGV, a bad memory access",
        libc::SIGBUS => "SIGBUS, a bad memory access",
        libc::SIGABRT => "SIGABRT",
        libc::SIGTERM => "SIGTERM",
        libc::SIGFPE => "SIGFPE",
        libc::SIGILL => "SIGILL",
        _ => "see `kill -l`",
    }
}
