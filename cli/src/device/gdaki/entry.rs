//! The entries that device code writes, byte by byte as DOCA's device functions build them
//! (`doca_gpunetio_dev_verbs_qp.cuh`), and any other that somebody might.

/// Does nothing.
pub const NOP: u8 = 0x00;
/// RDMA write.
pub const WRITE: u8 = 0x08;
/// Waits for a completion entry of another queue.
pub const WAIT: u8 = 0x0f;
/// RDMA read.
pub const READ: u8 = 0x10;
/// Fetch and add.
pub const FETCH_ADD: u8 = 0x12;
/// Masked compare and swap.
pub const MASKED_SWAP: u8 = 0x14;
/// Masked fetch and add.
pub const MASKED_ADD: u8 = 0x15;
/// Makes sure that what was read is visible.
pub const DUMP: u8 = 0x23;
/// The most bytes that an entry carries itself.
pub const MOST_INLINE: usize = 28;

/// A place in a window: its key, and bytes from its start.
pub type Remote = (u32, u64);

/// The bytes of an entry, segment by segment.
#[derive(Clone)]
pub struct Raw {
    /// All of them; those behind the last segment are not written.
    pub bytes: [u8; 64],
    pub(super) segments: usize,
    /// Bits that device code leaves as it found them, by word.
    unused: [u64; 8],
}

impl Raw {
    /// A control segment: signalled, no fence.
    pub fn new(opcode: u8, modifier: u8) -> Self {
        let mut raw = Self { bytes: [0; 64], segments: 1, unused: [0; 8] };
        raw.bytes[0] = modifier;
        raw.bytes[3] = opcode;
        raw.bytes[11] = 2 << 2;
        // `imm`.
        raw.unused[1] = 0xffff_ffff << 32;
        raw
    }

    /// With a further segment.
    pub fn with(mut self, segment: [u8; 16]) -> Self {
        let at = 16 * self.segments;
        self.bytes[at..at + 16].copy_from_slice(&segment);
        self.segments += 1;
        self
    }

    /// With a place at the peer.
    pub fn remote(mut self, key: u32, address: u64) -> Self {
        let mut segment = [0; 16];
        segment[..8].copy_from_slice(&address.to_be_bytes());
        segment[8..12].copy_from_slice(&key.to_be_bytes());
        self.unused[2 * self.segments + 1] = 0xffff_ffff << 32;
        self.with(segment)
    }

    /// With bytes here.
    pub fn data(self, key: u32, address: u64, len: u32) -> Self {
        let mut segment = [0; 16];
        segment[..4].copy_from_slice(&len.to_be_bytes());
        segment[4..8].copy_from_slice(&key.to_be_bytes());
        segment[8..].copy_from_slice(&address.to_be_bytes());
        self.with(segment)
    }

    /// With two operands of 8 bytes.
    pub fn two(self, a: u64, b: u64) -> Self {
        self.four([(a >> 32) as u32, a as u32, (b >> 32) as u32, b as u32])
    }

    /// With four words.
    pub fn four(self, words: [u32; 4]) -> Self {
        let mut segment = [0; 16];
        segment.chunks_exact_mut(4).zip(words).for_each(|(to, word)| to.copy_from_slice(&word.to_be_bytes()));
        self.with(segment)
    }

    /// With 1 to [`MOST_INLINE`] bytes inside, behind a remote segment.
    pub fn inline(mut self, value: &[u8]) -> Self {
        let n = value.len();
        self.bytes[32..36].copy_from_slice(&(n as u32 | 1 << 31).to_be_bytes());
        self.bytes[36..36 + n].copy_from_slice(value);
        self.segments = if n > 12 { 4 } else { 3 };
        for at in 36 + n..16 * self.segments {
            self.unused[at / 8] |= 0xff << (8 * (at % 8));
        }
        self
    }

    /// Behind what was fetched before.
    pub fn fenced(mut self) -> Self {
        self.bytes[11] |= 2 << 5;
        self
    }

    /// For a slot of a queue pair.
    pub(super) fn addressed(&self, index: u64, queue: u32) -> Self {
        let mut raw = self.clone();
        raw.bytes[1..3].copy_from_slice(&(index as u16).to_be_bytes());
        raw.bytes[4..8].copy_from_slice(&(queue << 8 | self.segments as u32).to_be_bytes());
        raw
    }

    /// What is written, by word.
    pub(super) fn words(&self) -> ([u64; 8], &[u64; 8], usize) {
        let mut words = [0; 8];
        for (word, bytes) in words.iter_mut().zip(self.bytes.chunks_exact(8)) {
            bytes.iter().rev().for_each(|byte| *word = *word << 8 | u64::from(*byte));
        }
        (words, &self.unused, 2 * self.segments)
    }
}

/// Writes bytes from here to there.
pub fn write(to: Remote, from: Remote, len: u32) -> Raw {
    Raw::new(WRITE, 0).remote(to.0, to.1).data(from.0, from.1, len)
}

/// Writes bytes that the entry carries.
pub fn value(to: Remote, bytes: &[u8]) -> Raw {
    Raw::new(WRITE, 0).remote(to.0, to.1).inline(bytes)
}

/// Reads bytes from there to here.
pub fn read(from: Remote, to: Remote, len: u32) -> Raw {
    Raw::new(READ, 0).remote(from.0, from.1).data(to.0, to.1, len)
}

/// Adds to a word there; what was in it goes to `fetched`.
pub fn add(to: Remote, n: u64, fetched: Remote) -> Raw {
    // The second operand is that of compare and swap.
    Raw::new(FETCH_ADD, 0).remote(to.0, to.1).two(n, n).data(fetched.0, fetched.1, 8)
}

/// Waits for completion entry `index` of a queue, on another one.
pub fn wait_for(index: u64, queue: u32) -> Raw {
    let mut raw = Raw::new(WAIT, 0).four([0, 0, index as u32, queue]);
    raw.unused[2] = u64::MAX;
    raw
}

/// Makes what was read before visible.
pub fn dump(sink: u32) -> Raw {
    Raw::new(DUMP, 0).data(sink, 0, 1)
}
