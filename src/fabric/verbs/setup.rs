//! Contexts from nothing to ready: queues sized to the device, queue pairs made, described to the peers, connected.

use super::bounce::INLINE;
use super::connect::{init, init_iwarp, receive, send, Origin, RemoteQp};
use super::context::{Limits, Shared, VerbsContext};
use super::ece::{self, Agreed};
use super::iwarp::{first_reads, meet, Acceptor, ConnectRound, FirstRead, Home, Peer};
use super::lane::Lane;
use super::message::Messages;
use super::outcome::Outcomes;
use super::pairs::Pairs;
use super::port::with_class;
use super::progress::Progress;
use super::queues::{Device, Queues};
use super::wire::{emit_taken, parse_taken, QpInfo, QpSlice, Token};
use super::{Joined, VerbsFabric};
use crate::error::{Error, Result};
use crate::fabric::ContextSpec;
use oxygin_ffi::verbs::types::*;
use oxygin_ffi::verbs::{Cq, Qp};
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::Instant;

/// Contexts whose queue pairs are in INIT.
pub struct Pending {
    contexts: Vec<PendingContext>,
    /// Receives on each queue pair; 0 where signals are atomics.
    receives: u32,
    traffic_class: Option<u8>,
    stride: u32,
    progress: Option<Arc<Progress>>,
    /// What this rank's listeners want to hear; zeros without any.
    token: Token,
}

struct PendingContext {
    pairs: Pairs,
    /// iWARP: where peers connect to.
    acceptor: Option<Acceptor>,
    messages: Option<Messages>,
    cq: Arc<Cq>,
    psns: Vec<u32>,
    depth: u32,
    /// By peer: how far its queue pair has come to agree on options.
    agreed: Vec<Agreed>,
}

/// Entries of a send queue at most: operations take two of them and no more than 256 are noted.
const MAX_DEPTH: u32 = 512;

/// Entries of each queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Sizes {
    depth: u32,
    receives: u32,
    completions: u32,
}

/// Sizes such that a completion queue holds every completion its queue pairs can ever produce at once: after an error
/// each work request, signalled or not, completes.
fn sizes(wanted: u32, nranks: u32, atomics: bool, limits: &ibv_device_attr) -> Result<Sizes> {
    // A put with a signal takes two entries, and NCCL has at most 32 × maxRecvs operations a peer under way. In large
    // jobs the memory of the queues counts more.
    let usual = if nranks <= 64 { 256 } else { 128 };
    let max_wr = limits.max_qp_wr.max(0) as u32;
    let completions = limits.max_cqe.max(0) as u32;
    let share = completions / nranks;
    let receives = match atomics {
        true => 0u32,
        // A power of two: buffers are counted through, also where the count of messages wraps.
        false => {
            (if nranks <= 64 { 32 } else { 16 }).min(max_wr).min(share / 4).checked_ilog2().map_or(0, |log| 1 << log)
        }
    };
    let wanted = if wanted == 0 { usual } else { wanted.max(4) };
    let depth = wanted.min(max_wr).min(MAX_DEPTH).min(share.saturating_sub(receives));
    if depth < 4 || (!atomics && receives == 0) {
        return Err(Error::system(format!(
            "{nranks} ranks need {} completions a context, the device has {completions} (and {max_wr} work requests a \
             queue); use a device with more, or OXYGIN_FABRIC=soft",
            nranks * 5
        )));
    }
    Ok(Sizes { depth, receives, completions: (depth + receives) * nranks })
}

