//! `OXYGIN_GDAKI_CAPTURE`: what emulated device code wrote is in the recording, entry by entry.

use crate::harness::{on_ranks, ways, Folder};
use crate::recording::{RecordedQueue, Recording};
use crate::support::apart::is_elsewhere;
use crate::support::common::job;
use crate::support::nic::*;
use oxygin::config::Ringing;

/// The recordings that are there, with their names; they are gone then.
fn take(folder: &Folder) -> Vec<(String, Recording)> {
    let all = folder.take();
    assert!(all.iter().all(|(_, text)| text.len() <= 1 << 20));
    all.into_iter().map(|(name, text)| (name, Recording::read(&text))).collect()
}

fn ends(queue: &RecordedQueue) -> Vec<&str> {
    queue.entries.iter().map(|entry| &entry.end[..]).collect()
}

fn meanings(queue: &RecordedQueue) -> Vec<&str> {
    queue.entries.iter().map(|entry| &entry.meaning[..]).collect()
}

/// What device code wrote, byte by byte, with what it means, and what became of it.
fn everything_is_in_it(folder: &Folder, ask: Ask) {
    let (mut keys, mut written) = ([0; 3], Vec::new());
    let seen = std::sync::Mutex::new((&mut keys, &mut written));
    on_ranks(2, Ask { contexts: 3, depth: 16, ..ask }, |r, nic, src, dst| {
        if r.rank == 1 {
            return nic.wait_signal(1, 2, 7);
        }
        src.set(0, 5);
        let put = write(dst.at(16), src.at(0), 8).data(src.key, 32, 24).fenced();
        let bad = write((dst.key, 1 << 40), src.at(0), 8);
        let last = nic.post_counted(1, 1, &[put.clone(), nic.add_signal(1, 2, 7)], 3);
        assert_eq!(nic.qp(1, 1).wait(last), Status::Good);
        nic.wait_counter(1, 3, 1);
        let qp = nic.qp(2, 0);
        let last = qp.post(&[value(dst.at(1), &[1, 2, 3]), read(dst.at(1), src.at(2), 8), bad, Raw::new(NOP, 0)]);
        assert_ne!(qp.wait(last), Status::Good);
        let mut seen = seen.lock().unwrap();
        *seen.0 = [src.key, dst.key, nic.view.counters.key];
        seen.1.push(put.bytes[16..].to_vec());
    });
    let all = take(folder);
    assert_eq!(all.len(), 1, "rank 1 wrote no entry");
    let (name, recording) = &all[0];
    assert!(name.starts_with(&format!("run.0.{}.", std::process::id())) && name.ends_with(".txt"), "{name}");
    let Recording { rank, nranks, contexts, signals, counters, queues, .. } = recording;
    assert_eq!((rank, nranks, contexts, signals.1, counters), (&0, &2, &3, 8, &(keys[2], 8)));
    assert_eq!(recording.sink, 0x100);
    let shapes: Vec<_> = queues.iter().map(|q| (q.context, q.peer, q.is_companion, q.slots, q.is_counted)).collect();
    assert_eq!(shapes, [(1, 1, false, 16, false), (1, 1, true, 16, false), (2, 0, false, 16, false)]);
    assert!(queues.iter().all(|q| q.handler == ask.handler && q.is_rung && q.taken == q.entries.len() as u64));
    let [src, dst, counters] = keys.map(|key| format!("{key:08x}"));
    let signals = format!("{:08x}", signals.0);
    let (main, companion, faulty) = (queues[0].number, queues[1].number, queues[2].number);
    assert_eq!(
        meanings(&queues[0]),
        [
            format!("index 0 queue {main} opcode 08 fenced signalled write to {dst}+128 from {src}+0*8 {src}+32*24"),
            format!("index 1 queue {main} opcode 12 signalled add8 to {signals}+80 value 7 fields 0 old 00000100+0*8"),
        ]
    );
    assert_eq!(
        meanings(&queues[1]),
        [
            format!("index 0 queue {companion} opcode 0f signalled wait queue {main} index 1"),
            format!(
                "index 1 queue {companion} opcode 12 signalled add8 to {counters}+88 value 1 fields 0 old \
                 00000100+0*8"
            ),
        ]
    );
    assert_eq!(
        meanings(&queues[2]),
        [
            format!("index 0 queue {faulty} opcode 08 signalled value to {dst}+8 bytes 010203"),
            format!("index 1 queue {faulty} opcode 10 signalled read from {dst}+8 to {src}+16*8"),
            format!("index 2 queue {faulty} opcode 08 signalled write to {dst}+{} from {src}+0*8", 1u64 << 40),
            format!("index 3 queue {faulty} opcode 00 signalled nop"),
        ]
    );
    assert_eq!(
        queues.iter().map(ends).collect::<Vec<_>>(),
        [vec!["good", "good"], vec!["good", "good"], vec!["good", "good", "failed 13", "failed 05"],]
    );
    // Words that device code leaves as they were are what the slot was before.
    let first = &queues[0].entries[0];
    assert_eq!(
        (&first.bytes[..3], &first.bytes[3..12]),
        (&[0, 0, 0][..], &[8, 0, 0, main as u8, 4, 0, 0, 0, 0x48][..])
    );
    assert_eq!((&first.bytes[16..28], &first.bytes[32..]), (&written[0][..12], &written[0][16..]));
    assert!(queues.iter().all(|q| q.entries[0].is_first));
    let words = 8 * crate::harness::WORDS as u64;
    assert_eq!(queues[2].windows.iter().map(|w| w.lengths).collect::<Vec<_>>(), [Some((words, words)); 2]);
    assert_eq!(queues[0].windows.len(), 3, "that of signals is one");
}

