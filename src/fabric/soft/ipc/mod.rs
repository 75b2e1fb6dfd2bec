//! Windows that processes of one host share. Of GPU windows: what a rank puts, the receiver's own engine fetches from
//! the sender's memory, which it has mapped, in one copy from GPU to GPU; what a rank gets, its own engine fetches
//! likewise. Of windows in host memory that the driver made for GPUs (DeepEP's engrams lie in such): what a rank gets
//! into its GPU.
//!
//! Windows are exported and mapped at registration, never later: it is collective, so there are no descriptors to keep,
//! no operation has to wait for a mapping, and every rank knows before the first operation who has mapped what, by one
//! more all-gather in which each rank says whose windows it has. None of its calls waits for a running kernel (measured
//! on an H200 with driver 580: sharing an allocation takes 0.5 ms, unmapping 0.2 ms). A window that this rank has
//! deregistered stays mapped while its owner still has it, because the owner may still send from it.
//!
//! Descriptors travel through the contact sockets, each made when a peer asks and closed when it is sent. What cannot
//! be shared goes through host memory as before; one line a peer says why.

pub mod exchange;
mod export;
mod home;
mod import;
pub mod wire;

use self::exchange::{answered, request, Answer, Answers, AT_ONCE};
use self::export::Export;
pub use self::home::HOST;
use self::import::{Fetch, Import};
use self::wire::{Datagram, Offer};
use super::gpu::{Engine, Found, Use, DRAIN_WITHIN};
use super::status::WINDOW_BITS;
use crate::config::{Config, SoftTransport};
use crate::memory::key::Key;
use crate::memory::registry::Extent;
use crate::memory::table::Table;
use crate::memory::window::Remote;
use crate::sys::sync::{Mutex, RwLock};
use crate::sys::wait::Wait;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long peers may take to send what they offered; half the time of a collective step if that is less.
const FETCH_WITHIN: Duration = Duration::from_secs(10);
/// Between two requests for the same thing: datagrams get lost where a socket is full.
const ASK_AGAIN: Duration = Duration::from_millis(50);

/// What is asked of the rank that all this is in.
pub trait Host {
    /// Its engine.
    fn engine(&self) -> &Engine;

    /// Whether `rank` is another process of this host whose contact socket is within reach.
    fn is_beside(&self, rank: u32) -> bool;

    /// Sends a datagram with at most one descriptor to `rank`'s contact socket. `false`: it did not get there.
    fn send(&self, rank: u32, body: &[u8], file: Option<BorrowedFd<'_>>) -> bool;

    /// Takes in the datagrams that came ([`Share::on_datagram`]).
    fn hear(&self);

    /// Lets everything advance. Returns whether anything moved.
    fn poll(&self) -> bool;

    /// Whether the communicator is being closed.
    fn is_stopping(&self) -> bool;

    /// Finds the way to `rank` now: others will need it.
    fn find(&self, rank: u32);

    /// Whether `rank` has failed.
    fn has_failed(&self, rank: u32) -> bool;

    /// Whether `rank` still has a window, as far as is known here.
    fn may_have_window(&self, rank: u32, window: u32) -> bool;
}

/// A window of this rank and who has mapped it.
struct Given {
    extent: Extent,
    peers: Box<[bool]>,
    /// By rank: pulls that are not acknowledged.
    unfinished: Box<[Arc<AtomicUsize>]>,
}

/// What one rank shares with the processes of its host.
pub struct Share {
    enabled: bool,
    fetch_within: Duration,
    /// One registration at a time.
    turn: Mutex<()>,
    exports: Mutex<Vec<Export>>,
    answers: Mutex<Answers<OwnedFd>>,
    /// By window number.
    given: RwLock<Table<Given>>,
    /// By rank, then that rank's number of the window: ranks need not number theirs alike.
    imports: RwLock<Box<[Table<Import>]>>,
    /// How many were mapped so far.
    mapped: AtomicU32,
    /// Windows are mapped that this rank has deregistered itself.
    has_retired: AtomicBool,
    /// Peers about which the log has a line: that windows are mapped, that one is not.
    told: Box<[(AtomicBool, AtomicBool)]>,
}

impl Share {
    /// Nothing is shared yet.
    pub fn new(config: &Config, nranks: usize) -> Self {
        Self {
            enabled: matches!(config.soft_transport, SoftTransport::Auto | SoftTransport::NoCma),
            fetch_within: FETCH_WITHIN.min(config.timeout / 2),
            turn: Mutex::default(),
            exports: Mutex::default(),
            answers: Mutex::default(),
            given: RwLock::default(),
            imports: RwLock::new((0..nranks).map(|_| Table::default()).collect()),
            mapped: AtomicU32::new(0),
            has_retired: AtomicBool::new(false),
            told: (0..nranks).map(|_| Default::default()).collect(),
        }
    }

