//! Signals to which kernels of several ranks add by themselves, and the receiver's own engine for a third one, by
//! streams that can only store sums: no addition is lost, also where kernels reset what they have read.

use crate::harness::lanes::meeting::{rounds, Meeting};
use crate::harness::lanes::serve_by_kernel;
use crate::harness::lanes::served::*;
use crate::harness::*;
use crate::support::common::job;
use crate::support::device::{entry, wait, Ask, Device};
use nccl_plugin_api::descriptor::*;
use std::sync::atomic::AtomicU64;

const RANKS: usize = 3;
/// Its entries are too long for the kernel.
const BY_ENGINE: usize = 2;
/// The signal to which all add.
const SHARED: usize = 2 * RANKS;
const BY: u64 = 1 << 31 | 3;

/// Where the word is to which all add by its address, in the area that is no stream's.
const WORD: u64 = (RANKS * AREA) as u64;

/// One addition to each shared word of a peer.
fn add(device: &Device, own: usize, peer: usize, places: &Places) {
    let (src, dst) = (places.src.as_window().handle as u64, places.dst[0].as_window().handle as u64);
    let at = WORD + 64 + (BLOCK * own) as u64;
    let bytes = if own == BY_ENGINE { 36 << 10 } else { 64 };
    let put = entry(OP_PUT | OP_SIGNAL_ADD, bytes).first(at, src).second(at, dst);
    device.post(0, peer, put.with_signal(SHARED as u32, BY, true));
    device.post(0, peer, entry(OP_VA_SIGNAL | OP_SIGNAL_ADD, 0).first(WORD, dst).with_signal(0, BY, true));
}

fn all_add(gpus: i32, can_add: bool, resets: bool) {
    let fake = Fake::take();
    serve_by_kernel();
    fake.settings(can_add, 200);
    // The copy kernel adds as the lane kernel does: what is longer than this has its signals by the stream.
    fake.set_issue("kernel=64,lanes=1");
    let (against, before, stores) = (AtomicU64::new(0), fake.lane_descriptors(), fake.stores());
    job(RANKS, 1, |r| {
        let gpu = r.rank as i32 % gpus;
        let _context = fake.enter(gpu);
        let words = window_words(RANKS, 2);
        let src = fake.window(r, gpu, words, 0);
        let dst = [fake.window(r, gpu, words, 0)];
        let places = Places { src: &src, dst: &dst };
        let device = device(&fake, r, Ask { depth: 64, signals: SHARED as i32 + 1, ..Ask::default() });
        let peers: Vec<_> = (0..RANKS).filter(|p| *p != r.rank).collect();
        let mix = |from: usize| Mix { refused: u64::from(from == BY_ENGINE), ..Mix::default() };
        let mut streams = Streams::new(r, &peers, 1, 0, &mix);
        streams.fill(&places);
        let meeting = Meeting::new(|| r.job.barrier.wait(), &against);
        let (mut signal, mut word) = (0, 0);
        meeting.wait();
        let round = |_| {
            for _ in 0..40 {
                streams.run(&device, &places, 4);
                peers.iter().for_each(|p| add(&device, r.rank, *p, &places));
            }
            (signal, word) = (signal + 80 * BY, word + 80 * BY);
            let at = || places.dst[0].get(WORD as usize / 8);
            streams.flush(&device, &places);
            meeting.wait();
            streams.finish(&device, &places);
            wait(|| format!("{word} at the word, which is {}", at()), || at() >= word);
            device.wait_signal(0, SHARED, signal);
            assert_eq!((device.signal(0, SHARED), at()), (signal, word), "{gpus} GPUs, {can_add}, {resets}");
            if resets {
                places.dst[0].set(WORD as usize / 8, 0);
                word = 0;
            }
        };
        let least = if gpus == 1 { 400 } else { 80 };
        let enough = || fake.lane_descriptors() - before >= least && fake.stores() - stores > 20;
        rounds(&meeting, &format!("{gpus} GPUs, {can_add}, {resets}"), round, enough);
        assert!(!device.has_error());
        device.destroy();
    });
    fake.check();
}

#[test]
fn nobodys_addition_is_lost() {
    for (gpus, can_add) in [(1, false), (3, false), (2, true)] {
        all_add(gpus, can_add, false);
    }
}

#[test]
fn words_that_kernels_reset_begin_anew() {
    [1, 3].into_iter().for_each(|gpus| all_add(gpus, false, true));
}
