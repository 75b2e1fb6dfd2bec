use super::*;
use crate::proxy::drain::Left;
use std::sync::atomic::AtomicU32;

struct Counts(Arc<AtomicU32>, Arc<AtomicBool>);

impl Work for Counts {
    fn pass(&mut self, _: Rest) -> Pass {
        self.0.fetch_add(1, Ordering::SeqCst);
        Pass::default()
    }
    fn watch(&mut self, _: Instant, _: Duration) {}
    fn fail(&mut self) {
        self.0.store(u32::MAX, Ordering::SeqCst);
    }
    fn name(&self) -> String {
        "counts".into()
    }
    fn unfinished(&self) -> String {
        String::new()
    }
}

impl Drop for Counts {
    fn drop(&mut self) {
        self.1.store(true, Ordering::SeqCst);
    }
}

pub(super) fn start(threads: u32, spin: Option<Duration>) -> Engine {
    let settings = Settings { threads, spin, stall: Duration::from_secs(1), cpus: None, comm: 7, trace: None };
    Engine::start(&settings).unwrap()
}

#[test]
fn work_is_done_until_it_is_taken_back() {
    let engine = start(2, Some(Duration::from_micros(100)));
    let all: Vec<_> = (0..4)
        .map(|i| {
            let (count, dropped) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicBool::new(false)));
            let id = engine.give(i, Box::new(Counts(count.clone(), dropped.clone())));
            (id, count, dropped)
        })
        .collect();
    for (_, count, _) in &all {
        let seen = count.load(Ordering::SeqCst);
        while count.load(Ordering::SeqCst) < seen + 3 {
            std::thread::yield_now();
        }
    }
    let (id, count, dropped) = &all[0];
    assert!(engine.take_back(*id));
    assert!(dropped.load(Ordering::SeqCst));
    let after = count.load(Ordering::SeqCst);
    let other = all[2].1.load(Ordering::SeqCst);
    while all[2].1.load(Ordering::SeqCst) < other + 3 {
        std::thread::yield_now();
    }
    assert_eq!(count.load(Ordering::SeqCst), after, "nobody works on it any more");
    drop(engine);
    assert!(all.iter().all(|(_, _, dropped)| dropped.load(Ordering::SeqCst)));
}

#[test]
fn sets_of_few_contexts_have_all_threads_in_turn() {
    let engine = start(3, Some(Duration::from_micros(100)));
    assert_eq!([1, 1, 1, 4, 2, 1].map(|contexts| engine.deal(contexts).next()), [0, 1, 2, 0, 1, 0].map(Some));
}

/// Stands in a call, as a driver's may, until it is let go.
struct Stands(Arc<AtomicBool>, Arc<AtomicBool>);

impl Work for Stands {
    fn pass(&mut self, _: Rest) -> Pass {
        self.0.store(true, Ordering::SeqCst);
        while !self.1.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        Pass::default()
    }

    fn watch(&mut self, _: Instant, _: Duration) {}
    fn fail(&mut self) {}
    fn name(&self) -> String {
        "stands".into()
    }
    fn unfinished(&self) -> String {
        String::new()
    }
}

#[test]
fn a_thread_that_stands_holds_nobody_up_for_ever() {
    let mut engine = start(1, None);
    engine.give_back = Duration::from_millis(50);
    let [stands, goes] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
    let first = engine.give(0, Box::new(Stands(stands.clone(), goes.clone())));
    while !stands.load(Ordering::SeqCst) {
        std::thread::yield_now();
    }
    let (count, dropped) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicBool::new(false)));
    let second = engine.give(0, Box::new(Counts(count, dropped.clone())));
    assert!(!engine.take_back(first) && !engine.take_back(second));
    drop(engine);
    goes.store(true, Ordering::SeqCst);
    while !dropped.load(Ordering::SeqCst) {
        std::thread::yield_now();
    }
}

/// Has a fault once it is told to, one more if it is, and says how often it was worked on since the first.
struct Faults {
    is_told: Arc<AtomicBool>,
    is_told_again: Arc<AtomicBool>,
    has_failed: bool,
    since: Arc<AtomicU32>,
    dropped: Arc<AtomicBool>,
}

impl Work for Faults {
    fn pass(&mut self, _: Rest) -> Pass {
        assert!(self.has_failed || !self.is_told.load(Ordering::SeqCst), "a fault of this test's own");
        assert!(!self.is_told_again.load(Ordering::SeqCst), "another one");
        self.since.fetch_add(self.has_failed.into(), Ordering::SeqCst);
        Pass::default()
    }
    fn watch(&mut self, _: Instant, _: Duration) {}
    fn fail(&mut self) {
        self.has_failed = true;
    }
    fn name(&self) -> String {
        "faults".into()
    }
    fn unfinished(&self) -> String {
        String::new()
    }
}

impl Drop for Faults {
    fn drop(&mut self) {
        self.dropped.store(true, Ordering::SeqCst);
    }
}

pub(super) fn until(what: impl Fn() -> bool) {
    let begun = Instant::now();
    while !what() {
        assert!(begun.elapsed() < Duration::from_secs(20), "it has not come");
        std::thread::yield_now();
    }
}

