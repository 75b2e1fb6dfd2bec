//! Collective steps as the rest of the library sees them.

use super::drive::{self, DriveStep, Standing};
use super::gather::Gather;
use super::job::Job;
use super::listener::Listener;
use super::routes::Routes;
use super::visit::Visit;
use super::wire::{self, Failure, Reply, Sender};
use crate::comm::handle::{self, Handle};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::fabric::World;
use crate::sys::interfaces;
use crate::sys::sync::Mutex;
use nccl_plugin_api::NcclResult;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
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
pub(super) struct Progress {
    /// Number of the last step that this rank has entered.
    pub(super) step: u32,
    /// Number and sentence of the last step that failed here.
    failed: Option<(u32, String)>,
    /// Rank 0 was there.
    met: bool,
    /// How to reach it.
    routes: Routes,
}

/// The collective steps of one communicator. Every rank must make the same calls in the same order, also when one
/// failed before: steps are told apart by the number of their call and their own in it. May be used from any thread;
/// one call runs at a time.
pub struct Exchange {
    job: Arc<Job>,
    world: World,
    /// Rank 0 keeps its own, so that closeListen may come at any time.
    listener: Option<Arc<Listener>>,
    /// What is wrong with this rank's handle.
    wrong: Option<Error>,
    /// The communicator is closed.
    is_over: AtomicBool,
    /// What it is a part of has ended.
    is_orphan: Arc<AtomicBool>,
    pub(super) progress: Mutex<Progress>,
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
    /// The exchange of the job whose rank r made `handles[r]`; `None`: this rank was not told, which the caller has
    /// to say in its first call. `listener` made this rank's; only rank 0 keeps it. Says nothing to anybody yet.
    ///
    /// Fails where nobody can be told: without rank 0's handle, and with one that this library cannot read, which all
    /// ranks see, and whose rank will not come. What is wrong here alone is for [`Exchange::check_handles`].
    pub fn new(
        config: &Config,
        world: World,
        handles: &[Option<[u8; handle::BYTES]>],
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
        let here = listener.address();
        let mut root = None;
        let mut addresses = Vec::with_capacity(handles.len());
        for (rank, bytes) in handles.iter().enumerate() {
            let handle = bytes.as_ref().map(Handle::decode).transpose();
            let handle = handle.map_err(|e| e.context(format_args!("connect: rank {rank}")))?;
            addresses.push(handle.map(|handle| interfaces::through(handle.address, &[here], 0)));
            root = root.or(handle.filter(|_| rank == 0));
        }
        let to = root.map_or(here, |root| root.address);
        let routes = Routes::new(interfaces::through(to, &[here], 0), interfaces::ways(to, &[here]));
        let own = world.rank as usize;
        addresses[own].get_or_insert(here);
        let wrong = handles[own].is_some_and(|handle| handle != listener.handle()).then(|| {
            Error::argument(format!("connect: the handle at rank {own} is not the one that this rank's listen filled"))
        });
        let listener = (own == 0).then_some(listener);
        let token = match (&listener, root) {
            // Those who have the right handle come here.
            (Some(listener), _) => listener.token(),
            (None, Some(root)) => root.token,
            (None, None) => return Err(Error::argument("connect: there is no handle of rank 0")),
        };
        Ok(Self {
            job: Arc::new(Job { addresses, token, timeout: config.timeout, silence: config.peer_limit() }),
            world,
            listener,
            wrong,
            is_over: AtomicBool::new(false),
            is_orphan: Arc::default(),
            progress: Mutex::new(Progress { step: 0, failed: None, met: false, routes }),
        })
    }

    /// Nobody waits in a step any more, nor from here on, once `parent` is set.
    pub fn ends_with(&mut self, parent: Arc<AtomicBool>) {
        self.is_orphan = parent;
    }

    /// Nobody waits in a step any more, nor from here on.
    pub fn end(&self) {
        self.is_over.store(true, Ordering::Release);
    }

    /// Whether this rank's handle is in its place.
    pub fn check_handles(&self) -> Result<()> {
        self.wrong.clone().map_or(Ok(()), Err)
    }

    /// This rank among all.
    pub fn world(&self) -> World {
        self.world
    }

