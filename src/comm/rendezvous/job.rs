//! What all steps of one communicator share, and how its ranks are named in sentences.

use super::wire::Failure;
use crate::comm::handle::Token;
use nccl_plugin_api::NcclResult;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::net::SocketAddr;
use std::time::Duration;

/// Numbers that the steps of a call have for themselves: more than any call has steps.
const STEPS_OF_CALL: u32 = 16;

/// The call that a step is of. Steps are numbered from 1 on.
pub fn call_of(step: u32) -> u32 {
    step.wrapping_sub(1) / STEPS_OF_CALL
}

/// The number in front of the next call's first step, where `last` was this call's last one. It is the same on every
/// rank, also where a call ended on some ranks a step earlier than on others.
pub fn in_front_of_next_call(last: u32) -> u32 {
    last.wrapping_add(STEPS_OF_CALL - 1) / STEPS_OF_CALL * STEPS_OF_CALL
}

/// The ranks of a communicator.
#[derive(Debug)]
pub struct Job {
    /// Where each rank listens, by rank; `None` where this rank was not told. Only rank 0's address is ever connected
    /// to; the others name hosts.
    pub addresses: Vec<Option<SocketAddr>>,
    /// Rank 0's token.
    pub token: Token,
    /// `OXYGIN_TIMEOUT`.
    pub timeout: Duration,
    /// `OXYGIN_PEER_TIMEOUT`: how long rank 0 may be silent to those who wait for it in a step, and a host that should
    /// answer.
    pub silence: Duration,
}

impl Job {
    /// How many ranks there are.
    pub fn nranks(&self) -> u32 {
        self.addresses.len() as u32
    }

    /// "rank 3 (10.0.0.7:4711)".
    pub fn rank(&self, rank: u32) -> String {
        match self.addresses.get(rank as usize) {
            Some(Some(address)) => format!("rank {rank} ({address})"),
            _ => format!("rank {rank}"),
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

    /// "rank 3 (10.0.0.7:4711) refused: size = 0", for the first few reasons; ranks with the same one together.
    pub fn failures(&self, failed: &BTreeMap<u32, Failure>) -> String {
        const SHOWN: usize = 3;
        let mut reasons: Vec<(&Failure, Vec<u32>)> = Vec::new();
        for (&rank, failure) in failed {
            match reasons.iter_mut().find(|(known, _)| *known == failure) {
                Some((_, ranks)) => ranks.push(rank),
                None => reasons.push((failure, vec![rank])),
            }
        }
        let shown = reasons.iter().take(SHOWN);
        let mut text: Vec<_> = shown.map(|(failure, ranks)| self.failure(failure, ranks)).collect();
        let rest: usize = reasons.iter().skip(SHOWN).map(|(_, ranks)| ranks.len()).sum();
        if rest > 0 {
            text.push(format!("and {rest} ranks more"));
        }
        text.join("; ")
    }

    fn failure(&self, failure: &Failure, ranks: &[u32]) -> String {
        let what = match NcclResult(failure.code) {
            NcclResult::INVALID_ARGUMENT | NcclResult::INVALID_USAGE => "refused",
            _ => "failed",
        };
        match ranks.len() == self.addresses.len() && ranks.len() > 1 {
            true => format!("every rank {what}: {}", failure.sentence),
            false => format!("{} {what}: {}", self.ranks(ranks), failure.sentence),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(nranks: u8) -> Job {
        Job {
            addresses: (0..nranks).map(|i| Some(SocketAddr::from(([10, 0, 0, i], 7)))).collect(),
            token: Token::from_bytes([0; 16]),
            timeout: Duration::from_millis(1500),
            silence: Duration::from_secs(30),
        }
    }

    #[test]
    fn names() {
        let mut job = job(40);
        assert_eq!(job.ranks(&[3]), "rank 3 (10.0.0.3:7)");
        assert_eq!(job.ranks(&[3, 4]), "rank 3 (10.0.0.3:7), rank 4 (10.0.0.4:7)");
        assert_eq!(job.ranks(&[1, 2, 3, 5, 7, 8, 10, 11, 12, 39]), "10 ranks: 1-3, 5, 7-8, 10-12, 39");
        assert!(job.did_not_come("connect", &[99]).starts_with("connect: rank 99 did not come within 1.5 s"));
        job.addresses[3] = None;
        assert_eq!(job.ranks(&[3, 4]), "rank 3, rank 4 (10.0.0.4:7)");
    }

    #[test]
    fn reasons() {
        let failed = |reasons: &[(u32, NcclResult, &str)]| {
            let failure =
                |&(rank, code, why): &(u32, NcclResult, &str)| (rank, Failure { code: code.0, sentence: why.into() });
            job(6).failures(&reasons.iter().map(failure).collect())
        };
        use NcclResult as R;
        assert_eq!(failed(&[(2, R::SYSTEM_ERROR, "no memory")]), "rank 2 (10.0.0.2:7) failed: no memory");
        assert_eq!(
            failed(&[
                (1, R::INVALID_ARGUMENT, "size = 0"),
                (2, R::UNHANDLED_CUDA_ERROR, "x"),
                (4, R::INVALID_ARGUMENT, "size = 0")
            ]),
            "rank 1 (10.0.0.1:7), rank 4 (10.0.0.4:7) refused: size = 0; rank 2 (10.0.0.2:7) failed: x"
        );
        let all: Vec<_> = (0..6).map(|rank| (rank, R::INVALID_USAGE, "not built")).collect();
        assert_eq!(failed(&all), "every rank refused: not built");
        let each = ["a", "b", "c", "d", "e"];
        let each: Vec<_> = (0..5).map(|rank| (rank, R::INTERNAL_ERROR, each[rank as usize])).collect();
        assert!(failed(&each).ends_with("rank 2 (10.0.0.2:7) failed: c; and 2 ranks more"), "{}", failed(&each));
    }
}
