//! A collective call that one rank refuses, through every table of the library: it fails on all ranks at once, with a
//! code and a line that says who refused what, and the next correct call works.

use crate::tables::*;
use nccl_plugin_api::*;
use oxygin::sys::version::BUILD;
use oxygin_cli::plugin::{log, Kind, Table};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

/// Has the first rank and the last refuse a call in each case (what it is called, what they pass, why), and all make a
/// good one after each.
fn refused_in_each_case<'a, How: Default + Sync>(
    table: &'a Table,
    call: &str,
    cases: &[(&str, How, &str)],
    make: impl Fn(&Rank<'a>, &How) -> NcclResult + Sync,
) {
    let (mut ranks, good) = (connected(table), How::default());
    for (what, bad, why) in cases {
        for wrong in [0, N - 1] {
            let what = &format!("{:?}: {call} with {what} on rank {wrong}", table.kind());
            let mark = log::mark();
            let codes = each(&mut ranks, |rank| make(rank, if rank.rank == wrong { bad } else { &good }));
            judge(what, call, &codes, mark, wrong, why);
            all_fine(what, &each(&mut ranks, |rank| make(rank, &good)));
        }
    }
    ranks.into_iter().for_each(Rank::leave);
}

#[test]
fn a_registration_that_one_rank_refuses() {
    let (tables, _alone) = tables();
    let register = Register::default();
    let cases = [
        ("data NULL", Register { data: Some(0), ..register }, "data is NULL"),
        ("size 0", Register { len: Some(0), ..register }, "size = 0"),
        ("a range that wraps", Register { data: Some(usize::MAX - 7), ..register }, "wrap around"),
        ("type 7", Register { kind: Some(7), ..register }, "type = 7"),
        ("host memory as type 2", Register { kind: Some(PTR_CUDA), ..register }, "type"),
        ("flags 0x80", Register { flags: Some(0x80), ..register }, "mrFlags = 0x80"),
        ("mhandle NULL", Register { no_place: true, ..register }, "mhandle is NULL"),
        ("a DMA-BUF -1", Register { dma_buf: Some(-1), ..register }, "fd = -1"),
        ("a DMA-BUF and mhandle NULL", Register { dma_buf: Some(-1), no_place: true, ..register }, "mhandle is NULL"),
    ];
    for table in &tables {
        refused_in_each_case(table, "regMrSym", &cases, Rank::register);
    }
}

#[test]
fn contexts_that_one_rank_refuses() {
    let (tables, _alone) = tables();
    let context = Context::default();
    let cases = [
        ("ginCtx NULL", Context { no_place: true, ..context }, "Ctx is NULL"),
        ("config NULL", Context { no_config: true, ..context }, "config is NULL"),
        ("no contexts", Context { contexts: Some(0), ..context }, "nContexts = 0"),
        ("-1 contexts", Context { contexts: Some(-1), ..context }, "nContexts = -1"),
        ("1025 contexts", Context { contexts: Some(1025), ..context }, "nContexts = 1025"),
    ];
    // The contexts of older tables come with connect.
    let collective = |table: &&Table| table.kind().has_data_operations() && table.kind() >= Kind::GinV13;
    for table in tables.iter().filter(collective) {
        refused_in_each_case(table, "createContext", &cases, Rank::contexts);
    }
}

#[test]
fn different_numbers_of_contexts_fail_all_and_the_next_call_works() {
    let (tables, _alone) = tables();
    let table = tables.iter().find(|table| table.kind() == Kind::RmaV16).expect("RMA v16");
    let mut ranks = connected(table);
    for asks in [1, 3] {
        let other = Context { contexts: Some(asks), ..Context::default() };
        let codes = each(&mut ranks, |rank| match rank.rank {
            1 => rank.contexts(&other),
            _ => rank.contexts(&Context::default()),
        });
        assert_eq!(codes, [NcclResult::INVALID_USAGE; N]);
        all_fine("different numbers", &each(&mut ranks, |rank| rank.contexts(&Context::default())));
    }
    ranks.into_iter().for_each(Rank::leave);
}

