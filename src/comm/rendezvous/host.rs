//! Whether the host at the other end of a connection is there. A process that is stopped, or late, does not matter: its
//! kernel acknowledges what comes, and answers probes.

use nix::errno::Errno;
use nix::sys::socket::{setsockopt, sockopt};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

/// Looks within the time that a host may be silent, and the longest time between two.
const LOOKS: u32 = 8;
const RARELY: Duration = Duration::from_secs(1);
/// A kernel answers two probes a second to a socket without room, and leaves out others, while the pauses between them
/// double: a host may be silent for so long in any case.
const SHORTEST: Duration = Duration::from_secs(2);
/// By how much the kernel's count of milliseconds may be wrong.
const COARSE: Duration = Duration::from_millis(20);

/// Has the kernel ask a host that has sent nothing for a while whether it is there, and break the connection when it
/// has not answered for `silence`. There are no such probes while something is on its way.
pub fn probe(socket: &TcpStream, silence: Duration) -> nix::Result<()> {
    const PROBES: u32 = 3;
    let pause = (silence.as_secs() / u64::from(PROBES + 1)).max(1) as u32;
    setsockopt(socket, sockopt::TcpKeepIdle, &pause)?;
    setsockopt(socket, sockopt::TcpKeepInterval, &pause)?;
    setsockopt(socket, sockopt::TcpKeepCount, &PROBES)?;
    setsockopt(socket, sockopt::KeepAlive, &true)
}

/// Has the kernel break the connection when something that was sent is not acknowledged, or finds no room, for
/// `silence`: for what a process reads that has nothing else to do.
pub fn demand_room(socket: &TcpStream, silence: Duration) -> nix::Result<()> {
    setsockopt(socket, sockopt::TcpUserTimeout, &u32::try_from(silence.as_millis()).unwrap_or(u32::MAX).max(1))
}

/// Closes a connection so that nothing of it arrives any more.
pub fn abort(socket: &TcpStream) {
    let _ = setsockopt(socket, sockopt::Linger, &libc::linger { l_onoff: 1, l_linger: 0 });
}

/// What the kernel knows of a connection's other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Seen {
    /// Something was sent, data or a probe, and no acknowledgement has come since. (What finds no room there stays
    /// unacknowledged; but whenever it is sent again, an acknowledgement of what is there already comes back.)
    owes: bool,
    /// Since the last acknowledgement came.
    quiet: Duration,
}

impl Seen {
    /// `None` where the kernel does not say.
    fn of(socket: &TcpStream) -> Option<Self> {
        // SAFETY: plain numbers; a kernel with a shorter structure leaves the rest 0.
        let (info, code) = unsafe {
            let mut info: libc::tcp_info = std::mem::zeroed();
            let mut len = size_of::<libc::tcp_info>() as libc::socklen_t;
            let fd = socket.as_raw_fd();
            let code = libc::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, (&raw mut info).cast(), &raw mut len);
            (info, code)
        };
        let quiet = Duration::from_millis(info.tcpi_last_ack_recv.into());
        let owes = info.tcpi_unacked > 0 && info.tcpi_last_data_sent < info.tcpi_last_ack_recv;
        (code == 0).then_some(Self { owes: owes || info.tcpi_probes > 0, quiet })
    }
}

/// Bytes that were handed to the kernel and are not acknowledged.
pub fn unacknowledged(socket: &TcpStream) -> nix::Result<usize> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the kernel writes one int.
    Errno::result(unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) })?;
    Ok(bytes.max(0) as usize)
}

/// A watch over what is on its way. A receiver without room acknowledges probes, so it may take its time; TCP's own
/// limit (`TCP_USER_TIMEOUT`) does not tell the two apart.
#[derive(Debug)]
pub struct DeliveryWatch {
    silence: Duration,
    /// Since when an acknowledgement is due.
    since: Option<Instant>,
    next: Instant,
}

impl DeliveryWatch {
    /// The other end may owe an acknowledgement for `silence`.
    pub fn new(silence: Duration, now: Instant) -> Self {
        Self { silence: silence.max(SHORTEST), since: None, next: now }
    }

    /// When [`DeliveryWatch::is_silent`] is to be asked next.
    pub fn next(&self) -> Instant {
        self.next
    }

    /// Whether the host has been silent for too long. To be asked at any time.
    pub fn is_silent(&mut self, socket: &TcpStream, now: Instant) -> bool {
        now >= self.next && Seen::of(socket).is_some_and(|seen| self.judge(seen, now))
    }

    fn judge(&mut self, seen: Seen, now: Instant) -> bool {
        self.next = now + (self.silence / LOOKS).min(RARELY);
        let Some(since) = self.since.filter(|_| seen.owes) else {
            self.since = seen.owes.then_some(now);
            return false;
        };
        let due = now.saturating_duration_since(since);
        if seen.quiet + COARSE < due {
            // It has acknowledged something meanwhile.
            self.since = Some(now);
            return false;
        }
        due >= self.silence
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_acknowledges_now_and_then_is_there() {
        let (s, start) = (Duration::from_secs, Instant::now());
        let mut watch = DeliveryWatch::new(s(8), start);
        let mut look = |at: u64, owes: bool, quiet: u64| watch.judge(Seen { owes, quiet: s(quiet) }, start + s(at));
        // It is idle for long, then something is sent.
        assert!(!look(0, false, 100) && !look(100, true, 200));
        assert!(!look(107, true, 207));
        // A probe was acknowledged, and the next is on its way.
        assert!(!look(109, true, 1));
        assert!(!look(116, true, 8));
        assert!(look(117, true, 9));
        // All is acknowledged.
        assert!(!look(118, false, 10));
        assert!(!look(130, true, 22) && look(138, true, 30));
    }

    #[test]
    fn looks_have_a_pace() {
        let now = Instant::now();
        for (silence, pace) in [(0.001, 0.25), (4.0, 0.5), (3600.0, 1.0)].map(|(a, b)| (a, Duration::from_secs_f64(b)))
        {
            let mut watch = DeliveryWatch::new(Duration::from_secs_f64(silence), now);
            watch.judge(Seen { owes: false, quiet: Duration::ZERO }, now);
            assert_eq!(watch.next(), now + pace);
        }
    }
}
