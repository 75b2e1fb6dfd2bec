//! What the trial's kernel is told, and what it tells; and the same done by a processor, where device code runs there.

use crate::gdaki::entry::completion::NEVER;
use std::sync::atomic::{fence, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Words of two send entries.
const ENTRY_WORDS: usize = 16;
/// Words at which the operations arrive: eight that are put, the signal, the counter.
pub const LANDED_WORDS: usize = 10;
/// The last word of the second completion entry: its last byte tells whether anybody wrote it.
const SECOND_LAST: u64 = 64 + 56;
/// Where both completion entries have the words that tell anything: syndrome, opcode and owner.
const TELLING: [u64; 4] = [48, 56, 64 + 48, SECOND_LAST];

/// What is posted to a queue pair, and what its completion queue says; `trial.ptx` has these offsets.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Post {
    /// Slot 0 of the send queue; 0: nothing is posted, only what is there is told.
    pub ring: u64,
    /// Its doorbell record, and what is written there; 0: there is none.
    pub record: u64,
    pub record_value: u64,
    /// The doorbell, or the word by which this process is asked to ring; and what is written there.
    pub bell: u64,
    pub bell_value: u64,
    /// Entry 0 of the completion queue; 0: there is no such queue pair.
    pub completions: u64,
    /// The two send entries.
    pub entries: [u64; ENTRY_WORDS],
    /// At the end: of each completion entry bytes 48 to 64.
    pub told: [u64; 4],
}

/// The board; `trial.ptx` has these offsets.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TrialBoard {
    /// ns after which the kernel gives up a queue pair.
    pub limit: u64,
    /// Where the operations arrive.
    pub landed: u64,
    /// [`COMPLETED`] or [`TIME_OVER`] at the end.
    pub state: u64,
    pub unused: u64,
    /// To the queue pair, and then to its companion.
    pub posts: [Post; 2],
    /// What was seen at `landed`.
    pub found: [u64; LANDED_WORDS],
}

/// The last completion entry is there.
pub const COMPLETED: u64 = 1;
/// It did not come in time.
pub const TIME_OVER: u64 = 2;

impl Post {
    /// What a completion entry, the first or the second, says: opcode and syndrome; `None`: nobody wrote it.
    pub fn completion(&self, which: usize) -> Option<(u8, u8)> {
        let [syndrome, last] = [self.told[2 * which], self.told[2 * which + 1]].map(u64::to_le_bytes);
        (self.completions != 0 && last[7] != NEVER).then_some((last[7] >> 4, syndrome[7]))
    }
}

/// The kernel's part, by a processor: in steps, so that somebody else may ring meanwhile.
pub struct Player {
    board: *mut TrialBoard,
    /// Which queue pair it is at, and since when, if it has rung it.
    at: usize,
    since: Option<Instant>,
}

impl Player {
    /// # Safety
    /// The board stays and is this player's alone; what it names is mapped, and used by devices and this player alone.
    pub unsafe fn new(board: *mut TrialBoard) -> Self {
        Self { board, at: 0, since: None }
    }

    /// Does what can be done; whether that was all.
    pub fn step(&mut self) -> bool {
        // SAFETY: the player's alone.
        let board = unsafe { &mut *self.board };
        let Some(post) = board.posts.get(self.at).filter(|post| post.ring != 0) else {
            tell(board, COMPLETED);
            return true;
        };
        let Some(since) = self.since else {
            self.since = Some(Instant::now());
            write_and_ring(post);
            return false;
        };
        let last = at_64(post.completions + SECOND_LAST).load(Ordering::Acquire).to_le_bytes();
        if last[7] != NEVER {
            (self.at, self.since) = (self.at + 1, None);
            return false;
        }
        let is_late = since.elapsed() > Duration::from_nanos(board.limit);
        if is_late {
            tell(board, TIME_OVER);
        }
        is_late
    }
}

fn tell(board: &mut TrialBoard, state: u64) {
    for post in board.posts.iter_mut().filter(|post| post.completions != 0) {
        post.told = TELLING.map(|at| at_64(post.completions + at).load(Ordering::Relaxed));
    }
    for (i, word) in (0..).zip(&mut board.found) {
        *word = at_64(board.landed + 8 * i).load(Ordering::Relaxed);
    }
    board.state = state;
}

fn write_and_ring(post: &Post) {
    for (i, word) in (0..).zip(post.entries) {
        at_64(post.ring + 8 * i).store(word, Ordering::Relaxed);
    }
    fence(Ordering::SeqCst);
    if post.record != 0 {
        at_32(post.record).store(post.record_value as u32, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }
    at_64(post.bell).store(post.bell_value, Ordering::Release);
}

fn at_64(at: u64) -> &'static AtomicU64 {
    // SAFETY: aligned, and mapped as long as the player is (`Player::new`).
    unsafe { AtomicU64::from_ptr(at as *mut u64) }
}

