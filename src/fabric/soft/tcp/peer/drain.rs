//! A context goes: its operations towards a peer.

use super::*;
use crate::fabric::soft::lane::Lane;
use crate::sys::wait::Wait;

/// How long destroying a context waits for a thread that is sending, which waits for nobody.
const LEAVE_WITHIN: Duration = Duration::from_secs(10);

impl Tcp {
    /// The context of `lane` is gone, and with it the caller's promise that memory stays valid: what is unfinished is
    /// dropped. Nothing touches its memory afterwards, but for copies by the GPU that have not ended at `end`. No
    /// operation of this lane is being posted, or will be.
    pub fn drop_lane(&self, lane: &Arc<Lane>, end: Instant) {
        let Some(peer) = self.peer(lane.peer) else { return };
        let was_idle = lane.is_idle();
        if was_idle && lane.place() == Lane::NO_PLACE {
            return;
        }
        let sent_by = Instant::now() + LEAVE_WITHIN;
        let mut link = peer.link.lock();
        peer.inbox.lock().retain(|t| !Arc::ptr_eq(&t.lane, lane));
        let lent = link.drop_lane(lane);
        // Others have room now.
        self.settle(peer, &mut link);
        let wait = Wait::begin();
        while !link.were_back(&lent) {
            if Instant::now() > sent_by {
                // Behind that nobody sends what the send buffer holds.
                link.cut_off();
                let rank = peer.rank;
                let waited = LEAVE_WITHIN.as_secs();
                peer.fail(Error::internal(format!(
                    "a thread still sends to rank {rank} {waited} s after the context that it sends for"
                )));
                break;
            }
            self.release(peer, link);
            wait.rest();
            link = peer.link.lock();
        }
        link.has_left(lent);
        self.release(peer, link);
        if was_idle {
            return;
        }
        if self.gpu.pools().is_none() {
            return;
        }
        if !self.gpu.settle_copies(end) {
            log::warn!("copies of a context towards rank {} failed, or hang on the GPU, after its end", peer.rank);
        }
        // A connection that waited for a buffer does not need it any more.
        self.gpu.renew();
        self.advance_staged_of(peer);
    }

    /// Lets go of a link, and does what others left in the meantime.
    fn release(&self, peer: &Peer, link: MutexGuard<'_, Initiator>) {
        if self.let_go(peer, link) {
            self.nudge(peer);
        }
    }
}
