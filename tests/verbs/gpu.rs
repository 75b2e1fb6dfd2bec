//! GPU windows over the fake libibverbs and the fake CUDA driver: every way to register them, and data and signals into
//! them, with contents checked.

use crate::harness::*;
use crate::support::cuda::{exports, open_exports, Cuda, Memory};
use crate::support::logged::{collect, lines};
use nccl_plugin_api::NcclResult;
use oxygin::config::Config;
use oxygin::error::Error;
use oxygin::fabric::{Context, ContextSpec, Fabric, Region};
use oxygin::memory::gpu;
use oxygin::memory::window::Registration;
use oxygin::rma::op::{Get, Put, Signal};
use std::os::fd::RawFd;

/// Lines of level info about GPU memory since the last call.
fn said() -> Vec<String> {
    let lines = std::mem::take(&mut *lines());
    let about = |l: &(log::Level, String)| l.0 == log::Level::Info && l.1.contains("GPU memory is registered");
    lines.into_iter().filter(about).map(|l| l.1).collect()
}

/// Both fakes, the log collected.
pub(super) fn take() -> (Fake, Cuda) {
    let fake = Fake::take();
    collect();
    let cuda = Cuda::meet(&fake_path());
    (fake, cuda)
}

/// A GPU window of one rank.
pub(super) struct Window {
    pub memory: Memory,
    pub registration: Registration,
}

/// Registers memory as regMrSym (`fd` is `None`) or regMrSymDmaBuf do.
fn register(r: &Rank, id: u32, memory: &Memory, strict: bool, fd: Option<RawFd>) -> Result<Registration, Error> {
    let region = Region { id, base: memory.at, len: memory.bytes(), strict, dma_buf: fd.map(|fd| (fd, 0)) };
    r.fabric.register_gpu(&region, &gpu::inspect(region.base, region.len, strict)?.expect("GPU memory"))
}

/// A get of 8 bytes of `b` into a window of `a` in GPU memory.
pub(super) fn bring(a: &Rank, b: &Rank, into: &Window) {
    let g = Get { local: into.memory.at, lkey: into.registration.lkey, ..get(a, 0, b, 0, 8) };
    let (context, peer) = (&a.contexts[0], b.rank);
    // SAFETY: the windows outlive the operation, which is waited for.
    finish(context, peer, unsafe { context.get(peer, &g) }.unwrap());
}

pub(super) fn window(cuda: &Cuda, r: &Rank, id: u32, words: usize, strict: bool, given: bool) -> Result<Window, Error> {
    let memory = cuda.alloc(r.rank as i32, words, strict, false);
    let fd = given.then(|| cuda.export(r.rank as i32, &memory));
    let registration = register(r, id, &memory, strict, fd);
    if let Some(fd) = fd {
        // SAFETY: our own descriptor. NCCL closes its one as early.
        unsafe { libc::close(fd) };
    }
    Ok(Window { memory, registration: registration? })
}

fn put_gpu(from: &Window, local: u64, to: &Window, remote: u64, len: u64, signal: Option<Signal>) -> Put {
    Put {
        local: from.memory.at + local,
        lkey: from.registration.lkey,
        rkey: to.registration.rkey,
        remote: to.memory.at + remote,
        len,
        signal,
        more: false,
    }
}

fn add(to: &Window, word: usize, value: u64) -> Option<Signal> {
    Some(Signal { remote: to.memory.at + 8 * word as u64, rkey: to.registration.rkey, value, strong: true })
}

