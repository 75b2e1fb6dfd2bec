//! The network that exists in this process only: regions, completion queues, queue pairs, and what carries work
//! requests out. One lock guards it all; the fake is for correctness, not for speed.

mod carry;
mod states;

use crate::mlx5::Mlx5;
use crate::settings::Settings;
use carry::NOT_READY;
use oxygin_ffi::verbs::types::*;
use std::collections::{HashMap, VecDeque};

/// A registered region.
pub struct Region {
    /// What work requests call its first byte.
    pub iova: u64,
    /// Where it really is.
    pub host: u64,
    /// Bytes.
    pub len: u64,
    /// `IBV_ACCESS_*`.
    pub access: u32,
    /// The open device.
    pub context: usize,
}

impl Region {
    /// Where `len` bytes at `addr` really are, if they are inside.
    fn host(&self, addr: u64, len: u64) -> Option<u64> {
        let at = addr.checked_sub(self.iova)?;
        (at <= self.len && len <= self.len - at).then(|| self.host + at)
    }
}

/// A completion and how many send queue entries taking it gives back.
struct Entry {
    wc: ibv_wc,
    frees: (u32, u32),
}

/// A completion queue.
#[derive(Default)]
pub struct Completions {
    entries: VecDeque<Entry>,
    size: usize,
    /// Armed: for solicited completions only, or for all.
    armed: Option<bool>,
    channel: usize,
}

/// A posted send.
struct Posted {
    wr: ibv_send_wr,
    sge: ibv_sge,
    /// The bytes, where they came inside the work request.
    inline: Option<Box<[u8]>>,
}

// SAFETY: the pointers inside are not followed once the request is posted.
unsafe impl Send for Posted {}

/// A queue pair.
pub struct Pair {
    /// Its address.
    pub at: usize,
    context: usize,
    device: usize,
    send_cq: usize,
    recv_cq: usize,
    cap: ibv_qp_cap,
    /// What modify_qp set, with the state.
    pub attr: ibv_qp_attr,
    /// Options of the connection: what was offered, and from RTR on what was taken.
    pub ece: Option<ibv_ece>,
    sends: VecDeque<Posted>,
    receives: VecDeque<(u64, ibv_sge)>,
    /// Entries of the send queue in use: freed when a completion is taken.
    used: u32,
    /// Carried out without a completion since the last one.
    silent: u32,
    /// iWARP: it accepted the connection and nothing of the other end has arrived yet, so that it must not send.
    must_wait: bool,
}

/// Events of a completion channel.
#[derive(Default)]
pub struct Events {
    /// An eventfd that counts them.
    pub fd: i32,
    /// Completion queues, oldest first.
    pub queue: VecDeque<usize>,
}

/// Asynchronous events of an open device.
pub struct AsyncEvents {
    /// Index of the device.
    pub device: usize,
    /// An eventfd that counts them.
    pub fd: i32,
    /// Oldest first.
    pub queue: VecDeque<ibv_async_event>,
}

impl AsyncEvents {
    fn push(&mut self, event_type: u32, element: u64) {
        self.queue.push_back(ibv_async_event { element, event_type });
        let one = 1u64;
        // SAFETY: writes eight bytes of a local variable to the device's eventfd.
        unsafe { libc::write(self.fd, (&raw const one).cast(), 8) };
    }
}

/// Everything.
#[derive(Default)]
pub struct World {
    /// Settings and counts.
    pub settings: Settings,
    /// By local key.
    pub local: HashMap<u32, Region>,
    /// Local by remote key: the two are never the same number, so that mixing them up shows.
    pub remote: HashMap<u32, u32>,
    /// By address.
    pub completions: HashMap<usize, Completions>,
    /// By number.
    pub pairs: HashMap<u32, Pair>,
    /// By address.
    pub channels: HashMap<usize, Events>,
    /// By address of the open device.
    pub events: HashMap<usize, AsyncEvents>,
    /// What was written and has not come to memory, oldest first.
    pub on_the_way: Vec<carry::OnTheWay>,
    /// What libmlx5 has made.
    pub mlx5: Mlx5,
    next_key: u32,
    next_pair: u32,
}

impl World {
    /// Gives a region its keys.
    pub fn add_region(&mut self, region: Region) -> (u32, u32) {
        let free = |n: &u32| !self.local.contains_key(&(n * 2));
        let number = (1..=self.next_key).find(|n| self.settings.get("reuse_keys", 0) != 0 && free(n));
        let number = number.unwrap_or(self.next_key + 1);
        self.next_key = self.next_key.max(number);
        let (lkey, rkey) = (number * 2, 0x8000_0001 + number * 2);
        self.local.insert(lkey, region);
        self.remote.insert(rkey, lkey);
        (lkey, rkey)
    }

