//! A collective call that one rank refuses, through every table of the library: it fails on all ranks at once, with a
//! code and a line that says who refused what, and the next correct call works.
//!
//! Ranks are threads. `OXYGIN_TIMEOUT` ends what waits for a rank that never comes, with another code and line.

use nccl_plugin_api::*;
use oxygin::sys::version::BUILD;
use oxygin_cli::plugin::{log, ContextConfig, Kind, Plugin, Table};
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Barrier, Mutex, MutexGuard, Once, PoisonError};

const N: usize = 3;
/// Bytes of a window.
const LEN: usize = 4096;

/// The library that was built with this test. One test at a time: they look at what is logged.
fn tables() -> (Vec<Table>, MutexGuard<'static, ()>) {
    static ALONE: Mutex<()> = Mutex::new(());
    static ONCE: Once = Once::new();
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    ONCE.call_once(|| {
        std::env::set_var("OXYGIN_TIMEOUT", "20");
        std::env::set_var("OXYGIN_FABRIC", "soft");
    });
    let folder = std::env::current_exe().expect("this test").parent().expect("its folder").to_path_buf();
    let plugin = Plugin::open(folder.join("liboxygin.so")).expect("the library beside this test");
    assert_eq!(plugin.tables().len(), 8);
    (plugin.tables().to_vec(), alone)
}

/// One rank of a communicator. Handles are numbers: they may cross threads.
#[derive(Clone)]
struct Rank<'a> {
    table: &'a Table,
    rank: usize,
    instance: usize,
    listen: usize,
    handles: Vec<[u8; HANDLE_BYTES]>,
    coll: usize,
}

/// What one rank passes to `connect` where it differs from what is right.
#[derive(Clone, Copy, Default)]
struct Connect {
    rank: Option<c_int>,
    connections: Option<c_int>,
    no_place: bool,
    no_handles: bool,
    lacks: Option<usize>,
}

fn ok(what: &str, code: NcclResult) {
    assert_eq!(code, NcclResult::SUCCESS, "{what}");
}

/// Ranks that listen, none of which is connected.
fn listening(table: &Table) -> Vec<Rank<'_>> {
    let mut ranks: Vec<_> = (0..N)
        .map(|rank| {
            let (mut instance, mut listen, mut handle) = (null_mut(), null_mut(), [0; HANDLE_BYTES]);
            // SAFETY: places for results.
            unsafe {
                ok("init", table.init(&mut instance, 1, log::logger()));
                ok("listen", table.listen(instance, 0, handle.as_mut_ptr().cast(), &mut listen));
            }
            let (instance, listen) = (instance as usize, listen as usize);
            Rank { table, rank, instance, listen, handles: vec![handle], coll: 0 }
        })
        .collect();
    let handles: Vec<_> = ranks.iter().map(|rank| rank.handles[0]).collect();
    ranks.iter_mut().for_each(|rank| rank.handles = handles.clone());
    ranks
}

impl Rank<'_> {
    fn connect(&mut self, how: &Connect) -> NcclResult {
        let mut handles = self.handles.clone();
        let mut pointers: Vec<*mut c_void> = handles.iter_mut().map(|h| h.as_mut_ptr().cast()).collect();
        how.lacks.inspect(|&r| pointers[r] = null_mut());
        let config = ContextConfig { n_contexts: how.connections.unwrap_or(2), ..ContextConfig::default() };
        let rank = how.rank.unwrap_or(self.rank as c_int);
        let (mut coll, instance, listen) = (null_mut(), self.instance as *mut c_void, self.listen as *mut c_void);
        let place: *mut *mut c_void = if how.no_place { null_mut() } else { &mut coll };
        let all = if how.no_handles { null_mut() } else { pointers.as_mut_ptr() };
        // SAFETY: valid or NULL, as the case has it.
        let code = unsafe { self.table.connect(instance, all, N as c_int, rank, &config, listen, place) };
        self.coll = coll as usize;
        code
    }

    /// Registers `len` bytes at `data` and deregisters them again.
    fn register(&self, how: &Register) -> NcclResult {
        let memory = vec![0_u64; LEN / 8];
        let data = how.data.unwrap_or(memory.as_ptr() as usize) as *mut c_void;
        let (len, kind, flags) = (how.len.unwrap_or(LEN), how.kind.unwrap_or(PTR_HOST), how.flags.unwrap_or(0));
        let (coll, mut mh, mut gin) = (self.coll as *mut c_void, null_mut(), null_mut());
        let place: *mut *mut c_void = if how.no_place { null_mut() } else { &mut mh };
        // SAFETY: valid or not, as the case has it; the library looks before it touches.
        let code = unsafe {
            match how.dma_buf {
                None => self.table.reg(coll, data, len, kind, flags, place, &mut gin),
                Some(fd) => self.table.reg_dmabuf(coll, data, len, kind, 0, fd, flags, place, &mut gin),
            }
        };
        if code == NcclResult::SUCCESS {
            // SAFETY: the handle that was returned just now.
            ok("deregMrSym", unsafe { self.table.dereg(coll, mh) });
        }
        code
    }

    /// Makes contexts and destroys them again.
    fn contexts(&self, how: &Context) -> NcclResult {
        let config = ContextConfig { n_contexts: how.contexts.unwrap_or(2), ..ContextConfig::default() };
        let config = (!how.no_config).then_some(&config);
        let mut ctx = null_mut();
        let place: *mut *mut c_void = if how.no_place { null_mut() } else { &mut ctx };
        // SAFETY: valid or NULL, as the case has it.
        let code = unsafe { self.table.create_context(self.coll as *mut c_void, config, place, null_mut()) };
        if code == NcclResult::SUCCESS {
            // SAFETY: the handle that was returned just now.
            ok("destroyContext", unsafe { self.table.destroy_context(ctx) });
        }
        code
    }

    fn leave(self) {
        // SAFETY: objects of this rank.
        unsafe {
            if self.coll != 0 {
                ok("closeColl", self.table.close_coll(self.coll as *mut c_void));
            }
            ok("closeListen", self.table.close_listen(self.listen as *mut c_void));
            ok("finalize", self.table.finalize(self.instance as *mut c_void));
        }
    }
}

