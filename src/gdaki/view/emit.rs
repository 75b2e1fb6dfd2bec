//! Structures as bytes, field by field: padding stays as it was, which is zero.

use nccl_plugin_api::gdaki::context_v1::ContextV1;
use nccl_plugin_api::gdaki::context_v2::ContextV2;
use nccl_plugin_api::gdaki::queue_pair_v1::{CompletionQueueV1, QueuePairV1};
use nccl_plugin_api::gdaki::queue_pair_v2::{CompletionQueueV2, QueuePairV2};
use nccl_plugin_api::gdaki::table::BufferTable;
use nccl_plugin_api::gdaki::window::WindowHandle;
use std::mem::offset_of;

/// What can be written into memory of device code.
pub(super) trait Emit {
    /// Writes it at a place that has room for it.
    fn emit(&self, out: &mut [u8], at: usize);
}

macro_rules! numbers {
    ($($type:ty)*) => {$(
        impl Emit for $type {
            fn emit(&self, out: &mut [u8], at: usize) {
                out[at..at + size_of::<Self>()].copy_from_slice(&self.to_ne_bytes());
            }
        }
    )*};
}

numbers! { u8 u16 u32 i32 u64 }

impl Emit for bool {
    fn emit(&self, out: &mut [u8], at: usize) {
        u8::from(*self).emit(out, at);
    }
}

impl<T: Emit, const N: usize> Emit for [T; N] {
    fn emit(&self, out: &mut [u8], at: usize) {
        for (i, one) in self.iter().enumerate() {
            one.emit(out, at + i * size_of::<T>());
        }
    }
}

/// The fields of structures. A list that lacks one does not compile.
macro_rules! structures {
    ($($type:ident { $($field:ident),* $(,)? })*) => {$(
        impl Emit for $type {
            fn emit(&self, out: &mut [u8], at: usize) {
                let Self { $($field),* } = self;
                $($field.emit(out, at + offset_of!(Self, $field));)*
            }
        }
    )*};
}

structures! {
    BufferTable { buffer, rkeys, lkey, offset }
    WindowHandle { rkeys, lkey }
    ContextV1 { gdqp, companion_gdqp, counters_table, signals_table, sink_buffer_lkey }
    ContextV2 {
        gdqp, companion_gdqp, counters_table, signals_table, sink_buffer_lkey, use_mcst, last_issued_get,
        last_visible_get,
    }
    CompletionQueueV1 { cqe_daddr, cq_num, cqe_num, dbrec, cqe_ci, cqe_mask, cqe_size, cqe_rsvd, mem_type }
    QueuePairV1 {
        sq_rsvd_index, sq_ready_index, sq_wqe_pi, sq_num, sq_num_shift8, sq_num_shift8_be, sq_num_shift8_be_1ds,
        sq_num_shift8_be_2ds, sq_num_shift8_be_3ds, sq_num_shift8_be_4ds, sq_lock, sq_wqe_num, sq_wqe_mask,
        sq_wqe_daddr, sq_dbrec, sq_db, reserved1, cq_sq, reserved2, nic_handler, mem_type,
    }
    CompletionQueueV2 {
        cqe_daddr, cq_num, cqe_num, dbrec, cqe_ci, cqe_mask, cqe_size, cq_type, reserved1, cqe_rsvd, mem_type,
        reserved2,
    }
    QueuePairV2 {
        sq_rsvd_index, sq_ready_index, sq_wqe_pi, sq_num, sq_num_shift8, sq_num_shift8_be, sq_num_shift8_be_1ds,
        sq_num_shift8_be_2ds, sq_num_shift8_be_3ds, sq_num_shift8_be_4ds, sq_num_shift8_be_5ds, sq_lock, sq_wqe_num,
        sq_wqe_mask, sq_wqe_daddr, sq_dbrec, sq_db, reserved1, reserved2, cq_sq, reserved3, nic_handler, mem_type,
    }
}

/// Writes keys one behind the other, big-endian.
pub(super) fn emit_keys(keys: &[u32], out: &mut [u8], at: usize) {
    for (i, key) in keys.iter().enumerate() {
        key.to_be().emit(out, at + 4 * i);
    }
}
