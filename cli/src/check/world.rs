//! One rank of one case: a communicator over the plugin under test, windows, and operations whose waits end.

pub use super::case_env::CaseEnv;
use super::queue::Queue;
pub use super::window::Window;
use crate::device::Posted;
use crate::plugin::{self, code_name, log, ContextConfig, Get, Kind, Plugin, Put, Signal, Table, Target};
use nccl_plugin_api::{NcclResult, DEVICE_GIN_GDAKI, DEVICE_GIN_PROXY, HANDLE_BYTES, PTR_HOST};
use std::collections::VecDeque;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::Ordering;

/// What went wrong, in words.
pub type Outcome<T> = Result<T, String>;

/// Hands one message to all ranks and returns everybody's, by rank.
pub type Remote<'a> = dyn Fn(&[u8]) -> Outcome<Vec<Vec<u8>>> + 'a;

/// A started operation.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// What the plugin gave.
    pub raw: *mut c_void,
    /// The other end.
    pub peer: usize,
    /// The descriptor in the plugin's own queue, where operations go in there; `None` there: there is nothing to do.
    pub posted: Option<Posted>,
}

impl Request {
    /// What a call gave.
    pub fn of(raw: *mut c_void, peer: usize) -> Self {
        Self { raw, peer, posted: None }
    }
}

/// A communicator with its contexts. Not torn down by dropping it: cases call [`World::close`].
pub struct World<'a> {
    /// Where this rank sits.
    pub env: &'a CaseEnv<'a>,
    /// The table under test.
    pub table: Table,
    /// What `init` gave.
    pub instance: *mut c_void,
    /// What operations are addressed to.
    pub target: Target,
    /// How many contexts there are.
    pub contexts: usize,
    /// The plugin's own queue, if operations go in there.
    pub(super) queue: Option<Queue>,
    mapped: Mapped,
}

/// Keeps the library mapped for good, unless it is taken out: threads of a communicator that was not torn down, because
/// its case failed, still run in it.
struct Mapped(Option<Table>);

impl Drop for Mapped {
    fn drop(&mut self) {
        std::mem::forget(self.0.take());
    }
}

/// An error that names the call and its code, and repeats the last line that was logged.
pub fn named(call: &'static str, code: NcclResult) -> Outcome<()> {
    plugin::check(call, code).map_err(|e| match log::warnings_since(0).last() {
        Some(line) => format!("{e}; it logged: {}", line.text),
        None => e.to_string(),
    })
}

impl<'a> World<'a> {
    /// Loads the plugin and makes a communicator with `contexts` contexts (one where the table has only one).
    pub fn open(env: &'a CaseEnv<'a>, contexts: usize) -> Outcome<Self> {
        env.enter("dlopen");
        let plugin = Plugin::open(&env.plugin).map_err(|e| e.to_string())?;
        let table = plugin.table(env.way.kind).map_err(|e| e.to_string())?.clone();
        Self::with_table(env, table, contexts)
    }

    /// Makes a communicator of all ranks over a table that is loaded already.
    pub fn with_table(env: &'a CaseEnv<'a>, table: Table, contexts: usize) -> Outcome<Self> {
        let everyone: Vec<usize> = (0..env.nranks).collect();
        Self::among(env, table, contexts, &everyone)
    }

    /// Makes a communicator of some ranks, by their numbers in the case.
    pub fn among(env: &'a CaseEnv<'a>, table: Table, contexts: usize, members: &[usize]) -> Outcome<Self> {
        let contexts = if table.kind().has_contexts() { contexts } else { 1 };
        let config = ContextConfig { n_contexts: contexts as i32, ..ContextConfig::default() };
        let mut world = Self::connected(env, table, &config, members)?;
        world.equip(&config)?;
        Ok(world)
    }

    /// Makes a communicator of some ranks that has no contexts yet. `config` is what contexts will be asked for with.
    pub fn connected(env: &'a CaseEnv<'a>, table: Table, config: &ContextConfig, members: &[usize]) -> Outcome<Self> {
        let mut instance = null_mut();
        let mapped = Mapped(Some(table.clone()));
        env.enter("init");
        // SAFETY: as NCCL does: valid places for results, objects in their order.
        unsafe {
            named("init", table.init(&mut instance, 7, log::logger()))?;
            let mut handle = [0_u8; HANDLE_BYTES];
            let mut listener = null_mut();
            env.enter("listen");
            named("listen", table.listen(instance, 0, handle.as_mut_ptr().cast(), &mut listener))?;
            env.beat();
            let mut handles = env.gather_among(members, &handle)?;
            let mut pointers: Vec<*mut c_void> = handles.iter_mut().map(|h| h.as_mut_ptr().cast()).collect();
            let mut coll_comm = null_mut();
            let rank = members.iter().position(|&m| m == env.rank).expect("a member") as i32;
            let nranks = members.len() as i32;
            env.enter("connect");
            let code = table.connect(instance, pointers.as_mut_ptr(), nranks, rank, config, listener, &mut coll_comm);
            named("connect", code)?;
            env.enter("closeListen");
            named("closeListen", table.close_listen(listener))?;
            env.beat();
            let target = Target { coll_comm, ctx: null_mut() };
            let queue = env.way.is_by_device_code().then(|| Queue::new(env.way, rank as u32, nranks as u32));
            Ok(Self { env, table, instance, target, contexts: 0, queue, mapped })
        }
    }

