//! What is done while nothing moves: the streams are asked whether they failed, and the watch is told how things stand.

use super::device::Device;
use super::state::EngineState;
use crate::error::Error;
use crate::memory::gpu::cuda_error;
use std::time::{Duration, Instant};

/// Polls without news between two looks at the clock.
const LOOK_EVERY: u32 = 64;
/// How long the flag may stay down before the stream is asked whether it failed.
const ASK_AFTER: Duration = Duration::from_millis(1);

/// How long nothing has moved.
#[derive(Default)]
pub struct Stall {
    /// Polls without news.
    polls: u32,
    /// When the clock was first looked at.
    since: Option<Instant>,
}

impl Stall {
    /// Something has moved.
    pub fn ends(&mut self) {
        *self = Self::default();
    }

    /// Counts a poll without news. Whether the streams are to be asked now.
    fn is_time_to_ask(&mut self) -> bool {
        self.polls = self.polls.wrapping_add(1);
        if self.polls % LOOK_EVERY != 0 || self.since.get_or_insert_with(Instant::now).elapsed() < ASK_AFTER {
            return false;
        }
        self.since = None;
        true
    }
}

impl EngineState {
    /// Asks the streams and the application's context whether they failed, once flags have been down for long. Looks at
    /// the clock now and then only. Where the application's context alone has failed what the streams have goes on, in
    /// theirs.
    pub fn check(&mut self, rank: u32) {
        if !self.stall.is_time_to_ask() {
            return;
        }
        let Some(device) = &self.device else { return };
        let streams = device.check_streams();
        let Err(e) = streams.clone().and_then(|()| device.check_app()) else { return };
        let why = cuda_error(&format!("the GPU of rank {rank} has failed"), &e);
        if streams.is_err() {
            let up = self.small.submissions.drain(..).chain(self.bulk.submissions.drain(..));
            up.flat_map(|submission| submission.finished).for_each(|o| self.refused.add(o, why.clone()));
        }
        self.fail_kernel(&why);
        self.fail(why);
    }

    /// Fails what the copy kernel was given. It may still be at it: its memory is left to the process.
    pub fn fail_kernel(&mut self, why: &Error) {
        self.handover.take_all().into_iter().for_each(|owner| self.refused.add(owner, why.clone()));
    }

    /// What waits and what is in flight, in words, for when nothing moves.
    #[cold]
    pub fn describe(&self) -> String {
        let kernel = self.handover.kernel.as_ref().map_or("none".into(), |kernel| kernel.describe());
        let why = if self.device.as_ref().is_some_and(Device::has_private_context) {
            "a stopped process on it or a debugger"
        } else {
            "what the application has queued behind a kernel that waits (set CUDA_DEVICE_MAX_CONNECTIONS=32), a kernel \
             that fills the GPU, or a stopped process on it,"
        };
        format!(
            "{} operations wait, submissions {} to {} of {} and bulk copies {} to {} are in flight, the copy kernel: \
             {kernel}; {why} may be why",
            self.queue.len(),
            self.small.done + 1,
            self.small.started,
            self.small.submissions.len(),
            self.bulk.done + 1,
            self.bulk.started
        )
    }
}
