//! What goes over a data connection: one greeting each way, then frames.
//!
//! The rank that opened a connection (the initiator) sends puts and get requests on it; the rank that accepted it (the
//! target) sends back the bytes of gets and refusals. Everything is little-endian. Each format names its byte ranges
//! once, earns trust in one `check` and has a plain value for the rest of the program; parsing touches nothing but the
//! bytes it is given.

use std::ops::Range;

/// Most bytes of payload that a frame may carry. What is sent is [`CHUNK`](super::CHUNK); the rest is headroom.
pub const MAX_PAYLOAD: u32 = 1 << 20;

/// Most connections of a set: the express one, the middle one and 16 stripes. Each is one count behind a signal.
pub const MAX_STRIPES: usize = 18;

/// A frame's header, counts excluded.
pub const HEADER: usize = 48;

/// Largest header with its counts.
pub const MAX_HEADER: usize = HEADER + 4 * MAX_STRIPES;

/// Either greeting.
pub const HELLO: usize = 48;

fn u16_at(b: &[u8], r: Range<usize>) -> u16 {
    u16::from_le_bytes(b[r].try_into().expect("two bytes"))
}

fn u32_at(b: &[u8], r: Range<usize>) -> u32 {
    u32::from_le_bytes(b[r].try_into().expect("four bytes"))
}

fn u64_at(b: &[u8], r: Range<usize>) -> u64 {
    u64::from_le_bytes(b[r].try_into().expect("eight bytes"))
}

/// Why bytes are no greeting or no frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed(pub &'static str);

/// The first bytes of a connection, in both directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Sent by the target, as its consent.
    pub answer: bool,
    /// The secret of the rank that this is sent to.
    pub token: [u8; 16],
    /// The sender's rank.
    pub from: u32,
    /// The rank it is meant for.
    pub to: u32,
    /// Ranks in the communicator.
    pub nranks: u32,
    /// Which connection of the pair this is, below `stripes`.
    pub stripe: u16,
    /// Connections that the initiator opens; 0: this one carries signs of life and nothing else.
    pub stripes: u16,
    /// How long the sender lets peers be silent, ms; 0: it does not say.
    pub silence: u32,
}

mod hello {
    use std::ops::Range;
    pub const MAGIC: Range<usize> = 0..8;
    pub const TOKEN: Range<usize> = 8..24;
    pub const FROM: Range<usize> = 24..28;
    pub const TO: Range<usize> = 28..32;
    pub const NRANKS: Range<usize> = 32..36;
    pub const STRIPE: Range<usize> = 36..38;
    pub const STRIPES: Range<usize> = 38..40;
    pub const SILENCE: Range<usize> = 40..44;
    pub const ZERO: Range<usize> = 44..48;
    /// The last byte is the version of everything in this file.
    pub const CALL: &[u8; 8] = b"oxyTCPc\x05";
    pub const ANSWER: &[u8; 8] = b"oxyTCPa\x05";
}

impl Hello {
    fn check(b: &[u8; HELLO]) -> Result<(), Malformed> {
        if &b[hello::MAGIC] != hello::CALL && &b[hello::MAGIC] != hello::ANSWER {
            return Err(Malformed("not a greeting of this version"));
        }
        let (from, to, nranks) = (u32_at(b, hello::FROM), u32_at(b, hello::TO), u32_at(b, hello::NRANKS));
        if from >= nranks || to >= nranks {
            return Err(Malformed("a rank outside the communicator"));
        }
        let (stripe, stripes) = (u16_at(b, hello::STRIPE), u16_at(b, hello::STRIPES));
        if (stripe, stripes) != (0, 0) && stripe >= stripes || stripes as usize > MAX_STRIPES {
            return Err(Malformed("a stripe that cannot be"));
        }
        if b[hello::ZERO].iter().any(|&x| x != 0) {
            return Err(Malformed("reserved bytes that are not zero"));
        }
        Ok(())
    }

    /// Whether what follows are signs of life.
    pub fn is_life(&self) -> bool {
        self.stripes == 0
    }

