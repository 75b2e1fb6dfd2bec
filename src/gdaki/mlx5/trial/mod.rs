//! A put with a signal and a counter through a queue pair to oneself and its companion, before anybody relies on such
//! queue pairs: written and rung as kernels will, on the GPU, where there is one. What a device, its firmware, a
//! driver or this library has wrong then shows as a sentence at connect, and ranks take another engine, in place of
//! kernels that wait for ever.

mod board;
mod entries;

use super::nic::Mlx5Nic;
use super::queue_set::{QueueMemory, QueueSet, SetRequest};
use super::RingWork;
use crate::config::{Config, ReliableDoorbell};
use crate::error::{Error, Result};
use crate::fabric::verbs::{DeviceInfo, VerbsFabric};
use crate::fabric::{Fabric, World};
use crate::gdaki::entry::completion::GOOD;
use crate::gdaki::view::{Handler, PeerQueues, QueuePair, SetShape};
use crate::memory::gpu::{cuda_error, ptx};
use crate::memory::registry::Registry;
use crate::proxy::drain::Work;
use crate::proxy::idle::Rest;
use crate::proxy::memory::{Block, Memory};
use crate::sys::wait::{until, Wait};
use board::{Player, Post, TrialBoard, COMPLETED, LANDED_WORDS};
use entries::{TrialKeys, MEMORY_BYTES, TARGET};
use oxygin_ffi::cuda::{Context, CudaError, Kernel, Stream};
use oxygin_ffi::verbs::Mr;
use std::ffi::CStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long the device has: an exchange with oneself takes microseconds, and a kernel that looks for longer holds up
/// others.
const LIMIT: Duration = Duration::from_secs(1);
/// How long the kernel may take to begin, and to end, as [`Memory`] waits for its copies.
const PATIENCE: Duration = Duration::from_secs(10);
/// Slots of the send queue, as a power of two, where the device can ring so many as is asked for.
const LOG_SLOTS: u32 = 5;
/// Threads of the kernel's one block: a warp, of which one thread does everything.
const THREADS: u32 = 32;

const ENTRY: &CStr = c"oxygin_trial";
const PTX: &CStr = ptx!("trial.ptx");

/// Makes a communicator of one rank on the port, a queue pair to itself, and tries it, in the calling thread's CUDA
/// context if it has one. All of it is given back. Takes some milliseconds, and waits for the kernel for
/// [`PATIENCE`] at most; calls of the driver that load and launch it may themselves wait for the application's kernels,
/// as others do while a communicator is made.
pub fn run(device: &DeviceInfo, config: &Config) -> Result<()> {
    let fabric = VerbsFabric::open_for(device, config, Arc::<Registry>::default(), true)?;
    fabric.join(World { rank: 0, nranks: 1 }, &[&fabric.hello()])?;
    let nic = Mlx5Nic::on_trial(&fabric, config)?;
    Tried::prepare(&fabric, &nic)?.run(nic.label())
}

/// A queue pair to oneself, and what is at both its ends.
struct Tried {
    set: QueueSet,
    key: Mr,
    /// Of the two operations.
    at: u64,
    board: Block,
    memory: Arc<Memory>,
}

impl Tried {
    fn prepare(fabric: &VerbsFabric, nic: &Arc<Mlx5Nic>) -> Result<Self> {
        let shape = SetShape { rank: 0, ranks: 1, stride: 0, contexts: 1 };
        let log_slots = match nic.reliable_doorbell {
            ReliableDoorbell::On => LOG_SLOTS.min(nic.capabilities.no_record_slots.checked_ilog2().unwrap_or(0)),
            ReliableDoorbell::IfPossible | ReliableDoorbell::Off => LOG_SLOTS,
        };
        let request = SetRequest { shape, log_slots, counts: nic.capabilities.cross_channel, traffic_class: None };
        let mut memory = Memory::here()?;
        let places = QueueMemory::allocate(nic, &request, &mut memory)?;
        let at = memory.device(&TrialKeys::memory())?;
        let board = memory.shared(size_of::<TrialBoard>())?;
        let memory = Arc::new(memory);
        let on_gpu = memory.inspect(at, MEMORY_BYTES as u64, true)?;
        let key = fabric.register_for_trial(at, MEMORY_BYTES as u64, on_gpu.as_ref())?;
        let (set, slices) = QueueSet::prepare(nic, request, &places, &memory)?;
        set.connect(&[&slices])?;
        Ok(Self { set, key, at, board, memory })
    }

