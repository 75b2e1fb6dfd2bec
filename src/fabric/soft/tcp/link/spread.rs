//! Which connection takes the next chunk of a put or get.

use super::*;
use std::time::Duration;

/// Puts and gets above [`SMALL`] up to this size may go by the middle connection: what a caller sends or receives
/// within some 30 µs, less than it takes to wake two threads that sleep.
const MEDIUM: usize = 128 * 1024;

/// A put this soon after the middle connection was last sent on is one of many: threads for bulk share the work.
const RUSH: Duration = Duration::from_micros(10);

/// How chunks are spread over the connections of a link.
pub struct Spread {
    /// Threads of their own send on the stripes.
    movers: bool,
    /// The stripe that took the last chunk.
    last: usize,
    /// When the kernel last took anything on the middle connection.
    middle_sent: Option<Instant>,
}

impl Spread {
    /// Nothing was sent yet.
    pub fn new(movers: bool) -> Self {
        Self { movers, last: STRIPES, middle_sent: None }
    }

    /// Bytes went out on the middle connection.
    pub fn sent_on_middle(&mut self) {
        self.middle_sent = Some(Instant::now());
    }

    fn next(&self, conns: usize) -> usize {
        if self.last + 1 < conns {
            self.last + 1
        } else {
            STRIPES
        }
    }

    /// Whether the middle connection may take a put. Without threads for bulk it always may; with them only what comes
    /// alone, so that many are shared out.
    fn is_calm(&self, conns: &[Conn]) -> bool {
        !self.movers
            || conns.iter().all(|c| c.unsent() == 0 && !c.lent) && self.middle_sent.is_none_or(|t| t.elapsed() > RUSH)
    }

    /// The connection for a chunk of a put of `len` bytes: one that has less than `limit` bytes to send.
    pub fn for_put(&mut self, conns: &[Conn], len: u64, limit: usize) -> Option<usize> {
        let has_room = |s: usize| conns[s].unsent() < limit;
        if len <= MEDIUM as u64 && has_room(MIDDLE) && self.is_calm(conns) {
            return Some(MIDDLE);
        }
        let before = self.last;
        for _ in STRIPES..conns.len() {
            self.last = self.next(conns.len());
            if has_room(self.last) {
                return Some(self.last);
            }
        }
        self.last = before;
        None
    }

    /// The connection for a chunk of a get of `len` bytes.
    pub fn for_get(&mut self, conns: &[Conn], len: u64) -> usize {
        if len <= SMALL as u64 {
            return EXPRESS;
        }
        if len <= MEDIUM as u64 && conns[MIDDLE].asked.is_empty() {
            return MIDDLE;
        }
        self.last = self.next(conns.len());
        self.last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FULL: usize = CHUNK;

    fn conns(n: usize) -> Vec<Conn> {
        (0..n).map(|_| Conn::default()).collect()
    }

    #[test]
    fn what_comes_alone_goes_by_the_middle_and_bulk_in_turn() {
        let mut all = conns(STRIPES + 2);
        for movers in [false, true] {
            let mut spread = Spread::new(movers);
            assert_eq!(spread.for_put(&all, 64 << 10, FULL), Some(MIDDLE));
            let large: Vec<_> = (0..3).filter_map(|_| spread.for_put(&all, 1 << 20, FULL)).collect();
            assert_eq!(large, [STRIPES + 1, STRIPES, STRIPES + 1]);
        }
        let mut spread = Spread::new(true);
        all[STRIPES].line_bytes = FULL;
        assert_eq!(spread.for_put(&all, 64 << 10, FULL), Some(STRIPES + 1), "something is under way");
        all[STRIPES].line_bytes = 0;
        spread.sent_on_middle();
        spread.middle_sent = spread.middle_sent.map(|t| t + Duration::from_secs(60));
        assert_ne!(spread.for_put(&all, 64 << 10, FULL), Some(MIDDLE), "one of many");
        let mut spread = Spread::new(false);
        all.iter_mut().for_each(|c| c.line_bytes = FULL);
        assert_eq!(spread.for_put(&all, 64 << 10, FULL), None);
        assert_eq!([SMALL as u64, 64 << 10, 1 << 20].map(|n| spread.for_get(&all, n)), [EXPRESS, MIDDLE, STRIPES + 1]);
    }
}
