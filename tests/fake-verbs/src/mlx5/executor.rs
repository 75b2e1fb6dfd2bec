//! The thread that looks at doorbells and carries entries out: it runs while a queue pair can send.

use super::completion::{record_word, syndrome, Report};
use super::entry::{Head, SLOT, SLOTS_MOST};
use super::execute::Progress;
use super::objects::{Qp, State};
use super::pages::{REGISTER, REGISTER_WITHOUT_RECORD};
use crate::world;
use crate::world::World;
use crate::{bytes, gpu};
use std::sync::atomic::{fence, Ordering};
use std::time::Duration;

/// Entries of a queue pair that are carried out before others have their turn.
const TURN: usize = 64;
/// Passes without anything to do after which the thread sleeps between them.
const PATIENCE: u32 = 100;
const NAP: Duration = Duration::from_micros(20);

impl World {
    /// Sees to it that the thread runs if it is needed.
    pub(super) fn watch(&mut self) {
        if self.mlx5.is_running || !self.is_needed() {
            return;
        }
        self.mlx5.is_running = true;
        stay();
        let thread = std::thread::Builder::new().name("fake-mlx5".into());
        if thread.spawn(run).is_err() {
            self.mlx5.is_running = false;
            eprintln!("fake mlx5: no thread");
        }
    }

    fn is_needed(&self) -> bool {
        self.mlx5.qps.values().any(|q| matches!(q.state, State::Rts | State::Err))
    }

    /// Looks at all doorbells and carries out what they announce. Whether there was anything.
    pub fn mlx5_pass(&mut self) -> bool {
        self.read_registers();
        let mut numbers: Vec<u32> = Vec::new();
        for (number, qp) in &self.mlx5.qps {
            let is_silent = match qp.record {
                // Each look takes a copy.
                Some(at) if gpu::is_real(at) => !qp.is_to_look,
                record => record.is_none_or(|at| record_word(at) as u16 == qp.rung as u16),
            };
            if matches!(qp.state, State::Rts | State::Err) && !(is_silent && qp.done == qp.rung) {
                numbers.push(*number);
            }
        }
        let mut any = false;
        for number in numbers {
            // Out of the table, so that the rest of the world can be used beside it.
            let Some(mut qp) = self.mlx5.qps.remove(&number) else { continue };
            if self.settings.get("stopped", qp.device) == 0 {
                self.read_record(&mut qp);
                any |= self.advance(&mut qp);
            }
            self.mlx5.qps.insert(number, qp);
        }
        any
    }

    /// Doorbells in registers: the first 8 bytes of an entry, or of one that there never was, with the index behind the
    /// last one and no segments.
    pub(super) fn read_registers(&mut self) {
        let mut rung = Vec::new();
        for (&id, uar) in &mut self.mlx5.uars {
            for (seen, register) in uar.seen.iter_mut().zip([REGISTER, REGISTER_WITHOUT_RECORD]) {
                let word = uar.page.doorbell(register);
                if std::mem::replace(seen, word) != word {
                    rung.push((id, register, word));
                }
            }
        }
        for (page, register, word) in rung {
            self.mlx5.qps.values_mut().filter(|q| q.uar == page).for_each(|q| q.is_to_look = true);
            let (number, index, segments) = ((word as u32) >> 8, (word >> 40) as u16, word & 0x3f);
            self.settings.count("mlx5_doorbells", 1);
            let Some(qp) = self.mlx5.qps.get_mut(&number).filter(|q| q.uar == page) else {
                self.settings.count("misuse", 1);
                eprintln!("fake mlx5: a doorbell {word:#018x} in page {page}, which has no such queue pair");
                continue;
            };
            if qp.record.is_none() != (register == REGISTER_WITHOUT_RECORD) {
                self.settings.count("misuse", 1);
                eprintln!("fake mlx5: queue pair {number:#x} is rung at {register:#x}");
                continue;
            }
            let behind = index.wrapping_add(segments.div_ceil(4) as u16);
            let overrun = qp.hear(behind);
            self.overrun(number, overrun);
        }
    }

    /// The doorbell record, which counts as well as the register: either may come first.
    fn read_record(&mut self, qp: &mut Qp) {
        let is_to_look = std::mem::take(&mut qp.is_to_look);
        let Some(at) = qp.record.filter(|&at| is_to_look || !gpu::is_real(at)) else { return };
        if self.settings.get("mlx5_strict_doorbells", qp.device) != 0 {
            return;
        }
        let before = qp.rung;
        let overrun = qp.hear(record_word(at) as u16);
        self.settings.count("mlx5_records", (qp.rung - before) as i64);
        if overrun {
            self.settings.count("mlx5_overruns", 1);
        }
    }

    fn overrun(&mut self, number: u32, overrun: bool) {
        if overrun {
            self.settings.count("mlx5_overruns", 1);
            eprintln!("fake mlx5: queue pair {number:#x} is rung for more than its ring holds");
        }
    }

