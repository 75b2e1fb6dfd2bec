//! Ranks of one process on this fabric alone, with what takes the table's layers away: peers that never come, threads
//! that get in each other's way, contexts that go while something runs.

mod batches;
mod closing;
mod confirmed;
mod deregistration;
mod gets;
mod refused;
mod side_by_side;
mod waking;

use super::*;
use crate::fabric::Context as _;
use crate::rma::op::{Get, Op, Put, Signal};
use crate::rma::seq::Seq;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Instant;

/// Longer than anything here takes on a busy machine.
const WITHIN: Duration = Duration::from_secs(120);

/// The token of a rank that never comes.
pub const ABSENT: [u8; 16] = [0; 16];

/// One rank, with the threads that a test gives it.
pub struct Rank {
    pub fabric: SoftFabric,
    registry: Arc<Registry>,
}

/// Memory that a rank has registered.
struct Window {
    base: u64,
    bytes: usize,
    id: u32,
    registration: Option<Registration>,
}

/// One operation, for which there is room.
trait Start {
    unsafe fn start(&self, peer: u32, op: Op) -> Result<Seq>;
    /// # Safety
    /// As for `Context::post`.
    unsafe fn put(&self, peer: u32, put: &Put) -> Result<Seq> {
        // SAFETY: passed on.
        unsafe { self.start(peer, Op::Put(*put)) }
    }
    /// # Safety
    /// As for `Context::post`.
    unsafe fn get(&self, peer: u32, get: &Get) -> Result<Seq> {
        // SAFETY: passed on.
        unsafe { self.start(peer, Op::Get(*get)) }
    }
}

impl Start for Context {
    unsafe fn start(&self, peer: u32, op: Op) -> Result<Seq> {
        // SAFETY: passed on.
        let posted = unsafe { self.post(peer, &[op]) }?;
        assert_eq!(posted.taken, 1);
        Ok(posted.last)
    }
}

impl Rank {
    fn window(&self, id: u32, bytes: usize) -> Window {
        let words: &'static mut [u64] = Box::leak(vec![0; bytes.div_ceil(8)].into());
        let mut window = Window { base: words.as_mut_ptr() as u64, bytes, id, registration: None };
        self.register(&mut window);
        window
    }

    fn register(&self, window: &mut Window) {
        let (id, base, len) = (window.id, window.base, window.bytes as u64);
        let region = Region { id, base, len, strict: false, dma_buf: None };
        window.registration = Some(self.fabric.register(&region).unwrap());
        self.registry.insert(id, Extent { base, len });
    }

    fn deregister(&self, window: &mut Window) {
        if let Some(registration) = window.registration.take() {
            registration.end(&self.registry, window.id).unwrap();
        }
    }

    fn context(&self) -> Context {
        let spec = ContextSpec { contexts: 1, queue_depth: 0, traffic_class: None, rank_stride: 1 };
        let (mut made, _) = self.fabric.prepare_contexts(&spec).unwrap();
        made.pop().unwrap()
    }
}

impl Window {
    fn word(&self, i: usize) -> &AtomicU64 {
        // SAFETY: an aligned word of memory that is never freed.
        unsafe { AtomicU64::from_ptr((self.base as *mut u64).add(i)) }
    }

    /// Sets all bytes.
    fn paint(&self, byte: u8) {
        // SAFETY: the window's memory, which is never freed.
        unsafe { std::ptr::write_bytes(self.base as *mut u8, byte, self.bytes) };
    }

    /// Whether any page starts with this byte.
    fn has(&self, byte: u8) -> bool {
        (0..self.bytes / 8).step_by(512).any(|i| self.word(i).load(Ordering::Relaxed).to_le_bytes()[0] == byte)
    }

    fn fill(&self, value: u64) {
        (0..self.bytes / 8).for_each(|i| self.word(i).store(value, Ordering::Relaxed));
    }

    fn holds(&self, value: u64) -> bool {
        (0..self.bytes / 8).all(|i| self.word(i).load(Ordering::Relaxed) == value)
    }
}

