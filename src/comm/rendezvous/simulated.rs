//! A network and a clock in one thread, and the rendezvous on it: lost, slow, late and dead ranks, strangers,
//! bytes in pieces and out of step, hundreds of ranks in milliseconds.

use super::gather::{Conn, Gather, RootAction};
use super::job::Job;
use super::visit::{Broken, Visit, VisitorAction};
use super::wire::{self, Failure, Reply, Sender};
use crate::comm::handle::Token;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

mod random_tests;
mod tests;

const TOKEN: Token = Token::from_bytes([9; 16]);

/// One collective step as a rank plays it.
#[derive(Clone, Debug)]
struct Play {
    /// Pause before it enters, seconds after its last step ended.
    after: f64,
    name: &'static str,
    /// Instead of a contribution.
    failure: Option<&'static str>,
}

fn play(name: &'static str) -> Play {
    Play { after: 0.0, name, failure: None }
}

/// What a rank does.
#[derive(Clone, Debug, Default)]
struct Script {
    plays: VecDeque<Play>,
    /// Its process ends then, in seconds.
    dies: Option<f64>,
    /// It stops then, with its connections open.
    stops: Option<f64>,
    /// Its deadline, if not the job's.
    timeout: Option<f64>,
}

#[derive(Debug)]
enum Event {
    Enter(usize),
    Die(usize),
    Stop(usize),
    Wake(usize),
    /// A connection reaches rank 0.
    Arrives(Conn),
    /// The visitor learns that its connection stands, or that nobody listens.
    Connected(usize, Conn, bool),
    ToRoot(Conn, Vec<u8>),
    ToVisitor(Conn, Vec<u8>),
    VisitorClosed(Conn),
    RootClosed(Conn),
}

#[derive(Default)]
struct Line {
    /// `None`: a stranger.
    rank: Option<usize>,
    /// Arrived at the listener.
    arrived: bool,
    accepted: bool,
    /// Closed at rank 0.
    over: bool,
    /// What came before it was accepted.
    held: Vec<Event>,
    /// Nothing overtakes in a direction: when the last event in it arrives.
    last: [Duration; 2],
}

enum Node {
    Outside,
    Root(Box<Gather>),
    Visitor(Box<Visit>, Option<Conn>),
    Dead,
}

/// How one step ended for one rank: what each rank said to all and to it, or the sentence; and when, in seconds.
type Ended = (Result<Vec<(Vec<u8>, Vec<u8>)>, String>, f64);

struct Net {
    start: Instant,
    now: Duration,
    queue: BTreeMap<(Duration, u64), Event>,
    sequence: u64,
    random: u64,
    jobs: Vec<Arc<Job>>,
    scripts: Vec<Script>,
    nodes: Vec<Node>,
    steps: Vec<u32>,
    failed: Option<(u32, String)>,
    /// By rank: whether it has reached rank 0.
    met: Vec<bool>,
    lines: HashMap<Conn, Line>,
    backlog: VecDeque<Conn>,
    next_conn: Conn,
    /// By rank, one a step.
    ended: Vec<Vec<Ended>>,
    /// Connections that ranks opened, and bytes to and from rank 0.
    connections: u64,
    bytes: u64,
}

/// What `rank` brings: 1 to 3 bytes to all, and a slice for each rank that names both ends.
fn brings(rank: u32, nranks: u32) -> (Vec<u8>, Vec<u8>) {
    (vec![rank as u8; 1 + rank as usize % 3], (0..nranks).flat_map(|to| [rank as u8, to as u8]).collect())
}