/// Everything that two ranks on two GPUs do with each other's windows.
fn exercise(fake: &Fake, cuda: &Cuda, ranks: &[Rank], given: bool) {
    let relaxed = fake.count("relaxed_regions");
    let data: Vec<_> = ranks.iter().map(|r| window(cuda, r, 10, 1 << 15, false, given).unwrap()).collect();
    assert_eq!(fake.count("relaxed_regions") - relaxed, 2, "data may be written in relaxed order");
    let signals: Vec<_> = ranks.iter().map(|r| window(cuda, r, 11, 64, true, given).unwrap()).collect();
    assert_eq!(fake.count("relaxed_regions") - relaxed, 2, "signals may not");
    assert_eq!(open_exports(), 0, "descriptors are closed as soon as memory is registered");
    // Nothing of what follows needs a CUDA context: there is none.
    for r in ranks {
        for i in 0..1 << 14 {
            data[r.rank as usize].memory.set(i, u64::from(r.rank + 1) << 32 | i as u64);
        }
    }
    for (me, r) in ranks.iter().enumerate() {
        for (to, _) in ranks.iter().enumerate() {
            // 24 bytes, then all of it, into different places for each sender.
            for (len, at) in [(24, 1 << 17), (1 << 14, (1 << 17) + 64)] {
                let p = put_gpu(&data[me], 8, &data[to], at + (me as u64) * (1 << 16), len, add(&signals[to], me, 3));
                // SAFETY: windows outlive the operations.
                let seq = unsafe { r.contexts[0].put(to as u32, &p) }.unwrap();
                finish(&r.contexts[0], to as u32, seq);
                for i in 0..len / 8 {
                    let word = data[to].memory.get(((at + (me as u64) * (1 << 16)) / 8 + i) as usize);
                    assert_eq!(word, (me as u64 + 1) << 32 | (i + 1), "word {i} of {len} bytes from {me} to {to}");
                }
            }
            assert_eq!(signals[to].memory.get(me), 6);
        }
    }
    // Between host and GPU memory, both ways.
    let (a, b) = (&ranks[0], &ranks[1]);
    a.data.memory.store(0, 77);
    let p = Put { rkey: data[1].registration.rkey, remote: data[1].memory.at, ..put(a, 0, b, 0, 8) };
    // SAFETY: as above.
    finish(&a.contexts[0], 1, unsafe { a.contexts[0].put(1, &p) }.unwrap());
    assert_eq!(data[1].memory.get(0), 77);
    let p = Put { local: data[1].memory.at, lkey: data[1].registration.lkey, ..put(b, 0, a, 8, 8) };
    // SAFETY: as above.
    finish(&b.contexts[0], 0, unsafe { b.contexts[0].put(0, &p) }.unwrap());
    assert_eq!(a.data.memory.word(1), 77);
    // A get, and what makes it visible to kernels: a read of that GPU memory through the device.
    let mut g = Get {
        local: data[0].memory.at + 4096,
        lkey: data[0].registration.lkey,
        rkey: data[1].registration.rkey,
        remote: data[1].memory.at,
        len: 800,
        more: false,
    };
    let before = fake.count("work_requests");
    // SAFETY: as above.
    let seq = unsafe { a.contexts[0].get(1, &g) }.unwrap();
    let flush = a.contexts[0].flushed(1).unwrap().expect("GPU memory needs a read");
    finish(&a.contexts[0], 1, flush);
    assert!(a.contexts[0].test(1, seq).unwrap());
    assert_eq!(fake.count("work_requests") - before, 2, "a get and a local read");
    assert_eq!((fake.count("last_read_key"), fake.count("last_read_bytes")), (data[0].registration.rkey.into(), 1));
    assert_eq!(data[0].memory.get(512), 77);
    for i in 1..100 {
        assert_eq!(data[0].memory.get(512 + i), 2 << 32 | i as u64);
    }
    // One of nothing, at the very end, leaves nothing to flush.
    (g.local, g.len) = (data[0].memory.at + data[0].memory.bytes(), 0);
    // SAFETY: as above.
    finish(&a.contexts[0], 1, unsafe { a.contexts[0].get(1, &g) }.unwrap());
    assert_eq!(a.contexts[0].flushed(1).unwrap(), None);
}

