//! The fake driver's lane kernel without the library: a test is the host that writes its board, and the device code
//! that posts descriptors.

pub mod entries;
pub mod given;

use super::*;
use nccl_plugin_api::descriptor::{Descriptor, Form, OP_PUT, OP_SIGNAL_INC, WORDS};
use oxygin::fabric::lanes::{self, LONGEST_APART};
use std::sync::atomic::AtomicU32;

/// Nothing but the entry: the fake driver carries it out.
const PTX: &[u8] = b".version 6.4\n.target sm_70\n.address_size 64\n.visible .entry oxygin_lanes(\n\
    .param .u64 p_board,\n.param .u64 p_number,\n.param .u64 p_idle,\n.param .u64 p_life\n)\n\
    .maxntid 256, 1, 1\n{\nret;\n}\n\0";
const BOARD: usize = 1024 + 64 * 256;
const CUDA_ERROR_NOT_READY: c_int = 600;

type CuLaunchKernel = unsafe extern "C" fn(
    *mut c_void,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    *mut c_void,
    *mut *mut c_void,
    *mut *mut c_void,
) -> c_int;

pub const GO: usize = 0;
pub const STOP: usize = 1;
pub const SPREAD: usize = 2;
pub const UP: usize = 8;
pub const GONE: usize = 16;
pub const POSITIONS: usize = 32;
pub const RECORDS: usize = 128;
pub const RECORD_WORDS: usize = 32;
pub const REFUSED: u64 = 1 << 32;

/// Handles of the windows that lanes know: one with the sources here and the signals at the peer, one with the
/// destination there.
pub const SOURCE: u64 = 10;
pub const TARGET: u64 = 20;
/// Bytes of the sources, and of each lane's part of the destination.
pub const SOURCE_BYTES: u64 = 1 << 18;
pub const ROOM: u64 = 1 << 18;
/// Signals of each lane.
pub const SIGNALS: u64 = 4;
/// Bytes that a copy of these lanes may have.
pub const MOST: u64 = 4096;
/// … and the longest that there is.
pub const LONGEST: u64 = MOST * (LONGEST_APART / lanes::LONGEST);

/// A queue of device code, and where its data goes.
pub struct Lane {
    queue: *mut u64,
    index: *mut u32,
    pub slots: u32,
    pub form: Form,
    /// Index of the first descriptor of all, and of the next.
    pub first: u32,
    pub posted: u32,
    /// Where its part of the destination begins there.
    pub room: u64,
    pub signals: u64,
}

/// The host of one lane kernel.
pub struct Board<'a> {
    fake: &'a Fake,
    stream: *mut c_void,
    function: *mut c_void,
    board: *mut u64,
    pub number: u64,
    pub lanes: Vec<Lane>,
    pub source: u64,
    pub target: u64,
    signals: u64,
    _context: Entered<'a>,
}

/// # Safety
/// An aligned word of mapped memory.
unsafe fn word<'a>(at: *mut u64) -> &'a AtomicU64 {
    // SAFETY: the caller's word.
    unsafe { AtomicU64::from_ptr(at) }
}

impl<'a> Board<'a> {
    /// On GPU 0, whose lanes' peer is GPU 1.
    pub fn new(fake: &'a Fake, lanes: usize, form: Form, slots: u32, first: u32) -> Self {
        let context = fake.enter(0);
        let [mut module, mut function, mut stream] = [null_mut(); 3];
        // SAFETY: the driver's functions have these types; places for the answers.
        unsafe {
            type Load = unsafe extern "C" fn(*mut *mut c_void, *const c_void) -> c_int;
            type Function = unsafe extern "C" fn(*mut *mut c_void, *mut c_void, *const c_char) -> c_int;
            type Create = unsafe extern "C" fn(*mut *mut c_void, c_uint, c_int) -> c_int;
            assert_eq!(fake.call::<Load>(b"cuModuleLoadData")(&mut module, PTX.as_ptr().cast()), 0);
            let name = c"oxygin_lanes".as_ptr();
            assert_eq!(fake.call::<Function>(b"cuModuleGetFunction")(&mut function, module, name), 0);
            assert_eq!(fake.call::<Create>(b"cuStreamCreateWithPriority")(&mut stream, 1, -3), 0);
        }
        let n = lanes as u64;
        let source = fake.alloc(0, SOURCE_BYTES as usize, false);
        let target = fake.alloc(1, (n * ROOM) as usize, false);
        let signals = fake.alloc(1, (n * SIGNALS * 8) as usize, false);
        // SAFETY: the memory just made, where kernels see it.
        unsafe { std::slice::from_raw_parts_mut(fake.peek(source), SOURCE_BYTES as usize) }
            .iter_mut()
            .enumerate()
            .for_each(|(i, byte)| *byte = (i * 31 + i / 256 * 7) as u8 | 1);
        let board = pin(fake, BOARD).cast();
        let mut all = Self {
            fake,
            stream,
            function,
            board,
            number: 0,
            lanes: Vec::new(),
            source,
            target,
            signals,
            _context: context,
        };
        all.lanes = (0..n).map(|i| all.lane(i, form, slots, first)).collect();
        all
    }

