//! Bytes that depend on where they are and who wrote them, so that lost, moved and stale ones show.

pub use crate::dice::Dice;

/// Bytes 8n to 8n + 7 of the pattern `seed`.
#[inline]
fn word(seed: u64, n: usize) -> u64 {
    let x = (seed ^ n as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    x ^ (x >> 29)
}

/// The byte at position `i` of the pattern `seed`.
#[inline]
pub fn byte(seed: u64, i: usize) -> u8 {
    (word(seed, i >> 3) >> (8 * (i & 7))) as u8
}

/// Writes the pattern from its position `at`, a multiple of 8.
pub fn fill_from(to: &mut [u8], seed: u64, at: usize) {
    debug_assert!(at % 8 == 0);
    for (n, piece) in to.chunks_mut(8).enumerate() {
        piece.copy_from_slice(&word(seed, at / 8 + n).to_le_bytes()[..piece.len()]);
    }
}

/// Writes the pattern from its beginning.
pub fn fill(to: &mut [u8], seed: u64) {
    fill_from(to, seed, 0);
}

/// Counts the bytes that differ from the pattern at position `at`; the first one's place in `data` comes along.
pub fn wrong_from(data: &[u8], seed: u64, at: usize) -> (u64, Option<usize>) {
    let mut first = None;
    let mut count = 0;
    let mut i = 0;
    while i < data.len() {
        // A word at a time where it is right, else byte by byte.
        if (at + i) % 8 == 0 {
            if let Some(piece) = data.get(i..i + 8) {
                if piece == word(seed, (at + i) / 8).to_le_bytes() {
                    i += 8;
                    continue;
                }
            }
        }
        if data[i] != byte(seed, at + i) {
            count += 1;
            first.get_or_insert(i);
        }
        i += 1;
    }
    (count, first)
}

/// The same from the beginning of the pattern.
pub fn wrong(data: &[u8], seed: u64) -> (u64, Option<usize>) {
    wrong_from(data, seed, 0)
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
        assert_eq!(wrong_from(&data[1..], 5, 1), (0, None));
        data[41] ^= 1;
        assert_eq!(wrong(&data, 5), (1, Some(41)));
        assert_eq!(wrong_from(&data[3..99], 5, 3), (1, Some(38)));
        assert!((0..100).all(|i| i == 41 || data[i] == byte(5, i)));
    }
}
