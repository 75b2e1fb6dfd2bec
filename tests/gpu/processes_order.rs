//! Order, sums and merging between processes of one host, and large copies that hold up their own context alone:
//! through the RMA v16 table, on the fake CUDA driver.

use crate::harness::memory::{pattern, Memory};
use crate::harness::*;
use crate::support::common::*;
use crate::support::processes::processes;

/// Many contexts, many unfinished operations, one signal; what comes from host memory goes between.
#[test]
fn fan_in_adds_up() {
    processes("fan_in_adds_up", 4, &[], |place| {
        let fake = Fake::take();
        let gpu = place.rank as i32;
        let _context = fake.enter(gpu);
        let (contexts, n) = (8, 3000);
        let r = place.join(contexts);
        let src = Memory::Segments(1).window(&fake, &r, gpu, 8);
        let dst = Memory::Segments(1).window(&fake, &r, gpu, 64);
        let sig = fake.signals(&r, gpu, 1, NEVER_RESET);
        let host = r.window(8, 0);
        src.set(0, r.rank as u64 + 1);
        if r.rank > 0 {
            let requests: Vec<_> = (0..n)
                .map(|i| {
                    let to = (dst.as_window(), r.rank as u64 * 8);
                    let from = if i % 5 == 4 { (&host, 8) } else { (src.as_window(), 0) };
                    let to = if i % 5 == 4 { (dst.as_window(), 256) } else { to };
                    r.put(i % contexts, from, 8, to, 0, Some((sig.as_window(), 0, 3)))
                })
                .collect();
            requests.into_iter().for_each(|q| r.wait(q));
        } else {
            let all = 3 * 3 * n as u64;
            sig.wait(&r, 0, all);
            assert_eq!(sig.get(0), all);
            assert!((1..4).all(|p| dst.get(p) == p as u64 + 1));
        }
        place.barrier();
        r.leave();
        assert_eq!(fake.foreign(), 0);
        fake.check();
    });
}

/// A strong signal follows everything before it, wherever that came from and went to, and is there when its request is
/// not yet done.
#[test]
fn strong_signals_follow_everything() {
    processes("strong_signals_follow_everything", 2, &[], |place| {
        let fake = Fake::take();
        let gpu = place.rank as i32;
        let _context = fake.enter(gpu);
        let r = place.join(1);
        let src = Memory::Segments(2).window(&fake, &r, gpu, 1 << 17);
        let dst = Memory::Segments(2).window(&fake, &r, gpu, 1 << 17);
        let sig = fake.signals(&r, gpu, 2, NEVER_RESET);
        let mut host = r.window(16, 0);
        let host_dst = r.window(16, 0);
        let host_sig = r.window(2, 1);
        let peer = 1 - r.rank;
        for round in 1..=200u64 {
            let on_host = round % 3 == 0;
            let signal = |to: u64| match on_host {
                true => Some((&host_sig, to, 1)),
                false => Some((sig.as_window(), to, 1)),
            };
            let wait = |i: usize| match on_host {
                true => r.wait_signal(&host_sig, i, round / 3),
                false => sig.wait(&r, i, round - round / 3),
            };
            if r.rank == 0 {
                (0..8).for_each(|i| src.set(i, round));
                host.words.fill(round);
                let mut all = vec![r.put(0, (src.as_window(), 0), 64, (dst.as_window(), 0), peer, None)];
                if round % 16 == 0 {
                    src.set(130_000, round);
                    all.push(r.put(0, (src.as_window(), 64), 1_040_000, (dst.as_window(), 64), peer, None));
                }
                all.push(r.put(0, (&host, 0), 24, (dst.as_window(), 8 * 131_010), peer, None));
                all.push(r.put(0, (src.as_window(), 0), 24, (&host_dst, 0), peer, None));
                all.push(r.put(0, (&host, 0), 24, (&host_dst, 24), peer, None));
                match round % 2 {
                    0 => all.push(r.put(0, (&host, 0), 0, (&host, 0), peer, signal(0))),
                    _ => all.push(r.put(0, (src.as_window(), 0), 8, (dst.as_window(), 8 * 131_001), peer, signal(0))),
                }
                all.into_iter().for_each(|q| r.wait(q));
                wait(1);
            } else {
                wait(0);
                assert!((0..8).all(|i| dst.get(i) == round), "round {round}");
                assert!(round % 16 != 0 || dst.get(130_000) == round);
                assert!((0..3).all(|i| dst.get(131_010 + i) == round));
                assert_eq!(&host_dst.words[..6], &[round; 6]);
                assert!(round % 2 == 0 || dst.get(131_001) == round);
                r.wait(r.put(0, (&host, 0), 0, (&host, 0), peer, signal(8)));
            }
        }
        place.barrier();
        r.leave();
        fake.check();
    });
}