    /// Makes a completion queue.
    pub fn add_completions(&mut self, cq: usize, size: usize, channel: usize) {
        self.completions.insert(cq, Completions { size, channel, ..Default::default() });
    }

    /// Makes a queue pair and returns its number.
    pub fn add_pair(&mut self, context: usize, device: usize, send_cq: usize, recv_cq: usize, cap: ibv_qp_cap) -> u32 {
        self.next_pair += 1;
        let number = 0x10_0000 + self.next_pair;
        self.pairs.insert(
            number,
            Pair {
                at: 0,
                context,
                device,
                send_cq,
                recv_cq,
                cap,
                attr: ibv_qp_attr::default(),
                sends: VecDeque::new(),
                receives: VecDeque::new(),
                used: 0,
                silent: 0,
                must_wait: false,
                ece: None,
            },
        );
        number
    }

    /// An asynchronous event, and nothing else: of all open devices of this index or of their ports, of a queue pair of
    /// this number, or of its completion queue.
    pub fn strike(&mut self, event_type: u32, value: i64) {
        if event_type >= IBV_EVENT_DEVICE_FATAL {
            let of = self.events.values_mut().filter(|events| events.device as i64 == value);
            return of.for_each(|events| events.push(event_type, u64::from(event_type != IBV_EVENT_DEVICE_FATAL)));
        }
        let Some(pair) = self.pairs.get(&(value as u32)) else { return };
        let element = if event_type == IBV_EVENT_CQ_ERR { pair.send_cq } else { pair.at };
        if let Some(events) = self.events.get_mut(&pair.context) {
            events.push(event_type, element as u64);
        }
    }

    /// Takes a send into the queue; an errno when it cannot.
    pub fn queue_send(&mut self, number: u32, wr: &ibv_send_wr) -> Result<(), i32> {
        let pair = self.pairs.get_mut(&number).ok_or(libc::EINVAL)?;
        if pair.attr.qp_state < IBV_QPS_RTS || wr.num_sge < 0 || wr.num_sge > 1 {
            return Err(libc::EINVAL);
        }
        if pair.used >= pair.cap.max_send_wr {
            self.settings.count("send_queue_full", 1);
            return Err(libc::ENOMEM);
        }
        // SAFETY: the poster links num_sge pieces.
        let sge = if wr.num_sge == 1 { unsafe { *wr.sg_list } } else { ibv_sge::default() };
        let inline = match wr.send_flags & IBV_SEND_INLINE {
            0 => None,
            _ if sge.length > pair.cap.max_inline_data => return Err(libc::EINVAL),
            // SAFETY: the poster's memory, whose key does not matter; read now and never again.
            _ => Some(unsafe { std::slice::from_raw_parts(sge.addr as *const u8, sge.length as usize) }.into()),
        };
        if inline.is_some() {
            self.settings.count("inlined", 1);
        }
        pair.sends.push_back(Posted { wr: *wr, sge, inline });
        pair.used += 1;
        self.settings.count("work_requests", 1);
        Ok(())
    }

    /// Takes a receive into the queue.
    pub fn queue_receive(&mut self, number: u32, id: u64, sge: ibv_sge) -> Result<(), i32> {
        let pair = self.pairs.get_mut(&number).ok_or(libc::EINVAL)?;
        if pair.attr.qp_state == IBV_QPS_RESET {
            return Err(libc::EINVAL);
        }
        if pair.receives.len() >= pair.cap.max_recv_wr as usize {
            return Err(libc::ENOMEM);
        }
        if pair.attr.qp_state == IBV_QPS_ERR {
            let cq = pair.recv_cq;
            let wc = ibv_wc { wr_id: id, status: IBV_WC_WR_FLUSH_ERR, qp_num: number, ..Default::default() };
            self.complete(cq, wc, (number, 0), false);
            return Ok(());
        }
        pair.receives.push_back((id, sge));
        let peer = pair.attr.dest_qp_num;
        if self.settings.get("late", 0) == 0 {
            // A sender may have been waiting for it.
            self.run(peer, usize::MAX);
        }
        Ok(())
    }

    /// Takes up to `n` completions.
    pub fn poll(&mut self, cq: usize, n: usize, mut take: impl FnMut(usize, ibv_wc)) -> usize {
        if !self.on_the_way.is_empty() {
            self.land_old_writes();
        }
        if self.settings.get("late", 0) == 1 {
            self.stir();
        }
        let mut taken = 0;
        while taken < n {
            let Some(entry) = self.completions.get_mut(&cq).and_then(|c| c.entries.pop_front()) else { break };
            if let Some(pair) = self.pairs.get_mut(&entry.frees.0) {
                pair.used -= entry.frees.1;
            }
            take(taken, entry.wc);
            taken += 1;
        }
        let endless = self.settings.get("endless", 0) as u64;
        if taken == 0 && n > 0 && endless != 0 {
            take(0, ibv_wc { wr_id: endless, ..Default::default() });
            return 1;
        }
        taken
    }

