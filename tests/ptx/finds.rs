//! Whether a fault in a kernel's code is found, without a word.

use std::cell::Cell;
use std::panic::{catch_unwind, set_hook, take_hook, UnwindSafe};
use std::sync::Once;

thread_local! {
    /// What this thread finds is told to nobody.
    static IS_QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Whether a test finds something. To report that, with a backtrace, would take longer than to find it, many times.
pub fn finds(test: impl FnOnce() + UnwindSafe) -> bool {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let report = take_hook();
        set_hook(Box::new(move |panic| {
            if !IS_QUIET.get() {
                report(panic);
            }
        }));
    });
    IS_QUIET.set(true);
    let found = catch_unwind(test).is_err();
    IS_QUIET.set(false);
    found
}
