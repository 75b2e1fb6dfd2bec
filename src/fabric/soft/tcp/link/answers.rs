//! Gets: what was asked of the peer on each connection, and the answers that come back.

use super::*;

/// Bytes, and requests, of gets that may be unanswered on a connection.
const GET_BYTES: usize = 4 << 20;
const GETS: usize = 1024;

/// A get request that waits for its answer.
pub struct AskedGet {
    pub to: u64,
    pub lkey: u32,
    /// Where the bytes go on their way to GPU memory.
    pub buffer: Option<PinnedBuffer>,
    pub len: usize,
    pub got: usize,
    pub owner: FrameOwner,
}

impl AskedGet {
    /// Its get is given up: the answer is thrown away.
    pub fn disown(&mut self) {
        (self.to, self.lkey, self.buffer, self.owner) = (0, 0, None, FrameOwner::NOBODY);
    }

    /// Whether the window that it is for is still there; of what lies on the GPU others know.
    fn has_window(&self, held: &Held<'_>) -> bool {
        Key(self.lkey).is_on_gpu() || held.resolve(self.lkey, self.to, self.len as u64).is_some()
    }

    /// Whether it was.
    pub fn is_disowned(&self) -> bool {
        self.owner == FrameOwner::NOBODY
    }
}

impl Conn {
    /// Whether a request may be staged; not while the send buffer is lent, which comes back as it was then, and sent.
    pub(super) fn may_ask(&self, len: usize) -> bool {
        !self.lent && self.asked.len() < GETS && (self.asked_bytes == 0 || self.asked_bytes + len <= GET_BYTES)
    }

    /// Whether the answer that arrives is cut off: its rest will never come.
    fn lacks_rest(&self) -> bool {
        let left = self.asked.front().map_or(0, |a| a.len - a.got);
        let rest = self.fd.as_deref().and_then(|fd| sock::rest(fd));
        rest.is_some_and(|n| self.receive_buffer.staged().len() + n < left)
    }

    /// Throws the next answer away if its window is gone.
    fn drop_withdrawn(&mut self, held: &Held<'_>) {
        if let Some(a) = self.asked.front_mut().filter(|a| !a.is_disowned() && !a.has_window(held)) {
            self.withdrawn.push((a.owner.lane, a.lkey));
            a.disown();
        }
    }

    fn take_answers(
        &mut self,
        lanes: &mut [Option<Box<TaskQueue>>],
        gpu: &Gpu,
        held: &Held<'_>,
    ) -> std::result::Result<(), Lost> {
        loop {
            if self.landing {
                self.drop_withdrawn(held);
                if !self.has_place(gpu).map_err(Lost::Gpu)? {
                    return Ok(());
                }
                let Some(a) = self.asked.front_mut() else { break };
                let staged = self.receive_buffer.staged();
                let n = staged.len().min(a.len - a.got);
                if !a.is_disowned() {
                    // SAFETY: the destination is an unfinished get's, in a buffer or in a window that is held; the
                    // stage is ours alone.
                    unsafe { std::ptr::copy_nonoverlapping(staged.as_ptr(), a.place(), n) };
                }
                a.got += n;
                let (owner, done, len) = (a.owner, a.got == a.len, a.len);
                self.receive_buffer.consume(n);
                if !done {
                    return Ok(());
                }
                self.landing = false;
                self.asked_bytes -= len;
                if self.asked.pop_front().is_some_and(|a| self.store(a, gpu)) {
                    continue;
                }
                finished(lanes, owner);
            }
            let Some(frame) = self.receive_buffer.header() else { return Ok(()) };
            self.receive_buffer.consume(HEADER);
            match frame {
                Ok(Frame::Data { len }) if self.asked.front().is_some_and(|a| a.len == len as usize) => {
                    self.landing = true;
                }
                Ok(Frame::Refused { why: Refusal::Get, context, place }) => {
                    // In its turn, as any answer.
                    if self.asked.front().is_none_or(|a| a.len != place.len as usize) {
                        break;
                    }
                    self.asked_bytes -= self.asked.pop_front().map_or(0, |a| a.len);
                    self.refusals.push((Refusal::Get, context, place));
                }
                Ok(Frame::Refused { why, context, place }) => self.refusals.push((why, context, place)),
                Ok(Frame::Fetched { context, seq, value }) => self.fetched.push((context, seq, value)),
                Ok(Frame::Fenced { context, number }) => self.fenced.push((context, Seq(number))),
                Ok(Frame::Fin) => return Err(Lost::Fin),
                _ => break,
            }
        }
        Err(Lost::Io(io::Error::new(io::ErrorKind::InvalidData, "an answer that fits no request")))
    }
}