/// What one rank passes to `regMrSym` where it differs from what is right.
#[derive(Clone, Copy, Default)]
struct Register {
    data: Option<usize>,
    len: Option<usize>,
    kind: Option<c_int>,
    flags: Option<u64>,
    dma_buf: Option<c_int>,
    no_place: bool,
}

/// What one rank passes to `createContext` where it differs from what is right.
#[derive(Clone, Copy, Default)]
struct Context {
    contexts: Option<c_int>,
    no_config: bool,
    no_place: bool,
}

/// Has every rank make a call, in a thread of its own, and returns the codes by rank.
fn each<'a>(ranks: &mut [Rank<'a>], call: impl Fn(&mut Rank<'a>) -> NcclResult + Sync) -> Vec<NcclResult> {
    let together = &Barrier::new(ranks.len());
    let call = &call;
    std::thread::scope(|scope| {
        let threads: Vec<_> = ranks
            .iter_mut()
            .map(|rank| {
                scope.spawn(move || {
                    together.wait();
                    call(rank)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank")).collect()
    })
}

/// Judges a call of all ranks that `wrong` refused: its own code there, ncclRemoteError elsewhere, and one line a rank
/// that names it and says why.
fn judge(what: &str, call: &str, codes: &[NcclResult], mark: u64, wrong: usize, why: &str) {
    for (rank, &code) in codes.iter().enumerate() {
        match rank == wrong {
            true => assert!(![NcclResult::SUCCESS, NcclResult::TIMEOUT].contains(&code), "{what}: {code:?}"),
            false => assert_eq!(code, NcclResult::REMOTE_ERROR, "{what}: rank {rank}"),
        }
    }
    let lines: Vec<_> = log::warnings_since(mark).into_iter().map(|line| line.text).collect();
    let says = |line: &&String| {
        line.contains(call)
            && line.contains(&format!(": rank {wrong} ("))
            && (line.contains(") refused: ") || line.contains(") failed: "))
            && line.contains(why)
    };
    assert_eq!(lines.iter().filter(says).count(), N, "{what}: {lines:#?}");
    assert_eq!(lines.len(), N, "{what}: {lines:#?}");
}

fn all_fine(what: &str, codes: &[NcclResult]) {
    assert!(codes.iter().all(|&code| code == NcclResult::SUCCESS), "after {what}: {codes:?}");
}

fn connected(table: &Table) -> Vec<Rank<'_>> {
    let mut ranks = listening(table);
    all_fine("listen", &each(&mut ranks, |rank| rank.connect(&Connect::default())));
    ranks
}

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
            for wrong in [0, N - 1].into_iter().filter(|&wrong| wrong == 0 || *without) {
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

#[test]
fn a_handle_of_another_plugin_or_version_is_refused_by_all_without_waiting() {
    let (tables, _alone) = tables();
    for table in &tables {
        let mut ranks = listening(table);
        for (bytes, why) in
            [([7, 7], "was not made by oxygin"), (ranks[1].handles[1][..2].try_into().unwrap(), "version")]
        {
            let mark = log::mark();
            let codes = each(&mut ranks, |rank| {
                let mut other = rank.clone();
                other.handles[1][..2].copy_from_slice(&bytes);
                other.handles[1][8] = 99;
                other.connect(&Connect::default())
            });
            assert_eq!(codes, [NcclResult::INVALID_ARGUMENT; N]);
            let lines = log::warnings_since(mark);
            assert!(lines.len() == N && lines.iter().all(|line| line.text.contains(why)), "{lines:#?}");
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
    std::env::set_var("OXYGIN_TIMEOUT", "3");
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

/// From here on this thread, and no other, cannot start threads.
fn forbid_threads() {
    let step = |code, jt, k| libc::sock_filter { code, jt, jf: 0, k };
    let (clone, clone3) = (libc::SYS_clone as u32, libc::SYS_clone3 as u32);
    let mut filter = [
        step(0x20, 0, 0), // load the number of the system call
        step(0x15, 2, clone),
        step(0x15, 1, clone3),
        step(0x06, 0, libc::SECCOMP_RET_ALLOW),
        step(0x06, 0, libc::SECCOMP_RET_ERRNO | libc::EAGAIN as u32),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the kernel copies the program, which outlives the call.
    let result = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            | libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program)
    };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
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
