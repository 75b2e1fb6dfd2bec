//! Connects one context's queue pairs to all peers: connects to some, is connected to by the others, in one loop over
//! the connection manager's events, none of which it waits for by itself.

use super::acceptor::Acceptor;
use super::connections::{wait, Connections};
use super::greeting::Greeting;
use crate::error::{Error, Result};
use crate::fabric::verbs::wire::Token;
use crate::fabric::World;
use crate::sys::secret;
use oxygin_ffi::rdmacm::types::*;
use oxygin_ffi::rdmacm::{Event, Id};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Connections that one rank tries to make at a time.
const AT_ONCE: usize = 64;

/// One peer.
#[derive(Clone, Copy, Debug)]
pub struct Peer {
    /// Where it listens.
    pub address: SocketAddr,
    /// What it wants to hear.
    pub token: Token,
    /// The queue pair that connects to it, if this rank does.
    pub active: Option<u32>,
    /// The queue pair that it connects to, if it does.
    pub passive: Option<u32>,
    /// Reads under way towards it.
    pub reads_out: u8,
    /// Reads arriving from it.
    pub reads_in: u8,
}

/// One context's connections: whose they are, and how they are made.
#[derive(Clone, Copy, Debug)]
pub struct ConnectRound<'a> {
    /// This rank among all.
    pub world: World,
    /// Name of the device.
    pub device: &'a str,
    /// What this rank's listener wants to hear.
    pub token: Token,
    /// Which context of the set.
    pub context: u32,
    /// Type of service of the packets.
    pub tos: u8,
    /// When it must be over.
    pub end: Instant,
    /// The same as a span, for messages.
    pub patience: Duration,
}

/// How far a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Address,
    Route,
    Reply,
    Up,
}

impl Step {
    fn text(self) -> &'static str {
        match self {
            Self::Address => "its address is not resolved",
            Self::Route => "the route to it is not resolved",
            Self::Reply => "it does not answer",
            Self::Up => "connected",
        }
    }
}

struct Link {
    id: Id,
    peer: u32,
    active: bool,
    step: Step,
}

struct Meeting<'a> {
    round: ConnectRound<'a>,
    peers: &'a [Peer],
    acceptor: Acceptor,
    links: HashMap<usize, Link>,
    /// The next peer to connect to.
    next: u32,
}

/// Connects everything, or says which rank is in the way.
pub fn meet(acceptor: Acceptor, round: ConnectRound, peers: &[Peer]) -> Result<Connections> {
    let mut meeting = Meeting { round, peers, acceptor, links: HashMap::new(), next: round.world.rank };
    loop {
        meeting.start()?;
        if meeting.is_complete() {
            break;
        }
        let taken = meeting.acceptor.channel.take();
        match taken.map_err(|e| Error::system(format!("events of the RDMA connection manager: {e}")))? {
            Some(event) => meeting.handle(event)?,
            None if wait(&meeting.acceptor.channel, round.end) => {}
            None => return Err(meeting.late()),
        }
    }
    let Meeting { acceptor, links, .. } = meeting;
    let Acceptor { listener, channel, .. } = acceptor;
    // Requests that came too late to be read end with it: the kernel refuses them.
    drop(listener);
    Ok(Connections::new(links.into_values().map(|link| link.id).collect(), channel))
}

fn reason(status: i32) -> String {
    match status {
        0 => "no reason given".into(),
        n if n < 0 => std::io::Error::from_raw_os_error(-n).to_string(),
        n => format!("reason {n}"),
    }
}

