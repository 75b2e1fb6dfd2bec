//! Atomic operations on host memory, by every way of the soft fabric. No table has such operations: these go to the
//! fabric itself.

use crate::support::atomics::*;
use oxygin::config::{Config, SoftTransport};
use oxygin::error::Kind;
use oxygin::fabric::soft::{Context as SoftContext, SoftFabric};
use oxygin::fabric::{Context, ContextSpec, Fabric, Region, World};
use oxygin::memory::registry::{Extent, Registry};
use oxygin::memory::window::Registration;
use oxygin::rma::atomic::{Atomicity, Atomics, Change, Width};
use oxygin::rma::op::{Op, Put, Signal};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

const TRANSPORTS: [SoftTransport; 3] = [SoftTransport::Auto, SoftTransport::NoCma, SoftTransport::Tcp];

struct Rank {
    fabric: SoftFabric,
    registry: Arc<Registry>,
}

struct Window {
    memory: Box<[AtomicU64]>,
    id: u32,
    _registration: Registration,
}

impl Window {
    fn words(&self) -> Words {
        Words { base: self.memory.as_ptr() as u64, key: self.id }
    }

    fn read(&self, at: u64) -> u64 {
        self.memory[at as usize / 8].load(Ordering::Acquire)
    }
}

impl Rank {
    fn window(&self, id: u32, bytes: u64) -> Window {
        let memory: Box<[AtomicU64]> = (0..bytes / 8).map(|_| AtomicU64::new(0)).collect();
        let base = memory.as_ptr() as u64;
        let region = Region { id, base, len: bytes, strict: false, dma_buf: None };
        let registration = self.fabric.register(&region).unwrap();
        self.registry.insert(id, Extent { base, len: bytes });
        Window { memory, id, _registration: registration }
    }

    fn context(&self) -> SoftContext {
        let spec = ContextSpec { contexts: 1, queue_depth: 0, traffic_class: None, rank_stride: 1 };
        let (mut made, _) = self.fabric.prepare_contexts(&spec).unwrap();
        made.pop().unwrap()
    }
}

