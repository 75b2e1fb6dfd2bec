//! One rank's way of driving a communicator as NCCL's proxy thread would, with deadlines.

use super::args::{Args, Op};
use super::pattern;
use super::queue::Queue;
use crate::plugin::{code_name, Put, MISSING};
use crate::ranks::Session;
use nccl_plugin_api::NcclResult;
use std::cell::Cell;
use std::error::Error;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

/// Anything that ends a measurement.
pub type Fault = Box<dyn Error>;

/// How many fruitless looks pass between two looks at the clock.
const LOOKS: u32 = 2048;

/// A communicator with the layout that measurements use.
///
/// Data window: `slot` bytes to send from, then `slot` bytes for what each rank sends here. Signal window: a word a
/// rank for ping-pong, a word a rank for answers, then a word a (context, rank) for streams.
pub struct Lane {
    /// The communicator.
    pub session: Session,
    /// Contexts.
    pub contexts: usize,
    /// Bytes of each slot.
    pub slot: usize,
    /// Call test and progress while waiting.
    pub progress: bool,
    /// Sleep while only receiving a stream.
    pub sleeps: bool,
    /// Give the core away while waiting: there are more ranks than cores.
    pub yields: bool,
    /// How long to wait; the time of a whole round is in it, since a rank that only receives sees no part of it.
    pub patience: Duration,
    /// Signals are strong.
    pub strong: bool,
    /// The queue that operations go into instead of calls.
    pub queue: Option<Queue>,
    /// What each signal word here should be in the end.
    expected: Vec<Cell<u64>>,
}

/// Fruitless looks, and when they began.
#[derive(Default)]
pub struct Wait {
    looks: u32,
    since: Option<Instant>,
}

impl Lane {
    /// Drives `session`, whose windows have the sizes that [`Lane::data_bytes`] and [`Lane::signal_words`] say.
    pub fn new(session: Session, contexts: usize, slot: usize, args: &Args) -> Self {
        let words = Self::signal_words(session.nranks(), contexts);
        Self {
            session,
            contexts,
            slot,
            progress: !args.no_progress,
            sleeps: args.receiver_sleeps,
            yields: false,
            patience: args.patience(),
            strong: !args.weak,
            queue: None,
            expected: vec![Cell::new(0); words],
        }
    }

    /// Bytes of the data window for `nranks` ranks.
    pub fn data_bytes(nranks: u32, slot: usize) -> usize {
        slot * (nranks as usize + 1)
    }

    /// Words of the signal window.
    pub fn signal_words(nranks: u32, contexts: usize) -> usize {
        nranks as usize * (2 + contexts)
    }

    fn nranks(&self) -> usize {
        self.session.nranks() as usize
    }

    /// The word that `rank` pings here.
    pub fn ping_word(&self, rank: u32) -> usize {
        rank as usize
    }

    /// The word in which `rank` answers here.
    pub fn answer_word(&self, rank: u32) -> usize {
        self.nranks() + rank as usize
    }

    /// The word that the stream of `rank` on `context` adds to here.
    pub fn stream_word(&self, context: usize, rank: u32) -> usize {
        self.nranks() * (2 + context) + rank as usize
    }

    /// Offset of the bytes that `rank` sends here.
    pub fn inbox(&self, rank: u32) -> usize {
        self.slot * (1 + rank as usize)
    }

    /// Names a failed call.
    #[cold]
    pub fn failed(&self, call: &str, peer: u32, code: NcclResult) -> Fault {
        if code == MISSING {
            return format!("{call} is NULL in table {}", self.session.table.kind()).into();
        }
        let said = crate::plugin::log::warnings_since(0);
        let said = said.last().map_or("the plugin logged no warning".into(), |l| format!("last warning: {}", l.text));
        format!("{call} towards rank {peer} returned {} ({}); {said}", code.0, code_name(code)).into()
    }

    /// A put of `size` bytes from byte `at` of the outbox to byte `at` of this rank's inbox at `peer`.
    #[inline]
    pub fn put_at(&self, context: usize, peer: u32, at: usize, size: usize) -> Put {
        let inbox = self.inbox(self.session.rank()) + at;
        self.session.put_of(context as i32, peer, at as u64, inbox as u64, size)
    }

