//! Runs one case: forks the ranks, watches them, ends those that hang, and sums up.

use super::cases::{Case, Tally};
use super::control::{Control, CALLS};
use super::findings::{is_echo, Findings};
use super::report::{Progress, Row, Verdict};
use super::world::{CaseEnv, Remote};
use crate::plugin::{log, Way};
use crate::ranks::{self, End, Place, Plan};
use serde::{Deserialize, Serialize};
use std::cell::{Cell, RefCell};
use std::io::Read;
use std::os::fd::FromRawFd;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// What a rank in a call that does not return is given beyond the limit of a wait.
const STUCK_GRACE: Duration = Duration::from_secs(5);
/// How long the others may go on after one rank has failed.
const ABORT_GRACE: Duration = Duration::from_secs(5);

/// How cases are run.
pub struct Options {
    /// The library under test.
    pub plugin: PathBuf,
    /// Ranks in all.
    pub nranks: usize,
    /// Where the other ranks are, if not all are here.
    pub place: Option<Place>,
    /// The long form.
    pub full: bool,
    /// The part of a form's rounds to do.
    pub scale: f64,
    /// Limit of one wait.
    pub limit: Duration,
    /// How long a dead peer may stay unnoticed.
    pub death_limit: Duration,
}

/// What a rank's process says in the end.
#[derive(Debug, Serialize, Deserialize)]
struct Verdicts {
    bytes: u64,
    tally: Tally,
    failure: Option<String>,
}

struct Child {
    pid: libc::pid_t,
    pipe: std::fs::File,
    beat: u64,
    beat_at: Instant,
    said: Option<Verdicts>,
    /// It stayed in a call; said already.
    hung: bool,
    killed: bool,
    over: bool,
}

/// Runs a case on a table.
pub fn run(case: &Case, way: Way, options: &Options) -> Row {
    let local = options.place.is_none();
    let mut row = Row::skipped(case.name, way, options.nranks, "");
    if let Some(why) = case.skipped(way, options.nranks, local) {
        row.why = Some(why.into());
        return row;
    }
    row.why = None;
    let start = Instant::now();
    let here = if local { options.nranks } else { 1 };
    let outcome = Control::new(here).map_err(|e| format!("shared memory: {e}")).and_then(|control| {
        let mut children = Vec::new();
        for slot in 0..here {
            match spawn(case, way, options, &control, slot) {
                Ok(child) => children.push(child),
                Err(e) => {
                    children.iter_mut().for_each(kill);
                    return Err(e);
                }
            }
        }
        Ok(watch(case, way, options, &control, children))
    });
    row.seconds = start.elapsed().as_secs_f64();
    let (said, failure) = outcome.unwrap_or_else(|e| (Vec::new(), Some(e)));
    let mut first = None;
    for verdicts in &said {
        row.bytes += verdicts.bytes;
        row.rounds += verdicts.tally.rounds;
        row.wrong += verdicts.tally.wrong;
        first = first.or(verdicts.tally.first.clone());
        row.why = row.why.take().or(verdicts.tally.note.clone());
    }
    if failure.is_some() {
        row.wrong = row.wrong.max(1);
    }
    row.result = if row.wrong > 0 { Verdict::Fail } else { Verdict::Pass };
    row.why = first.or(failure).or(row.why);
    row
}

