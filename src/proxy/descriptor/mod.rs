//! NCCL's descriptors as a ring format: how they and what belongs to them look ([`layout`]), where queues lie
//! ([`packing`]), how words pass from one side to the other ([`slots`]), how a descriptor is read ([`queue`]), and what
//! operation it means, or why none ([`meaning`]). How its words are laid out is in `nccl_plugin_api::descriptor`.

pub mod layout;
pub mod meaning;
pub mod packing;
pub mod queue;
pub mod slots;
