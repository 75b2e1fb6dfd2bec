//! Contexts of a sender of which an operation was refused: what else comes of them is dropped.

use std::ops::RangeInclusive;

/// Ranges of refused contexts of one sender that are kept, more than the contexts that a communicator can have at a
/// time make: 31 sets of 1024. Their numbers are never used twice, and older ones are long gone.
const MOST: usize = 16 << 10;

/// Contexts of one sender of which an operation was refused.
#[derive(Default)]
pub struct Refused {
    /// First and last number of each range, ascending; no two ranges touch.
    ranges: Vec<(u32, u32)>,
    /// Some were forgotten, and the log says so.
    has_forgotten: bool,
}

impl Refused {
    /// Whether what comes of a context is dropped.
    #[inline(always)]
    pub fn has(&self, context: u32) -> bool {
        !self.ranges.is_empty() && self.find(context).is_ok()
    }

    /// Where the range is that has it, or would be.
    fn find(&self, context: u32) -> Result<usize, usize> {
        let at = self.ranges.partition_point(|&(_, last)| last < context);
        match self.ranges.get(at) {
            Some(&(first, _)) if first <= context => Ok(at),
            _ => Err(at),
        }
    }

    /// One more. `false`: it was there.
    #[cold]
    pub fn add(&mut self, context: u32) -> bool {
        let Err(at) = self.find(context) else { return false };
        let ends_before = at > 0 && self.ranges[at - 1].1.checked_add(1) == Some(context);
        let begins_behind = self.ranges.get(at).is_some_and(|&(first, _)| context.checked_add(1) == Some(first));
        match (ends_before, begins_behind) {
            (true, true) => {
                let (_, last) = self.ranges.remove(at);
                self.ranges[at - 1].1 = last;
            }
            (true, false) => self.ranges[at - 1].1 = context,
            (false, true) => self.ranges[at].0 = context,
            (false, false) => {
                self.ranges.insert(at, (context, context));
                self.forget_some(at);
            }
        }
        true
    }

    /// Forgets the oldest contexts, but for the range at `new`, where there are too many.
    fn forget_some(&mut self, new: usize) {
        if self.ranges.len() <= MOST {
            return;
        }
        let (first, last) = self.ranges.remove(usize::from(new == 0));
        if !std::mem::replace(&mut self.has_forgotten, true) {
            log::warn!(
                "operations of more contexts of a rank were refused than this one keeps in mind; should it still \
                 use {}, its signals may announce what was refused",
                contexts(first..=last)
            );
        }
    }
}

fn contexts(range: RangeInclusive<u32>) -> String {
    match (range.start(), range.end()) {
        (first, last) if first == last => format!("context {first}"),
        (first, last) => format!("contexts {first} to {last}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn all_that_a_communicator_can_have_at_a_time_are_kept() {
        let mut refused = Refused::default();
        // Every other one of 31 sets of 1024 contexts.
        let odd = || (0..31 * 1024).filter(|context| context % 2 == 1);
        assert!(odd().all(|context| refused.add(context)));
        assert!((0..31 * 1024).all(|context| refused.has(context) == (context % 2 == 1)));
        assert!(!refused.has_forgotten && !odd().any(|context| refused.add(context)));
        // Sets that came and went as a whole are one range.
        assert!((100_000..1_000_000).all(|context| refused.add(context)));
        assert!(odd().all(|context| refused.has(context)) && refused.has(555_555));
    }

    #[test]
    fn there_are_no_more_than_that() {
        let mut refused = Refused::default();
        (1..=MOST as u32).for_each(|i| assert!(refused.add(10 * i)));
        assert!(refused.add(5) && refused.has(5) && !refused.has(10) && refused.has(20), "the newest is kept");
        assert!(refused.add(u32::MAX) && !refused.has(5) && refused.has(20) && refused.has(u32::MAX));
        assert_eq!(refused.ranges.len(), MOST);
    }

    proptest! {
        #[test]
        fn it_is_a_set(contexts in prop::collection::vec(prop_oneof![0u32..40, u32::MAX - 3..=u32::MAX], 0..80)) {
            let (mut refused, mut model) = (Refused::default(), BTreeSet::new());
            for context in contexts {
                prop_assert_eq!(refused.add(context), model.insert(context));
                prop_assert!((0..41).all(|c| refused.has(c) == model.contains(&c)));
                prop_assert!((u32::MAX - 4..=u32::MAX).all(|c| refused.has(c) == model.contains(&c)));
                prop_assert!(refused.ranges.windows(2).all(|pair| pair[0].1 + 1 < pair[1].0));
            }
        }
    }
}
