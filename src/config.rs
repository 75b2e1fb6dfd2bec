//! Every variable that oxygin honours, in one table.
//!
//! [`VARIABLES`] is the single source: parsing walks it, `docs/environment.md`
//! is generated from it, and `oxygin doctor` prints it. `OXYGIN_*` is ours;
//! the `NCCL_*` variables mean what they mean in NCCL itself. A value that
//! cannot be used is reported once a process, with what would be accepted, and
//! the default takes its place: a typing error must not end a job.

use crate::fabric::soft::gpu::{Tuning, TUNING_ACCEPTED};
use crate::sync::Mutex;
use std::collections::BTreeSet;
use std::time::Duration;

/// `OXYGIN_FABRIC`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FabricChoice {
    /// Verbs where every rank can, else soft.
    Auto,
    /// Verbs or fail.
    Verbs,
    /// Soft.
    Soft,
}

/// `OXYGIN_SOFT_TRANSPORT`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SoftTransport {
    /// Shared memory where it works, else TCP.
    Auto,
    /// Shared memory without cross-memory attach, else TCP.
    NoCma,
    /// As `Auto`, but ranks in one process treat each other's GPU memory as ranks in different processes do.
    Staged,
    /// TCP to every peer but oneself.
    Tcp,
}

/// What the environment says, read once at `init`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// `OXYGIN_FABRIC`.
    pub fabric: FabricChoice,
    /// `OXYGIN_TIMEOUT`: deadline of every collective step.
    pub timeout: Duration,
    /// `OXYGIN_PEER_TIMEOUT`: how long a peer may be silent before it counts as gone; see [`Config::peer_limit`].
    pub peer_timeout: Option<Duration>,
    /// `OXYGIN_QUEUE_DEPTH`: send queue entries a (context, peer); 0: the caller's wish, else the fabric's choice.
    pub queue_depth: u32,
    /// `OXYGIN_MAX_OPERATIONS`: unfinished operations that a context holds before a call waits.
    pub max_operations: u32,
    /// `OXYGIN_SOFT_TRANSPORT`: which ways the soft fabric may use towards other ranks.
    pub soft_transport: SoftTransport,
    /// `OXYGIN_TCP_STRIPES`: connections for bulk to each peer, at least 1; by default as many as threads.
    pub tcp_stripes: Option<u32>,
    /// `OXYGIN_TCP_THREADS`: threads that serve them; by default by the number of cores.
    pub tcp_threads: Option<u32>,
    /// `OXYGIN_GPU_ISSUE`: for measuring.
    pub gpu_issue: Tuning,
    /// `NCCL_SOCKET_IFNAME`, in NCCL's syntax.
    pub socket_ifname: Option<String>,
    /// `NCCL_SOCKET_FAMILY`: `libc::AF_INET`, `libc::AF_INET6`, or any.
    pub socket_family: Option<i32>,
    /// `NCCL_COMM_ID`: an address whose subnet is preferred, as in NCCL.
    pub comm_id: Option<String>,
    /// `NCCL_IB_HCA`, in NCCL's syntax.
    pub ib_hca: Option<String>,
    /// `NCCL_IB_GID_INDEX`.
    pub ib_gid_index: Option<u8>,
    /// `NCCL_GIN_IB_TC`, else `NCCL_IB_TC`.
    pub ib_tc: Option<u8>,
    /// `NCCL_IB_SL`.
    pub ib_sl: Option<u8>,
    /// `NCCL_IB_TIMEOUT`: 4.096 µs × 2^n.
    pub ib_timeout: u8,
    /// `NCCL_IB_RETRY_CNT`.
    pub ib_retry_cnt: u8,
    /// `NCCL_IB_PKEY`: index into the port's P_Key table.
    pub ib_pkey: u16,
    /// `NCCL_DMABUF_ENABLE`.
    pub dma_buf: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            fabric: FabricChoice::Auto,
            timeout: Duration::from_secs(120),
            peer_timeout: None,
            queue_depth: 0,
            max_operations: 65_536,
            soft_transport: SoftTransport::Auto,
            tcp_stripes: None,
            tcp_threads: None,
            gpu_issue: Tuning::default(),
            socket_ifname: None,
            socket_family: None,
            comm_id: None,
            ib_hca: None,
            ib_gid_index: None,
            ib_tc: None,
            ib_sl: None,
            // NCCL's own defaults.
            ib_timeout: 20,
            ib_retry_cnt: 7,
            ib_pkey: 0,
            dma_buf: true,
        }
    }
}

