//! Events: how far a stream has come, for other streams to wait for.

use crate::stream::{FakeStream, Mark, Work};
use crate::world::{current, world, INVALID_CONTEXT};
use crate::{call, enqueue, give, in_context};
use oxygin_ffi::cuda::*;
use std::ffi::c_uint;
use std::sync::{Mutex, MutexGuard, PoisonError};

struct FakeEvent {
    context: usize,
    /// What it stands for since it was last recorded.
    mark: Mutex<Option<Mark>>,
}

/// Of each event its context. Locked before the world.
static LIVE: Mutex<Vec<usize>> = Mutex::new(Vec::new());

fn live() -> MutexGuard<'static, Vec<usize>> {
    LIVE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How many events of a context there are that are not destroyed.
pub fn live_in(context: usize) -> usize {
    live().iter().filter(|&&c| c == context).count()
}

#[no_mangle]
pub unsafe extern "C" fn cuEventCreate(event: *mut CUevent, flags: c_uint) -> CUresult {
    in_context!("cuEventCreate");
    if flags != CU_EVENT_DISABLE_TIMING {
        world().violation("an event that takes times");
    }
    let made = Box::new(FakeEvent { context: current(), mark: Mutex::new(None) });
    live().push(current());
    unsafe { give(event, Box::into_raw(made).cast()) }
}

#[no_mangle]
pub unsafe extern "C" fn cuEventDestroy_v2(event: CUevent) -> CUresult {
    call!("cuEventDestroy");
    let event = unsafe { Box::from_raw(event.cast::<FakeEvent>()) };
    let mut live = live();
    match live.iter().position(|&context| context == event.context) {
        Some(i) => drop(live.swap_remove(i)),
        None => world().violation("cuEventDestroy of none"),
    }
    CUDA_SUCCESS
}

#[no_mangle]
pub unsafe extern "C" fn cuEventRecord(event: CUevent, stream: CUstream) -> CUresult {
    in_context!("cuEventRecord");
    let (event, of) = unsafe { (&*event.cast::<FakeEvent>(), &*stream.cast::<FakeStream>()) };
    if event.context != current() || of.context != current() {
        world().violation("cuEventRecord of an event or stream of another context");
    }
    *event.mark.lock().unwrap_or_else(PoisonError::into_inner) = Some(of.mark());
    CUDA_SUCCESS
}

#[no_mangle]
pub unsafe extern "C" fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint) -> CUresult {
    in_context!("cuStreamWaitEvent");
    let event = unsafe { &*event.cast::<FakeEvent>() };
    if event.context != current() || flags != 0 {
        return CUDA_ERROR_INVALID_VALUE;
    }
    let mark = event.mark.lock().unwrap_or_else(PoisonError::into_inner).clone();
    match mark {
        Some(mark) => unsafe { enqueue("cuStreamWaitEvent", stream, Work::Wait(mark)) },
        // One that was never recorded is over.
        None => CUDA_SUCCESS,
    }
}
