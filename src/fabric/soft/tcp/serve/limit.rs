//! How many signals of a peer wait, here for what they follow or in the engine: with so many, no more are read.

use super::*;

/// Signals of one peer that wait for what they follow, of all its contexts, above which the express connection is not
/// read: each takes some 120 bytes. What they wait for comes on other connections.
pub(super) const HELD: usize = 1 << 14;

impl Lanes<'_> {
    /// Whether so many signals wait that no more are taken. If so, who brings what they wait for has the connection
    /// looked at again.
    pub(super) fn is_choked(&self) -> bool {
        let Serving { held, orders, choked, .. } = self.serving;
        if held.count() < HELD {
            return false;
        }
        let _unchanged = orders.lock();
        let is_full = held.count() >= HELD;
        choked.store(is_full, Ordering::Relaxed);
        is_full
    }

    /// Whether a signal that has come would go to the engine, which has so much to do that no more is taken. Who polls
    /// that one has the connection looked at again.
    #[inline]
    pub(super) fn is_full_for(&self, context: u32, bell: Option<Bell>) -> bool {
        let goes_there =
            |bell: Bell| Key(bell.rkey).is_on_gpu() || self.gpu.has_before(Source::far(self.sender, context));
        bell.is_some_and(|bell| self.gpu.is_full() && goes_there(bell))
    }

    /// Signals were let go; the caller has `orders`.
    pub(super) fn relieve(&self) {
        let Serving { held, choked, relieved, .. } = self.serving;
        if choked.load(Ordering::Relaxed) && held.count() < HELD / 2 {
            choked.store(false, Ordering::Relaxed);
            relieved.store(true, Ordering::Release);
        }
    }
}
