//! Collective steps as the rest of the library sees them.

use super::drive;
use super::gather::Gather;
use super::job::Job;
use super::listener::Listener;
use super::visit::Visit;
use super::wire::{self, Failure, Reply, Sender};
use crate::comm::handle::{self, Handle};
use crate::comm::interfaces;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::fabric::World;
use crate::sync::Mutex;
use nccl_plugin_api::NcclResult;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// What this rank brings to a step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contribution {
    /// Bytes for every rank.
    pub common: Vec<u8>,
    /// Empty, or one slice a rank, all equally long, one behind the other.
    pub addressed: Vec<u8>,
}

/// What all ranks brought.
#[derive(Debug)]
pub struct Gathered {
    bytes: Vec<u8>,
    common: Vec<Range<usize>>,
    addressed: Vec<Range<usize>>,
}

impl Gathered {
    /// What `rank` said to all. Empty for a rank that does not exist.
    pub fn common(&self, rank: u32) -> &[u8] {
        self.common.get(rank as usize).map_or(&[], |range| &self.bytes[range.clone()])
    }

    /// What rank `from` said to this rank alone. Empty for a rank that does not exist.
    pub fn addressed(&self, from: u32) -> &[u8] {
        self.addressed.get(from as usize).map_or(&[], |range| &self.bytes[range.clone()])
    }
}

/// What lasts from step to step.
#[derive(Default)]
struct Progress {
    /// How many steps this rank has entered.
    steps: u32,
    /// Number and sentence of the last step that failed here.
    failed: Option<(u32, String)>,
}

/// The collective steps of one communicator. Every rank must call [`Exchange::step`] the same number of times and in
/// the same order, also when it failed before: that count is what tells steps apart. May be used from any thread;
/// one step runs at a time.
pub struct Exchange {
    job: Arc<Job>,
    world: World,
    /// Rank 0 keeps its own, so that closeListen may come at any time.
    listener: Option<Arc<Listener>>,
    progress: Mutex<Progress>,
}

/// The wire's codes as errors of this crate.
fn error_of(failure: Failure) -> Error {
    let sentence = failure.sentence;
    match NcclResult(failure.code) {
        NcclResult::UNHANDLED_CUDA_ERROR => Error::cuda(sentence),
        NcclResult::SYSTEM_ERROR => Error::system(sentence),
        NcclResult::INTERNAL_ERROR => Error::internal(sentence),
        NcclResult::INVALID_ARGUMENT => Error::argument(sentence),
        NcclResult::INVALID_USAGE => Error::usage(sentence),
        NcclResult::TIMEOUT => Error::timeout(sentence),
        _ => Error::remote(sentence),
    }
}

impl Exchange {
    /// The exchange of the job whose rank r made `handles[r]`. `listener` made this rank's; only rank 0 keeps it.
    /// Says nothing to anybody yet.
    pub fn new(
        config: &Config,
        world: World,
        handles: &[[u8; handle::BYTES]],
        listener: Arc<Listener>,
    ) -> Result<Self> {
        if world.rank >= world.nranks || world.nranks > wire::MAX_RANKS || handles.len() != world.nranks as usize {
            return Err(Error::argument(format!(
                "connect: rank {} of {} with {} handles; ranks count from 0, there are at most {}",
                world.rank,
                world.nranks,
                handles.len(),
                wire::MAX_RANKS
            )));
        }
        let mut addresses = Vec::with_capacity(handles.len());
        let mut token = None;
        for (rank, bytes) in handles.iter().enumerate() {
            let handle = Handle::decode(bytes).map_err(|e| e.context(format_args!("connect: rank {rank}")))?;
            addresses.push(interfaces::through(handle.address, &[listener.address()], 0));
            token.get_or_insert(handle.token);
        }
        if handles[world.rank as usize] != listener.handle() {
            return Err(Error::argument(format!(
                "connect: the handle at rank {} is not the one that this rank's listen filled",
                world.rank
            )));
        }
        let token = token.ok_or_else(|| Error::internal("connect: no rank 0"))?;
        Ok(Self {
            job: Arc::new(Job { addresses, token, timeout: config.timeout }),
            world,
            listener: (world.rank == 0).then_some(listener),
            progress: Mutex::new(Progress::default()),
        })
    }

