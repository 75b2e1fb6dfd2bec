//! A put is done at its source, its target learns so from the application, deregisters the window, and has the bytes:
//! over InfiniBand they are there by then, so nothing that the application did fails an operation here.

use super::*;

const ROUNDS: u64 = 20;
const BYTES: usize = 64 << 10;
/// Bytes of a round's puts, one behind the other; less than a ring has room for, and a socket's buffer.
const PUTS: [usize; 6] = [8, 64, 4096, 8, 16 << 10, 32 << 10];

/// A rank whose helper thread stands.
pub(super) struct Standing<'a>(&'a Progress);

impl<'a> Standing<'a> {
    pub(super) fn of(shared: &'a Progress) -> Self {
        shared.stands[0].store(true, Ordering::SeqCst);
        let standing = Self(shared);
        until("the helper thread", || {
            shared.stir();
            shared.stands[1].load(Ordering::SeqCst)
        });
        standing
    }
}

impl Drop for Standing<'_> {
    fn drop(&mut self) {
        self.0.stands[0].store(false, Ordering::SeqCst);
    }
}

/// One round: `data` and `kept` are windows of both ranks, of which the target's `data` goes.
fn round(ranks: &[Rank], context: &Context, data: &mut [Window], kept: &[Window], round: u64, by_tcp: bool) {
    let to = ranks[1].fabric.shared().unwrap();
    (0..BYTES / 8).for_each(|i| data[0].word(i).store(round << 32 | i as u64, Ordering::Relaxed));
    let standing = Standing::of(to);
    let mut at = 0;
    for bytes in PUTS {
        let mut put = put(&data[0], &data[1], bytes, None);
        (put.local, put.remote) = (put.local + at, put.remote + at);
        // SAFETY: windows are never freed.
        let seq = unsafe { context.put(1, &put) }.unwrap();
        // The sender's helper thread, if anybody.
        until("a put", || context.test(1, seq).unwrap());
        at += bytes as u64;
    }
    until("bytes in sockets", || !by_tcp || to.tcp().unread(0) as u64 >= at);
    ranks[1].deregister(&mut data[1]);
    for i in 0..at as usize / 8 {
        let word = data[1].word(i).load(Ordering::Relaxed);
        assert_eq!(word, round << 32 | i as u64, "round {round}: word {i} after the deregistration");
    }
    drop(standing);
    // The lane goes on.
    // SAFETY: windows are never freed.
    let seq = unsafe { context.put(1, &put(&kept[0], &kept[1], 0, Some((&kept[1], 1)))) }.unwrap();
    wait(context, 1, seq);
    until("a signal", || {
        context.test(1, seq).unwrap();
        kept[1].word(0).load(Ordering::Acquire) == round + 1
    });
}

fn in_place(transport: SoftTransport) {
    let ranks = join(2, 2, transport);
    let mut data: Vec<_> = ranks.iter().map(|r| r.window(1, BYTES)).collect();
    let kept: Vec<_> = ranks.iter().map(|r| r.window(2, 64)).collect();
    let context = ranks[0].context();
    // The way is found, with all the connections that it has.
    for bytes in PUTS {
        // SAFETY: windows are never freed.
        let seq = unsafe { context.put(1, &put(&data[0], &data[1], bytes, None)) }.unwrap();
        wait(&context, 1, seq);
    }
    // SAFETY: windows are never freed.
    unsafe { context.put(1, &put(&kept[0], &kept[1], 0, Some((&kept[1], 1)))) }.unwrap();
    until("a signal", || kept[1].word(0).load(Ordering::Acquire) == 1);
    for number in 1..=ROUNDS {
        round(&ranks, &context, &mut data, &kept, number, transport == SoftTransport::Tcp);
        ranks[1].register(&mut data[1]);
    }
}

#[test]
fn puts_that_are_done_are_in_place_over_shared_memory() {
    in_place(SoftTransport::NoCma);
}

#[test]
fn puts_that_are_done_are_in_place_beside_copies_by_the_kernel() {
    in_place(SoftTransport::Auto);
}

#[test]
fn puts_that_are_done_are_in_place_over_tcp() {
    in_place(SoftTransport::Tcp);
}