    /// "rank 3 (10.0.0.7:4711)", for sentences.
    pub fn name_of(&self, rank: u32) -> String {
        self.job.rank(rank)
    }

    /// A collective call of one step: every rank brings something and gets what all brought.
    pub fn step(&self, name: &str, mine: std::result::Result<Contribution, &Error>) -> Result<Gathered> {
        self.call(name, |call| call.step(mine.map_err(Error::clone)?))
    }

    /// One step of a call, whose name must be the same on every rank, at most 64 bytes. `standing`: the call's
    /// connections.
    pub(super) fn take_step(
        &self,
        progress: &mut Progress,
        standing: &mut Standing,
        name: &str,
        mine: std::result::Result<Contribution, &Error>,
    ) -> Result<Gathered> {
        progress.step = progress.step.wrapping_add(1);
        let number = progress.step;
        let sender =
            Sender { token: self.job.token, step: number, name, rank: self.world.rank, nranks: self.world.nranks };
        // What cannot be sent is a local failure like any other: the others must not wait for it.
        let (request, own_error) = match &mine {
            Ok(mine) => match wire::encode_request(&sender, Ok(&mine.common), &mine.addressed) {
                Ok(request) => (Ok(request), None),
                Err(malformed) => {
                    let error = Error::internal(format!("{name}: {malformed}"));
                    (encode_error(&sender, &error), Some(error))
                }
            },
            Err(error) => (encode_error(&sender, error), Some((*error).clone())),
        };
        let request = request.map_err(|malformed| Error::internal(format!("{name}: {malformed}")))?;
        let result = match &self.listener {
            Some(listener) => self.as_root(number, name, request, progress.failed.clone(), listener, standing),
            None => self.as_visitor(number, name, request, progress, standing),
        };
        result.map_err(|error| {
            progress.failed = Some((number, error.message().to_owned()));
            match own_error {
                Some(own) => both(&own, &error),
                None => error,
            }
        })
    }

    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire) || self.is_orphan.load(Ordering::Acquire)
    }

    fn as_root(
        &self,
        number: u32,
        step: &str,
        request: Vec<u8>,
        earlier: Option<(u32, String)>,
        listener: &Listener,
        standing: &mut Standing,
    ) -> Result<Gathered> {
        let mut gather = Gather::new(self.job.clone(), number, step, request, earlier, Instant::now());
        let (shared, own) =
            drive::gather(&mut gather, listener, standing, &DriveStep { name: step, is_over: &|| self.is_over() })?
                .map_err(error_of)?;
        let mut bytes = shared.to_vec();
        bytes.extend_from_slice(&own);
        match Reply::parse(&bytes, self.world.nranks) {
            Ok(Reply::Gathered { common, addressed }) => Ok(Gathered { bytes, common, addressed }),
            _ => Err(Error::internal(format!("{step}: rank 0 cannot read its own answer"))),
        }
    }

    fn as_visitor(
        &self,
        number: u32,
        step: &str,
        request: Vec<u8>,
        progress: &mut Progress,
        standing: &mut Standing,
    ) -> Result<Gathered> {
        let mut visit = Visit::new(self.job.clone(), number, step, request, progress.met, Instant::now());
        let outcome = drive::visit(
            &mut visit,
            &mut progress.routes,
            standing,
            &DriveStep { name: step, is_over: &|| self.is_over() },
        );
        progress.met = visit.met();
        let answer = outcome?.map_err(error_of)?;
        Ok(Gathered { bytes: answer.bytes, common: answer.common, addressed: answer.addressed })
    }
}

/// The code of what happened here, with the sentence that every rank has, if this rank's own is part of it.
fn both(own: &Error, all: &Error) -> Error {
    let sentence = match all.message().contains(own.message()) {
        true => all.message().to_owned(),
        false => format!("{own}; the other ranks may not know: {all}"),
    };
    error_of(Failure { code: own.code().0, sentence })
}

fn encode_error(sender: &Sender<'_>, error: &Error) -> std::result::Result<Vec<u8>, wire::Malformed> {
    let failure = Failure { code: error.code().0, sentence: error.message().into() };
    wire::encode_request(sender, Err(&failure), &[])
}