/// One variable: what users read and what the parser does.
pub struct Variable {
    /// The name in the environment.
    pub name: &'static str,
    /// What holds when it is unset, in words.
    pub default: &'static str,
    /// What it does, one sentence.
    pub meaning: &'static str,
    /// The values it takes.
    pub accepted: &'static str,
    /// Puts a value into the configuration; `None`: not a value it takes.
    apply: fn(&mut Config, &str) -> Option<()>,
}

/// An integer as NCCL reads it (`strtoll`, base 0): sign, `0x` for hexadecimal, a leading 0 for octal. Unlike
/// there, anything after the digits is an error and not ignored.
fn integer(text: &str) -> Option<i64> {
    let text = text.trim();
    let (negative, digits) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let (radix, digits) = match digits.strip_prefix("0x").or_else(|| digits.strip_prefix("0X")) {
        Some(rest) => (16, rest),
        None if digits.len() > 1 && digits.starts_with('0') => (8, &digits[1..]),
        None => (10, digits),
    };
    if !digits.starts_with(|c: char| c.is_digit(radix)) {
        return None; // from_str_radix would take a second sign
    }
    let value = i64::from_str_radix(digits, radix).ok()?;
    Some(if negative { -value } else { value })
}

/// An integer between `low` and `high`.
fn within<T: TryFrom<i64>>(text: &str, low: i64, high: i64) -> Option<T> {
    let value = integer(text)?;
    (low..=high).contains(&value).then(|| T::try_from(value).ok())?
}

/// An integer between 0 and `high`, or -1 for "not set", as NCCL writes it.
fn unless_minus_one(text: &str, high: i64) -> Option<Option<u8>> {
    if integer(text)? == -1 {
        return Some(None);
    }
    within(text, 0, high).map(Some)
}

/// The longest time that may be set.
const LONGEST: Duration = Duration::from_secs(86_400);

/// Seconds, fractions allowed, more than none and at most a day.
fn seconds(text: &str) -> Option<Duration> {
    let value: f64 = text.trim().parse().ok()?;
    (value > 0.0 && value <= LONGEST.as_secs_f64()).then(|| Duration::try_from_secs_f64(value).ok())?
}

