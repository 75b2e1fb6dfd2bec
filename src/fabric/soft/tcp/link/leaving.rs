//! A context goes, and with it its caller's promise that memory stays valid: its operations are dropped.

use super::*;
use crate::fabric::soft::lane::Lane;

/// Outlets that were lent when a context went, and the turns that they were in.
pub struct Lent(Vec<(usize, u64)>);

impl Link {
    /// Drops the operations of a lane, whose number no other will have. Frames begun are finished from copies, and answers
    /// thrown away. What is left to wait for: the outlets that are lent, and copies by the GPU.
    pub fn drop_lane(&mut self, lane: &Arc<Lane>) -> Lent {
        let at = lane.context as usize;
        if self.lanes.get(at).is_some_and(|q| q.as_ref().is_some_and(|q| Arc::ptr_eq(&q.lane, lane))) {
            self.lanes[at] = None;
            self.ring.retain(|&l| l as usize != at);
            for stripe in 0..self.conns.len() {
                self.conns[stripe].disown(lane.context);
                self.disown_sent(stripe);
            }
        }
        Lent(self.turns.iter().copied().enumerate().filter(|(_, n)| n % 2 == 1).collect())
    }

    /// Whether those have been back since.
    pub fn were_back(&self, lent: &Lent) -> bool {
        lent.0.iter().all(|&(stripe, n)| self.turns[stripe] != n)
    }

    /// Copies what dropped operations lend on a connection, once its outlet is here.
    pub(super) fn disown_sent(&mut self, stripe: usize) {
        let (conn, lanes) = (&mut self.conns[stripe], &self.lanes);
        if conn.disowned && !conn.lent {
            conn.disowned = false;
            let is_gone = |o: Owner| o != Owner::NOBODY && lanes[o.lane as usize].is_none();
            // SAFETY: who drops a lane has its caller wait until the outlet is back, or cuts the connection off.
            unsafe { conn.outlet.take_over_from(is_gone) };
        }
    }
}

impl Conn {
    fn disown(&mut self, lane: u32) {
        self.disowned = true;
        self.asked.iter_mut().filter(|a| a.owner.lane == lane).for_each(Asked::disown);
        self.storing.retain(|(_, owner)| owner.lane != lane);
        // Their headers are not out. A signal behind them will not ring.
        self.line.retain(|c| c.owner.lane != lane);
        self.line_bytes = self.line.iter().map(|c| c.place.len as usize).sum();
    }
}

#[cfg(test)]
mod tests {
    use super::super::answers::tests::{link, post, LEN};
    use super::*;
    use crate::fabric::soft::lane::Health;
    use std::io::{Read, Write};

    fn lane(context: u32) -> Arc<Lane> {
        Arc::new(Lane::new(context, 1, Arc::new(Health::default())))
    }

    fn put(from: &[u8]) -> Work {
        let (local, len) = (from.as_ptr() as u64, from.len() as u64);
        Work::Put(Put { local, lkey: 0, rkey: 1, remote: 0, len, signal: None, more: false })
    }

    #[test]
    fn what_a_thread_was_sending_is_copied_when_it_is_back() {
        let (mut link, mut peer) = link();
        let [gone, stays] = [0, 1].map(lane);
        let (mut mine, theirs) = (vec![7u8; 3 * CHUNK], vec![9u8; CHUNK]);
        post(&mut link, &gone, put(&mine));
        let mut loan = link.lend(STRIPES).expect("a chunk to send");
        // SAFETY: the sources are alive. The peer reads nothing, so that not all of it goes.
        unsafe { loan.send() };
        let seq = post(&mut link, &stays, put(&theirs));
        let lent = link.drop_lane(&gone);
        assert!(!link.were_back(&lent));
        link.take_back(loan).unwrap();
        assert!(link.were_back(&lent), "it may be lent again at once");
        mine.fill(8);
        let (mut got, mut buf) = (Vec::new(), vec![0; 1 << 20]);
        let whole = HEADER + CHUNK;
        peer[STRIPES].set_nonblocking(true).unwrap();
        for _ in 0..10_000 {
            link.conns[STRIPES].blocked = false;
            link.pump().unwrap();
            if let Some(mut loan) = link.lend(STRIPES) {
                // SAFETY: the sources are alive.
                unsafe { loan.send() };
                link.take_back(loan).unwrap();
            }
            if let Ok(n) = peer[STRIPES].read(&mut buf) {
                got.extend_from_slice(&buf[..n]);
            }
        }
        assert!(lane_is_done(&stays, seq) && !link.is_busy());
        assert_eq!(got.len(), 2 * whole, "the frame that had begun, and the other context's");
        assert!(got[HEADER..whole].iter().all(|&b| b == 7) && got[whole + HEADER..].iter().all(|&b| b == 9));
    }

    fn lane_is_done(lane: &Lane, seq: crate::rma::seq::Seq) -> bool {
        lane.test(seq).unwrap()
    }

    #[test]
    fn answers_for_a_context_that_is_gone_are_nobodys() {
        let (mut link, mut peer) = link();
        let [gone, stays] = [0, 1].map(lane);
        let to = [[0u8; LEN]; 3];
        let get = |i: usize| {
            Work::Get(Get { local: to[i].as_ptr() as u64, lkey: 0, rkey: 1, remote: 0, len: LEN as u64, more: false })
        };
        let lost = [post(&mut link, &gone, get(0)), post(&mut link, &gone, get(1))];
        let seq = post(&mut link, &stays, get(2));
        let data = [&Frame::Data { len: LEN as u32 }.emit()[..], &[9; LEN]].concat();
        // The first is being answered.
        let (front, rest) = data.split_at(HEADER + 8);
        peer[EXPRESS].write_all(front).unwrap();
        link.receive(EXPRESS).unwrap();
        link.drop_lane(&gone);
        peer[EXPRESS].write_all(&[rest, &data, &data].concat()).unwrap();
        link.receive(EXPRESS).unwrap();
        assert!(lane_is_done(&stays, seq) && lost.iter().all(|&s| !lane_is_done(&gone, s)) && !link.is_busy());
        // SAFETY: alive; read as the link writes it.
        let found = to.map(|t| t.iter().filter(|b| unsafe { std::ptr::read_volatile(*b) } == 9).count());
        assert_eq!(found, [8, 0, LEN]);
    }
}