fn spawn(case: &Case, way: Way, options: &Options, control: &Control, slot: usize) -> Result<Child, String> {
    let mut fds = [0; 2];
    // SAFETY: room for two descriptors.
    if unsafe { libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC) } != 0 {
        return Err(format!("pipe: {}", std::io::Error::last_os_error()));
    }
    let parent = std::process::id();
    // SAFETY: this process has one thread; the child may use everything and leaves through _exit.
    match unsafe { libc::fork() } {
        -1 => Err(format!("fork: {}", std::io::Error::last_os_error())),
        0 => {
            // SAFETY: plain system calls: a rank does not outlive the process that watches it.
            unsafe {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                if libc::getppid() as u32 != parent {
                    libc::_exit(1);
                }
            }
            let verdicts = match &options.place {
                None => sit(case, way, options, control, slot, slot, None),
                Some(place) => join(case, way, options, control, place),
            };
            if verdicts.failure.is_some() {
                control.abort();
            }
            let text = serde_json::to_vec(&verdicts).unwrap_or_default();
            // SAFETY: this process's own bytes and descriptor; then it ends without undoing the parent's things.
            unsafe {
                libc::write(fds[1], text.as_ptr().cast(), text.len());
                libc::_exit(0)
            }
        }
        pid => {
            // SAFETY: both descriptors are ours; the child has its own copies.
            let pipe = unsafe {
                libc::close(fds[1]);
                std::fs::File::from_raw_fd(fds[0])
            };
            Ok(Child {
                pid,
                pipe,
                beat: 0,
                beat_at: Instant::now(),
                said: None,
                hung: false,
                killed: false,
                over: false,
            })
        }
    }
}

/// Runs the case as one rank.
fn sit(
    case: &Case,
    way: Way,
    options: &Options,
    control: &Control,
    rank: usize,
    slot: usize,
    remote: Option<Box<Remote<'_>>>,
) -> Verdicts {
    log::set_rank(rank as u32);
    let env = CaseEnv {
        rank,
        nranks: options.nranks,
        control,
        plugin: options.plugin.clone(),
        way,
        full: options.full,
        scale: options.scale,
        limit: options.limit,
        death_limit: options.death_limit,
        slot,
        remote,
        bytes: Cell::new(0),
    };
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| (case.run)(&env)));
    let outcome = outcome.unwrap_or_else(|_| Err("a fault of oxygin check itself: see the panic above".into()));
    let (tally, failure) = match outcome {
        Ok(tally) => (tally, None),
        Err(why) => (Tally::default(), Some(why)),
    };
    Verdicts { bytes: env.bytes.get(), tally, failure }
}

/// Runs the case as one rank among processes that were started elsewhere.
fn join(case: &Case, way: Way, options: &Options, control: &Control, place: &Place) -> Verdicts {
    let failed = |why: String| Verdicts { bytes: 0, tally: Tally::default(), failure: Some(why) };
    let same = format!("check {} {} {} {}", case.name, way.label(), options.full, options.scale);
    let (place, deadline) = (place.clone(), options.limit);
    // A case may work for any time without a step.
    let plan = Plan { place, deadline, tolerate_deaths: false, between_steps: false, options: same };
    let outcome = ranks::run(&plan, |ranks| {
        // A case may have no step of its own in which a rank would be missed.
        ranks.gather_within("begin", &[], options.limit * 2)?;
        let rank = ranks.rank() as usize;
        let ranks = RefCell::new(ranks);
        let remote = move |mine: &[u8]| {
            ranks.borrow_mut().gather_within("check", mine, options.limit * 2).map_err(|e| e.to_string())
        };
        let verdicts = sit(case, way, options, control, rank, 0, Some(Box::new(remote)));
        Ok(serde_json::to_vec(&verdicts)?)
    });
    let ends = match outcome {
        Ok(outcome) => outcome.ends,
        Err(e) => return failed(e.to_string()),
    };
    let mut sum = Verdicts { bytes: 0, tally: Tally::default(), failure: None };
    let mut findings = Findings::default();
    for (rank, end) in ends {
        if let End::Failed(why) | End::Aborted(why) = &end {
            if ranks::is_absence(why) {
                // All ranks say so.
                return failed(why.clone());
            }
        }
        let echo = matches!(end, End::Aborted(_));
        let one = match end {
            End::Done(text) => serde_json::from_slice(&text).unwrap_or_else(|e| failed(e.to_string())),
            End::Failed(why) | End::Died(why) | End::Aborted(why) => failed(why),
        };
        sum.bytes += one.bytes;
        sum.tally.rounds += one.tally.rounds;
        sum.tally.wrong += one.tally.wrong;
        sum.tally.first = sum.tally.first.or(one.tally.first);
        sum.tally.note = sum.tally.note.or(one.tally.note);
        match one.failure {
            Some(why) if echo || is_echo(&why) || why.contains(ranks::ENDED) => findings.add_echo(rank as usize, why),
            Some(why) => findings.add(format!("rank {rank}: {why}")),
            None => {}
        }
    }
    sum.failure = findings.in_words();
    sum
}

