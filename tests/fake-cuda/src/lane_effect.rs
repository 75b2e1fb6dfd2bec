//! What a warp of the lane kernel does that others see some time.

/// The least bytes of a copy that are seen together; at most so many pieces.
const PIECE: u64 = 64;
const PIECES: u64 = 4;

#[derive(Clone, Copy)]
pub enum Effect {
    /// All words of a slot are set to this.
    Clear {
        slot: u64,
        blank: u64,
    },
    Copy {
        from: u64,
        to: u64,
        bytes: u64,
        of: u64,
    },
    Value {
        to: u64,
        bytes: u32,
        value: u64,
    },
    Signal {
        at: u64,
        by: u64,
    },
    Index {
        at: u64,
        value: u32,
    },
    Count {
        at: u64,
        value: u64,
    },
    Position {
        place: u64,
        value: u64,
    },
}

impl Effect {
    /// Of how many bytes it is as tests that hold copies see it.
    pub fn held_bytes(self) -> usize {
        match self {
            Self::Copy { of, .. } => of as usize,
            Self::Value { bytes, .. } => bytes as usize,
            _ => 0,
        }
    }
}

/// A copy, in pieces that are seen one by one.
pub fn pieces(from: u64, to: u64, bytes: u64) -> impl Iterator<Item = Effect> {
    let piece = bytes.div_ceil(PIECES).next_multiple_of(PIECE);
    let piece_at = move |at: u64| (at, piece.min(bytes - at));
    (0..bytes).step_by(piece as usize).map(piece_at).map(move |(at, n)| Effect::Copy {
        from: from + at,
        to: to + at,
        bytes: n,
        of: bytes,
    })
}
