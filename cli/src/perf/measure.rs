//! What one rank does in a run of `oxygin perf`. All ranks walk the same way, so that their collective steps match.

use super::args::{Args, Op, Pin, Test};
use super::floor::{self, Floor};
use super::lane::{Fault, Lane};
use super::latency::{self, Role};
use super::queue::{self, Queue};
use super::report::{Report, Row};
use super::samples::{Bandwidth, Round, Samples};
use super::stream::{self, Load};
use super::{machine, setup, Subject};
use crate::plugin::ContextConfig;
use crate::ranks::{Memory, Ranks, Session, Spec};
use serde_json::{json, Value};
use std::path::PathBuf;
use std::time::Duration;

/// Operations of the first warm-up.
const WARM_UP: u64 = 32;
/// How long the last warm-up should take.
const WARM_UP_TIME: Duration = Duration::from_millis(5);
/// How many times as long as the warm-up promised a round may take before those who wait for it give up.
const SLACK: f64 = 4.0;
/// Rounds at most, in multiples of those asked for, to fill the time.
const MOST_ROUNDS: u64 = 100;

/// Everything that the options ask for; the report as JSON.
pub fn everything(args: &Args, library: &PathBuf, ranks: &mut Ranks, shared: &Memory) -> Result<Value, Fault> {
    let mut subjects = vec![Subject::open(library, args.table)?];
    if args.against.is_some() || args.against_table.is_some() {
        subjects.push(Subject::open(args.against.as_ref().unwrap_or(library), args.against_table.or(args.table))?);
    }
    for subject in &subjects {
        fits(args, subject)?;
    }
    let mut report = Report::new(!args.json && (ranks.rank() == 0 || !args.is_local()));
    let names: Vec<_> = subjects.iter().map(|s| s.name.clone()).collect();
    let head = json!({"tool": "oxygin perf", "version": env!("CARGO_PKG_VERSION"), "machine": machine::describe(),
        "library": names[0], "against": names.get(1), "ranks": ranks.nranks(), "contexts": args.contexts});
    report.note(&format!(" machine: {}", machine::describe()));
    names.iter().zip(["library", "against"]).for_each(|(name, what)| report.note(&format!(" {what}: {name}")));
    if args.setup {
        report.set_up_header();
        for _ in 0..args.iters.unwrap_or(1) {
            for subject in &subjects {
                let summary = setup::measure(&subject.table, ranks, args)?;
                report.set_up(&subject.name, ranks.nranks(), args.contexts, &summary);
            }
        }
        return Ok(report.json(head));
    }
    Run::new(args, &subjects, ranks, shared, report)?.go(head)
}

/// What the table cannot do, before anything is started.
fn fits(args: &Args, subject: &Subject) -> Result<(), String> {
    let (kind, Subject { name, way, .. }) = (subject.table.kind(), subject);
    if way.is_by_device_code() {
        calls_only(args, name)?;
    }
    if !way.has_data_operations() && !args.setup {
        return Err(format!("{name} has no data operations; choose another with --table"));
    }
    if args.op == Some(Op::Get) && !way.has_gets() {
        return Err(format!("{name} has no iget; choose gin-v13 or an RMA table with --table"));
    }
    if args.contexts > 1 && !kind.has_contexts() {
        return Err(format!("{name} has one context only; leave -q away or choose another table with --table"));
    }
    if args.weak && !way.has_weak_signals() {
        return Err(format!("{name} has strong signals only; leave --weak away or choose rma-v14 or newer"));
    }
    Ok(())
}

