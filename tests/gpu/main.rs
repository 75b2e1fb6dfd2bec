//! GPU memory on the soft fabric, on the fake CUDA driver, which one test at a time has.

mod atomics;
mod beside;
mod blocked;
mod busy;
mod closing_line;
mod contexts;
mod copy_kernel;
mod copy_kernel_ends;
mod copy_kernel_gets;
mod copy_kernel_launches;
mod cost;
mod engine;
mod fake_lane_entries;
mod fake_lanes;
mod faults;
mod gdaki;
mod gdaki_barriers;
mod harness;
mod lanes;
mod lanes_ends;
mod lanes_gate;
mod lanes_managed;
mod lanes_nic;
mod lanes_processes;
mod lanes_sets;
mod lanes_windows;
mod local;
mod processes;
mod processes_ends;
mod processes_order;
mod queues;
mod queues_watchdog;
mod refused;
#[path = "../support/mod.rs"]
mod support;
mod tcp;
mod tcp_buffers;
mod tcp_cost;
mod tcp_ends;
#[path = "../tcp/harness.rs"]
mod tcp_harness;
mod tcp_kernel;
mod tcp_order;
mod unattended;
mod values;
mod worker_blocks;
