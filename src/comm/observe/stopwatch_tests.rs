use super::*;
use crate::telemetry::stats::layout::BUCKETS;

/// Of a (context, peer).
#[derive(Default)]
struct Numbers {
    newest: AtomicU32,
    completed: AtomicU32,
}

impl Numbers {
    fn look(&self, sample: &mut Stopwatch, record: &Record, now: impl Fn() -> u64) -> bool {
        sample.look(|| Seq(self.newest.load(Ordering::Relaxed)), &self.completed, record, now)
    }
}

fn record() -> Record {
    // SAFETY: a record is atomic words, of which all are valid.
    unsafe { std::mem::zeroed() }
}

fn counted(record: &Record) -> Vec<(usize, u64)> {
    let all = record.complete.iter().map(|n: &AtomicU64| n.load(Ordering::Relaxed)).enumerate();
    all.filter(|(_, n)| *n > 0).collect()
}

#[test]
fn a_time_begins_before_the_operation_and_ends_behind_it() {
    let (numbers, record) = (Numbers::default(), record());
    let mut sample = Stopwatch::new(0, 3, Seq(0), 1000);
    assert!(numbers.look(&mut sample, &record, || 1100), "nothing was posted by then");
    numbers.newest.store(2, Ordering::Relaxed);
    assert!(numbers.look(&mut sample, &record, || 1200));
    assert!(numbers.look(&mut sample, &record, || 1300) && counted(&record).is_empty());
    numbers.completed.store(1, Ordering::Relaxed);
    assert!(numbers.look(&mut sample, &record, || 1400));
    // Posted behind 1100, complete before 1400.
    assert_eq!((counted(&record), record.complete_ns.load(Ordering::Relaxed)), (vec![(8, 1)], 300));
    // The second one was posted before this is looked for: the third one is the next.
    numbers.completed.store(2, Ordering::Relaxed);
    assert!(numbers.look(&mut sample, &record, || 1500));
    numbers.newest.store(3, Ordering::Relaxed);
    numbers.completed.store(3, Ordering::Relaxed);
    assert!(numbers.look(&mut sample, &record, || 1600), "posted and complete between two looks");
    assert_eq!((counted(&record), record.complete_ns.load(Ordering::Relaxed)), (vec![(6, 1), (8, 1)], 400));
}

#[test]
fn it_ends_by_itself_but_not_before_what_has_begun() {
    let (numbers, record) = (Numbers::default(), record());
    let mut sample = Stopwatch::new(0, 0, Seq(0), 0);
    assert!((0..CALLS).all(|call| numbers.look(&mut sample, &record, || call.into())));
    assert!(!numbers.look(&mut sample, &record, || panic!("the clock is not asked in vain")));
    let mut sample = Stopwatch::new(0, 0, Seq(0), 0);
    numbers.newest.store(1, Ordering::Relaxed);
    assert!((0..10 * CALLS).all(|_| numbers.look(&mut sample, &record, || 7)));
    numbers.completed.store(1, Ordering::Relaxed);
    assert!(numbers.look(&mut sample, &record, || 1 << 50));
    assert_eq!(counted(&record), [(BUCKETS - 1, 1)]);
}

#[test]
fn one_that_waits_for_a_peer_that_stands_is_left() {
    let (numbers, record) = (Numbers::default(), record());
    let mut sample = Stopwatch::new(0, 0, Seq(0), 1000);
    numbers.newest.store(1, Ordering::Relaxed);
    assert!(numbers.look(&mut sample, &record, || 2000));
    assert!(!sample.is_overdue(1000 + MOST) && sample.is_overdue(1001 + MOST));
}

#[test]
fn the_clock_that_ends_a_time_is_read_behind_its_completion() {
    let (numbers, record) = (Numbers::default(), record());
    let mut sample = Stopwatch::new(0, 0, Seq(0), 1000);
    numbers.newest.store(1, Ordering::Relaxed);
    let times = [1100, 1200].map(AtomicU64::new);
    let reads = AtomicU32::new(0);
    // It becomes complete once the clock was read.
    let clock = || {
        numbers.completed.store(1, Ordering::Relaxed);
        times[reads.fetch_add(1, Ordering::Relaxed) as usize].load(Ordering::Relaxed)
    };
    assert!(numbers.look(&mut sample, &record, clock));
    assert_eq!(record.complete_ns.load(Ordering::Relaxed), 200);
}
