//! Progress: what a poll does, who polls, and how often.

use super::domain::Domain;
use super::gpu::{self, Engine};
use super::hello::SoftHello;
use super::ipc::Host;
use super::link::Link;
use super::links::Links;
use super::peer::contact::Event;
use super::receive::Receiver;
use crate::error::Result;
use crate::sys::sync::Mutex;
use crate::sys::wait::Wait;
use std::ops::Deref;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Between two looks at whether peers on this host live.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Polls between two looks at the clock.
const CLOCK_EVERY: u64 = 256;

/// Polls without a find before polling slows down: some 20 µs, longer than any answer that is already on its way.
const IDLE_POLLS: u32 = 1000;
/// How much it slows down then; a PAUSE is up to 140 cycles.
const IDLE_PAUSES: u32 = 8;

/// Of a caller's polls while the helper thread works beside it, one in so many receives: should that thread not get its
/// core, all goes on all the same. More often, and the two get into each other's way at every socket and at the GPU
/// engine's lock.
const BESIDE_EVERY: u64 = 32;
/// Operations for this rank's GPU that arrive from other processes in a millisecond, from which on the helper thread
/// works beside the callers: more than a ping-pong brings, which one thread does sooner, and fewer than barriers or
/// floods do.
const THICK: u64 = 100;
/// Cores that each rank of this host must have for its helper thread to work beside its callers: the application's
/// thread and NCCL's have theirs.
const CORES_BESIDE: usize = 3;

/// One communicator's moving parts on this rank, and what moves them.
pub struct Progress {
    links: Links,
    receiver: Mutex<Receiver>,
    polls: AtomicU64,
    /// The helper thread works beside the callers.
    is_beside: AtomicBool,
    /// Arrivals in a millisecond that call for it; `None`: it never comes.
    thick: Option<u64>,
    looked: Mutex<Instant>,
    attached: AtomicUsize,
}

impl Deref for Progress {
    type Target = Links;

    #[inline(always)]
    fn deref(&self) -> &Links {
        &self.links
    }
}

/// Whether this machine has cores for one more busy thread of each rank on it.
fn has_cores_beside(hellos: &[SoftHello], rank: u32) -> bool {
    let own = &hellos[rank as usize];
    let here = hellos.iter().filter(|h| h.is_on_host_of(own)).count();
    std::thread::available_parallelism().is_ok_and(|cores| cores.get() >= CORES_BESIDE * here.max(1))
}

impl Progress {
    /// Nothing moves yet.
    pub fn new(domain: Domain) -> Result<Self> {
        let thick = match domain.config.gpu_issue.helper {
            0 => None,
            1 => has_cores_beside(&domain.hellos, domain.world.rank).then_some(THICK),
            _ => Some(0),
        };
        let receiver = Mutex::new(Receiver::new(&domain.inbox, domain.hellos.len()));
        Ok(Self {
            links: Links::new(domain)?,
            receiver,
            polls: AtomicU64::new(0),
            is_beside: AtomicBool::new(false),
            thick,
            looked: Mutex::new(Instant::now()),
            attached: AtomicUsize::new(0),
        })
    }

    /// How often anybody polled: the helper thread stays out of the way while this grows.
    pub fn polls(&self) -> u64 {
        self.polls.load(Ordering::Relaxed)
    }

    /// Lets everything advance: what arrived, what waits, the other hosts. Returns whether anything moved.
    #[inline]
    pub fn poll(&self) -> bool {
        let n = self.polls.fetch_add(1, Ordering::SeqCst) + 1;
        if self.is_beside.load(Ordering::SeqCst) && n % BESIDE_EVERY != 0 {
            return self.poll_beside();
        }
        let mut moved = self.step();
        if self.is_tcp_active() {
            moved |= self.tcp().progress();
        }
        // Last: this may have begun what somebody has to finish, and this may have been the caller's last poll.
        // Either we see that the helper thread goes to sleep, or it sees that there was a poll.
        self.stir();
        if n % CLOCK_EVERY == 0 {
            self.look_at_peers();
        }
        if moved {
            self.idle.store(0, Ordering::Relaxed);
        } else {
            self.rest();
        }
        moved
    }