/// What is asked for that queues have not.
fn calls_only(args: &Args, name: &str) -> Result<(), String> {
    if args.tx_depth.is_some() || args.post_list != 1 {
        return Err(format!("{name} is a queue: -t and -l are for calls; --queue-depth says how deep it is"));
    }
    if args.no_progress {
        return Err(format!("{name} is a queue, and who waits looks at memory only: leave that option away"));
    }
    if args.setup {
        return Err(format!("--setup measures calls of a table: leave \"-queue\" away from {name}"));
    }
    if args.tests().contains(&Test::Latency) && args.op == Some(Op::Put) {
        return Err(format!("{name}: a ping-pong of device code waits for signals; choose --op put-signal or signal"));
    }
    Ok(())
}

/// What the warm-up found.
#[derive(Clone, Copy)]
struct Pace {
    /// How many operations a measurement takes.
    n: u64,
    /// How long each took.
    nanoseconds: f64,
}

struct Run<'a> {
    args: &'a Args,
    ranks: &'a mut Ranks,
    shared: &'a Memory,
    report: Report,
    lanes: Vec<Lane>,
    cores: Vec<usize>,
    epoch: u64,
}

impl<'a> Run<'a> {
    fn new(
        args: &'a Args,
        subjects: &[Subject],
        ranks: &'a mut Ranks,
        shared: &'a Memory,
        report: Report,
    ) -> Result<Self, Fault> {
        let cores = machine::cores();
        let contexts = args.contexts as usize;
        let slot = args.largest().max(4096).next_multiple_of(4096);
        let spec = Spec {
            device: args.device,
            config: ContextConfig {
                n_contexts: args.contexts as i32,
                queue_depth: args.queue_depth,
                ..Default::default()
            },
            data_bytes: Lane::data_bytes(ranks.nranks(), slot),
            signals: Lane::signal_words(ranks.nranks(), contexts),
            ..Default::default()
        };
        let mut lanes = Vec::new();
        for (i, subject) in subjects.iter().enumerate() {
            let config = queue::wishes(subject.way, ranks.nranks(), spec.config)?;
            let spec = Spec { comm_id: spec.comm_id + i as u64, config, ..spec };
            subject.way.ask_for();
            let session = Session::open(&subject.table, ranks, &spec)?;
            let queue = match subject.way.is_by_device_code() {
                true => Some(Queue::open(&session, subject.way, &config, args)?),
                false => None,
            };
            let mut lane = Lane::new(session, contexts, slot, args);
            lane.queue = queue;
            lanes.push(lane);
        }
        Ok(Self { args, ranks, shared, report, lanes, cores, epoch: 0 })
    }

    /// Binds this rank to a core of its own if the ranks that are at work are no more than cores, else lets it run
    /// anywhere and give way while it waits. Threads that the plugin has started by now stay free in any case.
    fn arrange(&mut self, working: u32) {
        let rank = self.ranks.rank() as usize;
        // Engine and producers beside each rank's own thread, which they would share a core with if it were bound.
        let queues = self.lanes.iter().any(|lane| lane.queue.is_some());
        let threads = working as usize * if queues { 1 + self.args.producers as usize } else { 1 };
        let crowded = self.args.is_local() && threads > self.cores.len();
        self.lanes.iter_mut().for_each(|lane| lane.yields = crowded);
        let bind = match self.args.pin {
            Pin::On => true,
            Pin::Auto => !crowded && !queues && rank < working as usize,
            Pin::Off => return,
        };
        let own = [self.cores[rank % self.cores.len()]];
        let cores = if bind { &own[..] } else { &self.cores[..] };
        if let Err(e) = machine::bind(cores) {
            crate::out::say(&format!(
                "oxygin perf: rank {rank} cannot be bound to cores {cores:?}: {e}; it runs where it is"
            ));
        }
    }

    fn go(mut self, head: Value) -> Result<Value, Fault> {
        let more_than_a_pair = self.ranks.nranks() > 2;
        if !self.args.alltoall {
            self.arrange(2);
            for test in self.args.tests() {
                match test {
                    Test::Latency | Test::Completion => self.latency(test)?,
                    Test::Rate | Test::Bandwidth => self.stream(test, false)?,
                }
            }
        }
        if self.args.alltoall || (more_than_a_pair && self.args.test.is_empty()) {
            self.arrange(self.ranks.nranks());
            for test in self.args.tests() {
                if matches!(test, Test::Rate | Test::Bandwidth) {
                    self.stream(test, true)?;
                }
            }
        }
        self.ranks.barrier("end")?;
        for lane in self.lanes {
            lane.session.close()?;
        }
        Ok(self.report.json(head))
    }