impl Meeting<'_> {
    fn is_complete(&self) -> bool {
        let wanted: usize =
            self.peers.iter().map(|p| usize::from(p.active.is_some()) + usize::from(p.passive.is_some())).sum();
        self.links.values().filter(|l| l.step == Step::Up).count() == wanted
    }

    fn milliseconds(&self) -> u32 {
        self.round.end.saturating_duration_since(Instant::now()).as_millis().clamp(1, 1 << 30) as u32
    }

    fn failed(&self, peer: u32, what: &str, why: &str, remedy: &str) -> Error {
        let at = self.peers.get(peer as usize).map(|p| p.address.to_string()).unwrap_or_default();
        Error::remote(format!(
            "rank {peer} at {at}, over iWARP device {} ({}): {what}: {why}; {remedy}",
            self.round.device, self.acceptor.address
        ))
    }

    /// Begins as many connections as may be under way.
    fn start(&mut self) -> Result<()> {
        while self.links.values().filter(|l| l.active && l.step != Step::Up).count() < AT_ONCE {
            let peer = self.next;
            let Some(target) = self.peers.get(peer as usize) else { return Ok(()) };
            self.next += 1;
            if target.active.is_none() {
                continue;
            }
            let begun = Id::new(&self.acceptor.channel).and_then(|id| {
                if let Err(e) = id.set_type_of_service(self.round.tos) {
                    log::debug!("iWARP: no type of service {}: {e}", self.round.tos);
                }
                id.resolve_address(&SocketAddr::new(self.acceptor.address, 0), &target.address, self.milliseconds())?;
                Ok(id)
            });
            let id = begun.map_err(|e| self.unresolved(peer, &e.to_string()))?;
            self.links.insert(id.key(), Link { id, peer, active: true, step: Step::Address });
        }
        Ok(())
    }

    fn unresolved(&self, peer: u32, why: &str) -> Error {
        self.failed(peer, "its address cannot be resolved", why, "check `ip route get` and `ip neigh` for it")
    }

    fn handle(&mut self, event: Event) -> Result<()> {
        if let Some(request) = event.request {
            return self.answer(request, &event.private_data);
        }
        let milliseconds = self.milliseconds();
        // Not one of ours, or no longer.
        let Some(link) = self.links.get_mut(&event.key) else { return Ok(()) };
        let peer = link.peer;
        let why = reason(event.status);
        match event.kind {
            RDMA_CM_EVENT_ADDR_RESOLVED => {
                link.step = Step::Route;
                let device = link.id.device();
                let next = link.id.resolve_route(milliseconds);
                if let Some((other, _)) = device.filter(|(d, _)| d != self.round.device) {
                    return Err(self.unresolved(peer, &format!("the way to it leads over {other}")));
                }
                next.map_err(|e| self.unresolved(peer, &e.to_string()))
            }
            RDMA_CM_EVENT_ROUTE_RESOLVED => self.connect(event.key),
            RDMA_CM_EVENT_ESTABLISHED => {
                link.step = Step::Up;
                Ok(())
            }
            RDMA_CM_EVENT_ADDR_ERROR | RDMA_CM_EVENT_ROUTE_ERROR => Err(self.unresolved(peer, &why)),
            RDMA_CM_EVENT_REJECTED => Err(self.failed(
                peer,
                "it refuses the connection",
                &why,
                "look at its log; something else may listen at this address",
            )),
            RDMA_CM_EVENT_UNREACHABLE | RDMA_CM_EVENT_CONNECT_ERROR => Err(self.failed(
                peer,
                "the connection cannot be made",
                &why,
                "check that the address can be reached and that no firewall is in the way",
            )),
            RDMA_CM_EVENT_DISCONNECTED => {
                Err(self.failed(peer, "it closed the connection", &why, "look at its log; it has failed or ended"))
            }
            RDMA_CM_EVENT_DEVICE_REMOVAL => Err(Error::system(format!("the device {} was removed", self.round.device))),
            other => {
                log::debug!("iWARP: event {other} ({why}) of rank {peer} passed over");
                Ok(())
            }
        }
    }

    /// Asks the peer; the queue pair is in RTS when it has agreed.
    fn connect(&mut self, key: usize) -> Result<()> {
        let ConnectRound { world, context, .. } = self.round;
        let Some(link) = self.links.get_mut(&key) else { return Ok(()) };
        let peer = link.peer;
        let Some(target) = self.peers.get(peer as usize) else { return Ok(()) };
        let Some(qp) = target.active else { return Ok(()) };
        let greeting = Greeting { token: target.token, rank: world.rank, context }.emit();
        link.step = Step::Reply;
        link.id.connect(&param(target, qp, &greeting)).map_err(|e| {
            self.failed(
                peer,
                "the connection cannot be made",
                &e.to_string(),
                "check that the address can be reached and that no firewall is in the way",
            )
        })
    }

    /// Takes a connect request, if a peer sent it that is still expected.
    fn answer(&mut self, id: Id, private_data: &[u8]) -> Result<()> {
        let expected = Greeting::parse(private_data)
            .filter(|g| secret::same(&g.token, &self.round.token) && g.context == self.round.context)
            .filter(|g| !self.links.values().any(|l| !l.active && l.peer == g.rank))
            .and_then(|g| {
                let peer = self.peers.get(g.rank as usize)?;
                Some((g.rank, peer, peer.passive?))
            });
        let Some((rank, peer, qp)) = expected else {
            log::debug!(
                "iWARP: a connection to port {} was refused: {} bytes that are no greeting of an expected rank",
                self.acceptor.port(),
                private_data.len()
            );
            if let Err(e) = id.reject() {
                log::debug!("iWARP: refusing it: {e}");
            }
            return Ok(());
        };
        id.accept(&param(peer, qp, &[])).map_err(|e| {
            self.failed(
                rank,
                "its connection cannot be accepted",
                &e.to_string(),
                "look for the device in the kernel log",
            )
        })?;
        self.links.insert(id.key(), Link { id, peer: rank, active: false, step: Step::Reply });
        Ok(())
    }

    /// Who is missing when the time is over.
    fn late(&self) -> Error {
        let up = |peer: u32, active: bool| {
            self.links.values().find(|l| l.peer == peer && l.active == active).map(|l| l.step)
        };
        let missing: Vec<String> = (0..)
            .zip(self.peers)
            .filter_map(|(rank, p)| {
                let out = p.active.and_then(|_| match up(rank, true) {
                    Some(Step::Up) => None,
                    step => Some(step.map_or("not tried yet", Step::text)),
                });
                let into = p.passive.and_then(|_| match up(rank, false) {
                    Some(Step::Up) => None,
                    step => Some(step.map_or("it has not connected", Step::text)),
                });
                Some(format!("rank {rank} at {} ({})", p.address, out.or(into)?))
            })
            .collect();
        let shown = missing.iter().take(4).cloned().collect::<Vec<_>>().join(", ");
        let more = if missing.len() > 4 { format!(" and {} more", missing.len() - 4) } else { String::new() };
        Error::remote(format!(
            "no iWARP connection over {} ({}) after {:?}, half of OXYGIN_TIMEOUT: {shown}{more}; look at their logs, \
             at `ip route get` and at firewalls",
            self.round.device, self.acceptor.address, self.round.patience
        ))
    }
}

/// The private data stays the caller's during the call that gets this.
fn param(peer: &Peer, qp_num: u32, private_data: &[u8]) -> rdma_conn_param {
    rdma_conn_param {
        private_data: private_data.as_ptr().cast(),
        private_data_len: private_data.len() as u8,
        responder_resources: peer.reads_in,
        initiator_depth: peer.reads_out,
        flow_control: 1,
        retry_count: 7,
        rnr_retry_count: 7,
        srq: 0,
        qp_num,
    }
}
