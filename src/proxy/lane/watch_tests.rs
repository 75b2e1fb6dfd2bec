use super::super::stands::Stands;
use super::super::{Batch, Common};
use super::*;
use crate::proxy::credits::{CreditWord, Owed};
use crate::proxy::ring::{Ends, Finish, Stopped};
use crate::rma::op::{Get, Op};
use crate::rma::seq::Seq;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

/// What stands in the ring: g, a get; f, a flush; x, something malformed; h, half of an entry; b, a get whose data has
/// to be visible; 2, two gets.
struct Letters {
    head: Box<AtomicU64>,
    entries: Vec<char>,
    owed: Option<Owed>,
    is_full_of_unrung: bool,
    outstanding: u32,
}

impl Letters {
    fn show(&mut self) {
        self.head.store((!self.entries.is_empty()).into(), Ordering::Relaxed);
    }
}

const GET: Op = Op::Get(Get { local: 0, lkey: 0, rkey: 0, remote: 0, len: 8, more: false });

struct Flag(*const AtomicU64);

impl Head for Flag {
    unsafe fn is_there(&self) -> bool {
        // SAFETY: the ring is there (caller).
        unsafe { (*self.0).load(Ordering::Relaxed) == 1 }
    }
}

impl Ring for Letters {
    type Head = Flag;
    const ENDS: Ends = Ends::Context;

    fn head(&self) -> Flag {
        Flag(&*self.head)
    }
    fn capacity(&self) -> u32 {
        64
    }
    fn begin(&mut self) {
        self.show();
    }
    fn read(&mut self, nth: u32, ops: &mut Ops) -> Entry {
        match self.entries.get(nth as usize) {
            None | Some('h') => Entry::Absent,
            Some('g') => {
                ops.push(GET);
                Entry::Op(Finish::NONE)
            }
            Some('b') => {
                ops.push(GET);
                Entry::Gets(1)
            }
            Some('2') => {
                [GET; 2].into_iter().for_each(|get| ops.push(get));
                Entry::Ops(2)
            }
            Some('f') => Entry::Flush(Finish::NONE),
            Some(other) => Entry::Refused(format!("{other} is no entry").into()),
        }
    }
    fn rung(&mut self) -> u32 {
        self.entries.iter().take_while(|entry| **entry != 'h').count() as u32
    }
    fn take(&mut self, n: u32) {
        self.entries.drain(..n as usize);
        self.outstanding += n;
        self.show();
    }
    fn finish(&mut self, _: Finish) {}
    fn outstanding(&self) -> u32 {
        self.outstanding
    }
    fn stop(&mut self, _: Stopped) {}
    fn credit(&mut self, n: u32) {
        self.outstanding -= n;
        self.owed.iter_mut().for_each(|owed| owed.add(n));
    }
    fn owed(&mut self) -> Option<&mut Owed> {
        self.owed.as_mut()
    }
    fn is_full_of_unrung(&self) -> bool {
        self.is_full_of_unrung
    }
}

/// 2^31 operations of others on the lane's (context, peer), payments for instance, since its own newest one: what comes
/// without an operation is complete at once.
#[test]
fn entries_without_an_operation_are_complete_however_old_the_newest_one_is() {
    for entry in ['f', 'x'] {
        let mut bench = Bench::new("g");
        bench.visit();
        bench.contexts[0].completed.store(1, Ordering::Relaxed);
        bench.visit();
        assert_eq!(bench.lane.told(&bench.common).credited, 1);
        for others in [&bench.contexts[0].posted, &bench.contexts[0].completed] {
            others.fetch_add(1 << 31, Ordering::Relaxed);
        }
        bench.lane.ring.entries.push(entry);
        bench.lane.ring.show();
        (0..3).for_each(|_| bench.visit());
        assert_eq!(bench.lane.told(&bench.common).credited, 2, "{entry}");
    }
}

struct Bench {
    contexts: Vec<Stands>,
    lane: Lane<Letters>,
    common: Common,
    batch: Batch,
    start: Instant,
}

const LIMIT: Duration = Duration::from_secs(2);

impl Bench {
    fn new(entries: &str) -> Self {
        let entries = entries.chars().collect();
        let mut ring = Letters { head: Box::default(), entries, owed: None, is_full_of_unrung: false, outstanding: 0 };
        ring.show();
        Self {
            contexts: vec![Stands::default()],
            lane: Lane::new(ring, 1, Seq(0)),
            common: Common::new(0, Arc::default()),
            batch: Batch::default(),
            start: Instant::now(),
        }
    }

    fn visit(&mut self) {
        self.lane.visit(u32::MAX, &self.contexts, &mut self.common, &mut self.batch);
    }

