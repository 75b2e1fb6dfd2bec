//! Bytes that tell where they came from, and the comparison with them.

/// Word `index` of a stream that depends on `seed`: neighbours, ranks and measurements differ.
#[inline]
fn word(seed: u64, index: u64) -> u64 {
    // splitmix64's finalizer.
    let mut x = (seed ^ index.wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Seed for what `rank` sends in measurement number `epoch`.
pub fn seed(rank: u32, epoch: u64) -> u64 {
    word(u64::from(rank) + 1, epoch)
}

/// Fills `to` with the pattern, starting at byte 0 of it. No byte is 0, so that cleared memory never matches.
pub fn fill(to: &mut [u8], seed: u64) {
    for (i, chunk) in to.chunks_mut(8).enumerate() {
        chunk.copy_from_slice(&eight(seed, i)[..chunk.len()]);
    }
}

/// The eight bytes that start at byte `8 * index`.
fn eight(seed: u64, index: usize) -> [u8; 8] {
    (word(seed, index as u64) | 0x0101_0101_0101_0101).to_le_bytes()
}

/// The first wrong byte of the range `at..at + got.len()` of the pattern, and how many are wrong. `at` is a multiple
/// of 8.
pub fn compare(got: &[u8], at: usize, seed: u64) -> Option<(usize, u64)> {
    debug_assert!(at % 8 == 0);
    let mut wrong: Option<(usize, u64)> = None;
    for (i, chunk) in got.chunks(8).enumerate() {
        let expected = &eight(seed, at / 8 + i)[..chunk.len()];
        if chunk == expected {
            continue;
        }
        for (j, _) in chunk.iter().zip(expected).enumerate().filter(|(_, (is, should))| is != should) {
            wrong.get_or_insert((at + 8 * i + j, 0)).1 += 1;
        }
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filled_buffer_matches_and_one_flipped_bit_does_not() {
        for len in [1usize, 7, 8, 9, 4096, 4099] {
            let mut buffer = vec![0; len];
            fill(&mut buffer, seed(3, 9));
            assert!(!buffer.contains(&0));
            assert_eq!(compare(&buffer, 0, seed(3, 9)), None);
            let middle = len / 16 * 8;
            assert_eq!(compare(&buffer[middle..], middle, seed(3, 9)), None);
            buffer[len - 1] ^= 0x40;
            assert_eq!(compare(&buffer, 0, seed(3, 9)), Some((len - 1, 1)));
        }
    }

    #[test]
    fn ranks_and_measurements_differ() {
        let mut buffer = vec![0; 4096];
        fill(&mut buffer, seed(0, 1));
        for other in [seed(1, 1), seed(0, 2)] {
            let (_, wrong) = compare(&buffer, 0, other).expect("another pattern");
            assert!(wrong > 3900, "{wrong}");
        }
    }
}