/// Runs `exercise` and returns what the log said, once a rank.
fn by(set_up: impl Fn(&Fake, &Cuda, &mut Rank), config: Config, given: bool) -> String {
    let (fake, cuda) = take();
    let mut ranks = Job { config, ..Default::default() }.start();
    ranks.iter_mut().for_each(|r| set_up(&fake, &cuda, r));
    exercise(&fake, &cuda, &ranks, given);
    let said = said();
    assert_eq!(said.len(), 2, "once a rank, not once a window: {said:?}");
    drop(ranks);
    fake.check_clean();
    cuda.check();
    said[0].clone()
}

fn way(said: &str, way: &str, reasons: &[&str]) {
    assert!(said.contains(&format!("fake_0:1: GPU memory is registered by {way}")), "{said}");
    for reason in reasons {
        assert!(said.contains(reason), "{reason:?} is not in: {said}");
    }
    assert_eq!(said.matches("; by ").count(), reasons.len(), "{said}");
}

#[test]
fn by_the_callers_dma_buf() {
    way(&by(|_, _, _| {}, Config::default(), true), "the caller's DMA-BUF", &[]);
}

#[test]
fn by_a_dma_buf_of_our_own() {
    way(&by(|_, _, _| {}, Config::default(), false), "a DMA-BUF", &[]);
}

#[test]
fn by_a_dma_buf_over_pcie_where_the_platform_has_another_link() {
    let said = by(|_, cuda, _| cuda.exports(exports::PCIE_ONLY), Config::default(), false);
    let refused = "by a DMA-BUF: cuMemGetHandleForAddressRange failed with CUDA_ERROR_INVALID_VALUE (1)";
    way(&said, "a DMA-BUF mapped over PCIe", &[refused]);
}

fn peermem(fake: &Fake, rank: &mut Rank) {
    fake.set("peermem", 1);
    rank.fabric.pretend_peermem(Some("nvidia_peermem"));
}

#[test]
fn by_address_where_the_kernel_registers_no_dma_bufs() {
    let no_dma_buf = |fake: &Fake, _: &Cuda, rank: &mut Rank| {
        fake.set("dmabuf", 0);
        peermem(fake, rank);
    };
    let said = by(no_dma_buf, Config::default(), false);
    way(&said, "address (nvidia_peermem)", &["by a DMA-BUF: Operation not supported"]);
}

#[test]
fn by_address_where_the_gpu_exports_none() {
    let none = |fake: &Fake, cuda: &Cuda, rank: &mut Rank| {
        cuda.exports(exports::NOT_SUPPORTED);
        peermem(fake, rank);
    };
    let said = by(none, Config::default(), false);
    way(&said, "address (nvidia_peermem)", &["by a DMA-BUF of our own: GPU 0 exports none"]);
}

#[test]
fn by_address_where_a_range_has_no_descriptor() {
    let refused = |fake: &Fake, cuda: &Cuda, rank: &mut Rank| {
        cuda.exports(exports::REFUSED);
        peermem(fake, rank);
    };
    let said = by(refused, Config::default(), false);
    way(&said, "address (nvidia_peermem)", &["of several pieces must be of one GPU", "over PCIe: cuMemGetHandle"]);
}

#[test]
fn by_address_where_dma_bufs_are_switched_off() {
    let config = Config { dma_buf: false, ..Config::default() };
    let said = by(|fake, _, rank| peermem(fake, rank), config, true);
    way(&said, "address (nvidia_peermem)", &["by DMA-BUF: NCCL_DMABUF_ENABLE=0"]);
}

#[test]
fn a_library_without_dma_bufs_leaves_registration_by_address() {
    let library = without("ibv_reg_dmabuf_mr");
    let fake = Fake::take_from(&library);
    let cuda = Cuda::meet(&library);
    let mut ranks = Job::default().start();
    ranks.iter_mut().for_each(|r| peermem(&fake, r));
    exercise(&fake, &cuda, &ranks, true);
    ranks[0].fabric.pretend_peermem(None);
    let e = window(&cuda, &ranks[0], 12, 64, false, true).err().unwrap();
    assert!(e.message().contains("by DMA-BUF: libibverbs has no ibv_reg_dmabuf_mr"), "{e}");
    drop(ranks);
    fake.check_clean();
    cuda.check();
}

