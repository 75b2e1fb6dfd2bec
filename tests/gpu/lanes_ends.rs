//! Sets, communicators and GPUs that end while a kernel serves lanes, and entries that cannot be: nothing is lost that
//! is promised, nothing is touched that is gone, nobody waits for ever.

use crate::harness::lanes::meeting::{rounds, Meeting};
use crate::harness::lanes::serve_by_kernel;
use crate::harness::lanes::served::*;
use crate::harness::*;
use crate::support::common::{job, ok, Job, Rank};
use crate::support::device::{entry, wait, Ask, Device};
use crate::support::logged;
use nccl_plugin_api::descriptor::*;
use oxygin::vtable::gin_v14::ncclGinPlugin_v14 as GIN;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

/// A rank with its windows, and device code.
struct Party<'a> {
    r: &'a Rank,
    fake: &'a Fake,
    src: GpuWindow,
    dst: [GpuWindow; 1],
    device: Device<'a>,
}

fn ask() -> Ask {
    Ask { depth: 64, contexts: 2, signals: signals(2) + 1, ..Ask::default() }
}

impl<'a> Party<'a> {
    fn new(fake: &'a Fake, r: &'a Rank, gpu: i32) -> Self {
        let words = window_words(2, 2);
        let (src, dst) = (fake.window(r, gpu, words, 0), [fake.window(r, gpu, words, 0)]);
        Self { r, fake, src, dst, device: device(fake, r, ask()) }
    }

    fn places(&self) -> Places<'_> {
        Places { src: &self.src, dst: &self.dst }
    }

    fn streams(&self) -> Streams {
        Streams::new(self.r, &[1 - self.r.rank], 2, 0, &|_| Mix::default())
    }

    /// Rounds until the kernel has taken so many more.
    fn until_served(&self, streams: &mut Streams, meeting: &Meeting, least: u64) {
        let before = self.fake.lane_descriptors();
        let round = |_| {
            streams.run(&self.device, &self.places(), 100);
            streams.flush(&self.device, &self.places());
            meeting.wait();
            streams.finish(&self.device, &self.places());
        };
        rounds(meeting, "a kernel that serves", round, || self.fake.lane_descriptors() - before >= least);
    }
}

/// destroyContext comes at once behind entries that nobody has flushed, while the kernel serves their lanes: they
/// arrive, and the other rank goes on.
#[test]
fn what_a_set_leaves_behind_arrives() {
    for (gpus, left) in [(1, 40), (2, 40), (1, 3), (2, 300)] {
        let fake = Fake::take();
        serve_by_kernel();
        let against = AtomicU64::new(0);
        job(2, 1, |r| {
            let gpu = r.rank as i32 % gpus;
            let _context = fake.enter(gpu);
            let mut party = Party::new(&fake, r, gpu);
            let meeting = Meeting::new(|| r.job.barrier.wait(), &against);
            for round in 0..3 {
                let mut streams = party.streams();
                (0..window_words(2, 2)).for_each(|i| party.dst[0].set(i, 0));
                meeting.wait();
                party.until_served(&mut streams, &meeting, 100);
                let Party { device: old, .. } = party;
                party = Party { device: device(&fake, r, ask()), ..party };
                let places = party.places();
                let began = Instant::now();
                if r.rank == round % 2 {
                    for _ in 0..left {
                        streams.senders.iter_mut().for_each(|s| s.post(&old, &places));
                    }
                    old.destroy();
                    meeting.wait();
                } else {
                    streams.receivers.iter_mut().for_each(|s| s.expect(left));
                    // Nobody signals behind the last puts: they are there once the sender's set is gone.
                    meeting.wait();
                    streams.finish(&old, &places);
                    old.destroy();
                }
                assert!(began.elapsed() < Duration::from_secs(20), "it took {:?}", began.elapsed());
                meeting.wait();
            }
            assert!(!party.device.has_error());
            party.device.destroy();
        });
        fake.check();
    }
}

