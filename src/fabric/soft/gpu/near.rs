//! Copies within a GPU by way of pinned memory. Copy engines can do them in no other way: from one place of a GPU to
//! another the driver has its processors copy.

use super::batch::PIECE;
use oxygin_ffi::cuda::{Copies, Cuda, CudaError, Event, Stream};
use std::sync::Arc;

/// Copies that go out to pinned memory together, and then on from there.
#[derive(Default)]
struct NearGroup {
    out: Copies,
    into: Copies,
    bytes: u64,
}

/// The copies of one submission, in groups that follow each other: one goes out while the one before it comes back.
#[derive(Default)]
pub struct NearGroups {
    all: Vec<NearGroup>,
    /// Of so many bytes at the front an earlier submission began the copy.
    begun: u64,
}

impl NearGroups {
    /// None yet, of which the first `begun` bytes are more of a copy that an earlier submission began.
    pub fn after(begun: u64) -> Self {
        Self { all: Vec::new(), begun }
    }

    /// Adds a copy, `by` the address of a place in pinned memory.
    pub fn push(&mut self, to: u64, from: u64, bytes: u64, by: u64) {
        if self.all.last().is_none_or(|group| group.bytes >= PIECE) {
            self.all.push(NearGroup::default());
        }
        if let Some(group) = self.all.last_mut() {
            group.out.push(by, from, bytes as usize);
            group.into.push(to, by, bytes as usize);
            group.bytes += bytes;
        }
    }

    /// All copies.
    pub fn copies(&self) -> impl Iterator<Item = &Copies> {
        self.all.iter().flat_map(|group| [&group.out, &group.into])
    }

    /// How many groups at the front need not wait for what was started before.
    fn free(&self) -> usize {
        let mut bytes = 0;
        let is_begun = |group: &&NearGroup| {
            bytes += group.bytes;
            bytes <= self.begun
        };
        self.all.iter().take_while(is_begun).count()
    }
}

/// The stream on which copies go out.
pub struct NearStream {
    out: Stream,
    event: Event,
}

impl NearStream {
    /// One in the current context. Set-up only.
    pub fn create(cuda: &Arc<Cuda>) -> Result<Self, CudaError> {
        Ok(Self { out: Stream::create(cuda)?, event: Event::create(cuda)? })
    }

    /// The stream, for questions.
    pub fn stream(&self) -> &Stream {
        &self.out
    }

    /// Starts copies that go out here and come back on `back`. All of them follow what `back` was given before, but
    /// those that continue what an earlier submission began, which has waited for that: the way out is never empty
    /// while a long copy lasts.
    ///
    /// # Safety
    /// All addresses stay valid until `back` has done them; it is of the context that is current.
    pub unsafe fn start(&self, back: &Stream, groups: &NearGroups) -> Result<(), CudaError> {
        let free = groups.free();
        for (i, group) in groups.all.iter().enumerate() {
            if i == free {
                self.out.follow(back, &self.event)?;
            }
            // SAFETY: passed on; `back` is behind what goes out.
            unsafe {
                self.out.copy(&group.out)?;
                back.follow(&self.out, &self.event)?;
                back.copy_in(&group.into)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pieces of so many KiB after `begun` KiB: those of each group, and how many groups need not wait.
    fn grouped(begun: u64, pieces: &[u64]) -> (Vec<Vec<usize>>, usize) {
        let mut groups = NearGroups::after(begun << 10);
        let mut at = 0;
        for kib in pieces {
            groups.push(at, 1 << 40 | at, kib << 10, 1 << 41 | at);
            at += kib << 10;
        }
        let kib = |copies: &Copies| copies.iter().map(|(_, _, bytes)| bytes >> 10).collect::<Vec<_>>();
        for group in &groups.all {
            assert_eq!(kib(&group.out), kib(&group.into));
            for ((by, from, _), (to, also_by, _)) in group.out.iter().zip(group.into.iter()) {
                assert_eq!((by, from), (also_by, 1 << 40 | to));
            }
        }
        (groups.all.iter().map(|group| kib(&group.out)).collect(), groups.free())
    }

    #[test]
    fn short_copies_go_together_and_a_group_is_a_piece_or_more() {
        assert_eq!(grouped(0, &[]), (vec![], 0));
        assert_eq!(grouped(0, &[1024, 1024, 4]), (vec![vec![1024], vec![1024], vec![4]], 0));
        assert_eq!(grouped(0, &[8, 1016, 1000, 1024]), (vec![vec![8, 1016], vec![1000, 1024]], 0));
    }

    #[test]
    fn only_what_continues_an_earlier_submission_goes_at_once() {
        assert_eq!(grouped(1024, &[1024, 1024]).1, 1);
        assert_eq!(grouped(2048, &[1024, 1024]).1, 2);
        // Part of a group does not.
        assert_eq!(grouped(8, &[8, 1024]).1, 0);
        assert_eq!(grouped(1032, &[1024, 8, 1000]).1, 1);
    }
}