    #[allow(clippy::too_many_arguments)]
    /// Starts one operation; `word` is the signal it adds one to.
    #[inline]
    pub fn start(
        &self,
        op: Op,
        context: usize,
        peer: u32,
        at: usize,
        size: usize,
        word: usize,
        more: bool,
    ) -> Result<*mut c_void, Fault> {
        let s = &self.session;
        let mut request = null_mut();
        // SAFETY: (for all) the session is up, its windows stay registered as long as it, offsets are inside (slot).
        let (call, code) = match op {
            Op::Put => {
                let put = self.put_at(context, peer, at, size).more(more);
                // SAFETY: as said above.
                ("iput", unsafe { s.table.put(&s.target, &put, &mut request) })
            }
            Op::PutSignal => {
                let put = self.put_at(context, peer, at, size).more(more);
                let mut signal = s.signal_of(word, 1);
                signal.strong = self.strong;
                // SAFETY: as said above.
                ("iputSignal", unsafe { s.table.put_signal(&s.target, &put, &signal, &mut request) })
            }
            Op::Signal => {
                let mut put = self.put_at(context, peer, 0, 0).more(more);
                (put.src, put.dst, put.dst_off) = (null_mut(), null_mut(), 0);
                let mut signal = s.signal_of(word, 1);
                signal.strong = self.strong;
                // SAFETY: as said above; without bytes there are no windows (NCCL does it so).
                ("iputSignal", unsafe { s.table.put_signal(&s.target, &put, &signal, &mut request) })
            }
            Op::Get => {
                let mut get = s.get_of(context as i32, peer, at as u64, (self.inbox(peer) + at) as u64, size);
                get.opt_flags = u32::from(more);
                // SAFETY: as said above.
                ("iget", unsafe { s.table.get(&s.target, &get, &mut request) })
            }
        };
        match code {
            NcclResult::SUCCESS => Ok(request),
            code => Err(self.failed(call, peer, code)),
        }
    }

    /// A strong signal alone, whatever the measurement uses: what came before it is there when it is.
    pub fn start_strong_signal(&self, context: usize, peer: u32, word: usize) -> Result<*mut c_void, Fault> {
        let s = &self.session;
        let mut put = self.put_at(context, peer, 0, 0);
        (put.src, put.dst, put.dst_off) = (null_mut(), null_mut(), 0);
        let mut request = null_mut();
        // SAFETY: as in `start`.
        match unsafe { s.table.put_signal(&s.target, &put, &s.signal_of(word, 1), &mut request) } {
            NcclResult::SUCCESS => Ok(request),
            code => Err(self.failed("iputSignal", peer, code)),
        }
    }

    /// Starts a flush; the request is NULL if there is nothing to wait for.
    pub fn start_flush(&self, context: usize, peer: u32) -> Result<*mut c_void, Fault> {
        let s = &self.session;
        let mut request = null_mut();
        // SAFETY: as in `start`.
        match unsafe { s.table.flush(&s.target, context as i32, s.data_mh, peer, &mut request) } {
            NcclResult::SUCCESS => Ok(request),
            code => Err(self.failed("iflush", peer, code)),
        }
    }

    /// Whether a request (NULL: yes) is done.
    #[inline]
    pub fn done(&self, request: *mut c_void, peer: u32) -> Result<bool, Fault> {
        if request.is_null() {
            return Ok(true);
        }
        let mut done = 0;
        // SAFETY: as in `start`; the request is one of this session that has not been done yet.
        match unsafe { self.session.table.test(&self.session.target, request, &mut done) } {
            NcclResult::SUCCESS => Ok(done != 0),
            code => Err(self.failed("test", peer, code)),
        }
    }

    /// Calls progress.
    #[inline]
    pub fn advance(&self) -> Result<(), Fault> {
        match self.session.progress() {
            NcclResult::SUCCESS => Ok(()),
            code => Err(self.failed("progress", self.session.rank(), code)),
        }
    }

    /// Counts a fruitless look; an error, naming what is waited for, once patience is over.
    #[inline]
    pub fn pause(&self, wait: &mut Wait, what: impl FnOnce() -> String) -> Result<(), Fault> {
        // No PAUSE: it takes up to 140 cycles, and NCCL's proxy thread has none either.
        wait.looks += 1;
        if wait.looks % LOOKS != 0 && !(self.yields && wait.looks % 16 == 0) {
            return Ok(());
        }
        self.pause_slowly(wait, what)
    }

