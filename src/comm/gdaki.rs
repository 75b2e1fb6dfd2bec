//! What device code of GDAKI is given of a set: the structures, in the set's memory, and the handle that NCCL has for
//! them.

use super::credits::CreditWords;
use super::nic::NicSpec;
use crate::config::Ringing;
use crate::error::Result;
use crate::fabric::World;
use crate::gdaki::soft::{QueueView, SetView, TableView};
use crate::gdaki::view::{Description, Image, Layout, PeerQueues, QueuePair, Words};
use crate::proxy::memory::{zeros, Memory};
use nccl_plugin_api::{DeviceHandle, DEVICE_GIN_GDAKI};
use std::ffi::c_void;

/// The structures of a set, and where device code finds them.
pub(super) struct DeviceImage {
    layout: Layout,
    image: Image,
    ranks: usize,
    /// The array of contexts, for device code.
    at: u64,
}

fn queue_pair(view: &QueueView) -> QueuePair {
    QueuePair {
        number: view.number,
        slots: view.size,
        send_queue: view.slots,
        send_record: view.record,
        doorbell: view.bell,
        // A queue pair of the software NIC has its completion queue's number.
        completion_number: view.number,
        completion_queue: view.completions,
        completion_record: 0,
        is_counted: view.is_counted,
        handler: view.handler.into(),
    }
}

impl DeviceImage {
    /// Takes room for the structures of such a set; nothing is in them yet.
    pub(super) fn allocate(layout: Layout, spec: &NicSpec, world: World, memory: &mut Memory) -> Result<Self> {
        let image = Image::new(layout, spec.shape(world), spec.counters > 0)?;
        let at = memory.zeroed(image.bytes())?;
        Ok(Self { layout, image, ranks: world.nranks as usize, at })
    }

    /// The memory in which all of it lies.
    pub(super) fn words(&self) -> CreditWords {
        CreditWords::within(self.at, self.image.bytes() as u64)
    }

    /// Where device code counts the completions of a queue pair, if it can be counted for it.
    pub(super) fn count_at(&self, context: usize, peer: u32, is_companion: bool) -> Option<u64> {
        self.image.count_at(context, peer, is_companion).map(|offset| self.at + offset as u64)
    }

    /// Writes those of the software NIC, into the memory of which `allocate` took a part. Returns what NCCL is given.
    pub(super) fn write(&self, view: &SetView, memory: &Memory) -> Result<Box<DeviceHandle>> {
        let pairs = view.pairs.iter().flatten();
        let queues: Vec<_> = pairs
            .map(|p| PeerQueues { main: queue_pair(&p.main), companion: p.companion.as_ref().map(queue_pair) })
            .collect();
        // The same key names the words here and at every rank.
        let keys = [view.counters.key, view.signals.key].map(|key| vec![key; self.ranks]);
        let words = |table: &TableView, rkeys| Words { buffer: table.words, each: table.each, rkeys, lkey: table.key };
        let description = Description {
            queues: &queues,
            counters: words(&view.counters, &keys[0]),
            signals: words(&view.signals, &keys[1]),
            sink_lkey: view.sink,
            // Reads are complete when what they have brought is visible. But a flush rings for gets that were not rung
            // (`ncclGinOptFlagsAggregateRequests`, as DeepEP's engrams are) by its dump alone.
            dump_after_gets: view.pairs.iter().flatten().any(|pair| pair.main.handler == Ringing::Doorbell),
        };
        self.describe(&description, memory)
    }

    /// Writes what is described, and returns what NCCL is given.
    pub(super) fn describe(&self, description: &Description, memory: &Memory) -> Result<Box<DeviceHandle>> {
        let mut contents = zeros(self.image.bytes())?;
        self.image.write(description, &mut contents, self.at)?;
        // SAFETY: `allocate` took this many bytes of it; nobody knows the address yet.
        unsafe { memory.write_device(self.at, &contents)? };
        Ok(Box::new(DeviceHandle {
            net_device_type: DEVICE_GIN_GDAKI,
            net_device_version: self.layout.net_device_version(),
            handle: self.at as *mut c_void,
            size: 0,
            needs_proxy_progress: 0,
        }))
    }
}
