//! Which regions of code an input reached, from the compiler's coverage counters.
//!
//! There are thousands of counters, and this is done for each input, of which most take less than a microsecond: so
//! counters are cleared, copied and compared by the C library's functions, which take many at a time.

use std::ops::Range;

/// What has been reached so far. Without `--cfg guided` nothing is ever new, and mutation goes on from the seeds alone.
pub struct Coverage {
    /// Where no input has been yet.
    unreached: Vec<Range<usize>>,
    /// The counters after the last input.
    last: Vec<u64>,
    zeros: Vec<u64>,
}

/// The first counter, and how many there are.
#[cfg(guided)]
fn counters() -> (*mut u64, usize) {
    extern "C" {
        fn __llvm_profile_begin_counters() -> *mut u64;
        fn __llvm_profile_end_counters() -> *mut u64;
    }
    // SAFETY: both come from the compiler's profiling runtime and delimit a section of 64-bit counters that lives as
    // long as the program.
    unsafe {
        let (begin, end) = (__llvm_profile_begin_counters(), __llvm_profile_end_counters());
        (begin, end.offset_from(begin) as usize)
    }
}

#[cfg(not(guided))]
fn counters() -> (*mut u64, usize) {
    (std::ptr::NonNull::dangling().as_ptr(), 0)
}

impl Coverage {
    /// Nothing has been reached.
    pub fn new() -> Self {
        let (_, n) = counters();
        let whole = 0..n;
        Self { unreached: vec![whole], last: vec![0; n], zeros: vec![0; n] }
    }

    /// Before an input.
    pub fn start(&mut self) {
        let (begin, n) = counters();
        // SAFETY: all counters; the program adds to them from this thread, which is here.
        unsafe { begin.write_bytes(0, n) };
    }

    /// Whether the input since [`Coverage::start`] reached something for the first time.
    pub fn is_new(&mut self) -> bool {
        let (begin, n) = counters();
        // SAFETY: all counters, into as many words of this struct's own; nobody adds meanwhile, as above.
        unsafe { begin.copy_to_nonoverlapping(self.last.as_mut_ptr(), n) };
        let (last, zeros) = (&self.last, &self.zeros);
        if self.unreached.iter().all(|run| last[run.clone()] == zeros[..run.len()]) {
            return false;
        }
        let runs = std::mem::take(&mut self.unreached);
        for run in runs {
            let mut from = run.start;
            for at in run.clone().filter(|at| last[*at] != 0).chain([run.end]) {
                if from < at {
                    self.unreached.push(from..at);
                }
                from = at + 1;
            }
        }
        true
    }

    /// Regions reached by any input.
    pub fn reached(&self) -> usize {
        self.zeros.len() - self.unreached.iter().map(Range::len).sum::<usize>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As it is without counters: built by the test runner.
    #[test]
    fn without_counters_nothing_is_new() {
        let mut coverage = Coverage::new();
        coverage.start();
        assert!(!coverage.is_new());
        assert_eq!(coverage.reached(), 0);
    }
}
