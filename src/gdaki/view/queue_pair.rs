//! A queue pair as its owner describes it, and as device code reads it.

use super::layout::Layout;
use crate::config::Ringing;
use crate::error::{Error, Result};
use nccl_plugin_api::gdaki::queue_pair_v1::{CompletionQueueV1, QueuePairV1};
use nccl_plugin_api::gdaki::queue_pair_v2::{CompletionQueueV2, QueuePairV2};
use nccl_plugin_api::gdaki::{
    COMPLETION_COUNTED, COMPLETION_RING, HANDLER_CPU_PROXY, HANDLER_FREE_FLOW, HANDLER_GPU_DOORBELL,
    HANDLER_GPU_NO_RECORD, MEMORY_GPU,
};

/// Slots at most: device code counts them in 16 bits, of which a power of two has to fit.
pub const SLOTS_MAX: u32 = 1 << 15;
/// Bytes of a slot, of a completion entry.
pub const ENTRY_BYTES: u8 = 64;
/// A queue's number is below it: entries have 24 bits for it.
const NUMBER_END: u32 = 1 << 24;

/// How device code hands entries over. Which reads what of [`QueuePair::doorbell`] and [`QueuePair::send_record`] is in
/// the constants of `nccl_plugin_api::gdaki`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handler {
    /// The producer index, 64 bits, in the word at `doorbell`.
    CpuProxy,
    /// The doorbell, then the record, then the doorbell.
    Doorbell,
    /// The doorbell alone.
    NoRecord,
    /// An index + 1 for each slot in the array at `doorbell`, in any order. Kernels compiled with NCCL 2.31.2 and newer
    /// alone know it, and `backendVersion` 2 does not tell them from those of 2.30.7: whoever asks for it must know.
    FreeFlow,
}

impl From<Ringing> for Handler {
    /// What device code has to do so that the software NIC is rung this way.
    fn from(ringing: Ringing) -> Self {
        match ringing {
            Ringing::Doorbell => Self::Doorbell,
            Ringing::Proxy => Self::CpuProxy,
            Ringing::FreeFlow => Self::FreeFlow,
        }
    }
}

impl Handler {
    /// What device code calls it (`enum doca_gpu_dev_verbs_nic_handler`).
    pub fn code(self) -> u32 {
        match self {
            Self::CpuProxy => HANDLER_CPU_PROXY,
            Self::Doorbell => HANDLER_GPU_DOORBELL,
            Self::NoRecord => HANDLER_GPU_NO_RECORD,
            Self::FreeFlow => HANDLER_FREE_FLOW,
        }
    }

    fn has_record(self) -> bool {
        self == Self::Doorbell
    }
}

/// A queue pair with its completion queue. Addresses are those that device code uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueuePair {
    /// Its number, 24 bits.
    pub number: u32,
    /// Slots of the send queue, and entries of the completion queue, 64 bytes each: a power of two up to [`SLOTS_MAX`].
    pub slots: u32,
    /// The send queue, on a border of 64 bytes.
    pub send_queue: u64,
    /// The send queue's doorbell record, 4 bytes: not that of the receive queue, which stands before it.
    pub send_record: u64,
    /// What is rung, by [`Self::handler`]: 8 bytes, or 8 a slot.
    pub doorbell: u64,
    /// The completion queue's number, 24 bits: what wait entries of a companion name.
    pub completion_number: u32,
    /// The completion queue, on a border of 64 bytes. Its entries have the owner bit 1 and the opcode 15 at first.
    pub completion_queue: u64,
    /// The completion queue's doorbell record, 4 bytes; 0: none, since NCCL's device code writes none.
    pub completion_record: u64,
    /// Completions are not looked for in the completion queue: whoever made the queue pair adds to what device code
    /// counts of them, where [`super::Image::count_at`] says.
    pub is_counted: bool,
    /// How entries are handed over.
    pub handler: Handler,
}

/// What a (context, peer) has. Towards oneself it is the requester, as towards anybody: a responder that hardware needs
/// at the other end is no part of what device code sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerQueues {
    /// Carries operations.
    pub main: QueuePair,
    /// Carries what increments counters: there if, and only if, the context has counters.
    pub companion: Option<QueuePair>,
}

