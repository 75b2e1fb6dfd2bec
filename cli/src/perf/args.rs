//! The options of `oxygin perf` and what follows from them.

use crate::plugin::Way;
use crate::ranks::{Place, Plan};
use std::path::PathBuf;
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  oxygin perf --local 2                         latency, rate and bandwidth between two processes here
  oxygin perf --local 2 --test latency -a       put + signal ping-pong, 2 bytes to 8 MiB
  oxygin perf --local 2 --test rate --op put -l 16
  oxygin perf --local 2 --floor                 with this machine's own limits and the ratios to them
  oxygin perf --local 4 --alltoall -s 64K,1M
  oxygin perf --local 64 -q 16 --setup          how long 64 ranks with 16 contexts need to connect
  oxygin perf --local 2 --against /path/libother.so
  oxygin perf -p 18515                          on one host, then
  oxygin perf -p 18515 FIRSTHOST                on the other, with the same options
  oxygin perf --rank R --nranks N --root HOST:PORT   on every host; rank 0 listens

What is measured:
  latency     ping-pong; a sample is half a round trip. put-signal and signal wait for the signal word, put waits for
              the last byte. get has no ping-pong: a sample is iget until done, then iflush until done.
  completion  one put or get at a time until its request is done (local completion: the source may be reused).
  rate,       a stream with at most --tx-depth operations outstanding, from the first call until the receiver has
  bandwidth   seen everything and its answer is back (get: until all requests and a flush are done).
              BW peak is the best of --rounds rounds. MB is 2^20 bytes, as in perftest.
Every test starts with cleared destinations and ends with a comparison of every byte and signal; nothing is printed
for a test whose bytes are wrong. Waiting ranks call test and progress as NCCL's proxy thread does.";

