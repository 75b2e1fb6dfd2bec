use super::super::{About, Page};
use super::*;
use crate::sys::sync::Mutex;
use std::os::fd::FromRawFd;
use std::time::Duration;

/// A communicator number that no other test of the process uses.
fn about(comm: u64) -> About {
    About {
        way: Way::Engine,
        comm,
        set: 3,
        comm_id: 77,
        rank: 5,
        nranks: 16,
        contexts: 4,
        stride: 4,
        companions: false,
        threads: 2,
        fabric: "soft",
        stall: Duration::from_secs(10),
    }
}

/// One test looks at a time: while a page is looked at it is open once more in this process, and would still be found
/// after its owner has closed it.
fn own(comm: u64) -> Vec<Set> {
    static LOOKING: Mutex<()> = Mutex::new(());
    let _looking = LOOKING.lock();
    let mut sets = sets(std::process::id(), |_, _| {}).unwrap();
    sets.retain(|s| s.comm == comm);
    sets
}

#[test]
fn what_is_written_is_read_and_gone_with_its_page() {
    const COMM: u64 = 1 << 40;
    let page = Page::create(&about(COMM)).unwrap();
    assert_eq!(page.len(), 16, "four peers of 16 for each of four contexts");
    assert!(own(COMM)[0].lanes.is_empty());
    let record = page.record(page.index(2, 13));
    record.entries.store(100, Ordering::Relaxed);
    record.bytes.store(4096, Ordering::Relaxed);
    record.batches.store(9, Ordering::Relaxed);
    record.completed.store(60, Ordering::Relaxed);
    record.under_way.store(40, Ordering::Relaxed);
    record.oldest.store(now() - 2_000_000_000, Ordering::Relaxed);
    record.complete[10].store(50, Ordering::Relaxed);
    record.complete[20].store(10, Ordering::Relaxed);
    record.complete_ns.store(12_345, Ordering::Relaxed);
    page.record(page.index(0, 1)).state.store(State::Failed as u64, Ordering::Relaxed);
    let read = own(COMM).remove(0);
    assert_eq!((read.set, read.comm_id, read.rank, read.nranks, read.contexts), (3, 77, 5, 16, 4));
    assert_eq!((read.way, &read.fabric[..], read.threads, read.stall), (Way::Engine, "soft", 2, 10_000_000_000));
    let [failed, lane] = &read.lanes[..] else { panic!("{read:?}") };
    assert_eq!((failed.context, failed.peer, failed.state), (0, 1, State::Failed));
    assert_eq!((lane.context, lane.peer, lane.entries, lane.bytes, lane.batches), (2, 13, 100, 4096, 9));
    assert_eq!((lane.completed, lane.under_way, lane.state), (60, 40, State::Open));
    assert!((2_000_000_000..60_000_000_000).contains(&lane.oldest.unwrap()));
    assert_eq!((lane.complete.count(), lane.complete.sum), (60, Some(12_345)));
    assert_eq!((lane.complete.quantile(0.5), lane.complete.quantile(0.99)), (Some(2 << 10), Some(2 << 20)));
    assert_eq!(lane.posted.quantile(0.5), None);
    assert!(processes().contains(&std::process::id()));
    drop(page);
    assert!(own(COMM).is_empty());
}

/// Companions have records of their own, under the context and the peer of their queue pair.
#[test]
fn companions_are_told_from_their_queue_pairs() {
    const COMM: u64 = (1 << 40) + 2;
    let page = Page::create(&About { companions: true, ..about(COMM) }).unwrap();
    assert_eq!(page.len(), 32);
    page.record(page.index(3, 13)).entries.store(7, Ordering::Relaxed);
    page.record(page.companion_index(3, 13)).entries.store(14, Ordering::Relaxed);
    page.record(page.companion_index(0, 1)).entries.store(2, Ordering::Relaxed);
    let lanes = own(COMM).remove(0).lanes;
    let told: Vec<_> = lanes.iter().map(|l| (l.context, l.peer, l.is_companion, l.entries)).collect();
    assert_eq!(told, [(3, 13, false, 7), (0, 1, true, 2), (3, 13, true, 14)]);
}

