//! GPU windows over verbs through the RMA v16 table, as NCCL registers and uses them.

use crate::harness::{fake_path, Fake};
use crate::support::apart::is_elsewhere;
use crate::support::common::*;
use crate::support::cuda::{open_exports, Cuda, Memory};
use nccl_plugin_api::*;
use oxygin::vtable::rma_v16::ncclRmaPlugin_v16 as T;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

/// GPU memory as a window, by DMA-BUF as NCCL passes it, or by address.
fn window(cuda: &Cuda, r: &Rank, words: usize, flags: u64, dma_buf: bool) -> (Memory, Window) {
    let memory = cuda.alloc(r.rank as i32, words, flags != 0, false);
    let mut window = r.not_registered(0);
    let (at, bytes) = (memory.at as *mut c_void, words * 8);
    // SAFETY: device memory that stays; the descriptor is closed after the call, as NCCL does.
    unsafe {
        if dma_buf {
            let fd = cuda.export(r.rank as i32, &memory);
            ok(T.reg_mr_sym_dma_buf.unwrap()(r.coll, at, bytes, PTR_CUDA, 0, fd, flags, &mut window.handle));
            libc::close(fd);
        } else {
            ok(T.reg_mr_sym.unwrap()(r.coll, at, bytes, PTR_CUDA, flags, &mut window.handle));
        }
    }
    (memory, window)
}

#[test]
fn ranks_put_signal_get_and_flush_gpu_memory() {
    // The tables keep the process's list of devices, which others count as left.
    if is_elsewhere(concat!(module_path!(), "::ranks_put_signal_get_and_flush_gpu_memory")) {
        return;
    }
    let _fake = Fake::take();
    std::env::set_var("OXYGIN_FABRIC", "verbs");
    let cuda = Cuda::meet(&fake_path());
    const SIGNALS: u64 = MR_FLAG_FORCE_SO | MR_FLAG_SIGNALS_NEVER_RESET;
    job(3, 2, |r| {
        let props = [0, 1].map(|device| {
            // SAFETY: a place for the answer.
            unsafe {
                let mut props = std::mem::zeroed::<PropertiesV12>();
                ok(T.get_properties.unwrap()(device, &mut props));
                props
            }
        });
        assert_eq!(props[0].ptr_support, PTR_HOST | PTR_CUDA | PTR_DMABUF);
        // NCCL keeps one entry for devices of one name: none that its own plugin for InfiniBand uses, and one a port.
        // SAFETY: the names stay.
        let names = props.map(|props| unsafe { std::ffi::CStr::from_ptr(props.name) });
        assert_eq!(names, [c"oxygin-fake_0:1", c"oxygin-fake_1:1"]);
        for dma_buf in [true, false] {
            // NCCL's progress thread may have another GPU's context current.
            let _other = cuda.enter((r.rank as i32 + 1) % 3);
            let n = r.job.nranks;
            let (src, src_window) = window(&cuda, r, 1024, 0, dma_buf);
            let (dst, dst_window) = window(&cuda, r, 1024 * n, 0, dma_buf);
            let (sums, sums_window) = window(&cuda, r, n, SIGNALS, dma_buf);
            for i in 0..1024 {
                src.set(i, (r.rank as u64) << 32 | i as u64);
            }
            r.job.barrier.wait();
            for to in 0..n {
                let signal = Some((&sums_window, r.rank as u64 * 8, 5));
                let q = r.put(1, (&src_window, 0), 8192, (&dst_window, r.rank as u64 * 8192), to, signal);
                r.wait(q);
            }
            for from in 0..n {
                let end = Instant::now() + Duration::from_secs(60);
                while sums.get(from) < 5 {
                    // SAFETY: plain call.
                    ok(unsafe { T.rma_progress.unwrap()(r.ctx) });
                    assert!(Instant::now() < end, "signal {from} is {} after 60 s", sums.get(from));
                }
                for i in 0..1024 {
                    assert_eq!(dst.get(from * 1024 + i), (from as u64) << 32 | i as u64, "word {i} from {from}");
                }
            }
            r.job.barrier.wait();
            let peer = (r.rank + 1) % n;
            r.wait(r.get(0, (&src_window, 4096), 4096, (&dst_window, 0), peer));
            let mut flush = null_mut();
            // SAFETY: plain calls.
            ok(unsafe { T.iflush.unwrap()(r.ctx, 0, dst_window.handle, peer as u32, &mut flush) });
            assert!(!flush.is_null(), "GPU memory needs a read");
            r.wait(flush);
            for i in 0..512 {
                assert_eq!(dst.get(i), (peer as u64) << 32 | (i as u64 + 512));
            }
            r.job.barrier.wait();
            [&src_window, &dst_window, &sums_window].into_iter().for_each(|w| r.dereg(w));
        }
        r.job.barrier.wait();
        assert_eq!(open_exports(), 0);
        r.job.barrier.wait();
        // Managed memory on one rank: every rank hears of it at once.
        let memory = cuda.alloc(r.rank as i32, 8, false, r.rank == 1);
        let mut handle = null_mut();
        // SAFETY: as above.
        let refused = unsafe { T.reg_mr_sym.unwrap()(r.coll, memory.at as *mut c_void, 64, PTR_CUDA, 0, &mut handle) };
        assert_eq!(refused, if r.rank == 1 { NcclResult::INVALID_USAGE } else { NcclResult::REMOTE_ERROR });
    });
    cuda.check();
}