    /// The rank that measures or sends, and the one that answers or receives.
    fn pair(&self) -> (u32, u32) {
        let sender = self.args.sender();
        (sender, 1 - sender)
    }

    fn role(&self) -> Role {
        let (first, second) = self.pair();
        match self.ranks.rank() {
            r if r == first => Role::First(second),
            r if r == second => Role::Second(first),
            _ => Role::Idle,
        }
    }

    fn floor(&mut self, size: usize) -> Result<Option<Floor>, Fault> {
        if !self.args.floor {
            return Ok(None);
        }
        let role = self.role();
        let time = self.args.target().min(Duration::from_millis(200));
        let own = floor::measure(self.shared, &self.lanes[0], self.ranks, role, size, time)?;
        let (first, _) = self.pair();
        Ok(self.ranks.gather_values("floor: results", &own)?.get(first as usize).copied())
    }

    fn rounds(&self) -> u64 {
        self.args.rounds
    }

    /// How many of `n` operations round number `round` (from 1) takes.
    fn share(&self, n: u64, round: u64) -> u64 {
        let (rounds, nth) = (self.rounds(), (round - 1) % self.rounds());
        n / rounds + u64::from(nth < n % rounds)
    }

    /// From now on whoever waits has patience for rounds of that pace, too. All ranks call it with the same.
    fn allow(&mut self, paces: &[Pace]) {
        let longest = |pace: &Pace| pace.nanoseconds * self.share(pace.n, 1) as f64 / 1e9;
        let seconds = SLACK * paces.iter().map(longest).fold(0.0, f64::max);
        // A year is no limit any more, and a Duration can hold it.
        let work = Duration::from_secs_f64(seconds.min(3e7));
        self.ranks.allow(work);
        let patience = self.args.patience() + work;
        self.lanes.iter_mut().for_each(|lane| lane.patience = patience);
    }

    fn latency(&mut self, test: Test) -> Result<(), Fault> {
        let op = match (test, self.args.op_of(test)) {
            (Test::Latency, Op::Get) => return self.latency_as(Test::Completion, Op::Get),
            (_, op) => op,
        };
        self.latency_as(test, op)
    }

    fn latency_as(&mut self, test: Test, op: Op) -> Result<(), Fault> {
        let (first, second) = self.pair();
        let (what, divisor) = match test {
            Test::Latency => (format!("half a round trip between ranks {first} and {second} (t = RTT/2)"), 2.0),
            _ => (format!("rank {first} to {second}, call to completed request, one at a time (not halved)"), 1.0),
        };
        let title = format!("{} of {}: {what}{}", test.label(), op.label(), self.conditions());
        let facts = json!({"test": test, "op": op});
        self.report.table(&title, facts, true, self.lanes.len() > 1, self.args.floor);
        for size in self.args.sizes_of(test) {
            let floor = self.floor(size)?;
            let role = self.role();
            let mut samples: Vec<Samples> = self.lanes.iter().map(|_| Samples::default()).collect();
            let mut paces = Vec::new();
            for lane in 0..self.lanes.len() {
                paces.push(self.calibrate(1, |run, n| {
                    run.epoch += 1;
                    let (epoch, ranks) = (run.epoch, &mut *run.ranks);
                    let mut meet = || Ok(ranks.barrier("warm-up")?);
                    latency::run(&run.lanes[lane], role, test, op, size, n, epoch, &mut Samples::default(), &mut meet)
                })?);
            }
            self.allow(&paces);
            let mut spent = vec![Duration::ZERO; self.lanes.len()];
            for round in 1.. {
                for (lane, samples) in samples.iter_mut().enumerate() {
                    let n = self.share(paces[lane].n, round);
                    if n == 0 {
                        continue;
                    }
                    self.epoch += 1;
                    let ranks = &mut *self.ranks;
                    let mut meet = || Ok(ranks.barrier("buffers ready")?);
                    spent[lane] +=
                        latency::run(&self.lanes[lane], role, test, op, size, n, self.epoch, samples, &mut meet)?;
                }
                if self.enough(round, &spent)? {
                    break;
                }
            }
            let own: Vec<_> = samples.iter().map(|s| s.summary(divisor)).collect();
            let all = self.ranks.gather_values("latency: results", &own)?;
            self.allow(&[]);
            self.report.row(size, &Row::Latency(all[first as usize].clone()), floor.as_ref());
        }
        Ok(())
    }

