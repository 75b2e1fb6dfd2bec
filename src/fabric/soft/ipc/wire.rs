//! What ranks tell each other about memory that they share: at registration, and over the contact sockets.

use crate::sys::wire::{Reader, Writer};

/// Segments of one window. PyTorch's expandable segments are 20 MiB: 20 GiB of them.
pub const MAX_SEGMENTS: usize = 1024;
/// Bytes of a reason.
const MAX_REASON: usize = 160;
/// Bytes of GPU memory that nobody has: sums of sizes below it cannot overflow.
const MAX_BYTES: u64 = 1 << 52;

const SEGMENTS: u8 = 1;
const NOT: u8 = 3;
const HOST_SEGMENTS: u8 = 4;

/// Where a window's memory is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Site {
    /// On the GPU with this PCI address; empty: the driver does not say. Processes number GPUs differently, and do not
    /// see all of them.
    Gpu(String),
    /// In host memory of the driver's, which GPUs may be let to.
    Host,
}

/// How a rank's window can be had by other processes of its host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Offer {
    /// As descriptors of allocations that lie side by side.
    Segments {
        /// Where in them the window starts.
        offset: u64,
        /// Their sizes, bytes.
        sizes: Vec<u64>,
        /// Where they are.
        site: Site,
    },
    /// Not at all.
    Not(String),
}

impl Offer {
    /// The message. (A window that nobody is offered has the empty one.)
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::new();
        match self {
            Self::Segments { offset, sizes, site } => {
                let kind = if let Site::Gpu(_) = site { SEGMENTS } else { HOST_SEGMENTS };
                w.u8(kind).u64(*offset).u32(sizes.len() as u32);
                for &size in sizes {
                    w.u64(size);
                }
                if let Site::Gpu(gpu) = site {
                    w.bytes(cut(gpu));
                }
            }
            Self::Not(why) => {
                w.u8(NOT).bytes(cut(why));
            }
        }
        w.finish()
    }

    /// From a message about a window of `len` bytes; `None`: malformed.
    pub fn parse(message: &[u8], len: u64) -> Option<Self> {
        let mut r = Reader::new(message);
        let offer = match r.u8()? {
            kind @ (SEGMENTS | HOST_SEGMENTS) => {
                let (offset, n) = (r.u64()?, r.u32()? as usize);
                if n == 0 || n > MAX_SEGMENTS {
                    return None;
                }
                let sizes = (0..n).map(|_| r.u64()).collect::<Option<Vec<_>>>()?;
                let site = if kind == SEGMENTS { Site::Gpu(printable(r.bytes()?)) } else { Site::Host };
                Self::Segments { offset, sizes, site }
            }
            NOT => Self::Not(printable(r.bytes()?)),
            _ => return None,
        };
        r.end()?;
        let fits = |offset: u64, total: u64| len <= total && offset <= total - len;
        let ok = match &offer {
            Self::Segments { offset, sizes, .. } => {
                sizes.iter().all(|&s| s > 0 && s < MAX_BYTES) && fits(*offset, sizes.iter().sum())
            }
            Self::Not(_) => true,
        };
        ok.then_some(offer)
    }
}

/// A peer's reason, for the log. What is no text takes more room as text, and is cut once more.
fn printable(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(MAX_REASON)]);
    let mut text: String = text.chars().filter(|c| !c.is_control()).collect();
    text.truncate(cut(&text).len());
    text
}

/// As many whole characters as a reason may have bytes.
fn cut(why: &str) -> &[u8] {
    let end = (0..=why.len().min(MAX_REASON)).rev().find(|&n| why.is_char_boundary(n));
    &why.as_bytes()[..end.unwrap_or(0)]
}

const ASK: u8 = 1;
const DESCRIPTOR: u8 = 2;
const REFUSED: u8 = 4;

/// The body of a datagram between two contact sockets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Datagram {
    /// Send segments of a window.
    Ask {
        /// The window's number.
        window: u32,
        /// The asker's number for this registration.
        round: u32,
        /// The first segment wanted.
        first: u32,
        /// How many.
        count: u32,
    },
    /// One segment.
    Segment {
        /// Of the question.
        round: u32,
        /// Which.
        segment: u32,
        /// What it comes as.
        what: What,
    },
}

