//! A ring of messages from one rank to another: one producer, one consumer, in shared memory.
//!
//! Positions count bytes from the beginning of time; the ring holds the bytes from `tail` (the consumer's) to `head`
//! (the producer's). A message never wraps: where it would, a pad fills the rest.

use super::message::{footprint, Header, MessageKind, ALIGN, HEADER};
use super::positions::{ReadEnd, WriteEnd};
use std::sync::atomic::AtomicU64;

/// The two positions (`positions.rs`), a cache line each (two, because CPUs fetch lines in pairs).
#[repr(C, align(128))]
pub struct Positions {
    head: AtomicU64,
    _gap: [u64; 15],
    tail: AtomicU64,
    _gap2: [u64; 15],
}

/// Bytes before the first message.
pub const POSITIONS: usize = std::mem::size_of::<Positions>();

/// The writing end. At most one exists a ring.
pub struct Producer {
    positions: *const Positions,
    data: *mut u8,
    at: WriteEnd,
}

// SAFETY: the pointers are to shared memory that outlives the producer (its owner keeps the mapping).
unsafe impl Send for Producer {}

impl Producer {
    /// The writing end of the ring at `at`: [`POSITIONS`] bytes and then `size` of data, a power of two.
    ///
    /// # Safety
    /// The memory is mapped for longer than the producer lives, aligned to 128, and no other producer writes.
    pub unsafe fn new(at: *mut u8, size: usize) -> Self {
        let positions = at as *const Positions;
        // SAFETY: mapped and aligned (caller).
        let writer = unsafe { WriteEnd::new(&(*positions).head, &(*positions).tail, size as u64) };
        // SAFETY: the data follows the positions.
        let data = unsafe { at.add(POSITIONS) };
        Self { positions, data, at: writer }
    }

    /// Writes a message if there is room; it becomes visible with [`Producer::publish`].
    ///
    /// # Safety
    /// `header.len` bytes at `payload` are readable.
    #[inline]
    pub unsafe fn push(&mut self, header: Header, payload: *const u8) -> bool {
        let bytes = footprint(header.len as usize) as u64;
        // SAFETY: mapped (constructor).
        let Some(place) = self.at.reserve(unsafe { &(*self.positions).tail }, bytes) else { return false };
        // A gap too small for a header is skipped by both ends.
        if place.pad >= HEADER as u64 {
            let fill =
                Header { kind: MessageKind::Pad, len: (place.pad - HEADER as u64) as u32, key: 0, aux: 0, addr: 0 };
            // SAFETY: `pad` bytes to the ring's end are free.
            unsafe { self.data.add(place.pad_at as usize).cast::<[u64; 3]>().write(fill.encode()) };
        }
        // SAFETY: `bytes` bytes at the place are inside the ring, and free.
        unsafe {
            let to = self.data.add(place.at as usize);
            to.cast::<[u64; 3]>().write(header.encode());
            if header.len == 8 {
                to.add(HEADER).cast::<u64>().write(payload.cast::<u64>().read_unaligned());
            } else {
                std::ptr::copy_nonoverlapping(payload, to.add(HEADER), header.len as usize);
            }
        }
        true
    }

    /// Makes everything pushed visible to the consumer.
    #[inline]
    pub fn publish(&mut self) {
        // SAFETY: mapped (constructor).
        self.at.publish(unsafe { &(*self.positions).head });
    }

    /// Whether the consumer has applied everything.
    pub fn is_drained(&self) -> bool {
        // SAFETY: mapped (constructor).
        self.at.is_drained(unsafe { &(*self.positions).tail })
    }

    /// Whether something is pushed and not published.
    pub fn is_dirty(&self) -> bool {
        self.at.is_dirty()
    }

    /// The largest payload that is sure to fit into an empty ring, wherever the head is.
    pub fn max_payload(&self) -> usize {
        self.at.size as usize / 2 - HEADER
    }
}

/// What the consumer found wrong with a ring: its producer is broken or hostile.
#[derive(Debug, PartialEq, Eq)]
pub struct Malformed;

