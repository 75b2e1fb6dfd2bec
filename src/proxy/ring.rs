//! What the engine asks of a queue format: entries in, operations out; completions in, credits out.

use super::credits::Owed;
use super::ops::Ops;
use crate::fabric::lanes::LaneView;

/// What is to be done for an entry when it is complete, in the format's own terms; 0: nothing but its credit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Finish(pub u32);

impl Finish {
    /// Nothing but the credit.
    pub const NONE: Self = Self(0);
}

/// What stands at a place of a ring.
#[derive(Debug, PartialEq, Eq)]
pub enum Entry {
    /// Nothing yet, or not all of it.
    Absent,
    /// Something that has to wait until the peer has carried out what came before it, all of which is complete.
    /// [`Ring::fenced`] says when that is so.
    Fenced,
    /// An operation, which was appended to the batch.
    Op(Finish),
    /// So many operations, at least one, which were appended to the batch.
    Ops(u8),
    /// So many operations, at least one, which were appended to the batch and bring something here. The entry is
    /// complete when that is visible.
    Gets(u8),
    /// Nothing to move: complete when what came before it is.
    Nothing(Finish),
    /// The same, of a kind that a kernel which serves the ring takes.
    Nop,
    /// A part of the operation that the entry before it is, which carries it: complete with that. Of rings that
    /// [join](Ring::JOINS) entries.
    Joined,
    /// What the context's gets have brought must be visible before anything behind it.
    Flush(Finish),
    /// Something that cannot be: a sentence with the entry decoded. What [`Ring::ENDS`] says fails.
    Refused(Box<str>),
}

/// What ends with a refused entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ends {
    /// All rings of its context.
    Context,
    /// Its ring.
    Ring,
}

/// Why nothing of a ring is carried out any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stopped {
    /// The entry that was taken last was refused; those before it complete.
    Refused,
    /// The fabric has failed: none of those that were taken and not given back completes.
    Lost,
}

/// Where it shows that the next entry of a ring has begun to arrive, for those who do not have the ring at hand.
pub trait Head {
    /// Whether it does.
    ///
    /// # Safety
    /// The ring's memory is still there.
    unsafe fn is_there(&self) -> bool;
}

/// A queue of entries from device code to one peer. Used by one thread at a time.
pub trait Ring: Send + 'static {
    /// Where it shows that the next entry has begun to arrive.
    type Head: Head;

    /// What a refused entry ends.
    const ENDS: Ends;

    /// Whether two entries may become one operation: [`Entry::Joined`].
    const JOINS: bool = false;

    /// That, for the entry which is the next one now.
    fn head(&self) -> Self::Head;

    /// Places of the ring.
    fn capacity(&self) -> u32;

    /// A batch is about to be read: what was learned of windows that are gone since is forgotten.
    fn begin(&mut self);

    /// Reads the entry `nth` places behind the next one; `nth` is below the capacity. An operation is appended to
    /// `ops`. The entry stays: it may be read again.
    fn read(&mut self, nth: u32, ops: &mut Ops) -> Entry;

    /// Entries behind those that were taken that device code has written and rung, up to the first one that it has not:
    /// a device would carry them out, whatever becomes of the kernel. Looked at rarely.
    fn rung(&mut self) -> u32;

    /// The same of a ring that a kernel serves, or more: the kernel clears places before it says so.
    fn rung_at_most(&mut self) -> u32 {
        self.rung()
    }

    /// Takes the next `n` entries off the ring: their places are clear from here on, but not given back.
    fn take(&mut self, n: u32);

    /// An entry is complete: what it asked for beside its data is done here.
    fn finish(&mut self, finish: Finish);

    /// Gives the oldest `n` places that were taken back to device code, which may reuse their sources from here on.
    fn credit(&mut self, n: u32);

    /// Places that were taken and not given back.
    fn outstanding(&self) -> u32;

    /// What device code has not been told of its credits, where this side cannot store them: somebody posts it.
    fn owed(&mut self) -> Option<&mut Owed> {
        None
    }

    /// Nothing that is read from here on is carried out: it is taken and given back all the same. Nor is it judged,
    /// beyond what it takes to give it back: judging it may have been what had a fault.
    fn stop(&mut self, why: Stopped);

    /// Whether a kernel could ever serve the ring, as far as is known now.
    fn can_be_served(&self) -> bool {
        false
    }

    /// Whether a kernel that serves other rings could watch it for entries that come, and it could be brought to the
    /// GPU with those.
    fn can_be_watched(&self) -> bool {
        false
    }

    /// The ring as a kernel has to know it that serves it, or watches it; `None`: no kernel can. All that was taken is
    /// given back.
    fn view(&mut self, is_watched: bool) -> Option<LaneView> {
        let _ = is_watched;
        None
    }

    /// A kernel that serves the ring has come to this entry, as device code counts them: those before it are given
    /// back. Returns how many these are.
    fn served(&mut self, _next: u32) -> u32 {
        0
    }

    /// Whether all places hold entries that device code has not rung, and none is under way: whoever of its threads
    /// waits for a place waits for ever, unless another one rings. Looked at rarely.
    fn is_full_of_unrung(&self) -> bool {
        false
    }

    /// The peer has carried out all that is complete, so that an entry that was [`Entry::Fenced`] may go on.
    fn fenced(&mut self) {}

    /// Why an entry that has begun to arrive is [`Entry::Absent`], for the log.
    fn why_absent(&self) -> String {
        "device code has written a part of it, and its other words are missing".into()
    }
}
