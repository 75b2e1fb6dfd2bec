//! `OXYGIN_GPU_ISSUE`: which of several correct ways the engine takes. For measuring on new hardware.

/// The ways.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// Flights that may be up at once: with 2 the GPU need not idle between them.
    pub flights: usize,
    /// Operations that must have gathered before a flight starts while another is up. Starting one costs the caller
    /// 2 to 6 µs in the driver, however much it carries.
    pub gather: usize,
    /// A copy of this many bytes or more goes on a stream of its own, so that what is small does not wait behind it;
    /// 0: none does. The price: its signal starts only when the CPU has seen that the copy is done.
    pub bulk: u64,
    /// A put that begins where the one before ended becomes part of its copy, and a signal that was just added to is
    /// stored once.
    pub merge: bool,
    /// The largest copy, in bytes, that the courier takes; 0: there is no courier. At most 64 KiB.
    pub courier: u64,
    /// Blocks of hands that the courier brings for large copies; 0: none. At most 128.
    pub hands: u32,
    /// The largest copy from another GPU, bytes, that hands take when it comes alone; 0: none.
    pub far: u64,
    /// The streams are in a context of our own, where nothing of the application can hold them up.
    pub own: bool,
    /// Whether the helper thread works beside the callers while GPU transfers come thick: 0 never, 1 where there are cores for
    /// it, 2 always.
    pub helper: u32,
}

impl Default for Tuning {
    fn default() -> Self {
        Self {
            flights: 2,
            gather: 8,
            bulk: 4 << 20,
            merge: true,
            courier: 8192,
            hands: 32,
            far: 2 << 20,
            own: true,
            helper: 1,
        }
    }
}

/// What `parse` takes, for people.
pub const ACCEPTED: &str =
    "words with commas between: flights=1 to 4, gather=1 to 1024, bulk=BYTES (0: off), merge=0 or 1, \
                            courier=BYTES (up to 65536; 0: off), hands=0 to 128, far=BYTES (0: off), own=0 or 1, helper=0 to 2";

impl Tuning {
    /// The default with what the words change; `None`: a word or value that does not exist.
    pub fn parse(text: &str) -> Option<Self> {
        let mut t = Self::default();
        for word in text.split(',').map(str::trim) {
            let (name, value) = word.split_once('=').unwrap_or((word, ""));
            match (name, value) {
                ("merge", "0") => t.merge = false,
                ("merge", "1") => t.merge = true,
                ("own", "0") => t.own = false,
                ("own", "1") => t.own = true,
                ("flights", n) => t.flights = n.parse().ok().filter(|n| (1..=4).contains(n))?,
                ("gather", n) => t.gather = n.parse().ok().filter(|n| (1..=1024).contains(n))?,
                ("bulk", n) => t.bulk = n.parse().ok()?,
                ("courier", n) => t.courier = n.parse().ok().filter(|n| *n <= 65536)?,
                ("hands", n) => t.hands = n.parse().ok().filter(|n| *n <= 128)?,
                ("far", n) => t.far = n.parse().ok()?,
                ("helper", n) => t.helper = n.parse().ok().filter(|n| *n <= 2)?,
                _ => return None,
            }
        }
        Some(t)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words() {
        let t = Tuning::parse("flights=3, gather=1,bulk=0,merge=0,courier=64,hands=7,far=0,own=0,helper=0")
            .expect("all words exist");
        assert_eq!(
            (t.flights, t.gather, t.bulk, t.merge, t.courier, t.hands, t.far, t.own, t.helper),
            (3, 1, 0, false, 64, 7, 0, false, 0)
        );
        for wrong in
            ["", "courier", "courier=65537", "hands=129", "fenced", "flights=0", "flights=5", "gather=x", "bulk=-1"]
        {
            assert_eq!(Tuning::parse(wrong), None, "{wrong}");
        }
    }
}
