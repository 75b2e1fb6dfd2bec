//! A send queue that a kernel serves.

use super::*;

/// What a kernel is told, and what is left behind when it has served: its entries are complete, for whoever looks at
/// entries of the completion queue too.
#[test]
fn a_queue_that_is_rung_and_counted_can_be_served_by_a_kernel() {
    let shared = Shared::new();
    let counted = Some(CreditWord::whole(0, 7, 64, true));
    let mut queue = shared.queue(Ringing::FreeFlow, counted);
    assert_eq!(queue.view(false), None, "maybe nobody rings");
    for index in 0..3 {
        shared.nop(index);
        shared.ring(index);
    }
    queue.begin();
    (0..3).for_each(|nth| assert_eq!(queue.read(nth, &mut Ops::default()), Entry::Nop));
    queue.take(3);
    queue.credit(3);
    let view = queue.view(false).expect("it can be served");
    assert_eq!((view.slots, view.size, view.next, view.index), (0x1000, SIZE as u32, 3, 64));
    assert_eq!(view.format, Format::Entries { number: 9, rings: Rings::Words(0x2000) });
    assert_eq!(queue.served(3), 0);
    assert_eq!(queue.served(8), 5);
    assert_eq!((queue.outstanding(), queue.completions.written()), (0, 8));
    assert_eq!(queue.windows.terms().counts.get(9).map(|count| count.load(Ordering::Relaxed)), Some(8));
    // Where it goes on.
    shared.nop(8);
    shared.ring(8);
    queue.begin();
    assert_eq!(queue.read(0, &mut Ops::default()), Entry::Nop);
    queue.stop(Stopped::Refused);
    assert_eq!(queue.view(false), None, "what is left of it is refused one by one");
}

#[test]
fn a_queue_that_a_kernel_cannot_count_is_not_served_by_one() {
    let near_a_wrap = (1 << 32) - 5;
    for (handler, credits, next) in [
        (Ringing::FreeFlow, None, 0),
        (Ringing::FreeFlow, Some(CreditWord::whole(0, 7, 64, false)), 0),
        (Ringing::Proxy, Some(CreditWord::whole(0, 7, 64, true)), 0),
        (Ringing::FreeFlow, Some(CreditWord::whole(0, 7, 64, true)), near_a_wrap),
    ] {
        let shared = Shared::new();
        let mut queue = shared.queue(handler, credits);
        (queue.next, queue.credited) = (next, next);
        queue.arrival.rings();
        assert_eq!(queue.view(false), None);
    }
}

/// The same where a doorbell rings and completion entries tell device code: the kernel writes those itself.
#[test]
fn a_queue_with_a_doorbell_can_be_served_by_a_kernel() {
    let shared = Shared::new();
    let mut queue = shared.queue(Ringing::Doorbell, None);
    let ring = |producer: u32| shared.record.store(producer.to_be(), Ordering::Relaxed);
    let take = |queue: &mut SendQueue, index: u64| {
        shared.nop(index);
        ring(index as u32 + 1);
        queue.begin();
        assert_eq!(queue.read(0, &mut Ops::default()), Entry::Nop);
        queue.take(1);
    };
    take(&mut queue, 0);
    assert!(queue.can_be_served(), "also while some are under way");
    queue.credit(1);
    let rings = Rings::Doorbell { at: 0x2000, completions: 0x3000 };
    let view = queue.view(false).expect("it can be served");
    assert_eq!((view.format, view.next, view.index), (Format::Entries { number: 9, rings }, 1, 0x3000));
    let watched = queue.view(true).expect("it can be watched");
    assert_eq!((watched.format, watched.index), (view.format, 0));
    let last = |index: usize| shared.completions[index % SIZE * 8 + 7].load(Ordering::Relaxed);
    let before = last(1);
    assert_eq!((queue.served(3), last(1)), (2, before), "what the kernel has written stays");
    assert_eq!((queue.outstanding(), queue.completions.written()), (0, 3));
    assert_eq!(queue.windows.terms().counts.get(9).map(|count| count.load(Ordering::Relaxed)), Some(3));
    // Where it goes on: the doorbell has not been heard since, and speaks of no more than the kernel has had.
    ring(3);
    queue.begin();
    assert_eq!(queue.read(0, &mut Ops::default()), Entry::Absent);
    take(&mut queue, 3);
    queue.credit(1);
    assert!(queue.view(false).is_some());
    // One that asks for no completion entry: those of later ones have other places than their slots.
    shared.nop(4);
    shared.slots[4 % SIZE * 8 + 1].store(0, Ordering::Relaxed);
    ring(5);
    queue.begin();
    assert_eq!(queue.read(0, &mut Ops::default()), Entry::Nop);
    queue.take(1);
    queue.credit(1);
    assert_eq!((queue.can_be_served(), queue.view(false)), (false, None));
}

/// The kernel tells device code of completions before this side knows of them: device code writes slots again, and
/// rings for more than the queue has beyond what this side takes for complete.
#[test]
fn a_look_at_a_queue_that_is_served_takes_nobody_for_too_far_ahead() {
    for handler in [Ringing::Doorbell, Ringing::FreeFlow] {
        let shared = Shared::new();
        let counted = Some(CreditWord::whole(0, 7, 64, true));
        let mut queue = shared.queue(handler, counted.filter(|_| handler == Ringing::FreeFlow));
        let ring = |index: u64| match handler {
            Ringing::Doorbell => shared.record.store((index as u32 + 1).to_be(), Ordering::Relaxed),
            _ => shared.ring(index),
        };
        let take = |queue: &mut SendQueue, index: u64| {
            shared.nop(index);
            ring(index);
            queue.begin();
            assert_eq!(queue.read(0, &mut Ops::default()), Entry::Nop, "{handler:?}, entry {index}");
            queue.take(1);
            queue.credit(1);
        };
        take(&mut queue, 0);
        assert!(queue.view(false).is_some());
        assert_eq!(queue.rung_at_most(), 0, "{handler:?}");
        // The kernel is through with three of them.
        let size = SIZE as u64;
        (1..size + 4).for_each(ring);
        assert_eq!(queue.rung_at_most(), SIZE as u32, "{handler:?}");
        assert_eq!(queue.served(size as u32 + 4), SIZE as u32 + 3);
        assert_eq!(queue.rung_at_most(), 0, "{handler:?}");
        take(&mut queue, size + 4);
        assert!(queue.view(false).is_some(), "{handler:?}");
        // By this side alone it is too far.
        (size + 5..2 * size + 6).for_each(ring);
        queue.begin();
        (0..SIZE as u32).for_each(|nth| _ = queue.read(nth, &mut Ops::default()));
        assert_eq!(queue.view(false), None, "{handler:?}");
    }
}
