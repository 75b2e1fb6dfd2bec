//! Ranks that come through the tables of the library. They are threads. `OXYGIN_TIMEOUT` ends what waits for a rank
//! that never comes, with another code and line than those of a refusal.

use nccl_plugin_api::*;
use oxygin_cli::plugin::{log, ContextConfig, Plugin, Table};
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::{Barrier, Mutex, MutexGuard, Once, PoisonError};

pub const N: usize = 3;
/// Bytes of a window.
pub const LEN: usize = 4096;

/// The library that was built with this test. One test at a time: they look at what is logged.
pub fn tables() -> (Vec<Table>, MutexGuard<'static, ()>) {
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
pub struct Rank<'a> {
    pub table: &'a Table,
    pub rank: usize,
    pub instance: usize,
    pub listen: usize,
    pub handles: Vec<[u8; HANDLE_BYTES]>,
    pub coll: usize,
}

/// What one rank passes to `connect` where it differs from what is right.
#[derive(Clone, Copy, Default)]
pub struct Connect {
    pub rank: Option<c_int>,
    pub connections: Option<c_int>,
    pub no_place: bool,
    pub no_handles: bool,
    pub lacks: Option<usize>,
}

pub fn ok(what: &str, code: NcclResult) {
    assert_eq!(code, NcclResult::SUCCESS, "{what}");
}

/// Ranks that listen, none of which is connected.
pub fn listening(table: &Table) -> Vec<Rank<'_>> {
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
    pub fn connect(&mut self, how: &Connect) -> NcclResult {
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
    pub fn register(&self, how: &Register) -> NcclResult {
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
    pub fn contexts(&self, how: &Context) -> NcclResult {
        let n_contexts = how.contexts.unwrap_or(2);
        let config = ContextConfig { n_contexts, backend_version: 2, ..ContextConfig::default() };
        let config = (!how.no_config).then_some(&config);
        let (mut ctx, mut handle) = (null_mut(), null_mut());
        let place: *mut *mut c_void = if how.no_place { null_mut() } else { &mut ctx };
        let device = if how.device { &raw mut handle } else { null_mut() };
        // SAFETY: valid or NULL, as the case has it.
        let code = unsafe { self.table.create_context(self.coll as *mut c_void, config, place, device) };
        if code == NcclResult::SUCCESS {
            // SAFETY: the handle that was returned just now.
            ok("destroyContext", unsafe { self.table.destroy_context(ctx) });
        }
        code
    }

    pub fn leave(self) {
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
pub struct Register {
    pub data: Option<usize>,
    pub len: Option<usize>,
    pub kind: Option<c_int>,
    pub flags: Option<u64>,
    pub dma_buf: Option<c_int>,
    pub no_place: bool,
}

/// What one rank passes to `createContext` where it differs from what is right.
#[derive(Clone, Copy, Default)]
pub struct Context {
    pub contexts: Option<c_int>,
    pub no_config: bool,
    pub no_place: bool,
    /// There is a place for what device code is given.
    pub device: bool,
}

/// Has every rank make a call, in a thread of its own, and returns the codes by rank.
pub fn each<'a>(ranks: &mut [Rank<'a>], call: impl Fn(&mut Rank<'a>) -> NcclResult + Sync) -> Vec<NcclResult> {
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
pub fn judge(what: &str, call: &str, codes: &[NcclResult], mark: u64, wrong: usize, why: &str) {
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

pub fn all_fine(what: &str, codes: &[NcclResult]) {
    assert!(codes.iter().all(|&code| code == NcclResult::SUCCESS), "after {what}: {codes:?}");
}

pub fn connected(table: &Table) -> Vec<Rank<'_>> {
    let mut ranks = listening(table);
    all_fine("listen", &each(&mut ranks, |rank| rank.connect(&Connect::default())));
    ranks
}

/// From here on this thread, and no other, cannot start threads.
pub fn forbid_threads() {
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
