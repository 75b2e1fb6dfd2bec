//! A context goes, and with it its caller's promise that memory stays valid: its operations are dropped.

use super::*;
use crate::fabric::soft::lane::Lane;

/// What a context leaves behind: send buffers that were lent when it went, with the turns that they were in, and its
/// place, which they name.
pub struct Lent {
    turns: Vec<(usize, u64)>,
    place: Option<u32>,
}

impl Initiator {
    /// Drops the operations of a lane. Frames begun are finished from copies, and answers
    /// thrown away. What is left to wait for: the send buffers that are lent, and copies by the GPU.
    pub fn drop_lane(&mut self, lane: &Arc<Lane>) -> Lent {
        let left = self.vacate(lane);
        if let Some((at, queue)) = &left {
            self.ring.retain(|l| l != at);
            self.fetching.retain(|f| f.owner.lane != *at);
            for stripe in 0..self.conns.len() {
                self.conns[stripe].disown(*at);
                self.disown_sent(stripe);
            }
            self.end_context(queue);
        }
        let turns = self.turns.iter().copied().enumerate().filter(|(_, n)| n % 2 == 1).collect();
        Lent { turns, place: left.map(|(at, _)| at) }
    }

    /// Nothing of it is under way any more: all were back, or the connections are over.
    pub fn has_left(&mut self, lent: Lent) {
        self.reuse_of(&lent);
    }

    pub(super) fn reuse_of(&mut self, lent: &Lent) {
        lent.place.into_iter().for_each(|at| self.reuse(at));
    }

    /// The target keeps the counts of a lane that had chunks: tells it on every connection where one may have been
    /// sent, and on that of the signals, that nothing more will come.
    fn end_context(&mut self, queue: &TaskQueue) {
        if !queue.bulk || self.phase != Phase::Up {
            return;
        }
        let used = |stripe: &usize| *stripe == EXPRESS || queue.counts[*stripe] != 0;
        let conns = (0..self.conns.len()).filter(used).fold(0, |all, stripe| all | 1 << stripe);
        for (_, conn) in self.conns.iter_mut().enumerate().filter(|(stripe, _)| conns & 1 << stripe != 0) {
            conn.over_here.push_back((queue.lane.context, conns));
        }
        self.ends_due = true;
    }

    /// Sends what is to be said of contexts that are over: behind what is on its way, or at once, so that a link with
    /// nothing else to send is not busy.
    pub(super) fn send_ends(&mut self) {
        self.ends_due = false;
        for conn in &mut self.conns {
            while let Some(&(context, conns)) = conn.over_here.front() {
                let end = Frame::End { context, conns }.emit();
                let unsent = match &conn.fd {
                    Some(_) if !conn.lent && !conn.send_buffer.is_empty() => Some(&end[..]),
                    // The end of the connection shows elsewhere.
                    Some(fd) if !conn.lent => sock::send_some(fd, &end).unwrap_or(None),
                    _ => None,
                };
                let Some(unsent) = unsent else {
                    self.ends_due = true;
                    break;
                };
                conn.over_here.pop_front();
                if !unsent.is_empty() {
                    conn.send_buffer.copy(unsent);
                }
            }
        }
    }

    /// Whether those have been back since.
    pub fn were_back(&self, lent: &Lent) -> bool {
        lent.turns.iter().all(|&(stripe, n)| self.turns[stripe] != n)
    }

    /// Copies what dropped operations lend on a connection, once its send buffer is here.
    pub(super) fn disown_sent(&mut self, stripe: usize) {
        let (conn, lanes) = (&mut self.conns[stripe], &self.lanes);
        if conn.disowned && !conn.lent {
            conn.disowned = false;
            let is_gone = |o: FrameOwner| o != FrameOwner::NOBODY && lanes[o.lane as usize].is_none();
            let held = self.registry.hold();
            // SAFETY: who drops a lane has its caller wait until the send buffer is back, or cuts the connection off;
            // what is asked after here lies in windows that are held.
            unsafe { conn.send_buffer.take_over_from(is_gone, |addr, len| held.covers(addr, len as u64)) };
        }
    }
}

impl Conn {
    fn disown(&mut self, place: u32) {
        self.disowned = true;
        self.asked.iter_mut().filter(|a| a.owner.lane == place).for_each(AskedGet::disown);
        self.storing.retain(|(_, owner)| owner.lane != place);
        // Their headers are not out. A signal behind them will not ring.
        self.line.retain(|c| c.owner.lane != place);
        self.line_bytes = self.line.iter().map(|c| c.place.len as usize).sum();
    }
}

#[cfg(test)]
mod tests {
    use super::super::answers::tests::{link, post, LEN};
    use super::*;
    use crate::fabric::soft::lane::Health;
    use crate::rma::op::Op;
    use std::io::{Read, Write};

    fn lane(context: u32) -> Arc<Lane> {
        Arc::new(Lane::new(context, 1, Arc::new(Health::default())))
    }

    fn put(from: &[u8]) -> Op {
        let (local, len) = (from.as_ptr() as u64, from.len() as u64);
        Op::Put(Put { local, lkey: 0, rkey: 1, remote: 0, len, signal: None, more: false })
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
        let end = got.split_off(2 * whole);
        assert!(got[HEADER..whole].iter().all(|&b| b == 7) && got[whole + HEADER..].iter().all(|&b| b == 9));
        // Behind the frame that had begun and the other context's.
        let said = Frame::End { context: gone.context, conns: 1 << EXPRESS | 1 << STRIPES };
        assert_eq!(Frame::parse(&end.try_into().unwrap()), Ok(said));
    }

    fn lane_is_done(lane: &Lane, seq: crate::rma::seq::Seq) -> bool {
        lane.test(seq).unwrap()
    }

    #[test]
    fn who_comes_later_has_the_place_of_who_has_left() {
        let (mut link, mut peer) = link();
        peer.iter_mut().for_each(|p| p.set_nonblocking(true).unwrap());
        let (bytes, mut buf) = (vec![7u8; 2 * SMALL], vec![0; 1 << 16]);
        let mut ends = [0; STRIPES + 1];
        for context in 0..1000 {
            let mine = lane(context);
            let seq = post(&mut link, &mine, put(&bytes));
            assert!(lane_is_done(&mine, seq), "by the middle connection, as nothing else is under way");
            let lent = link.drop_lane(&mine);
            assert!(link.were_back(&lent));
            link.has_left(lent);
            link.pump().unwrap();
            for (conn, end) in peer.iter_mut().zip(&mut ends) {
                let last = std::iter::from_fn(|| conn.read(&mut buf).ok().map(|n| buf[n - HEADER..n].to_vec())).last();
                let frame = last.map(|b| Frame::parse(b.first_chunk().unwrap()).unwrap());
                *end += usize::from(frame == Some(Frame::End { context, conns: 1 << EXPRESS | 1 << MIDDLE }));
            }
            // One is enough for all of them, but for the time that a put leaves the middle connection alone.
            link.spread = spread::Spread::new(false);
            assert!(!link.is_busy() && link.lanes.len() == 1, "{} places", link.lanes.len());
        }
        assert_eq!(ends, [1000, 1000, 0]);
    }

    #[test]
    fn answers_for_a_context_that_is_gone_are_nobodys() {
        let (mut link, mut peer) = link();
        let [gone, stays] = [0, 1].map(lane);
        let to = [[0u8; LEN]; 3];
        let get = |i: usize| {
            Op::Get(Get { local: to[i].as_ptr() as u64, lkey: 0, rkey: 1, remote: 0, len: LEN as u64, more: false })
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
