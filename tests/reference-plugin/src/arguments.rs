//! What callers pass: handles, and places for answers.

use crate::comm::{Comm, ContextSet, Window};
use crate::inbox::Inbox;
use crate::objects::{bad, find, Object, Refusal};
use core::ffi::c_void;
use std::sync::Arc;

/// What a call answers.
pub type Outcome = Result<(), Refusal>;

/// Stores an answer.
pub fn put_out<T>(out: *mut T, value: T, name: &str) -> Outcome {
    if out.is_null() {
        return Err(bad(format!("{name} is NULL")));
    }
    // SAFETY: the caller passes NULL or room for one value.
    unsafe { out.write(value) };
    Ok(())
}

macro_rules! finder {
    ($name:ident, $variant:ident, $type:ty) => {
        pub fn $name(handle: *mut c_void) -> Result<Arc<$type>, Refusal> {
            match find(handle) {
                Some(Object::$variant(object)) => Ok(object),
                _ => Err(bad(format!(concat!(stringify!($variant), " handle {:p} is unknown"), handle))),
            }
        }
    };
}
finder!(comm, Comm, Comm);
finder!(contexts, Contexts, ContextSet);
finder!(listener, Listener, Inbox);

/// A window of the communicator that a set of contexts is of.
pub fn window(set: &ContextSet, handle: *mut c_void) -> Result<Arc<Window>, Refusal> {
    match find(handle) {
        Some(Object::Window(window)) if Arc::ptr_eq(&window.comm, &set.comm) => Ok(window),
        _ => Err(bad(format!("window handle {handle:p} is unknown"))),
    }
}