impl QueuePair {
    /// Whether device code of this layout can use it. `of` says which it is.
    pub(super) fn check(&self, layout: Layout, of: impl Fn() -> String) -> Result<()> {
        let refused = |what: String| Err(Error::argument(format!("the queue pair of {}: {what}", of())));
        if !self.slots.is_power_of_two() || self.slots > SLOTS_MAX {
            return refused(format!("{} slots; a power of two up to {SLOTS_MAX} is possible", self.slots));
        }
        for (name, number) in [("number", self.number), ("completion number", self.completion_number)] {
            if number >= NUMBER_END {
                return refused(format!("{name} {number:#x} has more than 24 bits"));
            }
        }
        for (name, address, border, may_lack) in [
            ("send queue", self.send_queue, 64, false),
            ("completion queue", self.completion_queue, 64, false),
            ("doorbell", self.doorbell, 8, false),
            ("send doorbell record", self.send_record, 4, !self.handler.has_record()),
            ("completion doorbell record", self.completion_record, 4, true),
        ] {
            if address % border != 0 || address == 0 && !may_lack {
                return refused(format!("its {name} is at {address:#x}; it needs a border of {border} bytes"));
            }
        }
        if self.is_counted && layout != Layout::V3 {
            return refused("kernels of NCCL before 2.31.2 look for completions in the completion queue alone".into());
        }
        if self.handler == Handler::FreeFlow && layout != Layout::V3 {
            return refused("kernels of NCCL before 2.31.2 do not know the free-flow handler".into());
        }
        Ok(())
    }

    /// The number and as many segments, as the second word of an entry has them.
    fn with_segments(&self, segments: u32) -> u32 {
        (self.number << 8 | segments).to_be()
    }

    /// As NCCL 2.29.7 reads it; nothing was posted yet.
    pub(super) fn v1(&self) -> QueuePairV1 {
        QueuePairV1 {
            sq_rsvd_index: 0,
            sq_ready_index: 0,
            sq_wqe_pi: 0,
            sq_num: self.number,
            sq_num_shift8: self.number << 8,
            sq_num_shift8_be: self.with_segments(0),
            sq_num_shift8_be_1ds: self.with_segments(1),
            sq_num_shift8_be_2ds: self.with_segments(2),
            sq_num_shift8_be_3ds: self.with_segments(3),
            sq_num_shift8_be_4ds: self.with_segments(4),
            sq_lock: 0,
            sq_wqe_num: self.slots as u16,
            sq_wqe_mask: (self.slots - 1) as u16,
            sq_wqe_daddr: self.send_queue,
            sq_dbrec: self.send_record,
            sq_db: self.doorbell,
            reserved1: [0; 9],
            cq_sq: CompletionQueueV1 {
                cqe_daddr: self.completion_queue,
                cq_num: self.completion_number,
                cqe_num: self.slots,
                dbrec: self.completion_record,
                cqe_ci: 0,
                cqe_mask: self.slots - 1,
                cqe_size: ENTRY_BYTES,
                cqe_rsvd: 0,
                mem_type: MEMORY_GPU,
            },
            reserved2: [0; 7],
            nic_handler: self.handler.code(),
            mem_type: MEMORY_GPU,
        }
    }

    /// As NCCL 2.30.3 and newer read it; nothing was posted yet.
    pub(super) fn v2(&self) -> QueuePairV2 {
        QueuePairV2 {
            sq_rsvd_index: 0,
            sq_ready_index: 0,
            sq_wqe_pi: 0,
            sq_num: self.number,
            sq_num_shift8: self.number << 8,
            sq_num_shift8_be: self.with_segments(0),
            sq_num_shift8_be_1ds: self.with_segments(1),
            sq_num_shift8_be_2ds: self.with_segments(2),
            sq_num_shift8_be_3ds: self.with_segments(3),
            sq_num_shift8_be_4ds: self.with_segments(4),
            sq_num_shift8_be_5ds: self.with_segments(5),
            sq_lock: 0,
            sq_wqe_num: self.slots as u16,
            sq_wqe_mask: (self.slots - 1) as u16,
            sq_wqe_daddr: self.send_queue,
            sq_dbrec: self.send_record,
            sq_db: self.doorbell,
            reserved1: [0],
            reserved2: [0; 8],
            cq_sq: CompletionQueueV2 {
                cqe_daddr: self.completion_queue,
                cq_num: self.completion_number,
                cqe_num: self.slots,
                dbrec: self.completion_record,
                cqe_ci: 0,
                cqe_mask: self.slots - 1,
                cqe_size: ENTRY_BYTES,
                cq_type: if self.is_counted { COMPLETION_COUNTED } else { COMPLETION_RING },
                reserved1: [0; 2],
                cqe_rsvd: 0,
                mem_type: MEMORY_GPU,
                reserved2: [0; 12],
            },
            reserved3: [0; 8],
            nic_handler: self.handler.code(),
            mem_type: MEMORY_GPU,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_code_is_told_by_its_own_numbers() {
        let told = |ringing: Ringing| Handler::from(ringing).code();
        assert_eq!([Ringing::Doorbell, Ringing::Proxy, Ringing::FreeFlow].map(told), [2, 1, 17]);
    }
}
