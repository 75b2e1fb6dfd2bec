//! Sets of contexts that nobody destroys: what they have on the GPU goes with their communicator, behind the kernels
//! that may still use it.

use crate::harness::{Fake, T};
use crate::support::common::{ok, Job, Rank};
use crate::support::device::{entry, wait, Ask, Device};
use nccl_plugin_api::descriptor::*;
use oxygin::comm::coll::Coll;
use oxygin::sys::handles;
use std::sync::Arc;

/// A communicator of one rank whose set has been used, and where parts of that set's memory are.
struct Used<'a> {
    rank: Rank,
    device: Device<'a>,
    /// Shared with the CPU, and device code's own.
    shared: [u64; 2],
    own: [u64; 2],
}

/// Whether there is memory at an address of device code's.
fn is_there(fake: &Fake, at: u64) -> bool {
    // SAFETY: the fake has a function of this type.
    let is_pinned = unsafe { fake.call::<extern "C" fn(u64) -> bool>(b"fake_is_pinned")(at) };
    is_pinned || !fake.peek(at).is_null()
}

impl<'a> Used<'a> {
    fn new(fake: &'a Fake) -> Self {
        let rank = Rank::join(&Job::new(1), 0, 0);
        let [src, dst] = [(); 2].map(|()| fake.window(&rank, 0, 4096, 0));
        let (from, to) = (src.as_window().handle as u64, dst.as_window().handle as u64);
        let see = |at| Some(fake.peek(at) as u64).filter(|seen| *seen != 0).unwrap_or(at);
        let device = Device::seen_by(&rank, Ask::default(), see);
        let put = entry(OP_PUT | OP_SIGNAL_INC, 512).first(0, from).second(0, to);
        device.post(0, 0, put.with_signal(2, 0, true));
        device.wait_signal(0, 2, 1);
        device.flush(0, 0);
        let v1 = device.context(0).v1;
        let used = Self { rank, shared: [v1.queues, v1.counters], own: [v1.signals, v1.cis], device };
        assert!(used.has(fake, &used.shared) && used.has(fake, &used.own));
        used
    }

    /// Whether all of these addresses have memory.
    fn has(&self, fake: &Fake, parts: &[u64]) -> bool {
        parts.iter().all(|&at| is_there(fake, at))
    }

    fn close(&self) {
        assert!(!self.device.has_error());
        // SAFETY: a plain call.
        ok(unsafe { T.close_coll.unwrap()(self.rank.coll) });
    }

    fn until_gone(&self, fake: &Fake) {
        let all = || self.shared.iter().chain(&self.own);
        wait(|| "the end of a set's memory".into(), || all().all(|&at| !is_there(fake, at)));
    }

    /// destroyContext is fine all the same.
    fn end(self) {
        self.device.destroy();
        // SAFETY: a plain call.
        ok(unsafe { T.finalize.unwrap()(self.rank.instance) });
    }
}

fn take() -> Fake {
    let fake = Fake::take();
    std::env::set_var("OXYGIN_ENGINE", "own");
    fake.set_transport("auto");
    fake
}

#[test]
fn what_a_set_has_goes_with_its_communicator() {
    let fake = take();
    let _context = fake.enter(0);
    let used = Used::new(&fake);
    used.close();
    used.until_gone(&fake);
    used.end();
    fake.check();
}

/// The application is in a call that waits for its kernels, as the driver's are that free such memory. closeColl
/// returns; what device code alone has, which no such call waits for, is there until the rest has gone. (It takes 10 s,
/// those of the library's thread for the application's context, which stands.)
#[test]
fn a_communicator_that_closes_waits_for_no_kernel_of_the_application() {
    let fake = take();
    fake.set_issue("kernel=0");
    let _context = fake.enter(0);
    let used = Used::new(&fake);
    let waits = fake.waits();
    fake.busy(0, true);
    used.close();
    assert!(used.has(&fake, &used.shared) && used.has(&fake, &used.own));
    assert_eq!(fake.waits(), waits, "closeColl called what waits for kernels");
    fake.busy(0, false);
    used.until_gone(&fake);
    used.end();
    fake.check();
}

/// Beside another set of the same context nothing is freed, whose kernel the driver would wait for; nor does a new set
/// get what a kernel may still write to.
#[test]
fn nobody_gets_what_is_left_to_kernels() {
    let fake = take();
    let _context = fake.enter(0);
    let [first, other] = [(); 2].map(|()| Used::new(&fake));
    first.close();
    let next = Used::new(&fake);
    assert!(first.has(&fake, &first.shared) && first.has(&fake, &first.own));
    assert!(first.shared.iter().all(|at| !next.shared.contains(at)));
    for used in [&other, &next] {
        used.close();
    }
    [&first, &other, &next].into_iter().for_each(|used| used.until_gone(&fake));
    [first, other, next].into_iter().for_each(Used::end);
    fake.check();
}

/// An instance whose finalize never comes keeps nothing of communicators that have ended.
#[test]
fn no_instance_remembers_a_communicator_that_has_ended() {
    let fake = take();
    let rank = Rank::join(&Job::new(1), 0, 0);
    let coll = handles::clone::<Coll>(rank.coll).unwrap();
    assert_eq!(Arc::weak_count(&coll), 1, "its instance's");
    // SAFETY: plain calls.
    unsafe {
        ok(T.close_coll.unwrap()(rank.coll));
        assert_eq!(Arc::weak_count(&coll), 0);
        ok(T.finalize.unwrap()(rank.instance));
    }
    fake.check();
}