fn at_32(at: u64) -> &'static AtomicU32 {
    // SAFETY: as above.
    unsafe { AtomicU32::from_ptr(at as *mut u32) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn the_kernel_has_the_same_offsets() {
        let text = include_str!("trial.ptx");
        let of_board = |offset: usize| if offset == 0 { String::new() } else { format!("+{offset}") };
        for (offset, before) in [
            (offset_of!(TrialBoard, limit), "ld.volatile.global.u64 limit, [board"),
            (offset_of!(TrialBoard, landed), "ld.volatile.global.u64 landed, [board"),
            (offset_of!(TrialBoard, state), "st.relaxed.sys.global.u64 [board"),
            (offset_of!(TrialBoard, found), "st.global.u64 [to"),
            (offset_of!(Post, ring), "ld.volatile.global.u64 ring, [post"),
            (offset_of!(Post, record), "ld.volatile.global.u64 record, [post"),
            (offset_of!(Post, record_value), "ld.volatile.global.u64 value, [post"),
            (offset_of!(Post, bell), "ld.volatile.global.u64 bell, [post"),
            (offset_of!(Post, bell_value), "ld.volatile.global.u64 value, [post"),
            (offset_of!(Post, completions), "ld.volatile.global.u64 completions, [post"),
            (offset_of!(Post, entries), "ld.volatile.global.v2.u64 {x0, x1}, [from"),
            (offset_of!(Post, told), "st.global.v2.u64 [post"),
            (offset_of!(Post, told) + 16, "st.global.v2.u64 [post"),
            (SECOND_LAST as usize, "ld.volatile.global.u64 owner, [completions"),
            (SECOND_LAST as usize - 8, "ld.volatile.global.v2.u64 {x0, x1}, [completions"),
        ] {
            let instruction = format!("{before}{}]", of_board(offset));
            assert!(text.contains(&instruction), "{instruction}");
        }
        for instruction in [
            format!("add.u64 post, board, {};", offset_of!(TrialBoard, posts)),
            format!("add.u64 behind, post, {};", size_of::<[Post; 2]>()),
            format!("add.u64 post, post, {};", size_of::<Post>()),
            format!("setp.ne.u64 p, owner, {NEVER:#x};"),
            format!("setp.lt.u64 p, at, {};", 8 * LANDED_WORDS),
            format!("setp.lt.u64 p, at, {};", 8 * ENTRY_WORDS),
        ] {
            assert!(text.contains(&instruction), "{instruction}");
        }
    }

    /// A queue pair in plain memory.
    struct Pair {
        ring: [u64; ENTRY_WORDS],
        completions: [u64; 16],
        words: [u64; 2],
    }

    fn pair() -> Pair {
        let mut completions = [0; 16];
        (completions[7], completions[15]) = (u64::from(NEVER) << 56, u64::from(NEVER) << 56);
        Pair { ring: [0; ENTRY_WORDS], completions, words: [0; 2] }
    }

    fn post(pair: &mut Pair, has_record: bool) -> Post {
        let [record, bell] = [0, 1].map(|i| pair.words[i..].as_mut_ptr() as u64);
        Post {
            ring: pair.ring.as_mut_ptr() as u64,
            record: if has_record { record } else { 0 },
            record_value: 2u32.to_be().into(),
            bell,
            bell_value: 77,
            completions: pair.completions.as_mut_ptr() as u64,
            entries: std::array::from_fn(|i| i as u64 + 1),
            ..Post::default()
        }
    }

    #[test]
    fn a_processor_posts_rings_and_tells_what_it_sees() {
        let (mut pairs, mut landed) = ([pair(), pair()], [0; LANDED_WORDS]);
        let [main, companion] = &mut pairs;
        let mut board = TrialBoard {
            limit: u64::MAX,
            landed: landed.as_mut_ptr() as u64,
            posts: [post(main, true), post(companion, false)],
            ..TrialBoard::default()
        };
        let last = [0, 1].map(|i| board.posts[i].completions + SECOND_LAST);
        // SAFETY: all of it is this test's.
        let mut player = unsafe { Player::new(&mut board) };
        assert!(!player.step() && !player.step());
        let words = |pairs: &[Pair; 2]| pairs.each_ref().map(|pair| pair.words);
        assert_eq!(words(&pairs), [[2u32.to_be().into(), 77], [0, 0]]);
        (pairs[0].completions[6], pairs[0].completions[7]) = (0x04 << 56, 0xd0 << 56);
        at_64(last[0]).store(0, Ordering::Release);
        assert!(!player.step() && !player.step() && !player.step());
        assert_eq!(words(&pairs), [[2u32.to_be().into(), 77], [0, 77]]);
        assert!(pairs.iter().all(|pair| pair.ring == std::array::from_fn(|i| i as u64 + 1)));
        landed = std::array::from_fn(|i| 9 + i as u64);
        at_64(last[1]).store(0, Ordering::Release);
        assert!(!player.step() && player.step());
        assert_eq!((board.state, board.found), (COMPLETED, landed));
        assert_eq!([0, 1].map(|i| board.posts[0].completion(i)), [Some((13, 4)), Some((0, 0))]);
        assert_eq!([0, 1].map(|i| board.posts[1].completion(i)), [None, Some((0, 0))]);
    }

    #[test]
    fn a_processor_gives_up_and_needs_no_companion() {
        let (mut main, mut landed) = (pair(), [0; LANDED_WORDS]);
        let mut board = TrialBoard {
            landed: landed.as_mut_ptr() as u64,
            posts: [post(&mut main, true), Post::default()],
            ..TrialBoard::default()
        };
        // SAFETY: as above.
        let mut player = unsafe { Player::new(&mut board) };
        while !player.step() {}
        assert_eq!(board.state, TIME_OVER);
        assert!(board.posts.iter().all(|post| [0, 1].iter().all(|&i| post.completion(i).is_none())));
    }
}
