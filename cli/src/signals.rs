//! Signals that ask this program to end, as events: a command that has something to put right first looks for them.

use nix::errno::Errno;
use nix::poll::{poll, PollFd, PollFlags, PollTimeout};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use std::os::fd::AsFd;
use std::time::Duration;

/// By keys, by a terminal that goes, by `kill`, a batch system or a container's runtime.
const ASKS_TO_END: [Signal; 4] = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT];

/// One that has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Which.
    pub signal: Signal,
    /// It is the terminal's, which has sent it to all processes in its foreground.
    pub is_of_terminal: bool,
}

/// While it lives, signals that ask this program to end do not, and wait for [`Signals::next`].
pub struct Signals {
    queue: SignalFd,
    before: SigSet,
}

impl Signals {
    /// These, and `also` others. Those that this process ignores it still does: they are not meant for it (`nohup`, a
    /// job in a script's background). To be called while there is one thread.
    pub fn catch(also: &[Signal]) -> nix::Result<Self> {
        let caught: SigSet = ASKS_TO_END.iter().filter(|s| !is_ignored(**s)).chain(also).copied().collect();
        let queue = SignalFd::with_flags(&caught, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
        let before = SigSet::thread_get_mask()?;
        caught.thread_block()?;
        Ok(Self { queue, before })
    }

    /// The next one, waited for until then; `None` for any time. `Ok(None)`: none has come, or not yet.
    pub fn next(&mut self, within: Option<Duration>) -> nix::Result<Option<Event>> {
        let limit = within.map_or(PollTimeout::NONE, |t| PollTimeout::try_from(t).unwrap_or(PollTimeout::MAX));
        match poll(&mut [PollFd::new(self.queue.as_fd(), PollFlags::POLLIN)], limit) {
            Err(Errno::EINTR) => return Ok(None),
            other => other?,
        };
        let Some(said) = self.queue.read_signal()? else { return Ok(None) };
        let signal = Signal::try_from(said.ssi_signo as i32)?;
        Ok(Some(Event { signal, is_of_terminal: said.ssi_code == libc::SI_KERNEL }))
    }

    /// The signals that were blocked before, for a program that is started meanwhile.
    pub fn before(&self) -> SigSet {
        self.before
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        // One that has come since ends this program now. It cannot fail: the mask is the kernel's own.
        let _ = self.before.thread_set_mask();
    }
}

fn is_ignored(signal: Signal) -> bool {
    // SAFETY: plain data, which the call fills; it changes nothing.
    let mut now: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: as above.
    let asked = unsafe { libc::sigaction(signal as i32, std::ptr::null(), &mut now) };
    asked == 0 && now.sa_sigaction == libc::SIG_IGN
}