/// What several contexts put side by side becomes one copy and one store for each, however many puts arrive while the
/// GPU is at work.
#[test]
fn neighbours_of_eight_contexts_are_merged() {
    processes("neighbours_of_eight_contexts_are_merged", 2, &[], |place| {
        let fake = Fake::take();
        fake.set_issue("submissions=1,kernel=0");
        let gpu = place.rank as i32;
        let _context = fake.enter(gpu);
        let (contexts, each, large) = (8usize, 20, 64 << 10);
        let r = place.join(contexts as i32);
        let src = Memory::Segments(1).window(&fake, &r, gpu, 16 << 10);
        let dst = Memory::Segments(1).window(&fake, &r, gpu, 16 << 10);
        let sig = fake.signals(&r, gpu, contexts, NEVER_RESET);
        let (mut host, flag) = (r.window(1, 0), r.window(1, 0));
        let area = |c: usize| (8 << 10) + c * 512;
        (0..16 << 10).for_each(|i| src.set(i, pattern(r.rank, i)));
        if r.rank == 1 {
            fake.hold(large);
        }
        place.barrier();
        if r.rank == 0 {
            let mut requests = vec![r.put(0, (src.as_window(), 0), large, (dst.as_window(), 0), 1, None)];
            for i in 0..each {
                requests.extend((0..contexts).map(|c| {
                    let at = (area(c) + i) as u64 * 8;
                    let signal = Some((sig.as_window(), c as u64 * 8, 1));
                    r.put(c as i32, (src.as_window(), at), 8, (dst.as_window(), at), 1, signal)
                }));
            }
            // Read behind them, and applied at once.
            host.words[0] = 1;
            let ready = r.put(0, (&host, 0), 8, (&flag, 0), 1, None);
            requests.into_iter().for_each(|q| r.wait(q));
            r.wait(ready);
        } else {
            r.wait_signal(&flag, 0, 1);
            let (copies, stores) = (fake.copies(), fake.stores());
            assert!((0..contexts).all(|c| sig.get(c) == 0), "in front of the copy that is held");
            fake.hold(0);
            (0..contexts).for_each(|c| sig.wait(&r, c, each as u64));
            for (c, i) in (0..contexts).flat_map(|c| (0..each).map(move |i| (c, i))) {
                assert_eq!(dst.get(area(c) + i), pattern(0, area(c) + i), "context {c}, word {i}");
            }
            // Two submissions: the first with the copy that was held, and whatever was read together with it.
            let (copies, stores) = (fake.copies() - copies, fake.stores() - stores);
            assert!(copies <= 2 * contexts + 1, "{copies} copies");
            assert!(stores <= 2 * (contexts + 1), "{stores} stores");
        }
        place.barrier();
        r.leave();
        fake.check();
    });
}

/// A large copy of one context holds up neither another's put nor its local completion; what its own context sends
/// later stays behind it.
#[test]
fn a_large_put_holds_up_its_own_context_alone() {
    processes("a_large_put_holds_up_its_own_context_alone", 2, &[], |place| {
        let fake = Fake::take();
        let gpu = place.rank as i32;
        let _context = fake.enter(gpu);
        let (r, large) = (place.join(2), 4 << 20);
        let words = large / 8 + 64;
        let src = Memory::Segments(1).window(&fake, &r, gpu, words);
        let dst = Memory::Segments(1).window(&fake, &r, gpu, words);
        let sig = fake.signals(&r, gpu, 3, NEVER_RESET);
        (0..words).for_each(|i| src.set(i, pattern(r.rank, i)));
        if r.rank == 1 {
            fake.hold(large);
        }
        place.barrier();
        if r.rank == 0 {
            let put = |context, word: usize, bytes, signal| {
                let (at, signal) = (word as u64 * 8, Some((sig.as_window(), signal, 1)));
                r.put(context, (src.as_window(), at), bytes, (dst.as_window(), at), 1, signal)
            };
            let mut own = vec![put(0, 0, large, 0), put(0, words - 2, 8, 8)];
            r.wait(put(1, words - 1, 8, 16));
            let mut done = 0;
            // SAFETY: plain call.
            ok(unsafe { T.test.unwrap()(r.coll, own[1], &mut done) });
            assert_eq!(done, 0, "behind the large one");
            place.barrier();
            own.drain(..).for_each(|q| r.wait(q));
        } else {
            sig.wait(&r, 2, 1);
            assert_eq!(dst.get(words - 1), pattern(0, words - 1));
            assert_eq!((sig.get(0), sig.get(1)), (0, 0), "the large copy is held");
            // The helper thread acknowledges meanwhile.
            place.barrier();
            fake.hold(0);
            sig.wait(&r, 1, 1);
            assert_eq!((sig.get(0), dst.get(words - 2)), (1, pattern(0, words - 2)));
            assert!((0..large / 8).all(|i| dst.get(i) == pattern(0, i)));
        }
        place.barrier();
        r.leave();
        assert_eq!(fake.foreign(), 0);
        fake.check();
    });
}
