//! A thread's room for one batch of entries and their operations.

use super::BATCH;
use crate::fabric::lanes::LONGEST;
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
    /// It asks for nothing, and a kernel would have taken it.
    pub(super) is_nop: bool,
}

impl Other {
    fn new(finish: Finish, ops: u8) -> Self {
        Self { finish, ops, brings: false, is_nop: false }
    }
}

fn is_for_kernel(op: &Op) -> bool {
    match op {
        Op::Put(put) => put.len <= LONGEST,
        Op::Value(value) => value.payload.bytes().len() <= 8,
        Op::Get(_) | Op::Atomic(_) => false,
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

    /// Whether a kernel that serves the lane would have taken all of the last visit's entries.
    #[inline]
    pub fn suits_kernel(&self) -> bool {
        self.others.iter().all(|other| other.is_nop) && self.posted().iter().all(is_for_kernel)
    }

    /// The same of what has been read so far.
    pub(super) fn would_suit_kernel(&self) -> bool {
        self.others.iter().all(|other| other.is_nop) && self.ops.iter().all(is_for_kernel)
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

    pub(super) fn add_nop(&mut self) {
        self.others.push(Other { is_nop: true, ..Other::new(Finish::NONE, 0) });
    }

    /// An entry that is a part of the last operation.
    #[inline(always)]
    pub(super) fn add_joined(&mut self) {
        match self.plain {
            1.. if self.others.is_empty() => self.joined |= 1 << (self.plain - 1),
            _ => self.add(Finish::NONE, false),
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

    /// An entry of so many operations, which bring something here or do not.
    pub(super) fn add_several(&mut self, ops: u8, brings: bool) {
        self.others.push(Other { brings, ..Other::new(Finish::NONE, ops) });
    }

    pub(super) fn len(&self) -> u32 {
        self.entries(self.plain) + self.others.len() as u32
    }
}
