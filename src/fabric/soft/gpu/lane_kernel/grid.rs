//! How many blocks a launch has, of how many warps, and which lanes each warp gets.

use super::board::ROOM;
use crate::fabric::lanes::LANES;

/// Warps of a block. Each looks at eight descriptors at once, and moves some 4 GB/s: who has many queues has much to
/// move.
pub const WARPS: usize = 8;
/// The same of small blocks. A multiprocessor has four parts with registers of their own. Beside an application's
/// block of 1024 threads, which is eight warps a part, there is room for one warp of ours where that has up to 32
/// registers a thread (`lanes.ptx` has 187 for send entries: up to 40), and never for two.
pub const SMALL_WARPS: usize = 4;
/// Blocks at most, as long as there is room for all lanes in so many: each may have eight times as many as warps. Every
/// block takes a part of a multiprocessor from the application.
const USUAL: usize = 8;
/// Blocks at most. Lanes without room are the CPU's, which is slower with a few of them than the kernel with all.
pub const BLOCKS: usize = LANES / ROOM;
/// Lanes of a warp at most: one for each slot of a look.
const OF_A_WARP: usize = 8;

/// What a launch is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    pub blocks: usize,
    /// Of each.
    pub warps: usize,
}

impl Grid {
    /// For so many lanes. `is_small`: launches came late of late, and so a GPU on which all find a place at once may be
    /// rare.
    pub fn of(lanes: usize, is_small: bool) -> Self {
        let warps = if is_small && lanes <= BLOCKS * SMALL_WARPS * OF_A_WARP { SMALL_WARPS } else { WARPS };
        let least = lanes.div_ceil(warps * OF_A_WARP);
        let blocks = match is_small {
            true if warps == WARPS => least.min(USUAL),
            // A warp for each lane, or twice as many blocks, which are half as large.
            true => lanes.div_ceil(warps).min(2 * USUAL).max(least),
            false => lanes.div_ceil(warps).min(USUAL).max(least),
        };
        Self { blocks: blocks.clamp(1, BLOCKS), warps }
    }

    /// How many lanes it has room for.
    pub fn room(self) -> usize {
        self.blocks * self.warps * OF_A_WARP
    }

    /// Threads of a block.
    pub fn threads(self) -> u32 {
        32 * self.warps as u32
    }
}

/// Where the lanes of a block are: they are dealt to the warps one after another.
#[derive(Clone, Copy, Debug, Default)]
pub struct Deal {
    lanes: usize,
    warps: usize,
    /// How many lanes a warp has, as a power of two.
    spread: u32,
}

impl Deal {
    /// Of so many lanes to so many warps.
    pub fn of(lanes: usize, warps: usize) -> Self {
        Self { lanes, warps, spread: lanes.div_ceil(warps).next_power_of_two().trailing_zeros() }
    }

    /// How many there are.
    pub fn lanes(self) -> usize {
        self.lanes
    }

    /// How many a warp has, as a power of two.
    pub fn spread(self) -> u32 {
        self.spread
    }

    /// The place of the `nth` lane.
    #[inline]
    pub fn place(self, nth: usize) -> usize {
        ((nth % self.warps) << self.spread) + nth / self.warps
    }

    /// Which lane a place has, if there are so many. `None`: it is no warp's.
    pub fn nth(self, place: usize) -> Option<usize> {
        let (warp, at) = (place >> self.spread, place & ((1 << self.spread) - 1));
        (warp < self.warps).then_some(at * self.warps + warp)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_lanes_have_a_warp_each() {
        let spread = |lanes| Deal::of(lanes, WARPS).spread;
        assert_eq!([1, 8, 9, 16, 17, 32, 33, 64].map(spread), [0, 0, 1, 1, 2, 2, 3, 3]);
        let spread = |lanes| Deal::of(lanes, SMALL_WARPS).spread;
        assert_eq!([1, 4, 5, 8, 9, 16, 17, 32].map(spread), [0, 0, 1, 1, 2, 2, 3, 3]);
    }

    #[test]
    fn each_lane_has_a_place_of_its_own_and_warps_have_as_many_as_others() {
        for (warps, lanes) in [WARPS, SMALL_WARPS].into_iter().flat_map(|w| (1..=w * OF_A_WARP).map(move |n| (w, n))) {
            let deal = Deal::of(lanes, warps);
            let places: Vec<_> = (0..lanes).map(|nth| deal.place(nth)).collect();
            assert!(
                places.iter().zip(0..).all(|(&place, nth)| place < ROOM && deal.nth(place) == Some(nth)),
                "{lanes}"
            );
            let of_warp = |warp: usize| places.iter().filter(|&&place| place >> deal.spread == warp).count();
            let counts: Vec<_> = (0..warps).map(of_warp).collect();
            assert!(counts.iter().max().unwrap() - counts.iter().min().unwrap() <= 1, "{lanes}: {counts:?}");
            let others = (0..ROOM).filter(|place| !places.contains(place));
            assert!(others.into_iter().all(|place| deal.nth(place).is_none_or(|nth| nth >= lanes)), "{lanes}");
        }
    }

    #[test]
    fn a_launch_has_blocks_for_its_lanes() {
        let all = [0, 1, 8, 9, 32, 64, 65, 256, 512, 513, 1000, 9999];
        let of = |is_small| all.map(|lanes| Grid::of(lanes, is_small));
        assert_eq!(of(false).map(|grid| grid.blocks), [1, 1, 1, 2, 4, 8, 8, 8, 8, 9, 16, 16]);
        assert!(of(false).iter().all(|grid| grid.warps == WARPS));
        assert_eq!(of(true).map(|grid| grid.blocks), [1, 1, 2, 3, 8, 16, 16, 16, 16, 8, 8, 8]);
        assert_eq!(of(true).map(|grid| grid.warps), [4, 4, 4, 4, 4, 4, 4, 4, 4, 8, 8, 8]);
        for (lanes, grid) in all.iter().zip(of(false)).chain(all.iter().zip(of(true))) {
            assert!(grid.room() >= *lanes.min(&512));
        }
    }
}
