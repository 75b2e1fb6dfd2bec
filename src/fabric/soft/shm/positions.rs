//! Where the two ends of a ring are: how the writing end learns of room, and the reading end of messages.
//!
//! The words are any that several processes look at, so that loom can explore the protocol.

use crate::fabric::soft::status::news::Word;
use std::sync::atomic::Ordering;

/// The writing end's position.
pub struct WriteEnd {
    /// Bytes of the ring, a power of two.
    pub size: u64,
    head: u64,
    published: u64,
    /// The tail when last looked at: it only moves on.
    tail: u64,
}

/// Where a message goes.
pub struct Reservation {
    /// From the ring's first byte.
    pub at: u64,
    /// Bytes to be skipped in front of it, up to the ring's end, if the message would wrap.
    pub pad: u64,
    /// Where these begin.
    pub pad_at: u64,
}

impl WriteEnd {
    /// Goes on where the ring is.
    pub fn new<W: Word>(head: &W, tail: &W, size: u64) -> Self {
        let head = head.load(Ordering::Acquire);
        Self { size, head, published: head, tail: tail.load(Ordering::Acquire) }
    }

    #[inline]
    fn has_room<W: Word>(&mut self, tail: &W, bytes: u64) -> bool {
        if self.head + bytes - self.tail <= self.size {
            return true;
        }
        // What the reading end has read of that room it does not read any more.
        let tail = tail.load(Ordering::Acquire);
        // A tail that goes back or beyond the head is a peer's fault and changes nothing.
        if tail > self.tail && tail <= self.head {
            self.tail = tail;
        }
        self.head + bytes - self.tail <= self.size
    }

    /// Room for a message of `bytes`, in one piece.
    #[inline]
    pub fn reserve<W: Word>(&mut self, tail: &W, bytes: u64) -> Option<Reservation> {
        let at = self.head & (self.size - 1);
        let to_end = self.size - at;
        let pad = if bytes <= to_end { 0 } else { to_end };
        if !self.has_room(tail, bytes + pad) {
            return None;
        }
        self.head += bytes + pad;
        Some(Reservation { at: if pad == 0 { at } else { 0 }, pad, pad_at: at })
    }

    /// Makes everything that was written visible.
    #[inline]
    pub fn publish<W: Word>(&mut self, head: &W) {
        self.published = self.head;
        head.store(self.head, Ordering::Release);
    }

    /// Whether the reading end is through with everything.
    pub fn is_drained<W: Word>(&self, tail: &W) -> bool {
        tail.load(Ordering::Acquire) == self.head
    }

    /// Whether something is not published.
    pub fn is_dirty(&self) -> bool {
        self.published != self.head
    }
}

/// The reading end's position.
#[derive(Clone, Copy)]
pub struct ReadEnd {
    /// Bytes of the ring.
    pub size: u64,
    /// Up to where it has read.
    pub tail: u64,
}

impl ReadEnd {
    /// Nothing read yet.
    pub fn new(size: u64) -> Self {
        Self { size, tail: 0 }
    }

    /// Up to where it may read now.
    #[inline]
    pub fn head<W: Word>(&self, head: &W) -> u64 {
        head.load(Ordering::Acquire)
    }

    /// Gives back the room of what it has read.
    #[inline]
    pub fn release<W: Word>(&self, tail: &W) {
        tail.store(self.tail, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::soft::status::news::{announce, clear, sleep};
    use crate::sys::spin::tests::ModelSpin;
    use loom::cell::UnsafeCell;
    use loom::sync::atomic::AtomicU64;
    use loom::sync::Arc;

    /// Bytes of a message, of which the ring holds two.
    const MESSAGE: u64 = 8;

    /// A ring of two words that loom watches, its news bit, and whether its owner sleeps.
    struct Ring {
        head: AtomicU64,
        tail: AtomicU64,
        news: AtomicU64,
        sleeping: AtomicU64,
        data: [UnsafeCell<u64>; 2],
    }

    impl Ring {
        fn new(news: u64) -> Self {
            let [head, tail, news, sleeping] = [0, 0, news, 0].map(AtomicU64::new);
            Self { head, tail, news, sleeping, data: [0; 2].map(UnsafeCell::new) }
        }

        fn writer(&self) -> WriteEnd {
            WriteEnd::new(&self.head, &self.tail, 2 * MESSAGE)
        }

        /// Writes a message if there is room; says which sleep its owner sleeps.
        fn push(&self, writer: &mut WriteEnd, value: u64) -> Option<u64> {
            let place = writer.reserve(&self.tail, MESSAGE)?;
            // SAFETY: loom fails where somebody else is at it.
            self.data[(place.at / MESSAGE) as usize].with_mut(|word| unsafe { *word = value });
            writer.publish(&self.head);
            Some(announce(&self.news, 1, &self.sleeping))
        }

        /// Reads what is there.
        fn read(&self, reader: &mut ReadEnd, found: &mut Vec<u64>) {
            let head = reader.head(&self.head);
            while reader.tail != head {
                let at = (reader.tail & (reader.size - 1)) / MESSAGE;
                // SAFETY: as above.
                found.push(self.data[at as usize].with(|word| unsafe { *word }));
                reader.tail += MESSAGE;
            }
            reader.release(&self.tail);
        }
    }

    fn explore(model: impl Fn() + Send + Sync + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(model);
    }

    /// The ring is full in between: room is given back before anything is written there.
    #[test]
    fn a_ring_brings_every_message_whole_and_in_order() {
        explore(|| {
            let ring = Arc::new(Ring::new(1));
            let its = ring.clone();
            let sender = loom::thread::spawn(move || {
                let mut writer = its.writer();
                for value in 1..=3 {
                    while its.push(&mut writer, value).is_none() {
                        loom::thread::yield_now();
                    }
                }
            });
            let (mut reader, mut found) = (ReadEnd::new(2 * MESSAGE), Vec::new());
            while found.len() < 3 {
                ring.read(&mut reader, &mut found);
                loom::thread::yield_now();
            }
            sender.join().unwrap();
            assert_eq!(found, [1, 2, 3]);
        });
    }

    /// Two contexts of a sender write into its ring behind one lock, while its owner takes the ring off its list and
    /// goes to sleep.
    #[test]
    fn two_that_write_behind_a_lock_lose_nothing_and_wake_the_owner() {
        explore(|| {
            let ring = Arc::new(Ring::new(1));
            let port = Arc::new(ModelSpin::new(ring.writer()));
            let write = |value| {
                let (its, port) = (ring.clone(), port.clone());
                move || port.with(|writer| its.push(writer, value).expect("room for two"))
            };
            let (first, second) = (write(1), write(2));
            let other = loom::thread::spawn(first);
            let owner = loom::thread::spawn({
                let its = ring.clone();
                move || {
                    let (mut reader, mut found) = (ReadEnd::new(2 * MESSAGE), Vec::new());
                    sleep(&its.sleeping, 1);
                    clear(&its.news, 1);
                    its.read(&mut reader, &mut found);
                    (reader, found)
                }
            });
            let wakes = [second(), other.join().unwrap()];
            let (mut reader, mut found) = owner.join().unwrap();
            let is_told = wakes.contains(&1) || ring.news.load(Ordering::Relaxed) != 0;
            assert!(found.len() == 2 || is_told, "it sleeps, has {found:?}, and nobody wakes it");
            ring.read(&mut reader, &mut found);
            found.sort();
            assert_eq!(found, [1, 2]);
        });
    }
}
