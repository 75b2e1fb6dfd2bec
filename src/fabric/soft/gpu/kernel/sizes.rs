//! How large the next launches are.

use crate::fabric::soft::gpu::plan::LaunchSize;

/// So many launches without a copy for their size still have it.
const STAYS: u32 = 64;
/// After a launch of one block that was late so many have one warp, for which a full GPU has room sooner.
const SMALL: u32 = 8;

/// What was asked for, counted in launches to come.
#[derive(Debug, Default)]
pub struct Sizes {
    /// With at least a block.
    block: u32,
    /// With worker blocks.
    worker_blocks: u32,
    /// Of one warp, unless they have worker blocks.
    small: u32,
}

impl Sizes {
    /// There is work for this size.
    pub fn want(&mut self, size: LaunchSize) {
        if size >= LaunchSize::Block {
            self.block = STAYS;
        }
        if size == LaunchSize::WorkerBlocks {
            self.worker_blocks = STAYS;
        }
    }

    /// The size of the next launch.
    pub fn next(&self) -> LaunchSize {
        match self {
            Self { worker_blocks: 1.., .. } => LaunchSize::WorkerBlocks,
            Self { block: 1.., small: 0, .. } => LaunchSize::Block,
            _ => LaunchSize::Warp,
        }
    }

    /// It was asked for.
    pub fn launched(&mut self) {
        for left in [&mut self.block, &mut self.worker_blocks, &mut self.small] {
            *left = left.saturating_sub(1);
        }
    }

    /// One of this size was late.
    pub fn late(&mut self, size: LaunchSize) {
        if size == LaunchSize::Block {
            self.small = SMALL;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(sizes: &mut Sizes, times: u32) -> Vec<LaunchSize> {
        let one = |_| {
            let size = sizes.next();
            sizes.launched();
            size
        };
        (0..times).map(one).collect()
    }

    #[test]
    fn a_size_stays_for_some_launches_behind_the_last_copy_for_it() {
        let mut sizes = Sizes::default();
        assert_eq!(sizes.next(), LaunchSize::Warp);
        sizes.want(LaunchSize::Block);
        assert!(launch(&mut sizes, STAYS / 2).iter().all(|s| *s == LaunchSize::Block));
        sizes.want(LaunchSize::WorkerBlocks);
        assert!(launch(&mut sizes, STAYS).iter().all(|s| *s == LaunchSize::WorkerBlocks));
        assert_eq!(sizes.next(), LaunchSize::Warp);
    }

    #[test]
    fn a_late_block_makes_the_next_launches_small_but_not_those_with_worker_blocks() {
        let mut sizes = Sizes::default();
        sizes.want(LaunchSize::Block);
        sizes.late(LaunchSize::Block);
        assert!(launch(&mut sizes, SMALL).iter().all(|s| *s == LaunchSize::Warp));
        assert_eq!(sizes.next(), LaunchSize::Block);
        sizes.late(LaunchSize::Block);
        sizes.want(LaunchSize::WorkerBlocks);
        assert_eq!(sizes.next(), LaunchSize::WorkerBlocks);
        sizes.late(LaunchSize::WorkerBlocks);
        assert_eq!(sizes.next(), LaunchSize::WorkerBlocks);
    }
}
