//! The software fabric: shared memory to ranks on this host, TCP to the others.
//!
//! Three parts meet here. `local` moves bytes between processes of one host; `tcp` between hosts; a `link` to each
//! peer picks one of them at the first operation and queues what finds no room. Callers make progress inside their
//! calls, the helper `thread` when nobody calls.

pub mod context;
pub mod hello;
pub mod lane;
pub mod tcp;
