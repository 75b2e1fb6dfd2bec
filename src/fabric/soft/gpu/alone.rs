//! Being the only one who adds to this rank's signals: what the stream needs, which stores sums.

use super::windows::Windows;
use crate::fabric::soft::gate::Gate;
use std::sync::Arc;

/// The engine's hold on its rank's gate.
pub struct Alone {
    gate: Arc<Gate>,
    /// The engine has closed it.
    is_closed: bool,
    /// Entries when the engine was alone last.
    seen: u64,
}

impl Alone {
    /// The gate is open.
    pub fn new(gate: Arc<Gate>) -> Self {
        Self { gate, is_closed: false, seen: 0 }
    }

    /// Whether kernels of others may add to signals now, so that the copy kernel, which adds as they do, is the better
    /// way for one.
    pub fn has_visitors(&self) -> bool {
        !self.is_closed && self.gate.has_visitors()
    }

    /// Whether nobody else adds to signals until [`Alone::let_in`]; closes the gate for that. What others have added
    /// since the last time the engine does not know.
    #[inline]
    pub fn is_alone(&mut self, windows: &mut Windows) -> bool {
        if !self.is_closed {
            self.is_closed = true;
            self.gate.close();
        }
        if !self.gate.is_empty() {
            return false;
        }
        let entries = self.gate.entries();
        if entries != self.seen {
            self.seen = entries;
            windows.forget_sums();
        }
        true
    }

    /// Nothing of the engine's stores sums now.
    pub fn let_in(&mut self) {
        if std::mem::take(&mut self.is_closed) {
            self.gate.open();
        }
    }
}
