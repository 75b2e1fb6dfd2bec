//! What GDAKI's device code is given: an array of contexts with everything that these point to, in the layout that the
//! NCCL in charge reads. docs/architecture.md has a page on it.
//!
//! ```text
//! Layout::choose(table, NCCL's version)      which structures
//! Image::new(layout, shape, …)                where everything lies, relative to the beginning; how many bytes
//! Image::write(description, memory, address)  writes it, into memory that device code sees at that address
//! ```
//!
//! Whose NIC executes the entries is nobody's affair here: a queue pair is described by numbers and addresses. Nothing
//! here allocates for device code, waits, or follows an address.

mod emit;
pub mod image;
pub mod layout;
pub mod queue_pair;
pub mod shape;
pub mod window;

pub use image::{Description, Image, Words};
pub use layout::Layout;
pub use queue_pair::{Handler, PeerQueues, QueuePair};
pub use shape::SetShape;
