//! One collective call of a rank: whatever goes wrong on one rank fails it on all.

use super::drive::Standing;
use super::exchange::{Contribution, Exchange, Gathered, Progress};
use super::job::in_front_of_next_call;
use crate::error::{Error, Result};
use crate::telemetry::panic;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::MutexGuard;

/// A call from its first step to its last. No other call of this rank on the communicator comes between.
pub struct Call<'a> {
    exchange: &'a Exchange,
    progress: MutexGuard<'a, Progress>,
    /// What the steps so far left open for the next one.
    standing: Standing,
    name: &'a str,
    /// No rank waits for this one any more: the last step is over, or one has failed on all ranks.
    over: bool,
}

impl Exchange {
    /// Runs one collective call, called `name` in errors, at most 64 bytes and the same on every rank. `work` takes its
    /// steps, as many on every rank; each returns within `OXYGIN_TIMEOUT` and a few seconds.
    ///
    /// An error that `work` returns is told to the others in the step in which they wait for this rank, be it the
    /// refusal of an argument before the first step or a failure between two; and so is a panic. The call then fails on
    /// every rank, with a sentence that names the rank and repeats its own, and all ranks are in step for the next.
    pub fn call<T>(&self, name: &str, work: impl FnOnce(&mut Call<'_>) -> Result<T>) -> Result<T> {
        let (mut progress, standing) = (self.progress.lock(), Standing::default());
        progress.step = in_front_of_next_call(progress.step);
        let mut call = Call { exchange: self, progress, standing, name, over: false };
        let error = match catch_unwind(AssertUnwindSafe(|| work(&mut call))) {
            Ok(Ok(value)) => return Ok(value),
            Ok(Err(error)) => error,
            Err(panic) => Error::internal(format!("a fault inside oxygin: {}; please report it", panic::text(&*panic))),
        };
        match call.over {
            true => Err(error),
            false => Err(call.refuse(error)),
        }
    }
}

impl Call<'_> {
    /// One step: every rank brings something and gets what all brought.
    pub fn step(&mut self, mine: Contribution) -> Result<Gathered> {
        // Before: a panic in there leaves the step counted.
        self.over = true;
        let gathered = self.exchange.take_step(&mut self.progress, &mut self.standing, self.name, Ok(mine))?;
        self.over = false;
        Ok(gathered)
    }

    /// No step follows: what fails from here on is this rank's own affair.
    pub fn end(&mut self) {
        self.over = true;
        self.standing = Standing::default();
    }

    /// Takes the step in which the others wait, with an error instead of a contribution.
    fn refuse(&mut self, error: Error) -> Error {
        // The logger is foreign code, and the others wait.
        let _ = catch_unwind(AssertUnwindSafe(|| log::info!("{}: {error}; telling the other ranks", self.name)));
        match self.exchange.take_step(&mut self.progress, &mut self.standing, self.name, Err(&error)) {
            Err(told) => told,
            Ok(_) => error,
        }
    }
}
