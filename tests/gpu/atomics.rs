//! Atomic operations on GPU memory, by every way of the soft fabric: changed by the owner's engine, fetched to host
//! memory or to the caller's GPU.

use crate::harness::Fake;
use crate::support::atomics::*;
use oxygin::config::{Config, SoftTransport};
use oxygin::error::Kind;
use oxygin::fabric::soft::{Context as SoftContext, SoftFabric};
use oxygin::fabric::{Context, ContextSpec, Fabric, Region, World};
use oxygin::memory::gpu::inspect;
use oxygin::memory::registry::{Extent, Registry};
use oxygin::memory::window::Registration;
use oxygin::rma::atomic::{Change, Width};
use oxygin::rma::op::{Get, Op, Put, Signal};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

const TRANSPORTS: [SoftTransport; 3] = [SoftTransport::Auto, SoftTransport::Staged, SoftTransport::Tcp];

struct Rank {
    fabric: SoftFabric,
    registry: Arc<Registry>,
}

struct Window {
    base: u64,
    /// Where the CPU, as a kernel, sees it.
    seen: *const AtomicU64,
    _registration: Registration,
    key: u32,
    _memory: Option<Box<[AtomicU64]>>,
}

// SAFETY: the memory is used as atomic words alone.
unsafe impl Sync for Window {}

impl Window {
    fn words(&self) -> Words {
        Words { base: self.base, key: self.key }
    }

    fn read(&self, at: u64) -> u64 {
        // SAFETY: inside the window.
        unsafe { &*self.seen.add(at as usize / 8) }.load(Ordering::Acquire)
    }
}

impl Rank {
    /// In host memory.
    fn host(&self, id: u32, bytes: u64) -> Window {
        let memory: Box<[AtomicU64]> = (0..bytes / 8).map(|_| AtomicU64::new(0)).collect();
        let (base, seen) = (memory.as_ptr() as u64, memory.as_ptr());
        let region = Region { id, base, len: bytes, strict: false, dma_buf: None };
        let registration = self.fabric.register(&region).unwrap();
        self.registry.insert(id, Extent { base, len: bytes });
        Window { base, seen, key: registration.rkey, _registration: registration, _memory: Some(memory) }
    }

    /// In GPU memory.
    fn gpu(&self, fake: &Fake, id: u32, bytes: u64, never_reset: bool) -> Window {
        let base = fake.alloc(1, bytes as usize, false);
        let region = Region { id, base, len: bytes, strict: never_reset, dma_buf: None };
        let memory = inspect(base, bytes, never_reset).unwrap().unwrap();
        let registration = self.fabric.register_gpu(&region, &memory).unwrap();
        let seen = fake.peek(base).cast();
        Window { base, seen, key: registration.rkey, _registration: registration, _memory: None }
    }

    fn context(&self) -> SoftContext {
        let spec = ContextSpec { contexts: 1, queue_depth: 0, traffic_class: None, rank_stride: 1 };
        let (mut made, _) = self.fabric.prepare_contexts(&spec).unwrap();
        made.pop().unwrap()
    }
}

fn join(nranks: u32, transport: SoftTransport) -> Vec<Rank> {
    let config = Arc::new(Config { soft_transport: transport, ..Config::default() });
    let open = || {
        let registry = Arc::new(Registry::default());
        Rank { fabric: SoftFabric::open(&config, registry.clone()).unwrap(), registry }
    };
    let ranks: Vec<_> = (0..nranks).map(|_| open()).collect();
    let hellos: Vec<_> = ranks.iter().map(|r| r.fabric.hello()).collect();
    let hellos: Vec<&[u8]> = hellos.iter().map(Vec::as_slice).collect();
    for (rank, r) in (0..).zip(&ranks) {
        r.fabric.join(World { rank, nranks }, &hellos).unwrap();
    }
    ranks
}

/// Words whose values the engine knows, words that kernels may reset with a driver that adds and without, fetched to
/// host memory and to the caller's GPU.
#[test]
fn every_change_is_that_of_the_model() {
    for transport in TRANSPORTS {
        for (can_add, never_reset, to_gpu) in
            [(true, false, false), (false, false, true), (true, true, true), (false, true, false)]
        {
            let fake = Fake::take();
            fake.settings(can_add, 3);
            {
                let _current = fake.enter(1);
                let ranks = join(2, transport);
                let context = ranks[0].context();
                for (peer, rank) in (0..).zip(&ranks) {
                    let words = rank.gpu(&fake, 1 + peer, 64, never_reset);
                    let here = match to_gpu {
                        true => ranks[0].gpu(&fake, 5 + peer, 512, false),
                        false => ranks[0].host(5 + peer, 512),
                    };
                    as_a_model_does(&context, peer, words.words(), here.words(), |at| here.read(at), 12);
                }
                drop(context);
            }
            fake.check();
        }
    }
}

#[test]
fn of_several_ranks_at_once_none_is_lost() {
    for transport in TRANSPORTS {
        let fake = Fake::take();
        fake.settings(true, 1);
        {
            let _current = fake.enter(1);
            let ranks = join(3, transport);
            let words = ranks[1].gpu(&fake, 1, 64, false);
            let contexts: Vec<_> = ranks.iter().map(Rank::context).collect();
            let here: Vec<_> = (10..).zip(&ranks).map(|(id, r)| r.host(id, 8 * TURNS)).collect();
            let reads: Vec<_> = here.iter().map(|w| |at| w.read(at)).collect();
            let members: Vec<_> = contexts
                .iter()
                .zip(&here)
                .zip(&reads)
                .map(|((context, here), read)| {
                    let (words, here) = (words.words(), here.words());
                    Member { context, peer: 1, words, here, read }
                })
                .collect();
            let owner = ranks[1].context();
            concurrent(&members, || owner.progress().unwrap());
        }
        fake.check();
    }
}

