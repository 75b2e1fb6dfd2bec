//! The messages between the ranks and rank 0, as bytes.
//!
//! A rank sends one [`Request`], perhaps followed by the byte [`EXPIRED`], and
//! gets one [`Reply`]. Parsers take bytes from anybody: they never panic and
//! never believe a length before it is checked against a limit. Numbers are
//! little-endian.

use crate::comm::handle::Token;
use std::fmt;
use std::ops::Range;

/// Version of the messages and of the handle: all ranks of a job must have the same.
pub const VERSION: u16 = 1;

/// Follows a request whose sender's deadline has passed while it waited for the reply.
pub const EXPIRED: u8 = b'X';

/// Most bytes behind a request's head: 16 contexts × 1024 ranks need well under 1 MiB.
pub const MAX_REQUEST_BODY: u64 = 64 << 20;
/// Most bytes behind a reply's head.
pub const MAX_REPLY_BODY: u64 = 1 << 30;
/// Most ranks of a job.
pub const MAX_RANKS: u32 = 1 << 16;
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

mod request {
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
    /// The sender's count of collective steps.
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
        check_start(bytes, request::MAGIC)?;
        if bytes.len() < request::HEAD {
            return Ok(None);
        }
        let mut token = [0; 16];
        token.copy_from_slice(&bytes[request::TOKEN]);
        let head = Self {
            token: Token::from_bytes(token),
            step: u32_at(bytes, request::STEP),
            rank: u32_at(bytes, request::RANK),
            nranks: u32_at(bytes, request::NRANKS),
            failed: match bytes[request::STATUS] {
                request::FINE => false,
                request::FAILED => true,
                _ => return Err(Malformed("a request of unknown status")),
            },
            name_len: bytes[request::NAME_LEN].into(),
            common_len: u32_at(bytes, request::COMMON_LEN) as usize,
            slice_len: u32_at(bytes, request::SLICE_LEN) as usize,
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
        request::HEAD + self.name_len + self.common_len + self.slice_len * self.nranks as usize
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
        let (name, rest) = bytes[request::HEAD..].split_at(head.name_len);
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
    /// Count of collective steps on this rank.
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
        Ok(common) => (request::FINE, common, addressed),
        Err(failure) => {
            sentence = failure.encode();
            (request::FAILED, &sentence[..], &[][..])
        }
    };
    if common.len() as u64 + addressed.len() as u64 > MAX_REQUEST_BODY || sender.name.len() > MAX_NAME {
        return Err(Malformed("a contribution that is too large"));
    }
    let mut bytes = Vec::with_capacity(request::HEAD + sender.name.len() + common.len() + addressed.len());
    bytes.extend_from_slice(&request::MAGIC);
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.push(status);
    bytes.push(sender.name.len() as u8);
    bytes.extend_from_slice(sender.token.bytes());
    for number in [sender.step, sender.rank, sender.nranks, common.len() as u32, (addressed.len() / nranks) as u32] {
        bytes.extend_from_slice(&number.to_le_bytes());
    }
    debug_assert_eq!(bytes.len(), request::HEAD);
    bytes.extend_from_slice(sender.name.as_bytes());
    bytes.extend_from_slice(common);
    bytes.extend_from_slice(addressed);
    Request::parse(&bytes)?;
    Ok(bytes)
}

mod reply {
    pub const MAGIC: [u8; 4] = *b"oxyA";
    pub const KIND: usize = 6;
    pub const STEP: usize = 8;
    pub const SHARED_LEN: usize = 12;
    pub const OWN_LEN: usize = 16;
    pub const HEAD: usize = 20;
    pub const GATHERED: u8 = 0;
    pub const FAILED: u8 = 1;
    pub const AGAIN: u8 = 2;
}

/// The fixed part of a reply.
#[derive(Clone, Copy, Debug)]
pub struct ReplyHead {
    /// The step it answers.
    pub step: u32,
    kind: u8,
    shared_len: usize,
    own_len: usize,
}

impl ReplyHead {
    /// Reads the head. `None`: so far so good, but more bytes are needed.
    pub fn parse(bytes: &[u8]) -> Result<Option<Self>, Malformed> {
        check_start(bytes, reply::MAGIC)?;
        if bytes.len() < reply::HEAD {
            return Ok(None);
        }
        let head = Self {
            step: u32_at(bytes, reply::STEP),
            kind: bytes[reply::KIND],
            shared_len: u32_at(bytes, reply::SHARED_LEN) as usize,
            own_len: u32_at(bytes, reply::OWN_LEN) as usize,
        };
        if head.shared_len as u64 + head.own_len as u64 > MAX_REPLY_BODY {
            return Err(Malformed("a reply that is too large"));
        }
        Ok(Some(head))
    }

    /// Bytes of the whole reply.
    pub fn total(&self) -> usize {
        reply::HEAD + self.shared_len + self.own_len
    }
}