impl Initiator {
    /// Receives answers on a stripe. `true`: something came.
    pub fn receive(&mut self, stripe: usize) -> std::result::Result<bool, Lost> {
        let received = self.receive_some(stripe);
        if !self.conns[stripe].withdrawn.is_empty() {
            self.take_withdrawn(stripe);
        }
        if !self.conns[stripe].fetched.is_empty() {
            self.take_fetched(stripe);
        }
        if !self.conns[stripe].fenced.is_empty() {
            self.take_fenced(stripe);
        }
        if !self.conns[stripe].refusals.is_empty() {
            self.take_refusals(stripe);
        }
        received
    }

    pub(super) fn receive_some(&mut self, stripe: usize) -> std::result::Result<bool, Lost> {
        let conn = &mut self.conns[stripe];
        let Some(fd) = conn.fd.as_ref().map(AsRawFd::as_raw_fd) else { return Ok(false) };
        let mut total = 0;
        if conn.starved {
            // What is staged comes first.
            conn.take_answers(&mut self.lanes, &self.gpu, &self.registry.hold())?;
        }
        loop {
            if conn.starved {
                return match conn.over && conn.lacks_rest() {
                    true => Err(Lost::Io(
                        conn.fd.as_deref().map_or(io::ErrorKind::NotConnected.into(), |fd| sock::end_of(fd)),
                    )),
                    false => Ok(total > 0),
                };
            }
            let held = self.registry.hold();
            conn.drop_withdrawn(&held);
            let direct = match conn.asked.front() {
                Some(a) if conn.landing && !a.is_disowned() && !a.lacks_buffer() => Some((a.place(), a.len - a.got)),
                _ => None,
            };
            // SAFETY: the destination is an unfinished get's, in a buffer or in a window that is held.
            let got = unsafe { conn.receive_buffer.fill(fd, direct) }.map_err(Lost::Io)?;
            if let (Some(_), Some(a)) = (direct, conn.asked.front_mut()) {
                a.got += got.direct;
            }
            total += got.direct + got.staged;
            conn.take_answers(&mut self.lanes, &self.gpu, &held)?;
            if got.ended {
                return Err(Lost::Io(io::ErrorKind::UnexpectedEof.into()));
            }
            if got.dry || total >= TURN {
                return Ok(total > 0);
            }
        }
    }
}

/// Stages a request.
pub fn ask(lane: &TaskQueue, conn: &mut Conn, get: &Get, len: usize, owner: FrameOwner) {
    let place = WindowBytes { rkey: get.rkey, addr: get.remote.wrapping_add(lane.cut), len: len as u32 };
    conn.send_buffer.copy(&Frame::Get { context: lane.lane.context, place }.emit());
    conn.asked.push_back(AskedGet { to: get.local + lane.cut, lkey: get.lkey, buffer: None, len, got: 0, owner });
    conn.asked_bytes += len;
}

