//! Consumer indices in GPU memory.
//!
//! Device code reads a queue's consumer index before every post and all the time while it flushes. In host memory each
//! look is a read over PCIe, of which a few blocks that flush make so many that everything else on it becomes slow:
//! `docs/gpu/places.md` has the figures. In GPU memory a look costs what any load does, but this process cannot store
//! there: the engine posts its value, or an addition to it, to its own rank, as it would to a peer, or the fabric
//! counts there itself.

use super::coll::Coll;
use super::device_queues::device_words;
use super::fabrics::AnyFabric;
use super::windows::WindowSpec;
use crate::error::{Error, Result};
use crate::proxy::memory::Memory;
use crate::rma::refusal::Target;

/// What device code looks at, and where a value for it goes.
pub(super) struct CreditWords {
    /// For device code.
    pub at: u64,
    len: u64,
    /// Nothing but additions of this rank's ever changes a word, and all begin at 0.
    only_added: bool,
}

impl CreditWords {
    /// Takes memory with these contents, whole words of 8 bytes.
    pub fn allocate(memory: &mut Memory, contents: &[u8]) -> Result<Self> {
        Ok(Self { at: memory.device(contents)?, len: contents.len() as u64, only_added: false })
    }

    /// Memory of a set that was taken already, in which nothing is stored through the window.
    pub fn within(at: u64, len: u64) -> Self {
        Self { at, len, only_added: true }
    }

    /// As memory to register.
    fn registered(&self, memory: &Memory) -> Result<WindowSpec> {
        device_words(memory, self.at, self.len, self.only_added)
    }
}

/// How operations name credit words.
#[derive(Clone, Copy)]
pub(super) struct CreditKey {
    /// This rank.
    pub rank: u32,
    /// This rank's key to its own words.
    pub rkey: u32,
}

impl Coll {
    /// Whether sets have their consumer indices in GPU memory, where they have any. The soft fabric stores into
    /// this rank's own GPU in little more time than device code takes to see one in host memory; a NIC takes longer.
    pub(super) fn keeps_credits_on_gpu(&self) -> bool {
        matches!(self.fabric, AnyFabric::Soft(_))
    }

    /// Registers credit words. Collective. The window's handle goes to `windows`.
    pub(super) fn register_credits(
        &self,
        words: &CreditWords,
        memory: &Memory,
        target: Target,
        windows: &mut Vec<usize>,
    ) -> Result<CreditKey> {
        let handle = self.register(|| words.registered(memory))?;
        windows.push(handle as usize);
        let window = target.window("createContext", handle);
        let window = window.map_err(|_| Error::internal("a window that was just registered is none"))?;
        let rank = self.world.rank;
        let own = window.remote().get(rank as usize);
        own.map(|own| CreditKey { rank, rkey: own.load().rkey }).ok_or_else(|| Error::internal("no key to own memory"))
    }
}
