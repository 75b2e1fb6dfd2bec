//! One queue of descriptors: device code of one context writes it for one peer.

use super::meaning::{meaning, Meaning, Terms};
use super::slots::{count, give_back, has_arrived, Slots};
use crate::fabric::lanes::{Format, LaneView, Named, WindowView};
use crate::proxy::credits::{CreditWord, Owed};
use crate::proxy::ops::Ops;
use crate::proxy::ring::{Ends, Entry, Finish, Head, Ring, Stopped};
use crate::rma::check::{inside, Live};
use crate::rma::op::{Op, Put, Signal};
use nccl_plugin_api::descriptor::{Descriptor, Form, OP_COUNTER, OP_PUT, OP_SIGNAL_ADD, OP_SIGNAL_INC, WORDS};
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::Arc;

/// So many descriptors behind the one that is read are brought nearer meanwhile.
const AHEAD: u32 = 8;

/// Where a queue and what belongs to it lie, as this process sees it.
#[derive(Clone, Copy)]
pub struct QueueAddresses {
    /// Slot 0.
    pub slots: NonNull<AtomicU64>,
    /// Its address for device code.
    pub device_slots: u64,
    /// Slots are in memory that may be brought to the GPU.
    pub is_managed: bool,
    /// Slots, a power of two.
    pub size: u32,
    /// Complete descriptors of this peer, as far as device code does not look for them at `credits`.
    pub ci: NonNull<AtomicU32>,
    /// The same in GPU memory.
    pub credits: Option<CreditWord>,
    /// The context's counters.
    pub counters: NonNull<AtomicU64>,
}

/// A window that descriptors of a queue have named: what looking it up would bring.
#[derive(Clone, Copy, Default)]
struct Known {
    /// 0: none.
    handle: u64,
    base: u64,
    len: u64,
    /// At the queue's peer.
    remote_base: u64,
    remote_len: u64,
    lkey: u32,
    rkey: u32,
}

/// The last usual descriptor, as far as the next one is likely to repeat it: everything but the two offsets. Programs
/// write long rows of those, and what was judged once holds for all that are alike.
struct Pattern {
    /// Its words; those of the offsets mean nothing.
    words: [u64; WORDS],
    /// What it asked for, at offsets 0.
    put: Put,
    /// The greatest offsets at which its size stays inside both windows.
    most: [u64; 2],
    /// What counts of the offsets: nothing where there is no data.
    mask: u64,
}

impl Pattern {
    /// None yet: neither an empty word nor a valid one is 2.
    const NONE: Self = Self {
        words: [2; WORDS],
        put: Put { local: 0, lkey: 0, rkey: 0, remote: 0, len: 0, signal: None, more: false },
        most: [0; 2],
        mask: 0,
    };
}

/// Of so many descriptors it is known whether what came before them is in place: the others are taken to be. Indices
/// are compared modulo 2^32.
const PLACED_MOST: u32 = 1 << 30;

/// The queue. Its memory is the owner's affair: see [`Queue::new`].
pub struct Queue {
    places: QueueAddresses,
    slots: Slots,
    terms: Arc<Terms>,
    peer: u32,
    /// The windows of the last descriptors: most programs name two.
    known: [Known; 2],
    /// Handles of the windows that descriptors have named.
    named: Named<u64>,
    pattern: Pattern,
    /// `terms.ended` when they were learned.
    ended: u64,
    /// The context's signals at the peer: how many, where, and their key. Their window ends after the queue.
    signals: u32,
    signals_at: u64,
    signals_key: u32,
    /// Descriptors taken off, modulo 2^32, as device code counts them.
    next: u32,
    /// Descriptors given back.
    credited: u32,
    /// What came before this one is in place at the peer, or changes nothing there.
    placed: u32,
    /// Nothing is carried out any more.
    is_stopped: bool,
    /// What device code has not been told of these, where it looks for them in GPU memory.
    owed: Option<Owed>,
}

// SAFETY: the places are shared with device code through atomics; one thread at a time uses the queue.
unsafe impl Send for Queue {}

