//! `test` by the short way.

use super::requests;
use crate::fabric::verbs::Short;
use crate::rma::seq::Seq;

/// The rest of the common case of `test`: takes completions and looks again. `None` says nothing.
///
/// # Safety
/// As for [`super::super::calls::test`]; `entry` is the request's (`requests::find`).
#[inline(always)]
pub unsafe fn test_again(entry: &requests::RequestEntry, seq: Seq) -> Option<bool> {
    // SAFETY: the set is not destroyed during a call with it.
    match unsafe { entry.context()?.test_again(|| entry.completed(), seq) } {
        Short::Done => Some(true),
        Short::Unfinished => Some(false),
        Short::Ask => None,
    }
}
