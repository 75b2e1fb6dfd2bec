//! The operations of a batch, as a ring appends them.

use crate::memory::key::Key;
use crate::rma::op::{Op, Put, Signal};
use std::ops::Deref;

/// Operations to one peer in the order of their entries, and what is to be known of all of them. That is noted as they
/// are appended, where their kind is known: to look through them again takes more than to read a descriptor's words.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ops {
    all: Vec<Op>,
    /// What they move.
    bytes: u64,
    /// Whether a get was among them.
    had_get: bool,
}

impl Deref for Ops {
    type Target = [Op];

    #[inline(always)]
    fn deref(&self) -> &[Op] {
        &self.all
    }
}

impl Ops {
    /// None, with room for `n`.
    pub fn with_capacity(n: usize) -> Self {
        Self { all: Vec::with_capacity(n), ..Self::default() }
    }

    /// Appends one.
    #[inline(always)]
    pub fn push(&mut self, op: Op) {
        self.bytes = self.bytes.wrapping_add(op.len());
        if let Op::Get(_) = op {
            self.had_get = true;
        }
        self.all.push(op);
    }

    /// Appends a signal by itself.
    #[inline(always)]
    pub fn push_signal(&mut self, signal: Signal) {
        self.push(Op::Put(Put { local: 0, lkey: 0, rkey: 0, remote: 0, len: 0, signal: Some(signal), more: false }));
    }

    /// Has the last operation carry a signal, if it can; says whether it does.
    #[inline(always)]
    pub fn attach(&mut self, signal: Signal) -> bool {
        let carrier = match self.all.last_mut() {
            Some(Op::Put(put)) => &mut put.signal,
            Some(Op::Value(value)) => &mut value.signal,
            _ => return false,
        };
        let can = carrier.is_none();
        if can {
            *carrier = Some(signal);
        }
        can
    }

    /// Leaves the first `n`.
    pub fn truncate(&mut self, n: usize) {
        self.bytes = self.bytes_of(n);
        self.all.truncate(n);
    }

    /// Leaves none.
    #[inline(always)]
    pub fn clear(&mut self) {
        self.all.clear();
        (self.bytes, self.had_get) = (0, false);
    }

    /// What the first `n` move, which there are.
    #[inline(always)]
    pub fn bytes_of(&self, n: usize) -> u64 {
        match n == self.all.len() {
            true => self.bytes,
            false => sum(&self.all[..n]),
        }
    }

    /// Whether any is a get into host memory.
    #[inline(always)]
    pub fn any_into_host(&self) -> bool {
        self.had_get && any_into_host(&self.all)
    }

    /// Which of the first `n`, which there are, is the last get.
    #[inline(always)]
    pub fn last_get(&self, n: usize) -> Option<usize> {
        match self.had_get {
            true => last_get(&self.all[..n]),
            false => None,
        }
    }
}

/// Whether any is a get into host memory.
#[cold]
fn any_into_host(ops: &[Op]) -> bool {
    ops.iter().any(|op| matches!(op, Op::Get(get) if !Key(get.lkey).is_on_gpu()))
}

/// Of a batch that was not taken as a whole.
#[cold]
fn sum(ops: &[Op]) -> u64 {
    ops.iter().map(Op::len).fold(0, u64::wrapping_add)
}

#[cold]
fn last_get(ops: &[Op]) -> Option<usize> {
    ops.iter().rposition(|op| matches!(op, Op::Get(_)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rma::op::{Get, Payload, Value};

    fn of<const N: usize>(all: [Op; N]) -> Ops {
        let mut ops = Ops::with_capacity(N);
        all.into_iter().for_each(|op| ops.push(op));
        ops
    }

    #[test]
    fn what_is_noted_is_what_the_operations_say() {
        let put = |len| Op::Put(Put { local: 1, lkey: 2, rkey: 3, remote: 4, len, signal: None, more: false });
        let get = Op::Get(Get { local: 1, lkey: 2, rkey: 3, remote: 4, len: 100, more: false });
        let mut ops = of([put(10), get, put(1)]);
        ops.push_signal(Signal { remote: 8, rkey: 3, value: 1, strong: true });
        assert_eq!((0..=4).map(|n| ops.bytes_of(n)).collect::<Vec<_>>(), [0, 10, 110, 111, 111]);
        assert_eq!((0..=4).map(|n| ops.last_get(n)).collect::<Vec<_>>(), [None, None, Some(1), Some(1), Some(1)]);
        ops.truncate(2);
        assert_eq!((ops.len(), ops.bytes_of(2), ops.last_get(2)), (2, 110, Some(1)));
        assert!(ops.any_into_host());
        ops.clear();
        ops.push(put(7));
        assert_eq!((ops.len(), ops.bytes_of(1), ops.last_get(1)), (1, 7, None));
        let into_gpu = Get { local: 0, lkey: Key::gpu(1, false).0, rkey: 2, remote: 64, len: 8, more: false };
        ops.push(Op::Get(into_gpu));
        assert!(ops.last_get(2).is_some() && !ops.any_into_host());
    }

    /// A put and the signal behind it are one operation, if the put has none yet; everything else stays by itself.
    #[test]
    fn a_signal_goes_with_the_put_before_it() {
        let signal = Signal { remote: 8, rkey: 3, value: 1, strong: true };
        let put = |signal| Op::Put(Put { local: 0, lkey: 1, rkey: 2, remote: 64, len: 8, signal, more: false });
        let payload = Payload::new(&[7]).expect("a byte");
        let value = |signal| Op::Value(Value { payload, rkey: 2, remote: 64, signal, more: false });
        let get = Op::Get(Get { local: 0, lkey: 1, rkey: 2, remote: 64, len: 8, more: false });
        for (before, after) in [(put(None), put(Some(signal))), (value(None), value(Some(signal)))] {
            let mut ops = of([get, before]);
            assert!(ops.attach(signal));
            assert_eq!(ops[..], [get, after]);
        }
        let mut bare = Ops::default();
        assert!(!bare.attach(signal), "there is nothing");
        bare.push_signal(signal);
        for alone in [get, put(Some(signal)), bare[0]] {
            let mut ops = of([put(None), alone]);
            assert!(!ops.attach(signal));
            assert_eq!(ops[..], [put(None), alone]);
        }
    }
}