/// So many puts of device code that was compiled before there was free flow, told to ring so.
fn nothing_is_rung(n: usize) {
    on_ranks(1, Ask { handler: Ringing::FreeFlow, depth: 8, counters: 0, ..Ask::default() }, |_, nic, src, dst| {
        let qp = nic.qp(0, 0);
        for i in 0..n {
            let at = qp.reserve(1);
            qp.put_entry(at, &write(dst.at(i), src.at(i), 8));
            assert_eq!(qp.wait(at), Status::Good);
        }
    });
}

/// Device code that does not ring, a key that names nothing, and more entries than are kept.
fn the_rest_is_told_of(folder: &Folder) {
    nothing_is_rung(1);
    on_ranks(1, Ask { counters: 0, ..Ask::default() }, |_, nic, src, _| {
        let qp = nic.qp(0, 0);
        (0..3000).for_each(|_| _ = qp.post(&[nic.add_signal(0, 0, 1)]));
        let last = qp.post(&[write((0x0bad_0000, 0), src.at(0), 8)]);
        assert_ne!(qp.wait(last), Status::Good);
    });
    on_ranks(1, Ask { counters: 0, ..Ask::default() }, |_, nic, src, _| {
        let last = nic.qp(0, 0).post(&[write((0x0bad_0000, 0), src.at(0), 8)]);
        assert_ne!(nic.qp(0, 0).wait(last), Status::Good);
    });
    let mut all = take(folder);
    // By their numbers, which are not as long as each other.
    all.sort_by_key(|(name, _)| name.len());
    let [silent, long, unknown] = &all[..] else { panic!("{} recordings", all.len()) };
    assert!(!silent.1.queues[0].is_rung);
    let queue = &long.1.queues[0];
    assert!(queue.taken == 3001 && (1000..2049).contains(&queue.entries.len()), "{}", queue.entries.len());
    assert!(queue.entries.iter().enumerate().all(|(i, e)| e.meaning.starts_with(&format!("index {i} "))));
    let windows = &unknown.1.queues[0].windows;
    assert_eq!((windows[0].key, windows[0].lengths, windows[1].lengths.is_some()), (0x0bad_0000, None, true));
}

#[test]
fn recordings_have_what_device_code_wrote() {
    // The variable is the process's.
    if is_elsewhere(concat!(module_path!(), "::recordings_have_what_device_code_wrote")) {
        return;
    }
    let folder = Folder::new("capture");
    on_ranks(1, Ask::default(), |_, nic, _, _| _ = nic.qp(0, 0).post(&[Raw::new(NOP, 0)]));
    std::env::set_var("OXYGIN_GDAKI_CAPTURE", folder.0.join("run"));
    // Nobody posts anything.
    on_ranks(2, Ask::default(), |_, _, _, _| ());
    assert!(take(&folder).is_empty(), "only what was asked for");
    ways().into_iter().for_each(|ask| everything_is_in_it(&folder, ask));
    the_rest_is_told_of(&folder);
    // Contexts that nobody destroys end with their communicator.
    job(1, 1, |r| {
        let nic = Nic::new(r, Ask::default());
        nic.qp(0, 0).post(&[Raw::new(NOP, 0)]);
        assert_eq!(nic.qp(0, 0).flush(), Status::Good);
        assert!(take(&folder).is_empty(), "it is written at the end");
    });
    assert_eq!(take(&folder).len(), 1);
    // Where nothing can be written everything else goes on.
    std::env::set_var("OXYGIN_GDAKI_CAPTURE", folder.0.join("there/is/no/such/folder"));
    on_ranks(1, Ask::default(), |_, nic, _, _| {
        nic.qp(0, 0).post(&[Raw::new(NOP, 0)]);
        assert_eq!(nic.qp(0, 0).flush(), Status::Good);
    });
    assert!(take(&folder).is_empty());
}