/// Signals go to the same word; puts into GPU memory come before, and the word may be in host memory then.
#[test]
fn a_change_takes_effect_behind_earlier_puts_and_signals() {
    const BYTES: u64 = 64 << 10;
    for (transport, word_on_gpu) in TRANSPORTS.into_iter().flat_map(|t| [(t, true), (t, false)]) {
        let fake = Fake::take();
        fake.settings(word_on_gpu, 20);
        {
            let _current = fake.enter(1);
            let ranks = join(2, transport);
            let (from, to) = (ranks[0].host(1, BYTES), ranks[1].gpu(&fake, 1, BYTES, false));
            let words = if word_on_gpu { ranks[1].gpu(&fake, 2, 64, false) } else { ranks[1].host(2, 64) };
            let here = ranks[0].host(3, 64);
            let (sender, receiver) = (ranks[0].context(), ranks[1].context());
            for round in 1..=8 {
                // SAFETY: the host window's memory.
                (0..BYTES / 8).for_each(|i| unsafe { &*from.seen.add(i as usize) }.store(round, Ordering::Relaxed));
                let put = |len| Put {
                    local: from.base,
                    lkey: from.key,
                    rkey: to.key,
                    remote: to.base,
                    len,
                    signal: Some(Signal { remote: words.base, rkey: words.key, value: 1, strong: true }),
                    more: false,
                };
                let add = atomic(words.words(), 0, Width::Eight, Change::add(10), Some((here.words(), 0)));
                let last = post(&sender, 1, &[Op::Put(put(BYTES)), Op::Put(put(0)), add]);
                let end = Instant::now() + Duration::from_secs(60);
                let before = (round - 1) * 12;
                while words.read(0) != before + 12 {
                    assert!(Instant::now() < end, "{transport:?}, {word_on_gpu}: {} of {round}", words.read(0));
                    sender.progress().unwrap();
                    receiver.progress().unwrap();
                }
                assert!((0..BYTES / 8).all(|i| to.read(8 * i) == round), "{transport:?}, {word_on_gpu}: {round}");
                wait(&sender, 1, last);
                assert_eq!(here.read(0), before + 2, "{transport:?}, {word_on_gpu}");
            }
        }
        fake.check();
    }
}

/// What names no word of a GPU window fails its context, and no other.
#[test]
fn a_wrong_word_fails_its_context_alone() {
    for transport in TRANSPORTS {
        let fake = Fake::take();
        {
            let _current = fake.enter(1);
            let ranks = join(2, transport);
            let (words, here) = (ranks[1].gpu(&fake, 1, 64, false), ranks[0].host(2, 64));
            let good = ranks[0].context();
            for at in [4, 60, 64, 1 << 20] {
                let bad = ranks[0].context();
                let op = atomic(words.words(), at, Width::Eight, Change::add(1), Some((here.words(), 0)));
                let seq = post(&bad, 1, &[op]);
                let end = Instant::now() + Duration::from_secs(60);
                let why = loop {
                    match bad.test(1, seq) {
                        Ok(done) => assert!(!done && Instant::now() < end, "{transport:?}, {at}: {done}"),
                        Err(why) => break why,
                    }
                };
                assert_eq!(why.kind(), Kind::RemoteAccess, "{transport:?}: {why}");
            }
            let op = atomic(words.words(), 8, Width::Four, Change::add(3), Some((here.words(), 8)));
            (0..2).for_each(|_| wait(&good, 1, post(&good, 1, &[op])));
            assert_eq!((here.read(8), words.read(8), words.read(0)), (3, 6, 0), "{transport:?}");
            assert!(!good.has_error());
        }
        fake.check();
    }
}

/// More of them than there are small buffers, behind a get whose answer, which needs one, arrives in front of theirs.
#[test]
fn those_that_wait_leave_buffers_to_answers_in_front_of_theirs() {
    const MANY: u64 = 300;
    const BYTES: u64 = 4096;
    let fake = Fake::take();
    {
        let _current = fake.enter(1);
        let ranks = join(2, SoftTransport::Tcp);
        let (from, words) = (ranks[1].gpu(&fake, 1, BYTES, false), ranks[1].gpu(&fake, 2, 64, false));
        let (to, fetched) = (ranks[0].gpu(&fake, 1, BYTES, false), ranks[0].gpu(&fake, 2, 8 * MANY, false));
        let (asks, answers) = (ranks[0].context(), ranks[1].context());
        // SAFETY: the window's memory.
        (0..BYTES / 8).for_each(|i| unsafe { &*from.seen.add(i as usize) }.store(i + 1, Ordering::Relaxed));
        let get = Get { local: to.base, lkey: to.key, rkey: from.key, remote: from.base, len: BYTES, more: false };
        let add = |i| atomic(words.words(), 0, Width::Eight, Change::add(1), Some((fetched.words(), 8 * i)));
        let last = post(&asks, 1, &std::iter::once(Op::Get(get)).chain((0..MANY).map(add)).collect::<Vec<_>>());
        let end = Instant::now() + Duration::from_secs(60);
        while !asks.test(1, last).unwrap() {
            assert!(Instant::now() < end, "{} of {MANY}", words.read(0));
            answers.progress().unwrap();
        }
        assert!((0..BYTES / 8).all(|i| to.read(8 * i) == i + 1));
        assert!((0..MANY).all(|i| fetched.read(8 * i) == i));
    }
    fake.check();
}