pub(super) fn prepare(fabric: &VerbsFabric, spec: &ContextSpec) -> Result<(Pending, Vec<u8>)> {
    let joined = fabric.joined()?;
    let nranks = joined.world.nranks;
    if spec.contexts == 0 {
        return Err(Error::argument("createContext was asked for 0 contexts; ask for at least one"));
    }
    let wanted = if fabric.queue_depth > 0 { fabric.queue_depth } else { spec.queue_depth };
    // Credits of messages, and the connections of iWARP, are counted for every rank.
    let stride = if joined.atomics && fabric.iwarp.is_none() { spec.rank_stride } else { 1 };
    let spec = ContextSpec { rank_stride: stride, ..*spec };
    let peers: Vec<bool> = (0..nranks).map(|peer| spec.reaches(joined.world, peer)).collect();
    let sizes = sizes(wanted, peers.iter().filter(|reached| **reached).count() as u32, joined.atomics, &fabric.limits)?;
    let progress = if joined.atomics { None } else { Some(fabric.progress()?) };
    let mut random = Psns::new()?;
    let mut contexts = Vec::with_capacity(spec.contexts as usize);
    for _ in 0..spec.contexts {
        contexts.push(prepare_one(fabric, joined, &peers, &sizes, progress.as_deref(), &mut random)?);
    }
    let mut token = Token::default();
    if fabric.iwarp.is_some() {
        getrandom::fill(&mut token).map_err(|e| Error::system(format!("random numbers: {e}")))?;
    }
    let mut out = Vec::with_capacity(nranks as usize * QpInfo::slice_len(contexts.len()));
    for peer in 0..nranks {
        let infos: Vec<_> = contexts.iter().map(|c| c.describe(peer, fabric.hello.ece)).collect();
        QpInfo::emit_slice(&infos, sizes.receives, &token, &mut out);
    }
    let (receives, traffic_class) = (sizes.receives, spec.traffic_class);
    Ok((Pending { contexts, receives, traffic_class, stride, progress, token }, out))
}

impl PendingContext {
    fn describe(&self, peer: u32, wants_ece: bool) -> QpInfo {
        let (credit_addr, credit_rkey) = self.messages.as_ref().map_or((0, 0), |m| m.credit_word(peer));
        QpInfo {
            qpn: self.pairs.to(peer).map_or(0, Qp::number),
            psn: self.psns.get(peer as usize).copied().unwrap_or(0),
            credit_addr,
            credit_rkey,
            port: self.acceptor.as_ref().map_or(0, Acceptor::port),
            ece: self.pairs.to(peer).filter(|_| wants_ece).and_then(Qp::query_ece),
        }
    }
}

fn prepare_one(
    fabric: &VerbsFabric,
    joined: &Joined,
    peers: &[bool],
    sizes: &Sizes,
    progress: Option<&Progress>,
    random: &mut Psns,
) -> Result<PendingContext> {
    let nranks = joined.world.nranks;
    let cq = Cq::new(fabric.device(), sizes.completions, progress.map(Progress::channel)).map_err(|e| {
        Error::system(format!(
            "a completion queue of {} entries on {}: {e}; raise the limit of locked memory, or set fewer contexts",
            sizes.completions, fabric.label
        ))
    })?;
    let (mut depth, mut inline) = (sizes.depth, INLINE);
    let mut pairs = Pairs::default();
    // iWARP: one more, which has no lane and sends nothing.
    let wanted = nranks as usize + usize::from(fabric.iwarp.is_some());
    let mut made = 0;
    while made < wanted {
        let extra = made == nranks as usize;
        if peers.get(made) == Some(&false) {
            pairs.by_peer.push(None);
            made += 1;
            continue;
        }
        let cap = ibv_qp_cap {
            max_send_wr: if extra { 1 } else { depth },
            max_recv_wr: sizes.receives.max(1),
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: if extra { 0 } else { inline },
        };
        match Qp::new(&fabric.pd, &cq, cap) {
            Ok(qp) => {
                let ready = if fabric.iwarp.is_some() {
                    init_iwarp(&qp)
                } else {
                    init(&qp, &fabric.origin, fabric.hello.atomics)
                };
                ready.map_err(|e| e.context(&fabric.label))?;
                if extra {
                    pairs.own_end = Some(qp);
                } else {
                    pairs.by_peer.push(Some(qp));
                }
                made += 1;
            }
            // Some devices take no data inside work requests, or fewer of them then.
            Err(e) if inline > 0 && matches!(e.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP)) => inline = 0,
            // EINVAL: within the device's limit for small work requests, but not for these.
            Err(e) if depth >= 32 && !extra && matches!(e.raw_os_error(), Some(libc::ENOMEM | libc::EINVAL)) => {
                log::debug!("{}: no queue pair of {depth} entries ({e}), trying {}", fabric.label, depth / 2);
                depth /= 2;
            }
            Err(e) => {
                return Err(Error::system(format!(
                    "queue pair {} of {wanted} of a context on {}, {depth} entries: {e}; the device has {} queue \
                     pairs; raise the limit of locked memory (`ulimit -l`), or set fewer contexts",
                    made + 1,
                    fabric.label,
                    fabric.limits.max_qp
                )));
            }
        }
    }
    let messages = if sizes.receives > 0 {
        let post_recv = fabric.device().post_recv().ok_or_else(|| no_call(fabric, "post_recv"))?;
        let receivers = pairs.receivers(joined.world.rank);
        let (registry, keys) = (fabric.registry.clone(), fabric.keys.clone());
        Some(Messages::new(&fabric.pd, &receivers, sizes.receives, post_recv, registry, keys)?)
    } else {
        None
    };
    let psns = (0..nranks).map(|_| random.next()).collect();
    let acceptor = fabric.iwarp.as_ref().map(|home| Acceptor::open(&home.cm, home.address)).transpose();
    let acceptor = acceptor.map_err(|e| e.context(&fabric.label))?;
    Ok(PendingContext { pairs, acceptor, messages, cq, psns, depth, agreed: vec![Agreed::No; nranks as usize] })
}