    /// Arms a queue's channel.
    pub fn arm(&mut self, cq: usize, solicited_only: bool) {
        if let Some(c) = self.completions.get_mut(&cq) {
            c.armed = Some(solicited_only);
        }
    }

    /// Carries out a little of some queue pairs, chosen at random: late, and out of order across queue pairs.
    pub fn stir(&mut self) {
        for _ in 0..self.settings.random(4) {
            let mut busy: Vec<u32> = self.pairs.iter().filter(|(_, p)| !p.sends.is_empty()).map(|(n, _)| *n).collect();
            busy.sort_unstable();
            let at = self.settings.random(busy.len() as u64) as usize;
            let Some(&number) = busy.get(at) else { return };
            let steps = 1 + self.settings.random(5) as usize;
            self.run(number, steps);
        }
    }

    /// Carries out everything that can be (0), on connections of a rank to itself (1), or on all others (2).
    pub fn run_all(&mut self, which: i64) {
        let is_meant =
            |(number, pair): &(&u32, &Pair)| which == 0 || (pair.attr.dest_qp_num == **number) == (which == 1);
        let all: Vec<u32> = self.pairs.iter().filter(is_meant).map(|(number, _)| *number).collect();
        for number in all {
            self.run(number, usize::MAX);
        }
    }

    /// Carries out up to `steps` sends of a queue pair, in order.
    pub fn run(&mut self, number: u32, steps: usize) {
        for _ in 0..steps {
            let peer = self.pairs.get(&number).and_then(|pair| self.pairs.get(&pair.attr.dest_qp_num));
            if peer.is_some_and(|peer| self.settings.get("stopped", peer.device) != 0) {
                return;
            }
            let Some(pair) = self.pairs.get_mut(&number) else { return };
            let at = if self.settings.get("overtake", 0) == 0 {
                0
            } else {
                let next = pair.sends.iter().position(|s| s.wr.opcode != IBV_WR_RDMA_READ);
                next.filter(|&i| pair.sends[i].wr.send_flags & IBV_SEND_FENCE == 0).unwrap_or(0)
            };
            let Some(send) = pair.sends.remove(at) else { return };
            let (wr, broken) = (send.wr, pair.attr.qp_state == IBV_QPS_ERR);
            let status = if broken { IBV_WC_WR_FLUSH_ERR } else { self.carry_out(number, &send) };
            if status == NOT_READY {
                self.settings.count("receiver_not_ready", 1);
                if let Some(pair) = self.pairs.get_mut(&number) {
                    pair.sends.push_front(send);
                }
                return;
            }
            let Some(pair) = self.pairs.get_mut(&number) else { return };
            pair.silent += 1;
            if status == IBV_WC_SUCCESS && wr.send_flags & IBV_SEND_SIGNALED == 0 {
                continue;
            }
            let frees = (number, std::mem::take(&mut pair.silent));
            let cq = pair.send_cq;
            let wc = ibv_wc {
                wr_id: wr.wr_id,
                status,
                // Undefined on errors: something that would mislead whoever looks at it.
                opcode: if status == IBV_WC_SUCCESS { 0 } else { 0x5a5a },
                vendor_err: if status == IBV_WC_SUCCESS { 0 } else { 0x81 },
                qp_num: number,
                ..Default::default()
            };
            self.complete(cq, wc, frees, status != IBV_WC_SUCCESS);
            if status != IBV_WC_SUCCESS && !broken {
                self.break_pair(number);
            }
        }
    }

    /// The queue pair fails: everything in it is flushed.
    pub fn break_pair(&mut self, number: u32) {
        let Some(pair) = self.pairs.get_mut(&number) else { return };
        pair.attr.qp_state = IBV_QPS_ERR;
        let cq = pair.recv_cq;
        for (wr_id, _) in std::mem::take(&mut pair.receives) {
            let wc = ibv_wc { wr_id, status: IBV_WC_WR_FLUSH_ERR, qp_num: number, ..Default::default() };
            self.complete(cq, wc, (number, 0), true);
        }
        self.run(number, usize::MAX);
    }

    fn complete(&mut self, cq: usize, wc: ibv_wc, frees: (u32, u32), solicited: bool) {
        let Some(c) = self.completions.get_mut(&cq) else { return };
        c.entries.push_back(Entry { wc, frees });
        if c.entries.len() > c.size {
            self.settings.count("completion_overruns", 1);
        }
        if c.armed.is_some_and(|only| solicited || !only) {
            c.armed = None;
            let channel = c.channel;
            if let Some(events) = self.channels.get_mut(&channel) {
                events.queue.push_back(cq);
                let one = 1u64;
                // SAFETY: writes eight bytes of a local variable to the channel's eventfd.
                unsafe { libc::write(events.fd, (&raw const one).cast(), 8) };
            }
        }
    }
}
