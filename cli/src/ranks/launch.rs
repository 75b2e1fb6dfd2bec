//! Starting ranks: forked here, or one of several processes that somebody started.

use super::frame::{put_bytes, Kind};
use super::hub::Hub;
use super::wire::Wire;
use super::{End, Ranks, RanksError, MAGIC};
use crate::plugin::log;
use std::error::Error;
use std::io::Write;
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Where the ranks are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// All forked by this process.
    Local {
        /// How many.
        nranks: u32,
    },
    /// This process has rank 0 and the hub, the others come over TCP.
    Root {
        /// How many, this one included.
        nranks: u32,
        /// Address to listen at, `HOST:PORT`.
        listen: String,
    },
    /// This process has one rank, the hub is elsewhere.
    Join {
        /// This rank, not 0.
        rank: u32,
        /// How many.
        nranks: u32,
        /// The hub, `HOST:PORT`.
        root: String,
    },
}

/// How to run ranks.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Where they are.
    pub place: Place,
    /// How long a step among them may take.
    pub deadline: Duration,
    /// A rank that dies (not: one that reports a failure) leaves the others running; gathers go on without it.
    pub tolerate_deaths: bool,
    /// Between steps, too, and after the last, ranks must be heard of within a step's time. Without it they may work
    /// for any time before a step, and be at the end for any time.
    pub between_steps: bool,
    /// What all ranks must have been started with, a name and a value each, between them `; `; compared over TCP.
    pub options: String,
}

impl Plan {
    /// `nranks` forked ranks with a deadline.
    pub fn local(nranks: u32, deadline: Duration) -> Self {
        Self {
            place: Place::Local { nranks },
            deadline,
            tolerate_deaths: false,
            between_steps: true,
            options: String::new(),
        }
    }
}

/// How the ranks that this process knows of ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// By rank for the hub; the only one for a process that joined.
    pub ends: Vec<(u32, End)>,
}

impl Outcome {
    /// Every rank's result, or the failures that came first (those of ranks that were merely aborted only if there
    /// is no other).
    pub fn results(self) -> Result<Vec<Vec<u8>>, RanksError> {
        // Ranks that say the same share a sentence.
        let mut causes: Vec<(String, Vec<String>)> = Vec::new();
        let mut aborted = None;
        let mut results = Vec::new();
        for (rank, end) in self.ends {
            let cause = match end {
                End::Done(bytes) => {
                    results.push(bytes);
                    continue;
                }
                End::Aborted(why) => {
                    aborted = aborted.or(Some(why));
                    continue;
                }
                End::Failed(why) => why,
                End::Died(why) => format!("died: {why}"),
            };
            match causes.iter_mut().find(|(text, _)| *text == cause) {
                Some((_, ranks)) => ranks.push(rank.to_string()),
                None => causes.push((cause, vec![rank.to_string()])),
            }
        }
        match (causes.is_empty(), aborted) {
            (true, None) => Ok(results),
            (true, Some(why)) => Err(RanksError(why)),
            (false, _) => {
                let sentence = |(text, ranks): &(String, Vec<String>)| {
                    let glue = if text.starts_with("died: ") { " " } else { ": " };
                    format!("rank {}{glue}{text}", ranks.join(", "))
                };
                Err(RanksError(causes.iter().map(sentence).collect::<Vec<_>>().join("; ")))
            }
        }
    }
}

/// Runs `body` in every rank that belongs to this process and waits for all of them. Ranks here are forked, so this
/// process must have one thread only, and what `body` changes stays in the rank; what it returns comes back.
///
/// Errors are those of starting; how ranks ended is in the [`Outcome`].
pub fn run<F>(plan: &Plan, body: F) -> Result<Outcome, RanksError>
where
    F: Fn(&mut Ranks) -> Result<Vec<u8>, Box<dyn Error>>,
{
    match &plan.place {
        Place::Local { nranks } => run_hub(plan, *nranks, *nranks, None, &body),
        Place::Root { nranks, listen } => {
            let listener = TcpListener::bind(listen.as_str())
                // A kernel without IPv6 has no [::].
                .or_else(|e| match listen.strip_prefix("[::]:") {
                    Some(port) => TcpListener::bind(format!("0.0.0.0:{port}")),
                    None => Err(e),
                })
                .map_err(|e| RanksError(format!("cannot listen at {listen}: {e}; choose another port with -p")))?;
            listener.set_nonblocking(true).map_err(|e| RanksError(format!("listening socket: {e}")))?;
            run_hub(plan, *nranks, 1, Some(listener), &body)
        }
        Place::Join { rank, nranks, root } => {
            let wire = join(plan, *rank, *nranks, root)?;
            log::set_rank(*rank);
            let mut ranks = Ranks::new(*rank, *nranks, plan.deadline, wire);
            let end = finish(&mut ranks, &body);
            Ok(Outcome { ends: vec![(*rank, end)] })
        }
    }
}

/// What a rank says that does not find the hub.
pub(super) const UNREACHABLE: &str = "cannot reach the root, rank 0,";

/// How long a rank that the hub refuses comes again: the hub may still be that of the run before, if several runs
/// follow one another at one address.
const REFUSED_TIME: Duration = Duration::from_secs(3);