/// Ranks of this process, told of one way. `threads`: of TCP's own.
fn join(nranks: u32, transport: SoftTransport, threads: u32) -> Vec<Rank> {
    let config = Config { soft_transport: transport, tcp_threads: Some(threads), ..Config::default() };
    let config = Arc::new(config);
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

#[test]
fn every_change_is_that_of_the_model() {
    for transport in TRANSPORTS {
        let ranks = join(2, transport, 0);
        let context = ranks[0].context();
        assert_eq!(context.atomics(), Atomics { host: Atomicity::Processors, gpu: Atomicity::Fabric, by_words: false });
        for (peer, rank) in (0..).zip(&ranks) {
            let (words, here) = (rank.window(1 + peer, 64), ranks[0].window(5 + peer, 512));
            as_a_model_does(&context, peer, words.words(), here.words(), |at| here.read(at), 150);
        }
    }
}

/// Rank 1's words, changed by itself and by contexts of the others.
#[test]
fn of_several_ranks_at_once_none_is_lost() {
    for transport in TRANSPORTS {
        let ranks = join(3, transport, 0);
        let words = ranks[1].window(1, 64);
        let contexts: Vec<_> = [0, 0, 1, 2].iter().map(|&r: &usize| ranks[r].context()).collect();
        let here: Vec<_> =
            (10..).zip([0, 0, 1, 2]).map(|(id, r): (u32, usize)| ranks[r].window(id, 8 * TURNS)).collect();
        let reads: Vec<_> = here.iter().map(|w| |at| w.read(at)).collect();
        let members: Vec<_> = contexts
            .iter()
            .zip(&here)
            .zip(&reads)
            .map(|((context, here), read)| Member { context, peer: 1, words: words.words(), here: here.words(), read })
            .collect();
        let owner = ranks[1].context();
        concurrent(&members, || owner.progress().unwrap());
    }
}

/// Signals, and additions by this process's own instructions, to the word that atomic operations change.
#[test]
fn signals_and_instructions_are_atomic_with_them() {
    const N: u64 = 300;
    for transport in TRANSPORTS {
        let ranks = join(2, transport, 0);
        let words = ranks[1].window(1, 64);
        let remote = words.words().base;
        std::thread::scope(|scope| {
            for rank in &ranks {
                scope.spawn(|| {
                    let context = rank.context();
                    let signal = Some(Signal { remote, rkey: 1, value: 1, strong: true });
                    let signal = Put { local: 0, lkey: 0, rkey: 0, remote: 0, len: 0, signal, more: false };
                    let odd = Change::FetchAdd { add: 1, boundary: 1 << 63 };
                    let ops: Vec<Op> = (0..N)
                        .flat_map(|_| {
                            [Op::Put(signal), atomic(words.words(), 0, Width::Eight, Change::add(1), None), {
                                atomic(words.words(), 0, Width::Eight, odd, None)
                            }]
                        })
                        .collect();
                    wait(&context, 1, post(&context, 1, &ops));
                });
            }
            scope.spawn(|| (0..N).for_each(|_| _ = words.memory[0].fetch_add(1, Ordering::SeqCst)));
        });
        // A bare signal is locally complete before it has arrived.
        let end = Instant::now() + Duration::from_secs(60);
        while words.read(0) != 7 * N {
            assert!(Instant::now() < end, "{transport:?}: {} of {}", words.read(0), 7 * N);
            std::thread::yield_now();
        }
    }
}

/// A change is seen after every put before it, also where these go over several connections by threads of their own;
/// and what follows, after it.
#[test]
fn a_change_takes_effect_behind_earlier_puts_and_before_later_signals() {
    const BYTES: u64 = 3 << 20;
    for (transport, threads) in TRANSPORTS.into_iter().zip([0, 0, 0]).chain([(SoftTransport::Tcp, 2)]) {
        let ranks = join(2, transport, threads);
        let (from, to) = (ranks[0].window(1, BYTES), ranks[1].window(1, BYTES));
        let (words, here) = (ranks[1].window(2, 64), ranks[0].window(3, 64));
        let (sender, receiver) = (ranks[0].context(), ranks[1].context());
        for round in 1..=10 {
            from.memory.iter().for_each(|word| word.store(round, Ordering::Relaxed));
            let put = Put {
                local: from.words().base,
                lkey: 1,
                rkey: 1,
                remote: to.words().base,
                len: BYTES,
                signal: None,
                more: false,
            };
            let signal = Some(Signal { remote: words.words().base + 8, rkey: 2, value: 1, strong: true });
            let change = Change::compare_swap(round - 1, round, Width::Eight);
            let ops = [
                Op::Put(put),
                atomic(words.words(), 0, Width::Eight, change, Some((here.words(), 0))),
                Op::Put(Put { len: 0, signal, ..put }),
            ];
            let last = post(&sender, 1, &ops);
            let end = Instant::now() + Duration::from_secs(60);
            while words.read(0) != round {
                assert!(words.read(8) < round, "{transport:?}: the signal is there before the change");
                assert!(Instant::now() < end, "{transport:?}: round {round}");
                sender.progress().unwrap();
                receiver.progress().unwrap();
            }
            assert!(to.memory.iter().all(|w| w.load(Ordering::Relaxed) == round), "{transport:?}, {threads}: {round}");
            wait(&sender, 1, last);
            assert_eq!(here.read(0), round - 1);
            while words.read(8) != round {
                assert!(Instant::now() < end, "{transport:?}: the signal of round {round}");
                receiver.progress().unwrap();
            }
        }
    }
}

/// What names no word of a window fails its context, and no other.
#[test]
fn a_wrong_word_fails_its_context_alone() {
    for transport in TRANSPORTS {
        let ranks = join(2, transport, 0);
        for (peer, rank) in (0..).zip(&ranks) {
            let (words, here) = (rank.window(1 + peer, 64), ranks[0].window(5 + peer, 64));
            let good = ranks[0].context();
            let nowhere = Words { key: 77, ..words.words() };
            for (at, words) in [(60, words.words()), (4, words.words()), (1 << 20, words.words()), (0, nowhere)] {
                let bad = ranks[0].context();
                here.memory[0].store(99, Ordering::Relaxed);
                let op = atomic(words, at, Width::Eight, Change::add(1), Some((here.words(), 0)));
                let seq = post(&bad, peer, &[op]);
                let end = Instant::now() + Duration::from_secs(60);
                let why = loop {
                    match bad.test(peer, seq) {
                        Ok(done) => assert!(!done && Instant::now() < end, "{transport:?}, {peer}, {at}: {done}"),
                        Err(why) => break why,
                    }
                };
                assert_eq!(why.kind(), Kind::RemoteAccess, "{why}");
                assert_eq!(here.read(0), 99);
            }
            let op = atomic(words.words(), 8, Width::Four, Change::add(3), Some((here.words(), 8)));
            (0..2).for_each(|_| wait(&good, peer, post(&good, peer, &[op])));
            assert_eq!((here.read(8), words.read(8), words.read(0)), (3, 6, 0), "{transport:?}, {peer}");
            assert!(!good.has_error());
        }
    }
}

/// A context goes while its operation is on its way: the word is changed or not, but nothing is fetched for it any
/// more.
#[test]
fn nothing_is_fetched_for_a_context_that_is_gone() {
    for transport in TRANSPORTS {
        let ranks = join(2, transport, 0);
        let (words, here) = (ranks[1].window(1, 64), ranks[0].window(2, 64));
        let stays = ranks[0].context();
        let add = |to| atomic(words.words(), 0, Width::Eight, Change::add(1), Some((here.words(), to)));
        for round in 0..50 {
            let gone = ranks[0].context();
            post(&gone, 1, &[add(0)]);
            drop(gone);
            here.memory[0].store(99, Ordering::Relaxed);
            // Its answer comes behind.
            wait(&stays, 1, post(&stays, 1, &[add(8)]));
            assert_eq!(here.read(0), 99, "{transport:?}, round {round}");
            assert!(here.read(8) >= round && here.read(8) <= 2 * round + 1, "{transport:?}, round {round}");
        }
    }
}
