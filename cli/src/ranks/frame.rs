//! Messages between a rank and the hub: a length, a kind, a payload.

use std::io::{self, Write};

/// Longest payload that anybody accepts; a longer one is garbage from a stranger.
const MAX_PAYLOAD: usize = 64 << 20;
/// Bytes in front of the payload: u32 length, u8 kind.
const HEADER: usize = 5;

/// What a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Rank to hub over TCP, first: magic, rank, ranks, options.
    Hello = 1,
    /// Rank to hub: name of the step, deadline, contribution.
    Gather = 2,
    /// Rank to hub, last: the rank's result.
    Done = 3,
    /// Rank to hub, last: why it gave up.
    Fail = 4,
    /// Hub to rank: everybody's contributions.
    Gathered = 5,
    /// Hub to rank: why the run is over.
    Abort = 6,
    /// Hub to rank over TCP, after the hello: the rank has its place.
    Welcome = 7,
}

/// One message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// What it is.
    pub kind: Kind,
    /// Its payload.
    pub payload: Vec<u8>,
}

impl Frame {
    /// Bytes on the wire.
    pub fn encode(&self) -> Vec<u8> {
        let mut wire = Vec::with_capacity(HEADER + self.payload.len());
        wire.extend((self.payload.len() as u32).to_le_bytes());
        wire.push(self.kind as u8);
        wire.extend(&self.payload);
        wire
    }

    /// Sends it.
    pub fn write(&self, to: &mut impl Write) -> io::Result<()> {
        to.write_all(&self.encode())
    }

    /// Takes one whole message from the front of `buffer`; `None`: more bytes needed.
    pub fn take(buffer: &mut Vec<u8>) -> io::Result<Option<Self>> {
        let Some((header, rest)) = buffer.split_at_checked(HEADER) else { return Ok(None) };
        let (len, kind) = parse_header(header)?;
        if rest.len() < len {
            return Ok(None);
        }
        let payload = rest[..len].to_vec();
        buffer.drain(..HEADER + len);
        Ok(Some(Self { kind, payload }))
    }
}

fn parse_header(header: &[u8]) -> io::Result<(usize, Kind)> {
    let bad = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
    let len = u32::from_le_bytes([header[0], header[1], header[2], header[3]]) as usize;
    if len > MAX_PAYLOAD {
        return Err(bad(format!("a message of {len} bytes")));
    }
    let kind = [Kind::Hello, Kind::Gather, Kind::Done, Kind::Fail, Kind::Gathered, Kind::Abort, Kind::Welcome]
        .into_iter()
        .find(|&k| k as u8 == header[4])
        .ok_or_else(|| bad(format!("a message of kind {}", header[4])))?;
    Ok((len, kind))
}

/// Appends `bytes` with their length in front.
pub fn put_bytes(to: &mut Vec<u8>, bytes: &[u8]) {
    to.extend((bytes.len() as u32).to_le_bytes());
    to.extend(bytes);
}

/// Takes what [`put_bytes`] appended from the front of `from`.
pub fn take_bytes<'a>(from: &mut &'a [u8]) -> Option<&'a [u8]> {
    let len = take_u32(from)? as usize;
    let (bytes, rest) = from.split_at_checked(len)?;
    *from = rest;
    Some(bytes)
}

/// Takes a little-endian number from the front of `from`.
pub fn take_u32(from: &mut &[u8]) -> Option<u32> {
    let (bytes, rest) = from.split_first_chunk::<4>()?;
    *from = rest;
    Some(u32::from_le_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_survive_any_cut() {
        let frames = [
            Frame { kind: Kind::Gather, payload: b"step".to_vec() },
            Frame { kind: Kind::Done, payload: vec![] },
            Frame { kind: Kind::Abort, payload: vec![7; 300] },
        ];
        let wire: Vec<u8> = frames.iter().flat_map(Frame::encode).collect();
        for cut in 0..wire.len() {
            let mut got = Vec::new();
            let mut buffer = Vec::new();
            for part in [&wire[..cut], &wire[cut..]] {
                buffer.extend(part);
                while let Some(frame) = Frame::take(&mut buffer).expect("well-formed") {
                    got.push(frame);
                }
            }
            assert_eq!(got, frames);
        }
    }

    #[test]
    fn garbage_is_an_error_not_an_allocation() {
        assert!(Frame::take(&mut b"GET / HTTP/1.1\r\n".to_vec()).is_err());
        assert!(Frame::take(&mut vec![0, 0, 0, 0, 99]).is_err());
        assert_eq!(take_bytes(&mut &[9, 0, 0, 0, 1][..]), None);
    }
}
