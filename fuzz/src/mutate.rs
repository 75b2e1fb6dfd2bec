//! Inputs from inputs.

/// Longest input.
const LONGEST: usize = 4096;

/// Numbers at which lengths and offsets go wrong.
const EDGES: [u64; 14] = [
    0,
    1,
    7,
    8,
    0x7f,
    0x80,
    0xff,
    0x7fff,
    0xffff,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    0x7fff_ffff_ffff_ffff,
    0xffff_ffff_ffff_fff8,
];

/// A stream of inputs; the same for the same seed and corpus.
pub struct Mutator(u64);

impl Mutator {
    /// `seed` is not 0.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// xorshift64*, shifts 12, 25, 27 (Vigna, "An experimental exploration of Marsaglia's xorshift generators").
    fn random(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Below `n`; 0 for 0.
    fn below(&mut self, n: usize) -> usize {
        (self.random() >> 16) as usize % n.max(1)
    }

    /// One input, from one or two of the corpus by a few changes.
    pub fn next(&mut self, corpus: &[Vec<u8>]) -> Vec<u8> {
        let mut input = corpus.get(self.below(corpus.len())).cloned().unwrap_or_default();
        for _ in 0..1 << self.below(4) {
            self.change(&mut input, corpus);
        }
        input.truncate(LONGEST);
        input
    }

    fn change(&mut self, input: &mut Vec<u8>, corpus: &[Vec<u8>]) {
        let at = self.below(input.len());
        match self.below(8) {
            0 if !input.is_empty() => input[at] ^= 1 << self.below(8),
            1 if !input.is_empty() => input[at] = self.random() as u8,
            // A number at the edge, in 1 to 8 bytes.
            2 | 3 => {
                let bytes = EDGES[self.below(EDGES.len())].to_le_bytes();
                let width = 1 << self.below(4);
                let end = (at + width).min(input.len());
                let room = end - at;
                input[at..end].copy_from_slice(&bytes[..room]);
            }
            4 => input.truncate(at),
            5 => {
                let n = self.below(32);
                let bytes: Vec<u8> = (0..n).map(|_| self.random() as u8).collect();
                input.splice(at..at, bytes);
            }
            // The head of this with the tail of another.
            6 => {
                let other = &corpus[self.below(corpus.len())];
                let from = self.below(other.len());
                input.truncate(at);
                input.extend_from_slice(&other[from..]);
            }
            // A piece of itself again.
            _ => {
                let end = at + self.below(input.len() - at);
                let piece = input[at..end].to_vec();
                input.splice(at..at, piece);
            }
        }
    }
}
