//! Which regions of code an input reached, from the compiler's coverage counters.

/// What has been reached so far. Without `--cfg guided` nothing is ever new, and mutation goes on from the seeds alone.
#[derive(Default)]
pub struct Coverage {
    reached: Vec<bool>,
}

#[cfg(guided)]
fn counters() -> &'static [std::sync::atomic::AtomicU64] {
    use std::sync::atomic::AtomicU64;
    extern "C" {
        fn __llvm_profile_begin_counters() -> *const AtomicU64;
        fn __llvm_profile_end_counters() -> *const AtomicU64;
    }
    // SAFETY: both come from the compiler's profiling runtime and delimit a section of 64-bit counters that lives as
    // long as the program; the program adds to them without atomics, from this thread.
    unsafe {
        let (begin, end) = (__llvm_profile_begin_counters(), __llvm_profile_end_counters());
        std::slice::from_raw_parts(begin, end.offset_from(begin) as usize)
    }
}

#[cfg(not(guided))]
fn counters() -> &'static [std::sync::atomic::AtomicU64] {
    &[]
}

impl Coverage {
    /// Before an input.
    pub fn start(&mut self) {
        use std::sync::atomic::Ordering::Relaxed;
        counters().iter().for_each(|counter| counter.store(0, Relaxed));
    }

    /// Whether the input since [`Coverage::start`] reached something for the first time.
    pub fn is_new(&mut self) -> bool {
        use std::sync::atomic::Ordering::Relaxed;
        let counters = counters();
        self.reached.resize(counters.len(), false);
        let mut new = false;
        for (counter, reached) in counters.iter().zip(&mut self.reached) {
            if counter.load(Relaxed) != 0 && !*reached {
                *reached = true;
                new = true;
            }
        }
        new
    }

    /// Regions reached by any input.
    pub fn reached(&self) -> usize {
        self.reached.iter().filter(|reached| **reached).count()
    }
}
