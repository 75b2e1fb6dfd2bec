//! Tests of one program that must not run side by side: what they set, count or collect is the process's.

use super::logged;
use std::sync::{Mutex, MutexGuard, PoisonError};

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Held by the test whose turn it is.
pub type Turn = MutexGuard<'static, ()>;

/// Waits for this test's turn. What the library logs can be collected from here on.
pub fn take() -> Turn {
    let turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    logged::install();
    turn
}
