//! Tables of ranks, one in host memory that the driver made for GPUs and one on the rank's GPU, and where what is
//! fetched from them comes to. DeepEP's engrams are such tables.

use super::super::memory::pattern;
use super::super::*;
use nccl_plugin_api::PTR_HOST;

pub const CONTEXTS: usize = 8;
/// Entries of a table, their words, and how many are fetched at once from a rank through a context.
const ENTRIES: usize = 512;
const WORDS: usize = 32;
/// Bytes of an entry.
pub const ENTRY: usize = 8 * WORDS;
pub const EACH: usize = 24;
pub const BYTES: usize = ENTRIES * ENTRY;

/// A rank's tables, and where entries come to.
pub struct Tables<'a> {
    /// What device code calls them: the one in host memory, the one on the GPU, and where entries come to.
    pub names: [u64; 3],
    pub landing: &'a [AtomicU64],
}

/// What a rank's table holds at a word; `which`: of the two.
fn word(which: usize, rank: usize, i: usize) -> u64 {
    pattern(rank, i) ^ (which as u64) << 48
}

/// Which entry comes to a place.
fn entry_of(round: usize, context: usize, peer: usize, nth: usize) -> usize {
    (round * 7919 + context * 104_729 + peer * 1299 + nth * 37) % ENTRIES
}

/// The offset of that entry.
pub fn entry_at(round: usize, context: usize, peer: usize, nth: usize) -> u64 {
    (entry_of(round, context, peer, nth) * ENTRY) as u64
}

/// The offset of the place. There is one for each of a round.
pub fn place(r: &Rank, context: usize, peer: usize, nth: usize) -> u64 {
    let ranks = r.job.nranks;
    assert!(CONTEXTS * ranks * EACH <= ENTRIES);
    (((context * ranks + peer) * EACH + nth) * ENTRY) as u64
}

impl Tables<'_> {
    /// `who`: GPUs that the host memory is made for. `register`: makes memory of so many [`BYTES`] and this kind a
    /// window, and says what device code calls it.
    pub fn new(fake: &Fake, r: &Rank, gpu: c_int, who: u64, register: impl Fn(u64, c_int) -> u64) -> Self {
        // SAFETY: a function of the fake driver, of this type.
        let host = unsafe { fake.call::<extern "C" fn(usize, u64) -> u64>(b"fake_alloc_host")(BYTES, who) };
        let [table, landing] = [(), ()].map(|()| fake.segments(gpu, &[BYTES], true));
        // SAFETY: windows of so many words, which stay.
        let words = |at| unsafe { std::slice::from_raw_parts(at as *const AtomicU64, BYTES / 8) };
        for (which, all) in [words(host), words(fake.peek(table) as u64)].into_iter().enumerate() {
            (0..).zip(all).for_each(|(i, at)| at.store(word(which, r.rank, i), Ordering::Release));
        }
        let kinds = [(host, PTR_HOST), (table, PTR_CUDA), (landing, PTR_CUDA)];
        // GPU windows first: what is registered before them is host memory like any other.
        let mut names = [0; 3];
        for which in [1, 2, 0] {
            let (at, kind) = kinds[which];
            names[which] = register(at, kind);
        }
        Self { names, landing: words(fake.peek(landing) as u64) }
    }

    /// What has come from a rank in a round, out of the table in host memory in even ones.
    pub fn check(&self, r: &Rank, round: usize, context: usize, peer: usize) {
        for nth in 0..EACH {
            let (entry, place) = (entry_of(round, context, peer, nth), place(r, context, peer, nth) as usize / 8);
            let wrong = (0..WORDS).find(|i| {
                let found = self.landing[place + i].load(Ordering::Acquire);
                found != word(round % 2, peer, entry * WORDS + i)
            });
            assert_eq!(wrong, None, "round {round}, context {context}, entry {entry} of rank {peer}");
        }
    }
}
