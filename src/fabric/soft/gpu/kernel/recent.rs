//! What a command has to come behind: the signals of its lane among the commands just before it.

use super::ring::BEHIND_MOST;

/// The commands that may be in one go with the next: signals of one go have no order, unless they are told to.
#[derive(Default)]
pub struct Recent {
    /// The lane, by its address, and the signal of each; no signal: 0.
    commands: [(usize, u64); BEHIND_MOST],
    /// The next one's place.
    next: usize,
}

impl Recent {
    /// Those with a signal of the lane at another address, as a command names them: the lowest bit is the oldest.
    #[inline]
    pub fn behind(&self, lane: usize, signal: u64) -> u32 {
        let is_before = |&(l, s): &(usize, u64)| s != 0 && s != signal && l == lane;
        let by_place = self.commands.iter().enumerate().fold(0, |bits, (i, c)| bits | u32::from(is_before(c)) << i);
        (by_place >> self.next | by_place << (BEHIND_MOST - self.next)) & ((1 << BEHIND_MOST) - 1)
    }

    #[inline]
    pub fn add(&mut self, lane: usize, signal: u64) {
        self.commands[self.next] = (lane, signal);
        self.next = (self.next + 1) % self.commands.len();
    }

    /// Those before the next one cannot be in one go with those behind it.
    pub fn clear(&mut self) {
        self.commands = Default::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_comes_behind_those_of_its_lane_at_other_addresses_in_its_go() {
        let (lane, other) = (0x1000, 0x2000);
        let mut recent = Recent::default();
        assert_eq!(recent.behind(lane, 8), 0);
        recent.add(lane, 8);
        // One without a signal between them.
        recent.add(lane, 0);
        assert_eq!((recent.behind(lane, 8), recent.behind(other, 16)), (0, 0));
        assert_eq!(recent.behind(lane, 16), 0b010_0000);
        recent.add(lane, 16);
        assert_eq!((recent.behind(lane, 24), recent.behind(lane, 16)), (0b101_0000, 0b001_0000));
        // A go has no room for the first and the ninth.
        (3..BEHIND_MOST).for_each(|_| recent.add(other, 32));
        assert_eq!((recent.behind(lane, 24), recent.behind(other, 8)), (0b000_0101, 0b111_1000));
        recent.add(other, 32);
        assert_eq!(recent.behind(lane, 24), 0b000_0010);
        recent.add(lane, 8);
        recent.clear();
        assert_eq!(recent.behind(lane, 16), 0);
    }
}
