//! Queues, structures and windows in memory of GPUs, over the fake CUDA driver.

use crate::harness::{verbs_path, Fake, V14_2};
use crate::support::common::{job, ok, Job, Rank};
use crate::support::cuda::{exports, Cuda};
use crate::support::kernel::Kernel;
use crate::support::logged::{collect, lines, listen, said};
use crate::support::nic::{read, write, Ask, Raw, Status, DUMP};
use nccl_plugin_api::{NcclResult, PTR_CUDA};

const WORDS: usize = 1024;

/// Both fakes, the log collected.
fn take() -> (Fake, Cuda) {
    let fake = Fake::take();
    collect();
    let cuda = Cuda::meet(&verbs_path());
    (fake, cuda)
}

fn has_said(words: &str) -> bool {
    said(&[words]) > 0
}

/// Two ranks, each on a GPU of its own, whose kernels put, count, signal and get.
pub fn exercise(fake: &Fake, cuda: &Cuda) {
    job(2, 0, |r| {
        listen();
        let (peer, gpu) = (1 - r.rank, r.rank as i32);
        let _context = cuda.enter(gpu);
        let [src, dst] = [(); 2].map(|()| cuda.alloc(gpu, WORDS, false, false));
        let [(_, from), (_, to)] = [&src, &dst].map(|w| V14_2.register(r, w.at, 8 * WORDS, PTR_CUDA));
        let held = |rank: usize, i: usize| ((i as u64) << 8) + rank as u64 + 1;
        (0..WORDS).for_each(|i| src.set(i, held(r.rank, i)));
        assert!([from, to].iter().all(|gin| cuda.see(*gin).is_some()), "records are on the GPU");
        // Whatever kernels are given is where kernels can look: they die of anything else, and so does this.
        let see = |at| cuda.see(at).unwrap_or_else(|| panic!("kernels cannot see {at:#x}"));
        let kernel = Kernel::new(r, V14_2, Ask { contexts: 2, depth: 32, ..Ask::default() }, &see);
        r.job.barrier.wait();
        for round in 1..=100 {
            let put = write(kernel.at(to, peer, 0), kernel.own(from, 0), 512);
            kernel.post_counted((0, peer), &[put, kernel.add_signal(0, peer, 2, 1)], 1);
            kernel.qp(1, r.rank).post(&[kernel.add_signal(1, r.rank, 3, 10)]);
            kernel.wait_signal(0, 2, round);
            kernel.wait_signal(1, 3, 10 * round);
        }
        kernel.wait_counter(0, 1, 100);
        let got = read(kernel.at(from, peer, 4096), kernel.own(to, 6000), 64);
        kernel.qp(0, peer).post(&[got, Raw::new(DUMP, 0).data(kernel.sink(0).0, 0, 1)]);
        assert_eq!(kernel.qp(0, peer).flush(), Status::Good);
        (0..64).for_each(|i| assert_eq!(dst.get(i), held(peer, i), "word {i}"));
        (0..8).for_each(|i| assert_eq!(dst.get(750 + i), held(peer, 512 + i)));
        assert!(!kernel.has_error());
        r.job.barrier.wait();
        // A page a context.
        assert_eq!((cuda.registers(), fake.count("live_mlx5_uars")), (4, 4));
        r.job.barrier.wait();
        kernel.destroy();
        r.job.barrier.wait();
    });
    fake.check_clean();
    cuda.check();
}

#[test]
fn kernels_find_their_way_on_gpus() {
    let (fake, cuda) = take();
    exercise(&fake, &cuda);
    assert!(has_said("GPU memory is registered by"), "{:#?}", lines());
    assert!(has_said("engine gdaki: 2 contexts, V14(2), structures V3; "), "{:#?}", lines());
}