/// The first `here` of `nranks` ranks; the others never come.
pub fn join(nranks: u32, here: u32, transport: SoftTransport) -> Vec<Rank> {
    join_as(nranks, &vec![transport; here as usize])
}

/// The first of `nranks` ranks, each told of these ways; the others never come.
fn join_as(nranks: u32, transports: &[SoftTransport]) -> Vec<Rank> {
    let config = |&soft_transport: &SoftTransport| Config { soft_transport, ..Config::default() };
    join_with(nranks, transports.iter().map(config).collect())
}

pub fn join_with(nranks: u32, configs: Vec<Config>) -> Vec<Rank> {
    join_beside(nranks, configs, "127.0.0.1:9".parse().unwrap())
}

/// Those that never come seem to be at `absent`.
fn join_beside(nranks: u32, configs: Vec<Config>, absent: std::net::SocketAddr) -> Vec<Rank> {
    let open = |config: Config| {
        let config = Arc::new(Config { tcp_threads: Some(0), ..config });
        let registry = Arc::new(Registry::default());
        Rank { fabric: SoftFabric::open(&config, registry.clone()).unwrap(), registry }
    };
    let ranks: Vec<_> = configs.into_iter().map(open).collect();
    let mut hellos: Vec<_> = ranks.iter().map(|r| r.fabric.hello()).collect();
    let absent = SoftHello {
        token: ABSENT,
        contact: b"oxygin-absent".to_vec(),
        probe: 0,
        probe_value: [0; 16],
        tcp: vec![absent],
    };
    hellos.resize(nranks as usize, absent.encode());
    let hellos: Vec<&[u8]> = hellos.iter().map(Vec::as_slice).collect();
    for (rank, r) in (0..).zip(&ranks) {
        r.fabric.join(World { rank, nranks }, &hellos).unwrap();
    }
    ranks
}

fn put(from: &Window, to: &Window, len: usize, signal: Option<(&Window, u64)>) -> Put {
    let signal = signal.map(|(w, value)| Signal { remote: w.base, rkey: w.id, value, strong: true });
    Put { local: from.base, lkey: from.id, rkey: to.id, remote: to.base, len: len as u64, signal, more: false }
}

fn get(to: &Window, from: &Window, len: usize) -> Get {
    Get { local: to.base, lkey: to.id, rkey: from.id, remote: from.base, len: len as u64, more: false }
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + WITHIN;
    while !done() {
        assert!(Instant::now() < end, "{what}: not within {} s", WITHIN.as_secs());
        std::thread::yield_now();
    }
}

fn wait(context: &Context, peer: u32, seq: Seq) {
    until("an operation", || context.test(peer, seq).unwrap());
}

/// Windows come and go while gets run both ways: who answers one needs the registry, and who hears that one is done may
/// answer another. Slow is not hung: with few cores for six threads only a time without any get is a fault.
#[test]
fn registration_stands_in_no_gets_way() {
    const GETS: u32 = 400;
    const BYTES: usize = 256 << 10;
    let ranks: Vec<_> = join(2, 2, SoftTransport::NoCma).into_iter().map(Arc::new).collect();
    let windows: Arc<Vec<_>> = Arc::new(ranks.iter().map(|r| (r.window(1, BYTES), r.window(2, BYTES))).collect());
    let over = Arc::new(AtomicBool::new(false));
    let done = Arc::new(AtomicU32::new(0));
    // Not joined before all is well: what hangs here hangs for ever.
    let mut threads = Vec::new();
    for (me, rank) in (0..).zip(&ranks) {
        let (rank, windows, over, done) = (rank.clone(), windows.clone(), over.clone(), done.clone());
        let registry = rank.registry.clone();
        let is_over = over.clone();
        threads.push(std::thread::spawn(move || {
            while !is_over.load(Ordering::Relaxed) {
                registry.insert(9, Extent { base: 0, len: 0 });
                registry.remove(9);
                std::thread::yield_now();
            }
        }));
        threads.push(std::thread::spawn(move || {
            let context = rank.context();
            let peer = 1 - me;
            for _ in 0..GETS {
                let get = get(&windows[me as usize].0, &windows[peer as usize].1, BYTES);
                // SAFETY: windows are never freed.
                let seq = unsafe { context.get(peer, &get) }.unwrap();
                while !context.test(peer, seq).unwrap() {
                    std::thread::yield_now();
                }
                done.fetch_add(1, Ordering::SeqCst);
            }
            while done.load(Ordering::SeqCst) < 2 * GETS {
                context.progress().unwrap();
                std::thread::yield_now();
            }
        }));
    }
    for gets in 1..=2 * GETS {
        until("one more get", || done.load(Ordering::SeqCst) >= gets);
    }
    over.store(true, Ordering::Relaxed);
    threads.into_iter().for_each(|t| t.join().unwrap());
}

