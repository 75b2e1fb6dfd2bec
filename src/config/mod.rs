//! Every variable that oxygin honours, in one table.
//!
//! [`VARIABLES`] is the single source: parsing walks it, `docs/environment.md`
//! is generated from it, and `oxygin doctor` prints it. `OXYGIN_*` is ours;
//! the `NCCL_*` variables mean what they mean in NCCL itself. A value that
//! cannot be used is reported once a process, with what would be accepted, and
//! the default takes its place: a typing error must not end a job.

mod address_range;
mod gpu_issue;
mod parse;
mod rdma;
#[cfg(test)]
mod tests;
mod variables;

pub use address_range::AddressRange;
pub use gpu_issue::GpuIssue;
pub use variables::{Variable, VARIABLES};

use parse::LONGEST;
use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};
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

/// `OXYGIN_ENGINE`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineChoice {
    /// By NCCL's version, its plugin variables and the fabric: `comm::backend` has the rules, the README the table.
    Auto,
    /// Ours: the GIN tables report a device-owned type and drain queues of their own.
    Own,
    /// NCCL's proxy, which calls the tables' data operations.
    Nccl,
    /// The software NIC: the GIN tables give device code of GDAKI queues, which our engine drains.
    GdakiSoft,
    /// Queues of mlx5 devices, which device code of GDAKI rings itself.
    Gdaki,
}

/// `OXYGIN_GDAKI_SIGNALS`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GdakiSignals {
    /// A visible signal tells of every put that had arrived before it, from any peer.
    AllPeers,
    /// It tells of its sender's puts alone.
    PerPeer,
}

/// How device code of GDAKI tells the software NIC that entries are there: `OXYGIN_GDAKI_RINGING`. What it does then is
/// in `gdaki::soft::doorbell`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ringing {
    /// A doorbell and its record, under a lock.
    Doorbell,
    /// A producer's index in host memory.
    Proxy,
    /// A word for each slot, in any order.
    FreeFlow,
}

/// `NCCL_GDAKI_USE_RELIABLE_DB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReliableDoorbell {
    /// Doorbells have a record.
    Off,
    /// They have none; a device that cannot do without is refused.
    On,
    /// They have none where the device can do without.
    IfPossible,
}

/// `NCCL_GIN_GDAKI_NIC_HANDLER`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingerChoice {
    /// Kernels ring where the GPU can, else this process does.
    Auto,
    /// This process rings.
    Process,
    /// Kernels ring; where the GPU cannot the device is refused.
    Kernels,
}