#[test]
fn all_memory_of_a_communicator_is_registered_with_data_direct_or_none() {
    let (fake, cuda) = take();
    fake.set("mlx5_data_direct", 1);
    cuda.exports(exports::EVERY_MAPPING);
    let fault = |errno: i32| fake.set("mlx5_data_direct_errno", errno.into());
    // A window with the caller's DMA-BUF comes first, as with NCCL, then memory of a set.
    let one_rank = |then: i32, is_made: bool| {
        job(1, 0, |r| {
            listen();
            let _context = cuda.enter(0);
            let window = cuda.alloc(0, WORDS, false, false);
            let caller = cuda.export(0, &window);
            let (mut mhandle, mut gin) = (std::ptr::null_mut(), std::ptr::null_mut());
            let register = oxygin::vtable::gin_v14::ncclGinPlugin_v14.reg_mr_sym_dma_buf.unwrap();
            let at = window.at as *mut _;
            // SAFETY: memory that stays, pointers to locals, and a descriptor of our own, closed once.
            unsafe {
                ok(register(r.coll, at, 8 * WORDS, PTR_CUDA, 0, caller, 0, &mut mhandle, &mut gin));
                libc::close(caller);
            }
            fault(then);
            match V14_2.create(r, Ask::default()) {
                Ok((ctx, _)) => V14_2.destroy(ctx),
                Err(_) => assert!(!is_made, "{:#?}", lines()),
            }
        });
        fault(0);
        fake.check_clean();
        let said: Vec<String> = std::mem::take(&mut *lines()).into_iter().map(|line| line.1).collect();
        said
    };
    let ways = |said: &[String]| -> Vec<bool> {
        let by = said.iter().filter_map(|line| line.split("GPU memory is registered by ").nth(1));
        by.map(|way| way.starts_with("a DMA-BUF with Data Direct")).collect()
    };
    assert_eq!(ways(&one_rank(0, true)), [true]);
    fault(libc::EINVAL);
    let said = one_rank(0, true);
    assert_eq!(ways(&said), [false, false]);
    assert!(said.iter().any(|line| line.contains("is not registered so")), "{said:#?}");
    let said = one_rank(libc::EINVAL, false);
    assert!(said.iter().any(|line| line.contains("set NCCL_IB_DATA_DIRECT=0")), "{said:#?}");
    cuda.check();
}

#[test]
fn memory_of_a_set_has_no_number_in_the_log() {
    let (fake, cuda) = take();
    cuda.exports(exports::EVERY_MAPPING);
    job(1, 0, |r| {
        listen();
        let _context = cuda.enter(0);
        let see = |at| cuda.see(at).expect("what kernels can see");
        // There is no window before it, so that it is the first of which a way is said.
        Kernel::new(r, V14_2, Ask::default(), &see).destroy();
    });
    assert!(has_said("by a DMA-BUF (memory of a set of contexts, "), "{:#?}", lines());
    let odd = |line: &&(log::Level, String)| line.1.contains("4294967295") || line.1.contains("Some(");
    assert_eq!(lines().iter().find(odd), None);
    fake.check_clean();
    cuda.check();
}

#[test]
fn a_page_that_all_share_is_mapped_once() {
    let (fake, cuda) = take();
    fake.set("mlx5_uar_dedicated", 0);
    // The two sets ring different registers of it.
    fake.set("mlx5_cap.log_max_send_dbr_less_qp_sq", 5);
    std::env::set_var("NCCL_GDAKI_USE_RELIABLE_DB", "2");
    job(2, 0, |r| {
        let _context = cuda.enter(r.rank as i32);
        let see = |at| cuda.see(at).expect("what kernels can see");
        let ask = Ask { contexts: 3, ..Ask::default() };
        let sets = [32, 64].map(|depth| Kernel::new(r, V14_2, Ask { depth, ..ask }, &see));
        assert_eq!([&sets[0], &sets[1]].map(|kernel| kernel.handler(2, 0)), [10, 2]);
        r.job.barrier.wait();
        for (set, kernel) in sets.iter().enumerate() {
            kernel.qp(2, 1 - r.rank).post(&[kernel.add_signal(2, 1 - r.rank, 1, set as u64 + 5)]);
            kernel.wait_signal(2, 1, set as u64 + 5);
        }
        assert_eq!(cuda.registers(), 2, "one a communicator");
        r.job.barrier.wait();
        let [first, second] = sets;
        first.destroy();
        r.job.barrier.wait();
        assert_eq!(cuda.registers(), 2, "the other set rings with it");
        r.job.barrier.wait();
        second.destroy();
        r.job.barrier.wait();
    });
    std::env::remove_var("NCCL_GDAKI_USE_RELIABLE_DB");
    fake.check_clean();
    cuda.check();
}

