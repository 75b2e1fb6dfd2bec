//! What an entry does, and what a responder says of it.

use super::completion::syndrome;
use super::entry::{Change, Keyed, Source, Work};
use super::events::{QP_ACCESS, QP_INVALID_REQUEST};
use super::mac;
use super::objects::{Qp, State};
use crate::bytes::{self, copy};
use crate::world::World;
use oxygin_ffi::verbs::types::{
    ibv_sge, IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_ATOMIC, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE,
};

/// Why an entry fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    pub syndrome: u8,
    /// The responder's end fails as well, with this event.
    pub responder: Option<u16>,
}

impl Fault {
    fn local(syndrome: u8) -> Self {
        Self { syndrome, responder: None }
    }
}

/// What became of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// It is done; a read or an atomic operation brought so many bytes.
    Done(u32),
    /// It waits for a completion entry of another queue.
    Waits,
    Failed(Fault),
}

const REFUSED: Fault = Fault { syndrome: syndrome::REMOTE_ACCESS, responder: Some(QP_ACCESS) };
const INVALID: Fault = Fault { syndrome: syndrome::REMOTE_INVALID, responder: Some(QP_INVALID_REQUEST) };

impl World {
    /// Carries an entry of a queue pair out.
    pub(super) fn execute(&self, qp: &Qp, work: &Work) -> Progress {
        let done = match work {
            Work::Nothing => Ok(Progress::Done(0)),
            Work::Wait { cq, index } => self.has_completed(qp, *cq, *index),
            Work::Dump { from } => self.gather(qp, from, 0).map(|_| Progress::Done(0)),
            Work::Send => self.peer(qp).and(Err(Fault::local(syndrome::RECEIVER_NOT_READY))),
            Work::Write { to, from } => self.write_out(qp, *to, from),
            Work::Read { from, to } => self.read_in(qp, *from, to),
            Work::Atomic { at, bytes, change, to } => self.change_word(qp, *at, *bytes, change, to),
        };
        done.unwrap_or_else(Progress::Failed)
    }

    /// Whether a completion queue has had its entry `index`; indices have 24 bits.
    fn has_completed(&self, qp: &Qp, cq: u32, index: u32) -> Result<Progress, Fault> {
        let queue = self.mlx5.cqs.get(&cq).filter(|c| c.context == qp.context && qp.is_companion);
        let queue = queue.ok_or(Fault::local(syndrome::LOCAL_OPERATION))?;
        let behind = queue.produced.wrapping_sub(1).wrapping_sub(index) & 0xff_ffff;
        Ok(if behind < 1 << 23 { Progress::Done(0) } else { Progress::Waits })
    }

    /// The responder, if the two are connected.
    fn peer<'a>(&'a self, qp: &'a Qp) -> Result<&'a Qp, Fault> {
        let lost = Fault::local(syndrome::RETRIES_EXCEEDED);
        let number = qp.get("remote_qpn") as u32;
        // One that is connected to itself is out of the table while it is carried out.
        let peer = if number == qp.number { qp } else { self.mlx5.qps.get(&number).ok_or(lost)? };
        let agree = peer.get("remote_qpn") == u64::from(qp.number)
            && matches!(peer.state, State::Rtr | State::Rts)
            && peer.get("next_rcv_psn") == qp.get("next_send_psn")
            && peer.get("mtu") == qp.get("mtu")
            && self.settings.get("stopped", peer.device) == 0;
        let gid = qp.peer_gid();
        let reached = match self.settings.get("link_layer", qp.device) {
            2 => qp.peer_mac() == mac(peer.device) && self.device_with(&gid) == Some(peer.device),
            _ => {
                qp.get("primary_address_path.rlid") == 7 + peer.device as u64
                    || self.device_with(&gid) == Some(peer.device)
            }
        };
        if agree && reached {
            Ok(peer)
        } else {
            Err(lost)
        }
    }

