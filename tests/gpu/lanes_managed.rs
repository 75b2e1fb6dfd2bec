//! Queues in managed memory, which are brought to the GPU while the lane kernel has all of a set's: what device code
//! writes is carried out as ever, wherever they are. On the fake CUDA driver, where they stay in one place and only
//! what is asked of the driver shows.

use crate::harness::Fake;
use crate::lanes::{streams, Scene};
use crate::lanes_nic;
use crate::support::common::{ok, Rank};
use crate::support::logged;
use oxygin::vtable::rma_v16::ncclRmaPlugin_v16 as T;
use std::sync::atomic::{AtomicU64, Ordering};

/// More than a few launches take.
const MANY: u64 = 300;

/// Queues are in managed memory, and are brought in each launch that has all of them, on a machine whose threads have
/// no turn for long, too.
const AT_ONCE: &str = "lanes=1,managed=1,steady=0";

/// What NCCL does first, in a context, and what it does in the end.
fn init_and_finalize() {
    let mut instance = std::ptr::null_mut();
    // SAFETY: a local that lives through the call.
    ok(unsafe { T.init.unwrap()(&mut instance, 1, None) });
    // SAFETY: of `init`, ended once.
    ok(unsafe { T.finalize.unwrap()(instance) });
}

/// Sets that come have their queues brought: the process has made its first managed memory.
fn bring_at_once(fake: &Fake) {
    fake.set_issue(AT_ONCE);
    let _context = fake.enter(0);
    init_and_finalize();
}

/// Rounds of descriptors until it is enough.
fn descriptors(fake: &Fake, contexts: usize, is_enough: impl Fn() -> bool + Sync) {
    streams(fake, Scene { gpus: 2, contexts, ..Scene::default() }, |_, _| (), is_enough);
}

#[test]
fn queues_of_descriptors_are_brought_to_the_gpu() {
    for contexts in [1, 2] {
        let fake = Fake::take();
        bring_at_once(&fake);
        let before = fake.brought();
        descriptors(&fake, contexts, || fake.brought() - before >= 2);
    }
}

/// Two blocks of the kernel, of which one has nothing but queues that it watches.
#[test]
fn a_few_busy_queues_are_brought_among_many_quiet_ones() {
    let fake = Fake::take();
    bring_at_once(&fake);
    let before = fake.brought();
    let scene = Scene { gpus: 2, quiet: 9, ..Scene::default() };
    streams(&fake, scene, |_, _| (), || fake.brought() - before >= 2);
}

/// Queues that were watched carry something now and then, while others do all the time.
#[test]
fn watched_queues_carry_what_comes_to_them() {
    for gpus in [1, 2] {
        let fake = Fake::take();
        bring_at_once(&fake);
        let before = fake.brought();
        let scene = Scene { gpus, contexts: 3, rests: 3, each: 60, ..Scene::default() };
        streams(&fake, scene, |_, _| (), || fake.brought() - before >= 2);
    }
}

/// Slots, and the words that ring.
#[test]
fn send_queues_are_brought_to_the_gpu() {
    let fake = lanes_nic::take();
    bring_at_once(&fake);
    let before = fake.brought();
    lanes_nic::between_threads_until(&fake, 2, &|| fake.brought() - before >= 4);
}

/// Slots, doorbells with their records, and completion queues.
#[test]
fn send_queues_with_a_doorbell_are_brought_to_the_gpu() {
    let fake = lanes_nic::take_rung_by("doorbell");
    bring_at_once(&fake);
    let before = fake.brought();
    lanes_nic::between_threads_until(&fake, 2, &|| fake.brought() - before >= 6);
}

/// A kernel serves the queues of so many contexts, and none is brought anywhere.
fn stay(fake: &Fake, contexts: usize) {
    let (before, taken) = (fake.brought(), fake.lane_descriptors());
    descriptors(fake, contexts, || fake.lane_descriptors() - taken >= MANY);
    assert_eq!(fake.brought(), before);
}