    fn stream(&mut self, test: Test, alltoall: bool) -> Result<(), Fault> {
        let (rank, nranks) = (self.ranks.rank(), self.ranks.nranks());
        let (first, second) = self.pair();
        let (to, from): (Vec<u32>, Vec<u32>) = if alltoall {
            // Each starts with another peer.
            let others: Vec<_> = (1..nranks).map(|d| (rank + d) % nranks).collect();
            (others.clone(), others)
        } else {
            let peer = |mine: u32, theirs: u32| if rank == mine { vec![theirs] } else { vec![] };
            let (mut to, mut from) = (peer(first, second), peer(second, first));
            if self.args.bidirectional {
                to.extend(peer(second, first));
                from.extend(peer(first, second));
            }
            (to, from)
        };
        let op = self.args.op_of(test);
        let depth = self.args.depth_of(test);
        let who = match (alltoall, self.args.bidirectional) {
            (true, _) => format!("all {nranks} ranks to all others, sum of all; #iterations to each"),
            (false, true) => format!("ranks {first} and {second} to each other, sum of both"),
            (false, false) => format!("rank {first} to {second}"),
        };
        let how = match &self.lanes[0].queue {
            Some(queue) => format!("{} producers, {} slots", self.args.producers, queue.depth()),
            None => format!("{depth} outstanding, lists of {}", self.args.post_list),
        };
        let title = format!("{} of {}: {who}, {how}{}", test.label(), op.label(), self.conditions());
        let facts = json!({"test": test, "op": op, "alltoall": alltoall, "bidirectional": self.args.bidirectional,
            "tx_depth": self.lanes[0].queue.is_none().then_some(depth),
            "post_list": self.lanes[0].queue.is_none().then_some(self.args.post_list),
            "producers": self.lanes[0].queue.is_some().then_some(self.args.producers),
            "queue_depth": self.lanes[0].queue.as_ref().map(Queue::depth)});
        self.report.table(&title, facts, false, self.lanes.len() > 1, self.args.floor);
        for size in self.args.sizes_of(test) {
            let floor = self.floor(size)?;
            let (to, from) = (&to, &from);
            let mut rounds: Vec<Vec<Round>> = vec![Vec::new(); self.lanes.len()];
            let mut done = vec![0; self.lanes.len()];
            let mut paces = Vec::new();
            let senders = if alltoall { u64::from(nranks - 1) } else { 1 };
            let list = (self.args.post_list as usize).min(depth);
            let load_of = |n: u64| Load { op, size, n, depth, list };
            for lane in 0..self.lanes.len() {
                paces.push(self.calibrate(senders, |run, n| {
                    run.epoch += 1;
                    let (epoch, ranks) = (run.epoch, &mut *run.ranks);
                    let mut meet = || Ok(ranks.barrier("warm-up")?);
                    let round = stream::run(&run.lanes[lane], to, from, load_of(n), epoch, &mut meet)?;
                    Ok(Duration::from_secs_f64(round.seconds))
                })?);
            }
            self.allow(&paces);
            let mut spent = vec![Duration::ZERO; self.lanes.len()];
            for round in 1.. {
                for (lane, rounds) in rounds.iter_mut().enumerate() {
                    let n = self.share(paces[lane].n, round);
                    if n == 0 {
                        continue;
                    }
                    self.epoch += 1;
                    let ranks = &mut *self.ranks;
                    let mut meet = || Ok(ranks.barrier("buffers ready")?);
                    rounds.push(stream::run(&self.lanes[lane], to, from, load_of(n), self.epoch, &mut meet)?);
                    done[lane] += n;
                    spent[lane] = Duration::from_secs_f64(rounds.iter().map(|round| round.seconds).sum());
                }
                if self.enough(round, &spent)? {
                    break;
                }
            }
            let all = self.ranks.gather_values("stream: results", &rounds)?;
            self.allow(&[]);
            let of_lane = |lane: usize| all.iter().map(|rank| rank[lane].clone()).collect::<Vec<_>>();
            let rows = (0..self.lanes.len()).map(|lane| Bandwidth::of(size, done[lane], &of_lane(lane))).collect();
            self.report.row(size, &Row::Bandwidth(rows), floor.as_ref());
        }
        Ok(())
    }

