//! A communicator as NCCL would bring it up: one call from `init` to registered windows, and the way back.

use super::window::Memory;
use super::{Ranks, RanksError};
use crate::plugin::{check, log, CallError, ContextConfig, Get, Put, Signal, Table, Target};
use nccl_plugin_api::{DeviceHandle, NcclResult, HANDLE_BYTES, MR_FLAG_FORCE_SO, PTR_HOST};
use std::ffi::{c_int, c_void};
use std::fmt;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

/// What went wrong while a communicator was brought up or torn down.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SessionError {
    /// A table function failed; with what the plugin logged about it.
    Call(CallError, Vec<String>),
    /// The plugin reported something impossible.
    Plugin(String),
    /// Other ranks did not come.
    Ranks(RanksError),
    /// No memory for the windows.
    Memory(String),
}

impl From<RanksError> for SessionError {
    fn from(e: RanksError) -> Self {
        Self::Ranks(e)
    }
}

impl fmt::Display for SessionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Call(e, log) if log.is_empty() => write!(f, "{e}; the plugin logged nothing about it"),
            Self::Call(e, log) => write!(f, "{e}; the plugin says: {}", log.join(" / ")),
            Self::Plugin(e) | Self::Memory(e) => f.write_str(e),
            Self::Ranks(e) => e.fmt(f),
        }
    }
}

impl std::error::Error for SessionError {}

/// What to bring up.
#[derive(Clone, Copy, Debug)]
pub struct Spec {
    /// Device number.
    pub device: i32,
    /// Contexts and the rest of `createContext`'s wishes.
    pub config: ContextConfig,
    /// Bytes of the data window.
    pub data_bytes: usize,
    /// Words of the signal window.
    pub signals: usize,
    /// Number of the communicator, the same on all ranks.
    pub comm_id: u64,
}

impl Default for Spec {
    fn default() -> Self {
        Self {
            device: 0,
            config: ContextConfig::default(),
            data_bytes: 1 << 20,
            signals: 512,
            comm_id: 0x6f78_7967_696e,
        }
    }
}

/// How long each step of bringing up took on this rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetUpTimes {
    /// `connect`.
    pub connect: Duration,
    /// `createContext`.
    pub create_context: Duration,
    /// The two `regMrSym`.
    pub register: Duration,
}

impl SetUpTimes {
    /// All of it.
    pub fn total(&self) -> Duration {
        self.connect + self.create_context + self.register
    }
}

/// A communicator with a data window (flags 0) and a signal window (flag 1). Dropping it without [`Session::close`]
/// tears down without looking at results.
pub struct Session {
    /// The table it was brought up with.
    pub table: Table,
    /// What operations are addressed to.
    pub target: Target,
    /// Data window's memory.
    pub data: Memory,
    /// Data window's handle.
    pub data_mh: *mut c_void,
    /// Data window's handle for device code; 0 if the version has none.
    pub data_gin: u64,
    /// Signal window's memory: 64-bit words.
    pub signals: Memory,
    /// Signal window's handle.
    pub signals_mh: *mut c_void,
    /// What device code would be given; NULL if the version has none.
    pub device_handle: *mut DeviceHandle,
    /// How long bringing up took.
    pub times: SetUpTimes,
    rank: u32,
    nranks: u32,
    instance: *mut c_void,
    listening: *mut c_void,
}

impl Session {
    /// Does what NCCL does: init, devices, listen, all-gather of the handles, connect, closeListen, createContext,
    /// and two registrations. Every rank calls it with an equal `spec`.
    pub fn open(table: &Table, ranks: &mut Ranks, spec: &Spec) -> Result<Self, SessionError> {
        let memory = |what: &str, bytes: usize| {
            Memory::new(bytes)
                .map_err(|e| SessionError::Memory(format!("no memory for the {what} window of {bytes} bytes: {e}")))
        };
        let mut s = Self {
            table: table.clone(),
            target: Target { coll_comm: null_mut(), ctx: null_mut() },
            data: memory("data", spec.data_bytes)?,
            data_mh: null_mut(),
            data_gin: 0,
            signals: memory("signal", spec.signals * 8)?,
            signals_mh: null_mut(),
            device_handle: null_mut(),
            times: SetUpTimes::default(),
            rank: ranks.rank(),
            nranks: ranks.nranks(),
            instance: null_mut(),
            listening: null_mut(),
        };
        s.bring_up(ranks, spec)?;
        Ok(s)
    }

