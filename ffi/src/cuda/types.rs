//! Types and constants of the driver API.

#![allow(non_camel_case_types, reason = "the driver's own names")]

use std::ffi::{c_int, c_uint, c_void};

/// A result code; 0 is success.
pub type CUresult = c_int;
/// An address in a GPU's address space; with unified addressing also one of the host's.
pub type CUdeviceptr = u64;
/// A device's number.
pub type CUdevice = c_int;
/// A context.
pub type CUcontext = *mut c_void;
/// A stream.
pub type CUstream = *mut c_void;
/// An event.
pub type CUevent = *mut c_void;

/// `CUDA_SUCCESS`.
pub const CUDA_SUCCESS: CUresult = 0;
/// `CUDA_ERROR_INVALID_VALUE`.
pub const CUDA_ERROR_INVALID_VALUE: CUresult = 1;
/// `CUDA_ERROR_NOT_READY`: the stream still works.
pub const CUDA_ERROR_NOT_READY: CUresult = 600;

/// `CU_STREAM_NON_BLOCKING`: no implicit order with the legacy stream.
pub const CU_STREAM_NON_BLOCKING: c_uint = 1;
/// `CU_EVENT_DISABLE_TIMING`: an event that takes no times, which is quicker.
pub const CU_EVENT_DISABLE_TIMING: c_uint = 2;
/// `CU_MEMHOSTALLOC_PORTABLE`: pinned for every context.
pub const CU_MEMHOSTALLOC_PORTABLE: c_uint = 1;
/// `CU_MEMHOSTALLOC_DEVICEMAP`: GPUs may read and write it.
pub const CU_MEMHOSTALLOC_DEVICEMAP: c_uint = 2;

/// `CU_POINTER_ATTRIBUTE_CONTEXT`; NULL for virtual memory management and pool allocations.
pub const CU_POINTER_ATTRIBUTE_CONTEXT: c_uint = 1;
/// `CU_POINTER_ATTRIBUTE_MEMORY_TYPE`.
pub const CU_POINTER_ATTRIBUTE_MEMORY_TYPE: c_uint = 2;
/// `CU_POINTER_ATTRIBUTE_IS_MANAGED`.
pub const CU_POINTER_ATTRIBUTE_IS_MANAGED: c_uint = 8;
/// `CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL`.
pub const CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: c_uint = 9;
/// `CU_MEMORYTYPE_HOST`.
pub const CU_MEMORYTYPE_HOST: c_uint = 1;
/// `CU_MEMORYTYPE_DEVICE`.
pub const CU_MEMORYTYPE_DEVICE: c_uint = 2;
/// `CU_MEMORYTYPE_UNIFIED`: the address says what it is.
pub const CU_MEMORYTYPE_UNIFIED: c_uint = 4;

/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
pub const CU_STREAM_CAPTURE_MODE_RELAXED: c_uint = 2;

/// `CU_LIMIT_STACK_SIZE`.
pub const CU_LIMIT_STACK_SIZE: c_uint = 0;

/// `CUDA_MEMCPY2D`: a copy of rows.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the driver's own fields")]
pub struct CUDA_MEMCPY2D {
    pub src_x: usize,
    pub src_y: usize,
    pub src_memory_type: c_uint,
    pub src_host: *const c_void,
    pub src_device: CUdeviceptr,
    pub src_array: *mut c_void,
    pub src_pitch: usize,
    pub dst_x: usize,
    pub dst_y: usize,
    pub dst_memory_type: c_uint,
    pub dst_host: *mut c_void,
    pub dst_device: CUdeviceptr,
    pub dst_array: *mut c_void,
    pub dst_pitch: usize,
    /// Bytes of a row.
    pub width: usize,
    /// Rows.
    pub height: usize,
}

impl Default for CUDA_MEMCPY2D {
    fn default() -> Self {
        Self {
            src_x: 0,
            src_y: 0,
            src_memory_type: 0,
            src_host: std::ptr::null(),
            src_device: 0,
            src_array: std::ptr::null_mut(),
            src_pitch: 0,
            dst_x: 0,
            dst_y: 0,
            dst_memory_type: 0,
            dst_host: std::ptr::null_mut(),
            dst_device: 0,
            dst_array: std::ptr::null_mut(),
            dst_pitch: 0,
            width: 0,
            height: 0,
        }
    }
}