/// `OXYGIN_PROXY_AFFINITY`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Affinity {
    /// Near the GPU.
    Near,
    /// Wherever the scheduler likes.
    Off,
    /// On these, as the kernel writes lists.
    List(String),
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
    /// `OXYGIN_DEREG_TIMEOUT`: how long a deregistration waits for copies that are under way.
    pub dereg_timeout: Duration,
    /// `OXYGIN_QUEUE_DEPTH`: send queue entries a (context, peer); 0: the caller's wish, else the fabric's choice.
    pub queue_depth: u32,
    /// `OXYGIN_MAX_OPERATIONS`: unfinished operations to one peer that a context holds before a call waits.
    pub max_operations: u32,
    /// `OXYGIN_SOFT_TRANSPORT`: which ways the soft fabric may use towards other ranks.
    pub soft_transport: SoftTransport,
    /// `OXYGIN_TCP_STRIPES`: connections for bulk to each peer, at least 1; by default as many as threads.
    pub tcp_stripes: Option<u32>,
    /// `OXYGIN_TCP_THREADS`: threads that serve them; by default by the number of cores.
    pub tcp_threads: Option<u32>,
    /// `OXYGIN_GPU_ISSUE`: which of several correct ways the GPU engine takes.
    pub gpu_issue: GpuIssue,
    /// `CUDA_DEVICE_MAX_CONNECTIONS`: hardware queues for the streams of a process, for a warning.
    pub hardware_queues: u32,
    /// `OXYGIN_ENGINE`: who drains what device code writes.
    pub engine: EngineChoice,
    /// `OXYGIN_GDAKI_SIGNALS`: what kernels compiled for GDAKI need of a signal, on any fabric.
    pub gdaki_signals: GdakiSignals,
    /// `OXYGIN_GDAKI_RINGING`: how kernels compiled for GDAKI ring the software NIC; `None`: by NCCL's version.
    pub gdaki_ringing: Option<Ringing>,
    /// `OXYGIN_GDAKI_TRIAL`: whether a put is tried before queues of mlx5 devices are handed to device code.
    pub gdaki_trial: bool,
    /// `OXYGIN_GDAKI_CAPTURE`: where recordings of the software NIC's entries go.
    pub gdaki_capture: Option<String>,
    /// `OXYGIN_PROXY_THREADS`: threads of our engine a communicator, at least 1.
    pub proxy_threads: u32,
    /// `OXYGIN_PROXY_AFFINITY`: where they run.
    pub proxy_affinity: Affinity,
    /// `OXYGIN_PROXY_POLL`: how long they spin when there is nothing; `None`: for ever.
    pub proxy_poll: Option<Duration>,
    /// `OXYGIN_STALL`: the age at which an entry of device code is named in the log.
    pub stall: Duration,
    /// `OXYGIN_TRACE`: where a trace of the engine goes.
    pub trace: Option<String>,
    /// `OXYGIN_STATS`: whether there are statistics for other processes to read.
    pub stats: bool,
    /// `OXYGIN_DEVICE_LAYOUT`: bytes of a context for device code, in place of what NCCL's version says.
    pub device_layout: Option<u32>,
    /// `NCCL_GIN_TYPE`: the only device type that NCCL takes; `None`: any.
    pub gin_type: Option<i32>,
    /// `NCCL_SOCKET_IFNAME`, in NCCL's syntax.
    pub socket_ifname: Option<String>,
    /// `NCCL_SOCKET_FAMILY`: `libc::AF_INET`, `libc::AF_INET6`, or any.
    pub socket_family: Option<i32>,
    /// `NCCL_COMM_ID`: an address whose subnet is preferred, as in NCCL.
    pub comm_id: Option<String>,
    /// `NCCL_IB_DISABLE`: RDMA devices are left alone unless verbs are demanded.
    pub ib_disable: bool,
    /// `NCCL_IB_HCA`, in NCCL's syntax.
    pub ib_hca: Option<String>,
    /// `NCCL_IB_MERGE_VFS`: virtual functions count as being where their card is.
    pub ib_merge_vfs: bool,
    /// `NCCL_IB_DEVICE_PCI_ORDER`: devices are listed by their PCI addresses.
    pub ib_pci_order: bool,
    /// `NCCL_IB_GID_INDEX`.
    pub ib_gid_index: Option<u8>,
    /// `NCCL_IB_ROUTABLE_FLID_GID_INDEX`.
    pub ib_flid_gid_index: u8,
    /// `NCCL_IB_ROCE_VERSION_NUM`: 1 or 2.
    pub ib_roce_version: u32,
    /// `NCCL_IB_ADDR_FAMILY` is `AF_INET6`.
    pub ib_wants_ipv6: bool,
    /// `NCCL_IB_ADDR_RANGE`.
    pub ib_address_range: Option<AddressRange>,
    /// `NCCL_GIN_IB_TC`, else `NCCL_IB_TC`.
    pub ib_tc: Option<u8>,
    /// `NCCL_IB_SL`.
    pub ib_sl: Option<u8>,
    /// `NCCL_IB_TIMEOUT`: 4.096 µs × 2^n.
    pub ib_timeout: u8,
    /// `NCCL_IB_RETRY_CNT`.
    pub ib_retry_cnt: u8,
    /// `NCCL_IB_MQP_RETRY_CNT`: how often a queue pair's move that timed out is tried again.
    pub ib_modify_retries: u32,
    /// `NCCL_IB_MQP_RETRY_ALL`: whether one that failed otherwise is, too.
    pub ib_modify_retry_all: bool,
    /// `NCCL_IB_MQP_RETRY_SLEEP_MSEC`: what is waited before the first of them.
    pub ib_modify_pause: Duration,
    /// `NCCL_IB_ECE_ENABLE`: devices agree on options of their connections, where they know some.
    pub ib_ece: bool,
    /// `NCCL_IB_PKEY`: index into the port's P_Key table.
    pub ib_pkey: u16,
    /// `NCCL_IB_PCI_RELAXED_ORDERING`: data windows may be written in relaxed order.
    pub ib_relaxed_ordering: bool,
    /// `NCCL_DMABUF_ENABLE`.
    pub dma_buf: bool,
    /// `NCCL_IB_DATA_DIRECT`: GPU memory for GDAKI is registered with Data Direct where the device has it.
    pub ib_data_direct: bool,
    /// `NCCL_GDAKI_USE_RELIABLE_DB`: whether kernels ring mlx5 devices without a doorbell record.
    pub reliable_doorbell: ReliableDoorbell,
    /// `NCCL_GIN_GDAKI_NIC_HANDLER`: who rings mlx5 devices.
    pub ringer: RingerChoice,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            fabric: FabricChoice::Auto,
            timeout: Duration::from_secs(120),
            peer_timeout: None,
            dereg_timeout: Duration::from_secs(10),
            queue_depth: 0,
            max_operations: 65_536,
            soft_transport: SoftTransport::Auto,
            tcp_stripes: None,
            tcp_threads: None,
            gpu_issue: GpuIssue::default(),
            // CUDA's own default.
            hardware_queues: 8,
            engine: EngineChoice::Auto,
            gdaki_signals: GdakiSignals::AllPeers,
            proxy_threads: 1,
            proxy_affinity: Affinity::Near,
            proxy_poll: Some(Duration::from_millis(20)),
            stall: Duration::from_secs(10),
            trace: None,
            stats: true,
            device_layout: None,
            gdaki_ringing: None,
            gdaki_trial: true,
            gdaki_capture: None,
            gin_type: None,
            socket_ifname: None,
            socket_family: None,
            comm_id: None,
            ib_disable: false,
            ib_hca: None,
            ib_merge_vfs: true,
            ib_pci_order: true,
            ib_gid_index: None,
            ib_flid_gid_index: 1,
            ib_roce_version: 2,
            ib_wants_ipv6: false,
            ib_address_range: None,
            ib_tc: None,
            ib_sl: None,
            // NCCL's own defaults.
            ib_timeout: 20,
            ib_retry_cnt: 7,
            ib_ece: true,
            ib_modify_retries: 34,
            ib_modify_retry_all: false,
            ib_modify_pause: Duration::from_millis(100),
            ib_pkey: 0,
            ib_relaxed_ordering: true,
            dma_buf: true,
            ib_data_direct: true,
            reliable_doorbell: ReliableDoorbell::Off,
            ringer: RingerChoice::Auto,
        }
    }
}

