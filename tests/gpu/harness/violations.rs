//! What the fake driver says of uses that a real one would not stand.

use super::Fake;

impl Fake {
    pub(super) fn count_violations(&self) -> usize {
        // SAFETY: the fake has a function of this type.
        unsafe { self.call::<extern "C" fn() -> usize>(b"fake_violations")() }
    }

    fn violation(&self, number: usize) -> String {
        let mut words = vec![0; 1024];
        // SAFETY: the fake has a function of this type, which writes so many bytes at most.
        let n = unsafe {
            let words_of: extern "C" fn(usize, *mut u8, usize) -> usize = self.call(b"fake_violation");
            words_of(number, words.as_mut_ptr(), words.len())
        };
        words.truncate(n);
        String::from_utf8_lossy(&words).into_owned()
    }

    /// How often this test has used the driver in a way that a real one would not stand.
    pub fn violations(&self) -> usize {
        self.count_violations() - self.violations
    }

    /// Fails the test if it ever did.
    pub fn check(&self) {
        let all: Vec<_> = (self.violations..self.count_violations()).map(|n| self.violation(n)).collect();
        assert!(all.is_empty(), "violations: {all:#?}");
    }
}