    /// This rank among all.
    pub fn world(&self) -> World {
        self.world
    }

    /// "rank 3 (10.0.0.7:4711)", for sentences.
    pub fn name_of(&self, rank: u32) -> String {
        self.job.rank(rank)
    }

    /// One collective step: every rank brings something and gets what all brought. `step` names it in errors and
    /// must be the same on every rank, at most 64 bytes. A rank whose own work failed brings its error instead, and
    /// the step fails on every rank with a sentence that names that rank and repeats its own. Returns within
    /// `OXYGIN_TIMEOUT` and a few seconds; the error names the ranks that were missing.
    pub fn step(&self, step: &str, mine: std::result::Result<Contribution, &Error>) -> Result<Gathered> {
        let mut progress = self.progress.lock();
        progress.steps = progress.steps.wrapping_add(1);
        let number = progress.steps;
        let sender = Sender {
            token: self.job.token,
            step: number,
            name: step,
            rank: self.world.rank,
            nranks: self.world.nranks,
        };
        // What cannot be sent is a local failure like any other: the others must not wait for it.
        let (request, own_error) = match &mine {
            Ok(mine) => match wire::encode_request(&sender, Ok(&mine.common), &mine.addressed) {
                Ok(request) => (Ok(request), None),
                Err(malformed) => {
                    let error = Error::internal(format!("{step}: {malformed}"));
                    (encode_error(&sender, &error), Some(error))
                }
            },
            Err(error) => (encode_error(&sender, error), Some((*error).clone())),
        };
        let request = request.map_err(|malformed| Error::internal(format!("{step}: {malformed}")))?;
        let result = match &self.listener {
            Some(listener) => self.as_root(number, step, request, progress.failed.clone(), listener),
            None => self.as_visitor(number, step, request),
        };
        result.map_err(|error| {
            progress.failed = Some((number, error.message().to_owned()));
            match own_error {
                // The code of what happened here, with the sentence that every rank has.
                Some(own) => error_of(Failure { code: own.code().0, sentence: error.message().into() }),
                None => error,
            }
        })
    }

    fn as_root(
        &self,
        number: u32,
        step: &str,
        request: Vec<u8>,
        earlier: Option<(u32, String)>,
        listener: &Listener,
    ) -> Result<Gathered> {
        let mut gather = Gather::new(self.job.clone(), number, step, request, earlier, Instant::now());
        let (shared, own) = drive::gather(&mut gather, listener)?.map_err(error_of)?;
        let mut bytes = shared.to_vec();
        bytes.extend_from_slice(&own);
        match Reply::parse(&bytes, self.world.nranks) {
            Ok(Reply::Gathered { common, addressed }) => Ok(Gathered { bytes, common, addressed }),
            _ => Err(Error::internal(format!("{step}: rank 0 cannot read its own answer"))),
        }
    }

    fn as_visitor(&self, number: u32, step: &str, request: Vec<u8>) -> Result<Gathered> {
        let mut visit = Visit::new(self.job.clone(), number, step, request, Instant::now());
        let answer = drive::visit(&mut visit, self.job.addresses[0])?.map_err(error_of)?;
        Ok(Gathered { bytes: answer.bytes, common: answer.common, addressed: answer.addressed })
    }
}

fn encode_error(sender: &Sender<'_>, error: &Error) -> std::result::Result<Vec<u8>, wire::Malformed> {
    let failure = Failure { code: error.code().0, sentence: error.message().into() };
    wire::encode_request(sender, Err(&failure), &[])
}
