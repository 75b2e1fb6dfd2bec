//! One error type: a kind, an NCCL result code and a sentence that says what failed and what to do.

use nccl_plugin_api::NcclResult;
use std::fmt;

/// What kind of fault it is, for whoever acts on it rather than reads it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// An argument has a value it may not have.
    Argument,
    /// The call does not fit the configuration or the moment.
    Usage,
    /// An operation names memory of this rank that it may not touch.
    LocalProtection,
    /// An operation names memory of a peer that it may not touch.
    RemoteAccess,
    /// A peer is gone: it ended, closed its communicator, or cannot be reached.
    PeerGone,
    /// A peer answered something that it may not.
    Protocol,
    /// A device, this rank's or a peer's, does not work any more.
    DeviceFailed,
    /// A deadline passed.
    Timeout,
    /// A system call or library call failed.
    System,
    /// A fault of this library.
    Internal,
}

/// What went wrong. Boxed inside [`Error`] so that a `Result` stays one word on the data path.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Inner {
    kind: Kind,
    code: NcclResult,
    message: String,
    logged: bool,
}

/// A failure with the code that NCCL gets and the sentence that the log gets.
///
/// The sentence names the call or object, the value, and the remedy. It is
/// logged once, by the fence in `vtable::guard`; code below only returns it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error(Box<Inner>);

/// The result of everything in this crate.
pub type Result<T> = std::result::Result<T, Error>;

macro_rules! constructors {
    ($($(#[$doc:meta])* $name:ident => $kind:ident, $code:ident;)*) => {$(
        $(#[$doc])*
        #[cold]
        pub fn $name(message: impl Into<String>) -> Self {
            Self(Box::new(Inner { kind: Kind::$kind, code: NcclResult::$code, message: message.into(), logged: false }))
        }
    )*};
}

impl Error {
    constructors! {
        /// A CUDA call failed.
        cuda => DeviceFailed, UNHANDLED_CUDA_ERROR;
        /// A system call or library call failed.
        system => System, SYSTEM_ERROR;
        /// A fault of this library.
        internal => Internal, INTERNAL_ERROR;
        /// An argument has a value it may not have.
        argument => Argument, INVALID_ARGUMENT;
        /// The call does not fit the configuration or the moment.
        usage => Usage, INVALID_USAGE;
        /// A peer, or the path to it, failed.
        remote => PeerGone, REMOTE_ERROR;
        /// An operation names memory of a peer that is not, or no longer, there.
        remote_access => RemoteAccess, REMOTE_ERROR;
        /// An operation names memory of this rank that it may not touch, found when it ran.
        local_protection => LocalProtection, REMOTE_ERROR;
        /// A peer sent what it may not send.
        protocol => Protocol, REMOTE_ERROR;
        /// A deadline passed.
        timeout => Timeout, TIMEOUT;
    }

    /// A peer has closed its communicator in good order.
    #[cold]
    pub fn rank_closed(rank: u32) -> Self {
        Self::remote(format!("rank {rank} has closed its communicator"))
    }

    /// A system error with the current `errno` spelled out after `what`.
    #[cold]
    pub fn last_os(what: impl fmt::Display) -> Self {
        Self::system(format!("{what}: {}", std::io::Error::last_os_error()))
    }

    /// What kind of fault it is.
    pub fn kind(&self) -> Kind {
        self.0.kind
    }

    /// The same error, of another kind.
    #[cold]
    pub fn of_kind(mut self, kind: Kind) -> Self {
        self.0.kind = kind;
        self
    }

    /// The code for NCCL.
    pub fn code(&self) -> NcclResult {
        self.0.code
    }

    /// The sentence for the log.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// Whether the log already has the sentence.
    pub fn is_logged(&self) -> bool {
        self.0.logged
    }

    /// The same error, marked as already in the log: whoever returns it once more shall not repeat it.
    #[cold]
    pub fn logged(mut self) -> Self {
        self.0.logged = true;
        self
    }

    /// The same error with `what: ` in front of its sentence.
    #[cold]
    pub fn context(mut self, what: impl fmt::Display) -> Self {
        self.0.message = format!("{what}: {}", self.0.message);
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)
    }
}

impl std::error::Error for Error {}
