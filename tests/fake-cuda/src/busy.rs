//! An application that is in a call which waits for its kernels (cudaFree, loading a module, a synchronous copy): the
//! driver holds a lock of the context all the while, and whoever calls in that context, or about memory that belongs
//! to it, waits.
//!
//! A real driver lets some calls pass (docs/gpu/private-context.md has the table); this one none, since what passes
//! there today need not tomorrow.

use crate::world::{current, is_primary};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, Once, PoisonError};
use std::time::Duration;

/// Contexts whose lock is held.
static HELD: Mutex<Vec<usize>> = Mutex::new(Vec::new());
static CHANGED: Condvar = Condvar::new();
/// Calls that waited, of threads that are not for it.
static WAITS: AtomicU64 = AtomicU64::new(0);
static ALWAYS: Once = Once::new();

/// `FAKE_CUDA_BUSY`: the applications of all GPUs are in such calls all the time, with short breaks.
const ENV: &str = "FAKE_CUDA_BUSY";
const CALL: Duration = Duration::from_millis(2);
const BREAK: Duration = Duration::from_micros(300);

fn held() -> MutexGuard<'static, Vec<usize>> {
    HELD.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The application's call begins or returns.
pub fn set(context: usize, on: bool) {
    let mut held = held();
    if on {
        held.push(context);
    } else if let Some(i) = held.iter().position(|&c| c == context) {
        held.swap_remove(i);
    }
    CHANGED.notify_all();
}

/// Calls that waited so far, but for those of threads that may.
pub fn waits() -> u64 {
    WAITS.load(Ordering::SeqCst)
}

/// Threads with such names make the library's calls in the application's context, and nobody waits for them.
fn may_wait() -> bool {
    let mut name = [0u8; 16];
    // SAFETY: a place of the size that the call asks for.
    unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    let end = name.iter().position(|&b| b == 0).unwrap_or(name.len());
    name[..end].starts_with(b"oxygin-") && name[..end].ends_with(b"-gpu")
}

/// A call in a context, or about memory of one, waits for the application.
pub fn enter(context: usize) {
    ALWAYS.call_once(|| {
        if std::env::var_os(ENV).is_some() {
            std::thread::spawn(always);
        }
    });
    if !is_primary(context) {
        return;
    }
    let mut held = held();
    if !held.contains(&context) {
        return;
    }
    if !may_wait() {
        WAITS.fetch_add(1, Ordering::SeqCst);
    }
    while held.contains(&context) {
        held = CHANGED.wait(held).unwrap_or_else(PoisonError::into_inner);
    }
}

/// The same for the current context.
pub fn enter_current() {
    enter(current());
}

fn always() {
    let contexts: Vec<usize> = (0..crate::devices::COUNT).map(|d| crate::world::context_of(d) as usize).collect();
    loop {
        contexts.iter().for_each(|&c| set(c, true));
        std::thread::sleep(CALL);
        contexts.iter().for_each(|&c| set(c, false));
        std::thread::sleep(BREAK);
    }
}
