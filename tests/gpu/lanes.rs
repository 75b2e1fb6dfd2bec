//! Queues of device code that a kernel serves by itself: every entry's bytes, in their order, sums and credits,
//! whoever of the kernel and the engine's threads has carried it out. Through the library's own engine, on the fake
//! CUDA driver.

use crate::harness::lanes::meeting::{rounds, Meeting};
use crate::harness::lanes::serve_by_kernel;
use crate::harness::lanes::served::*;
use crate::harness::lanes::LanesEnd;
use crate::harness::*;
use crate::support::common::{job, Rank};
use crate::support::device::Ask;
use crate::support::logged;
use std::sync::atomic::AtomicU64;

/// Who is where, and what they do.
#[derive(Clone, Copy, Debug)]
pub struct Scene {
    pub ranks: usize,
    pub gpus: i32,
    pub contexts: usize,
    /// Contexts behind these that carry nothing.
    pub quiet: usize,
    /// In all rounds but each of so many only the first context carries something; 0: all do in each.
    pub rests: usize,
    /// Slots of a queue; 0: as many as the library makes.
    pub depth: i32,
    /// Destination windows.
    pub windows: usize,
    pub mix: Mix,
    /// Entries of each stream in a round.
    pub each: usize,
    /// What is logged from the first round on is collected.
    pub listens: bool,
}

impl Default for Scene {
    fn default() -> Self {
        Self {
            ranks: 2,
            gpus: 1,
            contexts: 1,
            quiet: 0,
            rests: 0,
            depth: 64,
            windows: 1,
            mix: Mix::default(),
            each: 200,
            listens: false,
        }
    }
}

impl Scene {
    fn ask(&self) -> Ask {
        let contexts = (self.contexts + self.quiet) as i32;
        Ask { contexts, depth: self.depth, signals: signals(self.ranks), ..Ask::default() }
    }
}

/// Rounds of streams between all of them, until `is_enough`; `between` comes behind each.
pub fn streams(fake: &Fake, scene: Scene, between: impl Fn(&Rank, usize) + Sync, is_enough: impl Fn() -> bool + Sync) {
    serve_by_kernel();
    let against = AtomicU64::new(0);
    job(scene.ranks, 1, |r| {
        let gpu = r.rank as i32 % scene.gpus;
        let _context = fake.enter(gpu);
        let words = window_words(scene.ranks, scene.contexts);
        let src = fake.window(r, gpu, words, 0);
        let dst: Vec<_> = (0..scene.windows).map(|_| fake.window(r, gpu, words, 0)).collect();
        let places = Places { src: &src, dst: &dst };
        let device = device(fake, r, scene.ask());
        let peers: Vec<_> = (0..scene.ranks).filter(|p| *p != r.rank).collect();
        let mut streams = Streams::new(r, &peers, scene.contexts, 0, &|_| scene.mix);
        streams.fill(&places);
        if scene.listens {
            logged::listen();
        }
        let meeting = Meeting::new(|| r.job.barrier.wait(), &against);
        meeting.wait();
        rounds(
            &meeting,
            &format!("{scene:?}"),
            |n| {
                let rests = scene.rests > 0 && n % scene.rests != 0;
                streams.run_in(if rests { 1 } else { scene.contexts }, &device, &places, scene.each);
                streams.flush(&device, &places);
                meeting.wait();
                streams.finish(&device, &places);
                between(r, n);
            },
            &is_enough,
        );
        assert!(!device.has_error());
        device.destroy();
    });
    fake.check();
}

/// Rounds until the kernel has taken so many more.
fn until_taken(fake: &Fake, scene: Scene, n: u64) {
    until_taken_and(fake, scene, n, || true);
}

/// The same, and until something is so.
fn until_taken_and(fake: &Fake, scene: Scene, n: u64, is_so: impl Fn() -> bool + Sync) {
    let before = fake.lane_descriptors();
    streams(fake, scene, |_, _| (), || fake.lane_descriptors() - before >= n && is_so());
}

