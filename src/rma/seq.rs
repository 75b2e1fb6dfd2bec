//! Operation numbers: the n-th operation of a context to a peer.

/// The number of an operation on one (context, peer). Counts up from 1 and wraps; comparisons hold while fewer than
/// 2^31 operations of one (context, peer) are unfinished.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Seq(pub u32);

impl Seq {
    /// Whether this operation is among those up to and including `completed`.
    #[inline(always)]
    pub fn is_done(self, completed: Seq) -> bool {
        completed.0.wrapping_sub(self.0) as i32 >= 0
    }

    /// The number after this one.
    #[inline(always)]
    pub fn next(self) -> Seq {
        Seq(self.0.wrapping_add(1))
    }
}

#[cfg(test)]
mod tests {
    use super::Seq;

    #[test]
    fn comparisons_survive_the_wrap() {
        assert!(Seq(5).is_done(Seq(5)));
        assert!(!Seq(6).is_done(Seq(5)));
        assert!(Seq(u32::MAX).is_done(Seq(3)));
        assert!(!Seq(3).is_done(Seq(u32::MAX)));
        assert_eq!(Seq(u32::MAX).next(), Seq(0));
    }
}