/// closeColl comes first, behind entries that nobody has flushed, and the set goes after it.
#[test]
fn communicators_close_while_lanes_are_served() {
    for (gpus, closer) in [(1, 0), (2, 1), (2, 0)] {
        let fake = Fake::take();
        serve_by_kernel();
        let against = AtomicU64::new(0);
        let all = Job::new(2);
        std::thread::scope(|s| {
            for rank in 0..2 {
                let (fake, all, against) = (&fake, &all, &against);
                s.spawn(move || {
                    let gpu = rank % gpus;
                    let _context = fake.enter(gpu);
                    let r = Rank::join(all, rank as usize, 0);
                    let party = Party::new(fake, &r, gpu);
                    let meeting = Meeting::new(|| all.barrier.wait(), against);
                    let mut streams = party.streams();
                    party.until_served(&mut streams, &meeting, 100);
                    let began = Instant::now();
                    if rank == closer {
                        for _ in 0..30 {
                            streams.senders.iter_mut().for_each(|s| s.post(&party.device, &party.places()));
                        }
                        // SAFETY: a plain call.
                        ok(unsafe { T.close_coll.unwrap()(r.coll) });
                        party.device.destroy();
                        meeting.wait();
                    } else {
                        meeting.wait();
                        party.device.destroy();
                        // SAFETY: a plain call.
                        ok(unsafe { T.close_coll.unwrap()(r.coll) });
                    }
                    assert!(began.elapsed() < Duration::from_secs(30), "it took {:?}", began.elapsed());
                    // SAFETY: a plain call.
                    ok(unsafe { T.finalize.unwrap()(r.instance) });
                });
            }
        });
        fake.check();
    }
}

/// The GPU fails while the kernel serves: its lanes fail and the log says so, whoever asks is told, other GPUs go on,
/// and all comes to an end.
#[test]
fn a_gpu_that_fails_fails_the_lanes() {
    let said = "the GPU has failed while a kernel carried out what device code had written";
    let is_said = || logged::lines().iter().any(|(level, l)| *level == log::Level::Warn && l.contains(said));
    for attempt in 0.. {
        assert!(attempt < 10, "no kernel met the fault: {:#?}", logged::lines());
        let fake = Fake::take();
        serve_by_kernel();
        std::env::set_var("OXYGIN_DEREG_TIMEOUT", "1");
        logged::collect();
        let against = AtomicU64::new(0);
        job(2, 1, |r| {
            logged::listen();
            let gpu = r.rank as i32;
            let _context = fake.enter(gpu);
            let party = Party::new(&fake, r, gpu);
            let meeting = Meeting::new(|| r.job.barrier.wait(), &against);
            let mut streams = party.streams();
            party.until_served(&mut streams, &meeting, 200);
            if r.rank == 0 {
                let post = |streams: &mut Streams| {
                    streams.senders.iter_mut().for_each(|s| s.post(&party.device, &party.places()));
                };
                // The kernel is at it.
                let before = fake.lane_descriptors();
                wait(
                    || "a kernel that serves".into(),
                    || {
                        post(&mut streams);
                        fake.lane_descriptors() > before
                    },
                );
                // Of this GPU: the other one moves what the kernel leaves to the CPU.
                fake.inject("lanes of 0", 700);
                // Two at a time, so that a kernel is called: once it has failed no credits come, which others wait for.
                // The engine's thread is to find them apart, and close together, whenever it wakes up.
                let mut left = 20;
                while left > 0 && !party.device.has_error() {
                    left -= 1;
                    post(&mut streams);
                    std::thread::sleep(Duration::from_micros(10 * left));
                    post(&mut streams);
                    let end = Instant::now() + Duration::from_secs(1);
                    while !party.device.has_error() && Instant::now() < end {
                        std::thread::yield_now();
                    }
                }
                wait(|| "an error".into(), || party.device.has_error());
            }
            meeting.wait();
            if r.rank == 1 {
                // Many times what a queue has: the credits of a GPU that is well go on.
                for _ in 0..300 {
                    streams.senders.iter_mut().for_each(|s| s.post(&party.device, &party.places()));
                }
                (0..2).for_each(|c| party.device.flush(c, 0));
            }
            meeting.wait();
            let mut has = false;
            // SAFETY: a place for the answer.
            ok(unsafe { GIN.query_last_error.unwrap()(party.device.ctx, &mut has) });
            assert!(has || r.rank != 0);
            let began = Instant::now();
            party.device.destroy();
            assert!(began.elapsed() < Duration::from_secs(30), "it took {:?}", began.elapsed());
        });
        std::env::remove_var("OXYGIN_DEREG_TIMEOUT");
        if is_said() {
            break;
        }
    }
}