/// Asks for the next chunk of operation `seq`, the lane's first, over `conn`. `false`: for now the peer may be asked
/// for nothing more.
pub fn ask_next(lane: &mut TaskQueue, conn: &mut Conn, at: usize, seq: Seq, get: &Get) -> bool {
    let left = get.len - lane.cut;
    let len = left.min(CHUNK as u64) as usize;
    if !conn.may_ask(len) {
        return false;
    }
    let id = lane.begin_or_go_on(seq, false);
    ask(lane, conn, get, len, FrameOwner { lane: at as u32, operation: id });
    lane.advance(id, len, left == len as u64);
    true
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::fabric::soft::lane::{Health, Lane};
    use crate::memory::registry::Extent;
    use crate::rma::op::Op;
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    pub const LEN: usize = 64;

    /// All memory is in window 0.
    pub fn everywhere() -> Arc<Registry> {
        let registry = Registry::default();
        registry.insert(0, Extent { base: 0, len: u64::MAX });
        Arc::new(registry)
    }

    /// A link with threads for bulk, and the peer's ends of its connections.
    pub fn link() -> (Initiator, Vec<UnixStream>) {
        let mut link = Initiator::new(STRIPES + 1, Arc::default(), everywhere(), true);
        link.phase = Phase::Up;
        let connect = |conn: &mut Conn| {
            let (ours, theirs) = UnixStream::pair().unwrap();
            ours.set_nonblocking(true).unwrap();
            conn.fd = Some(Arc::new(Private::new(ours.into())));
            theirs
        };
        let peer = link.conns.iter_mut().map(connect).collect();
        (link, peer)
    }

    pub fn post(link: &mut Initiator, lane: &Arc<Lane>, work: Op) -> crate::rma::seq::Seq {
        let seq = lane.number();
        link.accept(Task { lane: lane.clone(), seq, work });
        link.pump().unwrap();
        seq
    }

    /// A get is refused while a thread sends for its lane: the caller is told once that one is back, and the answer
    /// to another context's get is that one's.
    #[test]
    fn a_refusal_ends_its_lane_once_nobody_sends_for_it() {
        let (mut link, mut peer) = link();
        let [lane, other] = [0, 1].map(|context| Arc::new(Lane::new(context, 1, Arc::new(Health::default()))));
        let (to, bulk) = ([[0u8; LEN]; 3], vec![7u8; CHUNK]);
        let put = Put {
            local: bulk.as_ptr() as u64,
            lkey: 0,
            rkey: 1,
            remote: 0,
            len: CHUNK as u64,
            signal: None,
            more: false,
        };
        let get = |i: usize| {
            let local = to[i].as_ptr() as u64;
            Op::Get(Get { local, lkey: 0, rkey: 1, remote: 64 * i as u64, len: LEN as u64, more: false })
        };
        let gets = [post(&mut link, &lane, get(0)), post(&mut link, &lane, get(1))];
        post(&mut link, &lane, Op::Put(put));
        let its = post(&mut link, &other, get(2));
        let loan = link.lend(STRIPES).expect("a chunk to send");
        let place = WindowBytes { rkey: 1, addr: 0, len: LEN as u32 };
        let refused = Frame::Refused { why: Refusal::Get, context: 0, place }.emit();
        let data = Frame::Data { len: LEN as u32 }.emit();
        peer[EXPRESS].write_all(&[&refused[..], &refused, &data, &[9; LEN]].concat()).unwrap();
        assert!(link.receive(EXPRESS).unwrap());
        assert!(other.test(its).unwrap());
        assert!(!link.tell_faults() && !lane.test(gets[0]).unwrap(), "told while a thread sends for it");
        link.take_back(loan).unwrap();
        assert!(link.tell_faults());
        for get in gets {
            let e = lane.test(get).unwrap_err();
            assert_eq!(e.kind(), crate::error::Kind::RemoteAccess);
            assert!(e.message().contains("rank 1 refused a get from 64 bytes"), "{e}");
        }
        assert!(!other.has_failed() && !lane.health.has_failed());
        // SAFETY: alive; read as the link writes it.
        let byte = |i: usize| to[i].iter().map(|b| unsafe { std::ptr::read_volatile(b) }).max().unwrap();
        assert_eq!([0, 1, 2].map(byte), [0, 0, 9]);
    }

    #[test]
    fn what_lay_in_a_window_that_is_gone_is_left_alone() {
        let (mut link, mut peer) = link();
        let lanes = [0, 1, 2].map(|context| Arc::new(Lane::new(context, 1, Arc::new(Health::default()))));
        let to = [0u8; LEN];
        let (local, len) = (to.as_ptr() as u64, LEN as u64);
        let get = Op::Get(Get { local, lkey: 0, rkey: 1, remote: 0, len, more: false });
        let put = Put { local, lkey: 0, rkey: 1, remote: 0, len, signal: None, more: false };
        let asked = post(&mut link, &lanes[0], get);
        link.registry.remove(0);
        let small = post(&mut link, &lanes[1], Op::Put(put));
        // Longer than what there is: nobody looks.
        let large = post(&mut link, &lanes[2], Op::Put(Put { len: 2 * CHUNK as u64, ..put }));
        peer[EXPRESS].write_all(&[&Frame::Data { len: LEN as u32 }.emit()[..], &[9; LEN]].concat()).unwrap();
        assert!(link.receive(EXPRESS).unwrap());
        link.tell_faults();
        for (lane, seq) in lanes.iter().zip([asked, small, large]) {
            assert_eq!(lane.test(seq).unwrap_err().kind(), crate::error::Kind::LocalProtection);
            assert!(!lane.health.has_failed());
        }
        // SAFETY: alive; read as the link would write it.
        assert!(to.iter().all(|b| unsafe { std::ptr::read_volatile(b) } == 0));
        assert!(!link.is_busy() && link.lend(STRIPES).is_none());
    }
}
