//! What epoll has to tell, as the number that it keeps for each descriptor.

/// What an epoll event is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EventSource {
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

impl EventSource {
    /// What epoll keeps of it.
    pub fn token(self) -> u64 {
        let pack = |kind: u64, peer: u32, n: usize| kind << 56 | u64::from(peer) << 16 | n as u64 & 0xffff;
        match self {
            EventSource::Tick => 0,
            EventSource::Flush => 1 << 56,
            EventSource::Listener(i) => pack(2, 0, i),
            EventSource::Caller(i) => pack(3, (i >> 16) as u32, i),
            EventSource::Link(peer, stripe) => pack(4, peer, stripe),
            EventSource::Serving(peer, stripe) => pack(5, peer, stripe),
            EventSource::Pulse => 6 << 56,
        }
    }

    /// Whose token that is.
    pub fn of(token: u64) -> Self {
        let (peer, n) = ((token >> 16) as u32, (token & 0xffff) as usize);
        match token >> 56 {
            0 => EventSource::Tick,
            1 => EventSource::Flush,
            2 => EventSource::Listener(n),
            3 => EventSource::Caller((peer as usize) << 16 | n),
            4 => EventSource::Link(peer, n),
            5 => EventSource::Serving(peer, n),
            _ => EventSource::Pulse,
        }
    }
}