/// Every variable that this library reads. A later entry wins over an earlier one that sets the same field.
pub const VARIABLES: &[Variable] = &[
    Variable {
        name: "OXYGIN_FABRIC",
        default: "auto",
        meaning: "How bytes move: RDMA through libibverbs, or shared memory and TCP. `auto` takes verbs where every \
                  rank has a usable port (with GPUs: one that takes GPU memory), else soft.",
        accepted: "auto, verbs, soft",
        apply: |config, text| {
            config.fabric = match text {
                "auto" => FabricChoice::Auto,
                "verbs" => FabricChoice::Verbs,
                "soft" => FabricChoice::Soft,
                _ => return None,
            };
            Some(())
        },
    },
    Variable {
        name: "OXYGIN_TIMEOUT",
        default: "120",
        meaning: "Deadline of every collective step (connect, createContext, regMrSym), in seconds. The error after \
                  it names the step and the ranks that did not come.",
        accepted: "a number of seconds above 0 and up to 86400, fractions allowed",
        apply: |config, text| seconds(text).map(|value| config.timeout = value),
    },
    Variable {
        name: "OXYGIN_PEER_TIMEOUT",
        default: "what verbs' retries take, 4.096 µs × 2^NCCL_IB_TIMEOUT × (NCCL_IB_RETRY_CNT + 1), but at least 30: 35",
        meaning: "How long, in seconds, a peer of the soft fabric, or rank 0 in a collective step, may be silent (stopped, out of \
                  reach, not reading) before it counts as gone. A process that ends is noticed at once.",
        accepted: "a number of seconds above 0 and up to 86400, fractions allowed",
        apply: |config, text| seconds(text).map(|value| config.peer_timeout = Some(value)),
    },
    Variable {
        name: "OXYGIN_QUEUE_DEPTH",
        default: "0",
        meaning: "Work queue entries towards each peer in a context. 0: what the caller of createContext asks for, \
                  else the fabric's choice.",
        accepted: "0 to 32768",
        apply: |config, text| within(text, 0, 32_768).map(|value| config.queue_depth = value),
    },
    Variable {
        name: "OXYGIN_MAX_OPERATIONS",
        default: "65536",
        meaning: "Unfinished operations that one context holds before a call waits for room.",
        accepted: "1024 to 16777216",
        apply: |config, text| within(text, 1024, 16_777_216).map(|value| config.max_operations = value),
    },
    Variable {
        name: "OXYGIN_SOFT_TRANSPORT",
        default: "auto",
        meaning: "Ways that the soft fabric may use: `auto` is shared memory with single copies where the kernel \
                  allows them, else TCP; `no-cma` does without cross-memory attach; `staged` moves GPU memory through \
                  host memory even inside one process; `tcp` is TCP to every other rank.",
        accepted: "auto, no-cma, staged, tcp",
        apply: |config, text| {
            config.soft_transport = match text {
                "auto" => SoftTransport::Auto,
                "no-cma" => SoftTransport::NoCma,
                "staged" => SoftTransport::Staged,
                "tcp" => SoftTransport::Tcp,
                _ => return None,
            };
            Some(())
        },
    },
    Variable {
        name: "OXYGIN_TCP_STRIPES",
        default: "half of OXYGIN_TCP_THREADS, at least 1",
        meaning:
            "Connections for bulk to each peer that the soft fabric reaches by TCP. Large puts are spread over them, \
                  and over the interfaces that NCCL_SOCKET_IFNAME selects.",
        accepted: "1 to 16",
        apply: |config, text| within(text, 1, 16).map(|value| config.tcp_stripes = Some(value)),
    },
    Variable {
        name: "OXYGIN_TCP_THREADS",
        default: "none below 8 cores; above, a quarter of the cores, at most 8",
        meaning: "Threads of a communicator that serve these connections. With 0 the callers and the helper thread do.",
        accepted: "0 to 32",
        apply: |config, text| within(text, 0, 32).map(|value| config.tcp_threads = Some(value)),
    },
    Variable {
        name: "OXYGIN_GPU_ISSUE",
        default: "flights=2,gather=8,bulk=4194304,merge=1,courier=8192,hands=32,far=2097152,own=1,helper=1",
        meaning: "For measuring: how GPU memory moves without RDMA, and what gathers for one driver call. `own=0`: streams in \
                  the application's context instead of one of our own; `courier=0`: no kernel of ours; `hands=0`: a small one only; \
                  `helper=0`: the helper thread never works beside the callers, `helper=2`: whatever the number of cores.",
        accepted: TUNING_ACCEPTED,
        apply: |config, text| Tuning::parse(text).map(|value| config.gpu_issue = value),
    },
    Variable {
        name: "OXYGIN_LIBIBVERBS",
        default: "libibverbs.so.1",
        meaning: "The verbs library to load, by name or path.",
        accepted: "a library name or path",
        apply: |_, _| Some(()), // read where the library is loaded, in oxygin-ffi
    },
    Variable {
        name: "OXYGIN_LIBRDMACM",
        default: "librdmacm.so.1",
        meaning: "The RDMA connection manager's library to load, by name or path; only iWARP devices need it.",
        accepted: "a library name or path",
        apply: |_, _| Some(()), // read where the library is loaded, in oxygin-ffi
    },
    Variable {
        name: "OXYGIN_LIBCUDA",
        default: "libcuda.so.1",
        meaning: "The CUDA driver library to load, by name or path.",
        accepted: "a library name or path",
        apply: |_, _| Some(()), // read where the library is loaded, in oxygin-ffi
    },
    Variable {
        name: "NCCL_SOCKET_IFNAME",
        default:
            "ib*, else the subnet of NCCL_COMM_ID, else anything but docker*, lo*, virbr*; else those in that order",
        meaning: "Network interfaces for set-up and for the soft fabric's TCP.",
        accepted: "name prefixes with commas between; `=` in front: exact names; `^` in front: all but these",
        apply: |config, text| {
            // NCCL takes a value of one character as unset.
            config.socket_ifname = (text.len() > 1).then(|| text.to_owned());
            Some(())
        },
    },
    Variable {
        name: "NCCL_SOCKET_FAMILY",
        default: "any",
        meaning: "Forces IPv4 or IPv6.",
        accepted: "AF_INET, AF_INET6",
        apply: |config, text| {
            config.socket_family = Some(match text {
                "AF_INET" => libc::AF_INET,
                "AF_INET6" => libc::AF_INET6,
                _ => return None,
            });
            Some(())
        },
    },
    Variable {
        name: "NCCL_COMM_ID",
        default: "none",
        meaning:
            "Where NCCL bootstraps; an interface in the same subnet is preferred when NCCL_SOCKET_IFNAME is unset.",
        accepted: "IPV4:PORT or [IPV6]:PORT; other values are left to NCCL",
        apply: |config, text| {
            config.comm_id = Some(text.to_owned());
            Some(())
        },
    },
    Variable {
        name: "NCCL_IB_HCA",
        default: "every device with an active port",
        meaning: "RDMA devices and ports to use.",
        accepted: "name prefixes with commas between, each with `:PORT` if wanted; `=` in front: exact names; `^` in \
                   front: all but these",
        apply: |config, text| {
            config.ib_hca = Some(text.to_owned());
            Some(())
        },
    },
    Variable {
        name: "NCCL_IB_GID_INDEX",
        default: "-1",
        meaning: "GID table index on RoCE. -1: chosen automatically, RoCE v2 and IPv4-mapped first.",
        accepted: "-1 to 255",
        apply: |config, text| unless_minus_one(text, 255).map(|value| config.ib_gid_index = value),
    },
    Variable {
        name: "NCCL_IB_TC",
        default: "-1",
        meaning: "Traffic class of verbs packets. -1: the communicator's, else 0.",
        accepted: "-1 to 255",
        apply: |config, text| unless_minus_one(text, 255).map(|value| config.ib_tc = value),
    },
    Variable {
        name: "NCCL_GIN_IB_TC",
        default: "-1",
        meaning: "Traffic class for GPU-initiated networking alone. -1: NCCL_IB_TC.",
        accepted: "-1 to 255",
        apply: |config, text| unless_minus_one(text, 255).map(|value| config.ib_tc = value.or(config.ib_tc)),
    },
    Variable {
        name: "NCCL_IB_SL",
        default: "-1",
        meaning: "InfiniBand service level. -1: 0.",
        accepted: "-1 to 15",
        apply: |config, text| unless_minus_one(text, 15).map(|value| config.ib_sl = value),
    },
    Variable {
        name: "NCCL_IB_TIMEOUT",
        default: "20",
        meaning: "How long a queue pair waits for an acknowledgement: 4.096 µs × 2^n; 0 is for ever.",
        accepted: "0 to 31",
        apply: |config, text| within(text, 0, 31).map(|value| config.ib_timeout = value),
    },
    Variable {
        name: "NCCL_IB_RETRY_CNT",
        default: "7",
        meaning: "How often a queue pair sends again before it fails; at most 6 on soft-RoCE, where 7 is for ever.",
        accepted: "0 to 7",
        apply: |config, text| within(text, 0, 7).map(|value| config.ib_retry_cnt = value),
    },
    Variable {
        name: "NCCL_IB_PKEY",
        default: "0",
        meaning: "Index into the port's partition key table.",
        accepted: "0 to 65535",
        apply: |config, text| within(text, 0, 65_535).map(|value| config.ib_pkey = value),
    },
    Variable {
        name: "NCCL_DMABUF_ENABLE",
        default: "1",
        meaning:
            "Whether GPU memory may be registered with RDMA devices by DMA-BUF. 0: only by address, with a peer memory \
                  module.",
        accepted: "0 or another integer",
        apply: |config, text| integer(text).map(|value| config.dma_buf = value != 0),
    },
];

