//! Ranks for the tests of the rendezvous: each has a listener and an exchange of its own, or somebody stands in for it.

use oxygin::comm::handle::{Handle, Token};
use oxygin::comm::rendezvous::{wire, Contribution, Exchange, Gathered, Listener};
use oxygin::config::Config;
use oxygin::error::Result;
use oxygin::fabric::World;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

pub fn config(timeout: f64) -> Config {
    Config { timeout: Duration::from_secs_f64(timeout), socket_ifname: Some("lo".into()), ..Config::default() }
}

/// One exchange a rank, with the listeners gone but rank 0's.
pub fn exchanges(config: &Config, nranks: u32) -> Vec<Exchange> {
    joined(config, nranks, nranks).0
}

/// The same of the first `joined` ranks alone, and where rank 0 is for those that stand in for the others.
pub fn joined(config: &Config, joined: u32, nranks: u32) -> (Vec<Exchange>, Handle) {
    let listeners: Vec<_> = (0..nranks).map(|_| Arc::new(Listener::open(config).unwrap())).collect();
    let handles: Vec<_> = listeners.iter().map(|l| Some(l.handle())).collect();
    let root = Handle::decode(&handles[0].unwrap()).unwrap();
    let exchanges = (0..joined)
        .zip(listeners)
        .map(|(rank, listener)| Exchange::new(config, World { rank, nranks }, &handles, listener).unwrap())
        .collect();
    (exchanges, root)
}

/// Stands in for a rank: contributes to the first step of `connect`.
pub fn contribute(root: &Handle, rank: u32, nranks: u32) -> TcpStream {
    let sender = wire::Sender { token: root.token, step: 1, name: "connect", rank, nranks };
    let mut socket = TcpStream::connect(root.address).unwrap();
    socket.write_all(&wire::encode_request(&sender, Ok(b""), b"").unwrap()).unwrap();
    socket
}

/// What `rank` brings: its rank to all, and to each a slice that names both.
pub fn brings(rank: u32, nranks: u32) -> Contribution {
    let addressed = (0..nranks).flat_map(|to| [rank as u8, to as u8]).collect();
    Contribution { common: vec![rank as u8; rank as usize % 5], addressed }
}

pub fn check(gathered: &Gathered, rank: u32, nranks: u32) {
    for from in 0..nranks {
        assert_eq!(gathered.common(from), vec![from as u8; from as usize % 5]);
        assert_eq!(gathered.addressed(from), [from as u8, rank as u8]);
    }
}

/// Runs `what` for each rank of `exchanges` in a thread of its own and returns what they return, by rank.
pub fn each<T: Send>(exchanges: &[Exchange], what: impl Fn(&Exchange, u32) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            exchanges.iter().map(|exchange| scope.spawn(|| what(exchange, exchange.world().rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

pub fn sentence(result: Result<Gathered>) -> String {
    result.expect_err("the step should have failed").message().to_owned()
}

/// An exchange of rank 1 of 2 whose rank 0 listens at `socket`.
pub fn before(socket: &TcpListener, config: &Config) -> Exchange {
    let root = Handle { address: socket.local_addr().unwrap(), token: Token::random().unwrap() };
    let listener = Arc::new(Listener::open(config).unwrap());
    let handles = [Some(root.encode()), Some(listener.handle())];
    Exchange::new(config, World { rank: 1, nranks: 2 }, &handles, listener).unwrap()
}