#[test]
fn gin_v14_refuses_contexts_in_step() {
    let (tables, _alone) = tables();
    let table = tables.iter().find(|table| table.kind() == Kind::GinV14).expect("GIN v14");
    std::env::set_var("OXYGIN_ENGINE", "nccl");
    let mut ranks = connected(table);
    std::env::remove_var("OXYGIN_ENGINE");
    for no_config in [false, true] {
        let mark = log::mark();
        let codes = each(&mut ranks, |rank| {
            rank.contexts(&Context { no_config: no_config && rank.rank == 1, ..Context::default() })
        });
        let own = |rank| if no_config && rank == 1 { NcclResult::INVALID_ARGUMENT } else { NcclResult::INVALID_USAGE };
        assert_eq!(codes, (0..N).map(own).collect::<Vec<_>>());
        let lines = log::warnings_since(mark);
        let who = if no_config { "rank 1 (" } else { "every rank refused: the GIN v14 table" };
        assert!(lines.len() == N && lines.iter().all(|line| line.text.contains(who)), "{lines:#?}");
        all_fine("a refusal", &each(&mut ranks, |rank| rank.register(&Register::default())));
    }
    ranks.into_iter().for_each(Rank::leave);
}

#[test]
fn a_connect_that_one_rank_refuses() {
    let (tables, _alone) = tables();
    let connect = Connect::default();
    // Beside the rank: what is wrong, and whether rank 0 can be found without it.
    let cases = [
        ("collComm NULL", Connect { no_place: true, ..connect }, "collComm is NULL", true),
        ("rank -1", Connect { rank: Some(-1), ..connect }, "rank = -1 of nranks = 3", true),
        ("rank 3", Connect { rank: Some(3), ..connect }, "rank = 3 of nranks = 3", true),
        ("rank 0 of another", Connect { rank: Some(0), ..connect }, "rank = 0, but handles[2] is", true),
        ("rank 1 of another", Connect { rank: Some(1), ..connect }, "rank = 1, but handles[", true),
        ("a handle NULL", Connect { lacks: Some(1), ..connect }, "handles[1] is NULL", true),
        ("handles NULL", Connect { no_handles: true, ..connect }, "handles is NULL", false),
        ("rank 0's handle NULL", Connect { lacks: Some(0), ..connect }, "handles[0] is NULL", false),
        ("5000 connections", Connect { connections: Some(5000), ..connect }, "nContexts = 5000", true),
    ];
    for table in &tables {
        let mut ranks = listening(table);
        for (what, bad, why, without) in &cases {
            if bad.connections.is_some() && table.kind() != Kind::GinV12 {
                continue;
            }
            let differs = |&wrong: &usize| bad.rank != Some(wrong as i32) && (wrong == 0 || *without);
            for wrong in [0, N - 1].into_iter().filter(differs) {
                let what = &format!("{:?}: connect with {what} on rank {wrong}", table.kind());
                let mark = log::mark();
                let codes = each(&mut ranks, |rank| rank.connect(if rank.rank == wrong { bad } else { &connect }));
                judge(what, "connect", &codes, mark, wrong, why);
            }
        }
        all_fine("refusals", &each(&mut ranks, |rank| rank.connect(&connect)));
        all_fine("connect", &each(&mut ranks, |rank| rank.register(&Register::default())));
        ranks.into_iter().for_each(Rank::leave);
    }
}