impl Net {
    fn new(timeout: f64, seed: u64, scripts: Vec<Script>) -> Self {
        let address = |r: usize| ([10, 0, (r >> 8) as u8, r as u8], 4711).into();
        let addresses: Vec<_> = (0..scripts.len()).map(|r| Some(address(r))).collect();
        let job = |script: &Script| Job {
            addresses: addresses.clone(),
            token: TOKEN,
            timeout: Duration::from_secs_f64(script.timeout.unwrap_or(timeout)),
            silence: Duration::from_secs(30),
        };
        let jobs = scripts.iter().map(|script| Arc::new(job(script))).collect();
        let n = scripts.len();
        let mut net = Self {
            start: Instant::now(),
            now: Duration::ZERO,
            queue: BTreeMap::new(),
            sequence: 0,
            random: seed | 1,
            jobs,
            scripts,
            nodes: (0..n).map(|_| Node::Outside).collect(),
            steps: vec![0; n],
            failed: None,
            met: vec![false; n],
            lines: HashMap::new(),
            backlog: VecDeque::new(),
            next_conn: 0,
            ended: vec![Vec::new(); n],
            connections: 0,
            bytes: 0,
        };
        for rank in 0..n {
            net.enter_next(rank);
            if let Some(at) = net.scripts[rank].stops {
                net.at(Duration::from_secs_f64(at), Event::Stop(rank));
            }
            if let Some(at) = net.scripts[rank].dies {
                net.at(Duration::from_secs_f64(at), Event::Die(rank));
            }
        }
        net
    }

    fn clock(&self) -> Instant {
        self.start + self.now
    }

    /// xorshift64: below `limit`.
    fn random(&mut self, limit: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % limit
    }

    fn at(&mut self, at: Duration, event: Event) {
        self.sequence += 1;
        self.queue.insert((at.max(self.now), self.sequence), event);
    }

    /// Sends `event` along a connection: up to 2 ms, in order for each direction.
    fn along(&mut self, conn: Conn, to_root: bool, event: Event) {
        let delay = Duration::from_micros(20 + self.random(2000));
        let at = self.now + delay;
        let Some(line) = self.lines.get_mut(&conn) else { return };
        let last = &mut line.last[usize::from(to_root)];
        *last = at.max(*last);
        let at = *last;
        self.at(at, event);
    }

    /// Sends bytes in pieces of random sizes.
    fn send(&mut self, conn: Conn, to_root: bool, bytes: &[u8]) {
        self.bytes += bytes.len() as u64;
        let mut rest = bytes;
        while !rest.is_empty() {
            let len = 1 + self.random(rest.len() as u64 * 2) as usize;
            let (piece, tail) = rest.split_at(len.min(rest.len()));
            rest = tail;
            let event = if to_root { Event::ToRoot } else { Event::ToVisitor };
            self.along(conn, to_root, event(conn, piece.to_vec()));
        }
    }

    /// A connection from outside the job that sends `bytes` at `at` seconds.
    fn stranger(&mut self, at: f64, bytes: &[u8]) -> Conn {
        let conn = self.open(None);
        let at = Duration::from_secs_f64(at);
        self.lines.get_mut(&conn).unwrap().last = [at; 2];
        self.along(conn, true, Event::Arrives(conn));
        self.send(conn, true, bytes);
        conn
    }

    fn open(&mut self, rank: Option<usize>) -> Conn {
        self.next_conn += 1;
        self.lines.insert(self.next_conn, Line { rank, ..Line::default() });
        self.next_conn
    }

    fn enter_next(&mut self, rank: usize) {
        if let Some(play) = self.scripts[rank].plays.front() {
            let at = self.now + Duration::from_secs_f64(play.after);
            self.at(at, Event::Enter(rank));
        }
    }

    /// Plays everything to its end.
    fn run(mut self) -> Self {
        let mut events = 0_u64;
        while let Some(((at, _), event)) = self.queue.pop_first() {
            self.now = at;
            self.event(event);
            events += 1;
            assert!(events < 5_000_000, "the simulation does not come to an end");
        }
        for (rank, node) in self.nodes.iter().enumerate() {
            assert!(!matches!(node, Node::Root(_) | Node::Visitor(..)), "rank {rank} hangs");
        }
        self
    }

