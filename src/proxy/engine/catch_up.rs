//! Waiting for what device code had rung at a moment. A kernel may end behind entries that it has not waited for, and a
//! device executes them all the same; what they name must not go before.

use super::{Common, Engine, Task, Works, FINISH_WITHIN, STANDS_AFTER, STILL_STANDS_AFTER};
use crate::proxy::drain::LaneMark;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long what is to finish is waited for.
pub(super) struct FinishTimer {
    since: Instant,
    moved: Instant,
}

impl FinishTimer {
    pub(super) fn new() -> Self {
        let now = Instant::now();
        Self { since: now, moved: now }
    }

    /// For how long nothing has moved, and for how long it was waited for, if that is too long. `stands`: something was
    /// given up before, and nothing has moved since.
    pub(super) fn is_over(&mut self, has_moved: bool, stands: bool) -> Option<(Duration, Duration)> {
        let now = Instant::now();
        if has_moved {
            self.moved = now;
        }
        let (still, all) = (now.duration_since(self.moved), now.duration_since(self.since));
        let patience = if stands { STILL_STANDS_AFTER } else { STANDS_AFTER };
        (all >= FINISH_WITHIN || still >= patience).then_some((still, all))
    }
}

/// Somebody waits for what device code had rung in the queues of a task.
pub(super) struct MarksWait {
    /// Whose answer it is a part of.
    ticket: u64,
    marks: Vec<LaneMark>,
    /// Entries left before these at the last look.
    entries: u64,
    timer: FinishTimer,
}

impl Engine {
    /// Waits until all is complete that device code has written and rung by now, in the queues of all threads: what
    /// comes meanwhile is not waited for. What does not come to its end is named in the log, and waited for no longer.
    pub fn catch_up(&self) {
        let begun = Instant::now();
        let asked: Vec<_> = self
            .workers
            .iter()
            .filter_map(|worker| {
                let ticket = self.next.fetch_add(1, Ordering::Relaxed);
                worker.common.ask(ticket).then_some((&worker.common, ticket))
            })
            .collect();
        asked.into_iter().for_each(|(common, ticket)| common.wait_for(ticket, begun, self.answer));
    }
}

impl Common {
    /// Asks the thread; whether there is anything to ask.
    fn ask(&self, ticket: u64) -> bool {
        let mut mailbox = self.mailbox.lock();
        if mailbox.has.is_empty() || mailbox.is_over {
            return false;
        }
        mailbox.asked.push(ticket);
        mailbox.unanswered.push(ticket);
        self.tell(mailbox);
        true
    }

    /// Waits for its answer, since `begun`.
    fn wait_for(&self, ticket: u64, begun: Instant, within: Duration) {
        let mut mailbox = self.mailbox.lock();
        while mailbox.unanswered.contains(&ticket) {
            // A thread that has kept others waiting for as long is not waited for again, until it takes something up.
            let within = if mailbox.is_late { STILL_STANDS_AFTER } else { within };
            let left = (begun + within).saturating_duration_since(Instant::now());
            if !left.is_zero() {
                mailbox = self.changed.wait_timeout(mailbox, left).0;
                continue;
            }
            mailbox.unanswered.retain(|&other| other != ticket);
            mailbox.is_late = true;
            drop(mailbox);
            log::warn!(
                "deregMrSym: {} has not said for {within:?} that what device code had rung is complete: it stands in a \
                 call of the driver; what names the window there fails",
                self.name
            );
            return;
        }
    }
}

impl Works<'_> {
    /// Notes for those who ask how far device code has come.
    pub(super) fn mark(&mut self, asked: Vec<u64>) {
        for &ticket in &asked {
            // A task that had a fault carries nothing out.
            for task in self.all.iter_mut().filter(|task| !task.has_failed) {
                let marks = task.attempt(self.common, |work| work.mark());
                if !marks.is_empty() {
                    task.waits.push(MarksWait { ticket, marks, entries: u64::MAX, timer: FinishTimer::new() });
                }
            }
        }
        self.asked.extend(asked);
    }

    /// Answers those for whom nothing is left, behind a pass.
    #[cold]
    pub(super) fn answer(&mut self) {
        let all = &self.all;
        let is_open = |&ticket: &u64| all.iter().any(|t| t.waits.iter().any(|waiting| waiting.ticket == ticket));
        let (open, through) = std::mem::take(&mut self.asked).into_iter().partition(is_open);
        self.asked = open;
        let through: Vec<u64> = through;
        if !through.is_empty() {
            self.common.mailbox.lock().unanswered.retain(|ticket| !through.contains(ticket));
            self.common.changed.notify_all();
        }
    }
}

impl Task {
    /// Ends those waits that are over, behind a pass.
    #[cold]
    pub(super) fn end_waits(&mut self, common: &Common, stands: &mut bool) {
        let mut waiting = std::mem::take(&mut self.waits);
        waiting.retain_mut(|one| !self.is_wait_over(common, one, stands));
        self.waits = waiting;
    }

    /// Whether nothing is left to wait for, or too little moves. `stands`: as for [`Task::is_through`].
    fn is_wait_over(&mut self, common: &Common, waiting: &mut MarksWait, stands: &mut bool) -> bool {
        let left = self.attempt(common, |work| work.left(&mut waiting.marks));
        if left.entries == 0 || self.has_failed {
            return true;
        }
        let has_moved = left.entries < waiting.entries;
        waiting.entries = left.entries;
        let over = waiting.timer.is_over(has_moved, *stands || left.stands);
        let Some((still, all)) = over else { return false };
        *stands = true;
        let named = self.attempt(common, |work| work.give_up(&waiting.marks));
        log::warn!(
            "deregMrSym: {} have not carried out {named}, which device code had rung: nothing of it has moved for \
             {still:.1?}, of {all:.1?}; what names the window fails; have kernels flush before they end",
            self.work.name()
        );
        true
    }
}

#[cfg(test)]
#[path = "catch_up_tests.rs"]
mod tests;
