//! The exported tables: one thin adapter a version over the calls in `setup` and `data`.

pub mod calls;
pub mod data;
pub mod fast;
pub mod guard;
pub mod own;
pub mod reg;
pub mod setup;

pub mod gin_v11;
pub mod gin_v12;
pub mod gin_v13;
pub mod gin_v14;
pub mod rma_v13;
pub mod rma_v14;
pub mod rma_v15;
pub mod rma_v16;

/// The name NCCL shows in its log.
pub(crate) const NAME: &std::ffi::CStr = c"oxygin";