    fn lane(&self, i: u64, form: Form, slots: u32, first: u32) -> Lane {
        let queue = pin(self.fake, slots as usize * form.bytes()).cast();
        let index: *mut u32 = pin(self.fake, 4).cast();
        // SAFETY: the memory just made.
        unsafe { AtomicU32::from_ptr(index) }.store(first, Ordering::Release);
        let signals = self.signals + i * SIGNALS * 8;
        Lane { queue, index, slots, form, first, posted: first, room: i * ROOM, signals }
    }

    pub fn word(&self, i: usize) -> &AtomicU64 {
        assert!(i < BOARD / 8);
        // SAFETY: inside the board.
        unsafe { word(self.board.add(i)) }
    }

    pub fn get(&self, i: usize) -> u64 {
        self.word(i).load(Ordering::Acquire)
    }

    pub fn set(&self, i: usize, value: u64) {
        self.word(i).store(value, Ordering::Release);
    }

    /// Word `word` of the record of a place.
    pub fn set_record(&self, place: usize, word: usize, value: u64) {
        self.set(RECORDS + place * RECORD_WORDS + word, value);
    }

    /// Writes a lane's record, for a launch that begins with the descriptor of that index.
    pub fn record(&self, i: usize, next: u32) {
        let lane = &self.lanes[i];
        let is_long = lane.form == Form::Bytes128;
        let (shift, newest) = if is_long { (7, 2) } else { (6, 0) };
        let head = [
            lane.queue as u64,
            u64::from(lane.slots - 1) | shift << 32,
            u64::from(next) | SIGNALS << 32,
            lane.index as u64,
            lane.signals,
            newest | MOST << 32,
        ];
        let windows = [
            [SOURCE, self.source, SOURCE_BYTES, lane.signals, SIGNALS * 8],
            [TARGET, 0, 0, self.target, self.lanes.len() as u64 * ROOM],
        ];
        head.iter().enumerate().for_each(|(word, &value)| self.set_record(i, word, value));
        for (w, fields) in windows.iter().enumerate() {
            fields.iter().enumerate().for_each(|(word, &value)| self.set_record(i, 8 + 6 * w + word, value));
        }
        self.set(POSITIONS + i, next.into());
    }

    /// Launches; the driver's answer.
    pub fn launch_as(&mut self, blocks: u32, threads: u32, [idle, life]: [Duration; 2]) -> c_int {
        self.number += 1;
        let mut values = [self.board as u64, self.number, idle.as_nanos() as u64, life.as_nanos() as u64];
        let mut places = values.each_mut().map(|v| std::ptr::from_mut(v).cast::<c_void>());
        let (function, stream) = (self.function, self.stream);
        // SAFETY: the driver's function has this type; the parameters are four words.
        unsafe {
            let launch = self.fake.call::<CuLaunchKernel>(b"cuLaunchKernel");
            launch(function, blocks, 1, 1, threads, 1, 1, 0, stream, places.as_mut_ptr(), null_mut())
        }
    }

    /// As it is always launched.
    pub fn launch(&mut self, times: [Duration; 2]) {
        assert_eq!(self.launch_as(1, 256, times), 0);
    }

    /// The launch may begin.
    pub fn go(&self, spread: u64) {
        self.set(SPREAD, spread);
        self.set(GO, self.number);
    }

    /// It is to end.
    pub fn stop(&self) {
        self.set(STOP, self.number);
    }

    pub fn is_up(&self) -> bool {
        self.get(UP) == self.number
    }

    pub fn is_gone(&self) -> bool {
        self.get(GONE) == self.number
    }

    /// Stops it and waits until it is gone.
    pub fn end(&self) {
        self.stop();
        wait_until("the lane kernel is gone", || self.is_gone());
    }

    /// What the stream says.
    pub fn query(&self) -> c_int {
        // SAFETY: the driver's function has this type.
        unsafe { self.fake.call::<unsafe extern "C" fn(*mut c_void) -> c_int>(b"cuStreamQuery")(self.stream) }
    }

