//! From the arguments of a table call to a checked operation that has been started: the way of everything that the
//! short ways ([`fast`](super::fast)) do not take.

use super::fast::requests;
use super::guard::object;
use crate::comm::coll::Coll;
use crate::comm::contexts::Contexts;
use crate::error::Result;
use crate::rma::args::{GetArgs, PutArgs};
use crate::rma::check::{self, Find, Live};
use crate::rma::op::Op;
use crate::rma::refusal::{self, Refusal};
use crate::rma::request::{Request, RequestForm};
use crate::rma::seq::Seq;
use std::ffi::c_void;

/// Checks and starts a put.
///
/// # Safety
/// As for [`crate::sys::handles::get`], and the source stays readable until the request is done.
#[inline(always)]
pub unsafe fn put(set: &Contexts, a: &PutArgs) -> Result<*mut c_void> {
    if set.has(a.context, a.rank) {
        // SAFETY: passed on; the rank was checked.
        if let Some(put) = unsafe { check::put(&Live(set.coll), a) } {
            // SAFETY: context and rank were checked.
            let seq = unsafe { set.start(a.context as u32, a.rank, &Op::Put(put)) }?;
            return Ok(set.request(a.context as u32, a.rank, seq));
        }
    }
    Err(refusal::put(&set.target(), a).into())
}

/// Checks and starts a get.
///
/// # Safety
/// As for [`crate::sys::handles::get`], and the destination stays writable until the request is done.
#[inline(always)]
pub unsafe fn get(set: &Contexts, a: &GetArgs) -> Result<*mut c_void> {
    if set.has(a.context, a.rank) {
        // SAFETY: passed on; the rank was checked.
        if let Some(get) = unsafe { check::get(&Live(set.coll), a) } {
            // SAFETY: context and rank were checked.
            let seq = unsafe { set.start(a.context as u32, a.rank, &Op::Get(get)) }?;
            return Ok(set.request(a.context as u32, a.rank, seq));
        }
    }
    Err(refusal::get(&set.target(), a).into())
}

/// Checks and starts a flush; NULL when there is nothing to wait for.
///
/// # Safety
/// As for [`crate::sys::handles::get`].
pub unsafe fn flush(set: &Contexts, context: i32, mhandle: *mut c_void, rank: u32) -> Result<*mut c_void> {
    let target = set.target();
    target.check(context, rank)?;
    // SAFETY: passed on.
    let into = match unsafe { Live(set.coll).local(mhandle) } {
        Some(window) => Some(window.lkey),
        // NCCL's proxy names the window of the context's signals, and there is none where the program asked for none.
        None if mhandle.is_null() => None,
        None => Some(target.window("mhandle", mhandle)?.lkey()),
    };
    let seq = set.flush(context as u32, rank, into)?;
    Ok(seq.map_or(std::ptr::null_mut(), |seq| set.request(context as u32, rank, seq)))
}

/// Answers `test`.
///
/// # Safety
/// As for [`crate::sys::handles::get`].
#[inline(always)]
pub unsafe fn test(coll_comm: *mut c_void, request: *mut c_void) -> Result<bool> {
    // SAFETY: passed on.
    let coll = unsafe { object::<Coll>(coll_comm)? };
    let form = RequestForm::of(coll.world.nranks);
    let named = match requests::find(coll_comm, request) {
        Some(found) => Request { seq: Seq(request as u64 as u32), ..form.decode(found.encoded() as *mut c_void) },
        None => form.decode(request),
    };
    // SAFETY: the set was made by this communicator; it is not destroyed during a call with it (handles module docs).
    if let Some(set) = unsafe { coll.set(named.set) } {
        if set.has(named.context as i32, named.peer) {
            // SAFETY: the context was checked.
            return unsafe { set.test(named) };
        }
        set.check_open()?;
    }
    Err(Refusal::NoRequest(request as usize).into())
}