#[test]
fn a_descriptor_that_is_no_dma_buf_is_replaced_by_one_of_our_own() {
    let (fake, cuda) = take();
    let ranks = Job::default().start();
    let memory = cuda.alloc(0, 64, false, false);
    let wrong = std::fs::File::open("/dev/null").unwrap();
    let fd = std::os::fd::AsRawFd::as_raw_fd(&wrong);
    let registration = register(&ranks[0], 10, &memory, false, Some(fd)).unwrap();
    way(&said()[0], "a DMA-BUF", &["by the caller's DMA-BUF: Invalid argument"]);
    drop((registration, ranks));
    fake.check_clean();
    cuda.check();
}

#[test]
fn odd_addresses_are_found_in_their_pages() {
    let (fake, cuda) = take();
    let ranks = Job::default().start();
    let memory = cuda.alloc(1, 2048, false, false);
    let region = Region { id: 10, base: memory.at + 4088, len: 24, strict: false, dma_buf: None };
    let at = gpu::inspect(region.base, region.len, false).unwrap().unwrap();
    let registration = ranks[1].fabric.register_gpu(&region, &at).unwrap();
    ranks[0].data.memory.store(0, 5);
    let p = Put { rkey: registration.rkey, remote: region.base + 16, ..put(&ranks[0], 0, &ranks[1], 0, 8) };
    // SAFETY: windows outlive the operation.
    finish(&ranks[0].contexts[0], 1, unsafe { ranks[0].contexts[0].put(1, &p) }.unwrap());
    assert_eq!(memory.get((4088 + 16) / 8), 5);
    drop((registration, ranks));
    fake.check_clean();
    cuda.check();
}

#[test]
fn a_descriptor_may_begin_before_the_window() {
    let (fake, cuda) = take();
    let ranks = Job::default().start();
    let memory = cuda.alloc(1, 2048, false, false);
    let fd = cuda.export(1, &memory);
    assert_eq!(open_exports(), 1, "this one shows");
    let region = Region { id: 10, base: memory.at + 8192, len: 4096, strict: false, dma_buf: Some((fd, 8192)) };
    let at = gpu::inspect(region.base, region.len, false).unwrap().unwrap();
    let registration = ranks[1].fabric.register_gpu(&region, &at).unwrap();
    // SAFETY: our own descriptor.
    unsafe { libc::close(fd) };
    way(&said()[0], "the caller's DMA-BUF", &[]);
    ranks[0].data.memory.store(0, 6);
    let p = Put { rkey: registration.rkey, remote: region.base, ..put(&ranks[0], 0, &ranks[1], 0, 8) };
    // SAFETY: windows outlive the operation.
    finish(&ranks[0].contexts[0], 1, unsafe { ranks[0].contexts[0].put(1, &p) }.unwrap());
    assert_eq!((memory.get(0), memory.get(1024)), (0, 6));
    drop((registration, ranks));
    fake.check_clean();
    cuda.check();
}

