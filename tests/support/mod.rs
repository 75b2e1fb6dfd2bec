//! What tests of several areas need. Each program of tests has its own copy.

#![allow(dead_code, reason = "every program uses its own part")]

pub mod apart;
pub mod atomics;
pub mod children;
pub mod common;
pub mod cuda;
pub mod device;
pub mod kernel;
pub mod logged;
pub mod nic;
pub mod processes;
pub mod release;
pub mod tasks;
pub mod turn;
pub mod variable;
pub mod violations;
