//! Entries of device code that does not ring: found by their arrival.
//!
//! Free flow is the quickest way to ring, and device code compiled with an NCCL older than 2.31.2 does not know it. It
//! runs with newer libraries all the same, asks for the same structures, and with that handler rings nothing. Its queue
//! shows it: entries come, and no word says so. What is known of such an entry is less than of one that was rung: that
//! all of it is here, but not that what its thread wrote before it is visible. So each waits for a while that is long
//! beside any store's way.

use super::early::WaitedFor;
use std::time::{Duration, Instant};

/// How long a first entry may stay without its word until the queue counts as one that nobody rings. Between the two
/// stores a thread that knows free flow has a fence, but the GPU may give its processors to another process there, for
/// some ms.
const SILENT: Duration = Duration::from_millis(20);
/// How long an entry that arrived is left alone: what its thread wrote before is visible by then. Stores of a GPU to
/// its own memory take less than 1 µs, and copies start 1 µs after their entry was read at the earliest.
const SETTLE: Duration = Duration::from_micros(10);

/// What a queue shows of how it is rung.
#[derive(Debug)]
enum Known {
    /// Nothing yet; since when an entry has been there without its word.
    Nothing(Option<Instant>),
    /// A word has been written: device code knows free flow.
    Rings,
    /// Device code does not ring. All entries before `until` have arrived, at `since` at the latest. `unsure`: an entry
    /// that may have arrived in part, and since when it has been as it is.
    Silent { until: u64, since: Instant, unsure: WaitedFor },
}

/// What a slot shows of its entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shown {
    /// It is not there, or a part of it is missing.
    No,
    /// A word of it is what words are before they are written, and may be meant so.
    Unsure,
    /// All of it is there.
    All,
}

/// Whether a queue is rung, and which entries count as rung where it is not.
#[derive(Debug)]
pub struct Arrival(Known);

impl Arrival {
    /// Of a queue that has shown nothing.
    pub fn new() -> Self {
        Self(Known::Nothing(None))
    }

    /// Whether nobody rings.
    #[inline(always)]
    pub fn is_silent(&self) -> bool {
        matches!(self.0, Known::Silent { .. })
    }

    /// Whether it has yet to show itself.
    #[inline(always)]
    pub fn is_open(&self) -> bool {
        matches!(self.0, Known::Nothing(_))
    }

    /// Whether a word has been written.
    pub fn has_rung(&self) -> bool {
        matches!(self.0, Known::Rings)
    }

    /// A word has been written, maybe of an entry that was found by its arrival: its thread had been held up before it
    /// rang.
    #[inline(always)]
    pub fn rings(&mut self) {
        if !matches!(self.0, Known::Rings) {
            self.0 = Known::Rings;
        }
    }

    /// All of the entry at the head of the queue, `index`, is there, and its word is not. Whether that shows that
    /// nobody rings: from now on [`Self::settled`] says which entries are there.
    #[cold]
    pub fn is_unrung(&mut self, index: u64) -> bool {
        let now = Instant::now();
        match &mut self.0 {
            Known::Nothing(Some(since)) if now.duration_since(*since) >= SILENT => {
                self.0 = Known::Silent { until: index, since: now, unsure: WaitedFor::default() };
                true
            }
            Known::Nothing(None) => {
                self.0 = Known::Nothing(Some(now));
                false
            }
            _ => false,
        }
    }

    /// One behind the newest entry that has been there long enough, where nobody rings; `producer` is what it was
    /// before. `shown` looks at an entry's slot.
    pub fn settled(&mut self, producer: u64, shown: impl Fn(u64) -> Shown) -> u64 {
        let Known::Silent { until, since, unsure } = &mut self.0 else { return producer };
        let now = Instant::now();
        let producer = match now.duration_since(*since) >= SETTLE {
            true => (*until).max(producer),
            false => producer,
        };
        if producer >= *until {
            let mut end = producer;
            while match shown(end) {
                Shown::All => true,
                Shown::Unsure => unsure.time(end, now).is_some_and(|time| time >= SILENT),
                Shown::No => false,
            } {
                end += 1;
            }
            (*until, *since) = (end, now);
        }
        producer
    }
}

/// Why an entry that has begun to arrive is not taken, for the log. `is_rung`: its word has been written.
#[cold]
pub fn why_absent(is_rung: bool, shown: Shown) -> &'static str {
    match (is_rung, shown) {
        (true, Shown::All) => "it has a fence, and waits for what is read before it",
        (true, _) => "its doorbell has been rung, and it has not arrived",
        (false, Shown::No) => "device code has written a part of it, and its other words are missing",
        // Of a queue that was never rung entries are found by their arrival.
        (false, _) => {
            "it stands in its slot and has not been rung, unlike others before it: its kernel was compiled with an \
             NCCL older than 2.31.2; set OXYGIN_GDAKI_RINGING=doorbell"
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_that_nobody_rings_count_when_they_have_settled() {
        let mut arrival = Arrival::new();
        assert!(!arrival.is_unrung(0) && !arrival.is_unrung(0), "it may still be on its way");
        std::thread::sleep(SILENT);
        assert!(arrival.is_unrung(0) && arrival.is_silent());
        let began = Instant::now();
        let before = |end: u64| move |index| if index < end { Shown::All } else { Shown::No };
        assert_eq!(arrival.settled(0, before(3)), 0, "three are there since now");
        let mut producer = 0;
        while producer == 0 {
            producer = arrival.settled(producer, before(3));
        }
        assert!(began.elapsed() >= SETTLE);
        assert_eq!((producer, arrival.settled(producer, before(3))), (3, 3));
    }

    #[test]
    fn an_entry_that_may_have_arrived_in_part_is_left_alone_for_longer() {
        let mut arrival = Arrival::new();
        assert!(!arrival.is_unrung(0));
        std::thread::sleep(SILENT);
        assert!(arrival.is_unrung(0));
        let began = Instant::now();
        let second_is = |second| move |index| [Shown::All, second, Shown::No][index as usize];
        let mut producer = 0;
        while producer < 2 {
            producer = arrival.settled(producer, second_is(Shown::Unsure));
            std::thread::sleep(SETTLE);
        }
        assert!(began.elapsed() >= SILENT);
    }

    #[test]
    fn a_queue_that_was_rung_once_is_rung() {
        let mut arrival = Arrival::new();
        assert!(!arrival.is_unrung(0));
        arrival.rings();
        std::thread::sleep(SILENT);
        assert!(!arrival.is_unrung(0) && !arrival.is_unrung(1) && !arrival.is_silent());
        assert_eq!(arrival.settled(7, |_| Shown::All), 7);
    }
}