    fn event(&mut self, event: Event) {
        let now = self.clock();
        match event {
            Event::Enter(rank) => self.enter(rank),
            Event::Die(rank) => self.die(rank),
            Event::Stop(rank) => self.nodes[rank] = Node::Dead,
            Event::Wake(rank) => self.settle(rank),
            Event::Arrives(conn) => {
                self.lines.get_mut(&conn).unwrap().arrived = true;
                self.backlog.push_back(conn);
                self.settle(0);
            }
            Event::Connected(rank, conn, stands) => {
                if let Node::Visitor(visit, current) = &mut self.nodes[rank] {
                    if *current == Some(conn) {
                        if stands {
                            visit.connected();
                        } else {
                            *current = None;
                            visit.broken("refused", Broken::Refused, now);
                        }
                        self.settle(rank);
                    }
                }
            }
            Event::ToRoot(conn, _) | Event::VisitorClosed(conn) => {
                let line = self.lines.get_mut(&conn).unwrap();
                if !line.accepted {
                    line.held.push(event);
                } else if !line.over {
                    if let Node::Root(gather) = &mut self.nodes[0] {
                        match event {
                            Event::ToRoot(_, bytes) => gather.received(conn, &bytes, now),
                            _ => gather.closed(conn, now),
                        }
                    }
                    self.settle(0);
                }
            }
            Event::ToVisitor(conn, _) | Event::RootClosed(conn) => {
                let Some(rank) = self.lines[&conn].rank else { return };
                if let Node::Visitor(visit, current) = &mut self.nodes[rank] {
                    if *current == Some(conn) {
                        match event {
                            Event::ToVisitor(_, bytes) => visit.received(&bytes, now),
                            _ => {
                                *current = None;
                                visit.broken("closed", Broken::Otherwise, now);
                            }
                        }
                        self.settle(rank);
                    }
                }
            }
        }
    }

    fn enter(&mut self, rank: usize) {
        if matches!(self.nodes[rank], Node::Dead) {
            return;
        }
        let play = self.scripts[rank].plays.pop_front().unwrap();
        self.steps[rank] += 1;
        let (step, nranks, now) = (self.steps[rank], self.jobs.len() as u32, self.clock());
        let sender = Sender { token: TOKEN, step, name: play.name, rank: rank as u32, nranks };
        let (common, addressed) = brings(rank as u32, nranks);
        let request = match play.failure {
            None => wire::encode_request(&sender, Ok(&common), &addressed),
            Some(why) => wire::encode_request(&sender, Err(&Failure { code: 2, sentence: why.into() }), &[]),
        };
        let (job, request) = (self.jobs[rank].clone(), request.unwrap());
        self.nodes[rank] = if rank == 0 {
            Node::Root(Box::new(Gather::new(job, step, play.name, request, self.failed.clone(), now)))
        } else {
            Node::Visitor(Box::new(Visit::new(job, step, play.name, request, self.met[rank], now)), None)
        };
        self.settle(rank);
    }

    fn die(&mut self, rank: usize) {
        if let Node::Visitor(_, Some(conn)) = self.nodes[rank] {
            self.along(conn, true, Event::VisitorClosed(conn));
        }
        self.nodes[rank] = Node::Dead;
        if rank == 0 {
            self.backlog.clear();
            for conn in self.lines.keys().copied().collect::<Vec<_>>() {
                self.root_closes(conn);
            }
        }
    }

    fn root_closes(&mut self, conn: Conn) {
        let line = self.lines.get_mut(&conn).unwrap();
        if line.arrived && !std::mem::replace(&mut line.over, true) {
            self.along(conn, false, Event::RootClosed(conn));
        }
    }

    /// Lets a rank do what it wants to do now, as its driver would.
    fn settle(&mut self, rank: usize) {
        if rank == 0 {
            self.settle_root()
        } else {
            self.settle_visitor(rank)
        }
    }