    /// Reads a greeting.
    pub fn parse(b: &[u8; HELLO]) -> Result<Self, Malformed> {
        Self::check(b)?;
        Ok(Self {
            answer: &b[hello::MAGIC] == hello::ANSWER,
            token: b[hello::TOKEN].try_into().expect("sixteen bytes"),
            from: u32_at(b, hello::FROM),
            to: u32_at(b, hello::TO),
            nranks: u32_at(b, hello::NRANKS),
            stripe: u16_at(b, hello::STRIPE),
            stripes: u16_at(b, hello::STRIPES),
            silence: u32_at(b, hello::SILENCE),
        })
    }

    /// Writes it.
    pub fn emit(&self) -> [u8; HELLO] {
        let mut b = [0; HELLO];
        b[hello::MAGIC].copy_from_slice(if self.answer { hello::ANSWER } else { hello::CALL });
        b[hello::TOKEN].copy_from_slice(&self.token);
        b[hello::FROM].copy_from_slice(&self.from.to_le_bytes());
        b[hello::TO].copy_from_slice(&self.to.to_le_bytes());
        b[hello::NRANKS].copy_from_slice(&self.nranks.to_le_bytes());
        b[hello::STRIPE].copy_from_slice(&self.stripe.to_le_bytes());
        b[hello::STRIPES].copy_from_slice(&self.stripes.to_le_bytes());
        b[hello::SILENCE].copy_from_slice(&self.silence.to_le_bytes());
        b
    }
}

/// Bytes of a window of the rank that the frame goes to (of the sender, in an answer).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowBytes {
    /// Window number.
    pub rkey: u32,
    /// Address in the target's address space.
    pub addr: u64,
    /// Bytes, at most [`MAX_PAYLOAD`].
    pub len: u32,
}

/// A signal behind a put frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bell {
    /// Window number.
    pub rkey: u32,
    /// Address of the word.
    pub addr: u64,
    /// What to add.
    pub value: u64,
    /// The number of put frames of its lane that the signal waits for, one count a stripe, follows the header.
    pub counted: bool,
}

/// Why a target refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Refusal {
    /// The destination of a put is outside its window, or there is no such window.
    Put = 1,
    /// The source of a get is.
    Get = 2,
    /// The word of a signal is, or it is not 8-byte aligned.
    Signal = 3,
    /// The target keeps the order of as many contexts as it can.
    Contexts = 4,
    /// What was on its way to GPU memory found its window gone.
    Late = 5,
    /// The word of an atomic operation is outside its window, there is no such window, or it is not aligned.
    Atomic = 6,
}

/// A frame's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame {
    /// `place.len` bytes follow, for that place; then the signal is due.
    Put {
        /// The lane's context.
        context: u32,
        /// Destination.
        place: WindowBytes,
        /// What comes after the bytes.
        bell: Option<Bell>,
    },
    /// Asks for bytes. Answered in the order of asking, each by one `Data` or `Refused`.
    Get {
        /// The lane's context.
        context: u32,
        /// Source.
        place: WindowBytes,
    },
    /// The bytes that the oldest unanswered get asked for.
    Data {
        /// Bytes that follow.
        len: u32,
    },
    /// A put, get or signal was not carried out, and nothing else of its context will be: that lane is over, others
    /// go on. A get is answered by this in its turn.
    Refused {
        /// Which part of it.
        why: Refusal,
        /// The lane's context.
        context: u32,
        /// The place named.
        place: WindowBytes,
    },
    /// The sender closes in good order; nothing follows.
    Fin,
    /// Asks for a change of the word at `place`, due as a signal is. The counts follow, if it has them, then an
    /// [`AtomicRequest`](super::super::atomic::AtomicRequest). Answered by one `Fetched`, on any connection, or
    /// `Refused`.
    Atomic {
        /// The lane's context.
        context: u32,
        /// The word.
        place: WindowBytes,
        /// It waits for put frames of its lane as many as the counts say, one a stripe.
        counted: bool,
    },
    /// An atomic operation was carried out.
    Fetched {
        /// The context that asked.
        context: u32,
        /// The operation's number there.
        seq: u32,
        /// What the word held before.
        value: u64,
    },
    /// No more of a context comes on this connection.
    End {
        /// The lane's context.
        context: u32,
        /// The connections on which this is said, a bit each.
        conns: u32,
    },
    /// Asks for a word once the puts of its lane before it are visible, due as a signal is. The counts follow, if it
    /// has them. Answered by one `Fenced`, on any connection, or `Refused`.
    Fence {
        /// The lane's context.
        context: u32,
        /// Its number among those of its lane.
        number: u32,
        /// It waits for put frames of its lane as many as the counts say, one a stripe.
        counted: bool,
    },
    /// All puts before a fence, and before earlier ones of its lane, are visible.
    Fenced {
        /// The context that asked.
        context: u32,
        /// The fence's number there.
        number: u32,
    },
}

