//! A context of the software fabric: a lane to each peer.

use super::lane::{Lane, Work};
use super::link::LEAVE_WITHIN;
use super::shared::Shared;
use crate::error::Result;
use crate::rma::op::{Get, Put};
use crate::rma::seq::Seq;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::Arc;
use std::time::Instant;

/// Puts between two polls: a caller that only ever finds its requests done must still receive.
const POLL_EVERY: u32 = 64;
/// Tests of operations that are not the oldest unfinished one of their lane, between two polls.
const LATER_EVERY: u32 = 16;

struct Place {
    lane: Arc<Lane>,
    slot: u32,
}

/// One context. Lanes to the same peer share that peer's link; nothing else is shared between contexts.
pub struct Context {
    shared: Arc<Shared>,
    places: Box<[Place]>,
    /// Counts tests of later operations; one caller at a time as for everything in a context, so no more than a hint.
    tests: AtomicU32,
}

impl Context {
    /// The context with this number, which no other context of the communicator has had.
    pub fn new(shared: Arc<Shared>, number: u32) -> Self {
        let places = shared
            .links()
            .iter()
            .map(|link| {
                let lane = Arc::new(Lane::new(number, link.peer, link.health.clone()));
                let slot = link.add_lane(lane.clone());
                Place { lane, slot }
            })
            .collect();
        Self { shared, places, tests: AtomicU32::new(0) }
    }

    /// Where the newest complete operation to `peer` shows; lives as long as the context.
    pub fn completed(&self, peer: u32) -> *const AtomicU32 {
        self.places[peer as usize].lane.completed()
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // First all, so that nothing new begins for it while one is waited for.
        let links = self.shared.links().iter().zip(&self.places);
        let leaving: Vec<_> = links.filter_map(|(link, place)| Some((link, link.leave(place.slot)?))).collect();
        let end = Instant::now() + LEAVE_WITHIN;
        leaving.into_iter().for_each(|(link, left)| link.wait_left(&self.shared, left, end));
    }
}

impl crate::fabric::Context for Context {
    #[inline]
    unsafe fn put(&self, peer: u32, put: &Put) -> Result<Seq> {
        let place = &self.places[peer as usize];
        let seq = self.shared.link(peer).post(&self.shared, &place.lane, place.slot, Work::Put(*put))?;
        if seq.0 % POLL_EVERY == 0 {
            self.shared.poll();
        }
        Ok(seq)
    }

    #[inline]
    unsafe fn get(&self, peer: u32, get: &Get) -> Result<Seq> {
        let place = &self.places[peer as usize];
        self.shared.link(peer).post(&self.shared, &place.lane, place.slot, Work::Get(*get))
    }

    /// A get is complete when its bytes are in memory, written by the CPU: nothing is left to order.
    fn flush(&self, peer: u32) -> Result<Option<Seq>> {
        self.places[peer as usize].lane.health.check().map(|()| None)
    }

    #[inline]
    fn test(&self, peer: u32, seq: Seq) -> Result<bool> {
        let lane = &self.places[peer as usize].lane;
        if lane.test(seq)? {
            return Ok(true);
        }
        // Requests complete in order: only the oldest one's test has news to wait for. NCCL tests all of them, up to
        // 256, for each operation that it starts; whoever spins on a later one still makes progress.
        if !lane.is_oldest(seq) {
            let n = self.tests.load(Ordering::Relaxed).wrapping_add(1);
            self.tests.store(n, Ordering::Relaxed);
            if n % LATER_EVERY != 0 {
                return Ok(false);
            }
        }
        self.shared.poll();
        lane.test(seq)
    }

    #[inline]
    fn progress(&self) -> Result<()> {
        self.shared.poll();
        Ok(())
    }

    fn has_error(&self) -> bool {
        self.shared.look_at_peers();
        self.shared.engine.has_failed() || self.places.iter().any(|p| p.lane.health.has_failed())
    }
}