    fn look(&mut self, seconds: u64) -> Option<String> {
        self.lane.watch(&self.common, &self.contexts[0], self.start + Duration::from_secs(seconds), LIMIT)
    }

    /// The sentence after the limit, which comes once.
    fn sentence(&mut self) -> String {
        assert_eq!(self.look(0), None);
        assert_eq!(self.look(1), None);
        let said = self.look(3).expect("a sentence");
        assert_eq!(self.look(9), None, "said once");
        said
    }
}

#[test]
fn an_entry_that_the_fabric_does_not_complete_is_named() {
    let mut bench = Bench::new("ggg");
    bench.visit();
    let said = bench.sentence();
    assert_eq!(
        said,
        "context 0, queue to rank 1, fabric stands: the oldest entry of device code has been under way for 3.0s \
         (OXYGIN_STALL); read from the queue and posted as operation 3 or before, 3 in all unfinished; fabric stands \
         has not reported it complete: rank 1, or this GPU, takes nothing"
    );
    // It moves, stands again, and is named again.
    bench.contexts[0].completed.store(1, Ordering::Relaxed);
    bench.visit();
    assert_eq!(bench.look(10), None);
    assert!(bench.look(13).is_some_and(|said| said.contains("2 in all unfinished")));
    bench.contexts[0].completed.store(3, Ordering::Relaxed);
    bench.visit();
    assert_eq!(bench.look(20), None);
    assert_eq!(bench.look(30), None, "nothing is unfinished");
}

#[test]
fn a_flush_names_the_ranks_that_it_waits_for() {
    let mut bench = Bench::new("gf");
    bench.visit();
    let said = bench.sentence();
    assert!(said.contains("a flush waits for what gets have brought from ranks [1] to be visible"), "{said}");
    assert_eq!(bench.lane.told(&bench.common).state, Shown::Flushing);
}

#[test]
fn a_flush_begins_once_its_gets_are_complete_however_old_they_are() {
    let mut bench = Bench::new("gf");
    let set = |to: &std::sync::atomic::AtomicU32, value| to.store(value, Ordering::Relaxed);
    let flushes = |bench: &Bench| bench.contexts[0].flushes.load(Ordering::Relaxed);
    bench.visit();
    assert_eq!(flushes(&bench), 0, "the get is under way");
    set(&bench.contexts[0].completed, 1);
    bench.visit();
    assert_eq!((flushes(&bench), bench.lane.told(&bench.common).credited), (1, 1));
    bench.visit();
    assert_eq!(bench.lane.told(&bench.common).credited, 2);
    // Others have posted a lot on the same numbers since.
    bench.lane.ring.entries.push('g');
    bench.visit();
    let far = 2 + (1 << 31);
    set(&bench.contexts[0].posted, far);
    set(&bench.contexts[0].completed, far);
    bench.lane.ring.entries.push('f');
    bench.visit();
    assert_eq!(flushes(&bench), 2);
}

/// A rank from which something was got has ended: the context shows it, and this lane's own operations go on.
#[test]
fn a_flush_does_without_a_rank_that_has_failed() {
    let mut bench = Bench::new("gf");
    bench.common.note_get(2, Seq(1));
    bench.contexts[0].failed.store(2, Ordering::Relaxed);
    bench.visit();
    let told = bench.lane.told(&bench.common);
    assert_eq!((told.credited, told.dropped, told.state), (0, 0, Shown::Flushing));
    assert!(bench.common.failed.load(Ordering::Relaxed));
    assert_eq!(bench.contexts[0].flushes.load(Ordering::Relaxed), 0, "its own get is under way");
    bench.contexts[0].completed.store(1, Ordering::Relaxed);
    bench.visit();
    bench.visit();
    assert_eq!(bench.contexts[0].flushes.load(Ordering::Relaxed), 1);
    assert_eq!((bench.lane.told(&bench.common).credited, bench.lane.told(&bench.common).dropped), (2, 0));
}

#[test]
fn what_stands_in_the_queue_is_named_too() {
    let mut bench = Bench::new("h");
    bench.visit();
    let said = bench.sentence();
    assert!(said.contains("it stands in the queue") && said.contains("its other words are missing"), "{said}");
    let mut bench = Bench::new("g");
    bench.contexts[0].is_full.store(true, Ordering::Relaxed);
    bench.visit();
    let said = bench.sentence();
    assert!(said.contains("fabric stands has no room for it: rank 1"), "{said}");
}