/// Options of `oxygin perf`.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The other host (as client); without it and without --local or --rank: be the server
    pub host: Option<String>,

    /// Fork N ranks on this machine
    #[arg(long, value_name = "N", conflicts_with_all = ["host", "rank"])]
    pub local: Option<u32>,

    /// This process's rank, with --nranks and --root
    #[arg(long, requires_all = ["nranks", "root"], conflicts_with = "host")]
    pub rank: Option<u32>,

    /// Ranks over all hosts
    #[arg(long, value_name = "N", requires = "rank", conflicts_with_all = ["host", "local"])]
    pub nranks: Option<u32>,

    /// Where rank 0 listens
    #[arg(long, value_name = "HOST:PORT", requires = "rank", conflicts_with_all = ["host", "local"])]
    pub root: Option<String>,

    /// Port of the server
    #[arg(short, long, default_value_t = 18515)]
    pub port: u16,

    /// Plugin library, by its path, or by a name without / that the linker finds [default: liboxygin.so beside this
    /// program, in ../lib, or where the linker finds it]
    #[arg(long, value_name = "PATH", env = "OXYGIN_PLUGIN")]
    pub plugin: Option<PathBuf>,

    /// Table to drive: gin-v11, gin-v12, gin-v13, rma-v13 to rma-v16 [default: the newest with data operations], or
    /// gin-v12-queue, gin-v13-queue, gin-v14-queue: the queue that the plugin gives to device code; gin-v12-gdaki,
    /// gin-v13-gdaki, gin-v14-gdaki: the queue pairs that it gives to GDAKI's
    #[arg(long, value_name = "NAME")]
    pub table: Option<Way>,

    /// Measure this library too, alternating with the first, and print ratios
    #[arg(long, value_name = "PATH")]
    pub against: Option<PathBuf>,

    /// Table to drive in the other library (alone: another table of the same library)
    #[arg(long, value_name = "NAME")]
    pub against_table: Option<Way>,

    /// Threads that post descriptors as device code does, for streams through a queue
    #[arg(
        long, value_name = "N", default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..=1024)
    )]
    pub producers: u32,

    /// What to measure [default: latency,rate,bandwidth, and all-to-all with more than two ranks]
    #[arg(long, value_enum, value_delimiter = ',')]
    pub test: Vec<Test>,

    /// Operation [default: put-signal for latency and through queues, put otherwise]
    #[arg(long, value_enum)]
    pub op: Option<Op>,

    /// Weak signals instead of strong ones (RMA v14 and newer)
    #[arg(long)]
    pub weak: bool,

    /// All ranks send to all others at once, instead of one pair
    #[arg(long)]
    pub alltoall: bool,

    /// Only bring communicators up and down: time, memory, threads, descriptors, control messages
    #[arg(long)]
    pub setup: bool,

    /// Message sizes in bytes, with K, M, G for powers of 1024 [default: 8 for latency and rate, 64K for bandwidth]
    #[arg(short, long, value_delimiter = ',', value_parser = parse_size)]
    pub size: Vec<usize>,

    /// All sizes, 2 bytes to 8 MiB
    #[arg(short, long, conflicts_with = "size")]
    pub all: bool,

    /// Operations of each measurement
    #[arg(
        short = 'n', long, value_name = "N", conflicts_with = "duration",
        value_parser = clap::value_parser!(u64).range(1..)
    )]
    pub iters: Option<u64>,

    /// Seconds of each measurement; a calibration run turns them into a number of operations [default: 0.25]
    #[arg(short = 'D', long, value_name = "SECONDS")]
    pub duration: Option<f64>,

    /// Contexts, used in turn
    #[arg(
        short = 'q', long, value_name = "N", default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..=4096)
    )]
    pub contexts: u32,

    /// Operations outstanding at most, to each peer [default: 128; 1024 for rate]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1048576))]
    pub tx_depth: Option<u32>,

    /// Operations posted in a row, all but the last with the hint that more follow
    #[arg(
        short = 'l', long, value_name = "N", default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..=65536)
    )]
    pub post_list: u32,

    /// Both ranks send at once
    #[arg(short, long)]
    pub bidirectional: bool,

    /// Device number
    #[arg(short, long, default_value_t = 0)]
    pub device: i32,

    /// queueDepth for createContext; 0 leaves it to the plugin
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub queue_depth: i32,

    /// Waiting ranks look at memory only: proves that the plugin delivers without being called
    #[arg(long)]
    pub no_progress: bool,

    /// A rank that only receives a stream sleeps 0.2 ms between looks, as perftest's server sleeps until its client is
    /// done; for plugins that deliver without being called. Through a queue device code of a stream sleeps wherever it
    /// waits, as that of a GPU takes no core
    #[arg(long)]
    pub receiver_sleeps: bool,

    /// Also measure this machine between the same two processes: a bare flag ping-pong in shared memory, a plain
    /// cross-process copy, a copy inside one process
    #[arg(long, requires = "local")]
    pub floor: bool,

    /// Bind each rank to a core
    #[arg(long, value_enum, default_value_t = Pin::Auto)]
    pub pin: Pin,

    /// Seconds that ranks wait for one another, for a signal or for a request
    #[arg(long, value_name = "SECONDS", default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..))]
    pub timeout: u64,

    /// Rounds into which a measurement is cut; two libraries take turns, and BW peak is the best round
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..))]
    pub rounds: u64,

    /// Print one JSON object instead of tables
    #[arg(long)]
    pub json: bool,

    /// Print what the plugin logs: -v information too, -vv everything (warnings always)
    #[arg(short, long, action = clap::ArgAction::Count)]
    pub verbose: u8,

    /// Accepted for perftest's sake; does nothing
    #[arg(short = 'F', hide = true)]
    pub no_freq_check: bool,
}

/// What is measured.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Test {
    /// Half a round trip
    Latency,
    /// From the call to the request's completion
    Completion,
    /// Operations a second
    Rate,
    /// Bytes a second
    Bandwidth,
}

/// The operation.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Op {
    /// iput
    Put,
    /// iputSignal with data
    PutSignal,
    /// iputSignal without data
    Signal,
    /// iget
    Get,
}

/// Binding to cores.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pin {
    /// If there are enough cores
    Auto,
    /// Always
    On,
    /// Never
    Off,
}

impl Op {
    /// As in the option.
    pub fn label(self) -> &'static str {
        match self {
            Self::Put => "put",
            Self::PutSignal => "put-signal",
            Self::Signal => "signal",
            Self::Get => "get",
        }
    }
}

impl Test {
    /// As in the option.
    pub fn label(self) -> &'static str {
        match self {
            Self::Latency => "latency",
            Self::Completion => "completion",
            Self::Rate => "rate",
            Self::Bandwidth => "bandwidth",
        }
    }
}