    /// Makes the contexts that operations go to, collectively.
    pub fn equip(&mut self, config: &ContextConfig) -> Outcome<()> {
        let Self { env, table, target, queue, .. } = self;
        self.contexts = config.n_contexts.max(1) as usize;
        if let Some(queue) = queue {
            let set = queue.create(env, table, target.coll_comm, config)?;
            target.ctx = set.ctx;
            queue.device = Some(set.device);
            return Ok(());
        }
        env.enter("createContext");
        // SAFETY: as above. NCCL 2.30 passes no place for the device handle.
        let code = unsafe { table.create_context(target.coll_comm, Some(config), &mut target.ctx, null_mut()) };
        // A table that leaves the data to device code may say that it needs a device.
        if table.kind().has_data_operations() || code != NcclResult::INVALID_USAGE {
            named("createContext", code)?;
        }
        env.beat();
        Ok(())
    }

    /// Checks what `getProperties` says.
    pub fn properties_are_sane(&self) -> Outcome<()> {
        let mut count = 0;
        // SAFETY: places for results.
        let properties = unsafe {
            named("devices", self.table.devices(&mut count))?;
            self.env.enter("getProperties");
            self.table.properties(0).map_err(|e| e.to_string())?
        };
        self.env.beat();
        if count < 1 {
            return Err(format!("devices says there are {count}"));
        }
        if properties.name.as_deref().unwrap_or_default().is_empty() {
            return Err("getProperties gives no name".into());
        }
        if properties.ptr_support & PTR_HOST == 0 {
            return Err(format!("ptrSupport {} lacks host memory (1)", properties.ptr_support));
        }
        if self.table.kind() >= Kind::RmaV13 && properties.net_device_type != DEVICE_GIN_PROXY {
            return Err(format!("netDeviceType {}: RMA tables must report 2 (proxy)", properties.net_device_type));
        }
        if self.env.way.is_by_device_code() && properties.net_device_type != DEVICE_GIN_GDAKI {
            return Err(format!("netDeviceType {}: NCCL drives all but 3 itself", properties.net_device_type));
        }
        if properties.max_recvs < 1 || !(properties.max_recvs as u32 * 32).is_power_of_two() {
            return Err(format!("32 × maxRecvs ({}) must be a power of two", properties.max_recvs));
        }
        Ok(())
    }

    /// Registers a new window, collectively.
    pub fn window(&self, len: usize, flags: u64) -> Outcome<Window> {
        let mut window = Window::unregistered(len)?;
        (window.mh, window.gin) = self.register(window.base.cast(), len, flags)?;
        Ok(window)
    }

    /// Registers memory, collectively. Returns its handle, and that for device code.
    pub fn register(&self, data: *mut c_void, len: usize, flags: u64) -> Outcome<(*mut c_void, u64)> {
        let (mut mh, mut gin) = (null_mut(), null_mut());
        self.env.enter("regMrSym");
        // SAFETY: the caller's memory, and places for the results.
        let code = unsafe { self.table.reg(self.target.coll_comm, data, len, PTR_HOST, flags, &mut mh, &mut gin) };
        self.env.beat();
        named("regMrSym", code)?;
        if let Some(queue) = &self.queue {
            queue.learn(mh, gin)?;
        }
        Ok((mh, gin as u64))
    }

    /// Ends a registration.
    pub fn deregister(&self, window: &Window) -> Outcome<()> {
        self.deregister_handle(window.mh)
    }

    /// Ends the registration behind a handle.
    pub fn deregister_handle(&self, mh: *mut c_void) -> Outcome<()> {
        self.env.enter("deregMrSym");
        // SAFETY: a handle of this communicator.
        let code = unsafe { self.table.dereg(self.target.coll_comm, mh) };
        self.env.beat();
        named("deregMrSym", code)
    }

    /// Everything that can be said about a put, unchecked; returns the plugin's code.
    pub fn raw_put(&self, put: &Put, signal: Option<&Signal>, request: *mut *mut c_void) -> NcclResult {
        let call = if signal.is_some() { "iputSignal" } else { "iput" };
        self.env.enter(call);
        // SAFETY: deliberately whatever the case says; the plugin has to check it.
        let code = unsafe {
            match signal {
                Some(signal) => self.table.put_signal(&self.target, put, signal, request),
                None => self.table.put(&self.target, put, request),
            }
        };
        self.env.beat();
        code
    }

