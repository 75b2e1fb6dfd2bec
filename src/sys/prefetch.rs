//! Bringing memory nearer before it is read.

/// Begins to bring the cache line at `at` nearer to the processor, where that can be asked for. What a GPU or another
/// processor has written lies far, and several such reads take hardly longer than one.
#[inline(always)]
pub fn prefetch<T>(at: &T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_mm_prefetch, _MM_HINT_T0};
        // SAFETY: a prefetch does nothing but what a load may do ahead, at an address that there is.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(at).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}
