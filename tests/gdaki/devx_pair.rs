//! A queue pair of the fake with its completion queue, made and connected by commands encoded by hand; entries and
//! completions as bytes.

use crate::devx_harness::{get, put, record, ring, wait, words, Device, Object, Umem};
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of both commands that make something, and of those from state to state.
pub const COMMAND: usize = 272;

/// What a queue pair's memory is.
pub struct Memory<'a> {
    pub slots: &'static [AtomicU64],
    pub completions: &'static [AtomicU64],
    /// Of the completion queue, then of the queue pair.
    pub records: [&'static [AtomicU64]; 2],
    pub umems: [Umem<'a>; 4],
}

impl<'a> Memory<'a> {
    /// Room for 2^log entries.
    pub fn new(device: &Device<'a>, log: u32) -> Self {
        let (slots, completions) = (words(8 << log), words(8 << log));
        let records = [words(512), words(512)];
        // As a driver leaves them: invalid, the hardware's.
        completions.iter().skip(7).step_by(8).for_each(|w| w.store(0xf1 << 56, Ordering::Relaxed));
        let umems = [slots, completions, records[0], records[1]].map(|memory| device.umem(memory));
        Self { slots, completions, records, umems }
    }
}

/// A completion queue of 2^log entries.
pub fn create_cq(device: &Device, memory: &Memory, log: u32) -> [u8; COMMAND] {
    let mut command = [0; COMMAND];
    // SAFETY: the device's page.
    let page = unsafe { (*device.uar).page };
    for (at, bits, value) in [
        (0x000, 16, 0x400),
        (0x080 + 0x06, 1, 1),
        (0x080 + 0x0e, 1, 1),
        (0x080 + 0x20, 32, memory.umems[2].id()),
        (0x080 + 0x63, 5, log),
        (0x080 + 0x68, 24, page),
        (0x080 + 0xb8, 8, 11),
        (0x2c0, 32, memory.umems[1].id()),
        (0x2e0, 1, 1),
    ] {
        put(&mut command, at, bits, value.into());
    }
    command
}

/// A queue pair of 2^log slots without a receive queue.
pub fn create_qp(device: &Device, memory: &Memory, log: u32, cq: u32, is_companion: bool) -> [u8; COMMAND] {
    let mut command = [0; COMMAND];
    // SAFETY: the device's page.
    let page = unsafe { (*device.uar).page };
    for (at, bits, value) in [
        (0x000, 16, 0x500),
        (0x0c0 + 0x13, 2, 3),
        (0x0c0 + 0x28, 24, device.pdn),
        (0x0c0 + 0x51, 4, log),
        (0x0c0 + 0x68, 24, page),
        (0x0c0 + 0x3e8, 24, cq),
        (0x0c0 + 0x49f, 1, is_companion.into()),
        (0x0c0 + 0x565, 3, 3),
        (0x0c0 + 0x683, 1, 1),
        (0x0c0 + 0x720, 32, memory.umems[3].id()),
        (0x840, 32, memory.umems[0].id()),
        (0x860, 1, 1),
    ] {
        put(&mut command, at, bits, value.into());
    }
    command
}

/// From RST to INIT, for everything a peer may do.
pub fn to_init(number: u32) -> [u8; COMMAND] {
    let mut command = [0; COMMAND];
    for (at, bits, value) in [
        (0x000, 16, 0x502),
        (0x048, 24, number),
        (0x0c0 + 0x13, 2, 3),
        (0x0c0 + 0x0c0 + 0x128, 8, 1),
        (0x0c0 + 0x48c, 4, 1),
        (0x0c0 + 0x490, 1, 1),
        (0x0c0 + 0x491, 1, 1),
        (0x0c0 + 0x492, 1, 1),
    ] {
        put(&mut command, at, bits, value.into());
    }
    command
}

/// From INIT to RTR: the way to a peer's GID 3 (RoCE v2) on device `device`.
pub fn to_rtr(number: u32, peer: u32, device: usize) -> [u8; COMMAND] {
    let mut command = [0; COMMAND];
    let path = 0x0c0 + 0x0c0;
    for (at, bits, value) in [
        (0x000, 16, 0x503),
        (0x048, 24, number),
        (0x0c0 + 0x40, 3, 3),
        (0x0c0 + 0x43, 5, 30),
        (0x0c0 + 0xa8, 24, peer),
        (0x0c0 + 0x488, 3, 4),
        (0x0c0 + 0x4a3, 5, 12),
        (0x0c0 + 0x4a8, 24, 0x77),
        (path + 0x48, 8, 3),
        (path + 0x58, 8, 64),
        (path + 0x110, 16, 0xdcba),
        (path + 0x128, 8, 1),
    ] {
        put(&mut command, at, bits, value.into());
    }
    // ::ffff:10.0.0.n
    let gid = 0xffff_0a00_0000 + 1 + device as u64;
    put(&mut command, path + 0x80 + 64, 64, gid);
    let mac = fake_verbs::mlx5::mac(device).into_iter().fold(0, |all, byte| all << 8 | u64::from(byte));
    put(&mut command, path + 0x130, 48, mac);
    command
}

/// From RTR to RTS.
pub fn to_rts(number: u32) -> [u8; COMMAND] {
    let mut command = [0; COMMAND];
    for (at, bits, value) in [
        (0x000, 16, 0x504),
        (0x048, 24, number),
        (0x0c0 + 0x388, 3, 4),
        (0x0c0 + 0x38d, 3, 7),
        (0x0c0 + 0x390, 3, 7),
        (0x0c0 + 0x3c8, 24, 0x77),
        (0x0c0 + 0x0c0 + 0x40, 5, 18),
    ] {
        put(&mut command, at, bits, value.into());
    }
    command
}

/// A command that needs no more than the number: to ERR (0x507), to RST (0x50a).
pub fn stop(opcode: u64, number: u32) -> [u8; 16] {
    let mut command = [0; 16];
    put(&mut command, 0, 16, opcode);
    put(&mut command, 0x48, 24, number.into());
    command
}

/// A queue pair with its completion queue.
pub struct Pair<'a> {
    pub memory: Memory<'a>,
    pub cq: Object<'a>,
    pub cqn: u32,
    pub qp: Object<'a>,
    pub number: u32,
    pub device: usize,
    log: u32,
    register: *mut std::ffi::c_void,
    /// Entries written, completions taken.
    pub posted: u64,
    pub taken: u64,
}

