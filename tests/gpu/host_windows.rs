//! Windows in host memory that an engine copies from and to, for ranks of one process: they go while it does.

use crate::harness::*;
use crate::support::common::*;
use std::time::Duration;

/// More than the staging memory takes: the rest waits for room there.
const BYTES: usize = 12 << 20;
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

/// A transfer is partly under way when the window is deregistered. What has begun ends before that returns; from then on
/// nobody reads or writes there, and the rest of it fails.
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

/// One that the engine has had nothing to do with is not waited for, and a new one with its number is as good as ever.
#[test]
fn another_window_goes_at_once_and_its_number_is_used_again() {
    let fake = Fake::take();
    fake.set_issue("kernel=0");
    job(2, 2, |r| {
        let _context = fake.enter(0);
        let [host, other] = [(); 2].map(|()| r.window(WORDS, 0));
        let gpu = fake.window(r, 0, WORDS, 0);
        fill(&host, BEFORE);
        r.job.barrier.wait();
        let request = (r.rank == 0).then(|| {
            r.wait(r.put(0, (&other, 0), 8, (&host, 0), 0, None));
            fake.hold(4096);
            let request = r.put(0, (&host, 0), BYTES, (gpu.as_window(), 0), 1, None);
            while !fake.is_holding() {
                assert!(!test(r, request));
            }
            request
        });
        r.job.barrier.wait();
        let begun = std::time::Instant::now();
        r.dereg(&other);
        assert!(begun.elapsed() < Duration::from_secs(2), "it was waited for");
        r.job.barrier.wait();
        if let Some(request) = request {
            fake.hold(0);
            r.wait(request);
        }
        // Windows are numbered anew from the lowest that is free.
        let again = r.window(WORDS, 0);
        fill(&again, AFTER);
        r.job.barrier.wait();
        if r.rank == 0 {
            for context in [0, 1] {
                r.wait(r.put(context, (&again, 0), BYTES, (gpu.as_window(), 0), 1, None));
            }
        }
        r.job.barrier.wait();
        assert_eq!((0..WORDS).filter(|&i| gpu.get(i) == AFTER).count(), if r.rank == 1 { WORDS } else { 0 });
        r.job.barrier.wait();
        r.dereg(&again);
        r.job.barrier.wait();
        let again = r.window(WORDS, 0);
        r.job.barrier.wait();
        if r.rank == 0 {
            r.wait(r.get(1, (gpu.as_window(), 0), BYTES, (&again, 0), 1));
            assert_eq!(count(&again, AFTER), WORDS);
        }
        r.job.barrier.wait();
    });
    fake.check();
}
