//! Streams, and the copies and stores that go on one.

use super::objects::CudaError;
use super::symbols::CopyBatch;
use super::types::*;
use super::Cuda;
use std::ffi::c_uint;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

/// A stream without implicit order to any other. Every method needs the stream's context to be current.
pub struct Stream {
    pub(super) cuda: Arc<Cuda>,
    pub(super) raw: CUstream,
    /// The driver refused a batch of copies once: one by one from then on.
    no_batch: AtomicBool,
}

// SAFETY: streams may be used from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

/// Copies of one call.
#[derive(Default)]
pub struct Copies {
    to: Vec<CUdeviceptr>,
    from: Vec<CUdeviceptr>,
    bytes: Vec<usize>,
}

impl Copies {
    /// Adds one between any two addresses.
    pub fn push(&mut self, to: CUdeviceptr, from: CUdeviceptr, bytes: usize) {
        self.to.push(to);
        self.from.push(from);
        self.bytes.push(bytes);
    }

    /// Makes the copy at place `i` longer, if this one begins at both ends where that ends.
    pub fn join(&mut self, i: usize, to: CUdeviceptr, from: CUdeviceptr, bytes: usize) -> bool {
        let n = self.bytes[i] as u64;
        let follows = self.to[i] + n == to && self.from[i] + n == from;
        if follows {
            self.bytes[i] += bytes;
        }
        follows
    }

    /// Each one's destination, source and bytes.
    pub fn iter(&self) -> impl Iterator<Item = (CUdeviceptr, CUdeviceptr, usize)> + '_ {
        self.to.iter().zip(&self.from).zip(&self.bytes).map(|((&to, &from), &bytes)| (to, from, bytes))
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.to.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.to.is_empty()
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        self.to.clear();
        self.from.clear();
        self.bytes.clear();
    }
}

/// Operations that one cuStreamBatchMemOp takes: the driver API's manual says of `count` "Must be less than 256", and
/// driver 580 refuses 257 with CUDA_ERROR_INVALID_VALUE.
pub const MEM_OPS_MAX: usize = 255;
/// Copies that go in one cuMemcpyBatchAsync. The manual names no limit; 256 were measured.
const COPIES_MAX: usize = 256;

impl Stream {
    /// A stream in the current context, of the highest priority: what it does is short, and kernels wait for it.
    pub fn create(cuda: &Arc<Cuda>) -> Result<Self, CudaError> {
        let (mut lowest, mut highest, mut raw) = (0, 0, null_mut());
        // SAFETY: places for the answers.
        let code = unsafe { (cuda.priority_range)(&mut lowest, &mut highest) };
        cuda.check("cuCtxGetStreamPriorityRange", code)?;
        // SAFETY: a place for the answer.
        cuda.call(&"cuStreamCreateWithPriority", || unsafe {
            (cuda.stream_create)(&mut raw, CU_STREAM_NON_BLOCKING, highest)
        })?;
        Ok(Self { cuda: cuda.clone(), raw, no_batch: AtomicBool::new(false) })
    }

    pub(super) fn raw(&self) -> CUstream {
        self.raw
    }

    pub(super) fn cuda(&self) -> &Arc<Cuda> {
        &self.cuda
    }

    /// Starts copies, after what was started before. Among themselves they have no order.
    ///
    /// # Safety
    /// The ranges stay valid until the stream is past them.
    pub unsafe fn copy(&self, copies: &Copies) -> Result<(), CudaError> {
        let n = copies.len();
        if let Some(batch) = self.cuda.copy_batch.filter(|_| n > 1 && !self.no_batch.load(Ordering::Relaxed)) {
            // SAFETY: passed on.
            if (0..n).step_by(COPIES_MAX).all(|at| unsafe { self.copy_batch(batch, copies, at) }.is_ok()) {
                return Ok(());
            }
            // A real fault shows again below; copies that were started before are only repeated.
            self.no_batch.store(true, Ordering::Relaxed);
        }
        // SAFETY: the caller's promise.
        copies.iter().try_for_each(|(to, from, bytes)| unsafe { self.copy_one(to, from, bytes) })
    }

    /// Starts one copy.
    ///
    /// # Safety
    /// As for `copy`.
    pub unsafe fn copy_one(&self, to: CUdeviceptr, from: CUdeviceptr, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        self.cuda.call(&"cuMemcpyAsync", || unsafe { (self.cuda.copy)(to, from, bytes, self.raw) })
    }

    /// Up to `COPIES_MAX` copies from number `at` on, which exists.
    ///
    /// # Safety
    /// As for `copy`.
    unsafe fn copy_batch(&self, batch: CopyBatch, c: &Copies, at: usize) -> Result<(), CudaError> {
        let n = (c.len() - at).min(COPIES_MAX);
        let (to, from, bytes) = (c.to[at..].as_ptr(), c.from[at..].as_ptr(), c.bytes[at..].as_ptr());
        let attributes =
            CUmemcpyAttributes { src_access_order: CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, ..Default::default() };
        let (first, mut failed) = (0usize, 0usize);
        // SAFETY: n of each; one attribute set that holds from copy 0 on; the ranges are the caller's promise.
        self.cuda.call(&"cuMemcpyBatchAsync", || unsafe {
            match batch {
                CopyBatch::V2(f) => f(to, from, bytes, n, &attributes, &first, 1, self.raw),
                CopyBatch::V1(f) => f(to, from, bytes, n, &attributes, &first, 1, &mut failed, self.raw),
            }
        })
    }

    /// Starts stores and additions, in their order, after what was started before.
    ///
    /// # Safety
    /// The words stay valid until the stream is past them.
    pub unsafe fn mem_ops(&self, ops: &mut [MemOp]) -> Result<(), CudaError> {
        for chunk in ops.chunks_mut(MEM_OPS_MAX) {
            // SAFETY: as many as said; the words are the caller's promise.
            self.cuda.call(&"cuStreamBatchMemOp", || unsafe {
                (self.cuda.mem_ops)(self.raw, chunk.len() as c_uint, chunk.as_mut_ptr(), 0)
            })?;
        }
        Ok(())
    }

    /// Whether everything started is done; an error when something failed. Does not wait.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        let mut code = CUDA_SUCCESS;
        self.cuda.call(&"cuStreamQuery", || {
            // SAFETY: the stream lives.
            code = unsafe { (self.cuda.stream_query)(self.raw) };
            // No error, and asked for too often to make a sentence of it.
            if code == CUDA_ERROR_NOT_READY {
                CUDA_SUCCESS
            } else {
                code
            }
        })?;
        Ok(code == CUDA_SUCCESS)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: made in `create`, ended once; the driver lets its work finish.
        let _ = self.cuda.call(&"cuStreamDestroy", || unsafe { (self.cuda.stream_destroy)(self.raw) });
    }
}