impl Config {
    /// Reads the environment of this process. What cannot be used is reported through the log, once a process.
    pub fn from_env() -> Self {
        // Names and values that are not UTF-8 are no values of ours; the lossy form fails to parse and is reported.
        let (config, mut problems) = Self::parse(|name| std::env::var_os(name).map(|v| v.to_string_lossy().into()));
        let names = std::env::vars_os().map(|(name, _)| name.to_string_lossy().into_owned());
        problems.extend(names.filter_map(|name| unknown(&name)));
        report(problems);
        config
    }

    /// Reads variables through `lookup` instead of the environment. Reports as [`Config::from_env`] does, but cannot
    /// see unknown names.
    pub fn from(lookup: impl Fn(&str) -> Option<String>) -> Self {
        let (config, problems) = Self::parse(lookup);
        report(problems);
        config
    }

    /// The configuration, and a sentence for each value that was not usable.
    pub fn parse(lookup: impl Fn(&str) -> Option<String>) -> (Self, Vec<String>) {
        let mut config = Self::default();
        let mut problems = Vec::new();
        for variable in VARIABLES {
            // Empty is unset, in NCCL and here.
            let Some(text) = lookup(variable.name).filter(|text| !text.is_empty()) else { continue };
            if (variable.apply)(&mut config, &text).is_none() {
                problems.push(format!(
                    "{}={text:?} is not usable; accepted: {}. The default holds: {}",
                    variable.name, variable.accepted, variable.default
                ));
            }
        }
        (config, problems)
    }