    fn started(&self, call: &'static str, code: NcclResult, raw: *mut c_void, peer: usize) -> Outcome<Request> {
        named(call, code).map_err(|e| format!("{e} (towards rank {peer})"))?;
        Ok(Request::of(raw, peer))
    }

    /// Starts a put.
    pub fn put(
        &self,
        context: usize,
        peer: usize,
        from: (&Window, usize),
        to: (&Window, usize),
        size: usize,
    ) -> Outcome<Request> {
        self.env.bytes.set(self.env.bytes.get() + size as u64);
        if let Some(queue) = &self.queue {
            return queue.put(self.env, &plain(context, peer, from, to, size), None);
        }
        let mut raw = null_mut();
        let code = self.raw_put(&plain(context, peer, from, to, size), None, &mut raw);
        self.started("iput", code, raw, peer)
    }

    /// Starts a put with a signal.
    pub fn put_signal(
        &self,
        context: usize,
        peer: usize,
        from: (&Window, usize),
        to: (&Window, usize),
        size: usize,
        signal: &Signal,
    ) -> Outcome<Request> {
        self.env.bytes.set(self.env.bytes.get() + size as u64);
        if let Some(queue) = &self.queue {
            return queue.put(self.env, &plain(context, peer, from, to, size), Some(signal));
        }
        let mut raw = null_mut();
        let code = self.raw_put(&plain(context, peer, from, to, size), Some(signal), &mut raw);
        self.started("iputSignal", code, raw, peer)
    }

    /// Starts a bare signal: no data, NULL data handles.
    pub fn signal(&self, context: usize, peer: usize, signal: &Signal) -> Outcome<Request> {
        if let Some(queue) = &self.queue {
            return queue.put(self.env, &bare(context, peer), Some(signal));
        }
        let mut raw = null_mut();
        let code = self.raw_put(&bare(context, peer), Some(signal), &mut raw);
        self.started("iputSignal", code, raw, peer)
    }

    /// Starts a get.
    pub fn get(
        &self,
        context: usize,
        peer: usize,
        from: (&Window, usize),
        to: (&Window, usize),
        size: usize,
    ) -> Outcome<Request> {
        let get = Get {
            context: context as i32,
            remote_off: from.1 as u64,
            remote: from.0.mh,
            size,
            local_off: to.1 as u64,
            local: to.0.mh,
            rank: peer as u32,
            opt_flags: 0,
        };
        self.env.bytes.set(self.env.bytes.get() + size as u64);
        if let Some(queue) = &self.queue {
            return queue.get(self.env, &get);
        }
        let mut raw = null_mut();
        self.env.enter("iget");
        // SAFETY: registered windows, offsets that the caller chose inside them.
        let code = unsafe { self.table.get(&self.target, &get, &mut raw) };
        self.env.beat();
        self.started("iget", code, raw, peer)
    }

    /// Flushes what gets from `peer` brought into `window`, and waits for it.
    pub fn flush(&self, context: usize, peer: usize, window: &Window) -> Outcome<()> {
        if let Some(queue) = &self.queue {
            return queue.flush(self.env, context, peer);
        }
        let mut raw = null_mut();
        self.env.enter("iflush");
        // SAFETY: a registered window.
        let code = unsafe { self.table.flush(&self.target, context as i32, window.mh, peer as u32, &mut raw) };
        self.env.beat();
        let request = self.started("iflush", code, raw, peer)?;
        if raw.is_null() {
            return Ok(());
        }
        self.wait(request)
    }

    /// `test` once, with its code.
    pub fn raw_test(&self, request: Request) -> (NcclResult, bool) {
        let mut done = 0;
        self.env.enter("test");
        // SAFETY: an unfinished request and a place for the answer.
        let code = unsafe { self.table.test(&self.target, request.raw, &mut done) };
        self.env.beat();
        (code, done != 0)
    }

    /// `test` once.
    pub fn test(&self, request: Request) -> Outcome<bool> {
        if let Some(queue) = &self.queue {
            return queue.is_complete(&request);
        }
        let (code, done) = self.raw_test(request);
        named("test", code).map_err(|e| format!("{e} (operation towards rank {})", request.peer))?;
        Ok(done)
    }

    /// Waits for local completion.
    pub fn wait(&self, request: Request) -> Outcome<()> {
        let what = || match (&self.queue, request.posted) {
            (Some(queue), Some(posted)) => queue.standing(&posted),
            _ => format!("an operation towards rank {} to complete locally", request.peer),
        };
        self.env.until(what, || Ok(self.test(request)?.then_some(())))
    }

