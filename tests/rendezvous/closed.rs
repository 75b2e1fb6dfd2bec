//! A rank whose communicator another of its threads ends, as NCCL does it when it aborts, while it waits for a rank
//! that does not come: its call ends at once, and those of the ranks that wait with it.

use crate::tables::*;
use nccl_plugin_api::NcclResult;
use oxygin_cli::plugin::{log, Kind, Table};
use std::ffi::c_void;
use std::time::{Duration, Instant};

/// `OXYGIN_TIMEOUT` is longer. A busy machine keeps a thread waiting for seconds.
const AT_ONCE: Duration = Duration::from_secs(15);

/// Ranks 0 and 1 make a call that rank 2 does not make; `end` ends one of them from another thread.
fn ended_in<'a>(
    what: &str,
    ranks: &mut [Rank<'a>],
    call: impl Fn(&mut Rank<'a>) -> NcclResult + Sync,
    end: impl Fn(&Rank<'a>) + Sync,
    ended: usize,
) {
    let (mark, begun) = (log::mark(), Instant::now());
    let theirs = ranks[ended].clone();
    let codes = std::thread::scope(|s| {
        s.spawn(|| {
            std::thread::sleep(Duration::from_millis(300));
            end(&theirs);
        });
        each(&mut ranks[..2], call)
    });
    let (took, lines) = (begun.elapsed(), log::warnings_since(mark));
    let lines: Vec<_> = lines.into_iter().map(|line| line.text).collect();
    assert!(took < AT_ONCE, "{what}, rank {ended}: after {took:?} {lines:#?}");
    assert_eq!(codes[ended], NcclResult::INVALID_USAGE, "{what}, rank {ended}: {lines:#?}");
    assert!(![NcclResult::SUCCESS, NcclResult::TIMEOUT].contains(&codes[1 - ended]), "{what}: {codes:?} {lines:#?}");
    let closed = format!("{what}: this rank closed the communicator while it waited for the others");
    assert_eq!(lines.iter().filter(|line| line.contains(&closed)).count(), 1, "{lines:#?}");
    let named = lines.iter().filter(|line| line.contains(&format!("rank {ended} ("))).count();
    assert_eq!(named, 1, "the other one says who is gone: {lines:#?}");
}

/// Ranks with a communicator, whose listenComms are closed, as NCCL does at once.
fn joined(table: &Table) -> Vec<Rank<'_>> {
    let ranks = connected(table);
    for rank in &ranks {
        // SAFETY: the rank's own.
        ok("closeListen", unsafe { table.close_listen(rank.listen as *mut c_void) });
    }
    ranks
}

fn close(rank: &Rank<'_>) {
    // SAFETY: the rank's own.
    ok("closeColl", unsafe { rank.table.close_coll(rank.coll as *mut c_void) });
}

fn finalize(rank: &Rank<'_>) {
    // SAFETY: the rank's own.
    ok("finalize", unsafe { rank.table.finalize(rank.instance as *mut c_void) });
}

#[test]
fn a_call_ends_with_its_communicator() {
    let (tables, _alone) = tables();
    let table = tables.iter().find(|table| table.kind() == Kind::RmaV16).expect("RMA v16");
    for ended in [0, 1] {
        for what in ["createContext", "regMrSym"] {
            let call = |rank: &mut Rank<'_>| match what {
                "regMrSym" => rank.register(&Register::default()),
                _ => rank.contexts(&Context::default()),
            };
            let mut ranks = joined(table);
            ended_in(what, &mut ranks, call, close, ended);
            ranks.iter().filter(|rank| rank.rank != ended).for_each(close);
            ranks.iter().for_each(finalize);
        }
    }
}

/// Where connect has not come to its end there is no communicator yet to close.
#[test]
fn connect_ends_with_the_instance() {
    let (tables, _alone) = tables();
    let table = tables.iter().find(|table| table.kind() == Kind::GinV14).expect("GIN v14");
    for ended in [0, 1] {
        let mut ranks = listening(table);
        ended_in("connect", &mut ranks, |rank| rank.connect(&Connect::default()), finalize, ended);
        // Its listenComm went with it.
        ranks.remove(ended);
        ranks.into_iter().for_each(Rank::leave);
    }
}
