//! Operations of one lane that somebody else finishes: the peer, which fetches, or this rank's own engine. What follows
//! them on the lane is locally complete when they are, not before.

use crate::fabric::soft::gpu::Use;
use crate::fabric::soft::lane::Lane;
use crate::rma::seq::Seq;
use std::collections::VecDeque;
use std::sync::Arc;

/// What an operation waits for.
pub enum Until {
    /// The peer says that it has fetched everything up to this pull.
    Pulled(Seq),
    /// The own engine has completed this operation of [`RemoteCompletions::fetches`].
    Fetched(Seq),
    /// Only those before it.
    Before,
}

struct Pending {
    seq: Seq,
    until: Until,
    _use: Option<Use>,
}

/// Those of a context that is gone. The windows that they use stay until this goes.
pub struct Dropped(Vec<Pending>);

impl Dropped {
    /// How many.
    pub fn len(&self) -> usize {
        self.0.len()
    }
}

/// Those of one lane, in their order.
#[derive(Default)]
pub struct RemoteCompletions {
    waiting: VecDeque<Pending>,
    /// Where the own engine completes what this lane gets. Few lanes have any of that.
    fetches: Option<Arc<Lane>>,
}

/// What became of the first one.
pub enum FirstPull {
    /// Its operation is locally complete.
    Done(Seq),
    /// It waits for the own engine.
    InEngine,
    /// It waits for the peer.
    AtPeer,
    /// There is none.
    None,
}

impl RemoteCompletions {
    /// Where the own engine completes what `lane` gets, whose operations these are. The peer's health is the lane's,
    /// too: once it has failed, what the engine has not started it gives up, because the peer's memory may be unmapped
    /// then.
    pub fn fetches_of(&mut self, lane: &Lane) -> &Arc<Lane> {
        let make = || Arc::new(Lane::new(Lane::INTERNAL, lane.peer, lane.health.clone()));
        self.fetches.get_or_insert_with(make)
    }

    /// The same, if there ever was any.
    pub fn fetches(&self) -> Option<&Arc<Lane>> {
        self.fetches.as_ref()
    }

    /// The same, if the own engine still works on it.
    pub fn unfinished_fetches(&self) -> Option<&Arc<Lane>> {
        self.fetches().filter(|fetches| !fetches.is_idle() && !fetches.has_failed())
    }

    /// Whether nothing is out.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether somebody has to look for the end of the first one: what the peer ends it tells of.
    pub fn wants_look(&self) -> bool {
        self.waiting.front().is_some_and(|out| !matches!(out.until, Until::Pulled(_)))
    }

    /// Adds one; `used` is the window that must stay meanwhile.
    pub fn push(&mut self, seq: Seq, until: Until, used: Option<Use>) {
        self.waiting.push_back(Pending { seq, until, _use: used });
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        self.waiting.clear();
    }

    /// The lane's context is gone: takes out all but what the peer still copies.
    pub fn abandon(&mut self) -> Dropped {
        let all = self.waiting.drain(..);
        let (kept, dropped) = all.partition::<Vec<_>, _>(|o| matches!(o.until, Until::Pulled(_)));
        self.waiting = kept.into();
        Dropped(dropped)
    }

    /// The peer copies nothing more for this lane: takes out what waited for that.
    pub fn take_pulls(&mut self) -> Dropped {
        let all = self.waiting.drain(..);
        let (dropped, kept) = all.partition::<Vec<_>, _>(|o| matches!(o.until, Until::Pulled(_)));
        self.waiting = kept.into();
        Dropped(dropped)
    }

    /// Takes the first one off if it is done; `pulled` is the last pull that the peer has done.
    pub fn next(&mut self, pulled: Seq) -> crate::error::Result<FirstPull> {
        let Some(first) = self.waiting.front() else { return Ok(FirstPull::None) };
        match first.until {
            Until::Pulled(number) if !number.is_done(pulled) => return Ok(FirstPull::AtPeer),
            Until::Fetched(seq) => match &self.fetches {
                Some(fetches) if fetches.test(seq)? => {}
                _ => return Ok(FirstPull::InEngine),
            },
            Until::Pulled(_) | Until::Before => {}
        }
        let seq = first.seq;
        self.waiting.pop_front();
        Ok(FirstPull::Done(seq))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_follows_waits_for_what_is_out() {
        let mut remote = RemoteCompletions::default();
        remote.push(Seq(1), Until::Pulled(Seq(10)), None);
        remote.push(Seq(2), Until::Before, None);
        let fetches = remote.fetches_of(&Lane::new(0, 1, Arc::default())).clone();
        let fetch = fetches.number();
        remote.push(Seq(3), Until::Fetched(fetch), None);
        remote.push(Seq(4), Until::Pulled(Seq(11)), None);
        assert!(matches!(remote.next(Seq(9)), Ok(FirstPull::AtPeer)));
        assert!(matches!(remote.next(Seq(12)), Ok(FirstPull::Done(Seq(1)))));
        assert!(matches!(remote.next(Seq(12)), Ok(FirstPull::Done(Seq(2)))));
        assert!(matches!(remote.next(Seq(12)), Ok(FirstPull::InEngine)));
        fetches.complete(fetch);
        assert!(matches!(remote.next(Seq(12)), Ok(FirstPull::Done(Seq(3)))));
        assert!(matches!(remote.next(Seq(12)), Ok(FirstPull::Done(Seq(4)))));
        assert!(matches!(remote.next(Seq(12)), Ok(FirstPull::None)));
    }

    #[test]
    fn a_failed_fetch_is_an_error() {
        let (mut remote, lane) = (RemoteCompletions::default(), Lane::new(0, 1, Arc::default()));
        let fetch = remote.fetches_of(&lane).number();
        remote.push(Seq(1), Until::Fetched(fetch), None);
        lane.health.fail(crate::error::Error::remote("broken"));
        assert!(remote.next(Seq(0)).is_err());
    }
}