    /// Tests the oldest requests and forgets those that are done; at most `keep` stay when it returns.
    pub fn reap(&self, requests: &mut VecDeque<Request>, keep: usize) -> Outcome<()> {
        while let Some(&oldest) = requests.front() {
            if requests.len() > keep {
                self.wait(oldest)?;
            } else if !self.test(oldest)? {
                break;
            }
            requests.pop_front();
        }
        Ok(())
    }

    /// One call of the progress function, where there is one.
    pub fn progress(&self) -> Outcome<()> {
        // A queue that the plugin owns needs no calls.
        if self.queue.is_some() || !self.table.has_progress() {
            return Ok(());
        }
        self.env.enter("progress");
        // SAFETY: this communicator's objects.
        let code = unsafe { self.table.progress(&self.target) };
        self.env.beat();
        named("progress", code)
    }

    /// `queryLastError`.
    pub fn has_error(&self) -> Outcome<bool> {
        let mut bad = false;
        self.env.enter("queryLastError");
        // SAFETY: this communicator's context and a place for the answer.
        let code = unsafe { self.table.query_last_error(self.target.ctx, &mut bad) };
        self.env.beat();
        named("queryLastError", code)?;
        Ok(bad)
    }

    /// Waits, calling progress, until a signal word has reached `value` (modulo 2^64: within 2^63 past it).
    pub fn wait_signal(&self, window: &Window, off: usize, value: u64, from: usize) -> Outcome<u64> {
        let word = window.word(off);
        let what = || {
            let now = word.load(Ordering::Acquire);
            format!("the signal at {off} from rank {from} to reach {value:#x}; it is {now:#x}")
        };
        self.env.until(what, || {
            let now = word.load(Ordering::Acquire);
            if now.wrapping_sub(value) as i64 >= 0 {
                return Ok(Some(now));
            }
            self.progress().map(|()| None)
        })
    }

    /// Waits, calling progress, until a signal word is exactly `value`.
    pub fn wait_exactly(&self, window: &Window, off: usize, value: u64, from: usize) -> Outcome<()> {
        let word = window.word(off);
        let what = || {
            let now = word.load(Ordering::Acquire);
            format!("the signal at {off} from rank {from} to become {value:#x}; it is {now:#x}")
        };
        self.env.until(what, || {
            if word.load(Ordering::Acquire) == value {
                return Ok(Some(()));
            }
            self.progress().map(|()| None)
        })
    }

    /// Takes everything down in NCCL's order.
    pub fn close(self, windows: &[&Window]) -> Outcome<()> {
        let everyone: Vec<usize> = (0..self.env.nranks).collect();
        self.close_among(&everyone, windows)
    }

    /// Takes everything down in NCCL's order once the ranks of `living` are here.
    pub fn close_among(mut self, living: &[usize], windows: &[&Window]) -> Outcome<()> {
        // Peers may still be sending here.
        self.env.barrier_among(living)?;
        for window in windows {
            self.deregister(window)?;
        }
        // SAFETY: objects of this communicator, each ended once.
        unsafe {
            if !self.target.ctx.is_null() {
                self.env.enter("destroyContext");
                named("destroyContext", self.table.destroy_context(self.target.ctx))?;
            }
            self.env.enter("closeColl");
            named("closeColl", self.table.close_coll(self.target.coll_comm))?;
            self.env.enter("finalize");
            named("finalize", self.table.finalize(self.instance))?;
        }
        self.mapped.0 = None;
        self.env.beat();
        Ok(())
    }
}

/// A put in the table's terms.
pub fn plain(context: usize, peer: usize, from: (&Window, usize), to: (&Window, usize), size: usize) -> Put {
    Put {
        context: context as i32,
        src_off: from.1 as u64,
        src: from.0.mh,
        size,
        dst_off: to.1 as u64,
        dst: to.0.mh,
        rank: peer as u32,
        opt_flags: 0,
    }
}

/// The put part of a bare signal.
pub fn bare(context: usize, peer: usize) -> Put {
    let (src, dst) = (null_mut(), null_mut());
    Put { context: context as i32, src_off: 0, src, size: 0, dst_off: 0, dst, rank: peer as u32, opt_flags: 0 }
}

/// A strong addition.
pub fn add(window: &Window, off: usize, value: u64) -> Signal {
    Signal { off: off as u64, mh: window.mh, value, op: nccl_plugin_api::SIGNAL_OP_ADD, strong: true }
}

/// A strong increment; the value argument is something that must not be looked at.
pub fn inc(window: &Window, off: usize) -> Signal {
    Signal { op: nccl_plugin_api::SIGNAL_OP_INC, ..add(window, off, 0x7777) }
}

/// The name and number of a code.
pub fn spell(code: NcclResult) -> String {
    format!("{} ({})", code.0, code_name(code))
}
