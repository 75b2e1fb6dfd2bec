//! Bytes that depend on where they are and who wrote them, so that lost, moved and stale ones show.

/// The byte at position `i` of the pattern `seed`.
#[inline]
pub fn byte(seed: u64, i: usize) -> u8 {
    let x = (seed ^ (i as u64 >> 3)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    ((x ^ (x >> 29)) >> (8 * (i & 7))) as u8
}

/// Writes the pattern.
pub fn fill(to: &mut [u8], seed: u64) {
    for (i, b) in to.iter_mut().enumerate() {
        *b = byte(seed, i);
    }
}

/// Counts the bytes that differ from the pattern; the first one's position comes along.
pub fn wrong(data: &[u8], seed: u64) -> (u64, Option<usize>) {
    let mut first = None;
    let mut count = 0;
    for (i, &b) in data.iter().enumerate() {
        if b != byte(seed, i) {
            count += 1;
            first.get_or_insert(i);
        }
    }
    (count, first)
}

/// A small generator for choices that must be the same on every rank (splitmix64).
pub struct Dice(pub u64);

impl Dice {
    /// The next number.
    pub fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `n`.
    pub fn below(&mut self, n: u64) -> u64 {
        self.roll() % n
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_moved_or_stale_byte_is_seen() {
        let mut data = vec![0; 100];
        fill(&mut data, 5);
        assert_eq!(wrong(&data, 5), (0, None));
        assert!(wrong(&data, 6).0 > 80);
        assert!(wrong(&data[1..], 5).0 > 80);
        data[41] ^= 1;
        assert_eq!(wrong(&data, 5), (1, Some(41)));
    }
}