/// What rank 0 answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// All ranks came. Where in the message each rank's common bytes are, and its bytes for the receiver.
    Gathered {
        /// By rank.
        common: Vec<Range<usize>>,
        /// By sender.
        addressed: Vec<Range<usize>>,
    },
    /// The step failed for everybody.
    Failed(Failure),
    /// Rank 0 is still in an earlier step: come again.
    Again,
}

impl Reply {
    /// Reads a whole reply and nothing but it, for a job of `nranks`.
    pub fn parse(bytes: &[u8], nranks: u32) -> Result<Self, Malformed> {
        let head = ReplyHead::parse(bytes)?.ok_or(Malformed("a reply that ends in its head"))?;
        if bytes.len() != head.total() {
            return Err(Malformed("a reply of another length than it says"));
        }
        let own = reply::HEAD + head.shared_len;
        match head.kind {
            reply::GATHERED => Ok(Self::Gathered {
                common: parse_list(bytes, reply::HEAD..own, nranks)?,
                addressed: parse_list(bytes, own..bytes.len(), nranks)?,
            }),
            reply::FAILED => Failure::parse(&bytes[reply::HEAD..own]).map(Self::Failed),
            reply::AGAIN => Ok(Self::Again),
            _ => Err(Malformed("a reply of unknown kind")),
        }
    }
}

/// Stands where a list's common length would: the lengths differ and follow, one a rank.
const LENGTHS_DIFFER: u32 = u32::MAX;

/// Where the entries of a list of `count` are; the list fills `within`.
fn parse_list(bytes: &[u8], within: Range<usize>, count: u32) -> Result<Vec<Range<usize>>, Malformed> {
    const SHORT: Malformed = Malformed("a list that ends too early");
    let list = &bytes[within.clone()];
    if count > MAX_RANKS {
        return Err(Malformed("more ranks than can be"));
    }
    if list.len() < 4 {
        return Err(SHORT);
    }
    let uniform = u32_at(list, 0);
    let lengths = if uniform == LENGTHS_DIFFER { count as usize } else { 0 };
    if list.len() - 4 < lengths * 4 {
        return Err(SHORT);
    }
    let mut at = within.start + 4 + lengths * 4;
    let mut ranges = Vec::with_capacity(count as usize);
    for i in 0..count as usize {
        let len = if uniform == LENGTHS_DIFFER { u32_at(list, 4 + 4 * i) } else { uniform } as usize;
        if within.end - at < len {
            return Err(SHORT);
        }
        ranges.push(at..at + len);
        at += len;
    }
    if at != within.end {
        return Err(Malformed("a list that is too long"));
    }
    Ok(ranges)
}

/// A list as bytes. The caller keeps the sum below [`MAX_REPLY_BODY`].
pub fn encode_list<'a>(entries: impl Iterator<Item = &'a [u8]> + Clone) -> Vec<u8> {
    let mut lengths = entries.clone().map(<[u8]>::len);
    let first = lengths.next().unwrap_or(0);
    let mut bytes;
    if lengths.all(|len| len == first) {
        bytes = (first as u32).to_le_bytes().to_vec();
    } else {
        bytes = LENGTHS_DIFFER.to_le_bytes().to_vec();
        entries.clone().for_each(|entry| bytes.extend_from_slice(&(entry.len() as u32).to_le_bytes()));
    }
    entries.for_each(|entry| bytes.extend_from_slice(entry));
    bytes
}

fn reply_head(kind: u8, step: u32, shared: usize, own: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(reply::HEAD);
    bytes.extend_from_slice(&reply::MAGIC);
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&[kind, 0]);
    for number in [step, shared as u32, own as u32] {
        bytes.extend_from_slice(&number.to_le_bytes());
    }
    debug_assert_eq!(bytes.len(), reply::HEAD);
    bytes
}

/// Head of a reply that carries `shared` and then `own` bytes of lists.
pub fn gathered_head(step: u32, shared: usize, own: usize) -> Vec<u8> {
    reply_head(reply::GATHERED, step, shared, own)
}

/// A reply that says why the step failed.
pub fn encode_failed(step: u32, failure: &Failure) -> Vec<u8> {
    let body = failure.encode();
    let mut bytes = reply_head(reply::FAILED, step, body.len(), 0);
    bytes.extend_from_slice(&body);
    bytes
}