impl<'a> Pair<'a> {
    pub fn new(device: &Device<'a>, index: usize, log: u32, is_companion: bool) -> Self {
        let memory = Memory::new(device, log);
        Self::of(device, index, memory, log, |cq| create_qp(device, cq.0, log, cq.1, is_companion), 1)
    }

    /// The same, with a command of one's own and a completion queue that minds overruns.
    pub fn of(
        device: &Device<'a>,
        index: usize,
        memory: Memory<'a>,
        log: u32,
        qp: impl FnOnce((&Memory<'a>, u32)) -> [u8; COMMAND],
        ignores_overruns: u64,
    ) -> Self {
        let mut command = create_cq(device, &memory, log);
        put(&mut command, 0x080 + 0x0e, 1, ignores_overruns);
        let (cq, out) = device.create(&command);
        let (cq, cqn) = (cq.unwrap_or_else(|e| panic!("{e}: {}", device.fake.refusal())), get(&out, 0x48, 24) as u32);
        let (qp, out) = device.create(&qp((&memory, cqn)));
        let (qp, number) =
            (qp.unwrap_or_else(|e| panic!("{e}: {}", device.fake.refusal())), get(&out, 0x48, 24) as u32);
        // SAFETY: the device's page.
        let register = unsafe { (*device.uar).reg };
        Self { memory, cq, cqn, qp, number, device: index, log, register, posted: 0, taken: 0 }
    }

    pub fn connect(&self, peer: &Pair) {
        let steps = [to_init(self.number), to_rtr(self.number, peer.number, peer.device), to_rts(self.number)];
        for (step, command) in steps.iter().enumerate() {
            assert_eq!(self.qp.modify(command), (0, 0), "step {step}: {}", self.qp.fake.refusal());
        }
    }

    pub fn state(&self) -> u64 {
        get(&self.qp.query(self.number), 0x0c0, 4)
    }

    /// Writes an entry: opcode, opcode modifier, segments behind the first. Nothing is rung.
    pub fn post(&mut self, opcode: u8, modifier: u8, body: &[u8]) {
        self.post_flagged(opcode, modifier, body, 8);
    }

    pub fn post_flagged(&mut self, opcode: u8, modifier: u8, body: &[u8], flags: u8) {
        let mut entry = vec![0; 16];
        entry[..4].copy_from_slice(
            &(u32::from(modifier) << 24 | (self.posted as u32 & 0xffff) << 8 | u32::from(opcode)).to_be_bytes(),
        );
        entry[4..8].copy_from_slice(&((self.number << 8) | (1 + body.len().div_ceil(16) as u32)).to_be_bytes());
        entry[11] = flags;
        entry.extend(body);
        entry.resize(entry.len().next_multiple_of(64), 0);
        for slot in entry.chunks_exact(64) {
            let at = 8 * (self.posted as usize & ((1 << self.log) - 1));
            for (word, bytes) in self.memory.slots[at..at + 8].iter().zip(slot.chunks_exact(8)) {
                word.store(u64::from_ne_bytes(bytes.try_into().unwrap()), Ordering::Relaxed);
            }
            self.posted += 1;
        }
    }

    /// Rings: register, then record.
    pub fn ring(&self) {
        self.ring_register();
        self.write_record();
    }

    pub fn ring_register(&self) {
        ring(self.register, self.posted, self.number);
    }

    pub fn write_record(&self) {
        record(self.memory.records[1], 1).store((self.posted as u32 & 0xffff).to_be(), Ordering::Release);
    }

    /// Tells the completion queue what has been taken.
    pub fn consume(&self) {
        record(self.memory.records[0], 0).store((self.taken as u32 & 0xff_ffff).to_be(), Ordering::Release);
    }

    /// Whether the next completion entry is there: the owner bit is that of the lap, and it is not invalid.
    pub fn has_completion(&self) -> bool {
        let last =
            self.memory.completions[8 * (self.taken as usize & ((1 << self.log) - 1)) + 7].load(Ordering::Acquire);
        let own = (last >> 56) as u8;
        u64::from(own & 1) == self.taken >> self.log & 1 && own >> 4 != 15
    }

    /// Waits for the next completion entry: its 64 bytes.
    pub fn completion(&mut self) -> [u8; 64] {
        wait("a completion entry", || self.has_completion());
        let at = 8 * (self.taken as usize & ((1 << self.log) - 1));
        let mut entry = [0; 64];
        for (bytes, word) in entry.chunks_exact_mut(8).zip(&self.memory.completions[at..at + 8]) {
            bytes.copy_from_slice(&word.load(Ordering::Acquire).to_ne_bytes());
        }
        self.taken += 1;
        entry
    }

    /// Opcode and index of the entry that is next complete, and its syndrome: 0 if it succeeded.
    pub fn outcome(&mut self) -> (u8, u16, u8) {
        let entry = self.completion();
        let (opcode, index) = (entry[63] >> 4, u16::from_be_bytes([entry[60], entry[61]]));
        assert_eq!(get(&entry, 57 * 8, 24), u64::from(self.number));
        assert!(matches!(opcode, 0 | 13), "opcode {opcode}");
        (entry[56], index, if opcode == 0 { 0 } else { entry[55] })
    }

    /// Ends everything, in the order in which it can be.
    pub fn end(self) {
        assert_eq!((self.qp.end(), self.cq.end()), (0, 0));
        for umem in &self.memory.umems {
            assert_eq!(umem.end(), 0);
        }
    }
}

/// A pointer to memory.
pub fn data(lkey: u32, at: u64, bytes: u32) -> Vec<u8> {
    [&bytes.to_be_bytes()[..], &lkey.to_be_bytes(), &at.to_be_bytes()].concat()
}

/// A peer's memory.
pub fn remote(rkey: u32, at: u64) -> Vec<u8> {
    [&at.to_be_bytes()[..], &rkey.to_be_bytes(), &[0; 4]].concat()
}
