//! What a peer asked for goes back to it, on the connection that it asked on.

use super::*;

/// An answer on its way out.
pub(super) struct Answer {
    pub(super) header: [u8; HEADER],
    pub(super) context: u32,
    pub(super) place: WindowBytes,
    pub(super) sent: usize,
    /// Header alone.
    pub(super) bare: bool,
    /// The bytes, if they come from GPU memory.
    pub(super) buffer: Option<PinnedBuffer>,
    /// The engine has not done yet what it tells of.
    pub(super) awaited: Option<(Awaits, Awaited)>,
}

/// What an answer tells of.
#[derive(Clone, Copy)]
pub(super) enum Awaits {
    /// What a word held before the atomic operation with this number.
    Value(u32),
    /// That bytes are in place.
    Bytes,
}

impl Answer {
    pub(super) fn len(&self) -> usize {
        HEADER + if self.bare { 0 } else { self.place.len as usize }
    }
}

impl Inbound {
    /// Sends answers until the kernel takes no more or the turn is over.
    pub(super) fn answer(&mut self, lanes: &mut Lanes, registry: &Registry) -> io::Result<bool> {
        const VECTORS: usize = 32;
        self.fetch_answers(lanes);
        let mut total = 0;
        while !self.answers.is_empty() && total < TURN {
            let mut io = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; VECTORS];
            let (mut n, mut offered) = (0, 0);
            let held = registry.hold();
            for a in self.answers.iter_mut().take(VECTORS / 2) {
                if !a.is_here() {
                    break;
                }
                a.refuse_if_withdrawn(lanes, &held);
                let header = &a.header[a.sent.min(HEADER)..];
                if !header.is_empty() {
                    io[n] = libc::iovec { iov_base: header.as_ptr().cast_mut().cast(), iov_len: header.len() };
                    n += 1;
                }
                let done = a.sent.saturating_sub(HEADER);
                if !a.bare && a.place.len as usize > done {
                    let len = a.place.len as usize - done;
                    let from = match &a.buffer {
                        Some(buffer) => Some(buffer.host().wrapping_add(done)),
                        None => held.resolve(a.place.rkey, a.place.addr + done as u64, len as u64),
                    };
                    let from = from.ok_or_else(|| io::Error::other("the source of a get was deregistered"))?;
                    io[n] = libc::iovec { iov_base: from.cast(), iov_len: len };
                    n += 1;
                }
                offered += a.len() - a.sent;
            }
            if n == 0 {
                break;
            }
            // SAFETY: headers lie in `answers`, which is not touched meanwhile; payloads in registered windows, which
            // stay so while `held` lives, or in buffers of these answers.
            let sent = match unsafe { sock::send(self.fd.as_raw_fd(), &io[..n]) }? {
                Moved::Bytes(n) => n,
                _ => 0,
            };
            drop(held);
            total += sent;
            let mut left = sent;
            while let Some(a) = self.answers.front_mut() {
                let n = left.min(a.len() - a.sent);
                a.sent += n;
                left -= n;
                if a.sent < a.len() {
                    break;
                }
                self.answers.pop_front();
            }
            if sent < offered {
                break;
            }
            self.fetch_answers(lanes);
        }
        self.fetching = self.answers.front().is_some_and(|a| !a.is_here());
        Ok(total > 0)
    }
}
