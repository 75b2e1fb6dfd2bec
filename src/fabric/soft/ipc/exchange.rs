//! Which segments are asked for, which are sent, and what came. No sockets, and no driver: whoever has a descriptor
//! says what it becomes.

use super::wire::What;
use std::ops::Range;

/// Segments asked for at once: a socket takes ten datagrams on many systems (net.unix.max_dgram_qlen).
pub const AT_ONCE: u32 = 8;

/// First segment and count of the request when `missing` is the first that has not come. Whole laps: an answer that
/// came is not asked for again, because the first that is missing moves on.
pub fn request(missing: u32) -> (u32, u32) {
    (missing, AT_ONCE - missing % AT_ONCE)
}

/// What is sent for a request about a window of `segments`.
pub fn answered(first: u32, count: u32, segments: u32) -> Range<u32> {
    first..first.saturating_add(count.min(AT_ONCE)).min(segments)
}

/// An answer; `F` is a descriptor.
pub struct Answer<F> {
    /// Who sent it.
    pub rank: u32,
    /// Which segment.
    pub segment: u32,
    /// What it comes as.
    pub what: What,
    /// The descriptor, if one was attached.
    pub file: Option<F>,
}

/// Answers for the one window that is being registered.
pub struct Answers<F> {
    round: u32,
    limit: usize,
    all: Vec<Answer<F>>,
}

impl<F> Default for Answers<F> {
    fn default() -> Self {
        Self { round: 0, limit: 0, all: Vec::new() }
    }
}

impl<F> Answers<F> {
    /// From now on those of a new window, which so many peers offer. Returns the number of its requests: an answer to
    /// an earlier one, for a window that had the same number, is not taken for one to these.
    pub fn expect(&mut self, peers: usize) -> u32 {
        self.all.clear();
        self.limit = 4 * AT_ONCE as usize * peers;
        self.round = self.round.wrapping_add(1);
        self.round
    }

    /// From now on none.
    pub fn end(&mut self) {
        self.all.clear();
        self.limit = 0;
    }

    /// An answer came. What is beyond all that was asked for is dropped, and asked for again if it was wanted.
    pub fn hear(&mut self, round: u32, answer: Answer<F>) {
        if round == self.round && self.all.len() < self.limit {
            self.all.push(answer);
        }
    }

    /// Those that came since the last time.
    pub fn take(&mut self) -> Vec<Answer<F>> {
        std::mem::take(&mut self.all)
    }
}

/// What came of one offer; `T` is what a descriptor becomes.
pub struct Collected<T> {
    offset: u64,
    sizes: Vec<u64>,
    got: Vec<Option<T>>,
}

impl<T> Collected<T> {
    /// Nothing yet of segments of these sizes, in which the window starts at `offset`.
    pub fn new(offset: u64, sizes: Vec<u64>) -> Self {
        Self { got: sizes.iter().map(|_| None).collect(), offset, sizes }
    }

    /// The first segment that is missing.
    pub fn missing(&self) -> Option<u32> {
        self.got.iter().position(Option::is_none).map(|n| n as u32)
    }

    /// Takes what the peer sent. `import` is called for the first descriptor of each segment.
    pub fn take<F>(
        &mut self,
        segment: u32,
        what: What,
        file: Option<F>,
        import: impl FnOnce(F) -> Result<T, String>,
    ) -> Result<(), String> {
        match (what, file) {
            (What::Descriptor, Some(file)) => {
                if let Some(place @ None) = self.got.get_mut(segment as usize) {
                    *place = Some(import(file)?);
                }
                Ok(())
            }
            (What::Refused(why), _) => Err(why),
            (What::Descriptor, None) => Err("it sent no descriptor".into()),
        }
    }

    /// All segments with their sizes, and where in them the window starts; `None`: something is missing.
    pub fn complete(self) -> Option<(Vec<(T, u64)>, u64)> {
        let all = self.got.into_iter().collect::<Option<Vec<_>>>()?;
        Some((all.into_iter().zip(self.sizes).collect(), self.offset))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_and_what_is_sent() {
        assert_eq!(request(0), (0, 8));
        assert_eq!(request(13), (13, 3));
        assert_eq!(answered(0, 8, 3), 0..3);
        assert_eq!(answered(2, u32::MAX, 100), 2..10);
        assert!(answered(u32::MAX, u32::MAX, 3).is_empty());
    }

    #[test]
    fn late_answers_to_an_earlier_registration_are_dropped() {
        let answer = |segment| Answer { rank: 1, segment, what: What::Descriptor, file: Some(()) };
        let mut answers = Answers::default();
        answers.hear(0, answer(0));
        let first = answers.expect(1);
        answers.hear(first, answer(1));
        let second = answers.expect(1);
        answers.hear(first, answer(2));
        answers.hear(second, answer(3));
        assert_eq!(answers.take().iter().map(|a| a.segment).collect::<Vec<_>>(), [3]);
        (0..100).for_each(|_| answers.hear(second, answer(4)));
        assert_eq!(answers.take().len(), 32);
        answers.end();
        answers.hear(second, answer(5));
        assert!(answers.take().is_empty());
    }

    #[test]
    fn segments_come_in_any_order_and_more_than_once() {
        let mut all = Collected::new(4, vec![8, 16]);
        for (segment, missing) in [(1, Some(0)), (7, Some(0)), (1, Some(0)), (0, None)] {
            all.take(segment, What::Descriptor, Some(segment), Ok).unwrap();
            assert_eq!(all.missing(), missing);
        }
        assert_eq!(all.complete(), Some((vec![(0, 8), (1, 16)], 4)));
    }

    #[test]
    fn something_else_than_was_offered_is_refused() {
        let take = |what, file: Option<()>| Collected::new(0, vec![8]).take(0, what, file, Ok);
        assert!(take(What::Descriptor, None).is_err());
        assert_eq!(take(What::Refused("no".into()), None), Err("no".into()));
        assert_eq!(take(What::Descriptor, Some(())), Ok(()));
    }
}