    /// Carries entries of a queue pair out, or flushes them.
    fn advance(&mut self, qp: &mut Qp) -> bool {
        let mut any = false;
        for _ in 0..TURN {
            if qp.done >= qp.rung {
                break;
            }
            let bytes = qp.entry();
            let head = Head::read(&bytes);
            let left = qp.rung - qp.done;
            let slots = head.slots().min(left);
            let report =
                Report { queue: qp.number, opcode: head.opcode, index: qp.done as u16, bytes: 0, syndrome: None };
            if qp.state == State::Err {
                qp.done += slots;
                let flushed = Report { syndrome: Some(syndrome::FLUSHED), ..report };
                self.report(qp.send_cq, &flushed);
                any = true;
                continue;
            }
            match self.one(qp, &head, &bytes, left) {
                Progress::Waits => break,
                Progress::Done(bytes) => {
                    qp.done += slots;
                    self.settings.count("mlx5_entries", 1);
                    if head.is_reported() && !self.report(qp.send_cq, &Report { bytes, ..report }) {
                        qp.state = State::Err;
                    }
                }
                Progress::Failed(fault) => {
                    qp.done += slots;
                    qp.state = State::Err;
                    self.report(qp.send_cq, &Report { syndrome: Some(fault.syndrome), ..report });
                    if let Some(event) = fault.responder {
                        self.fail_responder(qp, event);
                    }
                }
            }
            any = true;
        }
        any
    }

    /// One entry, unless it is none or a test wants it to fail.
    fn one(&mut self, qp: &mut Qp, head: &Head, bytes: &[u8], left: u64) -> Progress {
        let local = |syndrome| Progress::Failed(super::execute::Fault { syndrome, responder: None });
        let wrong = |why: String| {
            eprintln!("fake mlx5: entry {} of queue pair {:#x}: {why}", qp.done, qp.number);
            local(syndrome::LOCAL_OPERATION)
        };
        if head.index != qp.done as u16 || head.queue != qp.number || head.slots() > left {
            return wrong(format!("{head:?}, and {left} slots are rung"));
        }
        let work = match head.work(bytes) {
            Ok(work) => work,
            Err(why) => return wrong(why),
        };
        let progress = self.execute(qp, &work);
        let left = self.settings.get("mlx5_error_in", 0);
        if left > 0 && progress != Progress::Waits {
            self.settings.set("mlx5_error_in", left - 1);
            if left == 1 {
                return local(self.settings.get("mlx5_error_syndrome", 0) as u8);
            }
        }
        progress
    }

    /// The other end fails, too.
    fn fail_responder(&mut self, qp: &mut Qp, event: u16) {
        let number = qp.get("remote_qpn") as u32;
        if let Some(peer) = self.mlx5.qps.get_mut(&number) {
            peer.state = State::Err;
        }
        self.raise_responder(number, event);
    }
}

impl Qp {
    /// A doorbell for everything before `index`. Whether it asks for more than there is: then the queue pair fails at
    /// its first entry that cannot be.
    fn hear(&mut self, index: u16) -> bool {
        let ahead = u64::from(index.wrapping_sub(self.rung as u16));
        let slots = 1 << self.log_slots;
        // Half of the numbers are behind: an old doorbell.
        if ahead == 0 || ahead >= 1 << 15 && slots < 1 << 15 {
            return false;
        }
        if self.rung + ahead - self.done > slots {
            let is_new = self.state != State::Err;
            self.state = State::Err;
            self.is_failed = true;
            return is_new;
        }
        self.rung += ahead;
        false
    }

    /// The next entry, with as many slots behind it as the longest one has.
    fn entry(&self) -> Vec<u8> {
        let slots = 1_u64 << self.log_slots;
        let count = (SLOTS_MOST as u64).min(slots);
        // What was written before the doorbell is visible.
        fence(Ordering::Acquire);
        let mut words = vec![0; count as usize * SLOT / 8];
        let first = self.done & (slots - 1);
        // The ring may end in between.
        let (front, back) = words.split_at_mut((slots - first).min(count) as usize * SLOT / 8);
        bytes::read_words(self.slots + SLOT as u64 * first, front);
        bytes::read_words(self.slots, back);
        fence(Ordering::Acquire);
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }
}

/// Keeps this library in the process: its thread may not have ended when the last user closes it.
fn stay() {
    unsafe {
        let mut found: libc::Dl_info = std::mem::zeroed();
        if libc::dladdr(stay as *const libc::c_void, &mut found) != 0 {
            libc::dlopen(found.dli_fname, libc::RTLD_NOW | libc::RTLD_NOLOAD | libc::RTLD_NODELETE);
        }
    }
}

fn run() {
    let mut idle = 0;
    loop {
        {
            let mut world = world();
            if !world.is_needed() {
                world.mlx5.is_running = false;
                return;
            }
            let held = world.settings.get("mlx5_held", 0) != 0;
            idle = if !held && world.mlx5_pass() { 0 } else { idle + 1 };
        }
        if idle > PATIENCE {
            std::thread::sleep(NAP);
        } else {
            std::thread::yield_now();
        }
    }
}
