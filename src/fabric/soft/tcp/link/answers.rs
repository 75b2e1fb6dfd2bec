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

impl Conn {
    /// Whether a request may be staged; not while the outlet is lent, which comes back as it was then, and sent.
    pub(super) fn may_ask(&self, len: usize) -> bool {
        !self.lent && self.asked.len() < GETS && (self.asked_bytes == 0 || self.asked_bytes + len <= GET_BYTES)
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
                // SAFETY: the destination belongs to an unfinished get, whose caller keeps it writable; the stage is
                // ours alone.
                unsafe { std::ptr::copy_nonoverlapping(staged.as_ptr(), a.place(), n) };
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
                if let Some(lane) = &mut lanes[owner.lane as usize] {
                    lane.finished(owner.flight);
                }
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
        let conn = &mut self.conns[stripe];
        let Some(fd) = conn.fd.as_ref().map(AsRawFd::as_raw_fd) else { return Ok(false) };
        let mut total = 0;
        if conn.starved && self.phase != Phase::Deaf {
            // What is staged comes first.
            conn.take_answers(&mut self.lanes, &self.gpu)?;
        }
        loop {
            if conn.starved && self.phase != Phase::Deaf {
                return Ok(total > 0);
            }
            let direct = match conn.asked.front() {
                Some(a) if conn.landing => Some((a.place(), a.len - a.got)),
                _ => None,
            };
            // SAFETY: the destination belongs to an unfinished get, whose caller keeps it writable.
            let got = unsafe { conn.inlet.fill(fd, direct) }.map_err(Lost::Io)?;
            if let (Some(_), Some(a)) = (direct, conn.asked.front_mut()) {
                a.got += got.direct;
            }
            total += got.direct + got.staged;
            if self.phase == Phase::Deaf {
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