/// A reply that says to come again.
pub fn encode_again(step: u32) -> Vec<u8> {
    reply_head(reply::AGAIN, step, 0, 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    const SENDER: Sender<'_> =
        Sender { token: Token::from_bytes([7; 16]), step: 5, name: "connect", rank: 2, nranks: 3 };

    proptest! {
        #[test]
        fn requests_round_trip(common in vec(any::<u8>(), 0..100), slice in vec(any::<u8>(), 0..20)) {
            let addressed = slice.repeat(3);
            let bytes = encode_request(&SENDER, Ok(&common), &addressed).unwrap();
            for cut in 0..bytes.len() {
                prop_assert!(RequestHead::parse(&bytes[..cut]).is_ok());
                prop_assert!(Request::parse(&bytes[..cut]).is_err());
            }
            let request = Request::parse(&bytes).unwrap();
            prop_assert_eq!((request.head.step, request.head.rank, request.head.nranks), (5, 2, 3));
            prop_assert!(request.head.token == SENDER.token);
            prop_assert_eq!((request.name, request.common.unwrap()), ("connect", &common[..]));
            let slices = (0..3).map(|rank| Request::parse(&bytes).unwrap().slice(rank).to_vec());
            prop_assert!(slices.into_iter().all(|s| s == slice));
        }

        #[test]
        fn replies_round_trip(entries in vec(vec(any::<u8>(), 0..9), 1..9), own in vec(any::<u8>(), 0..9)) {
            let n = entries.len() as u32;
            let shared = encode_list(entries.iter().map(Vec::as_slice));
            let mine = encode_list(std::iter::repeat_n(&own[..], n as usize));
            let mut bytes = gathered_head(9, shared.len(), mine.len());
            bytes.extend(shared.iter().chain(&mine));
            for cut in 0..bytes.len() {
                prop_assert!(ReplyHead::parse(&bytes[..cut]).is_ok());
                prop_assert!(Reply::parse(&bytes[..cut], n).is_err());
            }
            prop_assert!(Reply::parse(&bytes, n + 1).is_err() || own.is_empty() && entries.iter().all(Vec::is_empty));
            let Reply::Gathered { common, addressed } = Reply::parse(&bytes, n).unwrap() else { panic!() };
            for (range, entry) in common.into_iter().zip(&entries) {
                prop_assert_eq!(&bytes[range], &entry[..]);
            }
            for range in addressed {
                prop_assert_eq!(&bytes[range], &own[..]);
            }
        }

        #[test]
        fn changed_bytes_never_panic(changes in vec((0..90_usize, any::<u8>()), 1..6), extra in vec(any::<u8>(), 0..4)) {
            let mut request = encode_request(&SENDER, Ok(b"abc"), b"xxyyzz").unwrap();
            let list = encode_list([&b"a"[..], b"bc", b""].into_iter());
            let mut answer = gathered_head(5, list.len(), list.len());
            answer.extend(list.iter().chain(&list));
            for bytes in [&mut request, &mut answer] {
                for (at, value) in &changes {
                    let at = at % bytes.len();
                    bytes[at] = *value;
                }
                bytes.extend(&extra);
            }
            if let Ok(request) = Request::parse(&request) {
                (0..request.head.nranks.min(9)).for_each(|rank| { request.slice(rank); });
            }
            if let Ok(Reply::Gathered { common, addressed }) = Reply::parse(&answer, 3) {
                prop_assert!(common.iter().chain(&addressed).all(|range| answer.get(range.clone()).is_some()));
            }
        }

        #[test]
        fn anything_parses_or_fails(mut bytes in vec(any::<u8>(), 0..200), ours: bool) {
            if ours && bytes.len() > 7 {
                bytes[..7].copy_from_slice(b"oxyQ\x01\0\0");
            }
            let _ = Request::parse(&bytes);
            if ours && bytes.len() > 7 {
                bytes[..7].copy_from_slice(b"oxyA\x01\0\0");
            }
            let _ = Reply::parse(&bytes, 4);
        }
    }

    #[test]
    fn failures_travel_in_one_line_and_within_limits() {
        let failure = Failure { code: 2, sentence: "é".repeat(MAX_SENTENCE) };
        let bytes = encode_failed(1, &failure);
        let Reply::Failed(read) = Reply::parse(&bytes, 2).unwrap() else { panic!() };
        assert!(read.code == 2 && read.sentence.len() == MAX_SENTENCE);
        let failure = Failure { code: 2, sentence: "a\x1b[0m\nb".into() };
        let bytes = encode_request(&SENDER, Err(&failure), b"not sent").unwrap_err();
        assert!(bytes.0.contains("slices"));
        let bytes = encode_request(&SENDER, Err(&failure), b"").unwrap();
        assert_eq!(Request::parse(&bytes).unwrap().common.unwrap_err().sentence, "a [0m b");
    }

    #[test]
    fn sizes_are_checked_before_they_are_believed() {
        let mut bytes = encode_request(&SENDER, Ok(b""), b"").unwrap();
        bytes[request::SLICE_LEN..][..4].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(RequestHead::parse(&bytes).is_err());
        let head = reply_head(reply::GATHERED, 1, u32::MAX as usize, u32::MAX as usize);
        assert!(ReplyHead::parse(&head).is_err());
        assert!(RequestHead::parse(b"GET / HTTP/1.1").is_err());
        assert!(RequestHead::parse(b"ox").unwrap().is_none());
    }
}