#[test]
fn the_kernel_carries_out_what_device_code_writes() {
    for (gpus, contexts, depth) in [(1, 1, 64), (2, 1, 64), (1, 2, 8), (2, 2, 0)] {
        let fake = Fake::take();
        until_taken(&fake, Scene { gpus, contexts, depth, ..Scene::default() }, 1000);
    }
}

/// The closing lines count what kernels have carried out.
#[test]
fn what_the_kernel_has_carried_out_is_said_at_the_end() {
    let fake = Fake::take();
    logged::collect();
    let before = fake.lane_descriptors();
    serve_by_kernel();
    let scene = Scene { gpus: 2, contexts: 2, ..Scene::default() };
    let listen = |_: &Rank, _| logged::listen();
    streams(&fake, scene, listen, || fake.lane_descriptors() - before >= 1000);
    let said = |line: &str| -> Option<u64> {
        let (_, entries) = line.split_once(" launches of the lane kernel served queues, with ")?;
        entries.split_once(" entries; ")?.0.parse().ok()
    };
    let said: u64 = logged::lines().iter().filter_map(|(_, line)| said(line)).sum();
    assert_eq!(said, fake.lane_descriptors() - before);
}

/// A block of the kernel has eight of them, and up to 64 where eight blocks are not enough; more than 512 need more
/// blocks. All name the same windows, each of which is looked up once a hand-over, however many queues there are.
/// Behind a launch that was late the next ones have fewer blocks, so it is not the first ones that must have several.
#[test]
fn many_queues_are_served_by_several_blocks() {
    for (contexts, each) in [(40, 8), (80, 8), (530, 3)] {
        let fake = Fake::take();
        let asked = || fake.calls("cuDeviceGetP2PAttribute");
        let before = (fake.lane_gos(), asked(), fake.lane_gos_of_others());
        let gos = || fake.lane_gos() - before.0;
        let have_several = || gos() >= 4 && fake.lane_gos_of_others() - before.2 >= 2;
        let scene = Scene { gpus: 2, contexts, depth: 16, each, ..Scene::default() };
        until_taken_and(&fake, scene, 300, have_several);
        let gos = gos();
        assert!(gos >= 4, "each rank's kernel has two blocks at least");
        assert!(asked() - before.1 <= 4 * gos, "{} times for {gos} blocks of queues", asked() - before.1);
    }
}

/// Queues of two slots, and of one.
#[test]
fn the_smallest_queues_are_served() {
    for depth in [1, 2] {
        let fake = Fake::take();
        until_taken(&fake, Scene { depth, each: 60, ..Scene::default() }, 50);
    }
}

#[test]
fn signals_alone_are_exact() {
    let fake = Fake::take();
    until_taken(&fake, Scene { mix: Mix { signals: true, ..Mix::default() }, ..Scene::default() }, 1000);
}

/// Three ranks, and more windows than the kernel knows of a lane.
#[test]
fn many_windows_and_peers() {
    for (gpus, windows) in [(1, 3), (3, 3), (1, 6)] {
        let fake = Fake::take();
        let (before, taken) = (fake.refused_lanes(), if windows == 3 { 300 } else { 10 });
        until_taken(&fake, Scene { ranks: 3, gpus, windows, each: 100, ..Scene::default() }, taken);
        // Of fewer one may be refused, too, where a queue is handed over before it has named all.
        assert!(windows <= 3 || fake.refused_lanes() > before, "{windows} windows");
    }
}

/// What it refuses goes through the engine's threads, in its place: signals imply what was before on either side.
#[test]
fn lanes_go_to_the_engine_and_back_at_what_the_kernel_refuses() {
    for (gpus, refused, gets) in [(1, 100, false), (2, 100, true), (1, 300, true)] {
        let fake = Fake::take();
        let before = (fake.lane_descriptors(), fake.refused_lanes());
        let scene = Scene { gpus, mix: Mix { refused, gets, ..Mix::default() }, ..Scene::default() };
        streams(
            &fake,
            scene,
            |_, _| (),
            || fake.refused_lanes() - before.1 >= 2 && fake.lane_descriptors() - before.0 >= 100,
        );
    }
}

