//! The same between processes: a kernel that serves lanes stores into windows of peers that are mapped here.

use crate::harness::lanes::serve_by_kernel;
use crate::harness::lanes::served::*;
use crate::harness::memory::Memory;
use crate::harness::*;
use crate::support::device::Ask;
use crate::support::processes::{processes, Place};

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
