//! Ranks in processes of their own: each test runs itself once more for every rank.

use super::apart::again_from;
use super::children;
use super::common::{Job, Rank};
use super::turn;
use nccl_plugin_api::HANDLE_BYTES;
use std::panic::Location;
use std::process::Child;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Set for a rank's process: rank, ranks, and the board's file.
const ENV: &str = "OXYGIN_TEST_RANK";
/// A job that takes longer hangs.
const WITHIN: Duration = Duration::from_secs(60);

const RANKS: usize = 8;

/// Memory that all processes of a job see.
#[repr(C)]
struct Board {
    arrived: AtomicU32,
    round: AtomicU32,
    failed: AtomicU32,
    _gap: u32,
    /// A process and a signal for it, until it is sent; 0: none.
    wanted: AtomicU64,
    words: [AtomicU64; 16],
    handles: [[AtomicU64; HANDLE_BYTES / 8]; RANKS],
}

/// One rank's place in a job.
pub struct Place {
    pub rank: usize,
    pub nranks: usize,
    board: &'static Board,
    job: Arc<Job>,
}

impl Place {
    fn open(spec: &str) -> Self {
        let mut parts = spec.splitn(3, ' ');
        let mut next = || parts.next().unwrap();
        let (rank, nranks) = (next().parse().unwrap(), next().parse().unwrap());
        let file = std::fs::OpenOptions::new().read(true).write(true).open(next()).unwrap();
        let bytes = std::mem::size_of::<Board>();
        // SAFETY: a new mapping of a file that has as many bytes; all of it is atomic.
        let board = unsafe {
            let (rw, fd) = (libc::PROT_READ | libc::PROT_WRITE, std::os::fd::AsRawFd::as_raw_fd(&file));
            let at = libc::mmap(std::ptr::null_mut(), bytes, rw, libc::MAP_SHARED, fd, 0);
            assert!(at != libc::MAP_FAILED);
            &*at.cast::<Board>()
        };
        Self { rank, nranks, board, job: Job::apart(nranks) }
    }

    /// Waits for all ranks.
    pub fn barrier(&self) {
        let b = self.board;
        let round = b.round.load(Ordering::SeqCst);
        if b.arrived.fetch_add(1, Ordering::SeqCst) + 1 == self.nranks as u32 {
            b.arrived.store(0, Ordering::SeqCst);
            b.round.fetch_add(1, Ordering::SeqCst);
            return;
        }
        while b.round.load(Ordering::SeqCst) == round {
            assert_eq!(b.failed.load(Ordering::SeqCst), 0, "another rank failed");
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// A word that all ranks see.
    pub fn word(&self, i: usize) -> &AtomicU64 {
        &self.board.words[i]
    }

    /// Sends a signal to a rank's process, or to one that a rank has left behind. Their parent does it, who alone knows
    /// that the number is still theirs.
    pub fn signal(&self, pid: u64, what: libc::c_int) {
        let wanted = &self.board.wanted;
        let here = || assert_eq!(self.board.failed.load(Ordering::SeqCst), 0, "another rank failed");
        while wanted.compare_exchange(0, pid << 8 | what as u64, Ordering::SeqCst, Ordering::SeqCst).is_err() {
            here();
            std::thread::sleep(Duration::from_millis(1));
        }
        while wanted.load(Ordering::SeqCst) != 0 {
            here();
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// Sends the signal that a rank wants sent, once its receiver is a child of this process.
    fn send_wanted(&self, ranks: &[(usize, Child)]) {
        let wanted = self.board.wanted.load(Ordering::SeqCst);
        let (pid, what) = ((wanted >> 8) as libc::pid_t, (wanted & 0xff) as libc::c_int);
        if wanted == 0 || !children::is_ours(pid) {
            return;
        }
        let is_rank = ranks.iter().any(|(_, rank)| rank.id() as libc::pid_t == pid);
        match what == libc::SIGKILL && !is_rank {
            true => children::end(pid),
            false => children::signal(pid, what),
        }
        self.board.wanted.store(0, Ordering::SeqCst);
    }

    /// Joins the communicator of the job.
    pub fn join(&self, contexts: i32) -> Rank {
        Rank::join_by(&self.job, self.rank, contexts, |mine| {
            for (place, bytes) in self.board.handles[self.rank].iter().zip(mine.chunks_exact(8)) {
                place.store(u64::from_ne_bytes(bytes.try_into().unwrap()), Ordering::SeqCst);
            }
            self.barrier();
            let read = |rank: usize| {
                let mut handle = [0; HANDLE_BYTES];
                for (bytes, place) in handle.chunks_exact_mut(8).zip(&self.board.handles[rank]) {
                    bytes.copy_from_slice(&place.load(Ordering::SeqCst).to_ne_bytes());
                }
                handle
            };
            let all = (0..self.nranks).map(read).collect();
            self.barrier();
            all
        })
    }
}

/// Tells the other ranks when its thread panics.
struct Alarm<'a>(&'a Board);

impl Drop for Alarm<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.failed.store(1, Ordering::SeqCst);
        }
    }
}

impl Place {
    /// Makes this process `each` ranks, one a thread; all processes do.
    pub fn threads(&self, each: usize, body: impl Fn(&Place) + Sync) {
        assert!(self.nranks * each <= RANKS);
        std::thread::scope(|scope| {
            for thread in 0..each {
                let (rank, nranks) = (self.rank * each + thread, self.nranks * each);
                let place = Self { rank, nranks, board: self.board, job: Job::apart(nranks) };
                let body = &body;
                scope.spawn(move || {
                    let _alarm = Alarm(place.board);
                    body(&place);
                });
            }
        });
    }
}

/// Runs `body` in `nranks` processes; `name` is the calling test's. Ranks in `doomed` are expected to be killed. One
/// such job at a time, as it loads the machine.
#[track_caller]
pub fn processes(name: &str, nranks: usize, doomed: &[usize], body: impl FnOnce(&Place)) {
    assert!(nranks <= RANKS);
    if let Ok(spec) = std::env::var(ENV) {
        return body(&Place::open(&spec));
    }
    let (_turn, file) = (turn::take(), Location::caller());
    let board = std::env::temp_dir().join(format!("oxygin-board-{}-{name}", std::process::id()));
    std::fs::write(&board, vec![0; std::mem::size_of::<Board>()]).unwrap();
    let spec = |rank: usize| format!("{rank} {nranks} {}", board.display());
    children::adopt();
    let spawn = |rank| (rank, again_from(name, file).env(ENV, spec(rank)).spawn().unwrap());
    let mut children: Vec<_> = (0..nranks).map(spawn).collect();
    let watch = Place::open(&spec(0));
    let end = Instant::now() + WITHIN;
    let mut failed = Vec::new();
    while !children.is_empty() {
        children.retain_mut(|(rank, child)| match child.try_wait().unwrap() {
            None => true,
            Some(status) => {
                if status.success() == doomed.contains(rank) {
                    failed.push(format!("rank {rank}: {status}"));
                    watch.board.failed.store(1, Ordering::SeqCst);
                }
                false
            }
        });
        watch.send_wanted(&children);
        if Instant::now() > end {
            for (rank, child) in &mut children {
                failed.push(format!("rank {rank} hangs"));
                let _ = child.kill();
            }
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    std::fs::remove_file(&board).unwrap();
    assert!(failed.is_empty(), "{failed:?}");
}