    fn slot(&self, i: usize, index: u32, w: usize) -> &AtomicU64 {
        let lane = &self.lanes[i];
        let at = (index & (lane.slots - 1)) as usize * (lane.form.bytes() / 8) + w;
        // SAFETY: inside the queue.
        unsafe { word(lane.queue.add(at)) }
    }

    /// Whether the slot of a descriptor holds nothing.
    pub fn is_clear(&self, i: usize, index: u32) -> bool {
        (0..WORDS).all(|w| self.slot(i, index, w).load(Ordering::Acquire) == 0)
    }

    /// Device code posts the next descriptor, its words in the order of `random`; there is room.
    pub fn post(&mut self, i: usize, d: &Descriptor, random: u64) {
        let index = self.lanes[i].posted;
        self.post_at(i, index, d, random);
        self.lanes[i].posted = index.wrapping_add(1);
    }

    /// Empties a lane's queue, whatever is there; returns the index of the next descriptor.
    pub fn renew(&mut self, i: usize) -> u32 {
        let lane = &self.lanes[i];
        for (slot, w) in (0..lane.slots).flat_map(|slot| (0..WORDS).map(move |w| (slot, w))) {
            self.slot(i, slot, w).store(0, Ordering::Release);
        }
        self.lanes[i].posted = self.index(i);
        self.lanes[i].posted
    }

    /// Two threads post the next two, and the later one is faster.
    pub fn post_swapped(&mut self, i: usize, [first, second]: [&Descriptor; 2]) {
        let index = self.lanes[i].posted;
        self.post_at(i, index.wrapping_add(1), second, 0);
        std::thread::sleep(Duration::from_micros(20));
        self.post_at(i, index, first, 0);
        self.lanes[i].posted = index.wrapping_add(2);
    }

    fn post_at(&self, i: usize, index: u32, d: &Descriptor, random: u64) {
        assert!(self.is_clear(i, index), "lane {i}: slot of {index}");
        for n in 0..WORDS {
            let w = (n * 3 + random as usize) % WORDS;
            self.slot(i, index, w).store(d.words[w], Ordering::Release);
        }
    }

    /// Adds one to a signal of the lane.
    pub fn increment(&self, i: usize, signal: u32) -> Descriptor {
        Descriptor::new(self.lanes[i].form, 1, OP_PUT | OP_SIGNAL_INC, 0).with_signal(signal, 1, true)
    }

    /// How far device code sees a lane.
    pub fn index(&self, i: usize) -> u32 {
        // SAFETY: pinned memory.
        unsafe { AtomicU32::from_ptr(self.lanes[i].index) }.load(Ordering::Acquire)
    }

    pub fn signal(&self, i: usize, signal: u64) -> u64 {
        // SAFETY: inside the signals.
        unsafe { word(self.fake.peek(self.lanes[i].signals + 8 * signal).cast()) }.load(Ordering::Acquire)
    }

    /// The bytes at an offset of the destination, as a kernel sees them.
    pub fn target(&self, offset: u64, bytes: u64) -> Vec<u8> {
        self.bytes(self.target + offset, bytes)
    }

    /// The same of the sources.
    pub fn source(&self, offset: u64, bytes: u64) -> Vec<u8> {
        self.bytes(self.source + offset, bytes)
    }

    fn bytes(&self, at: u64, n: u64) -> Vec<u8> {
        let at = self.fake.peek(at);
        // SAFETY: device memory of this test.
        (0..n as usize).map(|i| unsafe { at.add(i).read_volatile() }).collect()
    }
}

impl Drop for Board<'_> {
    fn drop(&mut self) {
        self.stop();
        let end = Instant::now() + Duration::from_secs(10);
        while self.query() == CUDA_ERROR_NOT_READY && Instant::now() < end {
            std::thread::yield_now();
        }
        // SAFETY: the driver's function has this type.
        unsafe { self.fake.call::<unsafe extern "C" fn(*mut c_void) -> c_int>(b"cuStreamDestroy_v2")(self.stream) };
    }
}

/// Pinned memory, which stays.
fn pin(fake: &Fake, bytes: usize) -> *mut u8 {
    let mut at = null_mut();
    // SAFETY: the driver's function has this type; a place for the answer.
    let code = unsafe {
        let alloc = fake.call::<unsafe extern "C" fn(*mut *mut c_void, usize, c_uint) -> c_int>(b"cuMemHostAlloc");
        alloc(&mut at, bytes, 0)
    };
    assert_eq!(code, 0);
    at.cast()
}
