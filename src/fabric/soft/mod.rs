//! The software fabric: shared memory to ranks on this host, TCP to the others.

pub mod lane;
pub mod tcp;