impl Config {
    /// Whether queues may be brought to the GPU: a kernel serves them there, and one thread looks at all of a set's, as
    /// it is for that thread to look away.
    pub fn may_bring_queues(&self) -> bool {
        let has_queues = self.engine != EngineChoice::Nccl;
        has_queues && self.gpu_issue.lanes && self.gpu_issue.managed && self.proxy_threads == 1
    }

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

    /// What keeps this rank from RDMA devices, whichever there are.
    pub fn without_verbs(&self) -> Option<&'static str> {
        match self.fabric {
            FabricChoice::Soft => Some("OXYGIN_FABRIC=soft"),
            FabricChoice::Auto if self.ib_disable => Some("NCCL_IB_DISABLE is set"),
            _ => None,
        }
    }

    /// How long a peer of the soft fabric may be silent: as long as verbs would go on trying, unless something else
    /// is set.
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
    let mut seen = SEEN.lock().unwrap_or_else(PoisonError::into_inner);
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
         This page is generated from `VARIABLES` in `src/config`; a test compares the two.\n\n\
         | variable | default | accepted | meaning |\n|---|---|---|---|\n",
    );
    for v in VARIABLES {
        text += &format!("| `{}` | {} | {} | {} |\n", v.name, v.default, v.accepted, v.meaning);
    }
    text
}