/// A fault ends neither the thread nor what else it has; what was hit goes on, so that device code gets its entries
/// back, until it has another one.
#[test]
fn a_fault_hits_one_work_alone_and_that_one_goes_on() {
    let engine = start(1, None);
    let [is_told, is_told_again, dropped] = [(); 3].map(|()| Arc::new(AtomicBool::new(false)));
    let since = Arc::new(AtomicU32::new(0));
    let (count, other) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicBool::new(false)));
    let faults = Faults {
        is_told: is_told.clone(),
        is_told_again: is_told_again.clone(),
        has_failed: false,
        since: since.clone(),
        dropped: dropped.clone(),
    };
    let ids = [engine.give(0, Box::new(faults)), engine.give(0, Box::new(Counts(count.clone(), other.clone())))];
    assert!(engine.check().is_ok());
    is_told.store(true, Ordering::SeqCst);
    until(|| since.load(Ordering::SeqCst) > 3);
    assert!(engine.check().unwrap_err().message().contains("a fault has hit"));
    let seen = count.load(Ordering::SeqCst);
    until(|| count.load(Ordering::SeqCst) > seen + 3 && count.load(Ordering::SeqCst) != u32::MAX);
    assert!(!dropped.load(Ordering::SeqCst));
    is_told_again.store(true, Ordering::SeqCst);
    until(|| dropped.load(Ordering::SeqCst));
    let seen = count.load(Ordering::SeqCst);
    until(|| count.load(Ordering::SeqCst) > seen + 3);
    let begun = Instant::now();
    assert!(ids.into_iter().all(|id| engine.take_back(id)));
    assert!(begun.elapsed() < GIVE_BACK / 2 && other.load(Ordering::SeqCst));
}

/// Device code has left so many entries, of which each pass carries one out.
struct Leaves(Arc<AtomicU32>);

impl Work for Leaves {
    fn pass(&mut self, rest: Rest) -> Pass {
        // Those of a queue that a pass in company does not look at.
        let left = self.0.load(Ordering::SeqCst);
        if rest != Rest::Sleeps || left == 0 {
            return Pass::default();
        }
        self.0.store(left - 1, Ordering::SeqCst);
        Pass { moved: 1, is_busy: left > 1, ..Pass::default() }
    }
    fn watch(&mut self, _: Instant, _: Duration) {}
    fn fail(&mut self) {}
    fn name(&self) -> String {
        "leaves".into()
    }
    fn unfinished(&self) -> String {
        String::new()
    }
}

/// A kernel may end behind entries that it has not waited for.
#[test]
fn what_is_taken_back_or_ends_is_finished_first() {
    let engine = start(1, None);
    let left = [100, 50].map(|n| Arc::new(AtomicU32::new(n)));
    let [first, _] = [0, 1].map(|i| engine.give(0, Box::new(Leaves(left[i].clone()))));
    assert!(engine.take_back(first));
    assert_eq!(left[0].load(Ordering::SeqCst), 0);
    assert_eq!(left[1].load(Ordering::SeqCst), 50, "nobody has asked for this one");
    drop(engine);
    assert_eq!(left[1].load(Ordering::SeqCst), 0);
}

/// Has an entry that is there and cannot be taken for a while: it may have arrived in part, or be the first that nobody
/// has rung for.
struct Ripens(Arc<AtomicU32>);

impl Work for Ripens {
    fn pass(&mut self, _: Rest) -> Pass {
        let passes = self.0.fetch_add(1, Ordering::SeqCst);
        Pass { moved: (passes == 100).into(), ..Pass::default() }
    }
    fn watch(&mut self, _: Instant, _: Duration) {}
    fn fail(&mut self) {}
    fn name(&self) -> String {
        "ripens".into()
    }
    fn unfinished(&self) -> String {
        String::new()
    }
    fn mark(&mut self) -> Vec<LaneMark> {
        vec![LaneMark { lane: 0, until: 1 }]
    }
    fn left(&self, marks: &mut Vec<LaneMark>) -> Left {
        if self.0.load(Ordering::SeqCst) > 100 {
            marks.clear();
        }
        Left { entries: marks.len() as u64, stands: false }
    }
}

#[test]
fn what_is_there_and_does_not_move_yet_is_finished_first() {
    let engine = start(1, None);
    let passes = Arc::new(AtomicU32::new(0));
    let begun = Instant::now();
    assert!(engine.take_back(engine.give(0, Box::new(Ripens(passes.clone())))));
    assert!(passes.load(Ordering::SeqCst) > 100 && begun.elapsed() < STANDS_AFTER, "{passes:?}");
}

/// Waits for a peer that does nothing.
struct Waits;

impl Work for Waits {
    fn pass(&mut self, _: Rest) -> Pass {
        Pass { is_busy: true, ..Pass::default() }
    }
    fn watch(&mut self, _: Instant, _: Duration) {}
    fn fail(&mut self) {}
    fn name(&self) -> String {
        "waits".into()
    }
    fn unfinished(&self) -> String {
        "an entry to rank 1".into()
    }
}

#[test]
fn what_does_not_finish_is_let_go_of_in_time() {
    let engine = start(1, None);
    let works = [(); 3].map(|()| engine.give(0, Box::new(Waits)));
    let begun = Instant::now();
    assert!(works.into_iter().all(|id| engine.take_back(id)));
    let took = begun.elapsed();
    assert!(took >= STANDS_AFTER && took < 2 * STANDS_AFTER, "it is waited for once: {took:?}");
}