#[test]
fn records_that_nobody_wrote_take_no_memory_when_they_are_read() {
    const COMM: u64 = (1 << 40) + 1;
    let wide = About { nranks: 1024, contexts: 64, stride: 1, ..about(COMM) };
    let page = Page::create(&wide).unwrap();
    page.record(page.index(63, 1023)).entries.store(1, Ordering::Relaxed);
    let lanes = own(COMM).remove(0).lanes;
    assert_eq!(lanes.iter().map(|l| (l.context, l.peer)).collect::<Vec<_>>(), [(63, 1023)]);
    let blocks: u64 = files(std::process::id())
        .unwrap()
        .iter()
        .filter_map(|path| std::fs::metadata(path).ok())
        .filter(|m| m.len() >= (65_536 * size_of::<Record>()) as u64)
        .map(|m| std::os::unix::fs::MetadataExt::blocks(&m))
        .sum();
    assert!(blocks * 512 <= 4 * 4096, "{blocks} blocks");
}

/// Files of strangers that have the name.
#[test]
fn garbage_is_refused() {
    let file = |len: usize, words: &[(usize, u64)]| {
        let fd = crate::sys::memfd::create_named(c"oxygin-test-garbage", len).unwrap();
        let mapping = Mapping::new(fd.as_fd(), 0, len).unwrap();
        for &(at, value) in words {
            // SAFETY: inside the mapping.
            unsafe { mapping.ptr().cast::<u64>().add(at).write(value) };
        }
        fd
    };
    let read = |fd: std::os::fd::OwnedFd| set(1, &File::from(fd));
    let error = |fd| match read(fd).unwrap_err() {
        Skipped::Malformed(why) => why,
        Skipped::OtherVersion(version) => panic!("version {version}"),
    };
    let good = [(0, MAGIC), (1, VERSION), (2, 256), (3, 768), (4, 1), (5, 1), (8, 1)];
    assert!(read(file(4096, &good)).unwrap().is_some());
    assert!(read(file(4096, &[])).unwrap().is_none(), "not ready");
    assert!(error(file(100, &[(0, MAGIC)])).contains("too short"));
    assert!(error(file(4096, &[(0, 5)])).contains("magic"));
    assert_eq!(read(file(4096, &[(0, MAGIC), (1, 99)])).unwrap_err(), Skipped::OtherVersion(99));
    for (at, value) in [(2, 8), (3, 8), (4, 1000), (4, u64::MAX), (8, 0), (8, 3)] {
        let mut bad = good.to_vec();
        bad.push((at, value));
        assert!(error(file(4096, &bad)).contains("do not fit"), "word {at} = {value}");
    }
    // Numbers that say nothing about sizes may be anything.
    let mut odd = good.to_vec();
    odd.extend([(5, 0), (6, u64::MAX), (7, u64::MAX), (12, u64::MAX), (17, u64::MAX), (32, 7)]);
    assert_eq!(read(file(4096, &odd)).unwrap().unwrap().lanes.len(), 1);
    // A file that may shrink under its reader.
    // SAFETY: a new descriptor of our own.
    let short = unsafe { File::from_raw_fd(libc::memfd_create(c"oxygin-test-short".as_ptr(), 0)) };
    short.set_len(4096).unwrap();
    assert!(read(short.into()).unwrap().is_none());
}

#[test]
fn a_pipe_in_a_page_s_place_holds_nobody_up() {
    let folder = std::env::temp_dir().join(format!("oxygin-pipe-{}", std::process::id()));
    std::fs::create_dir(&folder).unwrap();
    let (pipe, link) = (folder.join("pipe"), folder.join("7"));
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    std::os::unix::fs::symlink(&pipe, &link).unwrap();
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || tell.send(open(link).is_ok_and(|file| set(7, &file) == Ok(None))));
    let found = told.recv_timeout(Duration::from_secs(20));
    std::fs::remove_dir_all(&folder).unwrap();
    assert_eq!(found, Ok(true), "it is no page, and nobody waited for who writes to it");
}

#[test]
fn a_process_that_is_not_there_is_said_so() {
    let error = sets(u32::MAX, |_, _| {}).unwrap_err();
    assert!(error.message().contains("there is no process"), "{}", error.message());
}

#[test]
fn buckets_are_powers_of_two() {
    use super::super::layout::bucket;
    assert_eq!([0, 1, 2, 3, 4, 1023, 1024].map(bucket), [0, 0, 1, 1, 2, 9, 10]);
    assert_eq!(bucket(u64::MAX), BUCKETS - 1);
}
