use super::super::tests::{start, until};
use super::*;
use crate::proxy::drain::{Left, Pass, Work};
use crate::proxy::idle::Rest;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::Arc;

/// A queue into which device code writes.
#[derive(Default)]
struct Written {
    written: AtomicU64,
    given_back: AtomicU64,
    /// Each pass finds so many new ones.
    comes: AtomicU64,
    /// Nothing of it moves.
    stands: AtomicBool,
    /// A pass does not come back.
    hangs: AtomicBool,
    /// A pass has a fault.
    is_bad: AtomicBool,
    passes: AtomicU64,
}

impl Written {
    fn of(entries: u64) -> Arc<Self> {
        Arc::new(Self { written: entries.into(), ..Self::default() })
    }

    fn given_back(&self) -> u64 {
        self.given_back.load(Ordering::SeqCst)
    }
}

/// Each pass carries an entry out.
struct Carries {
    queue: Arc<Written>,
    stood_at: Option<u64>,
}

impl Work for Carries {
    fn pass(&mut self, _: Rest) -> Pass {
        let queue = &self.queue;
        queue.passes.fetch_add(1, Ordering::SeqCst);
        assert!(!queue.is_bad.swap(false, Ordering::SeqCst), "a fault of this test's own");
        while queue.hangs.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        let comes = queue.comes.load(Ordering::SeqCst);
        let written = queue.written.fetch_add(comes, Ordering::SeqCst) + comes;
        if queue.stands.load(Ordering::SeqCst) || queue.given_back() == written {
            return Pass { is_busy: queue.given_back() < written, ..Pass::default() };
        }
        queue.given_back.fetch_add(1, Ordering::SeqCst);
        Pass { moved: 1, is_busy: true, ..Pass::default() }
    }
    fn watch(&mut self, _: Instant, _: Duration) {}
    fn fail(&mut self) {
        self.queue.stands.store(true, Ordering::SeqCst);
    }
    fn name(&self) -> String {
        "carries".into()
    }
    fn unfinished(&self) -> String {
        "some".into()
    }
    fn mark(&mut self) -> Vec<LaneMark> {
        let until = self.queue.written.load(Ordering::SeqCst);
        (until > self.queue.given_back()).then_some(LaneMark { lane: 0, until }).into_iter().collect()
    }
    fn left(&self, marks: &mut Vec<LaneMark>) -> Left {
        let given_back = self.queue.given_back();
        marks.retain(|mark| mark.until > given_back);
        let entries = marks.iter().map(|mark| mark.until - given_back).sum();
        Left { entries, stands: self.stood_at == Some(given_back) }
    }
    fn give_up(&mut self, _: &[LaneMark]) -> String {
        self.stood_at = Some(self.queue.given_back());
        "some".into()
    }
}

/// An engine of so many threads, one of whose works each of these is.
fn carries(threads: u32, queues: &[&Arc<Written>]) -> Engine {
    // It never sleeps: a pass more costs nothing.
    let engine = start(threads, None);
    for (thread, &queue) in queues.iter().enumerate() {
        engine.give(thread, Box::new(Carries { queue: queue.clone(), stood_at: None }));
    }
    engine
}

fn time(engine: &Engine) -> Duration {
    let begun = Instant::now();
    engine.catch_up();
    begun.elapsed()
}

fn set(flag: &AtomicBool, value: bool) {
    flag.store(value, Ordering::SeqCst);
}

#[test]
fn what_was_rung_is_through_on_all_threads_and_what_comes_is_not_waited_for() {
    let queues = [1000, 0, 3000].map(Written::of);
    // More comes than is carried out.
    queues.iter().for_each(|queue| queue.comes.store(2, Ordering::SeqCst));
    let engine = carries(2, &queues.each_ref());
    let marks = queues.each_ref().map(|queue| queue.written.load(Ordering::SeqCst));
    assert!(time(&engine) < STANDS_AFTER);
    for (queue, mark) in queues.iter().zip(marks) {
        assert!(queue.given_back() >= mark);
        assert!(queue.written.load(Ordering::SeqCst) > queue.given_back(), "it is behind for ever");
        queue.comes.store(0, Ordering::SeqCst);
    }
}

