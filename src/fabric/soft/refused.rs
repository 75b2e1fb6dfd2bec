//! Contexts of a sender of which an operation was refused: what else comes of them is dropped.

use std::collections::VecDeque;

/// Refused contexts of one sender that are kept: their numbers are never used twice, and older ones are long gone.
const REFUSED: usize = 4096;

/// Contexts of one sender of which an operation was refused.
#[derive(Default)]
pub struct Refused(VecDeque<u32>);

impl Refused {
    /// Whether what comes of a context is dropped.
    #[inline(always)]
    pub fn has(&self, context: u32) -> bool {
        !self.0.is_empty() && self.0.contains(&context)
    }

    /// One more. `false`: it was there.
    #[cold]
    pub fn add(&mut self, context: u32) -> bool {
        if self.has(context) {
            return false;
        }
        if self.0.len() >= REFUSED {
            self.0.pop_front();
        }
        self.0.push_back(context);
        true
    }
}
