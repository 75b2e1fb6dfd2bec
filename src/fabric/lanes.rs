//! Queues of device code that a kernel of the fabric's serves by itself: it reads what device code wrote, moves the
//! bytes, adds to signals and gives credits, and no CPU is on the way.
//!
//! Who drains the queues decides which, and when, and carries out everything that the kernel does not take. A queue is
//! always served by one of the two alone.

use std::time::Instant;

/// Windows that a kernel knows of a lane, at most.
pub const WINDOWS: usize = 4;
/// Lanes that a kernel serves at once, at most: DeepEP's 129 contexts towards seven peers.
pub const LANES: usize = 1024;

/// A kernel may have all queues of a set of no more than these, so that they can be on the GPU: those that carry
/// nothing are watched. Each has a warp then. A CPU's first look at a queue that was there takes some 25 µs, and at so
/// many less than a kernel's life.
pub const TOGETHER: usize = 32;

/// The longest copy that a kernel makes in any case: one warp moves it, in some 4 µs. Copy engines and more warps are
/// quicker with longer ones.
pub const LONGEST: u64 = 32 << 10;

/// The longest copy that a kernel makes behind [`OTHERS`] entries that are not longer than [`LONGEST`], where a warp
/// has that lane alone; other warps of its block help. For quicker copies an all-to-all between barriers would leave
/// the kernel, and its barriers with it, which takes longer (docs/gpu/lane-kernel.md). `lanes.ptx` has the same factor.
pub const LONGEST_APART: u64 = 32 * LONGEST;

/// Entries that lie between two copies longer than [`LONGEST`].
pub const OTHERS: u32 = 4;

/// The longest copy that a kernel makes with fewer between, where it has found nothing in the queue for four looks
/// since the last one: some 2 µs where the queue is on the GPU, and 9 where it is not. Behind a pause it is the time of
/// a single copy that counts, and copy engines are quicker with longer ones.
pub const LONGEST_PAUSED: u64 = 4 * LONGEST;

/// What lies between long copies of a queue, as the CPU sees them that carries it out.
#[derive(Clone, Copy, Debug)]
pub struct Apart {
    /// Operations since the last copy longer than [`LONGEST`].
    others: u32,
    is_paused: bool,
}

impl Default for Apart {
    /// There was no long copy.
    fn default() -> Self {
        Self { others: OTHERS, is_paused: true }
    }
}

impl Apart {
    /// Whether a pause would change something: there was none since the last long copy.
    #[inline]
    pub fn may_pause(self) -> bool {
        !self.is_paused
    }

    /// Nothing came for a while.
    #[inline]
    pub fn pause(&mut self) {
        self.is_paused = true;
    }

    /// The longest copy that a kernel would make now.
    #[inline]
    pub fn longest(self) -> u64 {
        match self.is_paused {
            _ if self.others >= OTHERS => LONGEST_APART,
            true => LONGEST_PAUSED,
            false => LONGEST,
        }
    }

    /// An operation that copies so many bytes.
    #[inline]
    pub fn note(&mut self, bytes: u64) {
        match bytes > LONGEST {
            true => *self = Self { others: 0, is_paused: false },
            false => self.others = self.others.saturating_add(1),
        }
    }
}

/// A window, as entries of a lane may name it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WindowView {
    /// What entries call it, as it stands in them; 0: none.
    pub handle: u64,
    /// This rank's key.
    pub lkey: u32,
    /// First byte here.
    pub base: u64,
    /// Bytes here.
    pub len: u64,
    /// The peer's key.
    pub rkey: u32,
    /// First byte at the peer, in its address space.
    pub remote_base: u64,
    /// Bytes at the peer.
    pub remote_len: u64,
}

/// What the entries of a queue have called windows lately, the newest first: what a kernel that serves it is told.
#[derive(Default)]
pub struct Named<T>([T; WINDOWS]);

impl<T: Copy + Default + PartialEq> Named<T> {
    /// An entry names this window.
    pub fn note(&mut self, name: T) {
        let at = self.0.iter().position(|named| *named == name).unwrap_or(WINDOWS - 1);
        self.0[..=at].rotate_right(1);
        self.0[0] = name;
    }

    /// What a kernel is told of them, by what looks one up.
    pub fn views(&self, view: impl Fn(T) -> Option<WindowView>) -> [WindowView; WINDOWS] {
        let known = |name: T| if name == T::default() { None } else { view(name) };
        self.0.map(|name| known(name).unwrap_or_default())
    }
}

/// What stands in the slots of a queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// Descriptors of 64 bytes.
    #[default]
    Short,
    /// Descriptors of 128 bytes, of versions up to this.
    Long(u32),
    /// Send entries of the software NIC.
    Entries {
        /// The queue pair's number.
        number: u32,
        /// How device code says that entries are there, and is told that they are complete.
        rings: Rings,
    },
}

/// What device code rings, by its address for device code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rings {
    /// Words of 8 bytes, one for each slot, of which this is the first. Completions are counted.
    Words(u64),
    /// A doorbell for all of them. Completions are entries of a completion queue with as many places, in which each has
    /// that of its slot.
    Doorbell {
        /// The doorbell, 8 bytes.
        at: u64,
        /// The completion queue.
        completions: u64,
    },
}

