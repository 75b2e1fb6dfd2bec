//! Pinned memory handed out in a ring: what is taken first comes back first.

/// The free part of a ring of `size` bytes. Positions count up for ever.
pub struct Staging {
    size: u64,
    head: u64,
    tail: u64,
}

/// Pieces start at multiples of this: a cache line.
const ALIGN: u64 = 64;

impl Staging {
    /// An empty ring.
    pub fn new(size: u64) -> Self {
        Self { size, head: 0, tail: 0 }
    }

    /// Takes `n` bytes in one piece, or says that there is no room now. Returns their offset.
    pub fn take(&mut self, n: u64) -> Option<u64> {
        let start = self.place(n)?;
        if self.head == self.tail {
            self.tail = start;
        }
        self.head = start + n.next_multiple_of(ALIGN);
        Some(start % self.size)
    }

    /// The same, if there is room for one piece of `beside` bytes after it.
    pub fn take_beside(&mut self, n: u64, beside: u64) -> Option<u64> {
        let before = (self.head, self.tail);
        let offset = self.take(n)?;
        if !self.fits(beside) {
            (self.head, self.tail) = before;
            return None;
        }
        Some(offset)
    }

    /// Whether `take` finds room for one piece of `n` bytes now.
    pub fn fits(&self, n: u64) -> bool {
        self.place(n).is_some()
    }

    /// The position at which a piece of `n` bytes would start now.
    fn place(&self, n: u64) -> Option<u64> {
        let n = n.next_multiple_of(ALIGN);
        if self.head == self.tail {
            // Empty: start a lap, so that any piece fits.
            return (n <= self.size).then(|| self.head.next_multiple_of(self.size));
        }
        let at = self.head % self.size;
        // A piece does not wrap: the rest of the lap is skipped.
        let start = if at + n > self.size { self.head + (self.size - at) } else { self.head };
        (n <= self.size && start + n - self.tail <= self.size).then_some(start)
    }

    /// Whether pieces of at most `piece` bytes can be taken, `n` together with what each is short of a multiple of 64.
    pub fn has_room(&self, n: u64, piece: u64) -> bool {
        // One lap may end on the way, and what is left of it too short for a piece.
        n + piece + (self.head - self.tail) <= self.size
    }

    /// Everything taken so far, for `give_back`.
    pub fn position(&self) -> u64 {
        self.head
    }

    /// Everything that was taken up to `position` is free again.
    pub fn give_back(&mut self, position: u64) {
        self.tail = position;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    #[test]
    fn pieces_never_overlap() {
        let mut s = Staging::new(1024);
        let mut live: VecDeque<(u64, u64, u64)> = VecDeque::new();
        let mut x = 7u64;
        for _ in 0..10_000 {
            x = x.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let n = 1 + (x >> 33) % 400;
            let fits = s.fits(n);
            match s.take(n) {
                Some(at) => {
                    assert!(fits);
                    assert!(at + n <= 1024);
                    assert!(live.iter().all(|&(a, m, _)| at + n <= a || a + m <= at), "{at}+{n} overlaps {live:?}");
                    live.push_back((at, n, s.position()));
                }
                None => {
                    assert!(!fits);
                    let (_, _, position) = live.pop_front().expect("an empty ring has room");
                    s.give_back(position);
                }
            }
        }
        assert!(s.take(1025).is_none());
    }

    #[test]
    fn where_there_is_room_pieces_find_it() {
        for filled in (0..1024).step_by(64) {
            for held in (0..=512).step_by(64) {
                let mut s = Staging::new(1024);
                // Everything up to some place was used before, the last of it still is.
                s.take(filled.max(1)).expect("an empty ring has room");
                let mark = s.position();
                let tail = mark.saturating_sub(held);
                s.give_back(tail);
                for n in (64..=1024).step_by(64).filter(|&n| s.has_room(n, 128)) {
                    let mut t = Staging { ..s };
                    for _ in 0..n / 64 / 2 {
                        assert!(t.take(128).is_some(), "{n} bytes behind {filled} of which {held} are held");
                    }
                    assert!(n / 64 % 2 == 0 || t.take(64).is_some());
                }
            }
        }
        assert!(!Staging::new(1024).has_room(1024, 128) && Staging::new(1024).has_room(896, 128));
    }
}
