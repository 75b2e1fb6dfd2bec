//! Ranks on a device of the fake libibverbs and libmlx5.

use crate::support::common::{job, Rank, Window};
use crate::support::kernel::{Kernel, Seen, Through, WAYS};
use crate::support::nic::Ask;
use crate::support::turn::{self, Turn};
use libloading::Library;
use nccl_plugin_api::PTR_HOST;
use std::ffi::{c_char, c_void, CString};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Words of each window.
pub const WORDS: usize = 1024;
/// Words of a page.
const PAGE: usize = 512;
/// GIN v14 with `backendVersion` 2.
pub const V14_2: Through = WAYS[3];

/// The fake libraries, their settings at their defaults. One test at a time has them.
pub struct Fake {
    library: Library,
    /// What tests that failed have left, and misuse.
    left: Vec<i64>,
    _turn: Turn,
}

/// What is counted at a test's end.
const COUNTED: [&str; 10] = [
    "live_mlx5_qps",
    "live_mlx5_cqs",
    "live_mlx5_umems",
    "live_mlx5_uars",
    "live_mlx5_channels",
    "live_regions",
    "live_pds",
    "live_contexts",
    "live_ahs",
    "misuse",
];

/// The fake libibverbs.
pub fn verbs_path() -> PathBuf {
    let path = std::env::current_exe().unwrap().with_file_name("libfake_verbs.so");
    assert!(path.exists(), "{} is not there; build the package fake-verbs", path.display());
    path
}

impl Fake {
    pub fn take() -> Self {
        Self::take_with(Path::new(fake_verbs::mlx5::LIBRARY))
    }

    /// The same, with another libmlx5.
    pub fn take_with(mlx5: &Path) -> Self {
        let turn = turn::take();
        let asked = ["NCCL_GDAKI_USE_RELIABLE_DB", "NCCL_GIN_GDAKI_NIC_HANDLER", "NCCL_GIN_TYPE", "OXYGIN_GDAKI_TRIAL"];
        for name in asked.iter().chain(&["OXYGIN_LIBCUDA", "NCCL_IB_TC", "NCCL_IB_SL"]) {
            std::env::remove_var(name);
        }
        let verbs = verbs_path();
        for name in ["OXYGIN_LIBIBVERBS", "OXYGIN_LIBRDMACM"] {
            std::env::set_var(name, &verbs);
        }
        std::env::set_var("OXYGIN_LIBMLX5", mlx5);
        std::env::set_var("OXYGIN_FABRIC", "verbs");
        std::env::set_var("OXYGIN_ENGINE", "gdaki");
        // SAFETY: our own library.
        let library = unsafe { Library::new(verbs) }.unwrap();
        let mut fake = Self { library, left: Vec::new(), _turn: turn };
        fake.set("reset", 0);
        fake.left = COUNTED.map(|what| fake.count(what)).to_vec();
        fake
    }

    /// Sets a limit or fault.
    pub fn set(&self, key: &str, value: i64) {
        let name = CString::new(key).unwrap();
        type Set = unsafe extern "C" fn(*const c_char, i64) -> i64;
        // SAFETY: the fake has a function of this type.
        let rc = unsafe { self.library.get::<Set>(b"fake_verbs_control").unwrap()(name.as_ptr(), value) };
        assert_eq!(rc, 0, "the fake knows no {key}");
    }

    /// Reads a count.
    pub fn count(&self, key: &str) -> i64 {
        let name = CString::new(key).unwrap();
        type Query = unsafe extern "C" fn(*const c_char) -> i64;
        // SAFETY: as above.
        unsafe { self.library.get::<Query>(b"fake_verbs_query").unwrap()(name.as_ptr()) }
    }

    /// Nothing is left, and nothing was used wrongly.
    #[track_caller]
    pub fn check_clean(&self) {
        for (what, before) in COUNTED.iter().zip(&self.left) {
            assert_eq!(self.count(what) - before, 0, "{what}: some are left");
        }
    }
}

/// A window that was registered through a GIN table; it begins a page.
pub struct Registered {
    memory: Window,
    first: usize,
    /// For calls.
    pub mhandle: *mut c_void,
    pub gin: u64,
}

impl Registered {
    pub fn new(r: &Rank, through: Through) -> Self {
        let memory = r.not_registered(WORDS + PAGE);
        let first = (memory.words.as_ptr() as usize / 8).next_multiple_of(PAGE) - memory.words.as_ptr() as usize / 8;
        let at = memory.words[first..].as_ptr() as u64;
        let (mhandle, gin) = through.register(r, at, 8 * WORDS, PTR_HOST);
        assert_ne!(gin, mhandle as u64, "device code has a name of its own for it");
        Self { memory, first, mhandle, gin }
    }

    fn word(&self, i: usize) -> &AtomicU64 {
        assert!(i < WORDS);
        // SAFETY: inside the window; peers write it.
        unsafe { &*self.memory.words.as_ptr().add(self.first + i).cast::<AtomicU64>() }
    }

    pub fn seen(&self) -> Seen<'_> {
        // SAFETY: the window's words, which peers write, too.
        let words = unsafe { std::slice::from_raw_parts(self.memory.words.as_ptr().add(self.first).cast(), WORDS) };
        Seen { gin: self.gin, words }
    }

    pub fn get(&self, i: usize) -> u64 {
        self.word(i).load(Ordering::Acquire)
    }

    pub fn set(&self, i: usize, value: u64) {
        self.word(i).store(value, Ordering::Release)
    }
}

// SAFETY: handles are numbers, and words are used as atomics.
unsafe impl Sync for Registered {}

/// Memory is where device code sees it.
pub fn here(at: u64) -> u64 {
    at
}

/// Every rank with a kernel and two windows, which come before the contexts, as with NCCL.
pub fn on_kernels(
    ranks: usize,
    through: Through,
    ask: Ask,
    body: impl Fn(&Rank, Kernel, &Registered, &Registered) + Send + Sync,
) {
    job(ranks, 0, |r| {
        let (src, dst) = (Registered::new(r, through), Registered::new(r, through));
        let kernel = Kernel::new(r, through, ask, &here);
        r.job.barrier.wait();
        body(r, kernel, &src, &dst);
        r.job.barrier.wait();
    });
}
