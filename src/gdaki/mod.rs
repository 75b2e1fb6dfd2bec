//! Queues of NCCL's GDAKI backend, into which device code writes the work queue entries of a NIC.

pub mod view;
