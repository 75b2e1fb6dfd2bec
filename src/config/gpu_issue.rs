//! `OXYGIN_GPU_ISSUE`: which of several correct ways the GPU engine takes.
//!
//! `own`, `kernel`, `lanes`, `managed`, `workers` and `helper` are for users. The other words are for tests and
//! measurements, and may go: they are parsed all the same because both reach the engine through NCCL's tables, where
//! the environment is the only way in.

/// What the words set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuIssue {
    /// The streams are in a private context, where nothing of the application can hold them up.
    pub own: bool,
    /// The longest copy, in bytes, that the copy kernel takes without worker blocks; 0: no copy kernel. At most 64 KiB.
    pub kernel: u64,
    /// A kernel serves queues of device code by itself, where it can.
    pub lanes: bool,
    /// Queues that such a kernel may serve are in managed memory, and are brought to the GPU while it does.
    pub managed: bool,
    /// Launches in a row that have had all of a set's queues before these are brought to the GPU; more are asked for
    /// where they came back too soon. 0: the first launch that has all brings them.
    pub steady: u32,
    /// How many worker blocks the copy kernel brings for large copies; 0: none. At most 128.
    pub workers: u32,
    /// Whether the helper thread works beside the callers while GPU transfers come thick: 0 never, 1 where there are
    /// cores for it, 2 always.
    pub helper: u32,
    /// Submissions that may be in flight at once: with 2 the GPU need not idle between them.
    pub submissions: usize,
    /// Operations that must have gathered before a submission starts while another is in flight. Starting one costs the
    /// caller 2 to 6 µs in the driver, however many operations it has.
    pub gather: usize,
    /// A copy of this many bytes or more goes on the bulk stream, so that what is small does not wait behind it; 0:
    /// none does. The price: its signal starts only when the CPU has seen that the copy is done.
    pub bulk: u64,
    /// A put that begins where the one before ended becomes part of its copy, and a signal that was just added to is
    /// stored once.
    pub merge: bool,
    /// The longest copy from another GPU, in bytes, that worker blocks take when it comes alone; 0: none.
    pub far: u64,
}

impl Default for GpuIssue {
    fn default() -> Self {
        Self {
            own: true,
            kernel: 8192,
            lanes: true,
            managed: true,
            steady: 0,
            workers: 32,
            helper: 1,
            submissions: 2,
            gather: 8,
            bulk: 4 << 20,
            merge: true,
            far: 2 << 20,
        }
    }
}

/// The words for users, in a sentence.
pub const ACCEPTED: &str =
    "words with commas between: own=0 or 1, kernel=BYTES (up to 65536; 0: off), lanes=0 or 1, managed=0 \
                            or 1, workers=0 to 128, helper=0 to 2; docs/gpu/README.md has the words for tests";

impl GpuIssue {
    /// The default with what the words change; `None`: a word or value that does not exist.
    pub fn parse(text: &str) -> Option<Self> {
        let mut t = Self::default();
        for word in text.split(',').map(str::trim) {
            let (name, value) = word.split_once('=').unwrap_or((word, ""));
            match (name, value) {
                ("own", "0") => t.own = false,
                ("own", "1") => t.own = true,
                // `courier`, `hands` and `flights` are what they were called at first.
                ("kernel" | "courier", n) => t.kernel = n.parse().ok().filter(|n| *n <= 65536)?,
                ("lanes", "0") => t.lanes = false,
                ("lanes", "1") => t.lanes = true,
                ("managed", "0") => t.managed = false,
                ("managed", "1") => t.managed = true,
                ("steady", n) => t.steady = n.parse().ok().filter(|n| *n <= 1024)?,
                ("workers" | "hands", n) => t.workers = n.parse().ok().filter(|n| *n <= 128)?,
                ("helper", n) => t.helper = n.parse().ok().filter(|n| *n <= 2)?,
                ("submissions" | "flights", n) => t.submissions = n.parse().ok().filter(|n| (1..=4).contains(n))?,
                ("gather", n) => t.gather = n.parse().ok().filter(|n| (1..=1024).contains(n))?,
                ("bulk", n) => t.bulk = n.parse().ok()?,
                ("merge", "0") => t.merge = false,
                ("merge", "1") => t.merge = true,
                ("far", n) => t.far = n.parse().ok()?,
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
        let set = GpuIssue {
            own: false,
            kernel: 64,
            lanes: false,
            managed: false,
            steady: 5,
            workers: 7,
            helper: 0,
            submissions: 3,
            gather: 1,
            bulk: 0,
            merge: false,
            far: 0,
        };
        let text =
            "own=0,kernel=64, lanes=0,managed=0,steady=5,workers=7,helper=0,submissions=3,gather=1,bulk=0,merge=0,\
                    far=0";
        assert_eq!(GpuIssue::parse(text), Some(set));
        for wrong in [
            "",
            "kernel",
            "kernel=65537",
            "workers=129",
            "steady=1025",
            "fenced",
            "submissions=0",
            "submissions=5",
            "gather=x",
            "bulk=-1",
        ] {
            assert_eq!(GpuIssue::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn the_first_names_of_words_still_work() {
        let (old, new) = ("courier=64,hands=7,flights=3", "kernel=64,workers=7,submissions=3");
        assert_eq!(GpuIssue::parse(old), GpuIssue::parse(new));
        assert_ne!(GpuIssue::parse(old), Some(GpuIssue::default()));
    }
}