    /// Warms up, and finds how many operations a measurement takes. `time` runs so many and returns how long the
    /// slowest rank that knows needed.
    fn calibrate(
        &mut self,
        senders: u64,
        mut time: impl FnMut(&mut Self, u64) -> Result<Duration, Fault>,
    ) -> Result<Pace, Fault> {
        let mut n = self.args.iters.unwrap_or(WARM_UP).min(WARM_UP);
        let mut once = |run: &mut Self, n| -> Result<u64, Fault> {
            let own = time(run, n)?.as_nanos() as u64;
            Ok(run.ranks.gather_values("warm-up: times", &own)?.into_iter().max().unwrap_or(0).max(1))
        };
        let long = WARM_UP_TIME.as_nanos() as u64;
        loop {
            let mut ns = once(self, n)?;
            if let Some(fixed) = self.args.iters {
                return Ok(Pace { n: fixed, nanoseconds: ns as f64 / n as f64 });
            }
            if ns >= long {
                // Once may have been an interruption.
                ns = ns.min(once(self, n)?);
            }
            if ns >= long || n >= 1 << 20 {
                let nanoseconds = ns as f64 / n as f64;
                let wanted = self.args.target().as_nanos() as f64 / nanoseconds;
                return Ok(Pace { n: (wanted as u64).max(WARM_UP / senders.min(WARM_UP)).max(1), nanoseconds });
            }
            n *= 4;
        }
    }

    /// Whether every library has had its rounds, and the time that the options ask for. A warm-up on a busy machine
    /// may have promised far too few operations.
    fn enough(&mut self, round: u64, spent: &[Duration]) -> Result<bool, Fault> {
        if round < self.rounds() {
            return Ok(false);
        }
        if self.args.iters.is_some() || round >= MOST_ROUNDS * self.rounds() {
            return Ok(true);
        }
        let own: Vec<f64> = spent.iter().map(Duration::as_secs_f64).collect();
        let all = self.ranks.gather_values("time spent", &own)?;
        let target = self.args.target().as_secs_f64();
        Ok((0..own.len()).all(|lane| all.iter().map(|rank| rank[lane]).fold(0.0, f64::max) > 0.7 * target))
    }

    fn conditions(&self) -> String {
        let mut text = format!(", {} context{}", self.args.contexts, if self.args.contexts == 1 { "" } else { "s" });
        if self.args.weak {
            text += ", weak signals";
        }
        if self.args.no_progress {
            text += ", waiting ranks look at memory only";
        }
        if self.args.receiver_sleeps {
            text += ", receiver sleeps";
        }
        text
    }
}
