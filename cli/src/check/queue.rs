//! Operations by device code, through the plugin's own queues or queue pairs, in the terms of the cases: windows by
//! their handles, signals by address.

use super::case_env::CaseEnv;
use super::findings::is_echo;
use super::world::{named, Outcome, Request, World};
use crate::device::{Compiled, Deadline, Device, Pen, Place, Posted, Signal, Thread};
use crate::dice::Dice;
use crate::plugin::{self, ContextConfig, Get, Put, Table, Way};
use nccl_plugin_api::SIGNAL_OP_ADD;
use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Signals a context has, where a case does not say.
pub const SIGNALS: i32 = 64;
/// Counters a context has, where a case does not say.
pub const COUNTERS: i32 = 16;
/// Turns of an empty loop between two words at most.
pub const PAUSE: u64 = 200;

/// What one `createContext` gave.
pub struct Set {
    /// The plugin's object.
    pub ctx: *mut c_void,
    /// The contexts, as device code sees them.
    pub device: Device,
}

/// A communicator's queue, once it has contexts.
pub struct Queue {
    /// The contexts that operations go to.
    pub device: Option<Device>,
    rank: u32,
    nranks: u32,
    is_gdaki: bool,
    /// Handles for device code, by the other handles.
    names: Mutex<HashMap<usize, u64>>,
    seeds: AtomicU64,
}

/// What contexts are asked for with: as `config`, with the layout of this way's device code, and with signals and
/// counters where it names none.
pub fn wishes(env: &CaseEnv<'_>, config: &ContextConfig) -> Outcome<(Compiled, ContextConfig)> {
    let way = env.way;
    let compiled = Compiled::of(way)?.ok_or_else(|| format!("{way} has no queue"))?;
    let or = |asked: i32, usual: i32| if asked == 0 { usual } else { asked };
    let (n_signals, n_counters) = (or(config.n_signals, SIGNALS), or(config.n_counters, COUNTERS));
    Ok((compiled, ContextConfig { n_signals, n_counters, backend_version: compiled.backend_version(), ..*config }))
}

impl Queue {
    /// Of a communicator without contexts.
    pub fn new(way: Way, rank: u32, nranks: u32) -> Self {
        let seeds = AtomicU64::new(u64::from(rank) << 32);
        Self { device: None, rank, nranks, is_gdaki: way.is_gdaki(), names: Mutex::default(), seeds }
    }

    /// Makes contexts, collectively.
    pub fn create(
        &self,
        env: &CaseEnv<'_>,
        table: &Table,
        coll_comm: *mut c_void,
        config: &ContextConfig,
    ) -> Outcome<Set> {
        let (compiled, config) = wishes(env, config)?;
        let (mut ctx, mut handle) = (null_mut(), null_mut());
        env.enter("createContext");
        // SAFETY: a communicator of this table and places for results.
        named("createContext", unsafe { table.create_context(coll_comm, Some(&config), &mut ctx, &mut handle) })?;
        env.beat();
        // SAFETY: what createContext gave; its contexts live until destroyContext, and cases use them no longer.
        let device = unsafe { Device::open(compiled, self.rank, self.nranks, &config, handle) }?;
        Ok(Set { ctx, device })
    }

    /// Takes down the name by which device code knows a window.
    pub fn learn(&self, mh: *mut c_void, gin: *mut c_void) -> Outcome<()> {
        if gin.is_null() || gin as u64 >> 63 != 0 {
            return Err(format!("regMrSym gave {gin:?} for device code: descriptors have 63 bits, and NULL is none"));
        }
        if self.is_gdaki && gin as u64 % 8 != 0 {
            return Err(format!("regMrSym gave {gin:?} for device code: no address of a window's keys"));
        }
        self.names.lock().unwrap_or_else(PoisonError::into_inner).insert(mh as usize, gin as u64);
        Ok(())
    }

    fn name(&self, mh: *mut c_void) -> u64 {
        let names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        names.get(&(mh as usize)).copied().unwrap_or(0)
    }

    /// The contexts.
    pub fn device(&self) -> Outcome<&Device> {
        self.device.as_ref().ok_or_else(|| "there are no contexts yet".into())
    }

