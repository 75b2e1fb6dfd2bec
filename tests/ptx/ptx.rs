//! The kernels' code, run on the CPU.

mod copy_kernel;
mod faults;
mod finds;
mod lane_kernel;
mod machine;
mod trial;
