//! When the stream hands over to the copy kernel, and what that one was given.

use super::kernel::CopyKernel;
use super::op::Owner;
use super::plan::{is_worth_a_launch, Facts, KernelState, LaunchSize, Suits};
use std::time::Instant;

/// So many operations in a row of the copy kernel's kind are worth letting submissions end for, so that it can take
/// over.
const STREAK: u32 = 16;

/// The copy kernel, and what speaks for it.
#[derive(Default)]
pub struct Handover {
    /// Where it could be loaded and is wanted. Kept by a pointer: it is taken out while it is given operations.
    pub kernel: Option<Box<CopyKernel>>,
    /// Operations in a row that the copy kernel could have moved and the stream did.
    streak: u32,
    /// When the last submission of such operations started.
    last_small: Option<Instant>,
    /// Operations that are back from the copy kernel, done or not.
    pub back: u64,
}

impl Handover {
    /// Whether the copy kernel has operations.
    pub fn is_busy(&self) -> bool {
        self.kernel.as_ref().is_some_and(|kernel| kernel.is_busy())
    }

    /// Whether no launch can touch what operations named.
    pub fn is_idle(&self) -> bool {
        self.kernel.as_ref().is_none_or(|kernel| kernel.is_idle())
    }

    /// The size of the present launch, whether it runs or is awaited.
    pub fn size(&self) -> LaunchSize {
        self.kernel.as_ref().map_or(LaunchSize::Warp, |kernel| kernel.size())
    }

    /// How many operations the copy kernel was ever given.
    pub fn given(&self) -> u64 {
        self.back + self.kernel.as_ref().map_or(0, |k| k.busy_with() as u64)
    }

    /// Whether the copy kernel has operations, or is about to take over once nothing is in flight. One that does not
    /// get its place on the GPU costs no more than that submissions come one at a time until it is late.
    pub fn has_turn(&self, in_flight: bool) -> bool {
        let Some(kernel) = &self.kernel else { return false };
        kernel.is_busy() || !kernel.is_off() && self.streak >= STREAK && in_flight
    }

    /// An operation goes by the stream; or goes on, which says nothing new.
    pub fn note(&mut self, facts: &Facts) {
        let Some(kernel) = self.kernel.as_mut().filter(|_| facts.done == 0 && !facts.is_reading) else { return };
        let suits = facts.suits_kernel();
        self.streak = if suits == Suits::No { 0 } else { self.streak.saturating_add(1) };
        if let Suits::With(size) = suits {
            // Too much for the copy kernel itself.
            kernel.wants(size);
        }
    }

    /// An operation of the copy kernel's kind went by other means.
    pub fn miss(&mut self) {
        self.streak = self.streak.saturating_add(1);
        self.call(1);
    }

    /// A submission of so many operations has started: launches the copy kernel if it could have moved them and they
    /// come close together.
    pub fn call(&mut self, operations: usize) {
        let Some(kernel) = self.kernel.as_mut().filter(|c| c.is_off() && self.streak > 0) else { return };
        let (now, before) = (Instant::now(), self.last_small);
        self.last_small = Some(now);
        if is_worth_a_launch(operations, before.map(|before| now - before)) {
            kernel.launch(now);
        }
    }

    /// Everything that was given to the copy kernel, for it to fail.
    pub fn take_all(&mut self) -> Vec<Owner> {
        let all: Vec<Owner> =
            self.kernel.as_mut().map(|c| c.give_up().map(|op| op.owner).collect()).unwrap_or_default();
        self.back += all.len() as u64;
        all
    }

    /// What a submission in the making can ask of the copy kernel.
    pub fn for_stream(&self) -> KernelState {
        if self.kernel.is_some() {
            KernelState::Callable
        } else {
            KernelState::Absent
        }
    }

    /// Has the copy kernel launched, unless it runs or is awaited. `false`: there is none now.
    pub fn call_now(&mut self) -> bool {
        let Some(kernel) = self.kernel.as_mut() else { return false };
        if kernel.is_off() {
            kernel.launch(Instant::now());
        }
        !kernel.is_off()
    }

    /// Calls for launches of this size. Whether an operation is left to one: it runs, or was launched, if need be
    /// now. A launch that is late is no more (`CopyKernel::is_off`), and after some of those there are none for a
    /// while (`Backoff`).
    pub fn call_size(&mut self, size: LaunchSize) -> bool {
        let Some(kernel) = self.kernel.as_mut() else { return false };
        kernel.wants(size);
        if kernel.is_off() {
            kernel.launch(Instant::now());
        }
        kernel.size() >= size
    }
}