    #[cold]
    fn pause_slowly(&self, wait: &mut Wait, what: impl FnOnce() -> String) -> Result<(), Fault> {
        if self.yields {
            std::thread::yield_now();
        }
        let since = *wait.since.get_or_insert_with(Instant::now);
        if since.elapsed() > self.patience {
            let error = match self.session.has_error() {
                Ok(true) => "; queryLastError says that something failed",
                Ok(false) => "; queryLastError says that nothing failed",
                Err(_) => "; queryLastError failed",
            };
            return Err(format!("nothing for {:?}: {}{error}", self.patience, what()).into());
        }
        Ok(())
    }

    /// Waits until a request is done, driving progress.
    pub fn finish(&self, request: *mut c_void, peer: u32, what: &str) -> Result<(), Fault> {
        let mut wait = Wait::default();
        while !self.done(request, peer)? {
            self.advance()?;
            self.pause(&mut wait, || format!("request of {what} towards rank {peer} is not done"))?;
        }
        Ok(())
    }

    /// Waits until `arrived` holds, calling test on the own request and progress meanwhile, unless told to look at
    /// memory only. Returns whether the request is known to be done.
    #[inline]
    pub fn until(
        &self,
        request: *mut c_void,
        peer: u32,
        arrived: impl Fn() -> bool,
        what: impl Fn() -> String,
    ) -> Result<bool, Fault> {
        let mut wait = Wait::default();
        let mut done = request.is_null();
        while !arrived() {
            if self.progress {
                if !done {
                    done = self.done(request, peer)?;
                }
                self.advance()?;
            }
            self.pause(&mut wait, &what)?;
        }
        Ok(done)
    }

    /// Says that `more` is to be added to a signal word here, and returns what it will be then. Words only ever grow,
    /// and only by what peers add: a NIC's additions are not atomic with stores of the CPU.
    pub fn expect(&self, word: usize, more: u64) -> u64 {
        let total = self.expected[word].get() + more;
        self.expected[word].set(total);
        total
    }

    /// Waits until the signal word reaches `value`.
    pub fn await_signal(&self, word: usize, value: u64, peer: u32) -> Result<(), Fault> {
        let now = || self.session.signals.signal(word);
        let what = || format!("signal word {word} is {} and should reach {value}, from rank {peer}", now());
        self.until(null_mut(), peer, || now() >= value, what).map(drop)
    }

    /// Whether the signal word is what all expectations add up to.
    pub fn verify_signal(&self, word: usize, peer: u32) -> Result<(), Fault> {
        match (self.session.signals.signal(word), self.expected[word].get()) {
            (is, should) if is == should => Ok(()),
            (is, should) => {
                Err(format!("wrong signal: word {word}, from rank {peer}, is {is} and should be {should}").into())
            }
        }
    }

    /// Both of a pair: each sends a strong signal on every context and waits for the other's, so that everything sent
    /// before is there.
    pub fn settle(&self, peer: u32) -> Result<(), Fault> {
        let word = self.answer_word(self.session.rank());
        let requests: Vec<_> =
            (0..self.contexts).map(|c| self.start_strong_signal(c, peer, word)).collect::<Result<_, _>>()?;
        let mine = self.answer_word(peer);
        self.await_signal(mine, self.expect(mine, self.contexts as u64), peer)?;
        requests.into_iter().try_for_each(|r| self.finish(r, peer, "the closing signal"))?;
        self.verify_signal(mine, peer)
    }

    /// Fills the outbox and clears the inbox of `peer`, `bytes` each.
    pub fn prepare(&self, peer: u32, bytes: usize, epoch: u64) {
        // SAFETY: between measurements nobody touches outboxes or inboxes.
        unsafe {
            pattern::fill(self.session.data.bytes_mut(0, bytes), pattern::seed(self.session.rank(), epoch));
            self.session.data.bytes_mut(self.inbox(peer), bytes).fill(0);
        }
    }

    /// Compares `len` bytes from `at` on of what came from `peer` with what it sent.
    pub fn verify(&self, peer: u32, at: usize, len: usize, epoch: u64) -> Result<(), Fault> {
        // SAFETY: as in `prepare`: the transfer is over.
        let got = unsafe { self.session.data.bytes(self.inbox(peer) + at, len) };
        match pattern::compare(got, at, pattern::seed(peer, epoch)) {
            None => Ok(()),
            Some((first, wrong)) => Err(format!(
                "wrong data: {wrong} of {len} bytes from rank {peer} differ, the first at byte {first} (it is {:#04x})",
                got[first - at]
            )
            .into()),
        }
    }
}