    /// Exports a window that is being registered. Returns what the peers are to know of it. `strict`: of strict order,
    /// as programs' own windows are, DeepEP's for one, and NCCL's signals: those are often of memory that cannot be
    /// shared, and as nobody puts from them peers are not told so.
    pub fn offer(&self, engine: &Engine, window: u32, extent: Extent, strict: bool) -> Vec<u8> {
        let Some(context) = engine.context().filter(|_| self.enabled && (window as usize) < WINDOW_BITS) else {
            return Vec::new();
        };
        let (export, offer) = Export::new(&context, window, extent.base, extent.len);
        if let Offer::Not(why) = &offer {
            log::info!("window {window} at {:#x} cannot be shared with other processes: {why}", extent.base);
            if strict {
                return Vec::new();
            }
        }
        self.exports.lock().extend(export);
        offer.encode()
    }

    /// Maps what the peers on this host offered, if anything, for a window that each has at one of `remotes`, and this
    /// rank under the number `window`. Returns, for each rank, whether it is mapped now. Makes no error of anything:
    /// what is not mapped goes another way.
    pub fn fetch(&self, host: &impl Host, window: u32, remotes: &[Remote], offers: &[&[u8]]) -> Vec<u8> {
        let _turn = self.turn.lock();
        let mut mapped = vec![0; offers.len()];
        // Without a context nothing has ever been mapped.
        let Some(context) = host.engine().context().filter(|_| self.enabled) else { return mapped };
        // What had these numbers before is gone at the ranks that use them again, whether they share what has them now
        // or not.
        let numbers = (0..).zip(remotes).map(|(rank, remote)| (rank, Key(remote.rkey).number()));
        self.retire(host, window, &numbers.collect::<Vec<_>>());
        let mut fetches = self.wanted(host, remotes, offers);
        if fetches.is_empty() {
            return mapped;
        }
        let round = self.answers.lock().expect(fetches.len());
        let mut complete = Vec::new();
        let mut asked: Vec<Option<(u32, Instant)>> = vec![None; offers.len()];
        let end = Instant::now() + self.fetch_within;
        while !fetches.is_empty() {
            host.hear();
            let answers = self.answers.lock().take();
            let is_quiet = answers.is_empty();
            for answer in answers {
                let Some(i) = fetches.iter().position(|f| f.rank == answer.rank) else { continue };
                if let Err(why) = fetches[i].take(&context, answer) {
                    self.tell(fetches.swap_remove(i).rank, &why);
                }
            }
            let late = Instant::now() > end;
            for i in (0..fetches.len()).rev() {
                match fetches[i].missing() {
                    None => complete.push(fetches.swap_remove(i)),
                    Some(_) if late => self.tell(fetches.swap_remove(i).rank, "it did not send it in time"),
                    Some(first) => {
                        let rank = fetches[i].rank;
                        let due = asked[rank as usize]
                            .is_none_or(|(lap, at)| lap != first / AT_ONCE || at.elapsed() > ASK_AGAIN);
                        if due && ask(host, rank, fetches[i].window, round, first) {
                            asked[rank as usize] = Some((first / AT_ONCE, Instant::now()));
                        }
                    }
                }
            }
            if is_quiet {
                std::thread::sleep(Duration::from_micros(50));
            }
        }
        self.answers.lock().end();
        for fetch in complete {
            let (rank, number) = (fetch.rank, fetch.window);
            match fetch.map(&context, self.next_key(), window) {
                Ok(import) => {
                    self.imports.write()[rank as usize].insert(number, import);
                    mapped[rank as usize] = 1;
                    if !self.told[rank as usize].0.swap(true, Ordering::Relaxed) {
                        log::info!(
                            "rank {rank}: on this host, its windows are mapped here for the GPU: one copy a transfer"
                        );
                    }
                    host.find(rank);
                }
                Err(why) => self.tell(rank, &why),
            }
        }
        mapped
    }

    /// What there is to fetch of the offers for a window.
    fn wanted(&self, host: &impl Host, remotes: &[Remote], offers: &[&[u8]]) -> Vec<Fetch> {
        let mut wanted = Vec::new();
        for (rank, (remote, &message)) in (0..).zip(remotes.iter().zip(offers)) {
            if message.is_empty() || !host.is_beside(rank) {
                continue;
            }
            let number = Key(remote.rkey).number();
            match Offer::parse(message, remote.len).filter(|_| (number as usize) < WINDOW_BITS) {
                None => self.tell(rank, "it sent a malformed offer"),
                Some(Offer::Not(why)) => self.tell(rank, &why),
                Some(Offer::Segments { offset, sizes, site }) => {
                    let extent = Extent { base: remote.base, len: remote.len };
                    wanted.push(Fetch::new(rank, number, extent, (offset, sizes), site));
                }
            }
        }
        wanted
    }