/// Bytes, with a unit.
fn parse_size(text: &str) -> Result<usize, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" | "B" => 0,
        "K" | "KB" | "KIB" => 10,
        "M" | "MB" | "MIB" => 20,
        "G" | "GB" | "GIB" => 30,
        unit => return Err(format!("unit {unit:?} is none of K, M, G")),
    };
    let number: usize = digits.parse().map_err(|_| format!("{text:?} is no size; examples: 8, 64K, 16M"))?;
    match number.checked_shl(shift).filter(|n| n >> shift == number && (1..=1 << 40).contains(n)) {
        Some(bytes) => Ok(bytes),
        None => Err(format!("{text:?} is not between 1 byte and 1 TiB")),
    }
}

impl Args {
    /// Whether all is on this machine, forked by this process.
    pub fn is_local(&self) -> bool {
        self.local.is_some()
    }

    /// How many ranks.
    pub fn nranks(&self) -> u32 {
        self.local.or(self.nranks).unwrap_or(2)
    }

    /// The rank that sends in one-way tests: the client, as in perftest; else rank 0.
    pub fn sender(&self) -> u32 {
        u32::from(!self.is_local() && self.rank.is_none())
    }

    /// What cannot be measured as asked.
    pub fn validate(&self) -> Result<(), String> {
        let nranks = self.nranks();
        if nranks < 2 && !self.setup {
            return Err(format!("{nranks} rank cannot send to another; use --local 2 or more"));
        }
        if nranks == 0 || nranks > 4096 {
            return Err(format!("{nranks} ranks: choose 1 to 4096"));
        }
        if let Some(rank) = self.rank.filter(|&r| r >= nranks) {
            return Err(format!("rank {rank} does not exist among {nranks} ranks, counted from 0"));
        }
        if self.duration.is_some_and(|d| !(d > 0.0 && d <= 86_400.0)) {
            return Err("-D takes seconds above 0 and up to 86400".into());
        }
        if self.alltoall && self.bidirectional {
            return Err("--alltoall sends in all directions; leave -b away".into());
        }
        if self.alltoall && self.test.iter().any(|t| matches!(t, Test::Latency | Test::Completion)) {
            return Err("--alltoall is for rate and bandwidth; leave it away or choose --test rate,bandwidth".into());
        }
        if self.bidirectional && self.test.iter().any(|t| matches!(t, Test::Latency | Test::Completion)) {
            return Err("-b is for rate and bandwidth; leave it away or choose --test rate,bandwidth".into());
        }
        Ok(())
    }

    /// The tests of a pair of ranks, in order.
    pub fn tests(&self) -> Vec<Test> {
        match (self.test.is_empty(), self.alltoall, self.bidirectional) {
            (false, ..) => self.test.clone(),
            (true, true, _) => vec![Test::Rate, Test::Bandwidth],
            (true, false, true) => vec![Test::Rate, Test::Bandwidth],
            (true, false, false) => vec![Test::Latency, Test::Rate, Test::Bandwidth],
        }
    }

    /// The operation of a test.
    pub fn op_of(&self, test: Test) -> Op {
        let signalled = test == Test::Latency || self.table.is_some_and(Way::is_by_device_code);
        self.op.unwrap_or(if signalled { Op::PutSignal } else { Op::Put })
    }

    /// The sizes of a test.
    pub fn sizes_of(&self, test: Test) -> Vec<usize> {
        if self.op_of(test) == Op::Signal {
            return vec![0];
        }
        match (self.all, self.size.is_empty(), test) {
            (true, ..) => (1..=23).map(|bits| 1 << bits).collect(),
            (false, false, _) => self.size.clone(),
            (false, true, Test::Bandwidth) => vec![65536],
            (false, true, _) => vec![8],
        }
    }

    /// The largest size of any test.
    pub fn largest(&self) -> usize {
        let all = [Test::Latency, Test::Completion, Test::Rate, Test::Bandwidth];
        all.into_iter().flat_map(|t| self.sizes_of(t)).max().unwrap_or(0)
    }

    /// Operations outstanding.
    pub fn depth_of(&self, test: Test) -> usize {
        self.tx_depth.unwrap_or(if test == Test::Rate { 1024 } else { 128 }) as usize
    }

    /// How long a measurement should take when no number of operations is given.
    pub fn target(&self) -> Duration {
        Duration::from_secs_f64(self.duration.unwrap_or(0.25))
    }

    /// How long anybody waits.
    pub fn patience(&self) -> Duration {
        Duration::from_secs(self.timeout)
    }

