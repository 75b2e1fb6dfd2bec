//! What a lane of the fake's lane kernel was given, and what of it has to be there by what its signals and its index
//! say.

use super::Board;

/// The words of a lane by which it is told how far it is: one that counts, and one whose sums tell what came before.
pub const COUNTER: u64 = 0;
pub const SUM: u64 = 1;

/// What one of them brings: where, and which bytes; and whether it adds one to the counter.
pub struct Brought {
    pub at: u64,
    pub bytes: Vec<u8>,
    pub counts: bool,
}

/// What one lane was given, and what of it was looked at.
#[derive(Default)]
pub struct Given {
    pub all: Vec<Brought>,
    /// What `SUM` and another word are in the end.
    pub added: [u64; 2],
    /// What `SUM` is behind each that adds to it, and what `COUNTER` is before.
    pub sums: Vec<(u64, u64)>,
    checked: usize,
}

impl Given {
    /// How many of the first `until` count.
    pub fn counted(&self, until: usize) -> u64 {
        self.all.iter().take(until).filter(|b| b.counts).count() as u64
    }

    /// The next one adds this to `SUM`.
    pub fn add(&mut self, by: u64) {
        self.added[0] += by;
        self.sums.push((self.added[0], self.counted(usize::MAX)));
    }

    /// Where a look takes one of a lane, its signals come in their order.
    pub fn check_signals(&self, board: &Board<'_>, i: usize) {
        let (sum, counted) = (board.signal(i, SUM), board.signal(i, COUNTER));
        let at = self.sums.iter().find(|(is, _)| *is == sum);
        let before = at.map_or(0, |(_, before)| *before);
        assert!(at.is_some() || sum == 0, "lane {i}: the sum is {sum}");
        assert!(counted >= before, "lane {i}: {counted} counted, and {before} before the sum was {sum}");
    }

    /// What came before as many signals as there are has arrived, and the first `done`.
    pub fn check(&mut self, board: &Board<'_>, i: usize, done: usize) {
        let signals = board.signal(i, COUNTER) as usize;
        let counting = self.all.iter().enumerate().filter(|(_, b)| b.counts).map(|(n, _)| n + 1);
        let until = done.max(counting.take(signals).last().unwrap_or(0));
        assert!(until <= self.all.len(), "lane {i}: {done} done, {signals} signals");
        for (n, b) in self.all.iter().enumerate().take(until).skip(self.checked) {
            assert_eq!(board.target(b.at, b.bytes.len() as u64), b.bytes, "lane {i}: entry {n}");
        }
        self.checked = self.checked.max(until);
    }
}
