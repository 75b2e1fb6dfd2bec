//! Sets of windows, by rank and number: numbers are small, and the ranks of a process few.

/// Windows of several ranks.
#[derive(Default)]
pub struct WindowSet(Vec<(u32, Vec<u64>)>);

impl WindowSet {
    /// Whether it has this one.
    #[inline]
    pub fn contains(&self, rank: u32, number: u32) -> bool {
        let of_rank = self.0.iter().find(|(other, _)| *other == rank);
        of_rank.and_then(|(_, bits)| bits.get(number as usize / 64)).is_some_and(|bits| bits >> (number % 64) & 1 != 0)
    }

    /// It has this one from here on.
    pub fn insert(&mut self, rank: u32, number: u32) {
        let at = self.0.iter().position(|(other, _)| *other == rank).unwrap_or_else(|| {
            self.0.push((rank, Vec::new()));
            self.0.len() - 1
        });
        let (bits, word) = (&mut self.0[at].1, number as usize / 64);
        if bits.len() <= word {
            bits.resize(word + 1, 0);
        }
        bits[word] |= 1 << (number % 64);
    }

    /// It has it no longer.
    pub fn remove(&mut self, rank: u32, number: u32) {
        let of_rank = self.0.iter_mut().find(|(other, _)| *other == rank);
        if let Some(bits) = of_rank.and_then(|(_, bits)| bits.get_mut(number as usize / 64)) {
            *bits &= !(1 << (number % 64));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_told_apart_by_rank_and_number() {
        let mut set = WindowSet::default();
        let all = [(3, 0), (3, 64), (0, 1), (7, 1000)];
        all.iter().for_each(|&(rank, number)| set.insert(rank, number));
        assert!(all.iter().all(|&(rank, number)| set.contains(rank, number)));
        assert!(![(0, 0), (3, 1), (7, 0), (7, 2000), (9, 1)].iter().any(|&(rank, number)| set.contains(rank, number)));
        set.remove(3, 64);
        set.remove(5, 5);
        assert!(set.contains(3, 0) && !set.contains(3, 64));
    }
}
