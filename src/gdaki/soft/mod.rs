//! The software NIC: what device code writes for an mlx5 device is carried out over whatever fabric the communicator
//! has, by the threads of the own engine ([`crate::proxy`]).
//!
//! A send queue is a [`Ring`](crate::proxy::ring::Ring) of that engine: [`doorbell`] says which entries are there,
//! [`crate::gdaki::entry`] what they say, [`meaning`] which operations on which windows that is, and [`queue`] keeps
//! count and writes the completion entries. `docs/architecture.md` has the way of an entry.

mod arrival;
pub mod capture;
pub mod doorbell;
mod early;
pub mod keys;
pub mod meaning;
pub mod queue;
mod slots;

use crate::config::Ringing;

/// One send queue with its completion queue, as device code is told of it: addresses in its own address space.
#[derive(Clone, Copy, Debug)]
pub struct QueueView {
    /// Slot 0, of 64 bytes each.
    pub slots: u64,
    /// Slots, and completion entries; a power of two.
    pub size: u32,
    /// Completion entry 0.
    pub completions: u64,
    /// Completions are counted for device code, which does not look at the entries.
    pub is_counted: bool,
    /// The send doorbell record, 4 bytes.
    pub record: u64,
    /// What it rings: see [`doorbell`].
    pub bell: u64,
    /// How it rings.
    pub handler: Ringing,
    /// Number of the queue pair and of its completion queue.
    pub number: u32,
}

/// The queue pair of a (context, peer).
#[derive(Clone, Copy, Debug)]
pub struct PairView {
    /// For operations to the peer.
    pub main: QueueView,
    /// For counters, of this rank; only where counters were asked for.
    pub companion: Option<QueueView>,
}

/// Signals or counters of all contexts of a set: 8 bytes each, those of a context side by side.
#[derive(Clone, Copy, Debug)]
pub struct TableView {
    /// The first word of context 0.
    pub words: u64,
    /// Words of a context.
    pub each: u32,
    /// Key of the words, here and at every peer; 0: there are none.
    pub key: u32,
}

/// A set of contexts, as device code is told of it.
#[derive(Clone, Debug)]
pub struct SetView {
    /// By context, then by peer; `None`: a rank that is not talked to.
    pub pairs: Vec<Option<PairView>>,
    /// What peers add to.
    pub signals: TableView,
    /// What companions add to.
    pub counters: TableView,
    /// Key of the place for fetched values that nobody wants.
    pub sink: u32,
}
