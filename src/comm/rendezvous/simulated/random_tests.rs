//! Whatever may go wrong, in any order.

use super::super::gather::{ANSWER_TIME, LINGER, SETTLE};
use super::super::visit::GRACE;
use super::tests::{all, request};
use super::*;
use proptest::prelude::*;

/// More than messages take on the simulated network, s: whoever comes within so much of the end may come too late.
const NETWORK: f64 = 0.1;

/// What may go wrong with a rank.
#[derive(Clone, Debug)]
enum Fate {
    Fine,
    Missing,
    Dies(f64),
    Fails,
    Late(f64),
}

fn fate() -> impl Strategy<Value = Fate> {
    prop_oneof![
        6 => Just(Fate::Fine),
        1 => Just(Fate::Missing),
        1 => (0.0..1.0).prop_map(Fate::Dies),
        1 => Just(Fate::Fails),
        2 => (0.0..30.0).prop_map(Fate::Late),
    ]
}

proptest! {
    #[test]
    fn every_step_ends_and_the_living_meet_again(seed: u64, fates in proptest::collection::vec(fate(), 2..9)) {
        let timeout = 10.0;
        let mut scripts = all(fates.len(), &["connect"]);
        for (script, fate) in scripts.iter_mut().zip(&fates) {
            match fate {
                Fate::Fine => {}
                Fate::Missing => script.plays.clear(),
                Fate::Dies(at) => script.dies = Some(at * 0.01),
                Fate::Fails => script.plays[0].failure = Some("out of luck"),
                Fate::Late(after) => script.plays[0].after = *after,
            }
        }
        let whole = !fates.iter().any(|fate| matches!(fate, Fate::Missing | Fate::Dies(_)));
        if whole {
            scripts.iter_mut().for_each(|script| script.plays.push_back(Play { after: 50.0, ..play("regMrSym") }));
        }
        let late = fates.iter().map(|fate| if let Fate::Late(after) = fate { *after } else { 0.0 });
        let (first, last) = late.fold((f64::MAX, 0.0_f64), |(low, high), at| (low.min(at), high.max(at)));
        let net = Net::new(timeout, seed, scripts).run();
        let bound = timeout + GRACE.as_secs_f64().max(LINGER.as_secs_f64() + SETTLE.as_secs_f64()) + 0.1;
        for (rank, fate) in fates.iter().enumerate() {
            let entered = if let Fate::Late(after) = fate { *after } else { 0.0 };
            if let Some((result, at)) = net.ended[rank].first() {
                prop_assert!(at - entered <= bound, "rank {} took {} s", rank, at - entered);
                let fails = fates.iter().any(|fate| matches!(fate, Fate::Fails));
                if whole && !fails && last - first < timeout - NETWORK {
                    prop_assert!(result.is_ok(), "{:?}", result);
                }
                if !whole || fails || last - first > bound {
                    // A rank may have died after its answer.
                    prop_assert!(result.is_err() || fates.iter().any(|fate| matches!(fate, Fate::Dies(_))));
                }
            } else {
                prop_assert!(matches!(fate, Fate::Missing | Fate::Dies(_)));
            }
        }
        let spread = net.ended.iter().filter_map(|e| e.first()).map(|e| e.1);
        let (low, high) = spread.fold((f64::MAX, 0.0_f64), |(low, high), at| (low.min(at), high.max(at)));
        if whole && high - low < timeout - NETWORK {
            (0..fates.len()).for_each(|rank| net.check(rank, 1));
        }
    }
}

/// Something that happens to rank 0, on one of a few connections.
#[derive(Clone, Debug)]
enum Happening {
    Accepted,
    /// A request of this rank to this step, changed at a place, and cut off.
    Request {
        step: u32,
        rank: u32,
        change: Option<(usize, u8)>,
        cut: usize,
    },
    Bytes(Vec<u8>),
    Closed,
    Later(u64),
}

fn happening() -> impl Strategy<Value = (Conn, Happening)> {
    let request = (1..4_u32, 0..5_u32, proptest::option::weighted(0.3, (0..60_usize, any::<u8>())), 1..200_usize)
        .prop_map(|(step, rank, change, cut)| Happening::Request { step, rank, change, cut });
    let what = prop_oneof![
        2 => Just(Happening::Accepted),
        4 => request,
        1 => proptest::collection::vec(any::<u8>(), 1..80).prop_map(Happening::Bytes),
        1 => Just(Happening::Bytes(vec![wire::EXPIRED])),
        1 => Just(Happening::Closed),
        1 => (0..4000_u64).prop_map(Happening::Later),
    ];
    (0..6_u64, what)
}

proptest! {
    /// Whatever happens, in whatever order: no panic, and the step ends when its time is over.
    #[test]
    fn rank_0_survives_anything(happenings in proptest::collection::vec(happening(), 0..60)) {
        let job = Net::new(10.0, 1, all(5, &[])).jobs[0].clone();
        let mut now = Instant::now();
        let end = now + Duration::from_secs(10) + ANSWER_TIME + LINGER;
        let earlier = Some((1, "it failed".to_owned()));
        let mut gather = Gather::new(job, 2, "regMrSym", request(2, "regMrSym", 0, 5), earlier, now);
        let mut open = std::collections::BTreeSet::new();
        for (conn, happening) in happenings {
            match happening {
                Happening::Accepted if gather.accepting() && open.insert(conn) => {
                    gather.accepted(conn, ([10, 0, 0, 1], 9).into(), now)
                }
                Happening::Accepted => {}
                Happening::Request { step, rank, change, cut } => {
                    let mut bytes = request(step, "regMrSym", rank.min(4), 5);
                    if let Some((at, value)) = change {
                        let at = at % bytes.len();
                        bytes[at] = value;
                    }
                    bytes.truncate(cut);
                    gather.received(conn, &bytes, now);
                }
                Happening::Bytes(bytes) => gather.received(conn, &bytes, now),
                Happening::Closed => {
                    open.remove(&conn);
                    gather.closed(conn, now);
                }
                Happening::Later(millis) => now += Duration::from_millis(millis),
            }
            gather.tick(now);
            while let Some(action) = gather.next_action() {
                match action {
                    RootAction::Send { conn, .. } if conn % 2 == 0 => gather.sent(conn),
                    RootAction::Send { .. } => {} // this one never reads
                    RootAction::Close(conn) | RootAction::Keep(conn, _) => {
                        open.remove(&conn);
                    }
                }
            }
        }
        // A wake-up or two later it is over.
        for _ in 0..3 {
            now = now.max(gather.wake()).max(end);
            gather.tick(now);
        }
        prop_assert!(gather.outcome(now).is_some());
    }
}
