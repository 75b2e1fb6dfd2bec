//! Signals by message, for devices without remote atomics: a SEND behind the data names the word, its key and the
//! value, and the receiver adds. A reliable connection delivers it after the data that was written before it.
//!
//! Flow control: a sender never has more messages under way than the receiver has receives posted, because a device
//! without atomics (iWARP) may break the connection instead of waiting for a receive. Of two ends that have posted
//! different numbers of receives, which devices' limits may bring about, the smaller one counts both ways. The receiver
//! counts the receives it has posted anew and, when half of that number are due, writes the count into the sender's
//! credit word by RDMA.

use super::regions::OwnRegion;
use super::wr_id::WrId;
use crate::error::{Error, Result};
use crate::memory::registry::Registry;
use crate::rma::op::Signal;
use crate::sys::sync::RwLock;
use oxygin_ffi::verbs::types::*;
use oxygin_ffi::verbs::{Pd, Qp};
use std::collections::HashMap;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes of a message: address, value, key, mark.
const MESSAGE: usize = 24;
/// Bytes between messages in memory. With the head's size it keeps each within a cache line, and so within a page:
/// soft-iWARP up to Linux 6.12 at least would send one across two with the wrong bytes.
const STRIDE: usize = 32;
/// "oxSG", last in every message.
const MARK: u32 = u32::from_le_bytes(*b"oxSG");
/// Bytes in front of a peer's buffers: the credit word that the peer writes, and the one written to the peer.
const HEAD: usize = 64;
const CREDIT_OUT: usize = 8;

/// A peer that gives no credit for so long is asked for a sign of life: where nothing is under way, no error can come
/// from the device by itself.
const PROBE_AFTER: Duration = Duration::from_secs(1);

/// Which window a remote key names.
pub type Keys = RwLock<HashMap<u32, u32>>;

/// A context's messages.
pub struct Messages {
    memory: OwnRegion,
    receives: u32,
    post_recv: PostRecv,
    peers: Vec<Peer>,
    registry: Arc<Registry>,
    keys: Arc<Keys>,
}

struct Peer {
    qp: *mut ibv_qp,
    /// Messages under way at most, both ways: the receives of whichever end posted fewer. A power of two.
    limit: u32,
    /// Messages sent.
    sent: u32,
    /// Receives posted anew.
    taken: u32,
    /// Of those, how many the peer knows of.
    announced: u32,
    /// Where the peer reads `announced`.
    credit: ibv_wr_rdma,
    /// Since when a message has waited for credit with nothing under way, or since it was last asked.
    starved: Option<Instant>,
}

// SAFETY: the pointers are to libibverbs objects, which any thread may use under the context's lock.
unsafe impl Send for Messages {}

impl Messages {
    /// Posts `receives` receives on each of `qps` (by peer, where its messages arrive), which are in INIT.
    pub fn new(
        pd: &Arc<Pd>,
        qps: &[&Qp],
        receives: u32,
        post_recv: PostRecv,
        registry: Arc<Registry>,
        keys: Arc<Keys>,
    ) -> Result<Self> {
        let bytes = qps.len() * Self::span(receives);
        let memory = OwnRegion::new(pd, bytes).map_err(|e| e.context("memory for signal messages"))?;
        let peers = qps
            .iter()
            .map(|qp| Peer {
                qp: qp.as_ptr(),
                limit: receives,
                sent: 0,
                taken: 0,
                announced: 0,
                credit: ibv_wr_rdma::default(),
                starved: None,
            })
            .collect();
        let messages = Self { memory, receives, post_recv, peers, registry, keys };
        for peer in 0..qps.len() as u32 {
            for index in 0..receives {
                messages.post(peer, index).map_err(|rc| {
                    let e = std::io::Error::from_raw_os_error(rc);
                    Error::system(format!("posting a receive for signals of rank {peer}: {e}"))
                })?;
            }
        }
        Ok(messages)
    }

    /// Bytes a peer.
    fn span(receives: u32) -> usize {
        HEAD + 2 * STRIDE * receives as usize
    }

    fn at(&self, peer: u32, offset: usize) -> u64 {
        self.memory.address() + (peer as usize * Self::span(self.receives) + offset) as u64
    }

    fn word(&self, peer: u32, offset: usize) -> Option<&AtomicU64> {
        let at = peer as usize * Self::span(self.receives) + offset;
        self.memory.words().get(at / 8)
    }

    /// Address and key of the word in which `peer` says how many messages it has taken.
    pub fn credit_word(&self, peer: u32) -> (u64, u32) {
        (self.at(peer, 0), self.memory.keys().1)
    }

    /// Where `peer` wants to be told how many of its messages were taken, and how many receives it has posted.
    pub fn connect(&mut self, peer: u32, credit: ibv_wr_rdma, receives: u32) {
        if let Some(p) = self.peers.get_mut(peer as usize) {
            p.credit = credit;
            p.limit = self.receives.min(receives);
        }
    }

    fn post(&self, peer: u32, index: u32) -> std::result::Result<(), i32> {
        let Some(p) = self.peers.get(peer as usize) else { return Err(libc::EINVAL) };
        let offset = HEAD + STRIDE * (self.receives + index) as usize;
        let mut sge = ibv_sge { addr: self.at(peer, offset), length: STRIDE as u32, lkey: self.memory.keys().0 };
        let mut wr = ibv_recv_wr { wr_id: WrId::receive(peer, index), next: null_mut(), sg_list: &mut sge, num_sge: 1 };
        let mut bad = null_mut();
        // SAFETY: the queue pair is live while the context is, and the buffer as long as this object.
        match unsafe { (self.post_recv)(p.qp, &mut wr, &mut bad) } {
            0 => Ok(()),
            rc => Err(rc),
        }
    }

