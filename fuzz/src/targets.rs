//! What is fuzzed: every function that reads bytes which a peer, device code, or a stranger at the listening port has
//! written.

mod nic;
mod proxy;
mod rendezvous;
mod share;
mod soft;
mod tcp;
mod verbs;
mod windows;

/// A function to feed.
pub struct Target {
    /// For the command line.
    pub name: &'static str,
    /// Well-formed inputs to start from.
    pub seeds: Vec<Vec<u8>>,
    /// Panics if the code under test does something wrong with the input.
    pub run: fn(&[u8]),
}

/// All of them.
pub fn all() -> Vec<Target> {
    let mut all = nic::targets();
    all.extend(proxy::targets());
    all.extend(rendezvous::targets());
    all.extend(share::targets());
    all.extend(soft::targets());
    all.extend(tcp::targets());
    all.extend(verbs::targets());
    all
}

/// Takes `N` bytes off the front, zeros where there are none left.
fn take<const N: usize>(input: &mut &[u8]) -> [u8; N] {
    let n = N.min(input.len());
    let mut bytes = [0; N];
    bytes[..n].copy_from_slice(&input[..n]);
    *input = &input[n..];
    bytes
}