    fn settle_root(&mut self) {
        let now = self.clock();
        loop {
            let Node::Root(gather) = &mut self.nodes[0] else { return };
            if gather.accepting() {
                if let Some(conn) = self.backlog.pop_front() {
                    let line = self.lines.get_mut(&conn).unwrap();
                    line.accepted = true;
                    let peer = match line.rank {
                        Some(rank) => ([10, 0, (rank >> 8) as u8, rank as u8], 9).into(),
                        None => ([6, 6, 6, 6], 6).into(),
                    };
                    gather.accepted(conn, peer, now);
                    for event in std::mem::take(&mut line.held) {
                        match event {
                            Event::ToRoot(_, bytes) => gather.received(conn, &bytes, now),
                            _ => gather.closed(conn, now),
                        }
                    }
                    continue;
                }
            }
            gather.tick(now);
            let mut sends = Vec::new();
            let mut closes = Vec::new();
            while let Some(action) = gather.next_action() {
                match action {
                    RootAction::Send { conn, shared, own } => {
                        sends.push((conn, [&shared[..], &own].concat()));
                        gather.sent(conn);
                    }
                    RootAction::Close(conn) | RootAction::Keep(conn, _) => closes.push(conn),
                }
            }
            let outcome = gather.outcome(now).cloned();
            let wake = gather.wake();
            for (conn, bytes) in sends {
                self.send(conn, false, &bytes);
            }
            closes.into_iter().for_each(|conn| self.root_closes(conn));
            match outcome {
                Some(outcome) => {
                    // The driver drops whatever it had accepted.
                    for conn in self.lines.keys().copied().collect::<Vec<_>>() {
                        if self.lines[&conn].accepted {
                            self.root_closes(conn);
                        }
                    }
                    let outcome = outcome.map(|(shared, own)| [&shared[..], &own].concat());
                    if let Err(failure) = &outcome {
                        self.failed = Some((self.steps[0], failure.sentence.clone()));
                    }
                    self.end(0, outcome);
                }
                None => self.at(wake - self.start, Event::Wake(0)),
            }
            return;
        }
    }

    fn settle_visitor(&mut self, rank: usize) {
        let now = self.clock();
        loop {
            let Node::Visitor(visit, current) = &mut self.nodes[rank] else { return };
            visit.tick(now);
            let Some(action) = visit.next_action() else { break };
            let old = *current;
            match action {
                VisitorAction::Close => {
                    *current = None;
                    if let Some(conn) = old {
                        self.along(conn, true, Event::VisitorClosed(conn));
                    }
                }
                VisitorAction::Connect => {
                    let conn = self.open(Some(rank));
                    self.connections += 1;
                    let listens = !matches!(self.nodes[0], Node::Dead);
                    if let Node::Visitor(_, current) = &mut self.nodes[rank] {
                        *current = Some(conn);
                    }
                    if listens {
                        self.along(conn, true, Event::Arrives(conn));
                    }
                    self.along(conn, false, Event::Connected(rank, conn, listens));
                }
                VisitorAction::Send(bytes) => {
                    visit.sent();
                    if let Some(conn) = old {
                        self.send(conn, true, &bytes);
                    }
                }
            }
        }
        let Node::Visitor(visit, _) = &mut self.nodes[rank] else { return };
        let wake = visit.wake();
        self.met[rank] = visit.met();
        match visit.outcome() {
            Some(outcome) => {
                let outcome = match outcome {
                    Ok(answer) => Ok(std::mem::take(&mut answer.bytes)),
                    Err(failure) => Err(failure.clone()),
                };
                self.end(rank, outcome);
            }
            None => self.at(wake - self.start, Event::Wake(rank)),
        }
    }

    fn end(&mut self, rank: usize, outcome: Result<Vec<u8>, Failure>) {
        let nranks = self.jobs.len() as u32;
        let result = outcome.map_err(|failure| failure.sentence).map(|bytes| match Reply::parse(&bytes, nranks) {
            Ok(Reply::Gathered { common, addressed }) => {
                common.into_iter().zip(addressed).map(|(c, a)| (bytes[c].to_vec(), bytes[a].to_vec())).collect()
            }
            other => panic!("rank {rank} got {other:?}"),
        });
        self.ended[rank].push((result, self.now.as_secs_f64()));
        self.nodes[rank] = Node::Outside;
        self.enter_next(rank);
    }

    /// How step `i` (from 0) ended for `rank`.
    fn result(&self, rank: usize, i: usize) -> &Ended {
        &self.ended[rank][i]
    }

    /// The sentence that step `i` failed with.
    fn sentence(&self, rank: usize, i: usize) -> &str {
        self.result(rank, i).0.as_ref().expect_err("the step should have failed")
    }

    /// Step `i` brought everything to `rank`.
    fn check(&self, rank: usize, i: usize) {
        let nranks = self.jobs.len() as u32;
        let got = self.result(rank, i).0.as_ref().unwrap_or_else(|why| panic!("rank {rank}, step {i}: {why}"));
        for (from, (common, addressed)) in got.iter().enumerate() {
            assert_eq!(*common, brings(from as u32, nranks).0);
            assert_eq!(*addressed, [from as u8, rank as u8]);
        }
        assert_eq!(got.len() as u32, nranks);
    }
}
