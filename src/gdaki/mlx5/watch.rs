//! What a set's queue pairs tell of errors.
//!
//! Every completion queue is armed for its first error, every queue pair tells of what it finds wrong as a responder;
//! both arrive at one channel, which queryLastError looks at. Looking costs a system call; no thread waits. Only what
//! was told of is asked for its state, since that takes 250 µs.
//!
//! Which events a device tells of is the firmware's affair (Linux, `drivers/infiniband/hw/mlx5/devx.c`,
//! `is_valid_events`). Without those of completions, queue pairs are asked for their state in turn; without others,
//! only the peer whose entry was refused sees that.

use super::command::queue_pair::QueuePairState;
use super::nic::Mlx5Nic;
use super::probe::no_channel;
use super::queue_pair::Mlx5QueuePair;
use crate::error::{Error, Result};
use crate::sys::sync::Mutex;
use oxygin_ffi::mlx5::{EventChannel, Object};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A completion that was waited for (Linux, `include/linux/mlx5/device.h`: `MLX5_EVENT_TYPE_COMP`).
const COMPLETION: u16 = 0x00;
/// Events of completion queues: that, and an overrun (`_CQ_ERROR`).
const OF_COMPLETIONS: [u16; 2] = [COMPLETION, 0x04];
/// Events of queue pairs (`MLX5_EVENT_TYPE_WQ_CATAS_ERROR`, `_WQ_INVAL_REQ_ERROR`, `_WQ_ACCESS_ERROR`).
const OF_QUEUE_PAIRS: [u16; 3] = [0x05, 0x10, 0x11];
/// Lines of the log about failed queue pairs at most: one failure brings down many.
const LINES: u32 = 8;

/// Queue pairs that are asked for their state in one go, and how long nobody is asked behind it: 8 % of the time of
/// whoever looks, and each of 32 × 10 is seen within a second.
const ASKED_AT_ONCE: usize = 32;
const BETWEEN: Duration = Duration::from_millis(100);

/// The channel of a set.
pub struct ErrorWatch {
    channel: EventChannel,
    failed: AtomicBool,
    /// Events of which the device does not tell.
    silent: Vec<u16>,
    /// Queue pairs whose completions tell nothing, by their numbers in the set.
    asked: Vec<usize>,
    round: Mutex<Round>,
}

/// How far queue pairs have been asked for their state.
#[derive(Default)]
struct Round {
    next: usize,
    last: Option<Instant>,
}

/// By what an error showed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shown {
    Completion,
    Event,
    State,
}

/// Of whom an event is: the number of a queue pair in its set, and whether its completions told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cookie {
    index: u64,
    by_completion: bool,
}

impl Cookie {
    fn encode(self) -> u64 {
        self.index << 1 | u64::from(self.by_completion)
    }

    fn decode(word: u64) -> Self {
        Self { index: word >> 1, by_completion: word & 1 == 1 }
    }
}

impl ErrorWatch {
    /// Nobody is watched yet.
    pub fn new(nic: &Mlx5Nic) -> Result<Self> {
        let channel =
            EventChannel::new(&nic.port.devx).map_err(|e| Error::system(no_channel(&e)).context(nic.label()))?;
        let (silent, asked, round) = (Vec::new(), Vec::new(), Mutex::default());
        Ok(Self { channel, failed: AtomicBool::new(false), silent, asked, round })
    }

    /// Watches a queue pair, which is number `index` of its set, and with it its completions.
    pub fn add(&mut self, pair: &Mlx5QueuePair, index: usize, label: &str) -> Result<()> {
        let cookie = |by_completion| Cookie { index: index as u64, by_completion }.encode();
        let refused = |what: &str, e: std::io::Error| {
            Error::system(format!("events of {what} of {} {}: {e}; see the kernel log", pair.role(), pair.number()))
        };
        self.subscribe(&pair.object, &OF_QUEUE_PAIRS, cookie(false), label).map_err(|e| refused("the queues", e))?;
        let completions = &pair.completions.object;
        self.subscribe(completions, &OF_COMPLETIONS, cookie(true), label).map_err(|e| refused("the completions", e))?;
        if self.silent.contains(&COMPLETION) {
            self.asked.push(index);
        } else {
            pair.completions.arm();
        }
        Ok(())
    }

