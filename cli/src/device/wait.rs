//! Waits that end.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Fruitless looks between two looks at the clock.
const LOOKS: u32 = 256;
/// How long a wait that sleeps does so between two looks: nothing beside a stream of 50 ms and more, and much less than
/// a queue of usual depth takes to drain over a network.
const SLEEP: Duration = Duration::from_micros(200);

/// How a thread waits for memory that somebody else writes.
pub trait Waiting {
    /// Looks until `ready` holds. The error says `what` was waited for, and that it did not come.
    fn until(&self, what: &dyn Fn() -> String, ready: &mut dyn FnMut() -> bool) -> Result<(), String>;
}

/// Waits that end after a time, or when somebody says so.
#[derive(Clone, Copy)]
pub struct Deadline<'a> {
    limit: Duration,
    stop: Option<&'a AtomicBool>,
    yields: bool,
    sleeps: bool,
}

impl Deadline<'static> {
    /// Each wait may take this long.
    pub fn new(limit: Duration) -> Self {
        Self { limit, stop: None, yields: true, sleeps: false }
    }
}

impl<'a> Deadline<'a> {
    /// The same, keeping the core: for measurements where there are enough of them.
    pub fn spinning(self) -> Self {
        Self { yields: false, ..self }
    }

    /// The same, sleeping between looks: device code takes no core on a real machine.
    pub fn sleeping(self) -> Self {
        Self { sleeps: true, ..self }
    }

    /// The same, and no wait goes on once `stop` is true.
    pub fn unless(limit: Duration, stop: &'a AtomicBool) -> Self {
        Self { limit, stop: Some(stop), yields: true, sleeps: false }
    }
}

impl Waiting for Deadline<'_> {
    fn until(&self, what: &dyn Fn() -> String, ready: &mut dyn FnMut() -> bool) -> Result<(), String> {
        let start = Instant::now();
        let mut looks = 0_u32;
        while !ready() {
            looks = looks.wrapping_add(1);
            if self.sleeps {
                std::thread::sleep(SLEEP);
            } else if looks % LOOKS != 0 {
                std::hint::spin_loop();
                continue;
            }
            if self.stop.is_some_and(|stop| stop.load(Ordering::Relaxed)) {
                return Err(format!(
                    "told to stop after {:.1} s of waiting for {}",
                    start.elapsed().as_secs_f64(),
                    what()
                ));
            }
            if start.elapsed() > self.limit {
                return Err(format!("waited {:.1} s for {}", self.limit.as_secs_f64(), what()));
            }
            // There may be more threads than cores, and the consumer is one of them.
            if self.yields {
                std::thread::yield_now();
            }
        }
        Ok(())
    }
}
