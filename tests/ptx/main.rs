//! The copy kernel's code, run on the CPU.

mod copy_kernel;
mod faults;
mod machine;
