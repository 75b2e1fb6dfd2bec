//! The first transfer over each connection. iWARP lets the end that accepted send only after something of the other
//! end has arrived, so whoever connected reads a word of the peer: an answer means that it has arrived there. All
//! ranks meet after that, and then both ends may send.

use crate::error::{Error, Result};
use crate::fabric::verbs::queues::Device;
use crate::fabric::verbs::status::{kind, meaning};
use crate::fabric::verbs::template::blank;
use oxygin_ffi::verbs::types::*;
use std::collections::BTreeSet;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

/// One read.
#[derive(Clone, Copy)]
pub struct FirstRead {
    /// Towards whom.
    pub peer: u32,
    /// The queue pair.
    pub qp: *mut ibv_qp,
    /// A registered word of the peer.
    pub word: ibv_wr_rdma,
}

/// How long to sleep between looks at the completion queue.
const PAUSE: Duration = Duration::from_micros(100);

/// Reads from every peer into the scratch word and waits until all have answered. Nothing else is under way on the
/// context's queues.
pub fn first_reads(device: &Device, reads: &[FirstRead], label: &str, end: Instant) -> Result<()> {
    let mut sge = ibv_sge { addr: device.scratch, length: 8, lkey: device.scratch_lkey };
    for read in reads {
        let mut wr = ibv_send_wr {
            wr_id: read.peer.into(),
            sg_list: &mut sge,
            num_sge: 1,
            opcode: IBV_WR_RDMA_READ,
            send_flags: IBV_SEND_SIGNALED,
            wr: ibv_wr_remote { rdma: read.word },
            ..blank()
        };
        let mut bad = null_mut();
        // SAFETY: the queue pair is live; the scratch word outlives it and the device checks keys and ranges.
        let rc = unsafe { (device.post_send)(read.qp, &mut wr, &mut bad) };
        if rc != 0 {
            let e = std::io::Error::from_raw_os_error(rc);
            return Err(Error::system(format!("{label}, rank {}: the first read cannot be posted: {e}", read.peer)));
        }
    }
    let mut waiting: BTreeSet<u32> = reads.iter().map(|r| r.peer).collect();
    while let Some(&first) = waiting.first() {
        let mut wc = ibv_wc::default();
        // SAFETY: the completion queue is live; there is room for one completion.
        match unsafe { (device.poll_cq)(device.cq, 1, &mut wc) } {
            1 if wc.status == IBV_WC_SUCCESS => {
                waiting.remove(&(wc.wr_id as u32));
            }
            1 => {
                let peer = reads.iter().map(|r| r.peer).find(|&p| u64::from(p) == wc.wr_id).unwrap_or(first);
                let (meaning, remedy) = meaning(wc.status);
                return Err(Error::remote(format!(
                    "{label}, rank {peer}: the first read over the new connection failed with status {}: {meaning}; \
                     {remedy}",
                    wc.status
                ))
                .of_kind(kind(wc.status)));
            }
            0 if Instant::now() >= end => {
                return Err(Error::remote(format!(
                    "{label}, rank {first} and {} others: the connection stands, but the first read over it is not \
                     answered; look at the peer's log and for packets that are lost",
                    waiting.len() - 1
                )));
            }
            0 => std::thread::sleep(PAUSE),
            _ => return Err(Error::system(format!("{label}: the completion queue cannot be read"))),
        }
    }
    Ok(())
}
