//! The ways to rank 0. There is one, but for a link-local address: that is reached through one of this host's
//! interfaces, and nothing says beforehand which of them is on rank 0's network.

use super::visit::Broken;
use std::net::SocketAddr;

/// Ways to rank 0, tried in turn until it has answered over one.
#[derive(Debug)]
pub struct Routes {
    /// Each, and what came of the last attempt over it. At least one.
    all: Vec<(SocketAddr, Option<Broken>)>,
    at: usize,
}

impl Routes {
    /// The first is tried first.
    pub fn new(first: SocketAddr, others: impl IntoIterator<Item = SocketAddr>) -> Self {
        let mut all = vec![(first, None)];
        for other in others {
            if all.iter().all(|(known, _)| *known != other) {
                all.push((other, None));
            }
        }
        Self { all, at: 0 }
    }

    /// The one to take now.
    pub fn current(&self) -> SocketAddr {
        self.all[self.at].0
    }

    /// An attempt over the current one came to nothing, and the next one's turn it is. Returns what this says of rank
    /// 0: a refusal, and that no network leads there, count only if it is so on every way.
    pub fn failed(&mut self, how: Broken) -> Broken {
        self.all[self.at].1 = Some(how);
        self.at = (self.at + 1) % self.all.len();
        let every = |these: &[Broken]| self.all.iter().all(|(_, last)| last.is_some_and(|last| these.contains(&last)));
        match how {
            Broken::Refused | Broken::Unreachable if every(&[Broken::Refused]) => Broken::Refused,
            Broken::Refused | Broken::Unreachable if every(&[Broken::Refused, Broken::Unreachable]) => {
                Broken::Unreachable
            }
            Broken::Refused | Broken::Unreachable => Broken::Otherwise,
            Broken::Silent | Broken::Otherwise => how,
        }
    }

    /// Rank 0 answered over the current one: it is the only one from here on.
    pub fn worked(&mut self) {
        self.all = vec![self.all[self.at]];
        self.at = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::Broken::{Otherwise, Refused, Silent, Unreachable};
    use super::*;

    fn routes(n: u16) -> Routes {
        let mut all = (1..=n).map(|port| SocketAddr::from(([10, 0, 0, 1], port)));
        Routes::new(all.next().unwrap(), all)
    }

    #[test]
    fn one_way_is_taken_at_its_word() {
        let mut one = routes(1);
        for how in [Refused, Unreachable, Silent, Otherwise] {
            assert_eq!(one.failed(how), how);
            assert_eq!(one.current().port(), 1);
        }
    }

    #[test]
    fn several_are_tried_in_turn_and_only_their_common_word_counts() {
        let mut three = routes(3);
        let tried: Vec<_> = [Unreachable, Refused, Otherwise, Refused, Refused, Refused, Unreachable]
            .into_iter()
            .map(|how| (three.current().port(), three.failed(how)))
            .collect();
        let said = [Otherwise, Otherwise, Otherwise, Otherwise, Otherwise, Refused, Unreachable];
        assert_eq!(tried, [1, 2, 3, 1, 2, 3, 1].into_iter().zip(said).collect::<Vec<_>>());
        three.worked();
        assert_eq!((three.current().port(), three.failed(Refused), three.current().port()), (2, Refused, 2));
    }

    #[test]
    fn none_is_tried_twice_in_a_turn() {
        let a = routes(1).current();
        assert_eq!(Routes::new(a, [a, a]).all.len(), 1);
    }
}
