//! What epoll has to tell, as the number that it keeps for each descriptor.

/// What an epoll event is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Source {
    /// Deadlines are to be looked after.
    Tick,
    /// What was deferred is to be sent.
    Flush,
    /// Signs of life are due.
    Pulse,
    /// Somebody connects to that listener.
    Listener(usize),
    /// A connection that is not greeted yet.
    Caller(usize),
    /// A connection to that peer, by its stripe.
    Link(u32, usize),
    /// One from that peer, by its stripe.
    Serving(u32, usize),
}

impl Source {
    /// What epoll keeps of it.
    pub fn token(self) -> u64 {
        let pack = |kind: u64, peer: u32, n: usize| kind << 56 | u64::from(peer) << 16 | n as u64 & 0xffff;
        match self {
            Source::Tick => 0,
            Source::Flush => 1 << 56,
            Source::Listener(i) => pack(2, 0, i),
            Source::Caller(i) => pack(3, (i >> 16) as u32, i),
            Source::Link(peer, stripe) => pack(4, peer, stripe),
            Source::Serving(peer, stripe) => pack(5, peer, stripe),
            Source::Pulse => 6 << 56,
        }
    }

    /// Whose token that is.
    pub fn of(token: u64) -> Self {
        let (peer, n) = ((token >> 16) as u32, (token & 0xffff) as usize);
        match token >> 56 {
            0 => Source::Tick,
            1 => Source::Flush,
            2 => Source::Listener(n),
            3 => Source::Caller((peer as usize) << 16 | n),
            4 => Source::Link(peer, n),
            5 => Source::Serving(peer, n),
            _ => Source::Pulse,
        }
    }
}