    /// A thread of device code for one operation, which writes as no other does.
    fn thread<'a>(&'a self, env: &'a CaseEnv<'a>, context: usize) -> Outcome<Thread<'a>> {
        let seed = Dice(self.seeds.fetch_add(1, Ordering::Relaxed)).roll();
        Ok(self.device()?.thread(context, Pen::wild(seed, PAUSE), env))
    }

    /// A put, a put and a signal, or a signal alone.
    pub fn put(&self, env: &CaseEnv<'_>, put: &Put, signal: Option<&plugin::Signal>) -> Outcome<Request> {
        let mut thread = self.thread(env, put.context as usize)?;
        let signal = signal.map(|s| Signal {
            place: Place::Va { window: self.name(s.mh), offset: s.off },
            add: (s.op == SIGNAL_OP_ADD).then_some(s.value),
            strong: s.strong,
        });
        let posted = match (&signal, put.src.is_null()) {
            (Some(signal), true) => thread.signal(put.rank, signal)?,
            (signal, _) => {
                let (from, to) = ((self.name(put.src), put.src_off), (self.name(put.dst), put.dst_off));
                thread.put(put.rank, from, to, put.size as u64, signal.as_ref(), None)?
            }
        };
        env.beat();
        Ok(Request { raw: null_mut(), peer: put.rank as usize, posted: Some(posted) })
    }

    /// A get.
    pub fn get(&self, env: &CaseEnv<'_>, get: &Get) -> Outcome<Request> {
        let mut thread = self.thread(env, get.context as usize)?;
        let (from, to) = ((self.name(get.remote), get.remote_off), (self.name(get.local), get.local_off));
        let posted = thread.get(get.rank, from, to, get.size as u64)?;
        env.beat();
        Ok(Request { raw: null_mut(), peer: get.rank as usize, posted })
    }

    /// Flushes a peer's queue of a context and waits for it.
    pub fn flush(&self, env: &CaseEnv<'_>, context: usize, peer: usize) -> Outcome<()> {
        let mut thread = self.thread(env, context)?;
        let request = thread.flush_async(peer as u32)?;
        thread.wait(&request)
    }

    /// Whether an operation is complete.
    pub fn is_complete(&self, request: &Request) -> Outcome<bool> {
        let Some(posted) = request.posted else { return Ok(true) };
        self.device()?.is_complete(&posted)
    }

    /// Where the queue of an unfinished operation stands.
    pub fn standing(&self, posted: &Posted) -> String {
        match &self.device {
            Some(device) => device.standing(posted),
            None => "contexts".into(),
        }
    }
}

impl World<'_> {
    /// The contexts that operations go to, as device code sees them.
    pub fn device(&self) -> Outcome<&Device> {
        self.queue.as_ref().ok_or("operations go in by calls")?.device()
    }

    /// Makes contexts beside those that operations go to, collectively.
    pub fn more_contexts(&self, config: &ContextConfig) -> Outcome<Set> {
        let queue = self.queue.as_ref().ok_or("operations go in by calls")?;
        queue.create(self.env, &self.table, self.target.coll_comm, config)
    }

    /// Ends contexts that [`World::more_contexts`] made.
    pub fn end_contexts(&self, set: Set) -> Outcome<()> {
        self.env.enter("destroyContext");
        // SAFETY: made by this table, and taken: nobody uses its contexts from here on.
        let code = unsafe { self.table.destroy_context(set.ctx) };
        self.env.beat();
        named("destroyContext", code)
    }

    /// `queryLastError` of contexts.
    pub fn set_has_error(&self, set: &Set) -> Outcome<bool> {
        let mut bad = false;
        self.env.enter("queryLastError");
        // SAFETY: this communicator's contexts and a place for the answer.
        let code = unsafe { self.table.query_last_error(set.ctx, &mut bad) };
        self.env.beat();
        named("queryLastError", code)?;
        Ok(bad)
    }
}

/// Runs `body` on `n` threads of device code; the first error of any ends all. This rank shows signs of life meanwhile:
/// only single waits have a limit.
pub fn crew<T: Send>(
    env: &CaseEnv<'_>,
    n: usize,
    body: impl Fn(usize, &Deadline<'_>) -> Outcome<T> + Sync,
) -> Outcome<Vec<T>> {
    let (stop, over) = (AtomicBool::new(false), AtomicUsize::new(0));
    let failed: Mutex<Option<String>> = Mutex::new(None);
    let limit = env.limit;
    let one = |i: usize| {
        let outcome = body(i, &Deadline::unless(limit, &stop));
        let result = outcome.map_err(|e| {
            stop.store(true, Ordering::Relaxed);
            failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(e);
        });
        over.fetch_add(1, Ordering::Release);
        result.ok()
    };
    let one = &one;
    let done = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..n).map(|i| scope.spawn(move || one(i))).collect();
        while over.load(Ordering::Acquire) < n && !threads.iter().all(|t| t.is_finished()) {
            if env.control.aborted() {
                stop.store(true, Ordering::Relaxed);
            }
            env.beat();
            std::thread::sleep(Duration::from_micros(200));
        }
        threads.into_iter().map(|t| t.join().ok().flatten()).collect::<Option<Vec<T>>>()
    });
    match (done, failed.into_inner().unwrap_or_else(PoisonError::into_inner)) {
        (Some(done), None) => Ok(done),
        (_, Some(why)) if env.control.aborted() && !is_echo(&why) => Err(super::findings::stopped(Duration::ZERO, why)),
        (_, Some(why)) => Err(why),
        (None, None) => Err("a fault of oxygin check itself: a thread of device code panicked".into()),
    }
}
