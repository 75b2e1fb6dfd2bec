//! Between C and Rust: no panic crosses, every error becomes a code and one log line.

use crate::error::{Error, Result};
use crate::sys::handles::{self, Kind, Object};
use crate::telemetry::panic::text;
use nccl_plugin_api::NcclResult;
use std::any::Any;
use std::ffi::c_void;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::Arc;

/// Runs the body of a table function. On the good path this costs nothing: unwinding is table-driven.
#[inline(always)]
pub fn guard(call: &'static str, body: impl FnOnce() -> Result<()>) -> NcclResult {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => NcclResult::SUCCESS,
        Ok(Err(error)) => report(call, &error),
        Err(panic) => caught(call, &*panic),
    }
}

#[cold]
#[inline(never)]
fn report(call: &'static str, error: &Error) -> NcclResult {
    if !error.is_logged() {
        // The logger is foreign code: a panic on the way to it must not cross either.
        let _ = catch_unwind(|| match error.message().strip_prefix(call) {
            // A collective step's error says so itself, on every rank alike.
            Some(rest) if rest.starts_with(": ") => log::warn!("{error}"),
            _ => log::warn!("{call}: {error}"),
        });
    }
    error.code()
}

#[cold]
#[inline(never)]
fn caught(call: &'static str, panic: &(dyn Any + Send)) -> NcclResult {
    let what = text(panic);
    let _ = catch_unwind(|| log::warn!("{call}: a fault inside oxygin: {what}; please report it"));
    NcclResult::INTERNAL_ERROR
}

/// Stores to a pointer that came from the caller.
///
/// # Safety
/// A non-NULL `to` is writable and aligned.
#[inline(always)]
pub unsafe fn store<T>(name: &str, to: *mut T, value: T) -> Result<()> {
    if to.is_null() {
        return Err(null(name));
    }
    // SAFETY: not NULL, hence writable (caller).
    unsafe { to.write(value) };
    Ok(())
}

/// The error for a NULL that may not be.
#[cold]
#[inline(never)]
pub fn null(name: &str) -> Error {
    Error::argument(format!("{name} is NULL; pass a valid pointer"))
}

/// The error for a handle that stands for nothing.
#[cold]
#[inline(never)]
pub fn dead(kind: Kind, handle: *mut c_void) -> Error {
    match kind {
        // NCCL goes on with NULL where connect has failed: that is the error to look for.
        Kind::Coll if handle.is_null() => return Error::argument(
            "collComm is NULL: connect has failed before, with its error further up in the log, or was never called",
        ),
        _ if handle.is_null() => return null(kind.noun()),
        _ => {}
    }
    if let Some(maker) = handles::maker(handle) {
        return Error::usage(format!(
            "this process was forked from {maker}, which made the {}: only that process may use or end it, and goes on \
             with it; make no such calls here, or start a program of its own",
            kind.noun()
        ));
    }
    Error::argument(format!(
        "{handle:p} is no live {}: it never came from this plugin, or was closed before; pass the live one",
        kind.noun()
    ))
}

/// The object behind a handle, or the error that says what is wrong with the handle.
///
/// # Safety
/// As for [`handles::get`].
#[inline(always)]
pub unsafe fn object<'a, T: Object>(handle: *mut c_void) -> Result<&'a T> {
    // SAFETY: passed on.
    unsafe { handles::get::<T>(handle) }.ok_or_else(|| dead(T::KIND, handle))
}

/// A reference to the object behind a handle, for calls that only the process may make that made it: those that set up
/// and end.
pub fn shared<T: Object>(handle: *mut c_void) -> Result<Arc<T>> {
    handles::clone::<T>(handle).ok_or_else(|| dead(T::KIND, handle))
}
