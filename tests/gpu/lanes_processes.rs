//! The same between processes: a kernel that serves lanes stores into windows of peers that are mapped here.

use crate::harness::lanes::meeting::{rounds, Meeting};
use crate::harness::lanes::serve_by_kernel;
use crate::harness::lanes::served::*;
use crate::harness::memory::Memory;
use crate::harness::*;
use crate::support::device::{entry, wait, Ask};
use crate::support::processes::{processes, Place};
use nccl_plugin_api::descriptor::*;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Streams between processes until the kernel of each has taken so many, which is `None` where there can be none.
fn between(place: &Place, gpus: i32, mix: Mix, memory: Memory, least: Option<u64>) {
    let (fake, n) = (Fake::take(), place.nranks);
    serve_by_kernel();
    let gpu = place.rank as i32 % gpus;
    let _context = fake.enter(gpu);
    let r = place.join(1);
    let words = window_words(n, 1);
    let src = memory.window(&fake, &r, gpu, words);
    let dst = [memory.window(&fake, &r, gpu, words)];
    let places = Places { src: &src, dst: &dst };
    let device = device(&fake, &r, Ask { depth: 64, signals: signals(n), ..Ask::default() });
    let peers: Vec<_> = (0..n).filter(|p| *p != r.rank).collect();
    let mut streams = Streams::new(&r, &peers, 1, 0, &|_| mix);
    streams.fill(&places);
    let meeting = Meeting::new(|| place.barrier(), place.word(0));
    meeting.wait();
    let round = |_| {
        streams.run(&device, &places, 100);
        streams.flush(&device, &places);
        meeting.wait();
        streams.finish(&device, &places);
    };
    rounds(&meeting, &format!("{memory:?}, {mix:?}"), round, || fake.lane_descriptors() >= least.unwrap_or(0));
    assert!(least.is_some() || fake.lane_descriptors() == 0);
    assert!(!device.has_error());
    device.destroy();
    place.barrier();
    r.leave();
    assert_eq!(fake.foreign(), 0, "memory of other processes is still mapped");
    fake.check();
}

#[test]
fn windows_of_other_processes_are_served() {
    processes("windows_of_other_processes_are_served", 2, &[], |p| {
        between(p, 2, Mix::default(), Memory::Segments(1), Some(300));
    });
}

#[test]
fn on_one_gpu_and_mixed_with_what_is_refused() {
    processes("on_one_gpu_and_mixed_with_what_is_refused", 2, &[], |p| {
        let mix = Mix { refused: 100, gets: true, ..Mix::default() };
        // Each refusal has the lane wait longer for the kernel.
        between(p, 1, mix, Memory::Segments(3), Some(10));
    });
}

#[test]
fn three_processes() {
    processes("three_processes", 3, &[], |p| between(p, 3, Mix::default(), Memory::Segments(1), Some(100)));
}

/// Windows come and go while streams are served; a rank may deregister before its peer does.
#[test]
fn windows_that_processes_deregister_are_left() {
    processes("windows_that_processes_deregister_are_left", 2, &[], |place| {
        let fake = Fake::take();
        serve_by_kernel();
        let gpu = place.rank as i32;
        let _context = fake.enter(gpu);
        let r = place.join(1);
        let memory = Memory::Segments(1);
        let (src, dst) = (memory.window(&fake, &r, gpu, AREA / 4), [memory.window(&fake, &r, gpu, AREA / 4)]);
        let places = Places { src: &src, dst: &dst };
        let device = device(&fake, &r, Ask { depth: 64, signals: 5, ..Ask::default() });
        let mut streams = Streams::new(&r, &[1 - r.rank], 1, 0, &|_| Mix::default());
        let at = [fake.segments(gpu, &[65_536], true), fake.segments(gpu, &[65_536], true)];
        let meeting = Meeting::new(|| place.barrier(), place.word(0));
        let round = |n: usize| {
            let served = || {
                streams.run(&device, &places, 60);
                streams.flush(&device, &places);
            };
            crate::lanes_windows::come_and_go(&fake, &r, &device, &meeting, at[n / 2 % 2], n, served);
            streams.finish(&device, &places);
        };
        rounds(&meeting, "windows that come and go", round, || fake.lane_descriptors() >= 500);
        device.destroy();
        place.barrier();
        r.leave();
        assert_eq!(fake.foreign(), 0);
        fake.check();
    });
}

/// What the engine's thread has sent is complete there, and stands at the receiver, whose GPU does nothing: a kernel
/// that adds to its signals meanwhile would say that it has come.
#[test]
fn what_stands_at_the_receiver_is_not_overtaken() {
    const VALUES: u64 = 8;
    const SIGNALS: u64 = 48;
    processes("what_stands_at_the_receiver_is_not_overtaken", 2, &[], |place| {
        let fake = Fake::take();
        serve_by_kernel();
        let gpu = place.rank as i32;
        let _context = fake.enter(gpu);
        let r = place.join(1);
        let memory = Memory::Segments(1);
        let (_src, dst) = (memory.window(&fake, &r, gpu, 8192), memory.window(&fake, &r, gpu, 8192));
        // What comes from host memory is in the receiver's hands as soon as it is sent.
        let mut host = r.window(8 * VALUES as usize, 0);
        (0..VALUES as usize).for_each(|i| host.words[8 * i] = i as u64 + 1);
        let device = device(&fake, &r, Ask { depth: 64, signals: 1, ..Ask::default() });
        let post = |n: u64| (0..n).for_each(|_| device.post(0, 1, entry(OP_PUT | OP_SIGNAL_INC, 0)));
        if place.rank == 1 {
            fake.hold(1);
        }
        place.barrier();
        let (over, received) = (place.word(1), place.word(2));
        match place.rank {
            0 => {
                for i in 0..VALUES {
                    let (from, to) = (host.handle as u64, dst.as_window().handle as u64);
                    device.post(0, 1, entry(OP_PUT, 64).first(64 * i, from).second(64 * i, to));
                }
                device.flush(0, 1);
                // As many as there is room for: once it has asked the receiver, all waits for the answer.
                for _ in 0..SIGNALS / 4 {
                    post(4);
                    std::thread::sleep(Duration::from_millis(2));
                }
                over.store(1, Ordering::Release);
                // With nothing on its way the kernel has its turn.
                wait(|| "the receiver".into(), || received.load(Ordering::Acquire) == 1);
                let before = fake.lane_descriptors();
                wait(
                    || "the kernel".into(),
                    || {
                        post(8);
                        device.flush(0, 1);
                        fake.lane_descriptors() - before >= 50
                    },
                );
            }
            _ => {
                wait(|| "the sender".into(), || over.load(Ordering::Acquire) == 1);
                assert!(fake.is_holding(), "nothing stands");
                let come = (0..VALUES).filter(|&i| dst.get(8 * i as usize) == i + 1).count() as u64;
                assert!(come < VALUES, "all have come");
                assert_eq!(device.signal(0, 0), 0, "signals have overtaken what stands: {come} values have come");
                fake.hold(0);
                device.wait_signal(0, 0, SIGNALS);
                (0..VALUES).for_each(|i| assert_eq!(dst.get(8 * i as usize), i + 1));
                received.store(1, Ordering::Release);
            }
        }
        place.barrier();
        device.destroy();
        place.barrier();
        r.leave();
        fake.check();
    });
}
