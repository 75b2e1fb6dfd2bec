//! Sets of contexts whose every number is another one.

use oxygin::gdaki::view::{Description, Handler, Image, Layout, PeerQueues, QueuePair, SetShape, Words};

/// What a set is made of.
#[derive(Clone, Debug)]
pub struct Given {
    pub layout: Layout,
    pub shape: SetShape,
    pub counters: u32,
    pub signals: u32,
    pub slots: u32,
    pub handler: Handler,
    pub dump: bool,
    /// Where device code sees it.
    pub address: u64,
}

pub const COUNTERS: u64 = 0x7f00_0000_0000;
pub const SIGNALS: u64 = 0x7f80_0000_0000;
pub const SINK_KEY: u32 = 0x0102_0304;

/// The key to a rank's counters (0) or signals (1).
pub fn key(which: u32, rank: usize) -> u32 {
    0xa1b2_0000 | which << 12 | rank as u32
}

/// The key to this rank's own.
pub fn own_key(which: u32) -> u32 {
    0xc3d4_0506 | which << 31
}

impl Given {
    /// A queue pair, or its companion.
    pub fn queue_pair(&self, context: usize, peer: usize, is_companion: bool) -> QueuePair {
        let id = (2 * (context * self.shape.ranks as usize + peer) + usize::from(is_companion)) as u32;
        let far = u64::from(id) << 32;
        QueuePair {
            number: 0x80_0001 + id,
            slots: self.slots,
            send_queue: 0x10_0000_0040 + far,
            send_record: 0x20_0000_0004 + far,
            doorbell: 0x30_0000_0008 + far,
            completion_number: 0x40_0001 + id,
            completion_queue: 0x40_0000_00c0 + far,
            completion_record: 0x50_0000_0004 + far,
            is_counted: false,
            handler: self.handler,
        }
    }

    pub fn queues(&self) -> Vec<PeerQueues> {
        let each = |context, peer| PeerQueues {
            main: self.queue_pair(context, peer, false),
            companion: (self.counters > 0).then(|| self.queue_pair(context, peer, true)),
        };
        let contexts = 0..self.shape.contexts as usize;
        contexts.flat_map(|c| self.shape.peers().map(move |p| each(c, p as usize))).collect()
    }

    pub fn keys(&self, which: u32) -> Vec<u32> {
        (0..self.shape.ranks as usize).map(|rank| key(which, rank)).collect()
    }

    pub fn room(&self) -> Image {
        Image::new(self.layout, self.shape, self.counters > 0).expect("a room")
    }

    /// Calls with the description.
    pub fn describe<R>(&self, call: impl FnOnce(Description) -> R) -> R {
        let (queues, counters, signals) = (self.queues(), self.keys(0), self.keys(1));
        call(Description {
            queues: &queues,
            counters: Words { buffer: COUNTERS, each: self.counters, rkeys: &counters, lkey: own_key(0) },
            signals: Words { buffer: SIGNALS, each: self.signals, rkeys: &signals, lkey: own_key(1) },
            sink_lkey: SINK_KEY,
            dump_after_gets: self.dump,
        })
    }

    /// What device code is given, in memory that held something else before.
    pub fn written(&self) -> Vec<u8> {
        let room = self.room();
        let mut memory = vec![0xee; room.bytes()];
        self.describe(|of| room.write(&of, &mut memory, self.address)).expect("written");
        memory
    }
}
