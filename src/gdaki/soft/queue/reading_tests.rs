//! Reads among entries that change something at the peer.

use super::*;

const WRITE: u64 = 8;
const READ: u64 = 0x10;

/// Writes entry `index`, of eight bytes, and rings it.
fn post(shared: &Shared, window: &Named, index: u64, opcode: u64) {
    let entry = [
        index << 40 | opcode << 32 | 9 << 8 | 3,
        8 << 32,
        64,
        window.key << 32,
        8 << 32 | window.key,
        128,
        u64::MAX,
        u64::MAX,
    ];
    for (slot, word) in shared.slots[8 * (index as usize % SIZE)..].iter().zip(entry) {
        slot.store(word.to_be(), Ordering::Relaxed);
    }
    shared.ring(index);
}

/// A read waits for what was sent before it.
#[test]
fn a_read_has_its_turn_once_what_was_sent_before_it_is_complete() {
    let (shared, window) = (Shared::new(), Named::new());
    let mut queue = shared.queue_of(window.keys.clone(), Ringing::FreeFlow, None);
    let mut ops = Ops::default();
    post(&shared, &window, 0, WRITE);
    post(&shared, &window, 1, READ);
    queue.begin();
    assert_eq!(queue.read(0, &mut ops), Entry::Op(Finish::NONE));
    assert_eq!(queue.read(1, &mut ops), Entry::Absent);
    queue.take(1);
    queue.begin();
    assert_eq!(queue.read(0, &mut ops), Entry::Absent, "it is under way");
    queue.credit(1);
    queue.begin();
    assert_eq!(queue.read(0, &mut ops), Entry::Fenced, "it may be on its way to the peer's memory");
    queue.fenced();
    assert_eq!(queue.read(0, &mut ops), Entry::Gets(1));
}

/// The fabric has room for nothing of a batch: what stands behind a read is read once more, and not waited for.
#[test]
fn a_read_that_had_no_room_does_not_wait_for_what_is_behind_it() {
    let (shared, window) = (Shared::new(), Named::new());
    let mut queue = shared.queue_of(window.keys.clone(), Ringing::FreeFlow, None);
    post(&shared, &window, 0, READ);
    post(&shared, &window, 1, WRITE);
    for _ in 0..2 {
        let mut ops = Ops::default();
        queue.begin();
        assert_eq!(queue.read(0, &mut ops), Entry::Gets(1));
        assert_eq!(queue.read(1, &mut ops), Entry::Op(Finish::NONE));
    }
}