#[cold]
fn no_call(fabric: &VerbsFabric, name: &str) -> Error {
    Error::system(format!("the provider library of {} has no {name}; update rdma-core", fabric.label))
}

/// The first half of agreeing on options: of two ends the higher rank's takes the lower one's options first, as far as
/// its device knows them, and tells what it has taken.
pub(super) fn agree(fabric: &VerbsFabric, pending: &mut Pending, from: &[&[u8]]) -> Result<Option<Vec<u8>>> {
    let joined = fabric.joined()?;
    if !joined.ece {
        return Ok(None);
    }
    let said = said(joined, pending, from)?;
    let (origin, tc) = way(fabric, pending);
    let (begun, contexts) = (Instant::now(), pending.contexts.len());
    let mut out = Vec::with_capacity(said.len() * ece::slice_len(contexts));
    for (peer, slice) in said.iter().enumerate() {
        let mut taken = vec![None; contexts];
        for (index, context) in pending.contexts.iter_mut().enumerate() {
            let (Some(qp), Some(info)) = (context.pairs.to(peer as u32), slice.infos.get(index)) else { continue };
            if peer as u32 >= joined.world.rank || !ece::takes(qp, info.ece) {
                continue;
            }
            let remote = RemoteQp { hello: joined.hellos[peer], qpn: info.qpn, psn: info.psn };
            // The other queue pairs, and the others' moves, have the rest of the time.
            receive(qp, &origin, &fabric.hello, &remote, tc, begun + fabric.patience / 2)
                .map_err(|e| e.context(format_args!("{}, rank {peer}", fabric.label)))?;
            taken[index] = qp.query_ece();
            context.agreed[peer] = Agreed::Receives;
        }
        emit_taken(&taken, &mut out);
    }
    Ok(Some(out))
}

/// The second half: the lower rank's end takes what the other one has taken.
pub(super) fn take_agreed(pending: &mut Pending, from: &[&[u8]]) -> Result<()> {
    for (peer, bytes) in from.iter().enumerate() {
        let taken = parse_taken(bytes, pending.contexts.len())
            .map_err(|e| Error::protocol(format!("what rank {peer} says of options cannot be used: {e}")))?;
        for (context, ece) in pending.contexts.iter_mut().zip(taken) {
            if let (Some(agreed), Some(ece)) = (context.agreed.get_mut(peer), ece) {
                *agreed = Agreed::On(ece);
            }
        }
    }
    Ok(())
}

/// From where a set's queue pairs go, and their traffic class.
fn way(fabric: &VerbsFabric, pending: &Pending) -> (Origin, u8) {
    let origin = with_class(fabric.origin, &fabric.hello, fabric.sl_given, pending.traffic_class);
    (origin, fabric.traffic_class.or(pending.traffic_class).unwrap_or(0))
}