impl Queue {
    /// # Safety
    /// The places are valid, the slots cleared, and counters as many as `terms` says, as long as the queue lives.
    pub unsafe fn new(places: QueueAddresses, terms: Arc<Terms>, peer: u32) -> Self {
        // SAFETY: valid (caller). Where device code starts to count is where the consumer's index stands.
        let start = unsafe { places.ci.as_ref() }.load(Ordering::Relaxed);
        // SAFETY: as above.
        let slots = unsafe { Slots::new(places.slots, places.size, terms.form.bytes() / 8) };
        let ended = terms.ended.load(Ordering::Acquire);
        let mut made = Self {
            places,
            slots,
            peer,
            known: Default::default(),
            named: Named::default(),
            pattern: Pattern::NONE,
            ended,
            signals: 0,
            signals_at: 0,
            signals_key: 0,
            next: start,
            credited: start,
            placed: start,
            is_stopped: false,
            // Of the fourth, eighth and sixteenth part, what measured best.
            owed: places.credits.map(|at| Owed::new(at, places.size / 4)),
            terms,
        };
        if let Some(window) = made.look_up(made.terms.signal_window as u64) {
            made.signals = made.terms.signals;
            made.signals_at = window.remote_base + 8 * u64::from(made.terms.context) * u64::from(made.signals);
            made.signals_key = window.rkey;
        }
        made
    }

    /// What is to be known of a window; `None`: it is none of the communicator's.
    fn look_up(&self, handle: u64) -> Option<Known> {
        // SAFETY: who drains a set's queues keeps the set; the peer is a rank.
        let (here, there) = unsafe { Live(self.terms.target.coll).ends(handle as usize as *mut c_void, self.peer) }?;
        Some(Known {
            handle,
            base: here.base,
            len: here.len,
            remote_base: there.base,
            remote_len: there.len,
            lkey: here.lkey,
            rkey: there.rkey,
        })
    }

    #[inline(always)]
    fn known(&self, handle: u64) -> Option<&Known> {
        let [first, second] = &self.known;
        match handle {
            _ if first.handle == handle => Some(first),
            _ if second.handle == handle => Some(second),
            _ => None,
        }
    }

    /// Remembers the windows of a descriptor that was taken.
    #[cold]
    fn learn(&mut self, d: &Descriptor) {
        for handle in [d.first_handle(), d.second_handle()] {
            if self.known(handle).is_none() {
                if let Some(known) = self.look_up(handle) {
                    self.known = [known, self.known[0]];
                    self.named.note(handle);
                }
            }
        }
    }

    /// What a kernel is told of a window that descriptors have named.
    fn window_view(&self, handle: u64) -> Option<WindowView> {
        let Known { base, len, remote_base, remote_len, lkey, rkey, .. } = self.look_up(handle)?;
        Some(WindowView { handle, lkey, base, len, rkey, remote_base, remote_len })
    }

    /// The usual descriptor, by what is known already: a put from one window to another, a signal behind it, or that
    /// alone. `false`: it is another one, or takes more to judge. `WIDE` is the 128-byte form.
    #[inline(never)]
    fn usual<const WIDE: bool>(&mut self, words: &[u64; WORDS], ops: &mut Ops) -> bool {
        const SIGNALS: u16 = OP_SIGNAL_INC | OP_SIGNAL_ADD;
        let d = Descriptor { words: *words, form: if WIDE { Form::Bytes128 } else { Form::Bytes64 } };
        let (op, len) = (d.op(), d.size());
        if op & !SIGNALS != OP_PUT || op & SIGNALS == SIGNALS || !d.form.has_version(d.version()) {
            return false;
        }
        let signal = match op & SIGNALS {
            0 => None,
            _ if d.signal() >= self.signals => return false,
            kind => Some(Signal {
                remote: self.signals_at + 8 * u64::from(d.signal()),
                rkey: self.signals_key,
                value: if kind == OP_SIGNAL_ADD { d.signal_value() } else { 1 },
                strong: d.is_strong(),
            }),
        };
        let (mut local, mut lkey, mut remote, mut rkey) = (0, 0, 0, 0);
        let (mut at, mut most) = ([0; 2], [0; 2]);
        if len != 0 {
            let (Some(src), Some(dst)) = (self.known(d.first_handle()), self.known(d.second_handle())) else {
                return false;
            };
            let (from, to) = (d.first_offset(), d.second_offset());
            if !inside(from, len, src.len) || !inside(to, len, dst.remote_len) {
                return false;
            }
            (local, lkey, remote, rkey) = (src.base, src.lkey, dst.remote_base, dst.rkey);
            (at, most) = ([from, to], [src.len - len, dst.remote_len - len]);
        } else if signal.is_none() {
            return false;
        }
        let put = Put { local, lkey, rkey, remote, len, signal, more: false };
        let mask = if len != 0 { u64::MAX } else { 0 };
        self.pattern = Pattern { words: *words, put, most, mask };
        ops.push(Op::Put(Put { local: local + at[0], remote: remote + at[1], ..put }));
        true
    }