/// `CU_DEVICE_ATTRIBUTE_ATOMIC_REDUCTION_SUPPORTED`: streams can add to memory (CUDA 13 and later).
pub const CU_DEVICE_ATTRIBUTE_ATOMIC_REDUCTION_SUPPORTED: c_int = 148;

const CU_STREAM_MEM_OP_WRITE_VALUE_32: c_uint = 2;
const CU_STREAM_MEM_OP_WRITE_VALUE_64: c_uint = 5;
const CU_STREAM_MEM_OP_ATOMIC_REDUCTION: c_uint = 8;
/// `CU_STREAM_ATOMIC_REDUCTION_OP_ADD`.
const REDUCTION_ADD: u64 = 0;
/// `CU_STREAM_ATOMIC_REDUCTION_UNSIGNED_64`.
const REDUCTION_U64: u64 = 0x16;

/// `CUstreamBatchMemOpParams`: a union of 48 bytes, here as its words.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemOp(pub [u64; 6]);

/// What a [`MemOp`] does, read back (for a driver of tests).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemOpKind {
    /// Stores 4 bytes.
    Write32(u32),
    /// Stores 8 bytes.
    Write64(u64),
    /// Adds to 8 bytes, atomically.
    Add64(u64),
}

impl MemOp {
    /// Stores 8 bytes at `at`, after everything before it on the stream is visible.
    pub fn write64(at: CUdeviceptr, value: u64) -> Self {
        Self([CU_STREAM_MEM_OP_WRITE_VALUE_64.into(), at, value, 0, 0, 0])
    }

    /// Stores 4 bytes at `at`.
    pub fn write32(at: CUdeviceptr, value: u32) -> Self {
        Self([CU_STREAM_MEM_OP_WRITE_VALUE_32.into(), at, value.into(), 0, 0, 0])
    }

    /// Adds to 8 bytes at `at`; needs `CU_DEVICE_ATTRIBUTE_ATOMIC_REDUCTION_SUPPORTED`.
    pub fn add64(at: CUdeviceptr, value: u64) -> Self {
        // operation and flags, then the operator and the data type, each 32 bits.
        Self([CU_STREAM_MEM_OP_ATOMIC_REDUCTION.into(), REDUCTION_ADD | REDUCTION_U64 << 32, at, value, 0, 0])
    }

    /// The addition of [`MemOp::add64`] with `value` more.
    pub fn plus(mut self, value: u64) -> Self {
        debug_assert!(matches!(self.parse(), Some((_, MemOpKind::Add64(_)))));
        self.0[3] = self.0[3].wrapping_add(value);
        self
    }

    /// The address and what happens there; `None`: an operation that oxygin does not use.
    pub fn parse(&self) -> Option<(CUdeviceptr, MemOpKind)> {
        let w = &self.0;
        match w[0] as c_uint {
            // Flags: CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER is refused by real drivers.
            CU_STREAM_MEM_OP_WRITE_VALUE_32 | CU_STREAM_MEM_OP_WRITE_VALUE_64 if w[3] as c_uint != 0 => None,
            CU_STREAM_MEM_OP_WRITE_VALUE_32 => Some((w[1], MemOpKind::Write32(w[2] as u32))),
            CU_STREAM_MEM_OP_WRITE_VALUE_64 => Some((w[1], MemOpKind::Write64(w[2]))),
            CU_STREAM_MEM_OP_ATOMIC_REDUCTION if w[1] == (REDUCTION_ADD | REDUCTION_U64 << 32) => {
                Some((w[2], MemOpKind::Add64(w[3])))
            }
            _ => None,
        }
    }
}

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CUmemLocation {
    /// Its kind; 0: not said.
    pub kind: c_uint,
    /// The device.
    pub id: c_int,
}

/// `CUmemcpyAttributes`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CUmemcpyAttributes {
    /// When the source is read; 1: in stream order.
    pub src_access_order: c_uint,
    /// Only for managed memory.
    pub src_hint: CUmemLocation,
    /// Only for managed memory.
    pub dst_hint: CUmemLocation,
    /// `CUmemcpyFlags`.
    pub flags: c_uint,
}

/// `CU_MEMCPY_SRC_ACCESS_ORDER_STREAM`.
pub const CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: c_uint = 1;
