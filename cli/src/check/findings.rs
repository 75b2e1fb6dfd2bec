//! Why a case failed, from what its ranks say: who found something wrong comes first, whenever it says so; who only
//! stopped because of that comes after, with what it was waiting for.

use std::time::Duration;

/// What a wait returns when another rank failed first.
const STOPPED: &str = "stopped, because another rank failed";
/// So many ranks that only stopped are quoted.
const QUOTED: usize = 3;

/// What a wait returns when another rank failed first, `waited` after it had begun to wait for `what`.
pub fn stopped(waited: Duration, what: impl std::fmt::Display) -> String {
    format!("{STOPPED}, after {:.1} s of waiting for {what}", waited.as_secs_f64())
}

/// Whether a failure is only the echo of another rank's, whatever the case wrote around it.
pub fn is_echo(why: &str) -> bool {
    why.contains(STOPPED)
}

/// What the ranks of a case said.
#[derive(Debug, Default)]
pub struct Findings {
    own: Vec<String>,
    echoes: Vec<(usize, String)>,
}

impl Findings {
    /// A rank found something wrong, or ended in a way that is wrong in itself.
    pub fn add(&mut self, why: String) {
        self.own.push(why);
    }

    /// A rank stopped because of others.
    pub fn add_echo(&mut self, rank: usize, why: String) {
        self.echoes.push((rank, why));
    }

    /// All of it in one line; `None`: nobody said anything.
    pub fn in_words(mut self) -> Option<String> {
        self.echoes.sort();
        let left_out = self.echoes.len().saturating_sub(QUOTED);
        let mut words = self.own;
        words.extend(self.echoes.into_iter().take(QUOTED).map(|(rank, why)| format!("rank {rank}: {why}")));
        if left_out > 0 {
            words.push(format!("{left_out} more ranks stopped"));
        }
        (!words.is_empty()).then(|| words.join("; "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_found_something_comes_first_however_late() {
        let wait = || stopped(Duration::from_millis(3900), "2 signals while calling nothing");
        let mut findings = Findings::default();
        for rank in [4, 2, 3, 0] {
            findings.add_echo(rank, format!("in round 3: {}; that rank is calling nothing", wait()));
        }
        findings.add("rank 1: waited 4 s for an operation".into());
        let words = findings.in_words().expect("findings");
        assert!(words.starts_with("rank 1: waited 4 s for an operation; rank 0: in round 3: stopped"), "{words}");
        assert!(words.contains("3.9 s of waiting for 2 signals while calling nothing"), "{words}");
        assert!(words.ends_with("; 1 more ranks stopped") && !words.contains("rank 4"), "{words}");
        assert!(is_echo(&format!("0x1 + 0x2: {}", wait())) && !is_echo("waited 4 s for the signal at 0"));
        assert_eq!(Findings::default().in_words(), None);
    }

    #[test]
    fn without_a_finding_of_its_own_it_says_where_everybody_was() {
        let mut findings = Findings::default();
        findings.add_echo(1, stopped(Duration::from_secs(1), "rank 0 to reach the same step"));
        let words = findings.in_words().expect("findings");
        assert_eq!(words, format!("rank 1: {STOPPED}, after 1.0 s of waiting for rank 0 to reach the same step"));
    }
}
