//! The messages between the ranks and rank 0, as bytes.
//!
//! A rank sends one [`Request`], perhaps followed by the byte [`EXPIRED`], and
//! gets one [`Reply`]. Parsers take bytes from anybody: they never panic and
//! never believe a length before it is checked against a limit. Numbers are
//! little-endian.

use std::fmt;

mod reply;
mod request;
#[cfg(test)]
mod tests;

pub use reply::{encode_again, encode_failed, encode_list, gathered_head, Reply, ReplyHead};
pub use request::{encode_request, Request, RequestHead, Sender};

/// Version of the messages and of the handle: all ranks of a job must have the same.
pub use crate::comm::handle::VERSION;
/// Most ranks of a job.
pub use crate::rma::request::MAX_RANKS;

/// Follows a request whose sender's deadline has passed while it waited for the reply.
pub const EXPIRED: u8 = b'X';

/// Precedes a reply, any number of times: rank 0 lives, and waits for other ranks.
pub const BEAT: u8 = b'.';

/// Most bytes behind a request's head: 16 contexts × 1024 ranks need well under 1 MiB.
pub const MAX_REQUEST_BODY: u64 = 64 << 20;
/// Most bytes behind a reply's head.
pub const MAX_REPLY_BODY: u64 = 1 << 30;
/// Longest step name, in bytes.
pub const MAX_NAME: usize = 64;
/// Longest sentence of a failure, in bytes; what is longer is cut.
pub const MAX_SENTENCE: usize = 4096;

/// Bytes that are no message of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed(pub &'static str);

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

/// A failure that travels: an `ncclResult_t` and a sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The code.
    pub code: i32,
    /// The sentence.
    pub sentence: String,
}

impl Failure {
    fn encode(&self) -> Vec<u8> {
        let mut end = self.sentence.len().min(MAX_SENTENCE);
        while !self.sentence.is_char_boundary(end) {
            end -= 1;
        }
        let mut bytes = self.code.to_le_bytes().to_vec();
        bytes.extend_from_slice(&self.sentence.as_bytes()[..end]);
        bytes
    }

    fn parse(bytes: &[u8]) -> Result<Self, Malformed> {
        let (code, sentence) = bytes.split_first_chunk::<4>().ok_or(Malformed("a failure without a code"))?;
        if sentence.len() > MAX_SENTENCE {
            return Err(Malformed("a failure's sentence is too long"));
        }
        // It ends up in a log: one line, no terminal controls.
        let sentence = String::from_utf8_lossy(sentence).replace(char::is_control, " ");
        Ok(Self { code: i32::from_le_bytes(*code), sentence })
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut four = [0; 4];
    four.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(four)
}

/// Whether `bytes`, however few, can be the beginning of a message that begins with `magic` and the version.
fn check_start(bytes: &[u8], magic: [u8; 4]) -> Result<(), Malformed> {
    let mut start = [0; 6];
    start[..4].copy_from_slice(&magic);
    start[4..].copy_from_slice(&VERSION.to_le_bytes());
    let there = bytes.len().min(start.len());
    if bytes[..there] != start[..there] {
        return Err(Malformed("not a message of this version of oxygin"));
    }
    Ok(())
}