    /// A descriptor that differs from the last usual one in its offsets alone.
    #[inline(always)]
    fn repeated(&self, index: u32) -> Option<Put> {
        let pattern = &self.pattern;
        let offsets = self.slots.repeated(index, &pattern.words)?;
        let [from, to] = offsets.map(|offset| offset & pattern.mask);
        if from > pattern.most[0] || to > pattern.most[1] {
            return None;
        }
        Some(Put { local: pattern.put.local + from, remote: pattern.put.remote + to, ..pattern.put })
    }
}

/// The first word of the next slot: its lowest bit shows that a descriptor has begun to arrive.
pub struct FirstWord(*const AtomicU64);

impl Head for FirstWord {
    #[inline(always)]
    unsafe fn is_there(&self) -> bool {
        // SAFETY: a word of the queue's memory, which is still there (caller).
        has_arrived(unsafe { &*self.0 })
    }
}

impl Ring for Queue {
    type Head = FirstWord;

    const ENDS: Ends = Ends::Context;

    #[inline(always)]
    fn head(&self) -> FirstWord {
        FirstWord(self.slots.first_word(self.next))
    }

    fn capacity(&self) -> u32 {
        self.slots.size()
    }

    #[inline(always)]
    fn begin(&mut self) {
        let ended = self.terms.ended.load(Ordering::Acquire);
        if ended != self.ended {
            self.ended = ended;
            self.known = Default::default();
            self.pattern = Pattern::NONE;
        }
    }

    #[inline(always)]
    fn read(&mut self, nth: u32, ops: &mut Ops) -> Entry {
        let index = self.next.wrapping_add(nth);
        // Not for a lone one: whoever takes turns with a peer has nothing behind it.
        if nth > 0 {
            self.slots.prefetch(index.wrapping_add(AHEAD));
        }
        if let Some(put) = self.repeated(index) {
            ops.push(Op::Put(put));
            return Entry::Op(Finish::NONE);
        }
        self.read_new(nth, ops)
    }

    fn rung(&mut self) -> u32 {
        let is_there = |&nth: &u32| self.slots.words(self.next.wrapping_add(nth)).is_some();
        (0..self.slots.size()).take_while(is_there).count() as u32
    }

    fn rung_at_most(&mut self) -> u32 {
        let is_there = |&nth: &u32| has_arrived(self.slots.first_word(self.next.wrapping_add(nth)));
        (0..self.slots.size()).rev().find(is_there).map_or(0, |last| last + 1)
    }

    #[inline(always)]
    fn take(&mut self, n: u32) {
        (0..n).for_each(|i| self.slots.clear(self.next.wrapping_add(i)));
        self.next = self.next.wrapping_add(n);
        if self.next.wrapping_sub(self.placed) > PLACED_MOST {
            self.placed = self.next.wrapping_sub(PLACED_MOST);
        }
    }

    #[inline(always)]
    fn finish(&mut self, finish: Finish) {
        if let Some(counter) = finish.0.checked_sub(1) {
            // SAFETY: `meaning` has held the number against the counters that there are.
            count(unsafe { &*self.places.counters.as_ptr().add(counter as usize) });
        }
    }

    #[inline(always)]
    fn credit(&mut self, n: u32) {
        self.credited = self.credited.wrapping_add(n);
        match &mut self.owed {
            Some(owed) => owed.add(n),
            // SAFETY: valid as long as the queue (promised to `new`).
            None => give_back(unsafe { self.places.ci.as_ref() }, self.credited),
        }
    }

    fn outstanding(&self) -> u32 {
        self.next.wrapping_sub(self.credited)
    }

    #[inline(always)]
    fn owed(&mut self) -> Option<&mut Owed> {
        self.owed.as_mut()
    }

