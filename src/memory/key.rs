//! Window keys of the soft fabric: what `lkey` and `rkey` of an operation say of its windows beside their number.

/// A window's key. Window numbers stay below `OPEN`, so a key with any of these bits is never found among host windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Key(pub u32);

impl Key {
    /// The window is GPU memory, which the CPU cannot touch.
    const GPU: u32 = 1 << 31;
    /// Of the key of a signal's message, see [`Key::behind`]; alone beside a number: see [`Key::of_import`].
    const BEHIND: u32 = 1 << 30;
    /// Every GPU of the process that registered the window may load from it and store to it.
    const OPEN: u32 = 1 << 29;

    /// Of GPU window `number`; `is_open`: every GPU of this process may load from it and store to it.
    #[inline]
    pub const fn gpu(number: u32, is_open: bool) -> Self {
        Self(number | Self::GPU | if is_open { Self::OPEN } else { 0 })
    }

    /// Of the `n`th window of another process that is mapped here: the key of none of this rank's.
    #[inline]
    pub const fn of_import(n: u32) -> Self {
        Self(n & (Self::BEHIND - 1) | Self::BEHIND)
    }

    /// Whether the window is GPU memory.
    #[inline(always)]
    pub const fn is_on_gpu(self) -> bool {
        self.0 & Self::GPU != 0
    }

    /// Whether it is a window in host memory, registered by whoever has the key.
    #[inline(always)]
    pub const fn is_in_host_memory(self) -> bool {
        self.0 & (Self::GPU | Self::BEHIND | Self::OPEN) == 0
    }

    /// Whether it is GPU memory that every GPU of its process may load from and store to.
    #[inline(always)]
    pub const fn is_open(self) -> bool {
        self.0 & Self::OPEN != 0
    }

    /// The number of the GPU window.
    #[inline(always)]
    pub const fn number(self) -> u32 {
        self.0 & !(Self::GPU | Self::OPEN)
    }

    /// The same in the message of a signal that is applied behind what its sender has put into GPU memory, although the
    /// signal itself is in host memory.
    #[inline(always)]
    pub const fn behind(self, is_behind: bool) -> Self {
        Self(self.0 | if is_behind { Self::BEHIND } else { 0 })
    }

    /// Whether a signal is applied behind what its sender has put into GPU memory.
    #[inline(always)]
    pub const fn is_behind(self) -> bool {
        self.0 & (Self::GPU | Self::BEHIND) != 0
    }

    /// The key that [`Key::behind`] was made from.
    #[inline(always)]
    pub const fn signalled(self) -> Self {
        Self(self.0 & !Self::BEHIND)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_says_what_it_was_made_from() {
        for open in [false, true] {
            let key = Key::gpu(7, open);
            assert_eq!((key.is_on_gpu(), key.is_open(), key.number(), key.is_behind()), (true, open, 7, true));
        }
        let host = Key(7);
        assert_eq!((host.is_on_gpu(), host.is_open(), host.number(), host.is_behind()), (false, false, 7, false));
        assert!(host.behind(true).is_behind() && !host.behind(false).is_behind());
        assert_eq!(host.behind(true).signalled(), host);
        assert_ne!(Key::of_import(7), host);
        let of_others = [Key::of_import(7), Key::gpu(7, false), Key::gpu(7, true), host.behind(true)];
        assert!(host.is_in_host_memory() && !of_others.iter().any(|key| key.is_in_host_memory()));
        assert!(!Key::of_import(u32::MAX).is_on_gpu());
    }
}