    fn run(self, label: &str) -> Result<()> {
        let began = Instant::now();
        let queues = self.set.queues();
        let queues = queues.first().ok_or_else(|| Error::internal("a trial without a queue pair"))?;
        let board = self.board.cpu.as_ptr().cast::<TrialBoard>();
        // SAFETY: that many bytes, aligned, and nobody else's yet.
        unsafe { board.write(self.asks(queues)) };
        let mut ringing = self.set.ringing(1, &Arc::default());
        let wanted = TrialKeys::landed(queues.companion.is_some());
        let by = if self.memory.is_on_gpu() { "a kernel" } else { "a processor" };
        let told = loop {
            let ended = match self.memory.context() {
                // SAFETY: the board and all that it names stay until `self` goes.
                None => play(unsafe { Player::new(board) }, &mut ringing),
                Some(context) => launch(context, self.board.device, &mut ringing),
            };
            match ended {
                Ended::Yes => {}
                Ended::NotBegun(e) => return Err(cuda_error("the trial kernel", &e).context(label)),
                Ended::No(why) => return Err(self.leave(why).context(label)),
            }
            // SAFETY: whoever wrote it has ended.
            let told = unsafe { board.read() };
            if told.state != COMPLETED || told.found == wanted || began.elapsed() > LIMIT {
                break told;
            }
            // On some platforms data comes on another way than completion entries, and later: once more, a look alone.
            // SAFETY: as above.
            unsafe { (*board).posts.iter_mut().for_each(|post| post.ring = 0) };
        };
        let verdict = verdict(&told, &wanted).map_err(|why| {
            let state = self.set.state_of_first();
            Error::system(format!("{} {why}; the queue pair {state}", tried(by))).context(label)
        });
        self.set.end();
        drop(self.key);
        verdict?;
        log::debug!("{label}: {} arrived; {} µs in all", tried(by), began.elapsed().as_micros());
        Ok(())
    }

    /// What the kernel is told.
    fn asks(&self, queues: &PeerQueues) -> TrialBoard {
        let keys = TrialKeys { lkey: self.key.lkey(), rkey: self.key.rkey() };
        let main = post(&queues.main, keys.put(queues.main.number));
        let companion = queues.companion.as_ref().map_or_else(Post::default, |companion| {
            post(companion, keys.count(companion.number, queues.main.completion_number))
        });
        TrialBoard {
            limit: LIMIT.as_nanos() as u64,
            landed: self.at + TARGET,
            posts: [main, companion],
            ..TrialBoard::default()
        }
    }

    /// The kernel has not ended: it may still run, and then uses all of it.
    #[cold]
    fn leave(self, why: Option<CudaError>) -> Error {
        self.memory.keep();
        std::mem::forget(self);
        match why {
            Some(e) => cuda_error("the trial kernel", &e),
            None => Error::cuda(format!(
                "a kernel that tries a queue pair has not ended for {PATIENCE:?}: kernels of the application hold the \
                 GPU; make communicators while none waits for another rank"
            )),
        }
    }
}

/// What device code writes to post two entries.
fn post(pair: &QueuePair, entries: [u64; 16]) -> Post {
    let behind = 2;
    let doorbell = (behind << 40 | u64::from(pair.number) << 8).to_be();
    Post {
        ring: pair.send_queue,
        record: if pair.handler == Handler::Doorbell { pair.send_record } else { 0 },
        record_value: (behind as u32).to_be().into(),
        bell: pair.doorbell,
        // This process is told how far the queue is, and rings.
        bell_value: if pair.handler == Handler::CpuProxy { behind } else { doorbell },
        completions: pair.completion_queue,
        entries,
        ..Post::default()
    }
}

/// For messages.
fn tried(by: &str) -> String {
    format!("a put with a signal and a counter through a queue pair to itself, written and rung by {by},")
}

