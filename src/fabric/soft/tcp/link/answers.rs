//! Gets: what was asked of the peer on each connection, and the answers that come back.

use super::*;

/// Bytes, and requests, of gets that may be unanswered on a connection.
const GET_BYTES: usize = 4 << 20;
const GETS: usize = 1024;

/// A get request that waits for its answer.
pub struct Asked {
    pub to: u64,
    pub lkey: u32,
    /// Where the bytes go on their way to GPU memory.
    pub lease: Option<Lease>,
    pub len: usize,
    pub got: usize,
    pub owner: Owner,
}

impl Asked {
    /// Its get is given up: the answer is thrown away.
    pub fn disown(&mut self) {
        (self.to, self.lkey, self.lease, self.owner) = (0, 0, None, Owner::NOBODY);
    }

    /// Whether it was.
    pub fn is_disowned(&self) -> bool {
        self.owner == Owner::NOBODY
    }
}

impl Conn {
    /// Whether a request may be staged; not while the outlet is lent, which comes back as it was then, and sent.
    pub(super) fn may_ask(&self, len: usize) -> bool {
        !self.lent && self.asked.len() < GETS && (self.asked_bytes == 0 || self.asked_bytes + len <= GET_BYTES)
    }

    /// Whether the answer that arrives is cut off: its rest will never come.
    fn lacks_rest(&self) -> bool {
        let left = self.asked.front().map_or(0, |a| a.len - a.got);
        let rest = self.fd.as_deref().and_then(|fd| sock::rest(fd));
        rest.is_some_and(|n| self.inlet.staged().len() + n < left)
    }

    fn take_answers(&mut self, lanes: &mut [Option<Box<Queue>>], gpu: &Gpu) -> std::result::Result<(), Lost> {
        loop {
            if self.landing {
                if !self.has_place(gpu).map_err(Lost::Gpu)? {
                    return Ok(());
                }
                let Some(a) = self.asked.front_mut() else { break };
                let staged = self.inlet.staged();
                let n = staged.len().min(a.len - a.got);
                if !a.is_disowned() {
                    // SAFETY: the destination belongs to an unfinished get, whose caller keeps it writable; the stage is
                    // ours alone.
                    unsafe { std::ptr::copy_nonoverlapping(staged.as_ptr(), a.place(), n) };
                }
                a.got += n;
                let (owner, done, len) = (a.owner, a.got == a.len, a.len);
                self.inlet.consume(n);
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
            let Some(frame) = self.inlet.header() else { return Ok(()) };
            self.inlet.consume(HEADER);
            match frame {
                Ok(Frame::Data { len }) if self.asked.front().is_some_and(|a| a.len == len as usize) => {
                    self.landing = true;
                }
                Ok(Frame::Refused { why, context, place }) => return Err(Lost::Refused(why, context, place)),
                Ok(Frame::Goodbye) => return Err(Lost::Goodbye),
                _ => break,
            }
        }
        Err(Lost::Io(io::Error::new(io::ErrorKind::InvalidData, "an answer that fits no request")))
    }
}

impl Link {
    /// Receives answers on a stripe. `true`: something came.
    pub fn receive(&mut self, stripe: usize) -> std::result::Result<bool, Lost> {
        // Behind a refusal an answer would be taken for that to the operation before it.
        let deaf = self.phase == Phase::Deaf || self.refused.is_some();
        let conn = &mut self.conns[stripe];
        let Some(fd) = conn.fd.as_ref().map(AsRawFd::as_raw_fd) else { return Ok(false) };
        let mut total = 0;
        if conn.starved && !deaf {
            // What is staged comes first.
            conn.take_answers(&mut self.lanes, &self.gpu)?;
        }
        loop {
            if conn.starved && !deaf {
                return match conn.over && conn.lacks_rest() {
                    true => Err(Lost::Io(
                        conn.fd.as_deref().map_or(io::ErrorKind::NotConnected.into(), |fd| sock::end_of(fd)),
                    )),
                    false => Ok(total > 0),
                };
            }
            let direct = match conn.asked.front() {
                Some(a) if conn.landing && !deaf && !a.is_disowned() && !a.lacks_slot() => {
                    Some((a.place(), a.len - a.got))
                }
                _ => None,
            };
            // SAFETY: the destination belongs to an unfinished get, whose caller keeps it writable.
            let got = unsafe { conn.inlet.fill(fd, direct) }.map_err(Lost::Io)?;
            if let (Some(_), Some(a)) = (direct, conn.asked.front_mut()) {
                a.got += got.direct;
            }
            total += got.direct + got.staged;
            if deaf {
                conn.inlet.consume(conn.inlet.staged().len());
            } else {
                conn.take_answers(&mut self.lanes, &self.gpu)?;
            }
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
pub fn ask(lane: &Queue, conn: &mut Conn, get: &Get, len: usize, owner: Owner) {
    let place = Place { rkey: get.rkey, addr: get.remote.wrapping_add(lane.cut), len: len as u32 };
    conn.outlet.copy(&Frame::Get { context: lane.lane.context, place }.emit());
    conn.asked.push_back(Asked { to: get.local + lane.cut, lkey: get.lkey, lease: None, len, got: 0, owner });
    conn.asked_bytes += len;
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::fabric::soft::lane::{Health, Lane};
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    pub const LEN: usize = 64;

    /// A link with threads for bulk, and the peer's ends of its connections.
    pub fn link() -> (Link, Vec<UnixStream>) {
        let mut link = Link::new(STRIPES + 1, Arc::default(), true);
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

    pub fn post(link: &mut Link, lane: &Arc<Lane>, work: Work) -> crate::rma::seq::Seq {
        let seq = lane.number();
        link.accept(Task { lane: lane.clone(), seq, work });
        link.pump().unwrap();
        seq
    }

    #[test]
    fn what_comes_behind_a_refusal_is_nobodys_answer() {
        let (mut link, mut peer) = link();
        let lane = Arc::new(Lane::new(0, 1, Arc::new(Health::default())));
        let (to, bulk) = ([[0u8; LEN]; 2], vec![7u8; CHUNK]);
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
            Work::Get(Get { local, lkey: 0, rkey: 1, remote: 64 * i as u64, len: LEN as u64, more: false })
        };
        let gets = [post(&mut link, &lane, get(0)), post(&mut link, &lane, get(1))];
        post(&mut link, &lane, Work::Put(put));
        let loan = link.lend(STRIPES).expect("a chunk to send");
        // The first get is refused, the second one answered.
        let place = Place { rkey: 1, addr: 0, len: LEN as u32 };
        let refused = Frame::Refused { why: Refusal::Get, context: 0, place }.emit();
        let data = Frame::Data { len: LEN as u32 }.emit();
        peer[EXPRESS].write_all(&[&refused[..], &data, &[9; LEN]].concat()).unwrap();
        assert!(matches!(link.receive(EXPRESS), Err(Lost::Refused(Refusal::Get, 0, at)) if at == place));
        // It is told once the thread that sends is back.
        link.refused = Some(refusal(1, Refusal::Get, 0, &place));
        peer[EXPRESS].write_all(&[&data[..], &[9; LEN]].concat()).unwrap();
        link.receive(EXPRESS).unwrap();
        assert!(!lane.test(gets[0]).unwrap() && !lane.test(gets[1]).unwrap());
        // SAFETY: alive; read as the link writes it.
        assert!(to.iter().flatten().all(|b| unsafe { std::ptr::read_volatile(b) } == 0));
        link.take_back(loan).unwrap();
    }
}