    /// How long a peer of the soft fabric may be silent: as long as verbs would go on trying, unless something else is set.
    pub fn peer_limit(&self) -> Duration {
        const SHORTEST: Duration = Duration::from_secs(30);
        self.peer_timeout.unwrap_or_else(|| {
            let tries = u32::from(self.ib_retry_cnt) + 1;
            let nanos = (4096u64 << self.ib_timeout.min(31)) * u64::from(tries);
            // To verbs, 0 is for ever.
            let retries =
                if self.ib_timeout == 0 { LONGEST } else { Duration::from_secs(nanos.div_ceil(1_000_000_000)) };
            retries.clamp(SHORTEST, LONGEST)
        })
    }
}

/// A sentence about `name` if it looks like ours and is none of the table.
pub fn unknown(name: &str) -> Option<String> {
    if !name.starts_with("OXYGIN_") || VARIABLES.iter().any(|v| v.name == name) {
        return None;
    }
    let ours = || VARIABLES.iter().map(|v| v.name).filter(|n| n.starts_with("OXYGIN_"));
    // Three wrong letters are a typing error, more are another word.
    let near = ours().map(|n| (distance(name, n), n)).min().filter(|(d, _)| *d <= 3);
    Some(match near {
        Some((_, near)) => format!("{name} is no variable of oxygin and has no effect; did you mean {near}?"),
        None => format!(
            "{name} is no variable of oxygin and has no effect; there are {}",
            ours().collect::<Vec<_>>().join(", ")
        ),
    })
}

/// Levenshtein distance in bytes.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

/// Those of `problems` that this process meets for the first time.
fn fresh(mut problems: Vec<String>) -> Vec<String> {
    static SEEN: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let mut seen = SEEN.lock();
    problems.retain(|problem| seen.insert(problem.clone()));
    problems
}

/// Logs each sentence the first time this process meets it.
fn report(problems: Vec<String>) {
    fresh(problems).iter().for_each(|problem| log::warn!("{problem}"));
}