/// What comes of what the kernel saw: an error, in words, unless all operations completed and arrived. `wanted`: what
/// is to be found then.
fn verdict(told: &TrialBoard, wanted: &[u64; LANDED_WORDS]) -> std::result::Result<(), String> {
    for (post, whose) in told.posts.iter().zip(["its", "its companion's"]) {
        for which in [0, 1] {
            if let Some((opcode, syndrome)) = post.completion(which).filter(|(opcode, _)| *opcode != GOOD) {
                return Err(format!(
                    "failed: {whose} completion entry {which} has opcode {opcode} and syndrome {syndrome:#04x}; see \
                     the kernel log"
                ));
            }
        }
    }
    if told.state != COMPLETED {
        let whose = match told.posts[0].completion(1) {
            Some(_) => "its companion",
            None => "it",
        };
        return Err(format!("did not complete within {LIMIT:?}: {whose} lost a doorbell or a completion entry"));
    }
    match told.found.iter().zip(wanted).position(|(found, wanted)| found != wanted) {
        None => Ok(()),
        Some(i) => Err(format!(
            "completed, and word {i} of what it was to write is {:#018x} in place of {:#018x}: what the device writes \
             is not visible where it says so",
            told.found[i], wanted[i]
        )),
    }
}

/// Whether what was to try the queue pair has ended.
enum Ended {
    Yes,
    /// It was never launched.
    NotBegun(CudaError),
    /// It may still run: it has not ended in time, or its context has failed.
    No(Option<CudaError>),
}

/// By this thread.
fn play(mut player: Player, ringing: &mut [RingWork]) -> Ended {
    let wait = Wait::begin();
    while !player.step() {
        ring(ringing);
        wait.rest();
    }
    Ended::Yes
}

fn ring(ringing: &mut [RingWork]) {
    ringing.iter_mut().for_each(|work| {
        work.pass(Rest::Awake);
    });
}

/// By a kernel.
fn launch(context: &Context, board: u64, ringing: &mut [RingWork]) -> Ended {
    let launched = (|| {
        let current = context.enter()?;
        let kernel = Kernel::load(context.cuda(), PTX, ENTRY)?;
        let stream = Stream::create(context.cuda())?;
        // SAFETY: the kernel has one parameter; what the board names stays until it has ended, or for ever (`leave`).
        unsafe { kernel.launch(&stream, 1, THREADS, &mut [board]) }?;
        Ok((current, kernel, stream))
    })();
    let (_current, kernel, stream) = match launched {
        Ok(launched) => launched,
        Err(e) => return Ended::NotBegun(e),
    };
    let mut failed = None;
    let has_ended = until(Instant::now() + PATIENCE, || {
        ring(ringing);
        stream.is_done().unwrap_or_else(|e| {
            failed = Some(e);
            true
        })
    });
    if has_ended && failed.is_none() {
        // Before the context is left.
        drop((kernel, stream));
        return Ended::Yes;
    }
    std::mem::forget((kernel, stream));
    Ended::No(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_is_wrong_is_said() {
        let (there, wanted) = (Post { completions: 1, ..Post::default() }, TrialKeys::landed(true));
        let verdict = |told: &TrialBoard| verdict(told, &wanted);
        let good = TrialBoard { state: COMPLETED, posts: [there; 2], found: wanted, ..TrialBoard::default() };
        assert_eq!(verdict(&good), Ok(()));
        let nobody = 0xf1_u64 << 56;
        let waits = Post { told: [0, nobody, 0, nobody], ..there };
        let half = Post { told: [0, 0, 0, nobody], ..there };
        for (posts, whose) in
            [([waits; 2], ": it lost"), ([half, waits], ": it lost"), ([there, half], "companion lost")]
        {
            let late = TrialBoard { state: board::TIME_OVER, posts, ..good };
            let said = verdict(&late).unwrap_err();
            assert!(said.contains("did not complete within 1s") && said.contains(whose), "{said}");
        }
        // The second is flushed behind the first.
        let refused = Post { told: [0x13 << 56, 0xd0 << 56, 0x05 << 56, 0xd0 << 56], ..there };
        for (posts, whose) in [([refused, waits], "its completion entry 0"), ([there, refused], "its companion's")] {
            let said = verdict(&TrialBoard { posts, ..good }).unwrap_err();
            assert!(said.contains(whose) && said.contains("entry 0 has opcode 13 and syndrome 0x13"), "{said}");
        }
        for word in 0..10 {
            let mut other = good;
            other.found[word] ^= 1 << 40;
            assert!(verdict(&other).unwrap_err().contains(&format!("word {word} of")));
        }
        let no_companion = TrialBoard { posts: [there, Post::default()], found: TrialKeys::landed(false), ..good };
        assert_eq!(super::verdict(&no_companion, &TrialKeys::landed(false)), Ok(()));
    }
}
