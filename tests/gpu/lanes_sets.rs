//! Several who have lanes for the kernel: sets of one communicator, two communicators, two threads of the engine.

use crate::harness::lanes::meeting::{rounds, Meeting};
use crate::harness::lanes::serve_by_kernel;
use crate::harness::lanes::served::*;
use crate::harness::*;
use crate::support::common::{job, Job, Rank};
use crate::support::device::{Ask, Device};
use std::sync::atomic::AtomicU64;

/// Entries for each stream in a round.
const EACH: usize = 100;

/// One set of a rank, and its streams.
struct Set<'a> {
    device: Device<'a>,
    streams: Streams,
}

impl<'a> Set<'a> {
    fn new(fake: &'a Fake, r: &Rank, contexts: usize, first: usize) -> Self {
        let ask = Ask { depth: 64, contexts: contexts as i32, signals: signals(2), ..Ask::default() };
        let mix = Mix { refused: 300, gets: true, ..Mix::default() };
        let streams = Streams::new(r, &[1 - r.rank], contexts, first, &|_| mix);
        Self { device: device(fake, r, ask), streams }
    }
}

/// Sets take turns entry by entry.
fn round(sets: &mut [Set], places: &Places, meeting: &Meeting) {
    for _ in 0..EACH / 4 {
        sets.iter_mut().for_each(|s| s.streams.run(&s.device, places, 4));
    }
    sets.iter_mut().for_each(|s| s.streams.flush(&s.device, places));
    meeting.wait();
    sets.iter_mut().for_each(|s| s.streams.finish(&s.device, places));
}

/// Sets of so many contexts each in one communicator.
fn sets_of(fake: &Fake, gpus: i32, contexts: &[usize]) {
    serve_by_kernel();
    let (against, before) = (AtomicU64::new(0), fake.lane_descriptors());
    job(2, 1, |r| {
        let gpu = r.rank as i32 % gpus;
        let _context = fake.enter(gpu);
        let words = window_words(2, contexts.iter().sum());
        let (src, dst) = (fake.window(r, gpu, words, 0), [fake.window(r, gpu, words, 0)]);
        let places = Places { src: &src, dst: &dst };
        let mut first = 0;
        let mut sets = Vec::new();
        for &n in contexts {
            sets.push(Set::new(fake, r, n, first));
            sets[sets.len() - 1].streams.fill(&places);
            first += n;
        }
        let meeting = Meeting::new(|| r.job.barrier.wait(), &against);
        meeting.wait();
        let enough = || fake.lane_descriptors() - before >= 1000;
        rounds(&meeting, &format!("{contexts:?}"), |_| round(&mut sets, &places, &meeting), enough);
        // One goes, the others go on.
        let gone = sets.remove(0);
        gone.device.destroy();
        meeting.wait();
        round(&mut sets, &places, &meeting);
        assert!(sets.iter().all(|s| !s.device.has_error()));
        meeting.wait();
        sets.into_iter().for_each(|s| s.device.destroy());
    });
    fake.check();
}

#[test]
fn sets_of_one_communicator() {
    for gpus in [1, 2] {
        sets_of(&Fake::take(), gpus, &[1, 2]);
    }
}

#[test]
fn threads_of_the_engine() {
    let fake = Fake::take();
    std::env::set_var("OXYGIN_PROXY_THREADS", "2");
    let all = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| sets_of(&fake, 2, &[2, 3])));
    std::env::remove_var("OXYGIN_PROXY_THREADS");
    all.unwrap();
}

#[test]
fn two_communicators() {
    for gpus in [1, 2] {
        let fake = Fake::take();
        serve_by_kernel();
        let (against, before) = (AtomicU64::new(0), fake.lane_descriptors());
        let other = Job::new(2);
        job(2, 1, |r| {
            let gpu = r.rank as i32 % gpus;
            let _context = fake.enter(gpu);
            let words = window_words(2, 1);
            let second = Rank::join(&other, r.rank, 1);
            let meeting = Meeting::new(|| r.job.barrier.wait(), &against);
            let [one, two] = [r, &second].map(|r| {
                let (src, dst) = (fake.window(r, gpu, words, 0), [fake.window(r, gpu, words, 0)]);
                (src, dst, Set::new(&fake, r, 1, 0))
            });
            let mut all = [one, two];
            for (src, dst, set) in &all {
                set.streams.fill(&Places { src, dst });
            }
            meeting.wait();
            let round = |_| {
                for _ in 0..EACH / 4 {
                    for (src, dst, set) in &mut all {
                        set.streams.run(&set.device, &Places { src, dst }, 4);
                    }
                }
                for (src, dst, set) in &mut all {
                    set.streams.flush(&set.device, &Places { src, dst });
                    meeting.wait();
                    set.streams.finish(&set.device, &Places { src, dst });
                }
            };
            rounds(&meeting, "two communicators", round, || fake.lane_descriptors() - before >= 1000);
            all.into_iter().for_each(|(_, _, set)| set.device.destroy());
            meeting.wait();
            second.leave();
        });
        fake.check();
    }
}
