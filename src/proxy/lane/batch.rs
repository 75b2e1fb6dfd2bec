//! A thread's room for one batch of entries and their operations.

use super::BATCH;
use crate::fabric::lanes::{Apart, LONGEST};
use crate::memory::key::Key;
use crate::proxy::ops::Ops;
use crate::proxy::ring::Finish;
use crate::rma::op::Op;

/// A thread's room for one batch, used again and again.
pub struct Batch {
    pub(super) ops: Ops,
    /// So many of the first operations need nothing but the credits of their entries.
    pub(super) plain: u32,
    /// A bit for each of these, the lowest for the first: it has two entries.
    pub(super) joined: u32,
    /// The entries behind these.
    pub(super) others: Vec<Other>,
    /// So many of the operations the fabric took.
    pub(super) posted: usize,
}

/// An entry of a batch that is not one operation and its credit.
#[derive(Clone, Copy)]
pub(super) struct Other {
    pub(super) finish: Finish,
    /// Its operations.
    pub(super) ops: u8,
    /// They bring something here that has to be visible before it is complete.
    pub(super) brings: bool,
    /// A kernel would have taken it, if it takes its operation.
    pub(super) may_suit: bool,
}

impl Other {
    fn new(finish: Finish, ops: u8) -> Self {
        Self { finish, ops, brings: false, may_suit: ops == 1 && finish == Finish::NONE }
    }
}

/// Copies that are not longer than `longest`, and what else a kernel takes. It writes into GPU memory alone, and reads
/// from that, but for gets, which come out of some host memory, too.
fn is_for_kernel(op: &Op, longest: u64) -> bool {
    let is_on_gpu = |key: u32| Key(key).is_on_gpu();
    match op {
        Op::Put(put) => put.len == 0 || put.len <= longest && is_on_gpu(put.lkey) && is_on_gpu(put.rkey),
        Op::Get(get) => get.len <= longest && is_on_gpu(get.lkey),
        Op::Value(value) => value.payload.bytes().len() <= 8 && is_on_gpu(value.rkey),
        Op::Atomic(_) => false,
    }
}

impl Default for Batch {
    fn default() -> Self {
        Self {
            ops: Ops::with_capacity(BATCH as usize),
            plain: 0,
            joined: 0,
            others: Vec::with_capacity(BATCH as usize),
            posted: 0,
        }
    }
}

impl Batch {
    pub(super) fn clear(&mut self) {
        self.ops.clear();
        (self.plain, self.joined) = (0, 0);
        self.others.clear();
        self.posted = 0;
    }

    /// The operations that the fabric took of the last visit's batch.
    pub fn posted(&self) -> &[Op] {
        &self.ops[..self.posted]
    }

    /// Whether a kernel that serves the lane would have taken all of the last visit's entries. `apart`: what lay
    /// between long copies so far.
    #[inline]
    pub fn suits_kernel(&self, apart: &mut Apart) -> bool {
        let is_for_kernel = |op: &Op| {
            let longest = apart.longest();
            apart.note(if let Op::Put(_) | Op::Get(_) = op { op.len() } else { 0 });
            is_for_kernel(op, longest)
        };
        // Each is counted, whether those before it are for the kernel or not.
        let all = self.posted().iter().map(is_for_kernel).fold(true, |all, one| all & one);
        all && self.others.iter().all(|other| other.may_suit)
    }

    /// The same of what has been read so far, where copies that are longer than [`LONGEST`] do not count.
    pub(super) fn would_suit_kernel(&self) -> bool {
        self.others.iter().all(|other| other.may_suit) && self.ops.iter().all(|op| is_for_kernel(op, LONGEST))
    }

    /// Bytes that these move.
    #[inline(always)]
    pub fn posted_bytes(&self) -> u64 {
        self.ops.bytes_of(self.posted)
    }