/// The reading end. At most one exists a ring.
pub struct Consumer {
    positions: *const Positions,
    data: *const u8,
    at: ReadEnd,
}

// SAFETY: as for Producer.
unsafe impl Send for Consumer {}

/// A message in place. The payload may change under the reader if the peer misbehaves, so it is copied and nobody
/// forms a reference to it; it never leaves the ring.
pub struct Message {
    /// Its header, a copy.
    pub header: Header,
    /// Its payload: `header.len` readable bytes, 8-byte aligned.
    pub payload: *const u8,
    next: u64,
}

impl Message {
    /// A copy of the payload.
    ///
    /// # Safety
    /// The ring is mapped.
    pub unsafe fn copy(&self) -> Box<[u8]> {
        let len = self.header.len as usize;
        let mut bytes = Vec::with_capacity(len);
        // SAFETY: `len` bytes inside the ring (`peek`); as many were just allocated.
        unsafe {
            std::ptr::copy_nonoverlapping(self.payload, bytes.as_mut_ptr(), len);
            bytes.set_len(len);
        }
        bytes.into()
    }
}

impl Consumer {
    /// The reading end of the ring at `at`.
    ///
    /// # Safety
    /// As for [`Producer::new`].
    pub unsafe fn new(at: *mut u8, size: usize) -> Self {
        // SAFETY: the data follows the positions.
        Self { positions: at.cast(), data: unsafe { at.add(POSITIONS) }, at: ReadEnd::new(size as u64) }
    }

    /// The position up to which messages may be read now.
    #[inline]
    pub fn head(&self) -> u64 {
        // SAFETY: mapped (constructor).
        self.at.head(unsafe { &(*self.positions).head })
    }

    /// Whether everything below `head` has been read.
    #[inline]
    pub fn is_at(&self, head: u64) -> bool {
        self.at.tail == head
    }

    /// Whether everything below `head`, seen once, has been read.
    pub fn has_passed(&self, head: u64) -> bool {
        self.at.tail.wrapping_sub(head) as i64 >= 0
    }

    /// Whether the ring holds nothing, as of now.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.head() == self.at.tail
    }

    /// The message at the tail, below `head` (from [`Consumer::head`]).
    #[inline]
    pub fn peek(&mut self, head: u64) -> Result<Option<Message>, Malformed> {
        loop {
            let ReadEnd { tail, size } = self.at;
            let left = head.wrapping_sub(tail);
            if left == 0 {
                return Ok(None);
            }
            if left > size || left % ALIGN as u64 != 0 {
                return Err(Malformed);
            }
            let at = tail & (size - 1);
            let to_end = size - at;
            if to_end < HEADER as u64 {
                self.at.tail += to_end;
                continue;
            }
            // SAFETY: HEADER bytes at `at` are inside the ring; volatile, because a peer may write at the same time.
            let words = unsafe { self.data.add(at as usize).cast::<[u64; 3]>().read_volatile() };
            let header = Header::parse(words).ok_or(Malformed)?;
            let bytes = footprint(header.len as usize) as u64;
            if bytes > to_end || bytes > left {
                return Err(Malformed);
            }
            if header.kind == MessageKind::Pad {
                self.at.tail += bytes;
                continue;
            }
            // SAFETY: inside the ring, as just checked.
            let payload = unsafe { self.data.add(at as usize + HEADER) };
            return Ok(Some(Message { header, payload, next: tail + bytes }));
        }
    }

    /// Done with the message that `peek` returned.
    #[inline]
    pub fn pop(&mut self, message: &Message) {
        self.at.tail = message.next;
    }

    /// Gives the room of everything popped back to the producer.
    #[inline]
    pub fn release(&mut self) {
        // SAFETY: mapped (constructor).
        self.at.release(unsafe { &(*self.positions).tail });
    }
}

