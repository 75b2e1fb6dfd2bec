//! How many instructions one 8-byte put with a signal and its test take in the verbs fabric, not counting those of the
//! verbs library, which is the fake one and completes at once:
//!
//! ```text
//! cargo build --release --example verbs_instructions
//! valgrind --tool=callgrind --toggle-collect='*measured*counted*' --compress-strings=no --compress-pos=no \
//!     --callgrind-out-file=out target/release/examples/verbs_instructions window    # or: one
//! awk '/^ob=/ { o = $0 } /^calls=/ { getline; next } /^[0-9]/ { n[o] += $2 } END { for (o in n) print n[o], o }' out
//! ```
//!
//! Divide what the last line says of this program by the number of operations that it printed.

#[path = "../tests/verbs_support/mod.rs"]
mod verbs_support;

use oxygin::fabric::verbs::VerbsContext;
use oxygin::fabric::Context;
use oxygin::rma::op::Put;
use oxygin::rma::seq::Seq;
use verbs_support::*;

/// Rounds, each of `IN_FLIGHT` operations.
const ROUNDS: u32 = 1000;

mod measured {
    use super::*;

    /// As a table's function would: with its own frame, and the operation in memory.
    #[inline(never)]
    pub fn counted_put(context: &VerbsContext, put: &Put) -> Seq {
        // SAFETY: the windows outlive the operations.
        unsafe { context.put(1, put) }.unwrap_or(Seq(0))
    }

    #[inline(never)]
    pub fn counted_test(context: &VerbsContext, seq: Seq) -> bool {
        matches!(context.test(1, seq), Ok(true))
    }

    pub fn round(context: &VerbsContext, put: &Put, seqs: &mut [Seq]) -> u32 {
        for seq in seqs.iter_mut() {
            *seq = counted_put(context, put);
        }
        seqs.iter().map(|&seq| u32::from(!counted_test(context, seq))).sum()
    }
}

fn main() {
    let in_flight = match std::env::args().nth(1).as_deref() {
        Some("one") => 1,
        Some("window") => 32,
        _ => {
            eprintln!("say one or window");
            std::process::exit(2);
        }
    };
    let fake = Fake::take();
    let ranks = Job::default().start();
    let p = Put { signal: signal(&ranks[1], 0, 1), ..put(&ranks[0], 0, &ranks[1], 0, 8) };
    let mut seqs = vec![Seq(0); in_flight];
    let mut unfinished = 0;
    for _ in 0..ROUNDS {
        unfinished += measured::round(&ranks[0].contexts[0], &p, &mut seqs);
    }
    let operations = u64::from(ROUNDS) * in_flight as u64;
    assert_eq!((unfinished, ranks[1].signals.memory.word(0)), (0, operations));
    println!("operations {operations}");
    drop(ranks);
    fake.check_clean();
}
