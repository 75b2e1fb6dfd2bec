//! Windows, contexts and processes that go, and copies that fail, between processes of one host: whoever waits for them
//! is told, nothing is written or read afterwards, and nothing stays mapped. Through the RMA v16 table, on the fake
//! CUDA driver.

use crate::harness::memory::{pattern, Memory};
use crate::harness::*;
use crate::support::common::*;
use crate::support::processes::{processes, Place};
use nccl_plugin_api::*;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// A context goes while the data of its get is on its way to GPU memory, by way of the host: it goes nowhere from then
/// on.
#[test]
fn a_get_into_gpu_memory_ends_with_its_context() {
    const WORDS: usize = (8 << 20) / 8;
    processes("a_get_into_gpu_memory_ends_with_its_context", 2, &[], |place| {
        let fake = Fake::take();
        fake.set_transport("staged");
        let _context = fake.enter(0);
        let mut r = place.join(1);
        let mut config = rma_v14::ConfigV14 { n_contexts: 1, traffic_class: -1, rank_stride: 1 };
        let mut next = null_mut();
        // SAFETY: all pointers are to locals that live through the call.
        ok(unsafe { T.create_context.unwrap()(r.coll, &mut config, &mut next) });
        let [first, second] = [(), ()].map(|()| fake.window(&r, 0, WORDS, 0));
        let step = 4096 / 8;
        if r.rank == 1 {
            (0..WORDS).step_by(step).for_each(|i| first.set(i, 7));
        }
        place.barrier();
        if r.rank == 0 {
            r.get(0, (first.as_window(), 0), WORDS * 8, (first.as_window(), 0), 1);
            let end = Instant::now() + Duration::from_secs(60);
            while first.get(0) != 7 {
                // SAFETY: plain call.
                ok(unsafe { T.rma_progress.unwrap()(r.ctx) });
                assert!(Instant::now() < end, "no data");
            }
            // SAFETY: plain call.
            ok(unsafe { T.destroy_context.unwrap()(r.ctx) });
            (0..WORDS).step_by(step).for_each(|i| first.set(i, 9));
            r.ctx = next;
            // Its data comes behind the first one's.
            r.wait(r.get(0, (first.as_window(), 0), WORDS * 8, (second.as_window(), 0), 1));
            assert!((0..WORDS).step_by(step).all(|i| second.get(i) == 7));
            assert!((0..WORDS).step_by(step).all(|i| first.get(i) == 9), "written after its context was gone");
        } else {
            // SAFETY: plain call.
            ok(unsafe { T.destroy_context.unwrap()(r.ctx) });
            r.ctx = next;
        }
        place.barrier();
        r.leave();
        fake.check();
    });
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Windows come and go while others carry traffic; a rank may deregister before its peer has stopped sending from its
/// own.
#[test]
fn windows_come_and_go_under_traffic() {
    processes("windows_come_and_go_under_traffic", 2, &[], |place| {
        let fake = Fake::take();
        let gpu = place.rank as i32;
        let _context = fake.enter(gpu);
        let before = descriptors();
        let r = place.join(2);
        let dst = Memory::Segments(1).window(&fake, &r, gpu, 1024);
        let peer = 1 - r.rank;
        let mut at = Vec::new();
        for round in 0..20u64 {
            // The same memory again and again, as an application does.
            if at.len() < 2 {
                at.push(fake.segments(gpu, &[65_536, 65_536], true));
            }
            let src = fake.register_at(&r, at[round as usize % 2], 16_384, 0);
            place.barrier();
            if round % 2 == r.rank as u64 {
                // The peer still sends from its window of this number.
                r.dereg(src.as_window());
                place.barrier();
            } else {
                place.barrier();
                let copies = fake.copies();
                src.set(8190, round);
                let requests: Vec<_> = (0..64)
                    .map(|i| r.put(i % 2, (src.as_window(), 65_472), 4096, (dst.as_window(), 0), peer, None))
                    .collect();
                requests.into_iter().for_each(|q| r.wait(q));
                assert_eq!(fake.copies(), copies, "through host memory");
                r.dereg(src.as_window());
            }
            place.barrier();
            assert!(round % 2 != r.rank as u64 || dst.get(6) == round);
            place.barrier();
            // One window that is in use, and one that a peer has deregistered since this rank did.
            assert!(fake.foreign() <= 1 + 2 * 2, "{} pieces are mapped in round {round}", fake.foreign());
        }
        // Whoever deregisters first unmaps the other's window once that one has followed, without another registration.
        let last = fake.register_at(&r, at[0], 16_384, 0);
        if r.rank == 0 {
            r.dereg(last.as_window());
        }
        place.barrier();
        if r.rank == 1 {
            r.dereg(last.as_window());
        }
        let end = Instant::now() + Duration::from_secs(60);
        while fake.foreign() > 1 {
            // SAFETY: plain call.
            ok(unsafe { T.rma_progress.unwrap()(r.ctx) });
            assert!(Instant::now() < end, "{} pieces stay mapped", fake.foreign());
        }
        place.barrier();
        r.dereg(dst.as_window());
        place.barrier();
        r.leave();
        assert_eq!(fake.foreign(), 0);
        let left = descriptors() - before;
        // What the fake driver has for this process's own memory.
        assert!(left <= 5, "{left} descriptors more than before");
        fake.check();
    });
}

/// A request fails with this rank's peer; nothing hangs.
fn fails(r: &Rank, request: *mut c_void) {
    let end = Instant::now() + Duration::from_secs(60);
    let mut done = 0;
    // SAFETY: plain call.
    while unsafe { T.test.unwrap()(r.coll, request, &mut done) } == NcclResult::SUCCESS {
        assert!(done == 0, "the operation came out well");
        assert!(Instant::now() < end, "neither done nor failed");
    }
}

#[test]
fn a_put_to_a_window_that_is_gone_fails_at_its_sender() {
    processes("a_put_to_a_window_that_is_gone_fails_at_its_sender", 2, &[], |place| {
        let fake = Fake::take();
        let _context = fake.enter(0);
        let r = place.join(1);
        let src = Memory::Segments(1).window(&fake, &r, 0, 64);
        let dst = Memory::Segments(1).window(&fake, &r, 0, 64);
        if r.rank == 1 {
            r.dereg(dst.as_window());
        }
        place.barrier();
        if r.rank == 0 {
            fails(&r, r.put(0, (src.as_window(), 0), 64, (dst.as_window(), 0), 1, None));
        }
        place.barrier();
        r.leave();
        assert_eq!(fake.foreign(), 0);
        fake.check();
    });
}

#[test]
fn a_fault_on_the_receivers_gpu_fails_the_senders_operation() {
    processes("a_fault_on_the_receivers_gpu_fails_the_senders_operation", 2, &[], |place| {
        let fake = Fake::take();
        let _context = fake.enter(0);
        let r = place.join(1);
        let src = Memory::Segments(1).window(&fake, &r, 0, 64);
        if r.rank == 1 {
            fake.inject("gpu", 700);
        }
        place.barrier();
        if r.rank == 0 {
            fails(&r, r.put(0, (src.as_window(), 0), 64, (src.as_window(), 64), 1, None));
        }
        place.barrier();
        r.leave();
        fake.check();
    });
}

/// Rank 1 is killed while copies are on their way: into it (`from` 0), out of it (1), or fetched from it (2).
fn killed(place: &Place, from: usize) {
    let fake = Fake::take();
    fake.settings(false, 2000);
    let _context = fake.enter(0);
    let r = place.join(1);
    let src = Memory::Segments(1).window(&fake, &r, 0, 1 << 17);
    let dst = Memory::Segments(1).window(&fake, &r, 0, 1 << 17);
    place.barrier();
    let put = |peer| r.put(0, (src.as_window(), 0), 1 << 20, (dst.as_window(), 0), peer, None);
    if r.rank == 1 {
        if from == 1 {
            for _ in 0..64 {
                put(0);
            }
        }
        // Time for the first of them.
        std::thread::sleep(Duration::from_millis(20));
        place.word(0).store(1, Ordering::SeqCst);
        // SAFETY: ends this process.
        unsafe { libc::raise(libc::SIGKILL) };
    }
    if from == 0 {
        let requests: Vec<_> = (0..1000).map(|_| put(1)).collect();
        fails(&r, requests[999]);
    } else {
        if from == 2 {
            // More than the engine starts before the death is noticed.
            for _ in 0..20_000 {
                let (from, to, mut request) = (src.as_window().handle, dst.as_window().handle, null_mut());
                // SAFETY: registered windows. Fails once the death is noticed.
                let _ = unsafe { T.iget.unwrap()(r.ctx, 0, 0, from, 1 << 20, 0, to, 1, 0, &mut request) };
            }
        }
        let end = Instant::now() + Duration::from_secs(60);
        let mut error = false;
        while !error {
            assert!(Instant::now() < end, "the death was not noticed");
            let mut request = null_mut();
            // SAFETY: plain calls.
            unsafe {
                let handle = src.as_window().handle;
                let _ = T.iput.unwrap()(r.ctx, 0, 0, handle, 8, 0, handle, 1, 0, &mut request);
                ok(T.query_last_error.unwrap()(r.ctx, &mut error));
            }
        }
    }
    assert_eq!(place.word(0).load(Ordering::SeqCst), 1);
    // Its memory is given up with the next window that goes.
    r.dereg(dst.as_window());
    assert_eq!(fake.foreign(), 0);
    r.leave();
    fake.check();
}

#[test]
fn a_receiver_is_killed() {
    processes("a_receiver_is_killed", 2, &[1], |p| killed(p, 0));
}

#[test]
fn a_sender_is_killed() {
    processes("a_sender_is_killed", 2, &[1], |p| killed(p, 1));
}

#[test]
fn the_owner_of_what_is_fetched_is_killed() {
    processes("the_owner_of_what_is_fetched_is_killed", 2, &[1], |p| killed(p, 2));
}

/// The owner of what a get fetches into host memory is killed while the GPU copies: once the get has failed its
/// destination may go, and nothing is written there any more.
#[test]
fn what_is_fetched_for_a_host_window_that_is_gone_goes_nowhere() {
    const BYTES: usize = 64 << 10;
    processes("what_is_fetched_for_a_host_window_that_is_gone_goes_nowhere", 2, &[1], |place| {
        let fake = Fake::take();
        fake.set_issue("kernel=0");
        let gpu = place.rank as i32;
        let _context = fake.enter(gpu);
        let r = place.join(1);
        let src = Memory::Segments(1).window(&fake, &r, gpu, BYTES / 8);
        let mut host = r.window(BYTES / 8, 0);
        place.barrier();
        if r.rank == 1 {
            place.barrier();
            // SAFETY: ends this process.
            unsafe { libc::raise(libc::SIGKILL) };
        }
        fake.hold(BYTES);
        let request = r.get(0, (src.as_window(), 0), BYTES, (&host, 0), 1);
        wait_until("the copy is under way", || {
            // SAFETY: plain call.
            ok(unsafe { T.rma_progress.unwrap()(r.ctx) });
            fake.is_holding()
        });
        place.barrier();
        fails(&r, request);
        r.dereg(&host);
        host.words.fill(7);
        fake.hold(0);
        fake.rest();
        r.leave();
        assert!(host.words.iter().all(|&w| w == 7), "written after its window was gone");
        fake.check();
    });
}

/// A copy between processes is under way when a later one of its context is refused: what it copies from stays
/// mapped, and the sender is not told, until it has ended.
#[test]
fn what_is_copied_from_stays_mapped_when_another_copy_fails() {
    const BYTES: usize = 64 << 10;
    processes("what_is_copied_from_stays_mapped_when_another_copy_fails", 2, &[], |place| {
        let fake = Fake::take();
        fake.set_issue("submissions=4,gather=1,merge=0,kernel=0");
        let gpu = place.rank as i32;
        let _context = fake.enter(gpu);
        let r = place.join(1);
        let [src, dst, gone] = [(); 3].map(|()| Memory::Segments(1).window(&fake, &r, gpu, BYTES / 8));
        if r.rank == 1 {
            r.dereg(src.as_window());
            r.dereg(gone.as_window());
            fake.hold(BYTES);
        }
        place.barrier();
        let mapped = fake.foreign();
        // Longer than from one look at what may be unmapped to the next.
        let meanwhile = || {
            let end = Instant::now() + Duration::from_millis(300);
            while Instant::now() < end {
                // SAFETY: plain call.
                ok(unsafe { T.rma_progress.unwrap()(r.ctx) });
            }
        };
        if r.rank == 0 {
            r.put(0, (src.as_window(), 0), BYTES, (dst.as_window(), 0), 1, None);
            let refused = r.put(0, (src.as_window(), 0), 64, (gone.as_window(), 0), 1, None);
            meanwhile();
            let mut done = 0;
            // SAFETY: plain call.
            ok(unsafe { T.test.unwrap()(r.coll, refused, &mut done) });
            assert_eq!(done, 0, "told while its memory is read");
            place.barrier();
            fails(&r, refused);
            r.dereg(src.as_window());
        } else {
            meanwhile();
            assert_eq!(fake.foreign(), mapped);
            place.barrier();
            fake.hold(0);
        }
        place.barrier();
        if r.rank == 1 {
            // Whoever deregisters unmaps what is left.
            r.dereg(dst.as_window());
            assert!(fake.foreign() < mapped);
        }
        place.barrier();
        r.leave();
        assert_eq!(fake.foreign(), 0);
        fake.check();
    });
}

/// A rank keeps its half of a window, and its peer uses the number of its own half again, for windows that nobody
/// shares: what was mapped of the old one must not be taken for the new one.
#[test]
fn a_number_that_is_used_again_for_what_is_not_shared_ends_what_was_mapped() {
    processes("a_number_that_is_used_again_for_what_is_not_shared_ends_what_was_mapped", 2, &[], |place| {
        let fake = Fake::take();
        let _context = fake.enter(0);
        let r = place.join(1);
        for on_host in [true, false] {
            let kept = Memory::Segments(1).window(&fake, &r, 0, 64);
            let mapped = fake.foreign();
            place.barrier();
            if r.rank == 1 {
                r.dereg(kept.as_window());
            }
            place.barrier();
            // Until all that rest have been used.
            for _ in 0..70 {
                let host = on_host.then(|| r.window(8, 0));
                let gpu = (!on_host).then(|| Memory::Private.window(&fake, &r, 0, 8));
                r.dereg(host.as_ref().or(gpu.as_ref().map(GpuWindow::as_window)).unwrap());
            }
            assert!(r.rank == 1 || fake.foreign() < mapped, "the old window is still mapped, on_host {on_host}");
            if r.rank == 0 {
                r.dereg(kept.as_window());
            }
            place.barrier();
        }
        r.leave();
        assert_eq!(fake.foreign(), 0);
        fake.check();
    });
}

/// A rank refuses registrations before they have a number there: its numbers are others from then on. All windows are
/// mapped all the same, also those that take the numbers of others that are gone.
#[test]
fn ranks_may_number_their_windows_differently() {
    processes("ranks_may_number_their_windows_differently", 2, &[], |place| {
        let fake = Fake::take();
        let _context = fake.enter(0);
        let r = place.join(1);
        for _ in 0..3 {
            let at = fake.segments(0, &[65_536], true);
            let len = if r.rank == 0 { 8192 * 8 } else { 0 };
            let mut handle = null_mut();
            // SAFETY: device memory that stays; what is refused is not used.
            let refused =
                unsafe { T.reg_mr_sym.unwrap()(r.coll, at as *mut c_void, len, PTR_CUDA, NEVER_RESET, &mut handle) };
            assert_ne!(refused, NcclResult::SUCCESS);
        }
        let began = Instant::now();
        let peer = 1 - r.rank;
        for round in 0..100 {
            let window = Memory::Segments(1).window(&fake, &r, 0, 1536);
            (0..512).for_each(|i| window.set(i, pattern(r.rank, i + round)));
            assert!(fake.foreign() > 0, "round {round}");
            place.barrier();
            r.wait(r.put(0, (window.as_window(), 0), 4096, (window.as_window(), 4096), peer, None));
            r.wait(r.get(0, (window.as_window(), 0), 4096, (window.as_window(), 8192), peer));
            assert!((0..512).all(|i| window.get(1024 + i) == pattern(peer, i + round)), "round {round}");
            place.barrier();
            let end = Instant::now() + Duration::from_secs(60);
            while window.get(1023) != pattern(peer, 511 + round) {
                assert!(Instant::now() < end, "round {round}");
            }
            // Now and then both keep it, so that numbers are used again in another order.
            if round % 3 != 0 {
                r.dereg(window.as_window());
            }
            place.barrier();
        }
        assert!(began.elapsed() < Duration::from_secs(9), "a window that was offered was waited for");
        r.leave();
        assert_eq!(fake.foreign(), 0);
        fake.check();
    });
}