/// NCCL ends its windows with NULL for communicator and window where connect has failed, and goes on with NULL for the
/// communicator: the first says nothing that hides the error, and the others lead to it.
#[test]
fn calls_behind_a_connect_that_failed_lead_to_its_error() {
    let (tables, _alone) = tables();
    let none = std::ptr::null_mut();
    for table in &tables {
        let mut ranks = listening(table);
        let rank = &mut ranks[N - 1];
        // It has nobody to tell, and so nobody to wait for.
        let code = rank.connect(&Connect { no_handles: true, ..Connect::default() });
        assert_eq!((code, rank.coll), (NcclResult::INVALID_ARGUMENT, 0));
        let mark = log::mark();
        // SAFETY: the library looks before it touches.
        ok("deregMrSym", unsafe { table.dereg(none, none) });
        assert_eq!(log::warnings_since(mark).len(), 0, "{:?}", table.kind());
        let say = |call: &str, code| {
            let lines: Vec<_> = log::warnings_since(mark).into_iter().map(|line| line.text).collect();
            assert_eq!(code, NcclResult::INVALID_ARGUMENT, "{call}");
            let last = lines.last().expect("a line");
            assert!(last.starts_with(call) && last.contains("collComm is NULL: connect has failed"), "{lines:#?}");
        };
        say("regMrSym", rank.register(&Register::default()));
        if table.kind() >= Kind::GinV13 {
            say("createContext", rank.contexts(&Context::default()));
        }
        // SAFETY: as above.
        say("deregMrSym", unsafe { table.dereg(none, std::ptr::dangling_mut::<u64>().cast()) });
        ranks.into_iter().for_each(Rank::leave);
    }
}

#[test]
fn a_handle_of_another_plugin_or_version_is_refused_by_all_without_waiting() {
    let (tables, _alone) = tables();
    for table in &tables {
        let mut ranks = listening(table);
        // NCCL's own plugin on that rank's host: what to set is named on every rank.
        let foreign = ["rank 1", "was not made by oxygin", "NCCL_GIN_PLUGIN", "NCCL_RMA_PLUGIN"];
        let ours = ranks[1].handles[1][..2].try_into().unwrap();
        for (bytes, why) in [([7, 7], &foreign[..]), (ours, &["version"])] {
            let mark = log::mark();
            let codes = each(&mut ranks, |rank| {
                let mut other = rank.clone();
                other.handles[1][..2].copy_from_slice(&bytes);
                other.handles[1][8] = 99;
                other.connect(&Connect::default())
            });
            assert_eq!(codes, [NcclResult::INVALID_ARGUMENT; N]);
            let lines = log::warnings_since(mark);
            let says_all = |text: &str| why.iter().all(|words| text.contains(words));
            assert!(lines.len() == N && lines.iter().all(|line| says_all(&line.text)), "{lines:#?}");
        }
        all_fine("refusals", &each(&mut ranks, |rank| rank.connect(&Connect::default())));
        ranks.into_iter().for_each(Rank::leave);
    }
}

/// Nothing says which communicator was meant, so the call counts in none. All ranks return in time and say what to
/// do; nobody gets another call's windows.
#[test]
fn a_rank_that_names_no_communicator_is_behind_and_all_are_told_so() {
    let (tables, _alone) = tables();
    // Long enough for a busy machine, which holds up threads for seconds.
    std::env::set_var("OXYGIN_TIMEOUT", "6");
    let table = tables.iter().find(|table| table.kind() == Kind::RmaV16).expect("RMA v16");
    let (mut ranks, good) = (connected(table), Register::default());
    std::env::set_var("OXYGIN_TIMEOUT", "20");
    let others_wait = |codes: &[NcclResult]| assert_eq!(codes[..N - 1], [NcclResult::TIMEOUT; N - 1]);
    let returned = AtomicUsize::new(0);
    let codes = each(&mut ranks, |rank| {
        let mut none = rank.clone();
        if rank.rank == N - 1 {
            none.coll = 0;
        }
        let code = none.register(&good);
        let before = returned.fetch_add(1, SeqCst);
        assert!(rank.rank != N - 1 || before == 0, "it has nobody to wait for");
        code
    });
    others_wait(&codes);
    assert_eq!(codes[N - 1], NcclResult::INVALID_ARGUMENT);
    for _ in 0..2 {
        let mark = log::mark();
        let codes = each(&mut ranks, |rank| rank.register(&good));
        others_wait(&codes);
        assert_eq!(codes[N - 1], NcclResult::TIMEOUT);
        let lines: Vec<_> = log::warnings_since(mark).into_iter().map(|line| line.text).collect();
        let count = |words: &str| lines.iter().filter(|line| line.contains(words)).count();
        assert_eq!(count("over before rank 2 ("), 1, "{lines:#?}");
        assert_eq!(count("close this communicator on all ranks"), 1, "{lines:#?}");
        let waited =
            |line: &&String| line.starts_with("regMrSym: rank 2 (") && line.contains("came to an earlier step");
        assert_eq!(lines.iter().filter(waited).count(), N - 1, "{lines:#?}");
    }
    ranks.into_iter().for_each(Rank::leave);
}

