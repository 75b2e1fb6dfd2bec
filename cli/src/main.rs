//! oxygin: doctor, perf and check.
fn main() {}
