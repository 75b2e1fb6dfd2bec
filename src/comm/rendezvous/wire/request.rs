//! What a rank sends to rank 0.

use super::{check_start, u32_at, Failure, Malformed, MAX_NAME, MAX_RANKS, MAX_REQUEST_BODY, VERSION};
use crate::comm::handle::Token;

/// Where each thing is in the head, and its values.
mod field {
    use std::ops::Range;
    pub const MAGIC: [u8; 4] = *b"oxyQ";
    pub const STATUS: usize = 6;
    pub const NAME_LEN: usize = 7;
    pub const TOKEN: Range<usize> = 8..24;
    pub const STEP: usize = 24;
    pub const RANK: usize = 28;
    pub const NRANKS: usize = 32;
    pub const COMMON_LEN: usize = 36;
    pub const SLICE_LEN: usize = 40;
    pub const HEAD: usize = 44;
    /// Status: the body is a contribution.
    pub const FINE: u8 = 0;
    /// Status: the body is a failure.
    pub const FAILED: u8 = 1;
}

/// The fixed part of a request. Who sent it is known once the token is compared; that is the caller's.
#[derive(Clone, Copy, Debug)]
pub struct RequestHead {
    /// What the sender shows.
    pub token: Token,
    /// The sender's number of the step.
    pub step: u32,
    /// The sender's rank. Not yet compared with anything.
    pub rank: u32,
    /// How many ranks the sender believes there are.
    pub nranks: u32,
    failed: bool,
    name_len: usize,
    common_len: usize,
    slice_len: usize,
}

impl RequestHead {
    /// Reads the head. `None`: so far so good, but more bytes are needed.
    pub fn parse(bytes: &[u8]) -> Result<Option<Self>, Malformed> {
        check_start(bytes, field::MAGIC)?;
        if bytes.len() < field::HEAD {
            return Ok(None);
        }
        let mut token = [0; 16];
        token.copy_from_slice(&bytes[field::TOKEN]);
        let head = Self {
            token: Token::from_bytes(token),
            step: u32_at(bytes, field::STEP),
            rank: u32_at(bytes, field::RANK),
            nranks: u32_at(bytes, field::NRANKS),
            failed: match bytes[field::STATUS] {
                field::FINE => false,
                field::FAILED => true,
                _ => return Err(Malformed("a request of unknown status")),
            },
            name_len: bytes[field::NAME_LEN].into(),
            common_len: u32_at(bytes, field::COMMON_LEN) as usize,
            slice_len: u32_at(bytes, field::SLICE_LEN) as usize,
        };
        if head.rank >= head.nranks || head.nranks > MAX_RANKS {
            return Err(Malformed("a request from a rank that cannot be"));
        }
        if head.name_len > MAX_NAME {
            return Err(Malformed("a request whose step has too long a name"));
        }
        let addressed = u64::from(head.nranks) * head.slice_len as u64;
        if head.common_len as u64 + addressed > MAX_REQUEST_BODY {
            return Err(Malformed("a request that is too large"));
        }
        Ok(Some(head))
    }

    /// Bytes of the whole request.
    pub fn total(&self) -> usize {
        field::HEAD + self.name_len + self.common_len + self.slice_len * self.nranks as usize
    }
}

/// What a rank brings to a step.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    /// The fixed part.
    pub head: RequestHead,
    /// The step's name on the sender.
    pub name: &'a str,
    /// Bytes for all ranks, or the sender's failure.
    pub common: Result<&'a [u8], Failure>,
    /// Equal slices, one a rank, one behind the other.
    pub addressed: &'a [u8],
}

impl<'a> Request<'a> {
    /// Reads a whole request and nothing but it.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let head = RequestHead::parse(bytes)?.ok_or(Malformed("a request that ends in its head"))?;
        if bytes.len() != head.total() {
            return Err(Malformed("a request of another length than it says"));
        }
        let (name, rest) = bytes[field::HEAD..].split_at(head.name_len);
        let (common, addressed) = rest.split_at(head.common_len);
        let name = std::str::from_utf8(name).map_err(|_| Malformed("a step name that is not UTF-8"))?;
        if name.contains(char::is_control) {
            return Err(Malformed("a step name with control characters"));
        }
        let common = if head.failed { Err(Failure::parse(common)?) } else { Ok(common) };
        Ok(Self { head, name, common, addressed })
    }

    /// Where `addressed` has the slice for `rank`.
    pub fn slice(&self, rank: u32) -> &'a [u8] {
        let len = self.head.slice_len;
        &self.addressed[rank as usize * len..][..len]
    }
}

/// What names a request's sender and step.
#[derive(Clone, Copy)]
pub struct Sender<'a> {
    /// Rank 0's token.
    pub token: Token,
    /// This rank's number of the step.
    pub step: u32,
    /// The step's name.
    pub name: &'a str,
    /// This rank.
    pub rank: u32,
    /// All ranks.
    pub nranks: u32,
}

/// A request as bytes. Fails if it would not pass [`Request::parse`].
pub fn encode_request(
    sender: &Sender<'_>,
    common: Result<&[u8], &Failure>,
    addressed: &[u8],
) -> Result<Vec<u8>, Malformed> {
    let nranks = sender.nranks.max(1) as usize;
    if addressed.len() % nranks != 0 {
        return Err(Malformed("addressed bytes that are not equal slices, one a rank"));
    }
    let sentence;
    let (status, common, addressed) = match common {
        Ok(common) => (field::FINE, common, addressed),
        Err(failure) => {
            sentence = failure.encode();
            (field::FAILED, &sentence[..], &[][..])
        }
    };
    if common.len() as u64 + addressed.len() as u64 > MAX_REQUEST_BODY || sender.name.len() > MAX_NAME {
        return Err(Malformed("a contribution that is too large"));
    }
    let mut bytes = Vec::with_capacity(field::HEAD + sender.name.len() + common.len() + addressed.len());
    bytes.extend_from_slice(&field::MAGIC);
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.push(status);
    bytes.push(sender.name.len() as u8);
    bytes.extend_from_slice(sender.token.bytes());
    for number in [sender.step, sender.rank, sender.nranks, common.len() as u32, (addressed.len() / nranks) as u32] {
        bytes.extend_from_slice(&number.to_le_bytes());
    }
    debug_assert_eq!(bytes.len(), field::HEAD);
    bytes.extend_from_slice(sender.name.as_bytes());
    bytes.extend_from_slice(common);
    bytes.extend_from_slice(addressed);
    Request::parse(&bytes)?;
    Ok(bytes)
}
