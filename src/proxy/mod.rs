//! The proxy engine: threads that drain queues which device code writes into, and post what stands there on the
//! contexts of any fabric.
//!
//! An entry's way: device code writes it into a [`ring`]; a thread ([`engine`]) sees it on a pass over its lanes
//! ([`drain`]), reads up to [`lane::BATCH`] of them, posts them as one batch, and clears their slots; when the fabric
//! reports them locally complete, counters go up and the slots are given back, in order, by one store. Only
//! `descriptor/` knows how an entry looks: another format is another implementation of [`ring::Ring`].
//!
//! Nothing here blocks on a peer: what a context has no room for stays in its ring, and the thread goes on with the
//! others. A malformed entry fails its context alone, a fault of the fabric its (context, peer) alone; credits go on in
//! both, so that device code is not held where it need not be.

pub mod affinity;
pub mod credits;
pub mod descriptor;
pub mod drain;
pub mod engine;
pub mod idle;
pub mod lane;
pub mod memory;
pub mod meter;
pub mod ops;
pub mod ring;
mod spares;
