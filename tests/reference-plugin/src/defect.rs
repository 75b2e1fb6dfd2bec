//! The ways this plugin can be told to be wrong.

use std::sync::OnceLock;

macro_rules! defects {
    ($($(#[$doc:meta])* $variant:ident = $name:literal,)*) => {
        /// One deliberate fault, chosen by `REFERENCE_PLUGIN_DEFECT`.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Defect { $($(#[$doc])* $variant,)* }

        impl Defect {
            /// Every defect.
            pub const ALL: &'static [Defect] = &[$(Defect::$variant,)*];

            /// What to write into the variable.
            pub fn name(self) -> &'static str {
                match self { $(Defect::$variant => $name,)* }
            }
        }
    };
}

defects! {
    /// Every fifth signal never arrives.
    DropSignal = "drop-signal",
    /// The signal of a put is applied before its data.
    SignalBeforeData = "signal-before-data",
    /// A put without a signal is held back until the operation after it has been sent.
    StrongIsWeak = "strong-is-weak",
    /// Additions are done on the two halves of the word, without a carry.
    TornAdd = "torn-add",
    /// Additions are a load, a pause and a store.
    LostUpdate = "lost-update",
    /// An increment adds the value argument instead of one.
    IncAddsValue = "inc-adds-value",
    /// Data for odd offsets past the first page lands one byte too early.
    WrongOffset = "wrong-offset",
    /// The last byte of a put to an unaligned offset is lost.
    LostByteUnaligned = "lost-byte-unaligned",
    /// Puts of more than 1 MiB lose their second MiB.
    LostChunk = "lost-chunk",
    /// The last byte of a get is not fetched.
    ShortGet = "short-get",
    /// Puts to oneself do nothing.
    NoSelf = "no-self",
    /// `test` says true before the source has been read.
    EarlyTest = "early-test",
    /// The hundredth put blocks its caller for ever.
    Hang = "hang",
    /// All contexts share one queue.
    OneQueue = "one-queue",
    /// More than 1,024 unfinished operations are refused.
    QueueFull = "queue-full",
    /// A rank that has not called in for 20 ms receives nothing.
    NeedsProgress = "needs-progress",
    /// A dead peer is never reported.
    DeafToDeath = "deaf-to-death",
    /// A rank past the end is taken for the last one.
    AcceptBadRank = "accept-bad-rank",
    /// A context past the end is taken for the last one.
    AcceptBadContext = "accept-bad-context",
    /// A handle that was never returned is quietly ignored.
    AcceptBadHandle = "accept-bad-handle",
    /// Offsets past the window are quietly ignored.
    AcceptPastEnd = "accept-past-end",
    /// An unknown signal operation is taken for an addition.
    AcceptBadOp = "accept-bad-op",
    /// A signal at an odd offset is accepted and rounded down.
    AcceptMisaligned = "accept-misaligned",
    /// Deregistering twice succeeds.
    AcceptDoubleDereg = "accept-double-dereg",
    /// Refusals are not logged.
    SilentRefusal = "silent-refusal",
    /// Refusals are logged twice.
    NoisyRefusal = "noisy-refusal",
    /// A refused operation breaks the communicator.
    RefusalBreaks = "refusal-breaks",
    /// A registration that one rank refuses is not counted there: its next windows have other numbers.
    UncountedRefusal = "uncounted-refusal",
    /// After a refused registration the next one blocks its caller for ever.
    RefusalHangs = "refusal-hangs",
    /// Closing something twice ends the process.
    CrashOnSecondClose = "crash-on-second-close",
    /// Each `init` leaves a file descriptor open.
    LeakDescriptor = "leak-descriptor",
    /// Each `init` leaves a mapping behind.
    LeakMapping = "leak-mapping",
    /// Queues have half the slots that were asked for.
    ShallowQueue = "shallow-queue",
    /// The words of a slot stay in it when it is given back.
    Uncleared = "uncleared",
    /// In a queue of up to 16 slots a descriptor is read as soon as its first word is there.
    HalfRead = "half-read",
    /// A malformed descriptor fails nothing.
    FaultUnsaid = "fault-unsaid",
    /// A malformed descriptor stops the credits of its context.
    FaultStops = "fault-stops",
    /// All contexts have the first one's signals.
    SharedSignals = "shared-signals",
    /// Every fiftieth put is not counted.
    LostCount = "lost-count",
    /// Inline values are 8 bytes, whatever they say.
    WideValues = "wide-values",
}

/// Whether `defect` is switched on.
///
/// # Panics
/// If the variable holds a name that does not exist: a test that misspells a defect would prove nothing.
pub fn on(defect: Defect) -> bool {
    static CHOSEN: OnceLock<Option<Defect>> = OnceLock::new();
    *CHOSEN.get_or_init(|| {
        let name = std::env::var("REFERENCE_PLUGIN_DEFECT").ok().filter(|n| !n.is_empty())?;
        let known = Defect::ALL.iter().copied().find(|d| d.name() == name);
        Some(known.unwrap_or_else(|| panic!("REFERENCE_PLUGIN_DEFECT={name} is no defect of this plugin")))
    }) == Some(defect)
}
