//! The terminal: taken for the screen, and given back however the program ends.

use super::view::View;
use crate::ending::Ending;
use crate::signals::Signals;
use nix::poll::{poll, PollFd, PollFlags, PollTimeout};
use nix::sys::signal::Signal;
use ratatui::crossterm::cursor::Show;
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{disable_raw_mode, LeaveAlternateScreen};
use std::io;
use std::os::fd::AsFd;
use std::sync::Mutex;
use std::time::Duration;

/// How often it is looked whether the terminal is there.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Whoever holds it writes to the terminal.
static WRITES: Mutex<()> = Mutex::new(());

/// The terminal, as it is drawn on.
pub struct Screen(ratatui::DefaultTerminal);

impl Screen {
    /// Takes it. From now on a signal that asks this program to end does so in a thread of its own: crossterm does not
    /// look for signals while it waits for keys, and does not come back at all from a terminal that has gone.
    pub fn take() -> io::Result<Self> {
        let signals = Signals::catch(&[])?;
        std::thread::Builder::new().spawn(|| end_by(signals))?;
        let _writes = WRITES.lock();
        ratatui::try_init().map(Self)
    }

    /// Draws everything.
    pub fn draw(&mut self, view: &View) -> io::Result<()> {
        let _writes = WRITES.lock();
        self.0.draw(|frame| view.draw(frame)).map(drop)
    }

    /// Gives it back.
    pub fn give_back(mut self) -> io::Result<()> {
        let _writes = WRITES.lock();
        let shown = self.0.show_cursor();
        // As it goes it would say on standard error that it could not show it, and panic where that has gone, too.
        std::mem::forget(self.0);
        shown.and(ratatui::try_restore())
    }
}

/// Whether the terminal has gone: its window was closed, its connection broke.
pub fn has_gone() -> bool {
    let input = io::stdin();
    let mut asked = [PollFd::new(input.as_fd(), PollFlags::empty())];
    let found = poll(&mut asked, PollTimeout::ZERO);
    found.is_ok() && asked[0].revents().is_some_and(|found| found.contains(PollFlags::POLLHUP))
}

/// Waits for a signal, or until the terminal has gone, since the signal may be ignored then (`nohup`); gives the
/// terminal back and ends the program.
fn end_by(mut signals: Signals) {
    let signal = loop {
        match signals.next(Some(LOOK_EVERY)) {
            Ok(Some(event)) => break event.signal,
            Ok(None) if has_gone() => break Signal::SIGHUP,
            Ok(None) => {}
            Err(_) => return,
        }
    };
    // A terminal that takes nothing (Ctrl-S) holds up who writes to it. From here on nobody else does.
    let is_mine = (0..100).any(|_| match WRITES.try_lock() {
        Ok(writes) => {
            std::mem::forget(writes);
            true
        }
        Err(_) => {
            std::thread::sleep(Duration::from_millis(10));
            false
        }
    });
    // It may have gone.
    let _ = disable_raw_mode();
    if is_mine {
        let _ = execute!(io::stdout(), LeaveAlternateScreen, Show);
    }
    std::process::exit(Ending::Stopped(signal).status().into());
}
