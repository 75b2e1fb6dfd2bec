//! A thread's room for one batch of entries and their operations.

use super::BATCH;
use crate::proxy::ring::Finish;
use crate::rma::op::Op;

/// A thread's room for one batch, used again and again.
pub struct Batch {
    pub(super) ops: Vec<Op>,
    /// So many of the first entries are operations that need nothing but their credits.
    pub(super) plain: u32,
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
}

impl Default for Batch {
    fn default() -> Self {
        Self {
            ops: Vec::with_capacity(BATCH as usize),
            plain: 0,
            others: Vec::with_capacity(BATCH as usize),
            posted: 0,
        }
    }
}

impl Batch {
    pub(super) fn clear(&mut self) {
        self.ops.clear();
        self.plain = 0;
        self.others.clear();
        self.posted = 0;
    }

    /// The operations that the fabric took of the last visit's batch.
    pub fn posted(&self) -> &[Op] {
        &self.ops[..self.posted]
    }

    /// Of each entry of that batch, how many operations it has.
    pub fn counts(&self) -> impl Iterator<Item = u8> + '_ {
        std::iter::repeat_n(1, self.plain as usize).chain(self.others.iter().map(|other| other.ops))
    }

    #[inline(always)]
    pub(super) fn add(&mut self, finish: Finish, has_op: bool) {
        if has_op && finish == Finish::NONE && self.others.is_empty() {
            self.plain += 1;
        } else {
            self.others.push(Other { finish, ops: has_op.into(), brings: false });
        }
    }

    /// An entry of so many operations, which bring something here or do not.
    pub(super) fn add_several(&mut self, ops: u8, brings: bool) {
        self.others.push(Other { finish: Finish::NONE, ops, brings });
    }

    pub(super) fn len(&self) -> u32 {
        self.plain + self.others.len() as u32
    }
}