#[test]
fn a_rank_whose_fabric_does_not_come_up_fails_connect_on_all() {
    let (tables, _alone) = tables();
    for table in &tables {
        for wrong in [0, 1] {
            let mut ranks = listening(table);
            let mark = log::mark();
            let codes = each(&mut ranks, |rank| {
                if rank.rank == wrong {
                    forbid_threads();
                }
                rank.connect(&Connect::default())
            });
            let own = |rank| if rank == wrong { NcclResult::SYSTEM_ERROR } else { NcclResult::REMOTE_ERROR };
            assert_eq!(codes, (0..N).map(own).collect::<Vec<_>>(), "{:?}", table.kind());
            let lines: Vec<_> = log::warnings_since(mark).into_iter().map(|line| line.text).collect();
            let (who, why) = (format!(": rank {wrong} ("), "starting a thread failed");
            assert!(lines.iter().all(|line| line.contains(&who) && line.contains(why)), "{lines:#?}");
            assert_eq!(lines.len(), N, "{lines:#?}");
            // The same ranks, once there is room.
            all_fine("no threads", &each(&mut ranks, |rank| rank.connect(&Connect::default())));
            all_fine("connect", &each(&mut ranks, |rank| rank.register(&Register::default())));
            ranks.into_iter().for_each(Rank::leave);
        }
    }
}

#[test]
fn a_rank_whose_engine_does_not_start_fails_create_context_on_all() {
    let (tables, _alone) = tables();
    let context = Context { device: true, ..Context::default() };
    for engine in ["own", "gdaki-soft"] {
        for table in tables.iter().filter(|table| matches!(table.kind(), Kind::GinV13 | Kind::GinV14)) {
            for wrong in [0, N - 1] {
                let what = &format!("{engine}, {:?}", table.kind());
                std::env::set_var("OXYGIN_ENGINE", engine);
                let mut ranks = connected(table);
                std::env::remove_var("OXYGIN_ENGINE");
                let mark = log::mark();
                let codes = each(&mut ranks, |rank| {
                    if rank.rank == wrong {
                        forbid_threads();
                    }
                    rank.contexts(&context)
                });
                judge(what, "createContext", &codes, mark, wrong, "starting a thread failed");
                all_fine(what, &each(&mut ranks, |rank| rank.contexts(&context)));
                all_fine(what, &each(&mut ranks, |rank| rank.register(&Register::default())));
                ranks.into_iter().for_each(Rank::leave);
            }
        }
    }
}

/// Rank 1's handle as a build with another set-up protocol would have filled it: magic, version and build stay in
/// place.
#[test]
fn a_build_with_another_protocol_is_refused_with_both_builds_in_the_sentence() {
    const THEIRS: &[u8] = b"9.8.7 (commit 0a1b2c3d4e5f)\0";
    let (tables, _alone) = tables();
    for table in &tables {
        let mark = log::mark();
        let mut ranks = listening(table);
        let first = &log::since(mark)[0];
        let name = format!("oxygin {BUILD}, communicator 0x1");
        assert_eq!((first.text.as_str(), first.level, first.subsys), (name.as_str(), LOG_INFO, SUBSYS_INIT));
        for rank in [0, N - 1] {
            let handle = &mut ranks[rank].handles[1];
            handle[8..10].copy_from_slice(&9_u16.to_le_bytes());
            handle[52..52 + THEIRS.len()].copy_from_slice(THEIRS);
            let mark = log::mark();
            assert_eq!(ranks[rank].connect(&Connect::default()), NcclResult::INVALID_ARGUMENT);
            let lines = log::warnings_since(mark);
            let said = ["rank 1: ", "9.8.7 (commit 0a1b2c3d4e5f)", "version 9 of the set-up protocol", BUILD];
            assert!(lines.len() == 1 && said.iter().all(|words| lines[0].text.contains(words)), "{lines:#?}");
        }
        ranks.into_iter().for_each(Rank::leave);
    }
}
