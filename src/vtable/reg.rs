//! Registration and its end, for all tables.

use super::guard::{guard, null, shared, store};
use crate::comm::coll::Coll;
use crate::comm::contexts::EngineKind;
use crate::comm::windows::WindowSpec;
use crate::error::{Error, Result};
use crate::memory::gpu;
use nccl_plugin_api::*;
use std::ffi::{c_int, c_void};

/// A registration by address or by DMA-BUF; the arguments as the tables have them.
#[derive(Clone, Copy)]
struct RegArgs {
    data: *mut c_void,
    size: usize,
    ptr_type: c_int,
    mr_flags: u64,
    dma_buf: Option<(c_int, u64)>,
}

fn checked(a: &RegArgs) -> Result<WindowSpec> {
    if a.data.is_null() {
        return Err(null("data"));
    }
    if a.size == 0 || (a.data as usize).checked_add(a.size).is_none() {
        return Err(Error::argument(format!(
            "size = {} at {:p}; a window has at least one byte and does not wrap around the address space",
            a.size, a.data
        )));
    }
    match a.ptr_type {
        PTR_HOST | PTR_CUDA => {}
        other => return Err(Error::argument(format!("type = {other}; memory is of type 1 (host) or 2 (CUDA)"))),
    }
    if a.mr_flags & !(MR_FLAG_FORCE_SO | MR_FLAG_SIGNALS_NEVER_RESET) != 0 {
        return Err(Error::argument(format!(
            "mrFlags = {:#x}; known flags are 1 (strict ordering) and 2 (signals that are never reset)",
            a.mr_flags
        )));
    }
    if let Some((fd, offset)) = a.dma_buf {
        if fd < 0 {
            return Err(Error::argument(format!("fd = {fd} (offset {offset}) is no descriptor of a DMA-BUF")));
        }
    }
    let strict = a.mr_flags & MR_FLAG_FORCE_SO != 0;
    let gpu = match a.ptr_type {
        PTR_CUDA => {
            let never_reset = a.mr_flags & MR_FLAG_SIGNALS_NEVER_RESET != 0;
            gpu::inspect(a.data as u64, a.size as u64, never_reset)?
        }
        _ => None,
    };
    Ok(WindowSpec { base: a.data as u64, len: a.size as u64, strict, dma_buf: a.dma_buf, gpu })
}

/// Registers and stores the handle, and what device code calls the window.
///
/// # Safety
/// The places are NULL or writable.
unsafe fn reg_into(
    call: &'static str,
    coll_comm: *mut c_void,
    args: RegArgs,
    mhandle: *mut *mut c_void,
    gin_handle: Option<*mut *mut c_void>,
) -> NcclResult {
    guard(call, || {
        let coll = shared::<Coll>(coll_comm)?;
        let window = coll.register(|| if mhandle.is_null() { Err(null("mhandle")) } else { checked(&args) })?;
        if let Some(place) = gin_handle.filter(|place| !place.is_null()) {
            let named = for_device(&coll, window).inspect_err(|_| end(&coll, window))?;
            // SAFETY: not NULL, hence writable.
            unsafe { place.write(named) };
        }
        // SAFETY: `mhandle` is not NULL, hence writable.
        unsafe { store("mhandle", mhandle, window) }
    })
}

/// Ends a registration that comes to nothing on this rank.
fn end(coll: &Coll, window: *mut c_void) {
    if let Err(error) = coll.deregister(window) {
        log::warn!("regMrSym: a window that nobody uses stays: {}", error.message());
    }
}

/// What device code of this communicator calls a window. Descriptors name it as operations do; entries of GDAKI name it
/// by its keys, which are in a record.
fn for_device(coll: &Coll, window: *mut c_void) -> Result<*mut c_void> {
    match coll.engine_kind() {
        EngineKind::GdakiSoft | EngineKind::Gdaki => coll.gdaki_handle_of(window),
        EngineKind::Own | EngineKind::Nccl => Ok(window),
    }
}

/// # Safety
/// As `GinRegFn`.
pub unsafe extern "C" fn gin_reg(
    coll_comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    ptr_type: c_int,
    mr_flags: u64,
    mhandle: *mut *mut c_void,
    gin_handle: *mut *mut c_void,
) -> NcclResult {
    let args = RegArgs { data, size, ptr_type, mr_flags, dma_buf: None };
    // SAFETY: passed on.
    unsafe { reg_into("regMrSym", coll_comm, args, mhandle, Some(gin_handle)) }
}

/// # Safety
/// As `GinRegDmaBufFn`.
#[allow(clippy::too_many_arguments)]
pub unsafe extern "C" fn gin_reg_dma_buf(
    coll_comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    ptr_type: c_int,
    offset: u64,
    fd: c_int,
    mr_flags: u64,
    mhandle: *mut *mut c_void,
    gin_handle: *mut *mut c_void,
) -> NcclResult {
    let args = RegArgs { data, size, ptr_type, mr_flags, dma_buf: Some((fd, offset)) };
    // SAFETY: passed on.
    unsafe { reg_into("regMrSymDmaBuf", coll_comm, args, mhandle, Some(gin_handle)) }
}

/// # Safety
/// As `RmaRegFn`.
pub unsafe extern "C" fn rma_reg(
    coll_comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    ptr_type: c_int,
    mr_flags: u64,
    mhandle: *mut *mut c_void,
) -> NcclResult {
    let args = RegArgs { data, size, ptr_type, mr_flags, dma_buf: None };
    // SAFETY: passed on.
    unsafe { reg_into("regMrSym", coll_comm, args, mhandle, None) }
}

/// # Safety
/// As `RmaRegDmaBufFn`.
#[allow(clippy::too_many_arguments)]
pub unsafe extern "C" fn rma_reg_dma_buf(
    coll_comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    ptr_type: c_int,
    offset: u64,
    fd: c_int,
    mr_flags: u64,
    mhandle: *mut *mut c_void,
) -> NcclResult {
    let args = RegArgs { data, size, ptr_type, mr_flags, dma_buf: Some((fd, offset)) };
    // SAFETY: passed on.
    unsafe { reg_into("regMrSymDmaBuf", coll_comm, args, mhandle, None) }
}

/// # Safety
/// As `DeregFn`.
pub unsafe extern "C" fn dereg(coll_comm: *mut c_void, mhandle: *mut c_void) -> NcclResult {
    guard("deregMrSym", || {
        if coll_comm.is_null() && mhandle.is_null() {
            // NCCL ends its windows so where connect has failed, which has said why: there is nothing to end.
            log::debug!("deregMrSym: neither a communicator nor a window was made");
            return Ok(());
        }
        let coll = shared::<Coll>(coll_comm)?;
        if mhandle.is_null() {
            return Err(null("mhandle"));
        }
        coll.deregister(mhandle)
    })
}