    /// A caller's poll while the helper thread is at what arrives: looks after what the caller's own puts wait for.
    #[cold]
    #[inline(never)]
    fn poll_beside(&self) -> bool {
        self.is_tcp_active() && self.tcp().advance_staged()
    }

    /// Leaves the core to its sibling hyperthread once polling has found nothing for a while: that one may be copying.
    #[inline]
    fn rest(&self) {
        let idle = self.idle.load(Ordering::Relaxed).saturating_add(1);
        self.idle.store(idle, Ordering::Relaxed);
        if idle > IDLE_POLLS {
            for _ in 0..IDLE_PAUSES {
                std::hint::spin_loop();
            }
        }
    }

    /// Whether so many arrivals in so long a time call the helper thread to work beside the callers.
    pub fn is_thick(&self, arrivals: u64, time: Duration) -> bool {
        self.thick
            .is_some_and(|thick| arrivals > 0 && u128::from(arrivals) * 1000 >= u128::from(thick) * time.as_micros())
    }

    /// The helper thread begins to work beside the callers, or ends it. What they left to it is found by the first
    /// `step` after the end: they had counted a poll before they looked.
    pub fn set_beside(&self, on: bool) {
        self.is_beside.store(on, Ordering::SeqCst);
        if on {
            self.engine.note_beside();
        }
    }

    /// The part of polling that makes no system call.
    #[inline]
    pub fn step(&self) -> bool {
        let mut moved = match self.receiver.try_lock() {
            Some(mut receiver) => receiver.drain(self),
            None => false,
        };
        if self.received.is_busy() {
            moved |= self.received.advance(&self.engine, &self.links);
        }
        for (at, word) in self.links.pending.iter().enumerate() {
            if word.load(Ordering::Relaxed) != 0 {
                moved |= self.advance_links(at, word);
            }
        }
        moved
    }

    fn advance_links(&self, at: usize, word: &AtomicU64) -> bool {
        let mut moved = false;
        let mut bits = word.load(Ordering::Relaxed);
        while bits != 0 {
            let bit = bits.trailing_zeros();
            bits &= bits - 1;
            let link = self.link((at * 64) as u32 + bit);
            moved |= link.advance(self);
            if !link.has_backlog() {
                word.fetch_and(!(1 << bit), Ordering::SeqCst);
                // Whoever queued between the two looks has set the bit before or finds it set again here.
                if link.has_backlog() {
                    word.fetch_or(1 << bit, Ordering::SeqCst);
                }
            }
        }
        moved
    }

    /// Looks at the peers on this host, at most every `LOOK_EVERY`.
    #[cold]
    pub fn look_at_peers(&self) {
        {
            let Some(mut looked) = self.looked.try_lock() else { return };
            if looked.elapsed() < LOOK_EVERY {
                return;
            }
            *looked = Instant::now();
        }
        if self.attached.load(Ordering::Relaxed) > 0 {
            self.wake_left();
            self.links().iter().for_each(|link| link.look(|| self.has_read(link.peer)));
        }
        self.share.reap(self);
    }

    /// Whether all that a rank has written for this one is read, as far as this thread can say.
    fn has_read(&self, sender: u32) -> bool {
        self.receiver.try_lock().is_some_and(|receiver| receiver.has_read(sender))
    }

    /// Answers what came to the contact socket. Called by the helper thread, and by who waits for an answer.
    pub fn answer_contacts(&self) {
        while let Some(event) = self.contact.receive() {
            match event {
                Event::Asked { rank, status } => {
                    let Some(h) = self.hellos.get(rank as usize) else { continue };
                    // From here on it may copy, and this rank must be able to see that.
                    if self.neighbours.meet(rank, status, &h.token).is_some() {
                        let files = [self.inbox.fd(), self.status.fd()];
                        self.contact.answer(&h.contact, &h.token, self.world.rank, files);
                    }
                }
                Event::Answered { rank, inbox, status, pid } => {
                    let Some(h) = self.hellos.get(rank as usize) else { continue };
                    if let Some(status) = self.neighbours.meet(rank, status, &h.token) {
                        self.attached.fetch_add(1, Ordering::Relaxed);
                        self.link(rank).attach(self, inbox, status.clone(), pid);
                    }
                }
                Event::Sharing { rank, body, file } => self.share.on_datagram(self, rank, &body, file),
                // The helper thread still sleeps if another one reads this.
                Event::Woken => self.stir(),
            }
        }
    }