    /// Asks for these events of an object, as far as the device tells of them.
    fn subscribe(&mut self, object: &Object, events: &[u16], cookie: u64, label: &str) -> std::io::Result<()> {
        let told = |silent: &[u16]| events.iter().copied().filter(|e| !silent.contains(e)).collect::<Vec<_>>();
        let all = told(&self.silent);
        if all.is_empty() {
            return Ok(());
        }
        match self.channel.subscribe(object, &all, cookie) {
            Err(e) if is_unknown(&e) => {}
            made => return made,
        }
        // One of them is none of the device's: the call asks for all or nothing.
        for event in all {
            match self.channel.subscribe(object, &[event], cookie) {
                Err(e) if is_unknown(&e) => {
                    let then = match event {
                        COMPLETION => "queue pairs are asked for their state in turn, which takes longer",
                        _ => "queryLastError says nothing of it on this rank",
                    };
                    log::info!("{label}: the device tells of no events {event:#04x} ({e}); {then}");
                    self.silent.push(event);
                }
                made => made?,
            }
        }
        Ok(())
    }

    /// Whether any queue pair has failed: takes what has arrived at the channel. `pair` finds a queue pair by its
    /// number, and whom it is connected to in words.
    pub fn look<'a>(&self, label: &str, pair: impl Fn(usize) -> Option<(&'a Mlx5QueuePair, String)>) -> bool {
        let mut said = 0;
        loop {
            match self.channel.take() {
                Ok(None) => break,
                Ok(Some(word)) => {
                    self.failed.store(true, Ordering::Release);
                    let cookie = Cookie::decode(word);
                    if let Some((pair, whom)) = pair(cookie.index as usize).filter(|_| said < LINES) {
                        let shown = if cookie.by_completion { Shown::Completion } else { Shown::Event };
                        log::warn!("{label}: {}", sentence(pair, &whom, shown));
                        said += 1;
                    }
                }
                Err(e) => {
                    if !self.failed.swap(true, Ordering::AcqRel) {
                        log::warn!("{label}: the channel for the device's events has failed: {e}; end the job");
                    }
                    break;
                }
            }
        }
        if !self.asked.is_empty() && !self.failed.load(Ordering::Acquire) {
            self.ask(label, pair);
        }
        self.failed.load(Ordering::Acquire)
    }

    /// Asks the next queue pairs for their state, if it is time. None of them has failed before.
    #[cold]
    fn ask<'a>(&self, label: &str, pair: impl Fn(usize) -> Option<(&'a Mlx5QueuePair, String)>) {
        // Who finds another thread at it has its answer the next time.
        let Some(mut round) = self.round.try_lock() else { return };
        if round.last.is_some_and(|last| last.elapsed() < BETWEEN) {
            return;
        }
        for _ in 0..ASKED_AT_ONCE.min(self.asked.len()) {
            let index = self.asked[round.next % self.asked.len()];
            round.next = (round.next + 1) % self.asked.len();
            let Some((pair, whom)) = pair(index) else { continue };
            if !matches!(pair.state(), Ok((state, ..)) if !has_failed(state)) {
                self.failed.store(true, Ordering::Release);
                log::warn!("{label}: {}", sentence(pair, &whom, Shown::State));
                break;
            }
        }
        round.last = Some(Instant::now());
    }
}

/// Whether events were refused as none of the device's.
fn is_unknown(e: &std::io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::EINVAL))
}

fn has_failed(state: QueuePairState) -> bool {
    matches!(state, QueuePairState::Error | QueuePairState::SendError)
}

/// What happened to a queue pair.
#[cold]
fn sentence(pair: &Mlx5QueuePair, whom: &str, shown: Shown) -> String {
    let state = match pair.state() {
        Ok((state, taken, rung)) if has_failed(state) => {
            format!("is in state {state}, the device took entry {taken} of {rung}")
        }
        Ok((state, ..)) => format!("is in state {state}"),
        Err(e) => format!("cannot be asked for its state (QUERY_QP: {e})"),
    };
    let own =
        "an entry of its kernel's failed: the peer does not answer (it ended, a port or route is down), or a key \
               or range was wrong";
    let peers = "the device refused what the peer asked for, or could not use this rank's memory";
    let cause = match shown {
        Shown::Completion => own.to_owned(),
        Shown::Event => peers.to_owned(),
        Shown::State => format!("{own}; or {peers}"),
    };
    format!("{} {} {whom} {state}: {cause}; look for the first error in the peer's log", pair.role(), pair.number())
}

#[cfg(test)]
mod tests {
    use super::Cookie;

    #[test]
    fn cookies_name_one_queue_pair() {
        for (index, by_completion) in [(0, false), (0, true), (4095, true), (1 << 40, false)] {
            let cookie = Cookie { index, by_completion };
            assert_eq!(Cookie::decode(cookie.encode()), cookie);
        }
    }
}