/// Rings shrink as ranks grow: a get's data is cut to pieces that fit.
#[test]
fn gets_among_many_ranks() {
    const BYTES: usize = 100_000;
    let ranks = join(300, 2, SoftTransport::NoCma);
    let [to, from] = [0, 1].map(|r: usize| ranks[r].window(1, BYTES));
    from.fill(7);
    let context = ranks[0].context();
    // SAFETY: windows are never freed.
    let seq = unsafe { context.get(1, &get(&to, &from, BYTES)) }.unwrap();
    wait(&context, 1, seq);
    assert!(to.holds(7));
}

/// A context goes while the data of its get is on its way, which goes nowhere from then on. The next one's get is not
/// done with the old one's end.
#[test]
fn a_get_ends_with_its_own_data() {
    const BYTES: usize = 16 << 20;
    let ranks = join(2, 2, SoftTransport::NoCma);
    let [first, from] = [0, 1].map(|r: usize| ranks[r].window(1, BYTES));
    let second = ranks[0].window(2, BYTES);
    from.fill(7);
    let context = ranks[0].context();
    // SAFETY: windows are never freed.
    unsafe { context.get(1, &get(&first, &from, BYTES)) }.unwrap();
    until("the first bytes", || {
        context.progress().unwrap();
        first.word(0).load(Ordering::Relaxed) == 7
    });
    drop(context);
    first.paint(9);
    let context = ranks[0].context();
    // SAFETY: as above.
    let seq = unsafe { context.get(1, &get(&second, &from, BYTES)) }.unwrap();
    wait(&context, 1, seq);
    assert!(second.holds(7));
    // Behind all of the first one's, in the same ring.
    assert!(!first.has(7), "written after its context was gone");
}

/// A context goes while others move bytes for it: once it is gone its memory is no longer written.
#[test]
fn nothing_is_copied_for_a_context_that_is_gone() {
    [SoftTransport::Auto, SoftTransport::Tcp].into_iter().for_each(nothing_is_copied);
}

fn nothing_is_copied(transport: SoftTransport) {
    const CHUNK: usize = 2 << 20;
    const CHUNKS: usize = 32;
    let ranks = join(2, 2, transport);
    let [to, from] = [0, 1].map(|r: usize| ranks[r].window(1, CHUNKS * CHUNK));
    from.fill(7);
    let last_of = |chunk: usize| to.word((chunk + 1) * CHUNK / 8 - 1);
    for _ in 0..20 {
        (0..CHUNKS).for_each(|c| last_of(c).store(0, Ordering::Relaxed));
        let context = ranks[0].context();
        // SAFETY: windows are never freed.
        unsafe { context.get(1, &get(&to, &from, CHUNKS * CHUNK)) }.unwrap();
        until("the first bytes", || last_of(1).load(Ordering::Relaxed) == 7);
        drop(context);
        let Some(next) = (0..CHUNKS).find(|&c| last_of(c).load(Ordering::Relaxed) == 0) else { continue };
        std::thread::sleep(Duration::from_millis(10));
        assert_eq!(last_of(next).load(Ordering::Relaxed), 0, "chunk {next} was written");
    }
}