    fn bring_up(&mut self, ranks: &mut Ranks, spec: &Spec) -> Result<(), SessionError> {
        let t = self.table.clone();
        // SAFETY: (here and below) every pointer is to a local or a field that outlives the call; objects are the
        // plugin's own, used in NCCL's order.
        named("init", || unsafe { t.init(&mut self.instance, spec.comm_id, log::logger()) })?;
        let mut devices: c_int = 0;
        // SAFETY: as above.
        named("devices", || unsafe { t.devices(&mut devices) })?;
        if spec.device < 0 || spec.device >= devices {
            return Err(SessionError::Plugin(format!(
                "device {} does not exist: the plugin has {devices} (0 means that it can drive nothing here: ask \
                 `oxygin doctor`)",
                spec.device
            )));
        }
        let mut handle = [0u8; HANDLE_BYTES];
        // SAFETY: as above; the handle has the room that the interface demands.
        named("listen", || unsafe {
            t.listen(self.instance, spec.device, handle.as_mut_ptr().cast(), &mut self.listening)
        })?;
        let mut handles = ranks.gather("exchange of listen handles", &handle)?;
        let mut pointers: Vec<*mut c_void> = handles.iter_mut().map(|h| h.as_mut_ptr().cast()).collect();
        let start = Instant::now();
        // SAFETY: as above; one pointer a rank, each to HANDLE_BYTES.
        named("connect", || unsafe {
            t.connect(
                self.instance,
                pointers.as_mut_ptr(),
                self.nranks as c_int,
                self.rank as c_int,
                &spec.config,
                self.listening,
                &mut self.target.coll_comm,
            )
        })?;
        self.times.connect = start.elapsed();
        let listening = std::mem::replace(&mut self.listening, null_mut());
        // SAFETY: as above; closed once.
        named("closeListen", || unsafe { t.close_listen(listening) })?;
        let start = Instant::now();
        // SAFETY: as above.
        named("createContext", || unsafe {
            t.create_context(self.target.coll_comm, Some(&spec.config), &mut self.target.ctx, &mut self.device_handle)
        })?;
        self.times.create_context = start.elapsed();
        let start = Instant::now();
        (self.data_mh, self.data_gin) = self.register_for_device(self.data.base(), self.data.len(), 0)?;
        self.signals_mh = self.register(self.signals.base(), self.signals.len(), MR_FLAG_FORCE_SO)?;
        self.times.register = start.elapsed();
        Ok(())
    }

    /// Registers more host memory; collective. The caller deregisters it (or `closeColl` does).
    pub fn register(&self, base: *mut u8, len: usize, flags: u64) -> Result<*mut c_void, SessionError> {
        self.register_for_device(base, len, flags).map(|(mhandle, _)| mhandle)
    }