/// Long copies among others take no queue away from the kernel, as long as enough lies between them.
#[test]
fn long_copies_among_others_are_the_kernels() {
    for (gpus, longer) in [(1, 12), (2, 6)] {
        let fake = Fake::take();
        let before = fake.longer_copies();
        let scene = Scene { gpus, mix: Mix { longer, ..Mix::default() }, ..Scene::default() };
        streams(&fake, scene, |_, _| (), || fake.longer_copies() - before >= 50);
    }
}

/// Launches that do not start: all goes on without them, and with them once they do.
#[test]
fn launches_that_do_not_start_hold_nothing_up() {
    let fake = Fake::take();
    fake.hold_lanes(true);
    let before = fake.lane_descriptors();
    let was_held = AtomicU64::new(0);
    let between = |r: &Rank, n: usize| {
        if r.rank == 0 && n < 4 {
            was_held.fetch_max(fake.held_lanes() as u64, std::sync::atomic::Ordering::Relaxed);
            assert_eq!(fake.lane_descriptors(), before);
        }
        if r.rank == 0 && n == 4 {
            fake.hold_lanes(false);
        }
    };
    streams(&fake, Scene { gpus: 2, ..Scene::default() }, between, || fake.lane_descriptors() - before >= 500);
    assert!(was_held.into_inner() > 0, "none was launched");
}

/// Launches that end early, at any entry, and whenever somebody has them end.
#[test]
fn launches_end_at_any_time() {
    for most in [3, 40, 0] {
        let fake = Fake::take();
        fake.kernel_limits(0, most);
        let before = (fake.lane_descriptors(), fake.lane_ends(LanesEnd::Life), fake.lane_gos());
        let scene = Scene { contexts: 2, depth: 16, ..Scene::default() };
        let is_over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|s| {
            s.spawn(|| {
                // A machine with other things to do starts a kernel late: at times they are left alone for longer.
                for pause in [1, 2, 4, 8, 16, 32, 64].into_iter().cycle() {
                    if most != 0 || is_over.load(std::sync::atomic::Ordering::Relaxed) {
                        break;
                    }
                    fake.end_kernels();
                    std::thread::sleep(std::time::Duration::from_micros(500 * pause));
                }
            });
            let enough = || fake.lane_descriptors() - before.0 >= 20 && fake.lane_ends(LanesEnd::Life) - before.1 >= 4;
            let all =
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| streams(&fake, scene, |_, _| (), enough)));
            is_over.store(true, std::sync::atomic::Ordering::Relaxed);
            all.unwrap();
        });
        assert!(fake.lane_gos() > before.2);
    }
}

/// There is one where nobody says anything about it.
#[test]
fn there_is_one_by_default() {
    let fake = Fake::take();
    std::env::remove_var("OXYGIN_GPU_ISSUE");
    until_taken(&fake, Scene::default(), 100);
}

/// There is none where none is wanted, nor where all entries are recorded.
#[test]
fn there_is_none_where_none_is_wanted() {
    let fake = Fake::take();
    for word in ["lanes=0", "kernel=0"] {
        fake.set_issue(word);
        let before = (fake.lane_descriptors(), fake.lane_gos());
        streams(&fake, Scene::default(), |_, _| (), || true);
        assert_eq!((fake.lane_descriptors(), fake.lane_gos()), before, "{word}");
    }
}

#[test]
fn there_is_none_where_entries_are_traced() {
    let fake = Fake::take();
    let path = std::env::temp_dir().join(format!("oxygin-lanes-trace-{}", std::process::id()));
    std::env::set_var("OXYGIN_TRACE", &path);
    let before = (fake.lane_descriptors(), fake.lane_gos());
    streams(&fake, Scene::default(), |_, _| (), || true);
    std::env::remove_var("OXYGIN_TRACE");
    assert_eq!((fake.lane_descriptors(), fake.lane_gos()), before);
    for left in std::fs::read_dir(std::env::temp_dir()).unwrap().flatten() {
        if left.path().to_string_lossy().starts_with(&*path.to_string_lossy()) {
            let _ = std::fs::remove_file(left.path());
        }
    }
}