#[test]
fn when_every_way_fails_one_sentence_has_all_reasons_and_the_remedies() {
    let (fake, cuda) = take();
    let ranks = Job::default().start();
    let refused = |given: bool, reasons: &[&str]| {
        let e = window(&cuda, &ranks[0], 10, 64, false, given).err().unwrap();
        assert_eq!(e.code(), NcclResult::SYSTEM_ERROR);
        for part in
            reasons.iter().chain(&["512 bytes of GPU 0 at 0x", "fake_0:1", "nvidia-peermem", "OXYGIN_FABRIC=soft"])
        {
            assert!(e.message().contains(part), "{part:?} is not in: {e}");
        }
        assert_eq!(open_exports(), 0);
    };
    fake.set("dmabuf_errno", libc::ENOMEM.into());
    let given = "by the caller's DMA-BUF: Cannot allocate memory";
    refused(
        true,
        &[given, "by a DMA-BUF: Cannot", "BAR1", "over PCIe: cuMem", "the kernel has no peer memory module loaded"],
    );
    fake.set("dmabuf", 0);
    refused(true, &["by the caller's DMA-BUF: Operation not supported", "no peer memory module"]);
    cuda.exports(exports::NOT_SUPPORTED);
    fake.set("dmabuf", 1);
    refused(false, &["GPU 0 exports none", "no peer memory module"]);
    cuda.exports(exports::NOT_CAPABLE);
    refused(false, &["it was allocated without gpuDirectRDMACapable", "by a DMA-BUF: cuMemGetHandle"]);
    drop(ranks);
    // A module that is loaded and does not know this memory.
    let mut ranks = Job::default().start();
    ranks[0].fabric.pretend_peermem(Some("nv_peer_mem"));
    let e = window(&cuda, &ranks[0], 10, 64, false, false).err().unwrap();
    assert!(e.message().contains("by address, with nv_peer_mem loaded: Bad address"), "{e}");
    assert!(said().is_empty());
    drop(ranks);
    fake.check_clean();
    cuda.check();
}

#[test]
fn a_cuda_context_that_is_gone_is_a_reason_and_no_crash() {
    let (fake, cuda) = take();
    let ranks = Job::default().start();
    let memory = cuda.alloc(0, 64, false, false);
    let region = Region { id: 10, base: memory.at, len: 512, strict: false, dma_buf: None };
    let at = gpu::inspect(region.base, region.len, false).unwrap().unwrap();
    cuda.inject("cuCtxPushCurrent", 201);
    // The second try, over PCIe, is refused by the driver.
    let e = ranks[0].fabric.register_gpu(&region, &at).err().unwrap();
    assert!(e.message().contains("cuCtxPushCurrent failed with CUDA_ERROR_INVALID_CONTEXT (201)"), "{e}");
    drop(ranks);
    fake.check_clean();
    cuda.check();
}

#[test]
fn memory_of_a_second_gpu_and_managed_memory_are_refused() {
    let (fake, cuda) = take();
    let ranks = Job::default().start();
    let first = window(&cuda, &ranks[0], 10, 64, false, false).unwrap();
    let e = register(&ranks[0], 11, &cuda.alloc(1, 64, false, false), false, None).err().unwrap();
    assert!(e.message().contains("windows are on GPU 0; register memory of one GPU"), "{e}");
    let e = register(&ranks[0], 11, &cuda.alloc(0, 64, false, true), false, None).err().unwrap();
    assert!(e.message().contains("is managed memory"), "{e}");
    drop((first, ranks));
    fake.check_clean();
    cuda.check();
}

#[test]
fn without_remote_atomics_data_may_be_on_gpus_and_signals_may_not() {
    let (fake, cuda) = take();
    fake.set("atomic_cap@1", 0);
    let ranks = Job { devices: 2, ..Default::default() }.start();
    let (a, b) = (&ranks[0], &ranks[1]);
    let from = window(&cuda, a, 10, 64, false, false).unwrap();
    let to = window(&cuda, b, 10, 64, false, false).unwrap();
    for (r, device) in [(a, "fake_0:1"), (b, "fake_1:1")] {
        let e = window(&cuda, r, 11, 64, true, true).err().unwrap();
        let parts = ["devices of ranks 1 have no remote atomics", device, "NCCL_IB_HCA", "OXYGIN_FABRIC=soft"];
        assert!(parts.iter().all(|p| e.message().contains(p)), "{e}");
    }
    // With the signal in host memory it works.
    from.memory.set(3, 99);
    let p = put_gpu(&from, 24, &to, 40, 8, signal(b, 2, 7));
    // SAFETY: windows outlive the operations.
    finish(&a.contexts[0], 1, unsafe { a.contexts[0].put(1, &p) }.unwrap());
    until("the signal", || {
        b.contexts[0].progress().unwrap();
        b.signals.memory.word(2) == 7
    });
    assert_eq!(to.memory.get(5), 99);
    // One that goes to GPU memory all the same ends the connection with a sentence; no CPU touches that memory.
    let p = put_gpu(&from, 0, &to, 0, 8, add(&to, 1, 1));
    // SAFETY: as above.
    unsafe { a.contexts[0].put(1, &p) }.unwrap();
    until("the refusal", || {
        b.contexts[0].progress().unwrap();
        b.contexts[0].has_error()
    });
    let e = b.contexts[0].flushed(0).unwrap_err();
    assert!(e.message().contains("without remote atomics signals cannot go to GPU memory"), "{e}");
    assert_eq!(to.memory.get(1), 0);
    drop((from, to, ranks));
    fake.check_clean();
    cuda.check();
}

