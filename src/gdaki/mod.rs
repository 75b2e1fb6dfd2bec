//! What lets kernels that are compiled for NCCL's GDAKI backend run: they write an mlx5 device's queues themselves.

pub mod entry;
pub mod mlx5;
pub mod soft;
pub mod view;