    /// Where pieces of own memory are; `access` is what is to be done there.
    fn gather(&self, qp: &Qp, pieces: &[Keyed], access: u32) -> Result<Vec<(u64, u64)>, Fault> {
        let all: u64 = pieces.iter().map(|p| p.bytes).sum();
        if all > 1 << qp.get("log_msg_max") {
            return Err(Fault::local(syndrome::LOCAL_LENGTH));
        }
        let place = |piece: &Keyed| {
            let region = self.local.get(&piece.key).filter(|r| r.access & access == access);
            let sge = ibv_sge { addr: piece.at, length: piece.bytes as u32, lkey: piece.key };
            let at = region.and_then(|_| self.local(qp.context, &sge));
            at.map(|at| (at, piece.bytes)).ok_or(Fault::local(syndrome::LOCAL_PROTECTION))
        };
        pieces.iter().map(place).collect()
    }

    fn write_out(&self, qp: &Qp, to: (u64, u32), from: &Source) -> Result<Progress, Fault> {
        let from = match from {
            Source::Inline(bytes) => vec![(bytes.as_ptr() as u64, bytes.len() as u64)],
            Source::Memory(pieces) => self.gather(qp, pieces, 0)?,
        };
        let peer = self.peer(qp)?;
        let bytes: u64 = from.iter().map(|f| f.1).sum();
        if peer.get("rwe") == 0 {
            return Err(INVALID);
        }
        let is_lost = self.settings.get("mlx5_lost_writes", peer.device) != 0;
        if bytes > 0 && !is_lost {
            let mut at = self.at_peer(peer.context, to.1, to.0, bytes, IBV_ACCESS_REMOTE_WRITE).ok_or(REFUSED)?;
            for (from, bytes) in from {
                copy(from, at, bytes);
                at += bytes;
            }
        }
        Ok(Progress::Done(0))
    }

    fn read_in(&self, qp: &Qp, from: (u64, u32), to: &[Keyed]) -> Result<Progress, Fault> {
        let to = self.gather(qp, to, IBV_ACCESS_LOCAL_WRITE)?;
        let peer = self.peer(qp)?;
        let bytes: u64 = to.iter().map(|t| t.1).sum();
        if peer.get("rre") == 0 {
            return Err(INVALID);
        }
        if bytes > 0 {
            let mut at = self.at_peer(peer.context, from.1, from.0, bytes, IBV_ACCESS_REMOTE_READ).ok_or(REFUSED)?;
            for (to, bytes) in to {
                copy(at, to, bytes);
                at += bytes;
            }
        }
        Ok(Progress::Done(bytes as u32))
    }

    fn change_word(
        &self,
        qp: &Qp,
        at: (u64, u32),
        bytes: u64,
        change: &Change,
        to: &[Keyed],
    ) -> Result<Progress, Fault> {
        if to.iter().map(|t| t.bytes).sum::<u64>() != bytes || to.len() != 1 {
            return Err(Fault::local(syndrome::LOCAL_LENGTH));
        }
        let to = self.gather(qp, to, IBV_ACCESS_LOCAL_WRITE)?[0].0;
        let peer = self.peer(qp)?;
        let can = self.settings.get("atomic_cap", peer.device) != 0;
        if peer.get("rae") == 0 || peer.get("atomic_mode") == 0 || !can || at.0 % bytes != 0 {
            return Err(INVALID);
        }
        let word = self.at_peer(peer.context, at.1, at.0, bytes, IBV_ACCESS_REMOTE_ATOMIC).ok_or(REFUSED)?;
        if word % bytes != 0 {
            return Err(INVALID);
        }
        let old = bytes::change(word, bytes, |old| changed(old, bytes, change));
        copy((&raw const old) as u64, to, bytes);
        Ok(Progress::Done(bytes as u32))
    }
}

/// What becomes of a word.
fn changed(old: u64, bytes: u64, change: &Change) -> u64 {
    match *change {
        Change::Swap { compare, compare_mask, swap, swap_mask } => match (old ^ compare) & compare_mask {
            0 => old & !swap_mask | swap & swap_mask,
            _ => old,
        },
        // Bit by bit, as one does it on paper.
        Change::Add { value, boundary } => {
            let (mut sum, mut carry) = (0, 0);
            for bit in 0..8 * bytes {
                let column = (old >> bit & 1) + (value >> bit & 1) + carry;
                sum |= (column & 1) << bit;
                carry = if boundary >> bit & 1 == 1 { 0 } else { column >> 1 };
            }
            sum
        }
    }
}
