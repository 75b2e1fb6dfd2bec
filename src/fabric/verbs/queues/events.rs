//! Asynchronous events that are about this context.

use super::super::events::Trouble;
use super::super::outcome::Outcomes;
use super::Queues;
use crate::error::Kind;

/// Polls that find nothing between two looks for events: what a look costs is nothing beside them.
pub(super) const LOOK_EVERY: u32 = 4096;

impl Queues {
    /// Looks for events, and ends the lanes that they are about.
    #[cold]
    #[inline(never)]
    pub fn look(&mut self, outcomes: &Outcomes) {
        self.empty = 0;
        self.events.take();
        while let Some(trouble) = self.events.get(self.seen) {
            self.seen += 1;
            let sentence = match trouble {
                Trouble::Device => "the device failed or was taken away; look for it in the kernel log",
                Trouble::Queue(_) => "the completion queue failed; look for the device in the kernel log",
                Trouble::Pair(_) => "the queue pair failed; look for the device in the kernel log",
            };
            for peer in 0..self.lanes.len() as u32 {
                let concerns = match trouble {
                    Trouble::Device => true,
                    Trouble::Queue(at) => at == self.device.cq as usize,
                    Trouble::Pair(at) => self.lanes.get(peer as usize).is_some_and(|lane| lane.qp as usize == at),
                };
                if !concerns {
                    continue;
                }
                if self.device.closes && matches!(trouble, Trouble::Pair(_)) && self.is_idle(peer, outcomes) {
                    // The peer closed its end, as far as anybody can tell.
                    self.close(peer, outcomes);
                } else {
                    self.fail(peer, outcomes, Kind::DeviceFailed, || sentence.to_owned());
                }
            }
        }
    }
}
