//! What a device keeps: memory that is registered for it, doorbell pages, completion queues, queue pairs, channels.

use super::pages::Page;
use super::prm::Layout;
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;

/// The MAC of device `index`'s port.
pub fn mac(index: usize) -> [u8; 6] {
    [0x02, 0xfa, 0xce, 0, 0, 1 + index as u8]
}

/// Registered memory of queues.
#[derive(Debug)]
pub struct Umem {
    pub context: usize,
    /// Where it lies in this process.
    pub host: u64,
    pub bytes: u64,
    /// Bytes of its pages, in which queues begin.
    pub page: u64,
    /// Whether the fake has mapped it.
    pub mapped: bool,
    /// Queues in it.
    pub users: u32,
}

/// A doorbell page.
#[derive(Debug)]
pub struct Uar {
    pub context: usize,
    pub page: Arc<Page>,
    pub users: u32,
    /// Doorbells that were looked at: of the register at 0x800 and of the one at 0x600.
    pub seen: [u64; 2],
    /// Given to everybody who asks for a shared one; ends with its context.
    pub shared: bool,
}

/// A completion queue.
#[derive(Debug)]
pub struct Cq {
    pub context: usize,
    pub number: u32,
    pub umem: u32,
    pub record_umem: u32,
    pub uar: u32,
    /// Where its entries are.
    pub at: u64,
    pub log_entries: u32,
    /// Where its doorbell record is: the consumer's index, then what arms it.
    pub record: u64,
    pub ignores_overruns: bool,
    /// Entries written so far.
    pub produced: u32,
    /// Overrun: nothing is written any more.
    pub is_broken: bool,
    /// Queue pairs that complete here.
    pub users: u32,
    /// The number that arms it next, of 2 bits.
    pub sequence: u32,
}

/// States, as `QUERY_QP` numbers them: Linux `include/linux/mlx5/qp.h`, `MLX5_QP_STATE_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum State {
    Rst = 0,
    Init = 1,
    Rtr = 2,
    Rts = 3,
    Err = 6,
}

/// A queue pair.
#[derive(Debug)]
pub struct Qp {
    pub context: usize,
    pub device: usize,
    pub number: u32,
    pub state: State,
    pub umem: u32,
    pub record_umem: Option<u32>,
    pub uar: u32,
    pub send_cq: u32,
    pub receive_cq: Option<u32>,
    /// Where its send slots are.
    pub slots: u64,
    pub log_slots: u32,
    /// Where the send half of its doorbell record is; none: doorbells without one.
    pub record: Option<u64>,
    pub is_companion: bool,
    /// A whole answer to `QUERY_QP`, whose context is kept up to date.
    pub answer: Vec<u8>,
    /// Entries executed, in slots, counted on and on.
    pub done: u64,
    /// Entries that doorbells have announced, in slots.
    pub rung: u64,
    /// Its page was rung since its doorbell record was read: by this queue pair, or by another one in the same moment,
    /// whose doorbell is all that is left.
    pub is_to_look: bool,
    /// It was rung for more than its ring holds.
    pub is_failed: bool,
}

impl Qp {
    /// A field of its context.
    pub fn get(&self, name: &str) -> u64 {
        super::prm::commands::QUERY_QP_OUT.get(&self.answer, &format!("qpc.{name}"))
    }

    /// Takes fields of its context from a command.
    pub fn take(&mut self, from: &Layout, command: &[u8], names: &[&str]) {
        for name in names {
            let name = format!("qpc.{name}");
            let to = &super::prm::commands::QUERY_QP_OUT;
            if name.ends_with("rgid_rip") {
                let gid = from.bytes_of(command, &name);
                for (i, byte) in (0..).zip(gid) {
                    super::prm::write(&mut self.answer, 0x0c0 + 0x0c0 + 0x080 + 8 * i, 8, (*byte).into());
                }
            } else {
                to.set(&mut self.answer, &name, from.get(command, &name));
            }
        }
    }

    /// A field of at most 64 bits.
    pub fn set(&mut self, name: &str, value: u64) {
        super::prm::commands::QUERY_QP_OUT.set(&mut self.answer, &format!("qpc.{name}"), value);
    }

    /// The GID of its peer.
    pub fn peer_gid(&self) -> [u8; 16] {
        let bytes = super::prm::commands::QUERY_QP_OUT.bytes_of(&self.answer, "qpc.primary_address_path.rgid_rip");
        bytes.try_into().unwrap_or_default()
    }

    /// The MAC of its peer.
    pub fn peer_mac(&self) -> [u8; 6] {
        let all = self.get("primary_address_path.rmac_47_32") << 32 | self.get("primary_address_path.rmac_31_0");
        let bytes = all.to_be_bytes();
        std::array::from_fn(|i| bytes[i + 2])
    }
}

/// What an object handle stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    Cq(u32),
    Qp(u32),
}

/// An event channel.
#[derive(Debug)]
pub struct Channel {
    pub fd: i32,
    pub context: usize,
    pub omits_data: bool,
    /// What, which event, and what to say then.
    pub subscribed: Vec<(Kind, u16, u64)>,
    /// Cookie and data.
    pub events: VecDeque<(u64, [u8; 64])>,
}

/// An answer to a query that was asked to come later.
#[derive(Debug)]
pub struct LateAnswer {
    pub id: u64,
    pub answer: Vec<u8>,
}

/// Everything of mlx5.
#[derive(Debug, Default)]
pub struct Mlx5 {
    /// Contexts that were opened for DevX.
    pub contexts: HashSet<usize>,
    pub umems: HashMap<u32, Umem>,
    pub uars: HashMap<u32, Uar>,
    pub cqs: HashMap<u32, Cq>,
    /// In the order in which they have their turns.
    pub qps: BTreeMap<u32, Qp>,
    /// Protection domains by address: number and context.
    pub domains: HashMap<usize, (u32, usize)>,
    pub channels: HashMap<usize, Channel>,
    /// Command channels by address.
    pub answers: HashMap<usize, (i32, VecDeque<LateAnswer>)>,
    /// Why the last command was refused.
    pub refusal: String,
    /// Whether the thread that executes runs.
    pub is_running: bool,
    next: u32,
}

impl Mlx5 {
    /// A number that nothing had before.
    pub fn number(&mut self) -> u32 {
        self.next += 1;
        self.next
    }

    /// What a context has left open.
    pub fn left_by(&self, context: usize) -> usize {
        self.umems.values().filter(|u| u.context == context).count()
            + self.uars.values().filter(|u| u.context == context && !u.shared).count()
            + self.cqs.values().filter(|c| c.context == context).count()
            + self.qps.values().filter(|q| q.context == context).count()
            + self.channels.values().filter(|c| c.context == context).count()
    }

    /// Objects that somebody has to end.
    pub fn live(&self) -> [(&'static str, usize); 5] {
        [
            ("live_mlx5_umems", self.umems.len()),
            ("live_mlx5_uars", self.uars.values().filter(|u| !u.shared).count()),
            ("live_mlx5_cqs", self.cqs.len()),
            ("live_mlx5_qps", self.qps.len()),
            ("live_mlx5_channels", self.channels.len() + self.answers.len()),
        ]
    }
}