    /// No window's key has this bit.
    fn next_key(&self) -> u32 {
        Key::of_import(self.mapped.fetch_add(1, Ordering::Relaxed)).0
    }

    /// Something is put from a window of this rank that `rank` has not mapped: the log has a line about it, unless it
    /// has one already.
    #[cold]
    pub fn tell_of_slow(&self, rank: u32, window: u32) {
        if self.enabled && !self.told[rank as usize].1.load(Ordering::Relaxed) {
            self.tell(rank, &format!("window {window} is not shared with it"));
        }
    }

    #[cold]
    fn tell(&self, rank: u32, why: &str) {
        if !self.told[rank as usize].1.swap(true, Ordering::Relaxed) {
            log::info!("rank {rank}: on this host, but GPU memory goes there through host memory: {why}");
        }
    }

    /// Learns who has mapped this rank's window: what each rank's `fetch` returned.
    pub fn settle(&self, me: u32, window: u32, extent: Extent, reports: &[&[u8]]) {
        self.exports.lock().retain(|e| e.window != window);
        let peers: Box<[bool]> = reports.iter().map(|r| r.get(me as usize) == Some(&1)).collect();
        if peers.contains(&true) {
            let unfinished = peers.iter().map(|_| Arc::default()).collect();
            self.given.write().insert(window, Given { extent, peers, unfinished });
        }
    }

    /// The window that holds a source, if `peer` has mapped it.
    #[inline]
    pub fn give(&self, peer: u32, lkey: u32, at: u64, len: u64) -> Option<(u32, Use)> {
        let window = Key(lkey).number();
        let given = self.given.read();
        let g = given.get(window)?;
        (g.peers[peer as usize] && g.extent.holds(at, len)).then(|| (window, Use::of(&g.unfinished[peer as usize])))
    }

    /// Where a peer's window is for the peer, and its first byte here, if it is mapped.
    pub fn whole(&self, rank: u32, window: u32) -> Option<(Extent, Found)> {
        self.imports.read()[rank as usize].get(window).map(Import::whole)
    }

    /// Where `len` bytes are mapped that a peer has at `addr` of its window.
    #[inline]
    pub fn find(&self, rank: u32, window: u32, addr: u64, len: u64) -> Option<Found> {
        self.imports.read()[rank as usize].get(window)?.find(addr, len)
    }

    /// A datagram from a peer that knows this rank's token.
    pub fn on_datagram(&self, host: &impl Host, rank: u32, body: &[u8], file: Option<OwnedFd>) {
        if rank as usize >= self.told.len() {
            return;
        }
        match Datagram::parse(body) {
            Some(Datagram::Ask { window, round, first, count }) => {
                let exports = self.exports.lock();
                let Some(export) = exports.iter().find(|e| e.window == window) else { return };
                for segment in answered(first, count, export.segments()) {
                    let (what, file) = export.segment(segment);
                    let body = Datagram::Segment { round, segment, what }.encode();
                    let file = file.as_ref().map(|f| f.as_fd());
                    // Whatever does not get through is asked for again.
                    if !host.send(rank, &body, file) {
                        break;
                    }
                }
            }
            Some(Datagram::Segment { round, segment, what }) => {
                self.answers.lock().hear(round, Answer { rank, segment, what, file });
            }
            None => log::info!("rank {rank} sent a malformed datagram about GPU memory; ignored"),
        }
    }

    /// This rank's window is about to go: nothing more is sent from it, and peers that copy from it finish first.
    /// Returns those that have not, within the time.
    pub fn withdraw(&self, host: &impl Host, window: u32, within: Duration) -> Vec<u32> {
        self.exports.lock().retain(|e| e.window != window);
        let given = self.given.write().remove(window);
        let (end, mut wait) = (Instant::now() + within, Wait::begin());
        while let Some(given) = given.as_ref().filter(|_| !host.is_stopping()) {
            let peers = (0..).zip(&given.unfinished).filter(|(_, n)| n.load(Ordering::Acquire) > 0);
            let peers: Vec<u32> = peers.map(|(rank, _)| rank).collect();
            if peers.is_empty() || Instant::now() > end {
                return peers;
            }
            match host.poll() {
                true => wait.begin_anew(),
                false => wait.rest(),
            }
        }
        Vec::new()
    }