/// Takes this rank's place at the hub. Tries again and again until the deadline, because the hub may start later than
/// this rank, and an earlier run's hub may hang up with this rank's connection in its queue.
fn join(plan: &Plan, rank: u32, nranks: u32, root: &str) -> Result<Wire, RanksError> {
    let start = Instant::now();
    let mut hello = MAGIC.to_vec();
    hello.extend(rank.to_le_bytes());
    hello.extend(nranks.to_le_bytes());
    put_bytes(&mut hello, plan.options.as_bytes());
    let mut refused = None;
    loop {
        let left = plan.deadline.saturating_sub(start.elapsed());
        let why = match greet(root, &hello, left) {
            Ok((wire, Kind::Welcome, _)) => return Ok(wire),
            Ok((_, _, payload)) => {
                let why = String::from_utf8_lossy(&payload).into_owned();
                let (since, _) = refused.get_or_insert_with(|| (Instant::now(), why.clone()));
                if since.elapsed() > REFUSED_TIME {
                    return Err(RanksError(why));
                }
                why
            }
            Err(e) => e.to_string(),
        };
        if left.is_zero() {
            // A hub that refused and then went away had the reason.
            if let Some((_, why)) = refused {
                return Err(RanksError(why));
            }
            return Err(RanksError(format!(
                "{UNREACHABLE} at {root} within {:?}: {why}; is it started there?",
                plan.deadline
            )));
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// One attempt: connects, says who this is, and waits for the answer.
fn greet(root: &str, hello: &[u8], patience: Duration) -> std::io::Result<(Wire, Kind, Vec<u8>)> {
    let mut last = std::io::Error::new(std::io::ErrorKind::NotFound, "the name has no address");
    for address in root.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, Duration::from_secs(5)) {
            // Where nobody listens yet at a port that the kernel gives to connections, too, it may give that very port
            // to this one, which then meets itself, and keeps the root from listening.
            Ok(stream) if stream.local_addr()? == stream.peer_addr()? => {
                last = std::io::ErrorKind::ConnectionRefused.into();
            }
            Ok(stream) => {
                let mut wire = Wire::from(stream);
                wire.send(Kind::Hello, hello.to_vec())?;
                let frame = wire.wait_frame(patience)?;
                return Ok((wire, frame.kind, frame.payload));
            }
            Err(e) => last = e,
        }
    }
    Err(last)
}

/// Forks the first `here` ranks and serves all of them.
fn run_hub<F>(
    plan: &Plan,
    nranks: u32,
    here: u32,
    listener: Option<TcpListener>,
    body: &F,
) -> Result<Outcome, RanksError>
where
    F: Fn(&mut Ranks) -> Result<Vec<u8>, Box<dyn Error>>,
{
    let pairs: Vec<(UnixStream, UnixStream)> = (0..here)
        .map(|_| UnixStream::pair())
        .collect::<Result<_, _>>()
        .map_err(|e| RanksError(format!("cannot make sockets for {here} ranks: {e}; raise `ulimit -n`")))?;
    // What is buffered now would be printed by every rank.
    let _ = std::io::stdout().flush();
    let mut hub = Hub::new(nranks, plan, listener);
    let launcher = std::process::id();
    let mut ends: Vec<Option<UnixStream>> = Vec::new();
    let mut hub_ends = Vec::new();
    for (hub_end, rank_end) in pairs {
        hub_ends.push(Some(hub_end));
        ends.push(Some(rank_end));
    }
    for rank in 0..here {
        // SAFETY: this process has one thread (documented), so the child may use everything.
        match unsafe { libc::fork() } {
            -1 => {
                // Dropping the hub's ends makes the ranks that were started leave.
                let error = std::io::Error::last_os_error();
                return Err(RanksError(format!("cannot fork rank {rank} of {nranks}: {error}; see `ulimit -u`")));
            }
            0 => {
                let own = ends[rank as usize].take();
                // The ends of the others must not live on here, or their death would go unnoticed.
                drop(std::mem::take(&mut ends));
                drop(std::mem::take(&mut hub_ends));
                drop(hub);
                child(rank, nranks, plan.deadline, launcher, own, body)
            }
            pid => {
                if let Some(end) = hub_ends[rank as usize].take() {
                    hub.add_child(rank, pid, Wire::from(end));
                }
                ends[rank as usize] = None;
            }
        }
    }
    Ok(Outcome { ends: (0..).zip(hub.serve()).collect() })
}

/// A forked rank's life; never returns, so that nothing of the launcher's is undone twice.
fn child<F>(rank: u32, nranks: u32, deadline: Duration, launcher: u32, end: Option<UnixStream>, body: &F) -> !
where
    F: Fn(&mut Ranks) -> Result<Vec<u8>, Box<dyn Error>>,
{
    // SAFETY: plain system calls. A launcher that is killed takes its ranks along; if it is gone already, leave.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        if libc::getppid() as u32 != launcher {
            libc::_exit(1);
        }
    }
    log::set_rank(rank);
    let status = match end {
        Some(stream) => match finish(&mut Ranks::new(rank, nranks, deadline, Wire::from(stream)), body) {
            End::Done(_) => 0,
            _ => 1,
        },
        None => 1,
    };
    let _ = std::io::stdout().flush();
    // SAFETY: ends the process without running the launcher's exit handlers in it.
    unsafe { libc::_exit(status) }
}

/// Runs the body, catches its panic, and tells the hub how it went.
fn finish<F>(ranks: &mut Ranks, body: &F) -> End
where
    F: Fn(&mut Ranks) -> Result<Vec<u8>, Box<dyn Error>>,
{
    let end = match std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| body(ranks))) {
        Ok(Ok(bytes)) => End::Done(bytes),
        Ok(Err(error)) => End::Failed(error.to_string()),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
            End::Failed(format!("a fault of oxygin's tools: panic: {text}"))
        }
    };
    // A hub that is gone cannot be told.
    let _ = match &end {
        End::Done(bytes) => ranks.wire.send(Kind::Done, bytes.clone()),
        End::Failed(why) | End::Died(why) | End::Aborted(why) => ranks.wire.send(Kind::Fail, why.clone().into_bytes()),
    };
    end
}
