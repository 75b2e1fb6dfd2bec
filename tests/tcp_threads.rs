//! The tests of `tcp_data` and `tcp_order` with threads for bulk.

#[path = "tcp_data.rs"]
mod data;
#[path = "tcp_order.rs"]
mod order;
