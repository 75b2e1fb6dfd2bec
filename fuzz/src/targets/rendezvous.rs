//! The listen handle, the rendezvous messages, and both ends' state machines.

use super::{take, Target};
use oxygin::comm::backend::choose::{choose, FabricPromise};
use oxygin::comm::backend::offer::EngineOffer;
use oxygin::comm::backend::report::QueueOwner;
use oxygin::comm::handle::{Handle, Token, BYTES};
use oxygin::comm::hello::{settle, Hello};
use oxygin::comm::rendezvous::gather::{Gather, RootAction};
use oxygin::comm::rendezvous::job::Job;
use oxygin::comm::rendezvous::visit::{Broken, Visit, VisitorAction};
use oxygin::comm::rendezvous::wire::{
    encode_again, encode_failed, encode_list, encode_request, gathered_head, Failure, Reply, Request, RequestHead,
    Sender,
};
use oxygin::config::{Config, FabricChoice};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

const TOKEN: Token = Token::from_bytes([7; 16]);
const NRANKS: u32 = 3;
const STEP: u32 = 5;

pub fn targets() -> Vec<Target> {
    vec![
        Target { name: "handle", seeds: handles(), run: handle },
        Target { name: "connect-hello", seeds: hellos(), run: hello },
        Target { name: "request", seeds: requests(), run: request },
        Target { name: "reply", seeds: replies(), run: reply },
        Target { name: "gather", seeds: conversations(), run: gather },
        Target { name: "visit", seeds: replies(), run: visit },
    ]
}

fn handles() -> Vec<Vec<u8>> {
    ["10.0.0.1:77", "[fe80::1%3]:9"]
        .map(|a| Handle { address: a.parse().expect("an address"), token: TOKEN }.encode().to_vec())
        .to_vec()
}

fn handle(mut input: &[u8]) {
    let bytes: [u8; BYTES] = take(&mut input);
    if let Ok(handle) = Handle::decode(&bytes) {
        assert_eq!(Handle::decode(&handle.encode()).expect("our own"), handle);
    }
}

fn hellos() -> Vec<Vec<u8>> {
    let engine = |owner| EngineOffer::new(&Config::default(), owner, Err("no mlx5 device".into()));
    let (build, verbs) = ("0.1.0 (x)".into(), Ok(vec![1; 40]));
    let rdma = Hello {
        build,
        choice: FabricChoice::Auto,
        verbs,
        soft: vec![2; 60],
        engine: EngineOffer { mlx5: Ok(()), ..engine(QueueOwner::Plugin) },
    };
    let (build, verbs) = (String::new(), Err("no port".into()));
    let soft = Hello { build, choice: FabricChoice::Soft, verbs, soft: vec![], engine: engine(QueueOwner::Nccl) };
    [rdma, soft].map(|hello| hello.encode()).to_vec()
}

fn hello(input: &[u8]) {
    if let Ok(hello) = Hello::parse(1, input) {
        assert_eq!(Hello::parse(1, &hello.encode()).expect("our own"), hello);
        for is_verbs in [false, true] {
            let fabric = FabricPromise { signals_of_all_peers: !is_verbs, is_verbs };
            let _ = choose(std::slice::from_ref(&hello.engine), fabric, true);
        }
        let _ = settle(&[hello.clone(), hello], |_| None);
    }
}

fn sender(rank: u32) -> Sender<'static> {
    Sender { token: TOKEN, step: STEP, name: "connect", rank, nranks: NRANKS }
}

fn requests() -> Vec<Vec<u8>> {
    let failure = Failure { code: 2, sentence: "no memory".into() };
    vec![
        encode_request(&sender(1), Ok(b"mine"), b"abcdef").expect("small"),
        encode_request(&sender(2), Ok(b""), b"").expect("small"),
        encode_request(&sender(1), Err(&failure), b"").expect("small"),
    ]
}

fn request(input: &[u8]) {
    if let Ok(Some(head)) = RequestHead::parse(input) {
        assert!(head.rank < head.nranks);
        assert!(head.total() >= 44);
    }
    if let Ok(request) = Request::parse(input) {
        for rank in 0..request.head.nranks.min(64) {
            std::hint::black_box(request.slice(rank));
        }
        std::hint::black_box(request.slice(request.head.nranks - 1));
    }
}

fn replies() -> Vec<Vec<u8>> {
    let mut replies = Vec::new();
    for entries in [[&b"ab"[..], b"cd", b"ef"], [b"", b"longer", b"x"]] {
        let list = encode_list(entries.into_iter());
        let mut reply = gathered_head(STEP, list.len(), list.len());
        reply.extend(list.iter().chain(&list));
        replies.push(reply);
    }
    replies.push(encode_failed(STEP, &Failure { code: 8, sentence: "rank 2 did not come".into() }));
    replies.push(encode_again(STEP));
    replies
}