    /// Applies what had arrived for this rank when this was called, from all peers, or what of it can be by `end`. Of
    /// what had not, some may be applied, too. The caller has no lock.
    pub fn apply_arrived(&self, end: Instant) {
        let mut wait = Wait::begin();
        let mut goes_on = |moved: bool| {
            match moved {
                true => wait.begin_anew(),
                false => wait.rest(),
            }
            !self.is_stopping() && Instant::now() < end
        };
        let (mut rings, mut connections) = (None, self.tcp().connections());
        loop {
            if let (None, Some(mut receiver)) = (&rings, self.receiver.try_lock()) {
                rings = Some(receiver.marks(&self.inbox));
            }
            let moved = self.step() | self.tcp().apply_arrived(&mut connections);
            // Who has the receiver applies what the ring has.
            let receiver = self.receiver.try_lock();
            let is_passed = receiver.zip(rings.as_ref()).is_some_and(|(r, marks)| r.has_passed(marks));
            if is_passed && connections.is_empty() {
                break;
            }
            if !goes_on(moved) {
                return;
            }
        }
        // What of it is for a GPU, or behind that, is with the engine.
        let mut lanes = self.received.marks();
        loop {
            lanes.retain(|(lane, seq)| matches!(lane.test(*seq), Ok(false)));
            if lanes.is_empty() {
                return;
            }
            let moved = self.step() | self.tcp().progress();
            if !goes_on(moved) {
                return;
            }
        }
    }

    /// Whether the receiver has nothing to read, looked at after `set_sleeping`.
    pub fn cool_down(&self) -> bool {
        self.receiver.lock().cool_down(self)
    }

    /// Sends what peers wait for and only has to be sent, before this rank goes.
    pub fn flush(&self, within: Duration) {
        let (end, mut wait) = (Instant::now() + within, Wait::begin());
        while (self.received.is_busy() || self.links().iter().any(Link::owes)) && Instant::now() < end {
            match self.step() {
                true => wait.begin_anew(),
                false => wait.rest(),
            }
        }
    }
}

#[cfg(test)]
impl Progress {
    /// Reads nothing meanwhile, as a thread that has lost its core at that.
    pub fn hold_receiver(&self) -> impl std::ops::DerefMut<Target = Receiver> + '_ {
        self.receiver.lock()
    }
}

impl Host for Progress {
    fn engine(&self) -> &Engine {
        &self.engine
    }

    fn is_beside(&self, rank: u32) -> bool {
        let hello = &self.hellos[rank as usize];
        let is_apart = rank != self.world.rank && gpu::of_token(&hello.token).is_none();
        is_apart && self.contact.reaches(&hello.contact)
    }

    fn send(&self, rank: u32, body: &[u8], file: Option<BorrowedFd<'_>>) -> bool {
        let Some(hello) = self.hellos.get(rank as usize) else { return false };
        matches!(self.contact.share(&hello.contact, &hello.token, self.world.rank, body, file), Ok(true))
    }

    fn hear(&self) {
        self.answer_contacts();
    }

    fn poll(&self) -> bool {
        self.poll()
    }

    fn is_stopping(&self) -> bool {
        self.links.is_stopping()
    }

    fn find(&self, rank: u32) {
        self.link(rank).find(self);
    }

    fn has_failed(&self, rank: u32) -> bool {
        self.link(rank).health.has_failed()
    }

    fn may_have_window(&self, rank: u32, window: u32) -> bool {
        self.link(rank).may_have_window(window)
    }
}