#[test]
fn data_direct_is_used_where_the_device_has_it() {
    let (fake, cuda) = take();
    fake.set("mlx5_data_direct", 1);
    cuda.exports(exports::YES);
    exercise(&fake, &cuda);
    // This driver exports for the usual mapping alone, and the log says so.
    assert!(has_said("by a DMA-BUF; by a DMA-BUF with Data Direct: "), "{:#?}", lines());
    lines().clear();
    cuda.exports(exports::EVERY_MAPPING);
    exercise(&fake, &cuda);
    assert!(has_said("by a DMA-BUF with Data Direct ("), "{:#?}", lines());
}

#[test]
fn a_device_that_refuses_data_direct_has_the_plain_ways() {
    let (fake, cuda) = take();
    fake.set("mlx5_data_direct", 1);
    cuda.exports(exports::EVERY_MAPPING);
    for errno in [libc::EOPNOTSUPP, libc::EPROTONOSUPPORT, libc::EINVAL] {
        fake.set("mlx5_data_direct_errno", errno.into());
        exercise(&fake, &cuda);
        assert!(has_said("by a DMA-BUF; by a DMA-BUF with Data Direct: "), "{:#?}", lines());
        lines().clear();
    }
}

#[test]
fn more_than_a_gpu_has_is_refused_and_the_process_lives() {
    let (fake, cuda) = take();
    job(1, 0, |r| {
        listen();
        let _context = cuda.enter(0);
        // 4 GiB of entries, twice what the fake GPU has.
        let ask = Ask { contexts: 1024, depth: 32_768, counters: 0, ..Ask::default() };
        assert!(V14_2.create(r, ask).is_err());
        let see = |at| cuda.see(at).expect("what kernels can see");
        // Completion entries of a set that is filled in several pieces are unwritten, to the last one.
        let kernel = Kernel::new(r, V14_2, Ask { contexts: 4, depth: 32_768, ..Ask::default() }, &see);
        kernel.qp(3, 0).post(&[kernel.add_signal(3, 0, 1, 5)]);
        kernel.wait_signal(3, 1, 5);
        kernel.destroy();
    });
    assert!(has_said("GPU memory for device queues"), "{:#?}", lines());
    fake.check_clean();
    cuda.check();
}

/// What a rank says that cannot join.
fn refused_with(words: &[&str]) {
    let refused = Job::new(1);
    let joined = Rank::try_join(&refused, 0, 0, listen);
    assert_eq!(joined.err(), Some(NcclResult::INVALID_USAGE));
    assert!(said(words) > 0, "{words:?}: {:#?}", lines());
}

