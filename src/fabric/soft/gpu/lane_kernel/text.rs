//! The text of `lanes.ptx`, for queues of one kind: what it has of the others the driver's compiler leaves out. A
//! thread has fewer registers then (187 to 213 instead of 232 on an H200), so that blocks find a place beside more
//! kernels.

use crate::fabric::lanes::Holds;
use std::ffi::CString;

/// For any kind, which the board tells.
const TEXT: &str = include_str!("lanes.ptx");
/// Where that is read.
const IS_ENTRY: &str = "    vote.sync.any.pred is_entry, %p0, 0xffffffff;\n";
const IS_BELL: &str = "    vote.sync.any.pred is_bell, %p0, 0xffffffff;\n";
/// Registers of a thread at most, behind the threads of a block: as many as are free in a multiprocessor beside 1024
/// threads with 40. Of descriptors it would be a few too little.
const THREADS: &str = ".maxntid 256, 1, 1\n";
const REGISTERS: &str = ".maxntid 256, 1, 1\n.maxnreg 192\n";

/// The text for queues that hold this.
pub fn of(holds: Holds) -> CString {
    let (is_entry, is_bell) = (holds != Holds::Descriptors, holds == Holds::EntriesWithDoorbell);
    let text = TEXT.replace(IS_ENTRY, &constant("is_entry", is_entry)).replace(IS_BELL, &constant("is_bell", is_bell));
    let text = if is_entry { text.replace(THREADS, REGISTERS) } else { text };
    CString::new(text).unwrap_or_default()
}

/// What sets a predicate to a constant.
fn constant(name: &str, value: bool) -> String {
    format!("    setp.{}.u32     {name}, 0, 0;\n", if value { "eq" } else { "ne" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_says_what_queues_hold() {
        let all = [IS_ENTRY, IS_BELL, THREADS];
        assert!(all.iter().all(|line| TEXT.matches(line).count() == 1));
        for (holds, is_entry, is_bell) in [
            (Holds::Descriptors, false, false),
            (Holds::Entries, true, false),
            (Holds::EntriesWithDoorbell, true, true),
        ] {
            let text = of(holds).into_string().expect("text");
            let sets = |name, value| text.contains(&constant(name, value));
            assert!(sets("is_entry", is_entry) && !sets("is_entry", !is_entry), "{holds:?}");
            assert!(sets("is_bell", is_bell) && !sets("is_bell", !is_bell), "{holds:?}");
            assert_eq!(text.contains(REGISTERS), is_entry, "{holds:?}");
            assert!(!text.contains(IS_ENTRY) && !text.contains(IS_BELL), "{holds:?}");
        }
    }
}