/// A window goes while a peer copies to it, or from it: once it is gone, nobody touches its memory.
#[test]
fn nothing_is_copied_to_or_from_a_window_that_is_gone() {
    const BYTES: usize = 16 << 20;
    let memory = [0; 2].map(|_| Box::leak(vec![0u64; BYTES / 8].into_boxed_slice()).as_mut_ptr() as u64);
    for round in 0..30 {
        let is_get = round % 2 == 1;
        let ranks = join(2, 2, SoftTransport::Auto);
        let [mine, mut its] = [0, 1].map(|r: usize| {
            let mut window = Window { base: memory[r], bytes: BYTES, id: 1, registration: None };
            window.paint(if is_get == (r == 1) { 7 } else { 0 });
            ranks[r].register(&mut window);
            window
        });
        let context = ranks[0].context();
        let (get, put) = (get(&mine, &its, BYTES), put(&mine, &its, BYTES, None));
        // SAFETY: windows are never freed.
        let seq = unsafe {
            if is_get {
                context.get(1, &get)
            } else {
                context.put(1, &put)
            }
        }
        .unwrap();
        // The first turn of some is over, the next has begun.
        let first = (2 << 20) + if is_get { mine.base } else { its.base };
        let is_over = || context.test(1, seq).unwrap_or(true);
        std::thread::scope(|scope| {
            scope.spawn(|| until("the end", is_over));
            // SAFETY: a word of memory that is never freed.
            until("the first bytes", || unsafe { AtomicU64::from_ptr(first as *mut u64) }.load(Ordering::Relaxed) != 0);
            ranks[1].deregister(&mut its);
            its.paint(9);
        });
        match is_get {
            true => assert!(!mine.has(9), "round {round}: read after the deregistration"),
            false => assert!(!its.has(7), "round {round}: written after the deregistration"),
        }
    }
}

/// A peer is in the middle of a copy for longer than deregistration waits: it is named, and the memory is not said to
/// be free.
#[test]
fn a_deregistration_says_who_is_still_at_the_memory() {
    let config = Config { dereg_timeout: Duration::from_millis(100), ..Config::default() };
    let ranks = join_with(2, vec![config.clone(), config]);
    let [mut mine, its] = [0, 1].map(|r: usize| ranks[r].window(1, 64));
    // The two meet.
    let context = ranks[0].context();
    // SAFETY: windows are never freed.
    let seq = unsafe { context.put(1, &put(&mine, &its, 64, None)) }.unwrap();
    wait(&context, 1, seq);
    let peer = ranks[1].fabric.shared().unwrap();
    let end = |window: &Window| window.registration.as_ref().unwrap().guard.end();
    peer.status.begin_copy(0, 5, 1);
    let refused = end(&mine).unwrap_err();
    assert_eq!(refused.code(), nccl_plugin_api::NcclResult::REMOTE_ERROR);
    assert!(refused.message().starts_with("rank 1 has not ended a copy to or from window 1 of rank 0"), "{refused}");
    // It ended, if not well: nobody waits again.
    peer.status.end_copy(0, 5);
    ranks[0].deregister(&mut mine);
    ranks[0].register(&mut mine);
    end(&mine).unwrap();
}

/// One context's operation fails; what others were told is complete arrives.
#[test]
fn what_is_complete_arrives_although_another_fails() {
    const BYTES: usize = 5000;
    let ranks = join(2, 2, SoftTransport::Auto);
    let [from, to] = [0, 1].map(|r: usize| ranks[r].window(1, BYTES));
    let [good, bad] = [ranks[0].context(), ranks[0].context()];
    // Through the ring, and by cross-memory attach. Both have their turn, one after the other, once the way is known.
    let signalled = put(&from, &to, 8, Some((&to, 1)));
    let nowhere = Put { rkey: 5, signal: None, len: BYTES as u64, ..signalled };
    // SAFETY: windows are never freed.
    let (seq, lost) = unsafe { (good.put(1, &signalled).unwrap(), bad.put(1, &nowhere).unwrap()) };
    wait(&good, 1, seq);
    until("the failure", || bad.test(1, lost).is_err());
    until("the signal", || to.word(0).load(Ordering::Acquire) == 1);
}