pub(super) fn finish(fabric: &VerbsFabric, pending: Pending, from: &[&[u8]]) -> Result<Vec<VerbsContext>> {
    let joined = fabric.joined()?;
    let said = said(joined, &pending, from)?;
    let receives: Vec<u32> = said.iter().map(|s| s.receives).collect();
    let tokens: Vec<Token> = said.iter().map(|s| s.token).collect();
    let (origin, tc) = way(fabric, &pending);
    let begun = Instant::now();
    let mut done = Vec::with_capacity(pending.contexts.len());
    for (index, mut context) in pending.contexts.into_iter().enumerate() {
        let theirs: Vec<QpInfo> = said.iter().filter_map(|s| s.infos.get(index).copied()).collect();
        let way = (&origin, tc, begun + fabric.patience);
        let lanes = lanes(fabric, joined, &mut context, (&theirs, &receives), way)?;
        let device = device(fabric, joined, &context)?;
        if let (Some(home), Some(acceptor)) = (&fabric.iwarp, context.acceptor.take()) {
            let round = ConnectRound {
                world: joined.world,
                device: &home.device,
                token: pending.token,
                context: index as u32,
                tos: tc,
                end: begun + home.patience,
                patience: home.patience,
            };
            let peers = iwarp_peers(fabric, joined, &context.pairs, &theirs, &tokens);
            context.pairs.connections = Some(meet(acceptor, round, &peers)?);
            first_reads(&device, &reads(joined, &context.pairs, &theirs), &fabric.label, round.end)?;
        }
        let number = fabric.next_context.fetch_add(1, Ordering::Relaxed);
        let verbs = fabric.device().verbs().clone();
        let outcomes = Outcomes::new(joined.world.nranks, number, fabric.label.clone(), verbs);
        let left_out = (0..joined.world.nranks).filter(|&peer| context.pairs.to(peer).is_none());
        left_out.for_each(|peer| outcomes.leave_out(peer, pending.stride));
        let shared = Shared::new(
            Queues::new(
                device,
                fabric.events.clone(),
                fabric.registry.clone(),
                context.pairs,
                lanes,
                context.messages,
                &outcomes,
            ),
            outcomes,
            context.cq,
            fabric.scratch.clone(),
            fabric.regions.clone(),
            Limits { atomics: joined.atomics, ..fabric.hold },
            fabric.pd.clone(),
        );
        done.push(VerbsContext::new(shared, pending.progress.clone()));
    }
    Ok(done)
}

/// What each rank says of its queue pairs.
fn said(joined: &Joined, pending: &Pending, from: &[&[u8]]) -> Result<Vec<QpSlice>> {
    if from.len() != joined.hellos.len() {
        return Err(Error::internal(format!("{} slices of queue pairs for {} ranks", from.len(), joined.hellos.len())));
    }
    let parse = |(rank, bytes): (usize, &&[u8])| {
        QpInfo::parse_slice(bytes, pending.contexts.len(), pending.receives > 0)
            .map_err(|e| Error::protocol(format!("what rank {rank} says of its queue pairs cannot be used: {e}")))
    };
    from.iter().enumerate().map(parse).collect()
}

/// A context's lanes, one a peer, on queue pairs that are connected; those of iWARP are not yet.
fn lanes(
    fabric: &VerbsFabric,
    joined: &Joined,
    context: &mut PendingContext,
    (theirs, receives): (&[QpInfo], &[u32]),
    (origin, tc, end): (&Origin, u8, Instant),
) -> Result<Vec<Lane>> {
    let mut lanes = Vec::with_capacity(joined.hellos.len());
    for (peer, qp) in context.pairs.by_peer.iter().enumerate() {
        let Some(qp) = qp else {
            lanes.push(Lane::left_out(peer as u32));
            continue;
        };
        let (Some(hello), Some(info)) = (joined.hellos.get(peer), theirs.get(peer)) else {
            return Err(Error::internal("a peer without queue pairs"));
        };
        if fabric.iwarp.is_none() {
            let remote = RemoteQp { hello: *hello, qpn: info.qpn, psn: info.psn };
            let psn = context.psns.get(peer).copied().unwrap_or(0);
            let agreed = context.agreed.get(peer).copied().unwrap_or_default();
            let received = match agreed {
                Agreed::Receives => Ok(()),
                Agreed::No | Agreed::On(_) => {
                    agreed.set(qp).and_then(|()| receive(qp, origin, &fabric.hello, &remote, tc, end))
                }
            };
            received
                .and_then(|()| send(qp, origin, &fabric.hello, &remote, psn, end))
                .map_err(|e| e.context(format_args!("{}, rank {peer}", fabric.label)))?;
        }
        if let Some(messages) = &mut context.messages {
            let credit = ibv_wr_rdma { remote_addr: info.credit_addr, rkey: info.credit_rkey };
            messages.connect(peer as u32, credit, receives.get(peer).copied().unwrap_or(0));
        }
        lanes.push(Lane::new(qp.as_ptr(), peer as u32, context.depth));
    }
    Ok(lanes)
}

