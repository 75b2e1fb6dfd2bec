//! Send entries that a doorbell rings, and of which device code is told by completion entries: what is taken as with
//! those that ring a word for each slot, and what is not.

use super::alike::serve_full;
use super::held::{
    serve_held_gap, serve_held_new_slots, serve_held_refused_slots, serve_held_slots, serve_held_stopped_slots,
};
use super::order::{serve_fast, serve_waiting};
use super::queue::Data;
use super::sends_refused::{serve_all_refused_sends, serve_unasked};
use super::sends_served::serve_unrung_slots;
use super::watched::serve_watched;
use super::*;

pub fn serve_bells(ptx: &str, seed: u64) {
    serve_slots(Slots::Bells, ptx, seed);
}

#[test]
fn what_it_says_is_so() {
    (0..8).for_each(|seed| serve_bells(PTX, seed));
}

/// Looks that are full, behind each other.
pub fn serve_full_bells(ptx: &str, seed: u64) {
    serve_full(Slots::Bells, ptx, seed);
}

/// Full looks, of which every first one would be held if words of slots rang.
pub fn serve_held_bells(ptx: &str, seed: u64) {
    serve_held_slots(Slots::Bells, ptx, seed);
}

#[test]
fn full_looks_are_served() {
    (0..8).for_each(|seed| serve_full_bells(PTX, seed));
    (0..8).for_each(|seed| serve_held_bells(PTX, seed));
    (0..4).for_each(|seed| serve_held_new_slots(Slots::Bells, PTX, seed));
    (0..4).for_each(|seed| serve_held_stopped_slots(Slots::Bells, PTX, seed));
    (0..4).for_each(|seed| serve_held_refused_slots(Slots::Bells, PTX, seed));
    (0..4).for_each(|seed| serve_held_gap(Slots::Bells, PTX, seed));
}

/// Entries of one kind, whose slots and completion entries are used again at once.
pub fn serve_bell_additions(ptx: &str, seed: u64) {
    serve_fast(Slots::Bells, ptx, seed, seed % 4, |e, _| e.data.is_none() && e.signal.is_some());
}

#[test]
fn slots_are_used_again_at_once() {
    (0..8).for_each(|seed| serve_bell_additions(PTX, seed));
    for seed in 0..4 {
        serve_fast(Slots::Bells, PTX, seed, seed, |e, _| matches!(e.data, Some(Data::Value { .. })));
        serve_fast(Slots::Bells, PTX, seed, seed, |e, _| e.data.is_none() && e.signal.is_none());
    }
}

/// A doorbell that lags, or that is another queue pair's, or does not speak of an entry yet.
pub fn serve_unrung_bells(ptx: &str, seed: u64) {
    serve_unrung_slots(Slots::Bells, ptx, seed);
}

#[test]
fn nothing_passes_what_is_not_rung() {
    (0..16).for_each(|seed| serve_unrung_bells(PTX, seed));
}

#[test]
fn what_is_not_for_it_is_refused() {
    (0..8).for_each(|seed| serve_unasked(PTX, seed));
    (0..3).for_each(|seed| serve_all_refused_sends(Slots::Bells, PTX, seed));
    (0..4).for_each(|seed| serve_watched(Slots::Bells, PTX, seed, false));
}

#[test]
fn who_waits_acquires_nothing() {
    (0..4).for_each(|seed| serve_waiting(Slots::Bells, PTX, seed));
}