/// What the recordings of emulated device code under `captured/` are made of: every operation, laps of the ring, a
/// companion, this rank itself, an entry that fails.
fn a_bit_of_everything(ask: Ask) {
    // Completion entries are found by their number alone, as entries without one need it.
    on_ranks(2, Ask { contexts: 2, depth: 16, is_sm90: true, ..ask }, |r, nic, src, dst| {
        if r.rank == 1 {
            return nic.wait_signal(0, 7, 1);
        }
        let (qp, sink) = (nic.qp(0, 1), (nic.view.sink, 0));
        let bytes: Vec<u8> = (1..=28).collect();
        for (i, n) in [1, 4, 8, 12, 13, 28].into_iter().enumerate() {
            qp.post(&[value(dst.at(4 * i), &bytes[..n])]);
        }
        for i in 0..40 {
            qp.post(&[write(dst.at(100 + 2 * i), src.at(100 + 2 * i), 16), nic.add_signal(0, (i % 3) as u32, 1)]);
        }
        qp.post(&[
            write(dst.at(200), src.at(200), 16).data(src.key, 8 * 210, 24),
            write((dst.key, 8 * 220 + 3), (src.key, 8 * 220 + 1), 1),
            write(dst.at(1000), src.at(1000), 20_000),
            Raw::new(NOP, 0),
            add(dst.at(230), 3, src.at(230)),
        ]);
        let four = |words: [u32; 4]| words.map(u32::to_be_bytes).concat().try_into().unwrap();
        let masked = |opcode: u8, modifier: u8, i: usize| Raw::new(opcode, modifier).remote(dst.key, 8 * i as u64);
        qp.post(&[
            masked(MASKED_ADD, 0x08, 231).with(four([0x0001_0001, 0x8000_8000, 0, 0])).data(src.key, 8 * 231, 4),
            masked(MASKED_ADD, 0x09, 232).two(1 << 40 | 1, 1 << 39).data(src.key, 8 * 232, 8),
            masked(MASKED_SWAP, 0x08, 233).four([0xab00, 0x78, 0xff00, 0xff]).data(src.key, 8 * 233, 4),
            read(dst.at(300), src.at(300), 64),
            read(dst.at(310), src.at(310), 8).data(src.key, 8 * 312, 16),
            dump(sink.0),
            write(dst.at(320), src.at(320), 8).fenced(),
        ]);
        for i in 0..5 {
            nic.post_counted(0, 1, &[write(dst.at(400 + i), src.at(400 + i), 8)], (i % 2) as u32);
        }
        let end = qp.post(&[nic.add_signal(0, 7, 1)]);
        assert_eq!((qp.wait(end), nic.companion(0, 1).flush()), (Status::Good, Status::Good));
        let own = nic.qp(0, 0);
        own.post(&[write(dst.at(500), src.at(500), 24), nic.add_signal(0, 5, 9)]);
        assert_eq!(own.flush(), Status::Good);
        // Entries without a completion entry, as device code writes them where completions are counted.
        let quiet = nic.qp(1, 0);
        for i in 0..5 {
            let mut entries = [0, 1, 2, 3].map(|n| write(dst.at(700 + 4 * i + n), src.at(700 + 4 * i + n), 8));
            entries[..3].iter_mut().for_each(|entry| entry.bytes[11] = 0);
            quiet.post(&entries);
        }
        assert_eq!(quiet.wait(4), Status::Good);
        let faulty = nic.qp(1, 1);
        faulty.post(&[value(dst.at(600), &[7]), write((dst.key, 1 << 40), src.at(0), 8), nic.add_signal(1, 1, 1)]);
        assert_ne!(faulty.flush(), Status::Good);
    });
}

#[test]
#[ignore = "writes the recordings of emulated device code anew: tests/gdaki/captured/README.md"]
fn recordings_of_emulated_device_code() {
    let folder = Folder::new("emulated");
    std::env::set_var("OXYGIN_GDAKI_CAPTURE", folder.0.join("run"));
    let keep = |name: &str| {
        let (_, text) = folder.take().pop().expect("a recording");
        let path = format!("{}/tests/gdaki/captured/emulated-{name}.txt", env!("CARGO_MANIFEST_DIR"));
        std::fs::write(path, text).expect("a file of the sources");
    };
    let [doorbell, _, proxy, free_flow] = ways();
    for (ask, name) in [(doorbell, "doorbell"), (proxy, "proxy"), (free_flow, "free-flow")] {
        a_bit_of_everything(ask);
        keep(name);
    }
    nothing_is_rung(20);
    keep("unrung");
}