/// The table as `docs/environment.md`.
pub fn markdown() -> String {
    let mut text = String::from(
        "# Environment variables\n\n\
         Read once, when a communicator is initialised. An unknown `OXYGIN_*` name or a value that cannot be used is\n\
         reported once a process, at NCCL's WARN level, and the default holds. Integers may be decimal, hexadecimal\n\
         (`0x`) or octal (leading 0). `NCCL_*` variables mean what they mean in NCCL.\n\n\
         This page is generated from `VARIABLES` in `src/config.rs`; a test compares the two.\n\n\
         | variable | default | accepted | meaning |\n|---|---|---|---|\n",
    );
    for v in VARIABLES {
        text += &format!("| `{}` | {} | {} | {} |\n", v.name, v.default, v.accepted, v.meaning);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(name: &'static str, value: &'static str) -> (Config, Vec<String>) {
        assert!(VARIABLES.iter().any(|v| v.name == name));
        Config::parse(|asked| (asked == name).then(|| value.to_owned()))
    }

    #[test]
    fn nothing_set_is_the_default() {
        let (config, problems) = Config::parse(|_| None);
        assert_eq!((config, problems), (Config::default(), vec![]));
        assert_eq!(Config::parse(|_| Some(String::new())).0, Config::default());
    }

    #[test]
    fn the_documented_defaults_are_the_defaults() {
        for v in VARIABLES {
            let config = Config::parse(|asked| (asked == v.name).then(|| v.default.to_owned())).0;
            if v.default.parse::<i64>().is_ok() || v.default == "auto" {
                assert_eq!(config, Config::default(), "{}", v.name);
            }
        }
    }

    #[test]
    fn good_values() {
        assert_eq!(one("OXYGIN_FABRIC", "soft").0.fabric, FabricChoice::Soft);
        assert_eq!(one("OXYGIN_TIMEOUT", "0.25").0.timeout, Duration::from_millis(250));
        assert_eq!(one("OXYGIN_SOFT_TRANSPORT", "no-cma").0.soft_transport, SoftTransport::NoCma);
        assert_eq!(one("NCCL_SOCKET_FAMILY", "AF_INET6").0.socket_family, Some(libc::AF_INET6));
        assert_eq!(one("NCCL_IB_TC", "0x6a").0.ib_tc, Some(106));
        assert_eq!(one("NCCL_IB_TC", "-1").0.ib_tc, None);
        assert_eq!(one("NCCL_IB_TIMEOUT", "026").0.ib_timeout, 22);
        assert!(!one("NCCL_DMABUF_ENABLE", "0").0.dma_buf);
        assert_eq!(one("NCCL_SOCKET_IFNAME", "^").0.socket_ifname, None);
        let both = |name: &str| match name {
            "NCCL_IB_TC" => Some("8".into()),
            "NCCL_GIN_IB_TC" => Some("16".into()),
            _ => None,
        };
        assert_eq!(Config::parse(both).0.ib_tc, Some(16));
    }

    #[test]
    fn a_peer_may_be_silent_for_as_long_as_verbs_would_try_again() {
        let limit = |name, value| one(name, value).0.peer_limit();
        assert_eq!(Config::default().peer_limit(), Duration::from_secs(35));
        assert_eq!(limit("NCCL_IB_TIMEOUT", "22").as_secs(), 138);
        assert_eq!(limit("NCCL_IB_TIMEOUT", "10"), Duration::from_secs(30));
        assert_eq!(limit("NCCL_IB_RETRY_CNT", "0"), Duration::from_secs(30));
        assert_eq!(
            [limit("NCCL_IB_TIMEOUT", "0"), limit("NCCL_IB_TIMEOUT", "31")].map(|l| l.as_secs()),
            [86_400, 70_369]
        );
        assert_eq!(limit("OXYGIN_PEER_TIMEOUT", "0.5"), Duration::from_millis(500));
    }

    #[test]
    fn bad_values_keep_the_default_and_are_told() {
        for (name, value) in [
            ("OXYGIN_FABRIC", "Soft"),
            ("OXYGIN_TIMEOUT", "0"),
            ("OXYGIN_TIMEOUT", "-3"),
            ("OXYGIN_TIMEOUT", "NaN"),
            ("OXYGIN_TIMEOUT", "inf"),
            ("OXYGIN_TIMEOUT", "2m"),
            ("OXYGIN_PEER_TIMEOUT", "0"),
            ("OXYGIN_TCP_STRIPES", "0"),
            ("OXYGIN_MAX_OPERATIONS", "99999999999999999999"),
            ("NCCL_SOCKET_FAMILY", "inet6"),
            ("NCCL_IB_TC", "256"),
            ("NCCL_IB_TC", "0x"),
            ("NCCL_IB_TC", "--1"),
            ("NCCL_IB_SL", "-2"),
            ("NCCL_IB_TIMEOUT", "20 s"),
            ("NCCL_IB_RETRY_CNT", "8"),
            ("NCCL_DMABUF_ENABLE", "yes"),
        ] {
            let (config, problems) = one(name, value);
            assert_eq!(config, Config::default(), "{name}={value}");
            assert_eq!(problems.len(), 1, "{name}={value}");
            let accepted = VARIABLES.iter().find(|v| v.name == name).unwrap().accepted;
            assert!(problems[0].contains(name) && problems[0].contains(accepted), "{}", problems[0]);
        }
    }

    #[test]
    fn unknown_names() {
        assert!(unknown("OXYGIN_TIMEOUT").is_none());
        assert!(unknown("NCCL_WHATEVER").is_none());
        assert!(unknown("OXYGIN_TIMOUT").unwrap().contains("did you mean OXYGIN_TIMEOUT?"));
        assert!(unknown("OXYGIN_SOMETHING_ELSE").unwrap().contains("OXYGIN_FABRIC"));
    }

    #[test]
    fn a_problem_is_told_once_a_process() {
        let problems = || vec!["a test's problem".to_owned(), "another".to_owned()];
        assert_eq!(fresh(problems()), problems());
        assert!(fresh(problems()).is_empty());
    }

    #[test]
    fn the_page_is_in_step() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/environment.md");
        if std::env::var_os("UPDATE_DOCS").is_some() {
            std::fs::write(path, markdown()).unwrap();
        }
        let page = std::fs::read_to_string(path).unwrap();
        assert!(page == markdown(), "{path} is out of step; write it anew with UPDATE_DOCS=1 cargo test the_page");
    }

    #[test]
    fn every_name_once() {
        let names: BTreeSet<_> = VARIABLES.iter().map(|v| v.name).collect();
        assert_eq!(names.len(), VARIABLES.len());
    }
}