/// What a segment comes as.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    /// The descriptor that is attached.
    Descriptor,
    /// It does not come.
    Refused(String),
}

impl Datagram {
    /// The body.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::new();
        match self {
            Self::Ask { window, round, first, count } => {
                w.u8(ASK).u32(*window).u32(*round).u32(*first).u32(*count);
            }
            Self::Segment { round, segment, what } => {
                let kind = match what {
                    What::Descriptor => DESCRIPTOR,
                    What::Refused(_) => REFUSED,
                };
                w.u8(kind).u32(*round).u32(*segment);
                if let What::Refused(why) = what {
                    w.bytes(cut(why));
                }
            }
        }
        w.finish()
    }

    /// From a body.
    pub fn parse(body: &[u8]) -> Option<Self> {
        let mut r = Reader::new(body);
        let datagram = match r.u8()? {
            ASK => Self::Ask { window: r.u32()?, round: r.u32()?, first: r.u32()?, count: r.u32()? },
            kind => {
                let (round, segment) = (r.u32()?, r.u32()?);
                let what = match kind {
                    DESCRIPTOR => What::Descriptor,
                    REFUSED => What::Refused(printable(r.bytes()?)),
                    _ => return None,
                };
                Self::Segment { round, segment, what }
            }
        };
        r.end()?;
        Some(datagram)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn segments(offset: u64, sizes: &[u64]) -> Offer {
        Offer::Segments { offset, sizes: sizes.to_vec(), site: Site::Gpu("0000:1b:00.0".into()) }
    }

    #[test]
    fn offers_round_trip_and_cuts_are_refused() {
        let host = Offer::Segments { offset: 0, sizes: vec![1 << 21], site: Site::Host };
        let offers = [segments(4096, &[1 << 21, 1 << 22]), host, Offer::Not("no handle type".into())];
        for offer in offers {
            let message = offer.encode();
            assert_eq!(Offer::parse(&message, 1 << 20), Some(offer));
            for cut in 0..message.len() {
                assert_eq!(Offer::parse(&message[..cut], 1 << 20), None);
            }
        }
    }

    #[test]
    fn a_window_must_lie_inside_what_is_offered() {
        let parse = |offset, sizes: &[u64], len| Offer::parse(&segments(offset, sizes).encode(), len).is_some();
        assert!(parse(100, &[100, 100], 100));
        assert!(!parse(101, &[100, 100], 100));
        assert!(!parse(0, &[100, 0], 100));
        assert!(!parse(0, &[], 0));
        assert!(!parse(u64::MAX, &[100], 1));
        assert!(!parse(0, &[u64::MAX, 2], 1));
        assert!(!parse(0, &[1; MAX_SEGMENTS + 1], 1));
    }

    #[test]
    fn datagrams_round_trip_and_fit_one() {
        for datagram in [
            Datagram::Ask { window: 3, round: 9, first: 8, count: 2 },
            Datagram::Segment { round: 3, segment: 0, what: What::Descriptor },
            Datagram::Segment { round: 3, segment: 9, what: What::Refused("x".repeat(MAX_REASON)) },
        ] {
            let body = datagram.encode();
            assert!(body.len() <= crate::fabric::soft::peer::contact::MAX_BODY);
            assert_eq!(Datagram::parse(&body), Some(datagram));
        }
    }

    #[test]
    fn reasons_are_cut_between_characters() {
        let parsed = |why: &str| match Offer::parse(&Offer::Not(why.into()).encode(), 0) {
            Some(Offer::Not(why)) => why,
            other => panic!("{other:?}"),
        };
        assert_eq!(parsed("no\n"), "no");
        assert_eq!(parsed(&"ä".repeat(MAX_REASON)), "ä".repeat(MAX_REASON / 2));
        assert_eq!(printable(&[0xff; MAX_REASON]).len(), MAX_REASON / 3 * 3);
    }

    proptest! {
        #[test]
        fn garbage_is_refused_or_parsed_without_harm(
            bytes in proptest::collection::vec(any::<u8>(), 0..200), len: u64,
        ) {
            let _ = (Offer::parse(&bytes, len), Datagram::parse(&bytes));
        }
    }
}