/// Room of a doorbell with its record, so that those of different queues do not share a cache line.
pub const DOORBELL_ROOM: u64 = 128;

/// Slots at most of a queue with a doorbell that a kernel serves. A doorbell has 16 bits of an index: one that lags by
/// all slots of the queue must not look as one that is ahead of it.
pub const DOORBELL_SLOTS: u32 = 1 << 14;

/// What all queues hold that a kernel serves, and how device code rings: kernels are loaded for one of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holds {
    /// Descriptors of either form.
    Descriptors,
    /// Send entries of the software NIC, each with a word.
    Entries,
    /// The same with a doorbell a queue.
    EntriesWithDoorbell,
}

impl Format {
    /// What such queues hold.
    pub fn holds(self) -> Holds {
        match self {
            Self::Short | Self::Long(_) => Holds::Descriptors,
            Self::Entries { rings: Rings::Words(_), .. } => Holds::Entries,
            Self::Entries { rings: Rings::Doorbell { .. }, .. } => Holds::EntriesWithDoorbell,
        }
    }

    /// Bytes from a slot to the next one.
    pub fn bytes(self) -> u32 {
        match self {
            Self::Short | Self::Entries { .. } => 64,
            Self::Long(_) => 128,
        }
    }
}

/// A queue, as a kernel has to know it. All that was taken from it is complete and given back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaneView {
    /// To whom it goes.
    pub peer: u32,
    /// Address of slot 0 for device code.
    pub slots: u64,
    /// Slots, a power of two.
    pub size: u32,
    /// What they hold; of all queues that a kernel serves at once the same.
    pub format: Format,
    /// The first entry, as device code counts them; descriptors modulo 2^32.
    pub next: u64,
    /// Address of the consumer index, 4 bytes of GPU memory of this rank's; of send entries that of the count of
    /// completions, 8 bytes, or where a doorbell is rung that of the completion queue. 0 if it is watched.
    pub index: u64,
    /// Signals of the context that descriptors name by their numbers.
    pub signals: u32,
    /// The first one's address at the peer, in its address space.
    pub signals_at: u64,
    /// The peer's key to their window.
    pub signals_key: u32,
    /// Windows that entries are expected to name.
    pub windows: [WindowView; WINDOWS],
    /// It has carried nothing lately. The kernel takes nothing of it, and is done with it as soon as something begins
    /// to arrive: so nobody else needs to look there.
    pub is_watched: bool,
}

/// How far a kernel has come with a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// The next entry, modulo 2^32. All before it are taken, and done once the lane is over or the service is.
    pub next: u32,
    /// That one is not for the kernel, which does not touch the lane any more.
    pub is_over: bool,
}

/// Where a kernel is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// There is none.
    Off,
    /// One is called and does not run yet.
    Called,
    /// One runs and serves nothing.
    Ready,
    /// One serves lanes.
    Serving,
    /// The one that served has ended: positions are final. Until [`LaneServer::settle`].
    Over,
    /// The same, and the GPU has failed: what was taken may never be done. For good.
    Failed,
}

/// Such a kernel. Nothing here waits but the end.
pub trait LaneServer: Send {
    /// Where it is now. `moved`: the lanes carry traffic, so that another one is called before this one's time is over.
    fn poll(&mut self, moved: bool) -> Stage;

    /// Whether it could ever store into memory of this peer, as far as is known now.
    fn reaches(&self, peer: u32) -> bool;

    /// Whether nobody keeps it from this rank's memory and the peer's now. Who does needs the memory for himself for
    /// some time, mostly a few microseconds.
    fn is_let_in(&self, peer: u32) -> bool;

    /// Whether one was called that does not serve yet: there is no other before it does.
    fn is_awaited(&self) -> bool;

    /// Since when one is awaited that waits for its place on the GPU.
    fn awaited_since(&self) -> Option<Instant>;

    /// Calls one for so many queues, unless one is awaited, or none can be had for now.
    fn call(&mut self, now: Instant, lanes: usize);

    /// Whether another one runs behind the one that serves.
    fn has_next(&self) -> bool;

    /// How many queues the one that is ready can serve at once, at most [`LANES`].
    fn room(&self) -> usize;

    /// Has the one that is ready serve those of the queues, for which it has room, that it can; says of each whether it
    /// does. If of none, it stays ready.
    fn serve(&mut self, lanes: &[LaneView]) -> Vec<bool>;

    /// Launches in a row that have had all queues of a set before these are worth bringing to the GPU.
    fn steady(&self) -> u32;

    /// Has the queues of the one that serves brought to its GPU, where they may be. Nobody else looks at them while it
    /// serves.
    fn bring(&mut self);

    /// How far it has come with the `nth` of the lanes that it was given.
    fn position(&self, nth: usize) -> Position;

    /// Has the one that serves end soon.
    fn stop(&mut self);

    /// What it served is taken back.
    fn settle(&mut self);
}
