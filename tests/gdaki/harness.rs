//! Ranks with windows and queue pairs, and the ways in which device code uses them.

use crate::support::common::{job, Rank, Window};
use crate::support::nic::{Ask, Nic, Place};
use oxygin::config::Ringing;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

/// Words of each window.
pub const WORDS: usize = 1 << 12;

/// Every way to ring, by the oldest and the newest device code that has it.
pub fn ways() -> [Ask; 4] {
    [
        Ask::default(),
        Ask { is_sm90: false, record_first: true, ..Ask::default() },
        Ask { handler: Ringing::Proxy, is_sm90: false, ..Ask::default() },
        Ask { handler: Ringing::FreeFlow, ..Ask::default() },
    ]
}

/// A window, and the key by which entries name it.
pub struct Keyed {
    pub window: Window,
    pub key: u32,
}

// SAFETY: the handle is a number, and the words are used as atomics.
unsafe impl Sync for Keyed {}

impl Keyed {
    /// Word `i`.
    pub fn at(&self, i: usize) -> Place {
        (self.key, 8 * i as u64)
    }

    fn word(&self, i: usize) -> &AtomicU64 {
        assert!(i < self.window.words.len());
        // SAFETY: inside the window; peers write it.
        unsafe { &*self.window.words.as_ptr().add(i).cast::<AtomicU64>() }
    }

    pub fn get(&self, i: usize) -> u64 {
        self.word(i).load(Ordering::Acquire)
    }

    pub fn set(&self, i: usize, value: u64) {
        self.word(i).store(value, Ordering::Release);
    }
}

/// Every rank, its device code, and two windows.
pub fn on_ranks(ranks: usize, ask: Ask, body: impl Fn(&Rank, &Nic, &Keyed, &Keyed) + Send + Sync) {
    job(ranks, 1, |r| {
        let (src, dst) = (r.window(WORDS, 0), r.window(WORDS, 0));
        let nic = Nic::new(r, ask);
        let [src, dst] = [src, dst].map(|window| Keyed { key: nic.key(window.handle), window });
        r.job.barrier.wait();
        body(r, &nic, &src, &dst);
        r.job.barrier.wait();
        nic.destroy();
    });
}

/// A folder for recordings, which ends with the test.
pub struct Folder(pub PathBuf);

impl Folder {
    /// An empty one, named after the test.
    pub fn new(test: &str) -> Self {
        let path = std::env::temp_dir().join(format!("oxygin-{test}-{}", std::process::id()));
        std::fs::create_dir(&path).expect("a new folder");
        Self(path)
    }

    /// Names and texts of the files in it, by name; they are gone then.
    pub fn take(&self) -> Vec<(String, String)> {
        let mut paths: Vec<_> = std::fs::read_dir(&self.0).expect("the folder").map(|f| f.unwrap().path()).collect();
        paths.sort();
        let read = |path: PathBuf| {
            let (name, text) = (path.file_name().unwrap().to_str().unwrap().to_owned(), std::fs::read_to_string(&path));
            std::fs::remove_file(path).expect("a file");
            (name, text.expect("a text"))
        };
        paths.into_iter().map(read).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        _ = std::fs::remove_dir_all(&self.0);
    }
}