    /// Of each entry of that batch, how many operations it has.
    pub fn counts(&self) -> impl Iterator<Item = u8> + '_ {
        let plain = (0..self.plain).flat_map(|op| std::iter::once(1).chain((self.joined >> op & 1 > 0).then_some(0)));
        plain.chain(self.others.iter().map(|other| other.ops))
    }

    #[inline(always)]
    pub(super) fn add(&mut self, finish: Finish, has_op: bool) {
        if has_op && finish == Finish::NONE && self.others.is_empty() {
            self.plain += 1;
        } else {
            self.others.push(Other::new(finish, has_op.into()));
        }
    }

    /// An entry without an operation of its own, of a kind that a kernel takes.
    pub(super) fn add_nop(&mut self) {
        self.others.push(Other { may_suit: true, ..Other::new(Finish::NONE, 0) });
    }

    /// An entry that is a part of the last operation.
    #[inline(always)]
    pub(super) fn add_joined(&mut self) {
        match self.plain {
            1.. if self.others.is_empty() => self.joined |= 1 << (self.plain - 1),
            _ => self.add_nop(),
        }
    }

    /// Entries of the first `ops` operations, which are plain.
    #[inline(always)]
    pub(super) fn entries(&self, ops: u32) -> u32 {
        if self.joined == 0 {
            return ops;
        }
        let of_them = 1_u32.checked_shl(ops).unwrap_or(0).wrapping_sub(1);
        ops + (self.joined & of_them).count_ones()
    }

    /// An entry of so many operations.
    pub(super) fn add_several(&mut self, ops: u8) {
        self.others.push(Other { may_suit: false, ..Other::new(Finish::NONE, ops) });
    }

    /// The same where they bring something here.
    pub(super) fn add_gets(&mut self, ops: u8) {
        self.others.push(Other { brings: true, ..Other::new(Finish::NONE, ops) });
    }

    pub(super) fn len(&self) -> u32 {
        self.entries(self.plain) + self.others.len() as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rma::op::{Get, Payload, Put, Value};

    const HOST: u32 = 1;
    const GPU: u32 = Key::gpu(1, false).0;

    fn put(lkey: u32, rkey: u32, len: u64) -> Op {
        Op::Put(Put { local: 0, lkey, rkey, remote: 0, len, signal: None, more: false })
    }

    #[test]
    fn what_moves_bytes_from_or_to_host_memory_does_not_suit() {
        let value = |rkey| {
            let payload = Payload::new(&[7]).expect("a byte");
            Op::Value(Value { payload, rkey, remote: 0, signal: None, more: false })
        };
        for (op, suits) in [
            (put(GPU, GPU, 8), true),
            (put(HOST, GPU, 8), false),
            (put(GPU, HOST, 8), false),
            (put(HOST, HOST, 0), true),
            (value(GPU), true),
            (value(HOST), false),
        ] {
            assert_eq!(is_for_kernel(&op, LONGEST), suits, "{op:?}");
        }
    }

    #[test]
    fn what_is_behind_an_entry_that_asks_for_nothing_suits_as_ever() {
        let put = |len| put(GPU, GPU, len);
        let suits = |fill: &dyn Fn(&mut Batch)| {
            let mut batch = Batch::default();
            batch.add_nop();
            batch.ops.push(put(8));
            batch.add(Finish::NONE, true);
            batch.add_joined();
            fill(&mut batch);
            batch.posted = batch.ops.len();
            // Behind a long copy.
            let mut apart = Apart::default();
            apart.note(LONGEST + 1);
            let suits = batch.suits_kernel(&mut apart);
            assert_eq!(suits, batch.would_suit_kernel());
            suits
        };
        assert!(suits(&|_| ()));
        assert!(!suits(&|batch| batch.add(Finish::NONE, false)), "a wait");
        assert!(!suits(&|batch| batch.add(Finish(1), true)), "a counter");
        assert!(!suits(&|batch| batch.add_several(1)), "several ranges");
        let get = |len, lkey| Op::Get(Get { local: 0, lkey, rkey: HOST, remote: 0, len, more: false });
        let gets = |ops: u8, len: u64, lkey: u32| {
            suits(&|batch| {
                (0..ops).for_each(|_| batch.ops.push(get(len, lkey)));
                batch.add_gets(ops);
            })
        };
        assert!(gets(1, LONGEST, GPU));
        assert!(!gets(1, 8, HOST), "into host memory");
        assert!(!gets(2, 8, GPU) && !gets(1, LONGEST + 1, GPU));
        assert!(!suits(&|batch| {
            batch.ops.push(put(LONGEST + 1));
            batch.add(Finish::NONE, true);
        }));
    }
    #[test]
    fn a_longer_copy_suits_behind_four_others_or_a_pause() {
        use crate::fabric::lanes::{LONGEST_APART, LONGEST_PAUSED};
        let put = |len| put(GPU, GPU, len);
        let visit_of = |apart: &mut Apart, lens: &[u64]| {
            let mut batch = Batch::default();
            for len in lens {
                batch.ops.push(put(*len));
                batch.add(Finish::NONE, true);
            }
            batch.posted = lens.len();
            assert_eq!(batch.would_suit_kernel(), lens.iter().all(|len| *len <= LONGEST));
            batch.suits_kernel(apart)
        };
        let mut apart = Apart::default();
        let mut visit_behind = |is_paused: bool, lens: &[u64]| {
            if is_paused {
                apart.pause();
            }
            visit_of(&mut apart, lens)
        };
        let paused = visit_behind(true, &[LONGEST_APART]);
        assert!(paused && visit_behind(true, &[8, LONGEST_PAUSED]) && !visit_behind(true, &[LONGEST_PAUSED + 4]));
        assert!(visit_behind(true, &[LONGEST_PAUSED]) && !visit_behind(false, &[LONGEST_PAUSED]));
        let mut apart = Apart::default();
        let mut visit = |lens: &[u64]| visit_of(&mut apart, lens);
        assert!(visit(&[LONGEST_APART]), "the first one");
        assert!(visit(&[8, 8]) && visit(&[8, LONGEST]));
        assert!(visit(&[LONGEST + 4, 8, 8, 8, 8, LONGEST_APART]), "four lie between");
        assert!(!visit(&[8, 8, 8, LONGEST + 4]), "three do");
        assert!(!visit(&[LONGEST + 4]), "none does");
        assert!(!visit(&[8, 8, 8, 8, LONGEST_APART + 4]), "too long");
        assert!(visit(&[8, 8, 8, 8]) && visit(&[LONGEST_APART]));
    }
}