mod field {
    use std::ops::Range;
    pub const KIND: usize = 0;
    pub const FLAGS: usize = 1;
    pub const WHY: Range<usize> = 2..4;
    pub const CONTEXT: Range<usize> = 4..8;
    pub const LEN: Range<usize> = 8..12;
    pub const RKEY: Range<usize> = 12..16;
    pub const ADDR: Range<usize> = 16..24;
    pub const BELL_RKEY: Range<usize> = 24..28;
    pub const ZERO: Range<usize> = 28..32;
    pub const BELL_ADDR: Range<usize> = 32..40;
    pub const BELL_VALUE: Range<usize> = 40..48;
}

mod kind {
    pub const PUT: u8 = 0xa1;
    pub const GET: u8 = 0xa2;
    pub const DATA: u8 = 0xa3;
    pub const REFUSED: u8 = 0xa4;
    pub const FIN: u8 = 0xa5;
    pub const END: u8 = 0xa6;
    pub const ATOMIC: u8 = 0xa7;
    pub const FETCHED: u8 = 0xa8;
    pub const FENCE: u8 = 0xa9;
    pub const FENCED: u8 = 0xaa;
}

mod flag {
    pub const BELL: u8 = 1;
    pub const COUNTED: u8 = 2;
}

impl Frame {
    fn check(b: &[u8; HEADER]) -> Result<(), Malformed> {
        let (kind, flags) = (b[field::KIND], b[field::FLAGS]);
        if !(kind::PUT..=kind::FENCED).contains(&kind) {
            return Err(Malformed("an unknown kind of frame"));
        }
        if flags & !(flag::BELL | flag::COUNTED) != 0
            || (flags == flag::COUNTED) != (flags != 0 && matches!(kind, kind::ATOMIC | kind::FENCE))
            || (flags != 0 && !matches!(kind, kind::PUT | kind::ATOMIC | kind::FENCE))
            || b[field::ZERO] != [0; 4]
        {
            return Err(Malformed("flags that do not fit"));
        }
        if u32_at(b, field::LEN) > MAX_PAYLOAD {
            return Err(Malformed("a frame that is too long"));
        }
        if kind == kind::REFUSED && !(1..=6).contains(&u16_at(b, field::WHY)) {
            return Err(Malformed("an unknown refusal"));
        }
        Ok(())
    }

    /// Reads a header.
    #[inline]
    pub fn parse(b: &[u8; HEADER]) -> Result<Self, Malformed> {
        Self::check(b)?;
        let context = u32_at(b, field::CONTEXT);
        let place =
            WindowBytes { rkey: u32_at(b, field::RKEY), addr: u64_at(b, field::ADDR), len: u32_at(b, field::LEN) };
        Ok(match b[field::KIND] {
            kind::PUT => Frame::Put {
                context,
                place,
                bell: (b[field::FLAGS] & flag::BELL != 0).then(|| Bell {
                    rkey: u32_at(b, field::BELL_RKEY),
                    addr: u64_at(b, field::BELL_ADDR),
                    value: u64_at(b, field::BELL_VALUE),
                    counted: b[field::FLAGS] & flag::COUNTED != 0,
                }),
            },
            kind::GET => Frame::Get { context, place },
            kind::DATA => Frame::Data { len: place.len },
            kind::REFUSED => {
                let why = match u16_at(b, field::WHY) {
                    1 => Refusal::Put,
                    2 => Refusal::Get,
                    3 => Refusal::Signal,
                    4 => Refusal::Contexts,
                    6 => Refusal::Atomic,
                    _ => Refusal::Late,
                };
                Frame::Refused { why, context, place }
            }
            kind::FIN => Frame::Fin,
            kind::ATOMIC => Frame::Atomic { context, place, counted: b[field::FLAGS] & flag::COUNTED != 0 },
            kind::FETCHED => Frame::Fetched { context, seq: place.rkey, value: place.addr },
            kind::FENCE => Frame::Fence { context, number: place.rkey, counted: b[field::FLAGS] & flag::COUNTED != 0 },
            kind::FENCED => Frame::Fenced { context, number: place.rkey },
            _ => Frame::End { context, conns: place.rkey },
        })
    }

