//! What is a pause between two long copies.

use super::*;
use crate::fabric::lanes::LONGEST;

/// It is told by the time, however many visits there were.
#[test]
fn a_pause_begins_with_the_first_visit_that_finds_nothing() {
    let mut bench = Bench::new(1);
    let place = &mut bench.drain.places[0];
    let long_ago = Instant::now() - 2 * PAUSE;
    for has_passed in [false, true, false] {
        // A long copy, long ago, and the first vain visit behind it.
        place.apart.note(LONGEST + 1);
        (place.quiet, place.quiet_since) = (0, long_ago);
        place.note_vain();
        assert!(place.apart.may_pause(), "nothing has been there since now");
        if has_passed {
            place.quiet_since = long_ago;
            place.note_vain();
            assert!(!place.apart.may_pause());
        }
    }
}
