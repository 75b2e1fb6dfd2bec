//! What has arrived on a connection and is not applied yet, told apart from what comes later.

use super::*;

/// Bytes of one connection that are read at most for what is marked. They are more than both kernels hold of a
/// connection as they come (`tcp_rmem` and `tcp_wmem`: 6 and 4 MiB), and few enough that a peer which never pauses
/// holds nobody up.
const MOST: u64 = 16 << 20;

/// Up to where a connection has to be read, then up to which put what it brought has to be in place.
#[derive(Clone, Copy)]
pub enum Arrived {
    /// Up to this many bytes, or until nothing is there.
    Read { most: u64 },
    /// Until so many have left those on their way to GPU memory.
    Stored { until: u64 },
}

impl Inbound {
    /// Marks what is here by now.
    pub fn mark(&self) -> Arrived {
        Arrived::Read { most: self.received + MOST }
    }

    /// Whether what `mark` stands for is not applied yet. `moved`: the turn that just ended moved something.
    pub fn is_before(&self, mark: &mut Arrived, moved: bool) -> bool {
        if let Arrived::Read { most } = *mark {
            // Who does not take its answers is not waited for.
            let is_stuck = self.fin || self.is_backlogged() && !moved;
            let is_read = self.received >= most || sock::unread(&self.fd).is_none_or(|n| n == 0);
            if !is_stuck && (self.starved || !is_read) {
                return true;
            }
            *mark = Arrived::Stored { until: self.stored + self.storing.len() as u64 };
        }
        matches!(*mark, Arrived::Stored { until } if self.stored < until)
    }

    /// Bytes that wait in its socket.
    #[cfg(test)]
    pub fn unread(&self) -> usize {
        sock::unread(&self.fd).unwrap_or(0)
    }
}
