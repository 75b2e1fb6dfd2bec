//! Who executes what device code of a communicator writes: what a table reports of it before there is a communicator
//! (`report`), what each rank says it can (`offer`), which of it all ranks take (`choose`; for one machine
//! `foresee`), and how far a communicator has come (`life`).

pub mod choose;
pub mod foresee;
pub mod life;
pub mod offer;
pub mod report;
#[cfg(test)]
mod table_tests;
