//! mlx5 hardware: queue pairs in memory of the GPU, which kernels write and ring themselves.
//!
//! ```text
//! probe(device, …)            whether a port can, before anything is made: a sentence says what it lacks. Last of
//!                             all it puts, once, through a queue pair to itself (`trial`)
//! Mlx5Nic::open(fabric, …)     a communicator's hold on its port, shared with its verbs fabric
//! QueueSet::prepare(nic, …)    queues of a set of contexts, in their memory; what peers need to know of them
//! QueueSet::connect(…)         RESET to INIT, RTR, RTS
//! QueueSet::queues()           what device code is told of them (`view`)
//! QueueSet::has_failed()       takes the device's events
//! QueueSet::ringing(…)         what threads have to do where kernels cannot ring
//! ```
//!
//! Every object owns what it needs, so that any of them can be dropped at any time: a queue pair its completion queue,
//! both their memory and doorbell page, these the device. docs/architecture.md has a page on it.

pub mod command;
mod completion_queue;
mod doorbell;
mod memory;
mod nic;
mod plan;
mod probe;
mod queue_pair;
mod queue_set;
mod ringer;
mod trial;
mod watch;

pub use command::capabilities::Capabilities;
pub use nic::Mlx5Nic;
pub use probe::probe;
pub use queue_set::{QueueMemory, QueueSet, SetRequest};
pub use ringer::RingWork;
