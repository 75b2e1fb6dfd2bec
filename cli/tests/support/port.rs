//! Ports for servers that a test starts as programs of their own.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU32, Ordering};

/// First port below the 32768 that Linux gives to connections by default (`net.ipv4.ip_local_port_range`): one of those
/// may be taken by any connection of this machine before the server that is to listen there has started.
const FIRST: u32 = 20_000;
/// How many ports are handed out from there.
const COUNT: u32 = 12_000;

/// A port that nobody listens at, another one at each call. Programs that run at once begin at different ones.
pub fn free() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    for _ in 0..COUNT {
        let n = std::process::id().wrapping_mul(61).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        let port = (FIRST + n % COUNT) as u16;
        if TcpListener::bind(("0.0.0.0", port)).is_ok() {
            return port;
        }
    }
    panic!("no free port from {FIRST} to {}", FIRST + COUNT);
}
