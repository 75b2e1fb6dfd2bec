//! One error type: an NCCL result code and a sentence that says what failed and what to do.

use nccl_plugin_api::NcclResult;
use std::fmt;

/// What went wrong. Boxed inside [`Error`] so that a `Result` stays one word on the data path.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Inner {
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
    ($($(#[$doc:meta])* $name:ident => $code:ident;)*) => {$(
        $(#[$doc])*
        #[cold]
        pub fn $name(message: impl Into<String>) -> Self {
            Self(Box::new(Inner { code: NcclResult::$code, message: message.into(), logged: false }))
        }
    )*};
}

impl Error {
    constructors! {
        /// A CUDA call failed.
        cuda => UNHANDLED_CUDA_ERROR;
        /// A system call or library call failed.
        system => SYSTEM_ERROR;
        /// A fault of this library.
        internal => INTERNAL_ERROR;
        /// An argument has a value it may not have.
        argument => INVALID_ARGUMENT;
        /// The call does not fit the configuration or the moment.
        usage => INVALID_USAGE;
        /// A peer, or the path to it, failed.
        remote => REMOTE_ERROR;
        /// A deadline passed.
        timeout => TIMEOUT;
    }

    /// A system error with the current `errno` spelled out after `what`.
    #[cold]
    pub fn last_os(what: impl fmt::Display) -> Self {
        Self::system(format!("{what}: {}", std::io::Error::last_os_error()))
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