/// There are more windows than peers are told of one by one: what is not known to exist goes through the ring.
#[test]
fn windows_with_high_numbers() {
    const BYTES: usize = 100_000;
    let ranks = join(2, 2, SoftTransport::Auto);
    let id = status::WINDOW_BITS as u32;
    let [mine, its] = [0, 1].map(|r: usize| ranks[r].window(id, BYTES));
    let context = ranks[0].context();
    mine.fill(7);
    // SAFETY: windows are never freed.
    let seq = unsafe { context.put(1, &put(&mine, &its, BYTES, Some((&its, 1)))) }.unwrap();
    wait(&context, 1, seq);
    until("the signal", || its.word(0).load(Ordering::Acquire) == 8);
    its.word(0).store(7, Ordering::Relaxed);
    assert!(its.holds(7));
    its.fill(9);
    // SAFETY: as above.
    let seq = unsafe { context.get(1, &get(&mine, &its, BYTES)) }.unwrap();
    wait(&context, 1, seq);
    assert!(mine.holds(9));
}

/// A peer asks through shared memory, and this rank cannot answer that way: it says so.
#[test]
fn a_probe_that_cannot_be_answered_is_an_error() {
    let ranks = join_as(2, &[SoftTransport::Tcp, SoftTransport::NoCma]);
    let [from, to] = [0, 1].map(|r: usize| ranks[r].window(1, 64));
    let [answering, asking] = [0, 1].map(|r: usize| ranks[r].context());
    // SAFETY: windows are never freed.
    unsafe { asking.get(0, &get(&to, &from, 64)) }.unwrap();
    until("the error", || {
        asking.progress().unwrap();
        answering.has_error()
    });
}

/// A rank has destroyed its contexts, or made others since: what the peer's contexts ask of it is done all the same,
/// since windows say what a peer may touch, and contexts do not.
#[test]
fn what_names_a_context_that_the_peer_has_destroyed_is_done() {
    const BYTES: usize = 1 << 20;
    for transport in [SoftTransport::Auto, SoftTransport::NoCma, SoftTransport::Tcp] {
        let ranks = join(2, 2, transport);
        let [mine, its] = [0, 1].map(|r: usize| ranks[r].window(1, BYTES));
        let contexts = [0, 1].map(|_| ranks[0].context());
        for context in [0, 1].map(|_| ranks[1].context()) {
            // SAFETY: windows are never freed.
            let seq = unsafe { context.get(0, &get(&its, &mine, 64)) }.unwrap();
            wait(&context, 0, seq);
        }
        for value in 1..=2 {
            mine.fill(value);
            its.word(0).store(0, Ordering::Relaxed);
            for context in &contexts {
                for len in [8, BYTES - 8] {
                    let at =
                        Put { local: mine.base + 8, remote: its.base + 8, ..put(&mine, &its, len, Some((&its, 1))) };
                    // SAFETY: windows are never freed.
                    let seq = unsafe { context.put(1, &at) }.unwrap();
                    wait(context, 1, seq);
                }
            }
            until("the signals", || its.word(0).load(Ordering::Acquire) == 4);
            assert!((1..BYTES / 8).all(|i| its.word(i).load(Ordering::Relaxed) == value));
            its.fill(value + 10);
            for context in &contexts {
                // SAFETY: as above.
                let seq = unsafe { context.get(1, &get(&mine, &its, BYTES)) }.unwrap();
                wait(context, 1, seq);
                assert!(mine.holds(value + 10));
            }
            // The next round's numbers are others at the peer.
            drop(ranks[1].context());
        }
    }
}