    /// The peer, and the number of the message after `ahead` others that are being built; `None` while it has no
    /// receive for that.
    fn next(&self, peer: u32, ahead: u32) -> Option<(&Peer, u32)> {
        let p = self.peers.get(peer as usize)?;
        let number = p.sent.wrapping_add(ahead);
        // Counts only grow; the low half is enough while fewer than 2^32 messages are under way.
        let known = self.word(peer, 0)?.load(Ordering::Acquire) as u32;
        (number.wrapping_sub(known) < p.limit).then_some((p, number))
    }

    /// Whether the peer has a receive for the message after `ahead` others; it keeps it until that is sent.
    pub fn has_credit(&self, peer: u32, ahead: u32) -> bool {
        self.next(peer, ahead).is_some()
    }

    /// Writes the message after `ahead` others that are being built; `None` while the peer has no receive for it.
    pub fn stage(&self, peer: u32, ahead: u32, signal: &Signal) -> Option<ibv_sge> {
        let (p, number) = self.next(peer, ahead)?;
        // A peer that has taken message n - limit is through with this buffer.
        let offset = HEAD + STRIDE * (number % p.limit) as usize;
        let key = u64::from(signal.rkey) | u64::from(MARK) << 32;
        for (i, word) in [signal.remote, signal.value, key].into_iter().enumerate() {
            self.word(peer, offset + 8 * i)?.store(word.to_le(), Ordering::Relaxed);
        }
        Some(ibv_sge { addr: self.at(peer, offset), length: MESSAGE as u32, lkey: self.memory.keys().0 })
    }

    /// `count` staged messages are on their way.
    pub fn sent(&mut self, peer: u32, count: u32) {
        if let Some(p) = self.peers.get_mut(peer as usize) {
            p.sent = p.sent.wrapping_add(count);
            p.starved = None;
        }
    }

    /// A message waits for credit of `peer` while nothing is under way: where to write nothing, if it is time to find
    /// out whether that peer is there at all.
    pub fn probe(&mut self, peer: u32) -> Option<ibv_wr_rdma> {
        let p = self.peers.get_mut(peer as usize)?;
        let is_due = p.starved.is_some_and(|since| since.elapsed() >= PROBE_AFTER);
        if is_due || p.starved.is_none() {
            p.starved = Some(Instant::now());
        }
        is_due.then_some(p.credit)
    }

    /// A message of `peer` lies in buffer `index`: applies it and posts the buffer anew. The error is a sentence.
    pub fn received(&mut self, peer: u32, index: u32, bytes: u32) -> std::result::Result<(), String> {
        if index >= self.receives || bytes as usize != MESSAGE {
            return Err(format!("rank {peer} sent {bytes} bytes where a signal message has {MESSAGE}"));
        }
        let offset = HEAD + STRIDE * (self.receives + index) as usize;
        let read = |i: usize| self.word(peer, offset + 8 * i).map_or(0, |w| u64::from_le(w.load(Ordering::Acquire)));
        let (addr, value, key) = (read(0), read(1), read(2));
        if (key >> 32) as u32 != MARK {
            return Err(format!(
                "rank {peer} sent a message that is no signal ({addr:#x}, {value:#x}, {key:#x}); run the same oxygin \
                 on all ranks"
            ));
        }
        self.apply(peer, addr, value, key as u32)?;
        self.post(peer, index)
            .map_err(|rc| format!("a receive cannot be posted: {}", std::io::Error::from_raw_os_error(rc)))?;
        if let Some(p) = self.peers.get_mut(peer as usize) {
            p.taken = p.taken.wrapping_add(1);
        }
        Ok(())
    }

    fn apply(&self, peer: u32, addr: u64, value: u64, rkey: u32) -> std::result::Result<(), String> {
        let window = self.keys.read().get(&rkey).copied();
        let held = self.registry.hold();
        if !window.is_some_and(|window| held.add(window, addr, value)) {
            return Err(format!(
                "rank {peer} signalled {addr:#x} with key {rkey:#x}, which is no aligned word of a window in host \
                 memory; without remote atomics signals cannot go to GPU memory"
            ));
        }
        Ok(())
    }

    /// Whether `peer` should be told how many messages were taken.
    pub fn owes(&self, peer: u32) -> bool {
        self.peers.get(peer as usize).is_some_and(|p| p.taken.wrapping_sub(p.announced) >= (p.limit / 2).max(1))
    }

    /// The write that tells it.
    pub fn announcement(&self, peer: u32) -> Option<(ibv_sge, ibv_wr_rdma)> {
        if !self.owes(peer) {
            return None;
        }
        let p = self.peers.get(peer as usize)?;
        // A write still under way may carry the new count instead of its own: it is as true.
        self.word(peer, CREDIT_OUT)?.store(u64::from(p.taken), Ordering::Release);
        Some((ibv_sge { addr: self.at(peer, CREDIT_OUT), length: 8, lkey: self.memory.keys().0 }, p.credit))
    }

    /// That write is on its way.
    pub fn announced(&mut self, peer: u32) {
        if let Some(p) = self.peers.get_mut(peer as usize) {
            p.announced = p.taken;
        }
    }
}
