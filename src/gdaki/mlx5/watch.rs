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
/// A completion queue that was overrun (`_CQ_ERROR`).
const OVERRUN: u16 = 0x04;
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
    /// Somebody is to be asked for its state.
    asks: AtomicBool,
    round: Mutex<Round>,
}

/// Who is asked for its state, and how far that has come.
#[derive(Default)]
struct Round {
    /// Queue pairs whose completions tell nothing, by their numbers in the set.
    asked: Vec<usize>,
    next: usize,
    last: Option<Instant>,
}

/// By what an error showed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shown {
    Event,
    Completion,
    Overrun,
    State,
}

/// Of whom an event is: the number of a queue pair in its set, and what told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cookie {
    index: u64,
    shown: Shown,
}

impl Cookie {
    fn encode(self) -> u64 {
        self.index << 2 | self.shown as u64
    }

    fn decode(word: u64) -> Self {
        let all = [Shown::Event, Shown::Completion, Shown::Overrun, Shown::State];
        Self { index: word >> 2, shown: all[word as usize & 3] }
    }
}

impl ErrorWatch {
    /// Nobody is watched yet.
    pub fn new(nic: &Mlx5Nic) -> Result<Self> {
        let channel =
            EventChannel::new(&nic.port.devx).map_err(|e| Error::system(no_channel(&e)).context(nic.label()))?;
        let (failed, asks) = (AtomicBool::new(false), AtomicBool::new(false));
        Ok(Self { channel, failed, silent: Vec::new(), asks, round: Mutex::default() })
    }

    /// Watches a queue pair, which is number `index` of its set, and with it its completions.
    pub fn add(&mut self, pair: &Mlx5QueuePair, index: usize, label: &str) -> Result<()> {
        let cookie = |shown| Cookie { index: index as u64, shown }.encode();
        let completions = &pair.completions.object;
        for (what, object, events, shown) in [
            ("the queues", &pair.object, &OF_QUEUE_PAIRS[..], Shown::Event),
            ("the completions", completions, &[COMPLETION], Shown::Completion),
            ("the completions", completions, &[OVERRUN], Shown::Overrun),
        ] {
            self.subscribe(object, events, cookie(shown), label).map_err(|e| {
                Error::system(format!("events of {what} of {} {}: {e}; see the kernel log", pair.role(), pair.number()))
            })?;
        }
        if self.silent.contains(&COMPLETION) {
            self.round.lock().asked.push(index);
            self.asks.store(true, Ordering::Release);
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
                    let Cookie { index, shown } = Cookie::decode(word);
                    let found = pair(index as usize);
                    if shown == Shown::Completion && found.as_ref().is_some_and(|(pair, _)| is_well(pair)) {
                        self.false_alarm(label, index as usize);
                        continue;
                    }
                    self.failed.store(true, Ordering::Release);
                    if let Some((pair, whom)) = found.filter(|_| said < LINES) {
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
        if self.asks.load(Ordering::Acquire) && !self.failed.load(Ordering::Acquire) {
            self.ask(label, pair);
        }
        self.failed.load(Ordering::Acquire)
    }

    /// A completion was told of, and the queue pair goes on: it is not armed any more, and is asked from here on. So is
    /// one that has failed and does not say so yet.
    #[cold]
    fn false_alarm(&self, label: &str, index: usize) {
        let mut round = self.round.lock();
        if round.asked.is_empty() {
            log::info!(
                "{label}: the device told of a completion that is no error; queue pairs of which it does are asked for \
                 their state in turn"
            );
        }
        round.asked.push(index);
        self.asks.store(true, Ordering::Release);
    }

    /// Asks the next queue pairs for their state, if it is time. None of them has failed before.
    #[cold]
    fn ask<'a>(&self, label: &str, pair: impl Fn(usize) -> Option<(&'a Mlx5QueuePair, String)>) {
        // Who finds another thread at it has its answer the next time.
        let Some(mut round) = self.round.try_lock() else { return };
        if round.last.is_some_and(|last| last.elapsed() < BETWEEN) {
            return;
        }
        for _ in 0..ASKED_AT_ONCE.min(round.asked.len()) {
            round.next = (round.next + 1) % round.asked.len();
            let Some((pair, whom)) = pair(round.asked[round.next]) else { continue };
            if !is_well(pair) {
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

fn is_well(pair: &Mlx5QueuePair) -> bool {
    matches!(pair.state(), Ok((state, ..)) if !has_failed(state))
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
        Shown::Overrun => "its kernel posted more than its queue holds".to_owned(),
        Shown::Event => peers.to_owned(),
        Shown::State => format!("{own}; or {peers}"),
    };
    format!("{} {} {whom} {state}: {cause}; look for the first error in the peer's log", pair.role(), pair.number())
}

#[cfg(test)]
mod tests {
    use super::{Cookie, Shown};

    #[test]
    fn cookies_name_one_queue_pair() {
        let all = [(0, Shown::Event), (0, Shown::Completion), (4095, Shown::Overrun), (1 << 40, Shown::State)];
        for (index, shown) in all {
            let cookie = Cookie { index, shown };
            assert_eq!(Cookie::decode(cookie.encode()), cookie);
        }
    }
}
