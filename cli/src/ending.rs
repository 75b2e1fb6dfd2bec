//! How a command ends, and the exit status that says so.

use nix::sys::signal::Signal;
use std::process::ExitCode;

/// How a command ended that could do what it is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// All is well: 0.
    Well,
    /// It has found something wrong: 1.
    Wrong,
    /// It was asked to end and has put things right first: 128 and the signal's number, as a shell has it of programs
    /// that a signal has ended.
    Stopped(Signal),
}

impl From<bool> for Ending {
    fn from(is_well: bool) -> Self {
        match is_well {
            true => Self::Well,
            false => Self::Wrong,
        }
    }
}

impl Ending {
    /// The exit status.
    pub fn status(self) -> u8 {
        match self {
            Self::Well => 0,
            Self::Wrong => 1,
            Self::Stopped(signal) => 128 + signal as u8,
        }
    }
}

impl From<Ending> for ExitCode {
    fn from(ending: Ending) -> Self {
        Self::from(ending.status())
    }
}
