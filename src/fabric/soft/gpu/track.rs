//! What is up on one stream, oldest first.

use super::op::{Owner, Side};
use super::tally::Sample;
use std::collections::VecDeque;
use std::time::Instant;

/// Bytes in the staging memory on their way to host memory.
pub struct Outward {
    pub offset: u64,
    pub len: u64,
    pub to: Side,
}

/// What was started at once.
#[derive(Default)]
pub struct Flight {
    pub number: u64,
    pub finished: Vec<Owner>,
    pub outward: Vec<Outward>,
    /// Staging memory up to here is free once it landed.
    pub staged: u64,
    pub sample: Option<Sample>,
    /// When it was started, if the stream itself stores.
    pub stores_since: Option<Instant>,
}

/// The flights of one stream, numbered from 1 on.
#[derive(Default)]
pub struct Track {
    pub flights: VecDeque<Flight>,
    /// Number of the last flight that was started.
    pub started: u64,
    /// Number of the last one that is done, its outward bytes delivered.
    pub landed: u64,
}

impl Track {
    /// Takes off the oldest flight if the flag says that it is done.
    pub fn land(&mut self, flag: u64) -> Option<Flight> {
        let flight = match self.flights.front() {
            Some(f) if f.number <= flag => self.flights.pop_front()?,
            _ => return None,
        };
        self.landed = flight.number;
        Some(flight)
    }

    /// Whether nothing is up.
    pub fn is_empty(&self) -> bool {
        self.flights.is_empty()
    }
}
