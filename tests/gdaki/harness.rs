//! Ranks with windows and queue pairs, and the ways in which device code uses them.

use crate::support::common::{job, Rank, Window};
use crate::support::nic::{Ask, Nic, Place};
use oxygin::config::Ringing;
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