#[test]
fn this_process_rings_where_the_gpu_cannot() {
    let (fake, cuda) = take();
    cuda.refuse_registers(801);
    std::env::set_var("NCCL_GDAKI_USE_RELIABLE_DB", "2");
    job(2, 0, |r| {
        listen();
        let (peer, gpu) = (1 - r.rank, r.rank as i32);
        let _context = cuda.enter(gpu);
        let window = cuda.alloc(gpu, WORDS, false, false);
        let (_, gin) = V14_2.register(r, window.at, 8 * WORDS, PTR_CUDA);
        (0..WORDS / 2).for_each(|i| window.set(i, i as u64 + 1));
        let pinned = |at| cuda.is_pinned(at).then_some(at);
        let see = |at| cuda.see(at).or_else(|| pinned(at)).unwrap_or_else(|| panic!("kernels cannot see {at:#x}"));
        let kernel = Kernel::new(r, V14_2, Ask { contexts: 3, depth: 32, ..Ask::default() }, &see);
        assert_eq!([(0, 0), (2, 1)].map(|(context, peer)| kernel.handler(context, peer)), [1; 2]);
        let bells: Vec<u64> = (0..6).map(|i| kernel.qp(i / 2, i % 2).view.bell).collect();
        assert!(bells.iter().enumerate().all(|(i, bell)| !bells[..i].contains(bell)), "a word a queue: {bells:x?}");
        r.job.barrier.wait();
        // More than the queue has slots, and of one rank's than 16 bits count.
        let rounds = [2800, 100];
        let put = write(kernel.at(gin, peer, 4096), kernel.own(gin, 0), 512);
        let mut entries = vec![kernel.add_signal(2, peer, 2, 1); 23];
        entries.push(put);
        for round in 1..=rounds[r.rank] {
            kernel.post_counted((2, peer), &entries, 1);
            kernel.wait_counter(2, 1, round);
        }
        kernel.wait_signal(2, 2, 23 * rounds[peer]);
        (0..64).for_each(|i| assert_eq!(window.get(512 + i), i as u64 + 1, "word {i}"));
        r.job.barrier.wait();
        // Here a doorbell counts by itself, not what a record says; nothing else rings in this page.
        fake.set("mlx5_strict_doorbells", 1);
        kernel.qp(0, r.rank).post(&[kernel.add_signal(0, r.rank, 3, 7)]);
        kernel.wait_signal(0, 3, 7);
        assert!(!kernel.has_error());
        assert_eq!(cuda.registers(), 0);
        r.job.barrier.wait();
        kernel.destroy();
        r.job.barrier.wait();
    });
    std::env::remove_var("NCCL_GDAKI_USE_RELIABLE_DB");
    let words = ["fake_0:1: ", "cuMemHostRegister", "PeerMappingOverride", "rings for kernels"];
    assert_eq!(said(&words), 2, "a line a rank: {:#?}", lines());
    fake.check_clean();
    cuda.check();
}

#[test]
fn who_rings_can_be_asked_for() {
    let (fake, cuda) = take();
    for (asked, handler) in [("1", 1), ("2", 2)] {
        std::env::set_var("NCCL_GIN_GDAKI_NIC_HANDLER", asked);
        job(1, 0, |r| {
            listen();
            let _context = cuda.enter(0);
            let pinned = |at| cuda.is_pinned(at).then_some(at);
            let see = |at| cuda.see(at).or_else(|| pinned(at)).expect("what kernels can see");
            let kernel = Kernel::new(r, V14_2, Ask::default(), &see);
            assert_eq!(kernel.handler(0, 0), handler);
            kernel.qp(0, 0).post(&[kernel.add_signal(0, 0, 1, 5)]);
            kernel.wait_signal(0, 1, 5);
            kernel.destroy();
        });
        assert_eq!(has_said("NCCL_GIN_GDAKI_NIC_HANDLER=1. This process rings"), asked == "1");
        lines().clear();
        fake.check_clean();
    }
    {
        let _context = cuda.enter(0);
        cuda.refuse_registers(801);
        refused_with(&["mapping a doorbell page for the GPU", "cuMemHostRegister", "PeerMappingOverride"]);
    }
    std::env::remove_var("NCCL_GIN_GDAKI_NIC_HANDLER");
    fake.check_clean();
    cuda.check();
}

#[test]
fn memory_that_the_device_cannot_reach_is_said_at_connect() {
    let (fake, cuda) = take();
    {
        let _context = cuda.enter(0);
        cuda.exports(exports::NOT_SUPPORTED);
        refused_with(&["cannot be given to the device", "GPU 0 exports none", "nvidia-peermem"]);
        cuda.exports(exports::YES);
        fake.set("mlx5_umem_dmabuf", 0);
        refused_with(&["cannot be given to the device", "by DMA-BUF: ", "by address: ", "nvidia-peermem"]);
    }
    fake.check_clean();
    cuda.check();
    // With a kernel module for it, queues are given by address; windows have the verbs fabric's ways.
    fake.set("peermem", 1);
    {
        // A kernel that is not told the size of pages takes larger ones than those in which rings begin.
        let _context = cuda.enter(0);
        fake.set("mlx5_umem_pages", 0);
        refused_with(&["cannot be given to the device", "by address: "]);
        fake.set("mlx5_umem_pages", 1);
    }
    exercise(&fake, &cuda);
}