/// Waits for the ranks; returns what they said and the failure to show, if there is one.
fn watch(
    case: &Case,
    way: Way,
    options: &Options,
    control: &Control,
    mut children: Vec<Child>,
) -> (Vec<Verdicts>, Option<String>) {
    let mut progress = Progress::new(format!("{} {}", case.name, way.label()));
    let local = options.place.is_none();
    let mut findings = Findings::default();
    let mut aborted_at = None;
    while children.iter().any(|c| !c.over) {
        for (slot, child) in children.iter_mut().enumerate().filter(|(_, c)| !c.over) {
            let shown = control.rank(slot);
            let doomed = shown.doomed.load(Ordering::Acquire) != 0;
            let call = CALLS[(shown.call.load(Ordering::Relaxed) as usize).min(CALLS.len() - 1)];
            if let Some(status) = ended(child) {
                child.over = true;
                let why = match (&child.said, status) {
                    (Some(said), _) => said.failure.clone(),
                    (None, Some(9)) if doomed || child.hung => None,
                    (None, _) if child.killed => Some(format!("did not stop and was killed {}", within(call))),
                    (None, Some(signal)) => Some(format!("ended by signal {signal} ({})", within(call))),
                    (None, None) => Some(format!("ended without a word ({})", within(call))),
                };
                if let Some(why) = why {
                    control.abort();
                    match local {
                        true if child.killed || is_echo(&why) => findings.add_echo(slot, why),
                        true => findings.add(format!("rank {slot}: {why}")),
                        // It sums up all ranks already.
                        false => findings.add(why),
                    }
                }
                continue;
            }
            let beat = shown.beat.load(Ordering::Relaxed);
            if beat != child.beat {
                (child.beat, child.beat_at) = (beat, Instant::now());
            }
            // A rank that waits for another host beats only when the answer comes.
            let patience = options.limit * if local { 1 } else { 5 } + STUCK_GRACE;
            if child.beat_at.elapsed() > patience && !child.killed {
                findings.add(format!("rank {slot} hangs: {} for {} s", within(call), patience.as_secs()));
                control.abort();
                child.hung = true;
                kill(child);
            }
        }
        if control.aborted() {
            let since = *aborted_at.get_or_insert_with(Instant::now);
            if since.elapsed() > ABORT_GRACE {
                children.iter_mut().filter(|c| !c.over && !c.killed).for_each(kill);
            }
        }
        let slowest = (0..control.nranks())
            .map(|r| control.rank(r))
            .map(|r| (r.done.load(Ordering::Relaxed), r.total.load(Ordering::Relaxed)));
        let (done, total) = slowest.min().unwrap_or_default();
        progress.show(done, total);
        std::thread::sleep(Duration::from_millis(2));
    }
    progress.end();
    let said: Vec<Verdicts> = children.into_iter().filter_map(|c| c.said).collect();
    (said, findings.in_words())
}

fn within(call: &str) -> String {
    match call {
        "no call" => "in no call of the plugin".into(),
        call => format!("in {call}"),
    }
}

/// Reaps a child that has ended: `Some(signal)` inside when a signal ended it.
fn ended(child: &mut Child) -> Option<Option<i32>> {
    let mut status = 0;
    // SAFETY: a child of this process that only this function waits for.
    if unsafe { libc::waitpid(child.pid, &mut status, libc::WNOHANG) } != child.pid {
        return None;
    }
    let mut text = Vec::new();
    let _ = child.pipe.read_to_end(&mut text);
    child.said = serde_json::from_slice(&text).ok();
    Some(libc::WIFSIGNALED(status).then(|| libc::WTERMSIG(status)))
}

fn kill(child: &mut Child) {
    child.killed = true;
    // SAFETY: a child of this process that has not been waited for.
    unsafe { libc::kill(child.pid, libc::SIGKILL) };
}
