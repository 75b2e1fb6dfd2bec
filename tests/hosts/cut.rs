//! One of three ranks of a communicator whose last rank loses its network while all send to all.
//!
//! `tests/hosts/run` starts one on each host and pulls the cable when the line `traffic` appears. What must happen:
//! on the others, an operation towards the lost rank (or its `test`) returns ncclRemoteError within ten seconds of
//! the first sign of silence (`OXYGIN_PEER_TIMEOUT` is shorter), `queryLastError` says true, a log line names the
//! rank, and traffic among the others goes on, correct, all the while and afterwards. The last of the others has
//! nothing under way to the lost rank by then: it learns of the silence from what does not come.

use nccl_plugin_api::NcclResult;
use oxygin_cli::plugin::{log, Plugin};
use oxygin_cli::ranks::{run, Place, Plan, Ranks, Session, Spec};
use std::error::Error;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

/// Bytes of each put.
const SIZE: usize = 32 << 10;
/// The longest that a cut may go unnoticed, counted from the last completion towards the lost rank.
const NOTICE: Duration = Duration::from_secs(10);
/// How long the rounds among the others go on after the error.
const AFTERWARDS: Duration = Duration::from_secs(2);
/// How long a rank stays afterwards: longer than the time between the first and the last rank's notice.
const STAY: Duration = Duration::from_secs(5);

/// The state of what this rank sends to one peer: one put with a signal at a time.
struct Stream {
    peer: u32,
    request: Option<*mut std::ffi::c_void>,
    completed: u64,
    /// Posts nothing until the communicator has an error.
    is_idle: bool,
    /// When the last put to this peer completed; where this rank is idle, when the last one from there arrived.
    last: Instant,
    arrived: u64,
    failed: Option<Duration>,
}

impl Stream {
    fn new(peer: u32) -> Self {
        Self { peer, request: None, completed: 0, is_idle: false, last: Instant::now(), arrived: 0, failed: None }
    }

    /// Whether there is nothing to do towards this peer but wait for the end of what arrives from it.
    fn waits(&mut self, s: &Session) -> Result<bool, Box<dyn Error>> {
        if !self.is_idle || self.request.is_some() {
            return Ok(false);
        }
        let arrived = s.signals.signal(self.peer as usize);
        if arrived != self.arrived {
            (self.arrived, self.last) = (arrived, Instant::now());
        }
        Ok(!s.has_error()?)
    }

    /// Tests the outstanding put or posts the next one.
    fn step(&mut self, s: &Session) -> Result<(), Box<dyn Error>> {
        if self.failed.is_some() || self.waits(s)? {
            return Ok(());
        }
        let code = match self.request {
            Some(request) => {
                let mut done = 0;
                // SAFETY: the request is outstanding and the communicator alive.
                let code = unsafe { s.table.test(&s.target, request, &mut done) };
                if code == NcclResult::SUCCESS && done != 0 {
                    self.request = None;
                    self.completed += 1;
                    self.last = Instant::now();
                }
                code
            }
            None => {
                let mut request = null_mut();
                let me = s.rank() as usize;
                let put = s.put_of(0, self.peer, 0, ((me + 1) * SIZE) as u64, SIZE);
                // SAFETY: windows and communicator are alive; the request goes to a local.
                let code = unsafe { s.table.put_signal(&s.target, &put, &s.signal_of(me, 1), &mut request) };
                self.request = (code == NcclResult::SUCCESS).then_some(request);
                code
            }
        };
        match code {
            NcclResult::SUCCESS => Ok(()),
            NcclResult::REMOTE_ERROR => {
                self.failed = Some(self.last.elapsed());
                Ok(())
            }
            code => Err(format!("towards rank {}: unexpected result {}", self.peer, code.0).into()),
        }
    }
}

fn body(ranks: &mut Ranks, library: &str) -> Result<Vec<u8>, Box<dyn Error>> {
    let plugin = Plugin::open(library)?;
    let spec = Spec { data_bytes: 4 * SIZE, signals: 8, ..Spec::default() };
    let session = Session::open(plugin.newest()?, ranks, &spec)?;
    let (me, n) = (ranks.rank(), ranks.nranks());
    let lost = n - 1;
    let mark = log::mark();
    let mut streams: Vec<Stream> = (0..n).filter(|&r| r != me).map(Stream::new).collect();
    ranks.barrier("start of the traffic")?;
    let start = Instant::now();
    let mut said = false;
    // The rank to be cut off sends until it notices, too; it must come to an error rather than hang.
    let mut until = None;
    let mut at_error = 0;
    loop {
        for stream in &mut streams {
            stream.step(&session)?;
        }
        session.progress();
        if !said && streams.iter().all(|s| s.completed >= 100) {
            said = true;
            streams.iter_mut().for_each(|s| s.is_idle = me + 1 == lost && s.peer == lost);
            println!("traffic");
        }
        let others: u64 = streams.iter().filter(|s| s.peer != lost).map(|s| s.completed).sum();
        if until.is_none() && streams.iter().any(|s| s.failed.is_some()) {
            at_error = others;
            until = Some(Instant::now() + AFTERWARDS);
        }
        match until {
            Some(end) if Instant::now() > end => break,
            None if start.elapsed() > Duration::from_secs(60) => return Err("no error within 60 s".into()),
            _ => {}
        }
    }
    // The others may have noticed later and still send here: stay for them. (The tools' own barrier needs all ranks.)
    let end = Instant::now() + STAY;
    while Instant::now() < end {
        let _ = session.progress();
        std::thread::sleep(Duration::from_millis(1));
    }
    let text = log::warnings_since(mark).into_iter().map(|l| l.text).collect::<Vec<_>>().join(" / ");
    if !session.has_error()? {
        return Err("queryLastError says that all is well".into());
    }
    if me == lost {
        println!("rank {me}: noticed that it is alone: {text}");
    } else {
        for stream in &streams {
            match (stream.peer == lost, stream.failed) {
                (true, Some(after)) if after <= NOTICE => println!(
                    "rank {me}: rank {lost} failed {:.1} s after its last {}: {text}",
                    after.as_secs_f64(),
                    if stream.is_idle { "put" } else { "completion" }
                ),
                (true, Some(after)) => return Err(format!("the cut was noticed only after {after:?}").into()),
                (true, None) => return Err("no error for the rank that was cut off".into()),
                (false, Some(_)) => return Err(format!("rank {} failed as well: {text}", stream.peer).into()),
                (false, None) => {}
            }
        }
        if !text.contains(&format!("rank {lost}")) {
            return Err(format!("no log line names rank {lost}: {text:?}").into());
        }
        let others: u64 = streams.iter().filter(|s| s.peer != lost).map(|s| s.completed).sum();
        if others < at_error + 10 {
            return Err(format!("traffic among the others stopped: {at_error} before, {others} in all").into());
        }
        println!("rank {me}: {} puts to the others after the error", others - at_error);
    }
    Ok(Vec::new())
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, library, rank, nranks, root] = arguments.as_slice() else {
        return Err("usage: hosts_cut LIBRARY RANK NRANKS HOST:PORT".into());
    };
    let (rank, nranks, root) = (rank.parse()?, nranks.parse()?, root.clone());
    let place = match rank {
        0 => Place::Root { nranks, listen: root },
        rank => Place::Join { rank, nranks, root },
    };
    let (deadline, options) = (Duration::from_secs(90), String::new());
    let plan = Plan { place, deadline, tolerate_deaths: false, between_steps: false, options };
    run(&plan, |ranks| body(ranks, library))?.results()?;
    Ok(())
}
