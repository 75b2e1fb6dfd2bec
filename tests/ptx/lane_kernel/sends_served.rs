//! Send entries of the software NIC: those that are for the kernel are taken, and none before it is rung.

use super::alike::serve_full;
use super::order::{go_on_around, is_in_turn, serve_fast};
use super::queue::{Data, Entry};
use super::sends_read::is_read;
use super::*;

pub fn serve_sends(ptx: &str, seed: u64) {
    serve_slots(Slots::Sends, ptx, seed);
}

#[test]
fn what_it_says_is_so() {
    (0..8).for_each(|seed| serve_sends(PTX, seed));
}

/// Looks that are full, behind each other.
pub fn serve_full_sends(ptx: &str, seed: u64) {
    serve_full(Slots::Sends, ptx, seed);
}

#[test]
fn full_looks_are_served() {
    (0..8).for_each(|seed| serve_full_sends(PTX, seed));
}

/// Additions alone.
pub fn serve_additions(ptx: &str, seed: u64) {
    serve_fast(Slots::Sends, ptx, seed, seed % 4, |e, _| e.data.is_none() && e.signal.is_some());
}

/// What asks for nothing, alone.
pub fn serve_nops(ptx: &str, seed: u64) {
    serve_fast(Slots::Sends, ptx, seed, seed % 4, |e, _| e.data.is_none() && e.signal.is_none());
}

/// A put, then an addition: one look each.
pub fn serve_sends_in_turn(ptx: &str, seed: u64) {
    serve_fast(Slots::Sends, ptx, seed, 3, is_in_turn);
}

/// Values alone, whose bytes are stored in parts of words.
pub fn serve_values(ptx: &str, seed: u64) {
    let is_value = |e: &Entry, _| matches!(e.data, Some(Data::Value { .. })) && !is_read(e);
    serve_fast(Slots::Sends, ptx, seed, seed % 4, is_value);
}

/// Values of 8 bytes, which are stored in two parts.
pub fn serve_long_values(ptx: &str, seed: u64) {
    let is_long = |e: &Entry, _| matches!(e.data, Some(Data::Value { bytes: 8, .. })) && !is_read(e);
    serve_fast(Slots::Sends, ptx, seed, seed % 4, is_long);
}

/// Bytes of windows alone.
pub fn serve_puts(ptx: &str, seed: u64) {
    let is_put = |e: &Entry, _| matches!(e.data, Some(Data::Copy { .. })) && !is_read(e);
    serve_fast(Slots::Sends, ptx, seed, seed % 4, is_put);
}

#[test]
fn slots_are_used_again_at_once() {
    (0..8).for_each(|seed| serve_additions(PTX, seed));
    (0..4).for_each(|seed| serve_nops(PTX, seed));
    (0..4).for_each(|seed| serve_sends_in_turn(PTX, seed));
    (0..4).for_each(|seed| serve_values(PTX, seed));
    (0..8).for_each(|seed| serve_long_values(PTX, seed));
    (0..4).for_each(|seed| serve_puts(PTX, seed));
}

/// One of several entries is not rung for long, whichever: nothing from it on is taken in its queue, and other queues
/// go on.
pub fn serve_unrung(ptx: &str, seed: u64) {
    serve_unrung_slots(Slots::Sends, ptx, seed);
}

/// The same of send entries that are rung in either way.
pub fn serve_unrung_slots(slots: Slots, ptx: &str, seed: u64) {
    let mut bench = Bench::of(slots, ptx, seed, seed % 4, 3);
    bench.late_every = 0;
    let place = bench.any_place();
    bench.launch(NEVER, NEVER);
    bench.go();
    let at = bench.below(4) as usize;
    let all: Vec<(usize, Entry)> = (0..4).map(|_| (place, bench.entry(place))).collect();
    bench.send(all, Some(at), 2);
    go_on_around(&mut bench, place, at);
    bench.ring_late();
    bench.run_until(|b| b.left() == 0);
    bench.finish();
}

#[test]
fn nothing_passes_what_is_not_rung() {
    (0..16).for_each(|seed| serve_unrung(PTX, seed));
}