/// A malformed entry while the kernel has the lane is answered as without one: what was before it arrives, its context
/// fails with the same words, credits go on, others work.
#[test]
fn a_malformed_entry_fails_its_context_as_ever() {
    type Bad = fn(u64) -> Descriptor;
    let bad: [(Bad, &str); 5] = [
        (|w| Descriptor::new(Form::Bytes128, 9, OP_PUT, 8).first(0, w).second(0, w), "version 9"),
        (|w| entry(OP_PUT, 8).first(0, 0xdead_beef).second(0, w), "srcMhandle"),
        (|w| entry(OP_PUT, 8).first(0, w).second((8 * window_words(2, 2)) as u64 - 4, w), "dstOff"),
        (|w| entry(OP_PUT | OP_SIGNAL_INC, 8).first(0, w).second(0, w).with_signal(99, 0, true), "signal 99"),
        (|w| entry(OP_VA_SIGNAL | OP_SIGNAL_INC, 0).first(4, w), "signalOff"),
    ];
    for (make, why) in bad {
        // Until the kernel has met it: a lane may have come back before.
        for attempt in 0.. {
            assert!(attempt < 20, "{why}: no kernel met it");
            let fake = Fake::take();
            serve_by_kernel();
            logged::collect();
            let (against, met) = (AtomicU64::new(0), AtomicU64::new(0));
            job(2, 1, |r| {
                logged::listen();
                let _context = fake.enter(r.rank as i32);
                let party = Party::new(&fake, r, r.rank as i32);
                let meeting = Meeting::new(|| r.job.barrier.wait(), &against);
                let (mut streams, peer) = (party.streams(), 1 - r.rank);
                party.until_served(&mut streams, &meeting, 100);
                let handle = party.dst[0].as_window().handle as u64;
                let refused = fake.refused_lanes();
                let mut sent = 0;
                if r.rank == 0 {
                    let before = fake.lane_descriptors();
                    let increment = entry(OP_PUT | OP_SIGNAL_INC, 0).with_signal(4, 0, true);
                    while fake.lane_descriptors() < before + 20 && sent < 20_000 {
                        party.device.post(0, peer, increment);
                        sent += 1;
                    }
                    party.device.post(0, peer, make(handle));
                    (0..200).for_each(|_| party.device.post(0, peer, increment));
                    party.device.flush(0, peer);
                    wait(|| format!("{why}: an error"), || party.device.has_error());
                    met.store(fake.refused_lanes() - refused, std::sync::atomic::Ordering::Relaxed);
                    party.device.post(1, peer, increment);
                    let lines = logged::lines().clone();
                    let said = lines.iter().filter(|(_, l)| l.contains("context 0, ") && l.contains(why)).count();
                    assert_eq!(said, 1, "{why}: {lines:#?}");
                    against.store(sent << 8, std::sync::atomic::Ordering::Relaxed);
                }
                meeting.wait();
                if r.rank == 1 {
                    let sent = against.load(std::sync::atomic::Ordering::Relaxed) >> 8;
                    party.device.wait_signal(0, 4, sent);
                    party.device.wait_signal(1, 4, 1);
                    assert_eq!(party.device.signal(0, 4), sent, "{why}: what came behind it is dropped");
                }
                meeting.wait();
                party.device.destroy();
            });
            fake.check();
            if met.into_inner() > 0 {
                break;
            }
        }
    }
}
