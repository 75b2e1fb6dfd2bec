//! Stripes that threads of their own send on: they take a stripe's send buffer along, and the link is free meanwhile.

use super::*;

/// What goes with a thread that sends.
pub struct Loan {
    stripe: usize,
    fd: Arc<Private<OwnedFd>>,
    send_buffer: SendBuffer,
    /// Payloads that the kernel has taken whole.
    gone: Vec<FrameOwner>,
    result: io::Result<Option<bool>>,
}

impl Loan {
    /// Sends once. Returns the bytes that the kernel took.
    ///
    /// # Safety
    /// As for `SendBuffer::send`.
    pub unsafe fn send(&mut self) -> usize {
        let before = self.send_buffer.borrowed() + self.send_buffer.staged();
        let gone = &mut self.gone;
        // SAFETY: the caller's promise.
        self.result = unsafe { self.send_buffer.send(self.fd.as_raw_fd(), |owner| gone.push(owner)) };
        before - self.send_buffer.borrowed() - self.send_buffer.staged()
    }
}

impl Initiator {
    /// The send buffer of a stripe, if it has anything to send and its socket may take it.
    pub fn lend(&mut self, stripe: usize) -> Option<Loan> {
        if self.phase != Phase::Up {
            return None;
        }
        let conn = &mut self.conns[stripe];
        if conn.blocked || conn.lent || conn.send_buffer.is_empty() {
            return None;
        }
        let fd = conn.fd.clone()?;
        conn.lent = true;
        self.turns[stripe] += 1;
        let send_buffer = std::mem::take(&mut conn.send_buffer);
        Some(Loan { stripe, fd, send_buffer, gone: Vec::new(), result: Ok(None) })
    }

    /// Takes it back. Where the connection is over, nobody wants it any more.
    pub fn take_back(&mut self, loan: Loan) -> io::Result<()> {
        self.turns[loan.stripe] += 1;
        let conn = &mut self.conns[loan.stripe];
        if !conn.fd.as_ref().is_some_and(|fd| Arc::ptr_eq(fd, &loan.fd)) {
            return Ok(());
        }
        conn.lent = false;
        conn.send_buffer = loan.send_buffer;
        self.disown_sent(loan.stripe);
        let conn = &mut self.conns[loan.stripe];
        conn.blocked = loan.result? == Some(false);
        loan.gone.into_iter().for_each(|owner| finished(&mut self.lanes, owner));
        self.last_use = Some(Instant::now());
        Ok(())
    }
}