    /// This rank has no window of this number now: unmaps those that peers registered together with the last one and
    /// have deregistered as well, all others that nobody needs any more, and those whose numbers, by rank, their owners
    /// are about to use again.
    pub fn retire(&self, host: &impl Host, window: u32, reused: &[(u32, u32)]) {
        let mut over = Vec::new();
        for (rank, imports) in (0..).zip(self.imports.write().iter_mut()) {
            for (id, import) in imports.iter_mut() {
                import.is_retired |= import.own == window;
                if import.is_retired {
                    self.has_retired.store(true, Ordering::SeqCst);
                }
                over.push((rank, id, import.is_retired));
            }
        }
        // Links are asked without the lock: they take it while they are locked themselves.
        over.retain(|&(rank, id, is_retired)| {
            let is_reused = reused.contains(&(rank, id));
            host.has_failed(rank) || is_reused || is_retired && !host.may_have_window(rank, id)
        });
        self.finish_failed(host, &over);
        let mut gone = Vec::new();
        {
            let mut imports = self.imports.write();
            for (rank, id, _) in over {
                let table = &mut imports[rank as usize];
                if table.get(id).is_some_and(|i| i.uses.load(Ordering::Acquire) == 0) {
                    gone.extend(table.remove(id));
                } else if reused.contains(&(rank, id)) {
                    // Still in use, against all rules: left to the process, and found by nobody any more.
                    std::mem::forget(table.remove(id));
                }
            }
        }
        if gone.is_empty() {
            return;
        }
        if host.engine().settle() {
            drop(gone);
        } else {
            // The GPU may still read: the mappings are left to the process.
            std::mem::forget(gone);
        }
    }

    /// Waits until nothing uses the windows of peers that have failed: copies from them still run to their end.
    fn finish_failed(&self, host: &impl Host, windows: &[(u32, u32, bool)]) {
        let is_used = || {
            let imports = self.imports.read();
            let mut failed = windows.iter().filter(|w| host.has_failed(w.0));
            failed.any(|&(rank, id, _)| {
                let import = imports[rank as usize].get(id);
                import.is_some_and(|i| i.uses.load(Ordering::Acquire) > 0)
            })
        };
        let (end, mut wait) = (Instant::now() + DRAIN_WITHIN, Wait::begin());
        while is_used() && !host.is_stopping() && Instant::now() < end {
            match host.poll() {
                true => wait.begin_anew(),
                false => wait.rest(),
            }
        }
    }

    /// Unmaps what this rank deregistered earlier than its owner, now that the owner has as well. Waits for nothing.
    #[inline]
    pub fn reap(&self, host: &impl Host) {
        if self.has_retired.load(Ordering::Relaxed) {
            self.reap_retired(host);
        }
    }

    #[cold]
    fn reap_retired(&self, host: &impl Host) {
        // First: a window that is retired from here on says so again, and one that was is found below.
        self.has_retired.store(false, Ordering::SeqCst);
        let mut retired = Vec::new();
        for (rank, imports) in (0..).zip(self.imports.read().iter()) {
            let windows = imports.iter().filter(|(_, i)| i.is_retired);
            retired.extend(windows.map(|(id, _)| (rank, id)));
        }
        if !retired.is_empty() {
            self.has_retired.store(true, Ordering::SeqCst);
        }
        retired.retain(|&(rank, id)| {
            // After its end copies may be in flight that nobody counts any more.
            !host.has_failed(rank) && !host.may_have_window(rank, id)
        });
        let mut gone = Vec::new();
        if !retired.is_empty() {
            let mut imports = self.imports.write();
            for (rank, id) in retired {
                let table = &mut imports[rank as usize];
                let may_go = |i: &Import| i.is_retired && i.uses.load(Ordering::Acquire) == 0;
                if table.get(id).is_some_and(may_go) {
                    gone.extend(table.remove(id));
                }
            }
        }
        // Whoever polls does not wait for the driver.
        if !gone.is_empty() {
            host.engine().defer(move || drop(gone));
        }
    }

    /// Unmaps everything. `idle`: the GPU is done with it; otherwise it is left to the process.
    pub fn close(&self, idle: bool) {
        self.exports.lock().clear();
        *self.given.write() = Table::default();
        for imports in self.imports.write().iter_mut() {
            let gone = std::mem::take(imports);
            if !idle {
                std::mem::forget(gone);
            }
        }
    }
}

fn ask(host: &impl Host, rank: u32, window: u32, round: u32, first: u32) -> bool {
    let (first, count) = request(first);
    host.send(rank, &Datagram::Ask { window, round, first, count }.encode(), None)
}
