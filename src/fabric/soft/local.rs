//! This rank's own ends of its operations, in host memory: where they are once their windows are gone. Applications
//! wait for their operations before they deregister; who aborts a communicator does not, and frees its memory next.

use crate::error::{Error, Kind, Result};
use crate::memory::key::Key;
use crate::memory::registry::Held;
use crate::rma::op::Op;

/// Whether `n` bytes, from `done` on, of the own end of an operation may be touched, for as long as the registry is
/// held. Values are in their operations, and what lies on the GPU its engine looks after.
pub fn check(held: &Held<'_>, work: &Op, done: u64, n: u64) -> Result<()> {
    let (key, addr) = match work {
        Op::Put(put) => (put.lkey, put.local),
        Op::Get(get) => (get.lkey, get.local),
        Op::Atomic(atomic) => match atomic.fetched {
            Some(fetched) => (fetched.lkey, fetched.local),
            None => return Ok(()),
        },
        Op::Value(_) => return Ok(()),
    };
    if n == 0 || Key(key).is_on_gpu() || held.resolve(key, addr + done, n).is_some() {
        return Ok(());
    }
    Err(withdrawn(key))
}

/// It is gone.
#[cold]
pub fn withdrawn(key: u32) -> Error {
    Error::usage(format!("window {key} was deregistered before the end of an operation from or to it"))
        .of_kind(Kind::LocalProtection)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::registry::{Extent, Registry};
    use crate::rma::op::{Get, Put};

    #[test]
    fn an_operation_is_refused_once_its_own_window_is_gone() {
        let (registry, base) = (Registry::default(), 0x1000);
        registry.insert(3, Extent { base, len: 64 });
        let put = Put { local: base, lkey: 3, rkey: 1, remote: 0, len: 64, signal: None, more: false };
        let get = Get { local: base, lkey: 3, rkey: 1, remote: 0, len: 64, more: false };
        let ops = [Op::Put(put), Op::Get(get)];
        let all = |done, n| ops.iter().map(|op| check(&registry.hold(), op, done, n).is_ok()).collect::<Vec<_>>();
        assert_eq!(all(0, 64), [true; 2]);
        assert_eq!(all(32, 32), [true; 2]);
        registry.remove(3);
        assert_eq!(all(32, 32), [false; 2]);
        assert_eq!(all(64, 0), [true; 2], "its signal touches nothing of this rank's");
        let on_gpu = Op::Put(Put { lkey: Key::gpu(3, false).0, ..put });
        assert!(check(&registry.hold(), &on_gpu, 0, 64).is_ok());
    }
}