#[test]
fn an_engine_without_works_has_nothing_to_wait_for() {
    assert!(time(&start(2, Some(Duration::ZERO))) < STANDS_AFTER);
    // Nor has one that sleeps beside queues in which nothing is.
    let (engine, queue) = (start(1, Some(Duration::ZERO)), Written::of(0));
    engine.give(0, Box::new(Carries { queue: queue.clone(), stood_at: None }));
    let before = queue.passes.load(Ordering::SeqCst);
    assert!(time(&engine) < STANDS_AFTER);
    // One that rings for kernels has no marks: it has rung.
    assert!(queue.passes.load(Ordering::SeqCst) > before, "a pass comes before the answer");
}

/// It is waited for once, also where others move all the time.
#[test]
fn what_stands_is_waited_for_once() {
    let [stands, moves] = [Written::of(5), Written::of(0)];
    set(&stands.stands, true);
    moves.comes.store(1, Ordering::SeqCst);
    let engine = carries(1, &[&stands, &moves]);
    let first = time(&engine);
    assert!(first >= STANDS_AFTER && first < 2 * STANDS_AFTER, "{first:?}");
    let next = time(&engine);
    assert!(next >= STILL_STANDS_AFTER && next < STANDS_AFTER, "{next:?}");
    // It goes on, and is waited for again.
    set(&stands.stands, false);
    engine.catch_up();
    assert_eq!(stands.given_back(), 5);
    moves.comes.store(0, Ordering::SeqCst);
}

#[test]
fn those_who_wait_at_once_are_each_answered() {
    let queue = Written::of(10_000);
    let engine = carries(1, &[&queue]);
    std::thread::scope(|s| {
        for _ in 0..4 {
            s.spawn(|| {
                let mark = queue.written.fetch_add(100, Ordering::SeqCst) + 100;
                engine.catch_up();
                assert!(queue.given_back() >= mark);
            });
        }
    });
}

#[test]
fn a_thread_that_stands_in_a_call_is_waited_for_once() {
    let queue = Written::of(5);
    set(&queue.hangs, true);
    let mut engine = carries(1, &[&queue]);
    engine.answer = Duration::from_millis(500);
    until(|| queue.passes.load(Ordering::SeqCst) > 0);
    let first = time(&engine);
    assert!(first >= engine.answer, "{first:?}");
    let next = time(&engine);
    assert!(next >= STILL_STANDS_AFTER && next < engine.answer, "{next:?}");
    // Once it is back it has its time again: more than it was given last.
    engine.answer = FINISH_WITHIN;
    set(&queue.stands, true);
    set(&queue.hangs, false);
    let back = time(&engine);
    assert!(back >= STANDS_AFTER && back < FINISH_WITHIN, "{back:?}");
    set(&queue.stands, false);
    engine.catch_up();
    assert_eq!(queue.given_back(), 5);
}

/// What had a fault carries nothing out, and what is asked back ends by itself.
#[test]
fn works_that_fail_or_go_meanwhile_are_waited_for_no_longer() {
    let [fails, goes] = [Written::of(5), Written::of(5)];
    set(&fails.stands, true);
    set(&goes.stands, true);
    let engine = start(2, None);
    engine.give(0, Box::new(Carries { queue: fails.clone(), stood_at: None }));
    let id = engine.give(1, Box::new(Carries { queue: goes.clone(), stood_at: None }));
    std::thread::scope(|s| {
        let waits = s.spawn(|| time(&engine));
        std::thread::sleep(Duration::from_millis(200));
        set(&fails.is_bad, true);
        set(&goes.stands, false);
        assert!(engine.take_back(id));
        let took = waits.join().unwrap();
        assert!(took < STANDS_AFTER, "{took:?}");
    });
    assert_eq!(goes.given_back(), 5);
    assert!(time(&engine) < STANDS_AFTER, "it is not waited for again");
}