/// NCCL makes communicators while kernels of others wait for them, and memory waits for kernels to be freed: after the
/// first `init` on a GPU, which another test may have made, none makes any.
#[test]
fn only_the_first_init_makes_managed_memory() {
    let fake = Fake::take();
    let _context = fake.enter(0);
    for (issue, most) in [("lanes=1", 1), ("lanes=1", 0), ("lanes=0", 0), ("lanes=1,managed=0", 0)] {
        fake.set_issue(issue);
        let calls = || ["cuMemAllocManaged", "cuMemFree", "cuMemAllocHost", "cuMemFreeHost"].map(|c| fake.calls(c));
        let before = calls();
        init_and_finalize();
        let made = calls().into_iter().zip(before).map(|(after, before)| after - before).collect::<Vec<_>>();
        assert!(made[0] <= most && made == [made[0], made[0], 0, 0], "{issue}: {made:?}");
    }
}

/// A set of more queues than a kernel may have together is in pinned memory.
#[test]
fn many_queues_stay_where_they_are() {
    let fake = Fake::take();
    bring_at_once(&fake);
    stay(&fake, 17);
}

/// A process that has once made managed memory cannot be checkpointed any more.
#[test]
fn no_managed_memory_is_made_where_it_is_not_wanted() {
    let fake = Fake::take();
    fake.set_issue("lanes=1,managed=0");
    let before = fake.calls("cuMemAllocManaged");
    stay(&fake, 1);
    assert_eq!(fake.calls("cuMemAllocManaged"), before);
}

#[test]
fn a_driver_without_managed_memory_serves_them_where_they_are() {
    let fake = Fake::take();
    bring_at_once(&fake);
    fake.set_managed(false);
    stay(&fake, 1);
    fake.set_managed(true);
}

/// `CUDA_ERROR_OUT_OF_MEMORY` as they are made, for one of the ranks.
#[test]
fn queues_for_which_there_is_no_managed_memory_are_in_pinned_memory() {
    let fake = Fake::take();
    bring_at_once(&fake);
    fake.inject("cuMemAllocManaged", 2);
    let taken = fake.lane_descriptors();
    descriptors(&fake, 1, || fake.lane_descriptors() - taken >= MANY);
}

/// `CUDA_ERROR_INVALID_VALUE`: nothing is asked for again, and a line of each rank says so.
#[test]
fn a_driver_that_brings_nothing_is_not_asked_again() {
    const SAID: &str = "queues of device code stay in host memory: managed memory: cuMemPrefetchAsync failed with";
    let fake = Fake::take();
    bring_at_once(&fake);
    fake.set_staying(true);
    logged::collect();
    let (brought, calls) = (fake.brought(), fake.calls("cuMemPrefetchAsync"));
    let lines = || logged::said(&[SAID]);
    let taken = AtomicU64::new(u64::MAX);
    let note = |_: &Rank, _| {
        if lines() == 2 {
            taken.fetch_min(fake.lane_descriptors(), Ordering::Relaxed);
        }
    };
    let is_enough = || fake.lane_descriptors().saturating_sub(taken.load(Ordering::Relaxed)) >= MANY;
    streams(&fake, Scene { gpus: 2, listens: true, ..Scene::default() }, note, is_enough);
    let refused = (fake.calls("cuMemPrefetchAsync") - calls) - (fake.brought() - brought);
    assert_eq!((lines(), refused), (2, 2));
}

/// `CUDA_ERROR_OUT_OF_MEMORY` once: the next launch asks again.
#[test]
fn a_gpu_without_room_is_asked_again() {
    let fake = Fake::take();
    bring_at_once(&fake);
    fake.inject("cuMemPrefetchAsync", 2);
    let before = fake.brought();
    descriptors(&fake, 1, || fake.brought() - before >= 2);
}
