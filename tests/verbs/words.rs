//! What error lines say of the operation that failed.

use crate::gpu::{bring, take, window};
use crate::harness::*;
use oxygin::fabric::{Context, ContextSpec};
use oxygin::rma::op::{Op, Put};

/// Posts operations from rank 0 to rank 1, of which work request `n` fails, and returns the error.
fn error_in(fake: &Fake, spec: ContextSpec, n: i64, ops: impl Fn(&Rank, &Rank) -> Vec<Op>) -> String {
    let ranks = Job { spec, ..Default::default() }.start();
    let [a, b] = &ranks[..] else { unreachable!() };
    fake.set("error_in", n);
    let posted = post_batch(a, 1, &ops(a, b));
    let said = failure(&a.contexts[0], 1, posted.last).message().to_owned();
    drop(ranks);
    fake.check_clean();
    said
}

#[test]
fn operations_of_no_bytes_are_called_what_they_are() {
    let fake = Fake::take();
    let spec = Job::default().spec;
    let said = error_in(&fake, spec, 1, |a, b| vec![Op::Get(get(a, 0, b, 0, 0))]);
    assert!(said.contains("failed on a get of 0 bytes from 0x"), "{said}");
    let said = error_in(&fake, spec, 1, |a, b| vec![Op::Put(put(a, 0, b, 0, 0))]);
    assert!(said.contains("failed on a put of 0 bytes to 0x"), "{said}");
    let said = error_in(&fake, spec, 1, |a, b| vec![Op::Put(Put { signal: signal(b, 0, 1), ..put(a, 0, b, 0, 0) })]);
    assert!(said.contains("failed on a signal at 0x"), "{said}");
}

#[test]
fn an_error_at_the_end_of_a_chain_is_the_operations_that_goes_on_behind_it() {
    let fake = Fake::take();
    fake.set("max_msg_sz", 64);
    let spec = ContextSpec { queue_depth: 8, ..Job::default().spec };
    // Eight work requests fill the queue: one of the first put, seven of the second one's forty.
    let said = error_in(&fake, spec, 8, |a, b| vec![Op::Put(put(a, 0, b, 0, 24)), Op::Put(put(a, 0, b, 0, 2560))]);
    assert!(said.contains("failed on a put of 2560 bytes to 0x"), "{said}");
}

#[test]
fn a_flush_that_fails_is_one_on_the_connection_to_this_rank_itself() {
    let (fake, cuda) = take();
    let ranks = Job::default().start();
    let [a, b] = &ranks[..] else { unreachable!() };
    let here = window(&cuda, a, 10, 64, false, true).unwrap();
    let context = &a.contexts[0];
    bring(a, b, &here);
    fake.set("error_in", 1);
    let flush = context.flushed(1).unwrap().expect("GPU memory needs a read");
    let said = failure(context, 1, flush).message().to_owned();
    let own = context.flushed(0).unwrap_err().message().to_owned();
    let at = here.memory.at;
    for said in [said, own] {
        assert!(said.contains(&format!("towards rank 0 failed on the read of a flush at {at:#x}")), "{said}");
    }
    drop((here, ranks));
    cuda.check();
    fake.check_clean();
}

#[test]
fn what_goes_with_signal_messages_is_no_operation() {
    let fake = Fake::take();
    fake.set("atomic_cap", 0);
    let ranks = Job::default().start();
    let [a, b] = &ranks[..] else { unreachable!() };
    // The credit that rank 1 gives after sixteen messages.
    fake.set("error_in", 17);
    for _ in 0..16 {
        start_put(a, 0, 1, &Put { signal: signal(b, 0, 1), ..put(a, 0, b, 0, 0) });
    }
    until("the error", || {
        b.contexts[0].progress().unwrap();
        b.contexts[0].has_error()
    });
    let said = b.contexts[0].flushed(0).unwrap_err().message().to_owned();
    assert!(said.contains("towards rank 0 failed on a write that goes with signal messages"), "{said}");
    drop(ranks);
    fake.check_clean();
}