    /// Writes it; the counts, if the signal has them, go behind it.
    #[inline]
    pub fn emit(&self) -> [u8; HEADER] {
        let mut b = [0; HEADER];
        let mut lane = |context: u32, place: &WindowBytes| {
            b[field::CONTEXT].copy_from_slice(&context.to_le_bytes());
            b[field::LEN].copy_from_slice(&place.len.to_le_bytes());
            b[field::RKEY].copy_from_slice(&place.rkey.to_le_bytes());
            b[field::ADDR].copy_from_slice(&place.addr.to_le_bytes());
        };
        match self {
            Frame::Put { context, place, bell } => {
                lane(*context, place);
                b[field::KIND] = kind::PUT;
                if let Some(bell) = bell {
                    b[field::FLAGS] = if bell.counted { flag::BELL | flag::COUNTED } else { flag::BELL };
                    b[field::BELL_RKEY].copy_from_slice(&bell.rkey.to_le_bytes());
                    b[field::BELL_ADDR].copy_from_slice(&bell.addr.to_le_bytes());
                    b[field::BELL_VALUE].copy_from_slice(&bell.value.to_le_bytes());
                }
            }
            Frame::Get { context, place } => {
                lane(*context, place);
                b[field::KIND] = kind::GET;
            }
            Frame::Data { len } => {
                b[field::LEN].copy_from_slice(&len.to_le_bytes());
                b[field::KIND] = kind::DATA;
            }
            Frame::Refused { why, context, place } => {
                lane(*context, place);
                b[field::KIND] = kind::REFUSED;
                b[field::WHY].copy_from_slice(&(*why as u16).to_le_bytes());
            }
            Frame::Fin => b[field::KIND] = kind::FIN,
            Frame::Atomic { context, place, counted } => {
                lane(*context, place);
                b[field::KIND] = kind::ATOMIC;
                b[field::FLAGS] = if *counted { flag::COUNTED } else { 0 };
            }
            Frame::Fetched { context, seq, value } => {
                lane(*context, &WindowBytes { rkey: *seq, addr: *value, len: 0 });
                b[field::KIND] = kind::FETCHED;
            }
            Frame::End { context, conns } => {
                lane(*context, &WindowBytes { rkey: *conns, addr: 0, len: 0 });
                b[field::KIND] = kind::END;
            }
            Frame::Fence { context, number, counted } => {
                lane(*context, &WindowBytes { rkey: *number, addr: 0, len: 0 });
                b[field::KIND] = kind::FENCE;
                b[field::FLAGS] = if *counted { flag::COUNTED } else { 0 };
            }
            Frame::Fenced { context, number } => {
                lane(*context, &WindowBytes { rkey: *number, addr: 0, len: 0 });
                b[field::KIND] = kind::FENCED;
            }
        }
        b
    }
}

/// Put frames of a lane, by stripe; wraps.
pub type Counts = [u32; MAX_STRIPES];

/// Reads the counts of `stripes` stripes, 4 bytes each.
pub fn parse_counts(b: &[u8], stripes: usize) -> Counts {
    let mut counts = [0; MAX_STRIPES];
    for (i, count) in counts.iter_mut().take(stripes).enumerate() {
        *count = u32_at(b, 4 * i..4 * i + 4);
    }
    counts
}

#[cfg(test)]
#[path = "wire_tests.rs"]
mod tests;
