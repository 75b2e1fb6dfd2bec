//! A thread of device code, whatever it writes.

use super::{gdaki, proxy, Posted, Waiting};

/// Puts and gets go in pieces of this many bytes.
pub const CHUNK: u64 = 1 << 30;

/// Where a signal is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// One of the context's own, by number.
    Indexed(u32),
    /// In a window, by its handle for device code and the offset there.
    Va {
        /// What `regMrSym` returned for device code.
        window: u64,
        /// Bytes.
        offset: u64,
    },
}

/// A signal to add to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signal {
    /// Which.
    pub place: Place,
    /// `None`: add one. A descriptor's value must then not be looked at.
    pub add: Option<u64>,
    /// Behind all that came before on this context to this peer. Entries know no other.
    pub strong: bool,
}

impl Signal {
    /// A strong increment of signal `id`.
    pub fn inc(id: u32) -> Self {
        Self { place: Place::Indexed(id), add: None, strong: true }
    }

    /// A strong addition to signal `id`.
    pub fn add(id: u32, value: u64) -> Self {
        Self { add: Some(value), ..Self::inc(id) }
    }

    /// The same without order.
    pub fn weak(self) -> Self {
        Self { strong: false, ..self }
    }
}

/// What [`Thread::wait`] waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    pub(super) posted: Posted,
    /// The newest get before it, where descriptors bring it.
    pub(super) issued: u32,
}

/// One thread of device code on one context.
pub enum Thread<'a> {
    /// Writes descriptors.
    Proxy(proxy::Thread<'a>),
    /// Writes entries.
    Gdaki(gdaki::Thread<'a>),
}

/// What both do.
macro_rules! either {
    ($thread:expr, $it:ident => $what:expr) => {
        match $thread {
            Thread::Proxy($it) => $what,
            Thread::Gdaki($it) => $what,
        }
    };
}

impl Thread<'_> {
    /// Puts `bytes` bytes from (window, offset) here to (window, offset) there. Windows are handles for device code.
    /// The last of what was posted is returned.
    pub fn put(
        &mut self,
        peer: u32,
        from: (u64, u64),
        to: (u64, u64),
        bytes: u64,
        signal: Option<&Signal>,
        counter: Option<u32>,
    ) -> Result<Posted, String> {
        either!(self, it => it.put(peer, from, to, bytes, signal, counter))
    }

    /// Puts a value of 1 to [`super::Device::most_inline`] bytes.
    pub fn put_value(
        &mut self,
        peer: u32,
        value: &[u8],
        to: (u64, u64),
        signal: Option<&Signal>,
    ) -> Result<Posted, String> {
        either!(self, it => it.put_value(peer, value, to, signal))
    }

    /// A signal alone.
    pub fn signal(&mut self, peer: u32, signal: &Signal) -> Result<Posted, String> {
        either!(self, it => it.signal(peer, signal))
    }

    /// Gets `bytes` bytes from (window, offset) there to (window, offset) here. `None`: there was nothing to post.
    pub fn get(&mut self, peer: u32, from: (u64, u64), to: (u64, u64), bytes: u64) -> Result<Option<Posted>, String> {
        either!(self, it => it.get(peer, from, to, bytes))
    }

    /// Waits until an operation is complete: its source may be reused.
    pub fn complete(&self, posted: &Posted) -> Result<(), String> {
        either!(self, it => it.complete(posted))
    }

    /// What a flush of one peer's queue will wait for.
    pub fn flush_async(&mut self, peer: u32) -> Result<Request, String> {
        either!(self, it => it.flush_async(peer))
    }

    /// Waits for a flush: all that was posted before is complete, and what gets brought is visible.
    pub fn wait(&mut self, request: &Request) -> Result<(), String> {
        either!(self, it => it.wait(request))
    }

    /// Flushes every peer's queue.
    pub fn flush(&mut self) -> Result<(), String> {
        let nranks = either!(self, it => it.nranks());
        (0..nranks).try_for_each(|peer| {
            let request = self.flush_async(peer)?;
            self.wait(&request)
        })
    }

    fn number(&self) -> usize {
        either!(self, it => it.number())
    }

    fn until(&self, what: &dyn Fn() -> String, mut ready: impl FnMut() -> bool) -> Result<(), String> {
        let waiting: &dyn Waiting = either!(self, it => it.waiting());
        match ready() {
            true => Ok(()),
            false => waiting.until(what, &mut ready),
        }
    }

    /// A signal's value.
    pub fn read_signal(&self, id: u32) -> u64 {
        either!(self, it => it.read_signal(id))
    }

    /// Waits until a signal has reached `least` (modulo 2^64: within 2^63 past it).
    pub fn wait_signal(&self, id: u32, least: u64) -> Result<(), String> {
        let what = || {
            let (number, now) = (self.number(), self.read_signal(id));
            format!("signal {id} of context {number} to reach {least:#x}; it is {now:#x}")
        };
        self.until(&what, || self.read_signal(id).wrapping_sub(least) as i64 >= 0)
    }

    /// Sets a signal back to 0 for this device code.
    pub fn reset_signal(&self, id: u32) {
        either!(self, it => it.reset_signal(id))
    }

    /// A counter's value.
    pub fn read_counter(&self, id: u32) -> u64 {
        either!(self, it => it.read_counter(id))
    }

    /// Waits until a counter has reached `least`.
    pub fn wait_counter(&self, id: u32, least: u64) -> Result<(), String> {
        let what = || {
            let (number, now) = (self.number(), self.read_counter(id));
            format!("counter {id} of context {number} to reach {least}; it is {now}")
        };
        self.until(&what, || self.read_counter(id) >= least)
    }

    /// Sets a counter back to 0.
    pub fn reset_counter(&self, id: u32) {
        either!(self, it => it.reset_counter(id))
    }
}
