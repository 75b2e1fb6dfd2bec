//! What other hosts send to GPU memory, on its way to the engine.

use super::arrived_bytes::ArrivedBytes;
use super::Source;
use crate::memory::key::Key;
use crate::rma::op::Signal;

/// What came from another host for this rank's GPU, or behind such.
pub enum GpuMessage {
    /// Bytes for a GPU window.
    Put {
        /// Who sent them.
        source: Source,
        /// All of them.
        bytes: ArrivedBytes,
        /// The window's key.
        key: u32,
        /// Where they go.
        addr: u64,
        /// In GPU memory, behind the bytes.
        signal: Option<Signal>,
    },
    /// A signal in GPU memory, or behind bytes for it.
    Signal {
        /// Who sent it.
        source: Source,
        /// The window's key.
        key: u32,
        /// Its word.
        addr: u64,
        /// What is added.
        value: u64,
    },
}

impl GpuMessage {
    /// Joins a signal in GPU memory to a put right before it of the same sender and context, which it is to follow
    /// anyhow: one operation instead of two. `Some`: it stays by itself.
    pub fn join(&mut self, next: Self) -> Option<Self> {
        match (self, next) {
            (Self::Put { source, signal: signal @ None, .. }, Self::Signal { source: of, key, addr, value })
                if *source == of && Key(key).is_on_gpu() =>
            {
                *signal = Some(arrived_signal(key, addr, value));
                None
            }
            (_, next) => Some(next),
        }
    }
}

/// A signal that arrived: behind all that came of its sender before.
pub fn arrived_signal(key: u32, addr: u64, value: u64) -> Signal {
    Signal { remote: addr, rkey: Key(key).signalled().0, value, strong: true }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: u32 = Key::gpu(1, false).0;

    fn put(context: u32) -> GpuMessage {
        let (source, bytes) = (Source::far(3, context), ArrivedBytes::Boxed(vec![7; 8].into()));
        GpuMessage::Put { source, bytes, key: WINDOW, addr: 64, signal: None }
    }

    fn signal(context: u32, key: u32) -> GpuMessage {
        GpuMessage::Signal { source: Source::far(3, context), key, addr: 128, value: 5 }
    }

    fn joined(message: &GpuMessage) -> Option<Signal> {
        match message {
            GpuMessage::Put { signal, .. } => *signal,
            GpuMessage::Signal { .. } => None,
        }
    }

    #[test]
    fn a_signal_joins_the_put_right_before_it_and_no_other() {
        let mut first = put(1);
        assert!(first.join(signal(1, WINDOW)).is_none());
        let found = joined(&first).unwrap();
        assert_eq!((found.remote, found.rkey, found.value), (128, Key(WINDOW).signalled().0, 5));
        assert!(found.strong);
        // A second one, another context's, one in host memory, one behind a signal, and puts stay by themselves.
        assert!(first.join(signal(1, WINDOW)).is_some());
        for next in [signal(2, WINDOW), signal(1, 9), put(1)] {
            let mut first = put(1);
            assert!(first.join(next).is_some() && joined(&first).is_none());
        }
        assert!(signal(1, WINDOW).join(signal(1, WINDOW)).is_some());
    }
}
