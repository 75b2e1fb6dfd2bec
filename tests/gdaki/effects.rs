//! What recorded entries do to memory, by the words of the recording alone.

use crate::support::nic::wait;
use std::sync::atomic::{AtomicU64, AtomicU8, Ordering};

/// Of a long range so many bytes at either end are looked at.
const ENDS: u64 = 1 << 15;

/// Memory of a window.
#[derive(Clone, Copy)]
pub struct Window {
    base: u64,
    bytes: u64,
}

impl Window {
    /// So many words at an address; they stay as long as this is used.
    pub fn new(base: u64, words: usize) -> Self {
        Self { base, bytes: 8 * words as u64 }
    }
}

/// The windows of rank 0 and of rank 1.
pub struct Memory {
    /// Recorded keys; the same place in a list of windows.
    keys: Vec<u32>,
    sides: [Vec<Window>; 2],
}

/// Bytes of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    side: usize,
    window: usize,
    at: u64,
    len: u64,
}

impl Piece {
    fn touches(&self, other: &Self) -> bool {
        (self.side, self.window) == (other.side, other.window)
            && self.at < other.at + other.len
            && other.at < self.at + self.len
    }
}

/// What an entry does.
#[derive(Debug, PartialEq, Eq)]
pub enum Effect {
    /// These bytes come there.
    Copy(Piece, Piece),
    /// Several of them, one behind the other.
    Copies(Vec<(Piece, Piece)>),
    /// Bytes that it carries come there.
    Store(Piece, Vec<u8>),
    /// A word goes up.
    Add(Piece, u64),
    /// Something else may change there.
    Changes(Vec<Piece>),
}

impl Effect {
    /// By the words of a recording; what is at the peer is on this side.
    pub fn read(meaning: &str, side: usize, memory: &Memory) -> Self {
        let words: Vec<_> = meaning.split(' ').skip(6).filter(|w| !["fenced", "signalled"].contains(w)).collect();
        let range = |word: &str, side| memory.range(word, side);
        match words[..] {
            ["nop"] | ["wait", ..] | ["dump", _] => Self::Changes(Vec::new()),
            ["write", "to", to, "from", ref from @ ..] => {
                let to = memory.place(to, side, 0);
                Self::copies(to, from.iter().map(|from| range(from, 0)).collect(), false)
            }
            ["read", "from", from, "to", ref to @ ..] => {
                let from = memory.place(from, side, 0);
                Self::copies(from, to.iter().map(|to| range(to, 0)).collect(), true)
            }
            ["value", "to", to, "bytes", digits] => {
                let byte = |i: usize| u8::from_str_radix(&digits[i..i + 2], 16).expect("digits");
                let bytes: Vec<_> = (0..digits.len()).step_by(2).map(byte).collect();
                Self::Store(memory.place(to, side, bytes.len() as u64), bytes)
            }
            ["add8", "to", to, "value", value, "fields", "0", "old", old] if memory.is_sink(old) => {
                Self::Add(memory.place(to, side, 8), value.parse().expect("a number"))
            }
            ["add4" | "add8" | "swap4", _, to, .., "old", old] => {
                let mut changed = vec![memory.place(to, side, 8)];
                changed.extend((!memory.is_sink(old)).then(|| range(old, 0)));
                Self::Changes(changed)
            }
            _ => panic!("no meaning: {meaning}"),
        }
    }

    /// Of a range that is as long as the pieces, and of these.
    fn copies(mut far: Piece, near: Vec<Piece>, is_read: bool) -> Self {
        let mut all: Vec<_> = near
            .into_iter()
            .map(|near| {
                let there = Piece { len: near.len, ..far };
                far.at += near.len;
                if is_read {
                    (there, near)
                } else {
                    (near, there)
                }
            })
            .collect();
        match all.len() {
            1 => all.pop().map(|(from, to)| Self::Copy(from, to)).expect("one"),
            _ => Self::Copies(all),
        }
    }

    fn pairs(&self) -> Vec<(Piece, Piece)> {
        match self {
            Self::Copy(from, to) => vec![(*from, *to)],
            Self::Copies(all) => all.clone(),
            _ => Vec::new(),
        }
    }

    fn sources(&self) -> Vec<Piece> {
        self.pairs().into_iter().map(|(from, _)| from).collect()
    }

    fn written(&self) -> Vec<Piece> {
        match self {
            Self::Store(to, _) | Self::Add(to, _) => vec![*to],
            Self::Changes(all) => all.clone(),
            Self::Copy(..) | Self::Copies(_) => self.pairs().into_iter().map(|(_, to)| to).collect(),
        }
    }

    /// Whether both may be done in any order: they have the same effect where they meet.
    fn commutes(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Add(a, _), Self::Add(b, _)) => a == b,
            _ => self == other,
        }
    }
}

