//! What goes over a connection: a hello, then fixed headers, each with or without data behind it.

use std::io::{self, Read, Write};
use std::net::TcpStream;

/// What only the ranks of one communicator know.
pub type Token = [u8; 16];

/// Data is moved in pieces of at most this many bytes.
pub const CHUNK: usize = 1 << 20;

/// The first bytes on a connection.
pub struct Hello {
    /// The token from the listener's handle.
    pub token: Token,
    /// Who opened the connection.
    pub rank: u32,
}

impl Hello {
    /// Writes the hello.
    pub fn send(&self, to: &mut TcpStream) -> io::Result<()> {
        to.write_all(&self.token)?;
        to.write_all(&self.rank.to_le_bytes())
    }

    /// Reads a hello.
    pub fn receive(from: &mut TcpStream) -> io::Result<Self> {
        let (mut token, mut rank) = (Token::default(), [0; 4]);
        from.read_exact(&mut token)?;
        from.read_exact(&mut rank)?;
        Ok(Self { token, rank: u32::from_le_bytes(rank) })
    }
}

/// What a message asks of its receiver.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
pub enum Kind {
    /// `len` bytes follow; write them.
    Put = 1,
    /// Add `value` to a word.
    Signal = 2,
    /// Send `len` bytes back.
    Get = 3,
    /// The sender closes in good order.
    Bye = 4,
}

/// One message.
#[derive(Clone, Copy, Debug)]
pub struct Header {
    /// What to do.
    pub kind: Kind,
    /// In which window.
    pub window: u64,
    /// Where in it, bytes.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// What a signal adds.
    pub value: u64,
}

impl Header {
    /// Writes the header.
    pub fn send(&self, to: &mut TcpStream) -> io::Result<()> {
        let words = [self.kind as u64, self.window, self.offset, self.len, self.value];
        let mut bytes = [0; 40];
        for (slot, word) in bytes.chunks_exact_mut(8).zip(words) {
            slot.copy_from_slice(&word.to_le_bytes());
        }
        to.write_all(&bytes)
    }

    /// Reads a header.
    pub fn receive(from: &mut TcpStream) -> io::Result<Self> {
        let mut bytes = [0; 40];
        from.read_exact(&mut bytes)?;
        let word = |i: usize| u64::from_le_bytes(bytes[8 * i..8 * i + 8].try_into().expect("eight bytes"));
        let kind = match word(0) {
            1 => Kind::Put,
            2 => Kind::Signal,
            3 => Kind::Get,
            4 => Kind::Bye,
            other => return Err(io::Error::other(format!("message kind {other}"))),
        };
        Ok(Self { kind, window: word(1), offset: word(2), len: word(3), value: word(4) })
    }
}
