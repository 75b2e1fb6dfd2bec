//! Windows in host memory that an engine copies from and to, for ranks of one process: they go while it does.

use crate::harness::*;
use crate::support::common::*;
use nccl_plugin_api::{NcclResult, PTR_CUDA};
use std::ffi::c_void;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

/// More than the staging memory takes: the rest waits for room there.
const BYTES: usize = 20 << 20;
const WORDS: usize = BYTES / 8;
/// What a window has while it is registered, and when it is not any more.
const BEFORE: u64 = 1;
const AFTER: u64 = 2;

/// What goes between rank 0's window in host memory and `rank`'s on a GPU.
#[derive(Clone, Copy, Debug)]
enum Way {
    Put(usize),
    Get(usize),
}

fn fill(window: &Window, value: u64) {
    let words = window.words.as_ptr().cast_mut();
    // SAFETY: the vector's own words; who else writes there, writes whole words.
    (0..WORDS).for_each(|i| unsafe { words.add(i).write_volatile(value) });
}

/// How many words of it hold `value`.
fn count(window: &Window, value: u64) -> usize {
    // SAFETY: as above.
    (0..WORDS).filter(|&i| unsafe { window.words.as_ptr().add(i).read_volatile() } == value).count()
}

/// A transfer is partly under way when the window is deregistered. What has begun ends before that returns; from then
/// on nobody reads or writes there, and the rest of it fails.
#[test]
fn what_is_deregistered_is_left_alone() {
    for how in ["kernel=0", ""] {
        for way in [Way::Put(1), Way::Put(0), Way::Get(1), Way::Get(0)] {
            let fake = Fake::take();
            fake.set_issue(how);
            job(2, 1, |r| {
                let _context = fake.enter(0);
                let host = r.window(WORDS, 0);
                let gpu = fake.window(r, 0, WORDS, 0);
                fill(&host, BEFORE);
                r.job.barrier.wait();
                let (Way::Put(peer) | Way::Get(peer)) = way;
                if r.rank == 0 {
                    // The way is found.
                    r.wait(r.put(0, (&host, 0), 8, (gpu.as_window(), 0), peer, None));
                    fake.hold(4096);
                    let request = match way {
                        Way::Put(_) => r.put(0, (&host, 0), BYTES, (gpu.as_window(), 0), peer, None),
                        Way::Get(_) => r.get(0, (gpu.as_window(), 0), BYTES, (&host, 0), peer),
                    };
                    while !fake.is_holding() {
                        assert!(!test(r, request), "{how} {way:?}: it was complete before its copy");
                    }
                    std::thread::scope(|s| {
                        s.spawn(|| {
                            std::thread::sleep(Duration::from_millis(50));
                            fake.hold(0);
                        });
                        r.dereg(&host);
                    });
                    fill(&host, AFTER);
                    assert!(!comes_out(r, request), "{how} {way:?}: all of it went through a window that is gone");
                    fake.rest();
                    let of_others = WORDS - count(&host, AFTER);
                    assert_eq!(of_others, 0, "{how} {way:?}: words were written after it was deregistered");
                }
                r.job.barrier.wait();
                if r.rank == peer {
                    let later = (0..WORDS).filter(|&i| gpu.get(i) == AFTER).count();
                    assert_eq!(later, 0, "{how} {way:?}: words were read after it was deregistered");
                }
                r.job.barrier.wait();
            });
            fake.check();
        }
    }
}

/// NCCL names memory of one host allocation of the driver's as a GPU's to an RMA table.
#[test]
fn host_memory_of_the_driver_is_a_window_whatever_it_is_called() {
    let fake = Fake::take();
    job(1, 1, |r| {
        let _context = fake.enter(0);
        let gpu = fake.window(r, 0, 8, 0);
        let words: &'static mut [u64] = Box::leak(vec![BEFORE; 8].into());
        let mut handle = null_mut();
        for (known, code) in [(0, NcclResult::INVALID_ARGUMENT), (words.as_ptr() as u64, NcclResult::SUCCESS)] {
            fake.know_host(known);
            let at: *mut c_void = words.as_mut_ptr().cast();
            // SAFETY: the words stay.
            assert_eq!(unsafe { T.reg_mr_sym.unwrap()(r.coll, at, 64, PTR_CUDA, 0, &mut handle) }, code);
        }
        let mut request = null_mut();
        // SAFETY: windows that are registered; the place is a local.
        ok(unsafe { T.iput.unwrap()(r.ctx, 0, 0, handle, 64, 0, gpu.as_window().handle, 0, 0, &mut request) });
        r.wait(request);
        assert!((0..8).all(|i| gpu.get(i) == BEFORE));
        // SAFETY: plain call.
        ok(unsafe { T.dereg_mr_sym.unwrap()(r.coll, handle) });
        fake.know_host(0);
    });
    fake.check();
}

/// One that the engine has had nothing to do with is not waited for, and operations that name none of this rank's are
/// nobody's, whichever number it has; a new one with a number that was used before is as good as ever.
#[test]
fn another_window_goes_at_once_and_its_number_is_used_again() {
    const SIGNALS: u64 = 40;
    let fake = Fake::take();
    fake.set_issue("kernel=0");
    job(2, 2, |r| {
        let _context = fake.enter(0);
        // The first one has number 0.
        let [other, host] = [(); 2].map(|()| r.window(WORDS, 0));
        let gpu = fake.window(r, 0, WORDS, 0);
        let sig = fake.signals(r, 0, 1, NEVER_RESET);
        fill(&host, BEFORE);
        r.job.barrier.wait();
        let mut requests = Vec::new();
        if r.rank == 0 {
            r.wait(r.put(0, (&host, 0), 8, (gpu.as_window(), 0), 1, None));
            fake.hold(4096);
            requests.push(r.put(0, (&host, 0), BYTES, (gpu.as_window(), 0), 1, None));
            while !fake.is_holding() {
                assert!(!test(r, requests[0]));
            }
            let ring = || r.put(1, (&host, 0), 0, (gpu.as_window(), 0), 1, Some((sig.as_window(), 0, 1)));
            requests.extend((0..SIGNALS).map(|_| ring()));
        }
        r.job.barrier.wait();
        let begun = Instant::now();
        r.dereg(&other);
        assert!(begun.elapsed() < Duration::from_secs(2), "it was waited for");
        r.job.barrier.wait();
        if r.rank == 0 {
            fake.hold(0);
            requests.into_iter().for_each(|request| r.wait(request));
        } else {
            sig.wait(r, 0, SIGNALS);
        }
        // Numbers rest for a while before they are used again.
        for n in 0..150 {
            let again = r.window(8, 0);
            r.job.barrier.wait();
            if r.rank == 0 {
                r.wait(r.put(n % 2, (&again, 0), 64, (gpu.as_window(), 0), 1, None));
                r.wait(r.get(n % 2, (gpu.as_window(), 64), 64, (&again, 0), 1));
                assert!(again.words.iter().all(|&word| word == BEFORE), "window {n}");
            }
            r.job.barrier.wait();
            r.dereg(&again);
        }
        r.job.barrier.wait();
    });
    fake.check();
}
