//! How a link ends: operations given up, connections cut off, and why.

use super::*;

/// Turns in which a connection is read on which a send has failed: 16 MiB.
const LAST_TURNS: usize = 16;

/// Why a connection ends.
#[derive(Debug)]
pub enum Lost {
    /// The socket failed, or what came is malformed.
    Io(io::Error),
    /// The peer closed in good order.
    Fin,
    /// This rank's GPU failed.
    Gpu(Error),
}

impl From<Refusal> for &'static str {
    fn from(r: Refusal) -> Self {
        match r {
            Refusal::Put => "put to",
            Refusal::Get => "get from",
            Refusal::Signal => "signal at",
            Refusal::Atomic => "change of the word of",
            Refusal::Contexts | Refusal::Late => "put to",
        }
    }
}

/// The sentence for a refusal by `rank`.
pub fn refusal(rank: u32, why: Refusal, context: u32, place: &WindowBytes) -> Error {
    let (what, WindowBytes { rkey, addr, len }) = (<&str>::from(why), place);
    if why == Refusal::Contexts {
        return Error::remote_access(format!(
            "rank {rank} refused a put of context {context}: it keeps the order of more contexts of this rank than \
             it can; destroy some"
        ));
    }
    if why == Refusal::Late {
        return Error::remote_access(format!(
            "rank {rank} refused an operation of context {context}: the GPU window that it names was deregistered, \
             or its GPU has failed; deregister after the last operation"
        ));
    }
    Error::remote_access(format!(
        "rank {rank} refused a {what} {len} bytes at {addr:#x} in window {rkey} (context {context}): not inside that \
         window, not aligned if a signal or an atomic operation, or deregistered; check offset, size and handle"
    ))
}

impl Initiator {
    /// Gives up every operation and every connection. Resets those on which a payload is incomplete.
    pub fn cut_off(&mut self) {
        for conn in &mut self.conns {
            let conn = std::mem::take(conn);
            if let (Some(fd), true) = (conn.fd, conn.lent || conn.send_buffer.is_lending()) {
                sock::abort(&fd);
            }
        }
        self.phase = Phase::Down;
        self.forget();
    }

    fn forget(&mut self) {
        self.failing.drain(..).for_each(|f| f.tell());
        // Else the helper thread would look after it for ever.
        self.hungry = false;
        for lane in self.lanes.iter_mut().flatten() {
            lane.clear();
            lane.queued = false;
        }
        self.ring.clear();
        self.fetching.clear();
        for conn in &mut self.conns {
            conn.fetched.clear();
            conn.fenced.clear();
            conn.asked.clear();
            conn.landing = false;
            conn.starved = false;
            conn.line.clear();
            conn.line_bytes = 0;
            conn.storing.clear();
        }
    }

    /// Why a connection is over on which a send has failed: a peer that left in order said so before, and it may lie
    /// there unread.
    #[cold]
    pub fn last_word(&mut self, stripe: usize, failure: io::Error) -> Lost {
        // More than the kernel holds: nothing comes behind a reset.
        for _ in 0..LAST_TURNS {
            match self.receive(stripe) {
                Ok(true) => {}
                Err(Lost::Fin) => return Lost::Fin,
                _ => break,
            }
        }
        Lost::Io(failure)
    }

    /// Reads what comes on a link that has parted, for nobody. The kernel resets a connection that is closed with bytes
    /// unread or due, and throws away what the peer has not read of it. Returns whether anything came.
    pub fn throw_answers_away(&mut self) -> bool {
        let mut came = false;
        for stripe in 0..self.conns.len() {
            let received = self.receive_some(stripe);
            let conn = &mut self.conns[stripe];
            conn.fetched.clear();
            conn.fenced.clear();
            conn.refusals.clear();
            conn.withdrawn.clear();
            came |= matches!(received, Ok(true));
            if received.is_err() {
                // The peer has its FIN, or wants nothing any more.
                conn.asked.clear();
                if let (Some(fd), true) = (conn.fd.take(), conn.send_buffer.is_lending()) {
                    sock::abort(&fd);
                }
            }
        }
        came
    }

    /// Gives up what has not begun, and sends its FIN behind the rest. For `close`. Returns whether anything was given
    /// up.
    pub fn part(&mut self) -> bool {
        let mut any = false;
        // They have ended.
        self.movers = false;
        for lane in self.lanes.iter_mut().flatten() {
            any |= !lane.tasks.is_empty();
            lane.tasks.clear();
        }
        self.ring.clear();
        for conn in &mut self.conns {
            any |= !conn.line.is_empty();
            conn.asked.iter_mut().for_each(AskedGet::disown);
            conn.line.clear();
            conn.line_bytes = 0;
            conn.send_buffer.copy(&Frame::Fin.emit());
            conn.blocked = false;
        }
        any
    }
}

#[cfg(test)]
mod tests {
    use super::super::answers::tests::everywhere;
    use super::*;

    #[test]
    fn a_link_that_is_over_waits_for_no_buffer() {
        let mut link = Initiator::new(STRIPES + 1, Arc::default(), everywhere(), false);
        link.hungry = true;
        link.cut_off();
        assert!(!link.hungry);
    }
}