    /// Ranks as these options want them.
    pub fn plan(&self) -> Plan {
        let nranks = self.nranks();
        let place = match (self.local, self.rank, &self.host) {
            (Some(nranks), ..) => Place::Local { nranks },
            (_, Some(0), _) => Place::Root { nranks, listen: self.root.clone().unwrap_or_default() },
            (_, Some(rank), _) => Place::Join { rank, nranks, root: self.root.clone().unwrap_or_default() },
            (_, None, None) => Place::Root { nranks, listen: format!("[::]:{}", self.port) },
            (_, None, Some(host)) => {
                let host = if host.contains(':') { format!("[{host}]") } else { host.clone() };
                Place::Join { rank: 1, nranks, root: format!("{host}:{}", self.port) }
            }
        };
        // Idle ranks wait while others measure; a measurement may take several times its target.
        let deadline = self.patience() + self.target() * 20;
        Plan { place, deadline, tolerate_deaths: false, between_steps: true, options: self.shared_options() }
    }

    /// What all ranks must agree on: names and values, as [`crate::ranks::Plan`] has them.
    fn shared_options(&self) -> String {
        let Self { table, against_table, producers, test, op, weak, alltoall, setup, size, all, .. } = self;
        let Self { iters, duration, contexts, tx_depth, post_list, bidirectional, queue_depth, rounds, .. } = self;
        let against = self.against.is_some();
        format!(
            "table {table:?}; against {against}; against-table {against_table:?}; producers {producers}; \
             test {test:?}; op {op:?}; weak {weak}; alltoall {alltoall}; setup {setup}; size {size:?}; all {all}; \
             iters {iters:?}; duration {duration:?}; contexts {contexts}; tx-depth {tx_depth:?}; \
             post-list {post_list}; bidirectional {bidirectional}; queue-depth {queue_depth}; rounds {rounds}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    fn parse(line: &str) -> Args {
        Cli::try_parse_from(std::iter::once("perf").chain(line.split_whitespace())).expect(line).args
    }

    #[test]
    fn sizes_carry_units() {
        assert_eq!(parse_size("8"), Ok(8));
        assert_eq!(parse_size("64K"), Ok(65536));
        assert_eq!(parse_size("16MiB"), Ok(16 << 20));
        for bad in ["", "0", "K", "3T", "-1", "99999999G", "18446744073709551615K"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn perftest_command_lines_are_understood() {
        let args = parse("--local 2 -s 8,64K -n 1000 -q 4 -t 256 -l 16 -b -d 1 -p 7 -F");
        assert_eq!((args.size.as_slice(), args.iters, args.contexts), (&[8, 65536][..], Some(1000), 4));
        assert_eq!((args.depth_of(Test::Rate), args.post_list, args.device, args.port), (256, 16, 1, 7));
        let all = parse("--local 2 -a").sizes_of(Test::Latency);
        assert_eq!((all[0], all[all.len() - 1], all.len()), (2, 8 << 20, 23));
    }

    #[test]
    fn places_follow_the_options() {
        let place = |line: &str| parse(line).plan().place;
        assert_eq!(place("--local 4"), Place::Local { nranks: 4 });
        assert_eq!(place("-p 9"), Place::Root { nranks: 2, listen: "[::]:9".into() });
        assert_eq!(place("-p 9 fe80::1"), Place::Join { rank: 1, nranks: 2, root: "[fe80::1]:9".into() });
        let many = "--nranks 3 --root a:1 --rank";
        assert_eq!(place(&format!("{many} 0")), Place::Root { nranks: 3, listen: "a:1".into() });
        assert_eq!(place(&format!("{many} 2")), Place::Join { rank: 2, nranks: 3, root: "a:1".into() });
        assert_eq!((parse("host").sender(), parse("--local 2").sender()), (1, 0));
    }

    #[test]
    fn impossible_wishes_are_refused_with_a_remedy() {
        for line in [
            "--local 1",
            "--rank 3 --nranks 3 --root a:1",
            "--local 2 -D 0",
            "--local 2 -b --test latency",
            "--local 3 --alltoall -b",
            "--local 3 --alltoall --test rate,latency",
            "--local 3 --alltoall --test completion",
        ] {
            assert!(parse(line).validate().is_err(), "{line}");
        }
        for line in ["--nranks 3", "--nranks 3 host", "--local 2 --nranks 3", "--local 2 --root a:1", "--root a:1"] {
            assert!(Cli::try_parse_from(["perf"].into_iter().chain(line.split(' '))).is_err(), "{line}");
        }
        assert!(parse("--local 1 --setup").validate().is_ok());
    }
}