fn reply(input: &[u8]) {
    for nranks in [1, NRANKS, 300] {
        if let Ok(Reply::Gathered { common, addressed }) = Reply::parse(input, nranks) {
            assert_eq!((common.len(), addressed.len()), (nranks as usize, nranks as usize));
            for range in common.into_iter().chain(addressed) {
                std::hint::black_box(&input[range]);
            }
        }
    }
}

fn job() -> Arc<Job> {
    let addresses = (0..NRANKS).map(|r| Some(SocketAddr::from(([10, 0, 0, r as u8], 1000)))).collect();
    Arc::new(Job { addresses, token: TOKEN, timeout: Duration::from_secs(120), silence: Duration::from_secs(30) })
}

/// Scripts for `gather`: pieces of requests on several connections, in the form that it reads.
fn conversations() -> Vec<Vec<u8>> {
    let deliver = |script: &mut Vec<u8>, conn: u8, bytes: &[u8]| {
        for piece in bytes.chunks(63) {
            script.extend([conn << 2, piece.len() as u8]);
            script.extend(piece);
        }
    };
    let requests = requests();
    let mut both = Vec::new();
    deliver(&mut both, 1, &requests[0]);
    deliver(&mut both, 2, &requests[1]);
    let mut expired = both.clone();
    deliver(&mut expired, 1, &[oxygin::comm::rendezvous::wire::EXPIRED]);
    let mut failed = Vec::new();
    deliver(&mut failed, 1, &requests[2]);
    failed.extend([(1 << 2) | 1, 0]);
    deliver(&mut failed, 3, b"GET / HTTP/1.1");
    vec![both, expired, failed]
}

/// Rank 0's side of a step under a script of (what and connection, length, bytes): whatever comes, it ends by its
/// deadline, and with all ranks' bytes only if it says so.
fn gather(mut script: &[u8]) {
    let start = Instant::now();
    let mut now = start;
    let mine = encode_request(&sender(0), Ok(b"root"), b"uvwxyz").expect("small");
    let mut gather = Gather::new(job(), STEP, "connect", mine, Some((4, "earlier".into())), now);
    let mut open = [false; 8];
    let mut next = [0u64; 8];
    while !script.is_empty() {
        let [what, len] = take(&mut script);
        let line = usize::from(what >> 2) % 8;
        // Numbers of connections are never used twice.
        let conn = next[line] * 8 + line as u64;
        if !open[line] {
            open[line] = true;
            gather.accepted(conn, SocketAddr::from(([10, 0, 0, 9], line as u16)), now);
        }
        match what & 3 {
            0 => {
                let (bytes, rest) = script.split_at(script.len().min(len.into()));
                script = rest;
                gather.received(conn, bytes, now);
            }
            1 => {
                gather.closed(conn, now);
                open[line] = false;
                next[line] += 1;
            }
            2 => now += Duration::from_millis(u64::from(len) * 40),
            _ => gather.sent(conn),
        }
        gather.tick(now);
        while let Some(action) = gather.next_action() {
            match action {
                RootAction::Close(conn) | RootAction::Keep(conn, _) => {
                    let line = (conn % 8) as usize;
                    open[line] = false;
                    next[line] += 1;
                }
                RootAction::Send { conn, shared, own } => {
                    let reply: Vec<u8> = shared.iter().chain(&own).copied().collect();
                    let is_beat = reply == [oxygin::comm::rendezvous::wire::BEAT];
                    assert!(is_beat || Reply::parse(&reply, NRANKS).is_ok(), "rank 0 sends what a rank can read");
                    if len % 2 == 0 {
                        gather.sent(conn);
                    }
                }
            }
        }
        if gather.outcome(now).is_some() {
            return;
        }
    }
    // Silence from here on, but for rank 0's beats.
    for _ in 0..10_000 {
        now = now.max(gather.wake());
        gather.tick(now);
        while gather.next_action().is_some() {}
        if gather.outcome(now).is_some() {
            return;
        }
    }
    panic!("the step did not end");
}

/// Another rank's side: rank 0 answers the input, in two pieces.
fn visit(input: &[u8]) {
    let mut now = Instant::now();
    let request = encode_request(&sender(1), Ok(b"mine"), b"abcdef").expect("small");
    let mut visit = Visit::new(job(), STEP, "connect", request, false, now);
    let (first, second) = input.split_at(input.len() / 2);
    visit.connected();
    visit.sent();
    visit.received(first, now);
    visit.received(second, now);
    visit.broken("closed", Broken::Otherwise, now);
    for _ in 0..10_000 {
        visit.tick(now);
        while let Some(action) = visit.next_action() {
            if let VisitorAction::Connect = action {
                visit.broken("reset", Broken::Otherwise, now);
            }
        }
        if let Some(outcome) = visit.outcome() {
            if let Ok(answer) = outcome {
                for range in answer.common.iter().chain(&answer.addressed) {
                    std::hint::black_box(&answer.bytes[range.clone()]);
                }
            }
            return;
        }
        now = now.max(visit.wake());
    }
    panic!("the step did not end");
}