    /// The same, with the handle for device code.
    fn register_for_device(&self, base: *mut u8, len: usize, flags: u64) -> Result<(*mut c_void, u64), SessionError> {
        let (mut mhandle, mut gin_handle) = (null_mut(), null_mut());
        // SAFETY: as in bring_up; the caller's memory is registered for what it is.
        named("regMrSym", || unsafe {
            let coll = self.target.coll_comm;
            self.table.reg(coll, base.cast(), len, PTR_HOST, flags, &mut mhandle, &mut gin_handle)
        })?;
        Ok((mhandle, gin_handle as u64))
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Ranks in all.
    pub fn nranks(&self) -> u32 {
        self.nranks
    }

    /// What `init` gave.
    pub fn instance(&self) -> *mut c_void {
        self.instance
    }

    /// A put from this rank's data window to the same window of `rank`.
    pub fn put_of(&self, context: i32, rank: u32, src_off: u64, dst_off: u64, size: usize) -> Put {
        Put { context, src_off, src: self.data_mh, size, dst_off, dst: self.data_mh, rank, opt_flags: 0 }
    }

    /// A get from the data window of `rank` to this rank's.
    pub fn get_of(&self, context: i32, rank: u32, remote_off: u64, local_off: u64, size: usize) -> Get {
        Get { context, remote_off, remote: self.data_mh, size, local_off, local: self.data_mh, rank, opt_flags: 0 }
    }

    /// A strong signal that adds `value` to word `index` of the signal window.
    pub fn signal_of(&self, index: usize, value: u64) -> Signal {
        let op = nccl_plugin_api::SIGNAL_OP_ADD;
        Signal { off: 8 * index as u64, mh: self.signals_mh, value, op, strong: true }
    }

    /// Calls the progress function, if there is one.
    #[inline]
    pub fn progress(&self) -> NcclResult {
        // SAFETY: the objects are alive: teardown takes `self`.
        match unsafe { self.table.progress(&self.target) } {
            crate::plugin::MISSING => NcclResult::SUCCESS,
            code => code,
        }
    }

    /// Whether the plugin says that something failed.
    pub fn has_error(&self) -> Result<bool, CallError> {
        let mut bad = false;
        // SAFETY: as above.
        check("queryLastError", unsafe { self.table.query_last_error(self.target.ctx, &mut bad) })?;
        Ok(bad)
    }

    /// Tears down as NCCL does: deregMrSym, destroyContext, closeColl, finalize. Goes on after a failure and returns
    /// the first.
    pub fn close(mut self) -> Result<(), SessionError> {
        self.tear_down()
    }

    fn tear_down(&mut self) -> Result<(), SessionError> {
        let t = self.table.clone();
        let coll = self.target.coll_comm;
        let mut first = Ok(());
        // SAFETY: (for all of them) the object was made by this table and is taken out of the session, so it ends once.
        let mut end = |call: &'static str, object: &mut *mut c_void, f: &dyn Fn(*mut c_void) -> NcclResult| {
            let object = std::mem::replace(object, null_mut());
            if !object.is_null() {
                let result = named(call, || f(object));
                if first.is_ok() {
                    first = result;
                }
            }
        };
        // SAFETY: as said above.
        end("deregMrSym", &mut self.signals_mh, &|mh| unsafe { t.dereg(coll, mh) });
        // SAFETY: as said above.
        end("deregMrSym", &mut self.data_mh, &|mh| unsafe { t.dereg(coll, mh) });
        // SAFETY: as said above.
        end("destroyContext", &mut self.target.ctx, &|ctx| unsafe { t.destroy_context(ctx) });
        // SAFETY: as said above.
        end("closeColl", &mut self.target.coll_comm, &|coll| unsafe { t.close_coll(coll) });
        // SAFETY: as said above.
        end("closeListen", &mut self.listening, &|listening| unsafe { t.close_listen(listening) });
        // SAFETY: as said above.
        end("finalize", &mut self.instance, &|instance| unsafe { t.finalize(instance) });
        first
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // After `close` there is nothing left to end; otherwise an error is already on its way to the user.
        let _ = self.tear_down();
    }
}

/// Runs one call; a failure takes along what the plugin logged meanwhile.
fn named(call: &'static str, f: impl FnOnce() -> NcclResult) -> Result<(), SessionError> {
    let mark = log::mark();
    check(call, f()).map_err(|e| {
        let mut said: Vec<_> = log::warnings_since(mark).into_iter().map(|l| l.text).collect();
        said.dedup();
        SessionError::Call(e, said)
    })
}
