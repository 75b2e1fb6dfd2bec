//! Completion entries, as a device writes them: rdma-core `providers/mlx5/mlx5dv.h`, `struct mlx5_cqe64` and
//! `mlx5_err_cqe`; DPDK `mlx5_prm.h`, `struct mlx5_error_cqe`.

use super::objects::Cq;
use crate::bytes;
use crate::world::World;

/// `MLX5_CQE_REQ` and `MLX5_CQE_REQ_ERR`.
const DONE: u8 = 0;
const FAILED: u8 = 13;

/// Syndromes: `MLX5_CQE_SYNDROME_*`.
pub mod syndrome {
    pub const LOCAL_LENGTH: u8 = 0x01;
    pub const LOCAL_OPERATION: u8 = 0x02;
    pub const LOCAL_PROTECTION: u8 = 0x04;
    pub const FLUSHED: u8 = 0x05;
    pub const REMOTE_INVALID: u8 = 0x12;
    pub const REMOTE_ACCESS: u8 = 0x13;
    pub const RETRIES_EXCEEDED: u8 = 0x15;
    pub const RECEIVER_NOT_READY: u8 = 0x16;
}

/// What an entry ended with.
#[derive(Clone, Copy, Debug)]
pub struct Report {
    pub queue: u32,
    pub opcode: u8,
    /// Of the entry.
    pub index: u16,
    /// Bytes that a read or an atomic operation brought.
    pub bytes: u32,
    /// None: it succeeded.
    pub syndrome: Option<u8>,
}

impl Report {
    /// The entry, with the owner bit of this lap.
    fn entry(&self, owner: u8) -> [u8; 64] {
        let mut out = [0; 64];
        match self.syndrome {
            None => out[44..48].copy_from_slice(&self.bytes.to_be_bytes()),
            Some(code) => (out[54], out[55]) = (0x81, code),
        }
        let opcode_and_queue = u32::from(self.opcode) << 24 | self.queue;
        out[56..60].copy_from_slice(&opcode_and_queue.to_be_bytes());
        out[60..62].copy_from_slice(&self.index.to_be_bytes());
        let opcode = if self.syndrome.is_none() { DONE } else { FAILED };
        out[63] = opcode << 4 | owner;
        out
    }
}

/// Reads a word of a doorbell record.
pub fn record_word(at: u64) -> u32 {
    u32::from_be(bytes::read_u32(at))
}

impl Cq {
    /// Whether the next entry would overwrite one that has not been taken.
    fn is_full(&self) -> bool {
        let consumed = record_word(self.record) & 0xff_ffff;
        let outstanding = self.produced.wrapping_sub(consumed) & 0xff_ffff;
        !self.ignores_overruns && outstanding >= 1 << self.log_entries
    }

    /// Whether its record has the number whose turn it is: rdma-core, `providers/mlx5/cq.c`, `mlx5_arm_cq`, and
    /// `mlx5_cq_event`, which counts them.
    pub(super) fn is_armed(&self) -> bool {
        record_word(self.record + 4) >> 28 & 3 == self.sequence
    }

    /// Writes an entry; the word with the owner bit last.
    fn write(&mut self, report: &Report) {
        let owner = (self.produced >> self.log_entries & 1) as u8;
        let entry = report.entry(owner);
        let slot = self.at + 64 * u64::from(self.produced & ((1 << self.log_entries) - 1));
        let words: [u64; 8] =
            std::array::from_fn(|word| u64::from_ne_bytes(std::array::from_fn(|i| entry[8 * word + i])));
        bytes::write_words(slot, &words);
        self.produced = self.produced.wrapping_add(1);
    }
}

impl World {
    /// Reports how an entry ended; false: the completion queue is overrun.
    pub(super) fn report(&mut self, cq: u32, report: &Report) -> bool {
        let Some(queue) = self.mlx5.cqs.get_mut(&cq) else { return false };
        if queue.is_broken {
            return false;
        }
        if queue.is_full() {
            queue.is_broken = true;
            self.settings.count("mlx5_overruns", 1);
            eprintln!("fake mlx5: completion queue {cq:#x} is overrun");
            self.raise_overrun(cq);
            return false;
        }
        queue.write(report);
        // Whoever wants an event has written it behind the consumer's index, with the number whose turn it is.
        let armed = record_word(queue.record + 4);
        let wants_all = armed >> 24 & 1 == 0 || self.settings.get("mlx5_false_alarms", 0) != 0;
        if queue.is_armed() && (wants_all || report.syndrome.is_some()) {
            queue.sequence = (queue.sequence + 1) & 3;
            self.raise_completion(cq);
        }
        self.settings.count("mlx5_completions", 1);
        true
    }
}
