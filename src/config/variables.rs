//! The table of variables.

use super::parse::{integer, seconds, within};
use super::rdma::RDMA;
use super::{gpu_issue, Affinity, Config, EngineChoice, FabricChoice, GdakiSignals, GpuIssue, Ringing, SoftTransport};
use std::time::Duration;

/// One variable: what users read and what the parser does.
#[derive(Clone, Copy)]
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
    pub(super) apply: fn(&mut Config, &str) -> Option<()>,
}

/// Every variable that this library reads. A later entry wins over an earlier one that sets the same field.
pub const VARIABLES: &[Variable] = &ALL;

const ALL: [Variable; GENERAL.len() + RDMA.len()] = {
    let mut all = [GENERAL[0]; GENERAL.len() + RDMA.len()];
    let mut i = 0;
    while i < all.len() {
        all[i] = if i < GENERAL.len() { GENERAL[i] } else { RDMA[i - GENERAL.len()] };
        i += 1;
    }
    all
};

/// What is not about RDMA devices.
const GENERAL: &[Variable] = &[
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
        default: "what verbs' retries take, 4.096 µs × 2^NCCL_IB_TIMEOUT × (NCCL_IB_RETRY_CNT + 1), but at \
                  least 30: 35",
        meaning: "How long, in seconds, a peer of the soft fabric, or rank 0 in a collective step, may be silent \
                  (stopped, out of reach, not reading), or a host in a collective step that should answer, before it \
                  counts as gone. A process that ends is noticed at once.",
        accepted: "a number of seconds above 0 and up to 86400, fractions allowed",
        apply: |config, text| seconds(text).map(|value| config.peer_timeout = Some(value)),
    },
    Variable {
        name: "OXYGIN_DEREG_TIMEOUT",
        default: "10",
        meaning: "How long, in seconds, deregMrSym waits for copies to or from the window that peers or the GPU are \
                  at. The error after it names them: the memory is not free yet. Windows that end one after another \
                  while the GPU stands have that time together.",
        accepted: "a number of seconds above 0 and up to 86400, fractions allowed",
        apply: |config, text| seconds(text).map(|value| config.dereg_timeout = value),
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
        meaning: "Unfinished operations that one context holds towards one peer before a call waits for room; over \
                  verbs, those that the device has not taken yet. Other peers have room of their own.",
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
        default: "own=1,kernel=8192,lanes=1,managed=1,workers=32,helper=1",
        meaning: "How GPU memory moves without RDMA. `own=0`: streams in the application's context instead of a \
                  private one; `kernel=0`: no copy kernel; `lanes=0`: no lane kernel, which serves device code's \
                  queues by itself between GPUs of one host; `managed=0`: queues of small sets of contexts stay \
                  in pinned host memory as those of large ones do, otherwise they are in managed memory, and on the \
                  GPU while that kernel has all of a set's; \
                  `workers=0`: a copy kernel without worker blocks; `helper=0`: the helper thread never works beside \
                  the callers, `helper=2`: whatever the number of cores. `kernel` and `workers` may also be written \
                  `courier` and `hands`, as in earlier versions.",
        accepted: gpu_issue::ACCEPTED,
        apply: |config, text| GpuIssue::parse(text).map(|value| config.gpu_issue = value),
    },
    Variable {
        name: "CUDA_DEVICE_MAX_CONNECTIONS",
        default: "8",
        meaning: "CUDA's own: how many hardware queues the streams of a process have on a GPU. Where ranks of one \
                  process share a GPU the log asks for 32: streams that share a queue wait for each other. Kernels of \
                  this library use half as many streams, two at least.",
        accepted: "1 to 32",
        apply: |config, text| within(text, 1, 32).map(|value| config.hardware_queues = value),
    },
    Variable {
        name: "OXYGIN_LIBIBVERBS",
        default: "libibverbs.so.1",
        meaning: "The verbs library to load, by name or path.",
        accepted: "a library name or path",
        apply: |_, _| Some(()), // read where the library is loaded, in oxygin-ffi
    },
    Variable {
        name: "OXYGIN_LIBMLX5",
        default: "libmlx5.so.1",
        meaning:
            "The library of mlx5 devices to load, by name or path; only `OXYGIN_ENGINE=gdaki`, and `auto` on such \
                  devices, need it.",
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
        name: "OXYGIN_ENGINE",
        default: "auto",
        meaning:
            "Who drains what device code writes: `nccl` is NCCL's proxy, which calls the tables' data operations; \
                  `own` this library's engine, for kernels that are compiled for all backends; `gdaki-soft` its \
                  software NIC, for kernels that are compiled for all backends or for GDAKI alone; `gdaki` \
                  queues of mlx5 devices that such kernels ring themselves, which are tried first \
                  (`OXYGIN_GDAKI_TRIAL`). `auto`: the README's table, in short `gdaki` or `gdaki-soft` from \
                  NCCL 2.30.7 on and `own` before. The same on all ranks, or unset.",
        accepted: "auto, own, nccl, gdaki, gdaki-soft",
        apply: |config, text| {
            config.engine = match text {
                "auto" => EngineChoice::Auto,
                "own" => EngineChoice::Own,
                "nccl" => EngineChoice::Nccl,
                "gdaki-soft" => EngineChoice::GdakiSoft,
                "gdaki" => EngineChoice::Gdaki,
                _ => return None,
            };
            Some(())
        },
    },
    Variable {
        name: "OXYGIN_GDAKI_SIGNALS",
        default: "all-peers",
        meaning:
            "What kernels compiled for GDAKI take a visible signal of the software NIC's to say. `all-peers`: that \
                  every put which had arrived before it is visible, from any peer, as NCCL's device code has it; puts \
                  are then complete only when they are known to be visible, over verbs by a read, over TCP by an \
                  answer, and iWARP is refused. `per-peer`: that its sender's puts are, which every fabric promises \
                  and which saves these.",
        accepted: "all-peers, per-peer",
        apply: |config, text| {
            config.gdaki_signals = match text {
                "all-peers" => GdakiSignals::AllPeers,
                "per-peer" => GdakiSignals::PerPeer,
                _ => return None,
            };
            Some(())
        },
    },
    Variable {
        name: "OXYGIN_GDAKI_RINGING",
        default: "free-flow with NCCL 2.31.2 and newer, else doorbell",
        meaning:
            "How kernels compiled for GDAKI tell the software NIC that entries are there. Free flow is the quickest; \
                  kernels that were compiled with an NCCL older than 2.31.2 do not know it, and their entries are then \
                  found by their arrival, later. Doorbell and proxy suit all kernels.",
        accepted: "doorbell, proxy, free-flow",
        apply: |config, text| {
            config.gdaki_ringing = Some(match text {
                "doorbell" => Ringing::Doorbell,
                "proxy" => Ringing::Proxy,
                "free-flow" => Ringing::FreeFlow,
                _ => return None,
            });
            Some(())
        },
    },
    Variable {
        name: "OXYGIN_GDAKI_TRIAL",
        default: "1",
        meaning: "Whether each rank tries an mlx5 device before kernels ring it: a kernel puts once, with a signal, \
                  through a queue pair to itself, at connect. If that fails `OXYGIN_ENGINE=auto` takes another engine, \
                  and `gdaki` ends with what was seen. With 0 it is not tried, and taken by `gdaki` alone.",
        accepted: "0, 1",
        apply: |config, text| within(text, 0, 1).map(|value: u32| config.gdaki_trial = value != 0),
    },
    Variable {
        name: "OXYGIN_GDAKI_CAPTURE",
        default: "none",
        meaning:
            "For tests and bug reports: the software NIC writes the first entries that kernels wrote into each of \
                  its queues, values inside them included, to the file PREFIX.RANK.PROCESS.NUMBER.txt, at most 1 MiB \
                  for each set of contexts, as the set or the communicator ends.",
        accepted: "a path, to which the rest of the name is appended",
        apply: |config, text| {
            config.gdaki_capture = (!text.is_empty()).then(|| text.to_owned());
            Some(())
        },
    },
    Variable {
        name: "OXYGIN_PROXY_THREADS",
        default: "1",
        meaning: "Threads of this library's engine in a communicator; the contexts of all its sets are split among \
                  them.",
        accepted: "1 to 16",
        apply: |config, text| within(text, 1, 16).map(|value| config.proxy_threads = value),
    },
    Variable {
        name: "OXYGIN_PROXY_AFFINITY",
        default: "near",
        meaning: "Where these threads run: `near` the GPU and, over verbs, the NIC, by what sysfs says of them (where \
                  no processor is near both the GPU counts); `off`, wherever the scheduler likes; or on the processors \
                  of a list. Those that the process may not use are left out.",
        accepted: "near, off, or a list of processors such as 0-7,16",
        apply: |config, text| {
            config.proxy_affinity = match text {
                "near" => Affinity::Near,
                "off" => Affinity::Off,
                list if list.chars().all(|c| c.is_ascii_digit() || ",- ".contains(c)) => Affinity::List(list.into()),
                _ => return None,
            };
            Some(())
        },
    },
    Variable {
        name: "OXYGIN_PROXY_POLL",
        default: "20",
        meaning: "How long these threads spin after the last descriptor before they sleep between looks, in \
                  milliseconds. They sleep 20 µs at a time in the first second, 20 ms then, 80 ms after ten. `spin`: \
                  never, but where threads that compute have all processors.",
        accepted: "spin, or 0 to 3600000",
        apply: |config, text| {
            config.proxy_poll = match text {
                "spin" => None,
                _ => Some(Duration::from_millis(within(text, 0, 3_600_000)?)),
            };
            Some(())
        },
    },
    Variable {
        name: "OXYGIN_STALL",
        default: "10",
        meaning: "The age, in seconds, at which a descriptor that is under way is named in the log, once, with its \
                  context, peer and what it waits for; so are queues that a kernel of this library's keeps for so \
                  long, which takes milliseconds.",
        accepted: "a number of seconds above 0 and up to 86400, fractions allowed",
        apply: |config, text| seconds(text).map(|value| config.stall = value),
    },
    Variable {
        name: "OXYGIN_TRACE",
        default: "none",
        meaning:
            "A file to which the engine writes what it did with the last 65536 descriptors of each of its threads, \
                  as the communicator closes; ui.perfetto.dev opens it. `%p` in it becomes \
                  PID-COMMUNICATOR-RANK-HOST; without it that is appended.",
        accepted: "a path",
        apply: |config, text| {
            config.trace = (!text.is_empty()).then(|| text.to_owned());
            Some(())
        },
    },
    Variable {
        name: "OXYGIN_STATS",
        default: "1",
        meaning: "Whether there are statistics that `oxygin stats` and `oxygin top` can read.",
        accepted: "0, 1",
        apply: |config, text| within(text, 0, 1).map(|value: u32| config.stats = value != 0),
    },
    Variable {
        name: "OXYGIN_DEVICE_LAYOUT",
        default: "what NCCL's version says",
        meaning: "Bytes of a context in the array that device code gets from this library's engine. For an NCCL that \
                  is newer than the library, or device code compiled with an older NCCL than it runs with.",
        accepted: "48, 72, 80",
        apply: |config, text| {
            config.device_layout = Some(within(text, 48, 80).filter(|bytes| [48, 72, 80].contains(bytes))?);
            Some(())
        },
    },
    Variable {
        name: "NCCL_GIN_TYPE",
        default: "any",
        meaning: "NCCL skips a GIN plugin of another device type than this. The type is 3 where this library's engine \
                  drains queues, else 2; with 2, `OXYGIN_ENGINE=auto` is `nccl`.",
        accepted: "a number; negative: any",
        apply: |config, text| {
            let value = integer(text)?;
            config.gin_type = i32::try_from(value).ok().filter(|kind| *kind >= 0);
            Some(())
        },
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
];