    fn can_be_served(&self) -> bool {
        !self.is_stopped && self.owed.as_ref().is_some_and(Owed::suits_kernel)
    }

    fn can_be_watched(&self) -> bool {
        self.places.is_managed && !self.is_stopped
    }

    fn view(&mut self, is_watched: bool) -> Option<LaneView> {
        debug_assert_eq!(self.next, self.credited);
        // Who watches it tells device code nothing.
        let index = match is_watched {
            true => 0,
            false => self.owed.as_mut().filter(|_| !self.is_stopped)?.for_kernel()?,
        };
        Some(LaneView {
            peer: self.peer,
            slots: self.places.device_slots,
            size: self.slots.size(),
            format: match self.terms.form {
                Form::Bytes64 => Format::Short,
                form => Format::Long(form.newest_version().into()),
            },
            next: self.next.into(),
            index,
            signals: self.signals,
            signals_at: self.signals_at,
            signals_key: self.signals_key,
            windows: self.named.views(|handle| self.window_view(handle)),
            is_watched,
        })
    }

    fn served(&mut self, next: u32) -> u32 {
        let n = next.wrapping_sub(self.next);
        // A kernel gives back what is in place.
        (self.next, self.credited, self.placed) = (next, next, next);
        self.owed.iter_mut().for_each(|owed| owed.served(n));
        n
    }

    fn fenced(&mut self) {
        self.placed = self.credited;
    }

    fn stop(&mut self, _why: Stopped) {
        self.is_stopped = true;
        // Or descriptors like the last ones would be taken for operations.
        self.pattern = Pattern::NONE;
    }
}

impl Queue {
    /// An entry that is no repetition, or none.
    #[inline(always)]
    fn read_new(&mut self, nth: u32, ops: &mut Ops) -> Entry {
        let Some(words) = self.slots.words(self.next.wrapping_add(nth)) else { return Entry::Absent };
        if self.is_stopped {
            return self.left_undone(&words);
        }
        let is_usual = match self.slots.stride() > WORDS {
            true => self.usual::<true>(&words, ops),
            false => self.usual::<false>(&words, ops),
        };
        match is_usual {
            true => Entry::Op(Finish::NONE),
            false => self.read_other(nth, ops),
        }
    }

    /// What an entry gets that is not carried out: its counter, if there is one, as the source is free.
    #[cold]
    fn left_undone(&self, words: &[u64; WORDS]) -> Entry {
        let d = Descriptor { words: *words, form: self.terms.form };
        let has_counter = d.op() & OP_COUNTER != 0 && d.counter() < self.terms.counters;
        Entry::Nothing(if has_counter { Finish(d.counter() + 1) } else { Finish::NONE })
    }

    /// What [`Queue::usual`] does not take. Reads the words again: where it is not called they stay in registers.
    #[inline(never)]
    fn read_other(&mut self, nth: u32, ops: &mut Ops) -> Entry {
        let index = self.next.wrapping_add(nth);
        let Some(words) = self.slots.words(index) else { return Entry::Absent };
        let descriptor = Descriptor { words, form: self.terms.form };
        match meaning(&descriptor, &self.terms, self.peer) {
            Ok(Meaning::Op(Op::Get(_), _)) if !self.is_behind(index) => match self.credited == index {
                true => Entry::Fenced,
                false => Entry::Absent,
            },
            Ok(Meaning::Op(op, finish)) => {
                if let Op::Get(_) = op {
                    self.places_nothing(index);
                }
                ops.push(op);
                self.learn(&descriptor);
                Entry::Op(finish)
            }
            Ok(Meaning::Nothing(finish)) => Entry::Nothing(finish),
            Ok(Meaning::Flush) => {
                self.places_nothing(index);
                Entry::Flush(Finish::NONE)
            }
            Err(fault) => Entry::Refused(fault.sentence(&descriptor, index).into()),
        }
    }

    /// Whether all before an entry is in place, or changes nothing: a get brings what was sent before it, and a fabric
    /// carries out what it has at the same time.
    fn is_behind(&self, index: u32) -> bool {
        index.wrapping_sub(self.placed) as i32 <= 0
    }

    /// A get or a flush changes nothing for what comes behind it.
    fn places_nothing(&mut self, index: u32) {
        if index == self.placed {
            self.placed = index.wrapping_add(1);
        }
    }
}