/// What a context's queues need to know of the device.
fn device(fabric: &VerbsFabric, joined: &Joined, context: &PendingContext) -> Result<Device> {
    let (scratch, scratch_lkey) = fabric.scratch.place();
    Ok(Device {
        poll_cq: fabric.device().poll_cq().ok_or_else(|| no_call(fabric, "poll_cq"))?,
        post_send: fabric.device().post_send().ok_or_else(|| no_call(fabric, "post_send"))?,
        cq: context.cq.as_ptr(),
        max_inline: context.pairs.peers().map(|(_, qp)| qp.cap().max_inline_data).min().unwrap_or(0),
        max_msg: joined.max_msg.into(),
        scratch,
        scratch_lkey,
        rank: joined.world.rank,
        closes: fabric.iwarp.is_some(),
        overtakes: fabric.iwarp.is_some(),
        confirms: fabric.confirms.load(Ordering::Relaxed),
    })
}

/// Who connects to whom: the lower rank to the higher, and each to itself.
fn iwarp_peers(fabric: &VerbsFabric, joined: &Joined, pairs: &Pairs, infos: &[QpInfo], tokens: &[Token]) -> Vec<Peer> {
    let own = joined.world.rank;
    let each = joined.hellos.iter().zip(infos).zip(tokens).zip(pairs.peers());
    each.map(|(((hello, info), token), (rank, qp))| Peer {
        address: SocketAddr::new(Home::address_in(hello), info.port),
        token: *token,
        active: (own <= rank).then(|| qp.number()),
        passive: match &pairs.own_end {
            Some(own_end) if own == rank => Some(own_end.number()),
            _ => (own > rank).then(|| qp.number()),
        },
        reads_out: fabric.hello.max_rd_atomic.min(hello.max_dest_rd_atomic),
        reads_in: fabric.hello.max_dest_rd_atomic.min(hello.max_rd_atomic),
    })
    .collect()
}

/// What this rank reads first from those that it connected to: the words that they are told their credit in.
fn reads(joined: &Joined, pairs: &Pairs, infos: &[QpInfo]) -> Vec<FirstRead> {
    pairs
        .peers()
        .zip(infos)
        .filter(|&((peer, _), _)| joined.world.rank <= peer)
        .map(|((peer, qp), info)| FirstRead {
            peer,
            qp: qp.as_ptr(),
            word: ibv_wr_rdma { remote_addr: info.credit_addr, rkey: info.credit_rkey },
        })
        .collect()
}

/// First packet numbers: random, so that packets of an earlier connection with the same numbers are not taken for new.
struct Psns(u64);

impl Psns {
    fn new() -> Result<Self> {
        let seed = getrandom::u64().map_err(|e| Error::system(format!("random numbers: {e}")))?;
        Ok(Self(seed))
    }

    /// 24 bits of SplitMix64 (Steele, Lea, Flood 2014).
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) & 0xff_ffff) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(max_qp_wr: i32, max_cqe: i32) -> ibv_device_attr {
        // SAFETY: all-zero bytes are a valid ibv_device_attr.
        let mut attr: ibv_device_attr = unsafe { std::mem::zeroed() };
        attr.max_qp_wr = max_qp_wr;
        attr.max_cqe = max_cqe;
        attr
    }

    #[test]
    fn completions_are_never_more_than_the_queue_holds() {
        for nranks in [1, 2, 3, 64, 65, 256, 1000, 4000] {
            for (wr, cqe) in [(16, 1 << 22), (27, 1 << 22), (32768, 32767), (1 << 20, 4096)] {
                for wanted in [0, 1, 64, 5000] {
                    for atomics in [true, false] {
                        let Ok(s) = sizes(wanted, nranks, atomics, &limits(wr, cqe)) else {
                            assert!(cqe as u32 / nranks < 8, "{nranks} {wr} {cqe}");
                            continue;
                        };
                        assert!(s.completions <= cqe as u32);
                        assert_eq!(s.completions, nranks * (s.depth + s.receives));
                        assert!(s.depth <= wr as u32 && s.depth >= 4 && s.depth <= MAX_DEPTH);
                        assert_eq!(atomics, s.receives == 0);
                        assert!(atomics || s.receives.is_power_of_two());
                    }
                }
            }
        }
        assert_eq!(sizes(0, 2, true, &limits(32768, 1 << 22)).unwrap().depth, 256);
        assert_eq!(sizes(64, 2, true, &limits(32768, 1 << 22)).unwrap().depth, 64);
    }
}