/// All is complete, and device code waits for its credits.
#[test]
fn credits_that_device_code_is_not_told_of_are_named() {
    for at in [CreditWord::half(1, 7, 64), CreditWord::whole(1, 7, 64, true)] {
        for has_room in [true, false] {
            let mut bench = Bench::new("ggg");
            bench.lane.ring.owed = Some(Owed::new(at, 1));
            bench.visit();
            bench.contexts[0].completed.store(3, Ordering::Relaxed);
            bench.contexts[0].is_full.store(!has_room, Ordering::Relaxed);
            let visit =
                |bench: &mut Bench| bench.lane.visit(u32::MAX, &bench.contexts, &mut bench.common, &mut bench.batch);
            assert!(visit(&mut bench).is_busy && visit(&mut bench).is_busy, "the payment is looked after");
            assert_eq!(
                bench.sentence(),
                "context 0, queue to rank 1, fabric stands: all entries of device code are complete, and for 3.0s \
                 (OXYGIN_STALL) it has not been told so: this rank's GPU takes no store"
            );
            bench.contexts[0].is_full.store(false, Ordering::Relaxed);
            bench.visit();
            bench.contexts[0].completed.store(4, Ordering::Relaxed);
            assert_eq!(bench.look(20), None);
            assert!(!visit(&mut bench).is_busy);
            assert_eq!(bench.look(30), None, "it was told");
        }
    }
}

#[test]
fn faults_are_told_to_the_statistics() {
    let mut bench = Bench::new("gxgg");
    bench.visit();
    bench.contexts[0].completed.store(1, Ordering::Relaxed);
    bench.visit();
    bench.visit();
    let told = bench.lane.told(&bench.common);
    assert_eq!((told.credited, told.refused, told.dropped, told.state), (4, 1, 2, Shown::Stopped));
    let mut bench = Bench::new("gg");
    bench.visit();
    bench.contexts[0].is_gone.store(true, Ordering::Relaxed);
    bench.lane.ring.entries.push('g');
    bench.visit();
    let told = bench.lane.told(&bench.common);
    assert_eq!((told.credited, told.dropped, told.state), (2, 2, Shown::Failed));
    bench.visit();
    assert_eq!(bench.lane.told(&bench.common).dropped, 3);
}

#[test]
fn what_gets_bring_is_flushed_once_before_their_credits() {
    let mut bench = Bench::new("bbgb");
    bench.visit();
    let context =
        |bench: &Bench| (bench.contexts[0].flushes.load(Ordering::Relaxed), bench.lane.told(&bench.common).credited);
    bench.contexts[0].completed.store(2, Ordering::Relaxed);
    bench.contexts[0].posted.store(5, Ordering::Relaxed);
    bench.visit();
    bench.visit();
    assert_eq!(context(&bench), (1, 0), "one flush for both, which is number 5");
    bench.contexts[0].completed.store(4, Ordering::Relaxed);
    bench.visit();
    assert_eq!(context(&bench), (1, 0));
    bench.contexts[0].completed.store(5, Ordering::Relaxed);
    bench.visit();
    assert_eq!(context(&bench), (2, 4), "the last one's flush is done at once");
}

#[test]
fn an_entry_of_two_operations_is_taken_whole_or_not_at_all() {
    let mut bench = Bench::new("22");
    bench.contexts[0].most.store(3, Ordering::Relaxed);
    let now = |bench: &Bench| (bench.lane.ring.entries.len(), bench.contexts[0].posted.load(Ordering::Relaxed));
    bench.visit();
    assert_eq!(now(&bench), (1, 3));
    bench.contexts[0].completed.store(3, Ordering::Relaxed);
    bench.visit();
    assert_eq!((now(&bench), bench.lane.told(&bench.common).credited), ((0, 5), 1));
    bench.contexts[0].completed.store(4, Ordering::Relaxed);
    bench.visit();
    assert_eq!(bench.lane.told(&bench.common).credited, 1);
    bench.contexts[0].completed.store(5, Ordering::Relaxed);
    bench.visit();
    assert_eq!(bench.lane.told(&bench.common).credited, 2);
}

#[test]
fn a_queue_that_is_full_of_what_nobody_rings_is_named() {
    let mut bench = Bench::new("");
    assert_eq!(bench.look(0), None);
    bench.lane.ring.is_full_of_unrung = true;
    let said = bench.sentence();
    assert!(said.contains("its 64 places have been full") && said.contains("ginContextCount"), "{said}");
    // Somebody has rung, and it fills again.
    bench.lane.ring.is_full_of_unrung = false;
    assert_eq!(bench.look(10), None);
    bench.lane.ring.is_full_of_unrung = true;
    assert_eq!(bench.look(11), None);
    assert!(bench.look(14).is_some());
}
