//! What the C side holds: numbers, never pointers, so that a stale or foreign one is only unknown.

use crate::comm::{Comm, ContextSet, Window};
use crate::inbox::Inbox;
use crate::outbox::Request;
use core::ffi::{c_int, c_void};
use nccl_plugin_api::{DebugLogger, NcclResult, LOG_WARN, SUBSYS_NET};
use std::collections::HashMap;
use std::ffi::CString;
use std::sync::{Arc, Mutex, OnceLock};

use crate::defect::{self, Defect};

/// Anything that a table function returns through a `void **`.
#[derive(Clone)]
pub enum Object {
    /// Of `init`.
    Plugin,
    /// Of `listen`.
    Listener(Arc<Inbox>),
    /// Of `connect`.
    Comm(Arc<Comm>),
    /// Of `createContext`.
    Contexts(Arc<ContextSet>),
    /// Of `regMrSym`.
    Window(Arc<Window>),
    /// Of `iput` and the like.
    Request(Arc<Request>),
}

#[derive(Default)]
struct State {
    objects: HashMap<usize, Object>,
    /// Handles are never used twice.
    issued: usize,
    logger: Option<DebugLogger>,
}

fn state() -> &'static Mutex<State> {
    static STATE: OnceLock<Mutex<State>> = OnceLock::new();
    STATE.get_or_init(Mutex::default)
}

/// Why a call did not do what it says.
pub struct Refusal(pub NcclResult, pub String);

/// Shorthand for the commonest refusal.
pub fn bad(message: impl Into<String>) -> Refusal {
    Refusal(NcclResult::INVALID_ARGUMENT, message.into())
}

/// Gives `object` a handle.
pub fn issue(object: Object) -> *mut c_void {
    let mut state = state().lock().unwrap();
    state.issued += 1;
    // Odd, so that it can be no pointer to anything aligned.
    let handle = 0x1000_0001 + state.issued * 16;
    state.objects.insert(handle, object);
    handle as *mut c_void
}

/// The object behind a handle.
pub fn find(handle: *mut c_void) -> Option<Object> {
    state().lock().unwrap().objects.get(&(handle as usize)).cloned()
}

/// Takes the object behind a handle away.
pub fn retire(handle: *mut c_void) -> Option<Object> {
    let taken = state().lock().unwrap().objects.remove(&(handle as usize));
    taken
}

/// Takes everything away; for `finalize` of the last `init`.
pub fn retire_all() -> Vec<Object> {
    state().lock().unwrap().objects.drain().map(|(_, object)| object).collect()
}

/// How many `init` are open.
pub fn plugins() -> usize {
    state().lock().unwrap().objects.values().filter(|o| matches!(o, Object::Plugin)).count()
}

/// Keeps NCCL's logger.
pub fn set_logger(logger: Option<DebugLogger>) {
    state().lock().unwrap().logger = logger;
}

/// Turns a refusal into its code and one log line.
pub fn answer(call: &str, result: Result<(), Refusal>) -> NcclResult {
    let Err(Refusal(code, message)) = result else { return NcclResult::SUCCESS };
    let logger = state().lock().unwrap().logger;
    let lines: c_int = match () {
        () if defect::on(Defect::SilentRefusal) => 0,
        () if defect::on(Defect::NoisyRefusal) => 2,
        () => 1,
    };
    if let (Some(log), Ok(line)) = (logger, CString::new(format!("{call}: {message}"))) {
        for _ in 0..lines {
            // SAFETY: the logger is printf-like; the format takes one C string.
            unsafe { log(LOG_WARN, SUBSYS_NET, c"reference".as_ptr(), 0, c"%s".as_ptr(), line.as_ptr()) };
        }
    }
    code
}
