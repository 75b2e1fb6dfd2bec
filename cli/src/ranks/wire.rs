//! One end of a connection between a rank and the hub.

use super::frame::{Frame, Kind};
use std::fs::File;
use std::io::{self, Write};
use std::net::TcpStream;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// A peer that takes nothing for this long is gone.
const SEND_TIME: Duration = Duration::from_secs(10);

pub(super) struct Wire {
    file: File,
    buffer: Vec<u8>,
}

impl From<UnixStream> for Wire {
    fn from(stream: UnixStream) -> Self {
        // Only fails for a zero duration.
        let _ = stream.set_write_timeout(Some(SEND_TIME));
        Self { file: File::from(OwnedFd::from(stream)), buffer: Vec::new() }
    }
}

impl From<TcpStream> for Wire {
    fn from(stream: TcpStream) -> Self {
        // Without these the connection works, only slower to answer or to give up.
        let _ = stream.set_nonblocking(false);
        let _ = stream.set_nodelay(true);
        let _ = stream.set_write_timeout(Some(SEND_TIME));
        Self { file: File::from(OwnedFd::from(stream)), buffer: Vec::new() }
    }
}

impl AsRawFd for Wire {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

impl Wire {
    pub(super) fn send(&mut self, kind: Kind, payload: Vec<u8>) -> io::Result<()> {
        Frame { kind, payload }.write(&mut self.file)?;
        self.file.flush()
    }

    /// One message if a whole one is there; never waits. An end of the stream is an error.
    pub(super) fn poll_frame(&mut self) -> io::Result<Option<Frame>> {
        loop {
            if let Some(frame) = Frame::take(&mut self.buffer)? {
                return Ok(Some(frame));
            }
            let mut part = [0u8; 65536];
            // SAFETY: the buffer is ours and that long.
            let n = unsafe { libc::recv(self.as_raw_fd(), part.as_mut_ptr().cast(), part.len(), libc::MSG_DONTWAIT) };
            match n {
                1.. => self.buffer.extend(&part[..n as usize]),
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                _ => match io::Error::last_os_error() {
                    e if e.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                    e if e.kind() == io::ErrorKind::Interrupted => {}
                    e => return Err(e),
                },
            }
        }
    }

    /// One message within `patience`.
    pub(super) fn wait_frame(&mut self, patience: Duration) -> io::Result<Frame> {
        let start = std::time::Instant::now();
        loop {
            if let Some(frame) = self.poll_frame()? {
                return Ok(frame);
            }
            let left = patience.checked_sub(start.elapsed()).ok_or(io::ErrorKind::TimedOut)?;
            let mut fd = libc::pollfd { fd: self.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: one descriptor, ours, during the call.
            unsafe { libc::poll(&mut fd, 1, left.as_millis().clamp(1, 1000) as i32) };
        }
    }
}
