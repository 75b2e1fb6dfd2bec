//! Queues that are brought to the GPU while the lane kernel serves them: device code's stores and the kernel's looks
//! are local then, instead of trips over PCIe.

use crate::fabric::lanes::{Format, LaneView, Rings, DOORBELL_ROOM};

/// Ranges of managed memory: addresses and bytes, apart from each other.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Ranges(Vec<(u64, u64)>);

impl Ranges {
    /// Where these queues are, all of them in such memory.
    pub fn of<'a>(lanes: impl Iterator<Item = &'a LaneView>) -> Self {
        let (mut slots, mut words, mut completions) = (Vec::new(), Vec::new(), Vec::new());
        for lane in lanes {
            let (size, bytes) = (u64::from(lane.size), u64::from(lane.size) * u64::from(lane.format.bytes()));
            slots.push((lane.slots, bytes));
            match lane.format {
                Format::Entries { rings: Rings::Words(at), .. } => words.push((at, 8 * size)),
                Format::Entries { rings: Rings::Doorbell { at, completions: first }, .. } => {
                    words.push((at, DOORBELL_ROOM));
                    completions.push((first, bytes));
                }
                Format::Short | Format::Long(_) => {}
            }
        }
        Self([joined(slots), joined(words), joined(completions)].concat())
    }
}

/// Those beside each other as one. The driver takes no range that reaches from one allocation into another, so slots,
/// words and completion queues, which have one each, are never joined.
fn joined(mut ranges: Vec<(u64, u64)>) -> Vec<(u64, u64)> {
    ranges.sort_unstable();
    let mut joined: Vec<(u64, u64)> = Vec::new();
    for (at, bytes) in ranges {
        match joined.last_mut() {
            Some((first, before)) if *first + *before == at => *before += bytes,
            _ => joined.push((at, bytes)),
        }
    }
    joined
}

impl From<Ranges> for Vec<(u64, u64)> {
    fn from(ranges: Ranges) -> Self {
        ranges.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lane(slots: u64, format: Format) -> LaneView {
        LaneView { slots, size: 64, format, ..LaneView::default() }
    }

    #[test]
    fn queues_beside_each_other_are_one_range() {
        let entries = |slots, at| lane(slots, Format::Entries { number: 1, rings: Rings::Words(at) });
        let all = [entries(0x11000, 0x15200), entries(0x10000, 0x15000), entries(0x14000, 0x15400)];
        let ranges: Vec<_> = Ranges::of(all.iter()).into();
        assert_eq!(ranges, [(0x10000, 0x2000), (0x14000, 0x1000), (0x15000, 0x600)]);
        let bell = |slots, at, completions| {
            lane(slots, Format::Entries { number: 1, rings: Rings::Doorbell { at, completions } })
        };
        let all = [bell(0x10000, 0x15000, 0x20000), bell(0x11000, 0x15080, 0x21000)];
        let ranges: Vec<_> = Ranges::of(all.iter()).into();
        assert_eq!(ranges, [(0x10000, 0x2000), (0x15000, 0x100), (0x20000, 0x2000)]);
        let all = [lane(0x2000, Format::Short), lane(0x8000, Format::Long(2))];
        assert_eq!(Vec::from(Ranges::of(all.iter())), [(0x2000, 0x1000), (0x8000, 0x2000)]);
    }
}