#[test]
fn signals_from_all_sides_add_up_and_follow_their_data() {
    let (fake, cuda) = take();
    fake.set("late", 1);
    fake.set("seed", 11);
    const N: u64 = 1500;
    let spec = ContextSpec { contexts: 1, queue_depth: 32, traffic_class: None, rank_stride: 1 };
    let ranks = Job { ranks: 3, spec, ..Default::default() }.start();
    let data: Vec<_> = ranks.iter().map(|r| window(&cuda, r, 10, 1 << 12, false, false).unwrap()).collect();
    let sums: Vec<_> = ranks.iter().map(|r| window(&cuda, r, 11, 64, true, false).unwrap()).collect();
    std::thread::scope(|s| {
        for (me, r) in ranks.iter().enumerate().skip(1) {
            let (data, sums) = (&data, &sums);
            s.spawn(move || {
                let mut last = None;
                for round in 1..=N {
                    // Sources rotate; each is free again long before its turn.
                    let slot = round % 1024;
                    if slot == 0 {
                        finish(&r.contexts[0], 0, last.unwrap());
                    }
                    data[me].memory.set(slot as usize, round);
                    let more = round % 3 != 0 && round != N;
                    let to = (1 << 14) + 64 * me as u64;
                    let p = Put {
                        more,
                        ..put_gpu(&data[me], 8 * slot, &data[0], to, 8, add(&sums[0], 0, 1 << (32 * (me - 1))))
                    };
                    // SAFETY: windows outlive the operations.
                    last = Some(unsafe { r.contexts[0].put(0, &p) }.unwrap());
                }
                finish(&r.contexts[0], 0, last.unwrap());
            });
        }
        let seen = |me: usize| sums[0].memory.get(0) >> (32 * (me - 1)) & 0xffff_ffff;
        until("all signals", || {
            ranks[0].contexts[0].progress().unwrap();
            for me in 1..3 {
                let signals = seen(me);
                let word = data[0].memory.get((1 << 11) + 8 * me);
                assert!(word >= signals, "signal {signals} of rank {me} came before its data {word}");
            }
            (1..3).all(|me| seen(me) == N)
        });
    });
    drop((data, sums, ranks));
    fake.check_clean();
    cuda.check();
}

/// Words in GPU memory, fetched values in this rank's GPU memory, which the CPU cannot write.
#[test]
fn atomic_operations_change_gpu_memory_and_fetch_to_it() {
    use crate::support::atomics::{as_a_model_does, Words};
    let (fake, cuda) = take();
    for late in [0, 1] {
        fake.set("late", late);
        let ranks = Job::default().start();
        let words: Vec<_> = ranks.iter().map(|r| window(&cuda, r, 10, 8, true, true).unwrap()).collect();
        for (peer, of) in (0..).zip(&words) {
            let here = window(&cuda, &ranks[0], 11 + peer, 64, false, true).unwrap();
            let [of, to] = [(of, of.registration.rkey), (&here, here.registration.lkey)]
                .map(|(w, key)| Words { base: w.memory.at, key });
            as_a_model_does(&ranks[0].contexts[0], peer, of, to, |at| here.memory.get(at as usize / 8), 40);
        }
        drop((words, ranks));
    }
    cuda.check();
    fake.check_clean();
}