/// Copies what a peer sent to its place: without a reference to either, which others may write meanwhile.
///
/// # Safety
/// `len` bytes are readable at `from` and writable at `to`.
#[inline(always)]
pub unsafe fn place(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller's promise; payloads are 8-byte aligned.
    unsafe {
        if len == 8 {
            // The most common size, as one store: a reader that polls the word sees all of it or nothing.
            to.cast::<u64>().write_unaligned(from.cast::<u64>().read_volatile());
        } else {
            std::ptr::copy_nonoverlapping(from, to, len);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A ring in memory of its own, which the first value keeps alive.
    fn ring(size: usize) -> (Vec<u128>, Producer, Consumer) {
        let memory = vec![0u128; (POSITIONS + size) / 16 + 8];
        let at = (memory.as_ptr() as usize).next_multiple_of(128) as *mut u8;
        // SAFETY: the vector has room for the ring behind the alignment and lives as long as both ends.
        let (producer, consumer) = unsafe { (Producer::new(at, size), Consumer::new(at, size)) };
        (memory, producer, consumer)
    }

    /// Two threads, a ring that is nearly always full, messages that wrap everywhere.
    #[test]
    fn what_one_thread_writes_another_reads_in_order() {
        const MESSAGES: u32 = 20_000;
        let (_m, mut p, mut c) = ring(1024);
        let len = |n: u32| (n * 7 % 150) as usize;
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for n in 0..MESSAGES {
                    let payload = vec![n as u8; len(n)];
                    let h = Header { kind: MessageKind::Put, len: len(n) as u32, key: n, aux: 0, addr: 7 };
                    // SAFETY: the payload has `len` bytes.
                    while !unsafe { p.push(h, payload.as_ptr()) } {
                        std::thread::yield_now();
                    }
                    p.publish();
                }
            });
            let mut next = 0;
            while next < MESSAGES {
                let head = c.head();
                let Some(m) = c.peek(head).unwrap() else {
                    std::thread::yield_now();
                    continue;
                };
                // SAFETY: the ring is there.
                let bytes = unsafe { m.copy() };
                assert_eq!((m.header.key, bytes.len()), (next, len(next)));
                assert!(bytes.iter().all(|&b| b == next as u8));
                c.pop(&m);
                c.release();
                next += 1;
            }
        });
    }

    proptest! {
        #[test]
        fn a_ring_is_a_queue(ops in proptest::collection::vec((any::<bool>(), 0usize..200), 1..300)) {
            let (_m, mut p, mut c) = ring(1024);
            let mut model = std::collections::VecDeque::new();
            let mut n = 0u32;
            for (push, len) in ops {
                if push {
                    let payload = vec![n as u8; len];
                    let h = Header { kind: MessageKind::Put, len: len as u32, key: n, aux: 0, addr: 7 };
                    // SAFETY: the payload has `len` bytes.
                    if unsafe { p.push(h, payload.as_ptr()) } {
                        p.publish();
                        model.push_back((n, len));
                        n += 1;
                    } else {
                        prop_assert!(!model.is_empty(), "an empty ring takes any message below its limit");
                    }
                } else {
                    let head = c.head();
                    match c.peek(head).unwrap() {
                        None => prop_assert!(model.is_empty()),
                        Some(m) => {
                            let (want, len) = model.pop_front().unwrap();
                            prop_assert_eq!((m.header.key, m.header.len as usize), (want, len));
                            // SAFETY: the ring is there.
                            let bytes = unsafe { m.copy() };
                            prop_assert_eq!(bytes.len(), len);
                            prop_assert!(bytes.iter().all(|&b| b == want as u8));
                            c.pop(&m);
                            c.release();
                        }
                    }
                }
            }
        }

        #[test]
        fn garbage_never_leads_out_of_the_ring(
            bytes in proptest::collection::vec(any::<u8>(), 1024), head in 0u64..2048,
        ) {
            let (_m, p, mut c) = ring(1024);
            // SAFETY: the ring's data is inside the vector.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), p.data, 1024) };
            for _ in 0..2048 {
                match c.peek(head) {
                    Ok(Some(msg)) => {
                        let start = msg.payload as usize - c.data as usize;
                        prop_assert!(start + msg.header.len as usize <= 1024);
                        c.pop(&msg);
                    }
                    Ok(None) | Err(Malformed) => break,
                }
            }
        }
    }
}
