//! Samples of a latency, and rates of a stream, as perftest reports them.

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

/// Durations of one kind. Percentiles come from a histogram of three significant digits, the rest is exact.
pub struct Samples {
    histogram: Histogram<u64>,
    min: u64,
    max: u64,
    sum: f64,
    sum_of_squares: f64,
}

/// One minute: longer samples count as that.
const LONGEST_NS: u64 = 60_000_000_000;

impl Default for Samples {
    fn default() -> Self {
        let histogram = Histogram::new_with_bounds(1, LONGEST_NS, 3).expect("constant bounds, right order");
        Self { histogram, min: u64::MAX, max: 0, sum: 0.0, sum_of_squares: 0.0 }
    }
}

impl Samples {
    /// Takes one sample, nanoseconds.
    #[inline]
    pub fn record(&mut self, ns: u64) {
        self.histogram.saturating_record(ns);
        self.min = self.min.min(ns);
        self.max = self.max.max(ns);
        self.sum += ns as f64;
        self.sum_of_squares += (ns as f64) * (ns as f64);
    }

    /// In microseconds, each sample divided by `divisor` (2: half a round trip).
    pub fn summary(&self, divisor: f64) -> Latency {
        let n = self.histogram.len();
        if n == 0 {
            return Latency::default();
        }
        let us = |ns: f64| ns / 1e3 / divisor;
        let mean = self.sum / n as f64;
        let variance = (self.sum_of_squares / n as f64 - mean * mean).max(0.0);
        let percentile =
            |q: f64| us((self.histogram.value_at_quantile(q) as f64).clamp(self.min as f64, self.max as f64));
        Latency {
            iterations: n,
            min: us(self.min as f64),
            max: us(self.max as f64),
            typical: percentile(0.5),
            avg: us(mean),
            stdev: us(variance.sqrt()),
            p99: percentile(0.99),
            p999: percentile(0.999),
        }
    }
}

/// perftest's latency columns, microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    /// Samples.
    pub iterations: u64,
    /// Shortest.
    pub min: f64,
    /// Longest.
    pub max: f64,
    /// Median.
    pub typical: f64,
    /// Mean.
    pub avg: f64,
    /// Standard deviation.
    pub stdev: f64,
    /// 99th percentile.
    pub p99: f64,
    /// 99.9th percentile.
    pub p999: f64,
}

/// One round of one rank's streams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Round {
    /// Operations, to all peers together.
    pub operations: u64,
    /// Seconds from the first call to the last receiver's answer.
    pub seconds: f64,
}

impl Round {
    /// Ranks at work at the same time: all their operations over the longest of their times.
    fn together(ranks: impl Iterator<Item = Self>) -> Self {
        ranks.fold(Self::default(), |sum, r| Self {
            operations: sum.operations + r.operations,
            seconds: sum.seconds.max(r.seconds),
        })
    }

    fn rate(&self) -> f64 {
        if self.seconds > 0.0 {
            self.operations as f64 / self.seconds
        } else {
            0.0
        }
    }
}

/// perftest's bandwidth columns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Bandwidth {
    /// Operations of one sender.
    pub iterations: u64,
    /// MiB/s.
    pub peak: f64,
    /// MiB/s.
    pub average: f64,
    /// Million operations a second.
    pub mpps: f64,
    /// MiB/s of the median round: what comparisons use, because one round in which the machine was busy with
    /// something else does not move it.
    pub median: f64,
    /// Million operations a second of the median round.
    pub median_mpps: f64,
}

impl Bandwidth {
    /// From the rounds of each rank, messages of `size` bytes, `iterations` of one sender to one peer.
    pub fn of(size: usize, iterations: u64, ranks: &[Vec<Round>]) -> Self {
        let count = ranks.iter().map(Vec::len).max().unwrap_or(0);
        let rounds: Vec<_> =
            (0..count).map(|i| Round::together(ranks.iter().filter_map(|rank| rank.get(i).copied()))).collect();
        let all = Round {
            operations: rounds.iter().map(|r| r.operations).sum(),
            seconds: rounds.iter().map(|r| r.seconds).sum(),
        };
        let mib = |rate: f64| rate * size as f64 / (1u64 << 20) as f64;
        let mut rates: Vec<f64> = rounds.iter().map(Round::rate).collect();
        rates.sort_by(f64::total_cmp);
        let peak = rates.last().copied().unwrap_or(0.0);
        let median = rates.get(rates.len() / 2).copied().unwrap_or(0.0);
        Self {
            iterations,
            peak: mib(peak),
            average: mib(all.rate()),
            mpps: all.rate() / 1e6,
            median: mib(median),
            median_mpps: median / 1e6,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_of_known_samples() {
        let mut samples = Samples::default();
        (1..=1000).for_each(|us| samples.record(us * 1000));
        let s = samples.summary(2.0);
        assert_eq!((s.iterations, s.min, s.max), (1000, 0.5, 500.0));
        assert!((s.avg - 250.25).abs() < 1e-9);
        assert!((s.stdev - 144.337).abs() < 0.01, "{}", s.stdev);
        for (got, expected) in [(s.typical, 250.0), (s.p99, 495.0), (s.p999, 499.5)] {
            assert!((got - expected).abs() / expected < 0.002, "{got} for {expected}");
        }
    }

    #[test]
    fn senders_add_up_and_the_best_round_is_the_peak() {
        let round = |operations, seconds| Round { operations, seconds };
        let ranks = [
            vec![round(1000, 1.0), round(1000, 0.5), round(1000, 1.0)],
            vec![round(1000, 2.0), round(1000, 0.5), round(1000, 1.0)],
            vec![],
        ];
        let both = Bandwidth::of(1 << 20, 3000, &ranks);
        let Bandwidth { average, peak, median, mpps, .. } = both;
        assert_eq!((both.iterations, peak, median), (3000, 4000.0, 2000.0));
        assert!((average - 6000.0 / 3.5).abs() < 1e-9 && (mpps - 0.006 / 3.5).abs() < 1e-12);
    }
}
