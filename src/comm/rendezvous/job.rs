//! What all steps of one communicator share, and how its ranks are named in sentences.

use crate::comm::handle::Token;
use std::fmt::Write;
use std::net::SocketAddr;
use std::time::Duration;

/// The ranks of a communicator.
#[derive(Debug)]
pub struct Job {
    /// Where each rank listens, by rank. Only rank 0's address is ever connected to; the others name hosts.
    pub addresses: Vec<SocketAddr>,
    /// Rank 0's token.
    pub token: Token,
    /// `OXYGIN_TIMEOUT`.
    pub timeout: Duration,
}

impl Job {
    /// How many ranks there are.
    pub fn nranks(&self) -> u32 {
        self.addresses.len() as u32
    }

    /// "rank 3 (10.0.0.7:4711)".
    pub fn rank(&self, rank: u32) -> String {
        match self.addresses.get(rank as usize) {
            Some(address) => format!("rank {rank} ({address})"),
            None => format!("rank {rank}"),
        }
    }

    /// A few ranks with their addresses, many as ranges. `ranks` ascend.
    pub fn ranks(&self, ranks: &[u32]) -> String {
        const WITH_ADDRESSES: usize = 8;
        match ranks {
            [] => "no rank".into(),
            [one] => self.rank(*one),
            few if few.len() <= WITH_ADDRESSES => few.iter().map(|&r| self.rank(r)).collect::<Vec<_>>().join(", "),
            many => {
                let mut text = format!("{} ranks:", many.len());
                let mut i = 0;
                while i < many.len() {
                    let first = i;
                    while i + 1 < many.len() && many[i + 1] == many[i] + 1 {
                        i += 1;
                    }
                    let comma = if first == 0 { "" } else { "," };
                    let _ = if i == first {
                        write!(text, "{comma} {}", many[i])
                    } else {
                        write!(text, "{comma} {}-{}", many[first], many[i])
                    };
                    i += 1;
                }
                text
            }
        }
    }

    /// The sentence for ranks that were waited for in vain.
    pub fn did_not_come(&self, step: &str, ranks: &[u32]) -> String {
        format!(
            "{step}: {} did not come within {} s; see what keeps them, or set OXYGIN_TIMEOUT (seconds) higher",
            self.ranks(ranks),
            self.timeout.as_secs_f64()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        let job = Job {
            addresses: (0..40).map(|i| SocketAddr::from(([10, 0, 0, i], 7))).collect(),
            token: Token::from_bytes([0; 16]),
            timeout: Duration::from_millis(1500),
        };
        assert_eq!(job.ranks(&[3]), "rank 3 (10.0.0.3:7)");
        assert_eq!(job.ranks(&[3, 4]), "rank 3 (10.0.0.3:7), rank 4 (10.0.0.4:7)");
        assert_eq!(job.ranks(&[1, 2, 3, 5, 7, 8, 10, 11, 12, 39]), "10 ranks: 1-3, 5, 7-8, 10-12, 39");
        assert!(job.did_not_come("connect", &[99]).starts_with("connect: rank 99 did not come within 1.5 s"));
    }
}