impl Memory {
    /// The windows that stand for these keys, of both sides, in their order.
    pub fn new(keys: Vec<u32>, sides: [Vec<Window>; 2]) -> Self {
        assert!(sides.iter().all(|side| side.len() == keys.len()));
        Self { keys, sides }
    }

    fn is_sink(&self, range: &str) -> bool {
        let key = u32::from_str_radix(range.split('+').next().unwrap(), 16).expect("a key");
        !self.keys.contains(&key)
    }

    /// KEY+OFFSET.
    fn place(&self, text: &str, side: usize, len: u64) -> Piece {
        let (key, at) = text.split_once('+').expect("a place");
        let key = u32::from_str_radix(key, 16).expect("a key");
        let window = self.keys.iter().position(|known| *known == key).expect("a window of the recording");
        Piece { side, window, at: at.parse().expect("an offset"), len }
    }

    /// KEY+OFFSET*BYTES.
    fn range(&self, text: &str, side: usize) -> Piece {
        let (place, len) = text.split_once('*').expect("a range");
        self.place(place, side, len.parse().expect("bytes"))
    }

    /// The byte of a piece.
    fn byte(&self, piece: &Piece, i: u64) -> &AtomicU8 {
        let window = self.sides[piece.side][piece.window];
        assert!(i < piece.len && piece.at + i < window.bytes, "{piece:?}");
        // SAFETY: inside the window; ranks of this process write it.
        unsafe { &*((window.base + piece.at + i) as *const AtomicU8) }
    }

    fn word(&self, piece: &Piece) -> u64 {
        let window = self.sides[piece.side][piece.window];
        assert!(piece.at % 8 == 0 && piece.at + 8 <= window.bytes, "{piece:?}");
        // SAFETY: as above.
        unsafe { (*((window.base + piece.at) as *const AtomicU64)).load(Ordering::Acquire) }
    }

    /// Fills all that is read with bytes of its own, before anything is done.
    pub fn fill(&self, effects: &[Effect]) {
        for source in effects.iter().flat_map(Effect::sources) {
            looked_at(source.len).for_each(|i| self.byte(&source, i).store(pattern(&source, i), Ordering::Relaxed));
        }
    }

    /// Checks what each effect left where no other one is in its way; puts have no order among themselves. Returns of
    /// how many effects it shows.
    pub fn check(&self, effects: &[Effect]) -> usize {
        let touched: Vec<_> = effects.iter().map(|effect| (effect.written(), effect.sources())).collect();
        let meets = |a: &[Piece], b: &[Piece]| a.iter().any(|a| b.iter().any(|b| a.touches(b)));
        let is_alone = |i: usize| {
            let (written, sources) = &touched[i];
            effects.iter().zip(&touched).all(|(other, (others, read))| {
                !(meets(sources, others)
                    || meets(written, others) && !effects[i].commutes(other)
                    || matches!(effects[i], Effect::Add(..)) && meets(written, read))
            })
        };
        let alone = (0..effects.len()).filter(|&i| is_alone(i));
        alone.filter(|&i| self.shows(&effects[i], effects)).count()
    }

    fn shows(&self, effect: &Effect, all: &[Effect]) -> bool {
        let what = || format!("{effect:?} in memory");
        match effect {
            Effect::Changes(_) => return false,
            Effect::Add(at, _) => {
                let adds = all.iter().filter_map(|other| match other {
                    Effect::Add(to, value) if to == at => Some(*value),
                    _ => None,
                });
                let sum = adds.fold(0, u64::wrapping_add);
                wait(what, || self.word(at) == sum);
            }
            Effect::Store(to, bytes) => {
                wait(what, || (0..).zip(bytes).all(|(i, byte)| self.byte(to, i).load(Ordering::Acquire) == *byte))
            }
            Effect::Copy(..) | Effect::Copies(_) => {
                for (from, to) in effect.pairs() {
                    let is_there = |i| self.byte(&to, i).load(Ordering::Acquire) == pattern(&from, i);
                    wait(what, || looked_at(to.len).all(is_there));
                }
            }
        }
        true
    }
}

/// Which bytes of so many are looked at.
fn looked_at(len: u64) -> impl Iterator<Item = u64> {
    (0..len.min(ENDS)).chain(len.saturating_sub(ENDS).max(ENDS.min(len))..len)
}

/// What a byte of a piece is before anything is done: another one in every window, and far from one in four bytes is
/// the same as its neighbour.
fn pattern(piece: &Piece, i: u64) -> u8 {
    let place = (piece.at + i) ^ (piece.window as u64) << 48 ^ (piece.side as u64) << 56;
    (place.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u8 | 1
}
