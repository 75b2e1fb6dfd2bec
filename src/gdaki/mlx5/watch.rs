//! What a set's queue pairs tell of errors.
//!
//! Every completion queue is armed for its first error, every queue pair tells of what it finds wrong as a responder;
//! both arrive at one channel, which queryLastError looks at. Looking costs a system call; no thread waits. Only what
//! was told of is asked for its state, since that takes 250 µs.

use super::command::queue_pair::QueuePairState;
use super::nic::Mlx5Nic;
use super::probe::no_channel;
use super::queue_pair::Mlx5QueuePair;
use crate::error::{Error, Result};
use oxygin_ffi::mlx5::EventChannel;
use std::sync::atomic::{AtomicBool, Ordering};

/// Events of completion queues: a completion that was waited for, an overrun (Linux, `include/linux/mlx5/device.h`:
/// `MLX5_EVENT_TYPE_COMP`, `_CQ_ERROR`).
const OF_COMPLETIONS: [u16; 2] = [0x00, 0x04];
/// Events of queue pairs (`MLX5_EVENT_TYPE_WQ_CATAS_ERROR`, `_WQ_INVAL_REQ_ERROR`, `_WQ_ACCESS_ERROR`).
const OF_QUEUE_PAIRS: [u16; 3] = [0x05, 0x10, 0x11];
/// Lines of the log about failed queue pairs at most: one failure brings down many.
const LINES: u32 = 8;

/// The channel of a set.
pub struct ErrorWatch {
    channel: EventChannel,
    failed: AtomicBool,
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
        Ok(Self { channel, failed: AtomicBool::new(false) })
    }

    /// Watches a queue pair, which is number `index` of its set, and with it its completions.
    pub fn add(&self, pair: &Mlx5QueuePair, index: usize) -> Result<()> {
        let cookie = |by_completion| Cookie { index: index as u64, by_completion }.encode();
        let refused = |what: &str, e: std::io::Error| {
            Error::system(format!("events of {what} of {} {}: {e}; see the kernel log", pair.role(), pair.number()))
        };
        self.channel.subscribe(&pair.object, &OF_QUEUE_PAIRS, cookie(false)).map_err(|e| refused("the queues", e))?;
        let completions = &pair.completions.object;
        self.channel
            .subscribe(completions, &OF_COMPLETIONS, cookie(true))
            .map_err(|e| refused("the completions", e))?;
        pair.completions.arm();
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
                        log::warn!("{label}: {}", sentence(pair, &whom, cookie.by_completion));
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
        self.failed.load(Ordering::Acquire)
    }
}

/// What happened to a queue pair.
#[cold]
fn sentence(pair: &Mlx5QueuePair, whom: &str, by_completion: bool) -> String {
    let state = match pair.state() {
        Ok((state @ (QueuePairState::Error | QueuePairState::SendError), taken, rung)) => {
            format!("is in state {state}, the device took entry {taken} of {rung}")
        }
        Ok((state, ..)) => format!("is in state {state}"),
        Err(e) => format!("cannot be asked for its state (QUERY_QP: {e})"),
    };
    let cause = match by_completion {
        true => {
            "an entry of its kernel's failed: the peer does not answer (it ended, a port or route is down), or a key \
             or range was wrong"
        }
        false => "the device refused what the peer asked for, or could not use this rank's memory",
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
