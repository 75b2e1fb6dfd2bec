//! Reads of either kind of slots: what they bring, and where that comes to.

use super::queue::{Data, Entry, Queue, Signal, Window};
use super::{sends_read, Random};
use nccl_plugin_api::descriptor::OP_GET;

/// What an entry brings to the peer.
#[derive(Clone, Copy, Debug)]
pub struct Written {
    pub data: Data,
    /// Where it is for a read: a window, as entries name it, and the offset.
    pub handle: u64,
    pub at: u64,
}

impl Written {
    /// What a signal of its own adds is all that is ever added there.
    pub fn added(signal: &Signal, handle: u64, at: u64) -> Self {
        Self { data: Data::Value { value: signal.increment, to: signal.at, bytes: 8 }, handle, at }
    }
}

/// What a read brings, and the offset in a window for reads that it comes to.
pub struct ReadPlace {
    pub of: Written,
    pub local: u64,
    pub turned: Window,
}

impl Data {
    pub fn bytes(self) -> u64 {
        let (Self::Copy { bytes, .. } | Self::Value { bytes, .. }) = self;
        bytes
    }

    /// The same elsewhere.
    pub fn at(self, to: u64) -> Self {
        match self {
            Self::Copy { from, bytes, .. } => Self::Copy { from, to, bytes },
            Self::Value { value, bytes, .. } => Self::Value { value, to, bytes },
        }
    }
}

impl Queue {
    /// Whether an entry of it is one.
    pub fn is_read(&self, entry: &Entry) -> bool {
        match &self.pair {
            Some(_) => sends_read::is_read(entry),
            None => self.op(entry) == OP_GET,
        }
    }

    /// A window for reads, which there is from here on.
    pub fn turned(&mut self, random: &mut Random) -> &mut Window {
        let found = self.windows.iter().position(|w| w.is_some_and(|w| w.is_turned));
        let at = found.or(self.windows.iter().position(Option::is_none)).expect("one is free where none is turned");
        let number = self.number;
        self.windows[at].get_or_insert_with(|| {
            let mut made = Window::new(number, at as u64, random);
            (made.handle, made.is_turned) = (0x7f00_0000 + number, true);
            made
        })
    }

    /// What was sent last, at times.
    pub fn sent_last(&self, random: &mut Random) -> Option<Written> {
        self.written.filter(|w| w.data.bytes() <= self.most && random.below(2) == 0)
    }

    /// Where a read of that, or of what the peer has, comes to. `None`: there is no window for it, or no room.
    pub fn read_place(&mut self, sent: Option<Written>, random: &mut Random) -> Option<ReadPlace> {
        let (bytes, unit) = (self.any_bytes(3 + random.below(5), random), [16, 8, 4][random.below(3) as usize]);
        let turned = self.windows.iter_mut().flatten().find(|w| w.is_turned)?;
        let of = sent.unwrap_or_else(|| {
            let from = turned.some(bytes, unit, random);
            Written { data: Data::Copy { from, to: 0, bytes }, handle: turned.handle, at: from - turned.here }
        });
        let bytes = of.data.bytes();
        let local = if bytes % 4 == 0 { turned.room(bytes, unit.max(4), random)? } else { return None };
        Some(ReadPlace { of, local, turned: *turned })
    }
}
