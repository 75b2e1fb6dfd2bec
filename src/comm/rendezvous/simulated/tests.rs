use super::super::gather::{KeptConnection, ANSWER_TIME, HELLO_TIME, LINGER};
use super::super::visit::REFUSED;
use super::*;

/// `n` ranks that all play `names`.
pub fn all(n: usize, names: &[&'static str]) -> Vec<Script> {
    let plays = names.iter().map(|name| play(name)).collect();
    vec![Script { plays, ..Script::default() }; n]
}

pub fn request(step: u32, name: &str, rank: u32, nranks: u32) -> Vec<u8> {
    wire::encode_request(&Sender { token: TOKEN, step, name, rank, nranks }, Ok(b"x"), b"").unwrap()
}

#[test]
fn two_hundred_fifty_six_ranks_with_few_messages() {
    let mut scripts = all(256, &["connect", "createContext", "regMrSym"]);
    for (rank, script) in scripts.iter_mut().enumerate() {
        script.plays[0].after = (rank * 7 % 256) as f64 * 1e-3; // in another order than by rank
    }
    let net = Net::new(120.0, 1, scripts).run();
    for rank in 0..256 {
        (0..3).for_each(|step| net.check(rank, step));
    }
    assert_eq!(net.connections, 3 * 255, "one connection a rank and step");
    // Head, name and 3 + 512 bytes in; head, lengths and all that was brought, 256 × (3 + 2) bytes, out.
    assert!(net.bytes < 3 * 255 * (44 + 13 + 3 + 512 + 20 + 8 + 256 * (4 + 3 + 2)), "{} bytes", net.bytes);
}

#[test]
fn one_rank() {
    Net::new(1.0, 1, all(1, &["connect", "regMrSym"])).run().check(0, 1);
}

#[test]
fn a_lost_rank_is_named_to_all_at_the_deadline() {
    let mut scripts = all(5, &["createContext"]);
    scripts[3].plays.clear();
    let net = Net::new(120.0, 2, scripts).run();
    for rank in [0, 1, 2, 4] {
        assert!(net.sentence(rank, 0).starts_with("createContext: rank 3 (10.0.0.3:4711) did not come within 120 s"));
        assert!((120.0..120.5).contains(&net.result(rank, 0).1));
    }
}

#[test]
fn a_slow_rank_is_waited_for() {
    let mut scripts = all(5, &["createContext"]);
    scripts[3].plays[0].after = 119.9;
    let net = Net::new(120.0, 2, scripts).run();
    (0..5).for_each(|rank| net.check(rank, 0));
}

#[test]
fn the_first_deadline_ends_the_step_for_all() {
    let mut scripts = all(6, &["regMrSym"]);
    scripts[2].timeout = Some(5.0);
    scripts[3].plays.clear();
    scripts[5].plays.clear();
    let net = Net::new(120.0, 3, scripts).run();
    for rank in [0, 1, 2, 4] {
        assert!(net.sentence(rank, 0).starts_with("regMrSym: rank 3 (10.0.0.3:4711), rank 5 (10.0.0.5:4711) did not"));
        assert!((5.0..5.2).contains(&net.result(rank, 0).1));
    }
}

#[test]
fn a_late_rank_is_told_and_then_all_are_in_step_again() {
    let mut scripts = all(4, &["connect", "regMrSym"]);
    scripts[2].plays[0].after = 15.0;
    let net = Net::new(10.0, 4, scripts).run();
    for rank in 0..4 {
        assert!(net.sentence(rank, 0).contains("rank 2 (10.0.0.2:4711)"), "{}", net.sentence(rank, 0));
        net.check(rank, 1);
    }
    let told = net.sentence(2, 0);
    assert!(told.starts_with("connect: over before rank 2") && told.contains("did not come within 10 s"), "{told}");
}

#[test]
fn a_late_rank_0_hears_that_the_others_gave_up_and_then_all_are_in_step_again() {
    let mut scripts = all(4, &["connect", "regMrSym"]);
    scripts[0].plays[0].after = 13.0;
    let net = Net::new(10.0, 5, scripts).run();
    for rank in 1..4 {
        assert!(net.sentence(rank, 0).starts_with("connect: rank 0 (10.0.0.0:4711) did not come within 10 s"));
        net.check(rank, 1);
    }
    // The first whose next request rank 0 reads tells it so.
    assert!(net.sentence(0, 0).contains("has given this step up and is in regMrSym already"), "{}", net.sentence(0, 0));
    net.check(0, 1);
}

#[test]
fn a_late_rank_0_names_those_who_gave_up_and_those_who_never_came() {
    let mut scripts = all(4, &["connect"]);
    scripts[0].plays[0].after = 13.0;
    scripts[2].plays.clear();
    let net = Net::new(10.0, 5, scripts).run();
    assert_eq!(
        net.sentence(0, 0),
        "connect: rank 1 (10.0.0.1:4711), rank 3 (10.0.0.3:4711) gave up after 10 s before rank 0 came; \
         rank 2 (10.0.0.2:4711) did not come either"
    );
    assert!(net.result(0, 0).1 < 14.2);
}

#[test]
fn a_rank_0_within_the_grace_is_in_time() {
    let mut scripts = all(4, &["connect"]);
    scripts[0].plays[0].after = 10.5;
    let net = Net::new(10.0, 5, scripts).run();
    (0..4).for_each(|rank| net.check(rank, 0));
}

#[test]
fn a_rank_that_dies_in_the_step_ends_it_at_once() {
    let mut scripts = all(4, &["connect"]);
    scripts[1].plays.clear();
    scripts[2].dies = Some(1.0);
    let net = Net::new(120.0, 6, scripts).run();
    for rank in [0, 3] {
        assert!(net.sentence(rank, 0).starts_with("connect: rank 2 (10.0.0.2:4711) went away"));
        assert!(net.result(rank, 0).1 < 1.0 + LINGER.as_secs_f64() + 0.1);
    }
}

#[test]
fn a_failure_known_early_is_told_to_those_who_come_a_little_later() {
    let mut scripts = all(4, &["connect"]);
    scripts[1].plays[0].after = 1.5;
    scripts[2].dies = Some(1.0);
    let net = Net::new(120.0, 6, scripts).run();
    assert!(net.sentence(1, 0).starts_with("connect: rank 2 (10.0.0.2:4711) went away"));
    assert!(net.result(1, 0).1 < 1.6);
}

#[test]
fn half_a_message_and_then_nothing_but_the_end() {
    let mut net = Net::new(120.0, 7, all(3, &["connect"]));
    net.scripts[2].plays[0].after = 500.0;
    let half = &request(1, "connect", 2, 3)[..50];
    let conn = net.stranger(0.5, half);
    net.along(conn, true, Event::VisitorClosed(conn));
    net.scripts[2].dies = Some(0.0);
    net.at(Duration::ZERO, Event::Die(2));
    let net = net.run();
    for rank in [0, 1] {
        assert!(net.sentence(rank, 0).contains("rank 2 (10.0.0.2:4711) sent 50 of 52 bytes"), "{}", net.sentence(0, 0));
    }
}

#[test]
fn a_rank_0_that_dies_is_known_at_once() {
    let mut scripts = all(4, &["connect"]);
    scripts[3].plays.clear();
    scripts[0].dies = Some(1.0);
    let net = Net::new(120.0, 8, scripts).run();
    for rank in [1, 2] {
        assert_eq!(net.sentence(rank, 0), "connect: rank 0 (10.0.0.0:4711) went away: nobody listens there any more");
        assert!(net.result(rank, 0).1 < 1.1);
    }
}

/// Stopped, or dead with a child that holds its sockets: its host acknowledges, and no connection ends.
#[test]
fn a_rank_0_that_says_nothing_any_more_is_given_up() {
    let mut scripts = all(4, &["connect"]);
    scripts[3].plays[0].after = 500.0;
    scripts[0].stops = Some(40.0);
    let net = Net::new(120.0, 8, scripts).run();
    for rank in [1, 2] {
        assert!(net.sentence(rank, 0).starts_with("connect: rank 0 (10.0.0.0:4711) has said nothing for 30 s"));
        // Its last beat was up to 30 / 8 s before, and two are waited for in vain.
        assert!((73.0..78.0).contains(&net.result(rank, 0).1), "{}", net.result(rank, 0).1);
    }
}

/// Whoever waits in vain for another rank hears from rank 0 meanwhile, and its request goes through.
#[test]
fn a_rank_0_that_waits_for_long_is_not_taken_for_dead() {
    let mut scripts = all(3, &["connect", "regMrSym"]);
    scripts[2].plays[0].after = 1000.0;
    let net = Net::new(2000.0, 8, scripts).run();
    (0..3).for_each(|rank| (0..2).for_each(|step| net.check(rank, step)));
    assert_eq!(net.connections, 4);
}

#[test]
fn a_rank_0_that_died_before_the_step_is_known_at_once() {
    let mut scripts = all(4, &["connect", "regMrSym"]);
    scripts[0].plays.truncate(1);
    scripts[0].dies = Some(5.0);
    for script in &mut scripts[1..] {
        script.plays[1].after = 10.0;
    }
    let net = Net::new(120.0, 8, scripts).run();
    for rank in 1..4 {
        net.check(rank, 0);
        let began = net.result(rank, 0).1 + 10.0;
        assert_eq!(net.sentence(rank, 1), "regMrSym: rank 0 (10.0.0.0:4711) went away: nobody listens there any more");
        assert!(net.result(rank, 1).1 < began + 0.1);
    }
}

#[test]
fn a_rank_0_that_never_listened_is_given_a_moment() {
    let mut scripts = all(2, &["connect"]);
    scripts[0].dies = Some(0.0);
    scripts[1].plays[0].after = 1.0;
    let net = Net::new(120.0, 8, scripts).run();
    assert!(net.sentence(1, 0).starts_with("connect: nobody listens where rank 0 (10.0.0.0:4711) should"));
    let took = Duration::from_secs_f64(net.result(1, 0).1 - 1.0);
    assert!((REFUSED..REFUSED * 2).contains(&took) && net.connections < 20);
}

/// A visit of rank 1 of `nranks`, and when it began.
fn visit(nranks: usize, timeout: f64) -> (Visit, Instant) {
    let job = Net::new(timeout, 1, all(nranks, &[])).jobs[1].clone();
    let now = Instant::now();
    (Visit::new(job, 1, "connect", request(1, "connect", 1, nranks as u32), false, now), now)
}

/// Lets nothing but time pass, and attempts end as `attempt` says. Returns the sentence and after how long it came.
fn in_vain(visit: &mut Visit, start: Instant, mut attempt: impl FnMut(&mut Visit, Instant)) -> (String, Duration) {
    let mut now = start;
    loop {
        visit.tick(now);
        while let Some(action) = visit.next_action() {
            if matches!(action, VisitorAction::Connect) {
                attempt(visit, now);
            }
        }
        if let Some(outcome) = visit.outcome() {
            return (outcome.as_ref().unwrap_err().sentence.clone(), now - start);
        }
        now = visit.wake().max(now + Duration::from_millis(1));
    }
}

#[test]
fn a_host_that_cannot_be_reached_is_given_up_before_the_deadline() {
    const SILENCE: Duration = Duration::from_secs(30);
    let gone = "rank 0 (10.0.0.0:4711) went away: its host, or the network to it, has not answered for 30 s";
    // The kernel says so, more often than once.
    let (mut unreachable, now) = visit(2, 120.0);
    let (sentence, after) = in_vain(&mut unreachable, now, |v, now| v.broken("No route", Broken::Unreachable, now));
    assert!(sentence.contains(gone) && sentence.contains("(last: No route)") && after == SILENCE, "{sentence}");
    // Since a while after the beginning.
    let (mut late, start) = visit(2, 120.0);
    let (_, after) = in_vain(&mut late, start, |v, now| match now < start + SILENCE / 2 {
        true => v.broken("no answer", Broken::Otherwise, now),
        false => v.broken("No route", Broken::Unreachable, now),
    });
    assert!((SILENCE * 3 / 2..SILENCE * 2).contains(&after), "{after:?}");
    // A connection that stood and fell silent: it was asked for long enough.
    let (mut fell_silent, now) = visit(1000, 120.0);
    fell_silent.connected();
    fell_silent.sent();
    fell_silent.broken("timed out", Broken::Silent, now);
    let sentence = &fell_silent.outcome().unwrap().as_ref().unwrap_err().sentence;
    assert!(sentence.contains(gone), "{sentence}");
}

#[test]
fn silence_that_has_another_reason_is_waited_out() {
    // Nothing answers: a queue of connections may be full.
    let (mut crowded, now) = visit(2, 120.0);
    let (sentence, after) = in_vain(&mut crowded, now, |_, _| ());
    assert!(
        sentence.contains("rank 0 (10.0.0.0:4711) did not come within 120 s") && after.as_secs() == 120,
        "{sentence}"
    );
    // This host is what has no room.
    let (mut full, now) = visit(2, 120.0);
    let (sentence, after) = in_vain(&mut full, now, |v, now| v.broken("Too many files", Broken::Otherwise, now));
    assert!(sentence.ends_with("(last: Too many files)") && after.as_secs() == 120, "{sentence}");
    // Refusals that end in time.
    let (mut late, start) = visit(2, 120.0);
    in_vain(&mut late, start, |v, now| match now < start + REFUSED / 2 {
        true => v.broken("refused", Broken::Refused, now),
        false => v.broken("reset", Broken::Otherwise, now),
    });
    assert!(!late.met());
}

#[test]
fn failures_reach_all_once_all_came() {
    let mut scripts = all(7, &["regMrSym", "regMrSym"]);
    for rank in [1, 3, 4, 5] {
        scripts[rank].plays[0].failure = Some("no such memory");
    }
    scripts[6].plays[0].after = 30.0;
    let net = Net::new(120.0, 9, scripts).run();
    for rank in 0..7 {
        let sentence = net.sentence(rank, 0);
        assert!(sentence.starts_with("regMrSym: rank 1 (10.0.0.1:4711), rank 3 (10.0.0.3:4711), rank 4"), "{sentence}");
        assert!(sentence.ends_with(" failed: no such memory") && net.result(rank, 0).1 > 30.0, "{sentence}");
        net.check(rank, 1);
    }
}

#[test]
fn different_steps_fail_all_and_the_next_works() {
    let mut scripts = all(3, &["createContext", "regMrSym"]);
    scripts[2].plays[0].name = "regMrSym";
    let net = Net::new(120.0, 10, scripts).run();
    for rank in 0..3 {
        let sentence = net.sentence(rank, 0);
        assert_eq!(sentence, "createContext: rank 2 (10.0.0.2:4711) is in regMrSym while rank 0 is in createContext");
        assert!(net.result(rank, 0).1 < 0.1);
        net.check(rank, 1);
    }
}

#[test]
fn contradictions_with_the_right_token_fail_with_a_sentence() {
    for (bytes, expected) in [
        (request(1, "connect", 1, 3), "rank 1 (10.0.0.1:4711) came twice, from 10.0.0.1:9 and from 6.6.6.6:6"),
        (request(1, "connect", 0, 3), "a second process, at 6.6.6.6:6, says that it is rank 0"),
        (request(1, "connect", 2, 5), "rank 2 (10.0.0.2:4711) says that there are 5 ranks while rank 0 says 3"),
        (request(1, "connect", 4, 5), "rank 4 (at 6.6.6.6:6) says that there are 5 ranks while rank 0 says 3"),
        (request(2, "regMrSym", 2, 3), "has given this step up and is in regMrSym already"),
        ([&request(1, "connect", 2, 3)[..], b"more"].concat(), "sent bytes behind its request"),
    ] {
        let mut scripts = all(3, &["connect"]);
        scripts[2].plays.clear();
        let mut net = Net::new(120.0, 11, scripts);
        net.stranger(1.0, &bytes);
        let net = net.run();
        for rank in [0, 1] {
            assert!(net.sentence(rank, 0).contains(expected), "{}", net.sentence(rank, 0));
        }
    }
}

#[test]
fn an_old_step_s_late_connection_harms_nothing() {
    let mut scripts = all(3, &["connect", "regMrSym"]);
    scripts[2].plays[1].after = 5.0;
    let mut net = Net::new(120.0, 12, scripts);
    net.stranger(2.0, &request(1, "connect", 1, 3));
    let half = net.stranger(3.0, &request(1, "connect", 1, 3)[..48]);
    net.along(half, true, Event::VisitorClosed(half));
    let net = net.run();
    (0..3).for_each(|rank| net.check(rank, 1));
}

#[test]
fn strangers_matter_to_nobody() {
    let mut scripts = all(4, &["connect", "regMrSym"]);
    scripts[3].plays[0].after = 3.0 * HELLO_TIME.as_secs_f64();
    let mut net = Net::new(120.0, 13, scripts);
    let mut wrong = request(1, "connect", 2, 4);
    wrong[8] ^= 1; // the token's first byte
    for i in 0..400 {
        let good = request(1, "connect", 2, 4);
        let bytes: &[u8] = match i % 5 {
            0 => b"",
            1 => b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            2 => &good[..20],
            3 => &wrong,
            _ => b"oxyQ\x09\0",
        };
        let conn = net.stranger(0.01 * f64::from(i), bytes);
        if i % 2 == 0 {
            net.along(conn, true, Event::VisitorClosed(conn));
        }
    }
    let net = net.run();
    for rank in 0..4 {
        (0..2).for_each(|step| net.check(rank, step));
    }
}

#[test]
fn garbage_from_rank_0_is_an_error() {
    let (mut visit, now) = visit(2, 1.0);
    visit.connected();
    visit.sent();
    visit.received(b"HTTP/1.1 400 Bad Request", now);
    let sentence = visit.outcome().unwrap().as_ref().unwrap_err().sentence.clone();
    assert!(sentence.contains("rank 0 (10.0.0.0:4711) answered not a message"), "{sentence}");
}

/// The others have theirs: the step has ended well for them and so it does on rank 0, and the next one fails, for all.
#[test]
fn a_rank_that_does_not_read_its_answer_fails_the_next_step() {
    let job = Net::new(10.0, 1, all(2, &[])).jobs[0].clone();
    let now = Instant::now();
    let mut gather = Gather::new(job.clone(), 1, "connect", request(1, "connect", 0, 2), None, now);
    gather.accepted(1, ([10, 0, 0, 1], 9).into(), now);
    gather.received(1, &request(1, "connect", 1, 2), now);
    gather.tick(now);
    assert!(matches!(gather.next_action(), Some(RootAction::Send { conn: 1, .. })) && !gather.accepting());
    assert!(gather.outcome(now).is_none());
    let late = now + Duration::from_secs(10) + ANSWER_TIME;
    assert_eq!(gather.wake(), late);
    // A rank 0 that is held up until much later gives it its time.
    let much_later = late + Duration::from_secs(30);
    gather.tick(much_later);
    assert!(gather.outcome(much_later).is_none());
    let late = much_later + ANSWER_TIME;
    assert_eq!(gather.wake(), late);
    gather.tick(late);
    assert!(gather.outcome(late).unwrap().is_ok());
    // In this order: a connection that is closed is kept as that of a rank which has gone.
    assert!(matches!(gather.next_action(), Some(RootAction::Close(1))));
    assert!(matches!(gather.next_action(), Some(RootAction::Keep(1, KeptConnection { rank: 1, .. }))));
    assert!(gather.next_action().is_none());
    let mut gather = Gather::new(job, 2, "connect", request(2, "connect", 0, 2), None, late);
    gather.gone(1, late);
    gather.tick(late);
    let sentence = gather.outcome(late).unwrap().as_ref().unwrap_err().sentence.clone();
    assert!(sentence.starts_with("connect: rank 1 (10.0.0.1:4711) went away between two steps"), "{sentence}");
}

#[test]
fn a_connection_from_the_step_before_brings_the_next_request_or_the_news_that_its_rank_is_gone() {
    let job = Net::new(10.0, 1, all(2, &[])).jobs[0].clone();
    let now = Instant::now();
    let begin = || {
        let mut gather = Gather::new(job.clone(), 2, "connect", request(2, "connect", 0, 2), None, now);
        gather.kept(7, KeptConnection { rank: 1, peer: ([10, 0, 0, 1], 9).into() });
        gather
    };
    // Behind the byte that crossed the answer before; and kept again for the next.
    let mut gather = begin();
    gather.received(7, &[&[wire::EXPIRED], &request(2, "connect", 1, 2)[..]].concat(), now);
    gather.tick(now);
    assert!(matches!(gather.next_action(), Some(RootAction::Send { conn: 7, .. })));
    gather.sent(7);
    assert!(matches!(gather.next_action(), Some(RootAction::Keep(7, KeptConnection { rank: 1, .. }))));
    assert!(gather.outcome(now).unwrap().is_ok());
    // Nobody's time runs there: the rank may be at work. Its end is told at once.
    let mut gather = begin();
    gather.tick(now + HELLO_TIME);
    assert!(gather.next_action().is_none() && gather.outcome(now).is_none());
    gather.closed(7, now);
    let sentence = gather.outcome(now).unwrap().as_ref().unwrap_err().sentence.clone();
    assert!(sentence.starts_with("connect: rank 1 (10.0.0.1:4711) went away between two steps"), "{sentence}");
}

/// Others know by then that all came, and go on: the step has ended well for rank 0, too, and the next one fails for
/// all.
#[test]
fn a_rank_that_dies_while_it_is_answered_fails_the_next_step() {
    let job = Net::new(10.0, 1, all(3, &[])).jobs[0].clone();
    let now = Instant::now();
    let begin = |step| Gather::new(job.clone(), step, "connect", request(step, "connect", 0, 3), None, now);
    let mut gather = begin(1);
    for (conn, rank) in [(7, 1), (8, 2)] {
        gather.accepted(conn, ([10, 0, 0, rank as u8], 9).into(), now);
        gather.received(conn, &request(1, "connect", rank, 3), now);
    }
    gather.tick(now);
    (0..2).for_each(|_| assert!(matches!(gather.next_action(), Some(RootAction::Send { .. }))));
    gather.sent(7);
    assert!(matches!(gather.next_action(), Some(RootAction::Keep(7, KeptConnection { rank: 1, .. }))));
    gather.closed(8, now);
    assert!(matches!(gather.next_action(), Some(RootAction::Keep(8, KeptConnection { rank: 2, .. }))));
    gather.tick(now);
    assert!(gather.outcome(now).unwrap().is_ok());
    let mut gather = begin(2);
    gather.kept(7, KeptConnection { rank: 1, peer: ([10, 0, 0, 1], 9).into() });
    gather.gone(2, now);
    gather.received(7, &request(2, "connect", 1, 3), now);
    gather.tick(now);
    assert!(matches!(gather.next_action(), Some(RootAction::Send { conn: 7, .. })));
    gather.sent(7);
    gather.tick(now);
    let sentence = gather.outcome(now).unwrap().as_ref().unwrap_err().sentence.clone();
    assert!(sentence.starts_with("connect: rank 2 (10.0.0.2:4711) went away between two steps"), "{sentence}");
}
