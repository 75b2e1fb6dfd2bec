//! mlx5 hardware: queue pairs in memory of the GPU, which kernels write and ring themselves.

pub mod command;
