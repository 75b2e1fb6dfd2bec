//! What a connect request carries, so that the listener knows whose it is: the job's random token, rank and context.
//! It comes from anybody who can reach the port: `parse` is the one place where it earns trust.

use crate::fabric::verbs::wire::Token;

/// "oxIW", first in every greeting.
const MAGIC: u32 = u32::from_le_bytes(*b"oxIW");
/// Of the layout below.
const VERSION: u32 = 1;

/// Whose connect request it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Greeting {
    /// The listener's token.
    pub token: Token,
    /// The rank that connects.
    pub rank: u32,
    /// Which context of the set.
    pub context: u32,
}

impl Greeting {
    /// Bytes.
    pub const LEN: usize = 32;

    /// The message.
    pub fn emit(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        out[..4].copy_from_slice(&MAGIC.to_le_bytes());
        out[4..8].copy_from_slice(&VERSION.to_le_bytes());
        out[8..12].copy_from_slice(&self.rank.to_le_bytes());
        out[12..16].copy_from_slice(&self.context.to_le_bytes());
        out[16..].copy_from_slice(&self.token);
        out
    }

    /// Reads a message; some devices hand on zeros behind it.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let (head, padding) = bytes.split_first_chunk::<{ Self::LEN }>()?;
        let (words, token) = head.split_first_chunk::<16>()?;
        let word = |i: usize| Some(u32::from_le_bytes(*words.get(4 * i..)?.first_chunk()?));
        if word(0)? != MAGIC || word(1)? != VERSION || padding.iter().any(|&b| b != 0) {
            return None;
        }
        Some(Self { rank: word(2)?, context: word(3)?, token: token.try_into().ok()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn greetings_come_back(rank: u32, context: u32, token: Token, padding in 0usize..9) {
            let greeting = Greeting { token, rank, context };
            let mut bytes = greeting.emit().to_vec();
            bytes.resize(Greeting::LEN + padding, 0);
            prop_assert_eq!(Greeting::parse(&bytes), Some(greeting));
            bytes.push(1);
            prop_assert_eq!(Greeting::parse(&bytes), None);
            prop_assert_eq!(Greeting::parse(&bytes[..Greeting::LEN - 1]), None);
        }

        #[test]
        fn garbage_is_no_greeting(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            prop_assert_eq!(Greeting::parse(&bytes), None);
        }
    }
}
