//! Which argument of a refused operation is wrong, with its value and what would be right. The fast path only answers
//! "all good"; when it is not, these cold functions go through the same arguments again.

use super::args::{GetArgs, PutArgs};
use super::call::inside;
use super::contexts::Contexts;
use crate::error::{Error, Result};
use crate::handles;
use crate::memory::window::Window;
use nccl_plugin_api::{SIGNAL_OP_ADD, SIGNAL_OP_INC};
use std::ffi::c_void;

/// A request that names nothing.
#[cold]
pub fn request(request: *mut c_void) -> Error {
    Error::argument(format!(
        "request = {request:p} is not one that this communicator returned, or its context is destroyed; pass what \
         iput, iputSignal, iget or iflush stored, as long as its context lives"
    ))
}

/// Whether the set is open and has such a context, and the communicator such a rank.
pub fn check_target(set: &Contexts, context: i32, rank: u32) -> Result<()> {
    set.check_open()?;
    if context as u32 >= set.count() {
        return Err(Error::argument(format!(
            "context = {context}, but this set has contexts 0 to {}",
            set.count().saturating_sub(1)
        )));
    }
    if rank >= set.nranks {
        return Err(Error::argument(format!("rank = {rank}, but the communicator has ranks 0 to {}", set.nranks - 1)));
    }
    Ok(())
}

/// A window of the set's communicator.
///
/// # Safety
/// As for [`handles::get`].
pub unsafe fn check_window<'a>(set: &Contexts, name: &str, handle: *mut c_void) -> Result<&'a Window> {
    if handle.is_null() {
        return Err(Error::argument(format!("{name} is NULL; register the memory with regMrSym and pass its mhandle")));
    }
    // SAFETY: passed on.
    let w = unsafe { handles::get::<Window>(handle) }.ok_or_else(|| {
        Error::argument(format!(
            "{name} = {handle:p} is no memory handle, or was deregistered; pass a live mhandle from regMrSym"
        ))
    })?;
    if w.coll != set.coll {
        return Err(Error::argument(format!(
            "{name} = {handle:p} was registered with another communicator; register the memory with this one"
        )));
    }
    Ok(w)
}

fn check_range(what: &str, offset: u64, size: u64, len: u64, of: &str) -> Result<()> {
    if inside(offset, size, len) {
        return Ok(());
    }
    let end = offset.checked_add(size).map_or("more than 2^64".to_string(), |e| e.to_string());
    Err(Error::argument(format!(
        "{what} = {offset} with size {size} ends at byte {end}, past {of}, which has {len} bytes; stay inside the \
         registered window"
    )))
}

/// What is wrong with a put.
///
/// # Safety
/// As for [`handles::get`].
#[cold]
#[inline(never)]
pub unsafe fn put(set: &Contexts, a: &PutArgs) -> Error {
    let find = || -> Result<()> {
        check_target(set, a.context, a.rank)?;
        let rank = a.rank as usize;
        if let Some(s) = &a.signal {
            if s.op != SIGNAL_OP_INC && s.op != SIGNAL_OP_ADD {
                return Err(Error::argument(format!("signalOp = {}, but only 1 (increment) and 2 (add) exist", s.op)));
            }
            // SAFETY: passed on.
            let w = unsafe { check_window(set, "signalMhandle", s.place.window)? };
            let r = &w.remote[rank];
            check_range("signalOff", s.place.offset, 8, r.len, &format!("the signal window of rank {}", a.rank))?;
            if r.base.wrapping_add(s.place.offset) & 7 != 0 {
                return Err(Error::argument(format!(
                    "signalOff = {} makes the signal's address no multiple of 8; signals are 8-byte aligned words",
                    s.place.offset
                )));
            }
            if a.size == 0 {
                return Ok(());
            }
        }
        // SAFETY: passed on.
        let (src, dst) =
            unsafe { (check_window(set, "srcMhandle", a.src.window)?, check_window(set, "dstMhandle", a.dst.window)?) };
        check_range("srcOff", a.src.offset, a.size as u64, src.len, "the source window")?;
        let r = &dst.remote[rank];
        check_range("dstOff", a.dst.offset, a.size as u64, r.len, &format!("the window of rank {}", a.rank))
    };
    find().err().unwrap_or_else(|| Error::internal("a put was refused, but all its arguments look right"))
}

/// What is wrong with a get.
///
/// # Safety
/// As for [`handles::get`].
#[cold]
#[inline(never)]
pub unsafe fn get(set: &Contexts, a: &GetArgs) -> Error {
    let find = || -> Result<()> {
        check_target(set, a.context, a.rank)?;
        // SAFETY: passed on.
        let (remote, local) = unsafe {
            (check_window(set, "remoteMhandle", a.remote.window)?, check_window(set, "localMhandle", a.local.window)?)
        };
        let r = &remote.remote[a.rank as usize];
        check_range("remoteOff", a.remote.offset, a.size as u64, r.len, &format!("the window of rank {}", a.rank))?;
        check_range("localOff", a.local.offset, a.size as u64, local.len, "the local window")
    };
    find().err().unwrap_or_else(|| Error::internal("a get was refused, but all its arguments look right"))
}
