//! What tests ask of the fake: numbers by name, for all devices (`max_msg_sz`) or for one (`max_msg_sz@1`), and counts
//! by name that they read back.

use crate::mlx5;
use std::collections::HashMap;

/// Names that may be set, with what holds when they are not.
const DEFAULTS: &[(&str, i64)] = &[
    // Devices `fake_0`, `fake_1`, … of one port each.
    ("devices", 2),
    ("port_state", 4),
    // 2: Ethernet.
    ("link_layer", 2),
    ("iwarp", 0),
    // `IBV_TRANSPORT_*` of devices that are not iWARP's.
    ("transport", 0),
    // 1: atomic among the device's own operations.
    ("atomic_cap", 1),
    ("vendor_id", 0x2c9),
    ("max_qp_wr", 8192),
    ("max_cqe", 1 << 20),
    ("max_qp_init_rd_atom", 16),
    ("max_qp_rd_atom", 16),
    ("max_msg_sz", 1 << 30),
    // Ports do not say so.
    ("max_msg_sz_unsaid", 0),
    // 3: 1024 bytes.
    ("active_mtu", 3),
    // So many next moves to RTR time out, as they do where the network does not answer in time.
    ("rtr_timeouts", 0),
    // What they are refused with.
    ("rtr_errno", libc::ETIMEDOUT as i64),
    // Options of connections that devices know, a bit each; 0: they know nothing of such.
    ("ece", 0),
    // So many next options that are offered are refused.
    ("ece_refusals", 0),
    // Entries of the GID table, of RoCE v1 and v2 in turn: two link-local ones, two IPv4 ones, two of another subnet,
    // two IPv6 ones.
    ("gids", 4),
    // create_qp says ENOMEM above so many entries.
    ("qp_room", 1 << 20),
    // Bytes that queue pairs take inside work requests at most; create_qp says `inline_errno` to more. They give what
    // is asked for.
    ("max_inline", 256),
    ("inline_errno", libc::EINVAL as i64),
    // What goes to the device stays in the senders' queues.
    ("stopped", 0),
    // open_device fails with this errno.
    ("open_errno", 0),
    // Registrations fail with this errno.
    ("reg_errno", 0),
    // A region gets the keys of one that has ended.
    ("reuse_keys", 0),
    // DMA-BUFs can be registered: those of `fake_verbs_gpu`, else memfds, which are mapped.
    ("dmabuf", 1),
    // Registrations of DMA-BUFs fail with this errno.
    ("dmabuf_errno", 0),
    // GPU memory can be registered by its address.
    ("peermem", 0),
    // 0: post_send carries everything out at once. 1: polls carry out a little of some queue pair. 2: nothing moves.
    ("late", 0),
    // Polls that find nothing take a completion with this wr_id.
    ("endless", 0),
    // Every n-th post_send takes a part of its chain only and says ENOMEM.
    ("enomem_every", 0),
    // The next post_send takes everything, says this errno all the same, and names no work request.
    ("ring_errno", 0),
    // The n-th work request from now completes with `error_status`.
    ("error_in", 0),
    ("error_status", 10),
    // Writes come to memory when something behind them in their queue pair pushes them, a read of the same region or a
    // signal, or so many ms later; 0: at once.
    ("lazy_writes", 0),
    // What is posted behind reads, without a fence, is carried out and complete before them.
    ("overtake", 0),
    // iWARP: rdma_create_event_channel fails with this errno.
    ("cm_errno", 0),
    // iWARP: whether the host's addresses lead to the device.
    ("cm_address", 1),
    // iWARP: an errno that addresses are not resolved for; -1: no answer.
    ("cm_resolve", 0),
    // iWARP: an errno that connections are not made for; -1: no answer.
    ("cm_connect", 0),
    // iWARP: 1: a stranger's connect request comes first; 2: and the right one has a wrong token; 3: a stranger's comes
    // after the connection stands.
    ("cm_garbage", 0),
    // Address handles cannot be made, with this errno.
    ("ah_errno", 0),
    // What follows is for mlx5: the module `mlx5` says what it means.
    ("mlx5", 1),
    ("mlx5_open_errno", 0),
    ("mlx5_uar_dedicated", 1),
    ("mlx5_uar_errno", 0),
    ("mlx5_uar_dmabuf", 0),
    ("mlx5_umem_errno", 0),
    ("mlx5_umem_in", 0),
    ("mlx5_umem_dmabuf", 1),
    ("mlx5_umem_pages", 1),
    ("mlx5_eqn_errno", 0),
    ("mlx5_channel_errno", 0),
    ("mlx5_subscribe_errno", 0),
    ("mlx5_events", -1),
    ("mlx5_false_alarms", 0),
    ("mlx5_data_direct", 0),
    ("mlx5_data_direct_errno", 0),
    ("mlx5_destroy_errno", 0),
    ("mlx5_fail_in", 0),
    ("mlx5_fail_opcode", 0),
    ("mlx5_fail_status", 3),
    ("mlx5_fail_syndrome", 0x12_3456),
    ("mlx5_held", 0),
    ("mlx5_lost_writes", 0),
    ("mlx5_lag_forgotten", 0),
    ("mlx5_strict_doorbells", 0),
    ("mlx5_error_in", 0),
    ("mlx5_error_syndrome", 0x15),
    // Seed of everything random.
    ("seed", 1),
];

/// Settings and counts.
#[derive(Default)]
pub struct Settings {
    set: HashMap<String, i64>,
    counts: HashMap<&'static str, i64>,
    random: u64,
}

impl Settings {
    /// Sets `key`; false when there is no such name.
    pub fn set(&mut self, key: &str, value: i64) -> bool {
        let name = key.split('@').next().unwrap_or(key);
        let capability = name.strip_prefix(mlx5::PREFIX).is_some_and(mlx5::is_capability);
        if !capability && !DEFAULTS.iter().any(|(n, _)| *n == name) {
            return false;
        }
        if name == "seed" {
            self.random = value as u64;
        }
        self.set.insert(key.to_owned(), value);
        true
    }

    /// Everything as at the start; counts of live objects stay.
    pub fn reset(&mut self) {
        self.set.clear();
        self.random = 1;
        self.counts.retain(|k, _| k.starts_with("live_"));
    }

    /// What was set for a device, if anything was.
    pub fn given(&self, key: &str, device: usize) -> Option<i64> {
        self.set.get(&format!("{key}@{device}")).or_else(|| self.set.get(key)).copied()
    }

    /// The value of `key` for a device.
    pub fn get(&self, key: &str, device: usize) -> i64 {
        let default = || DEFAULTS.iter().find(|(n, _)| *n == key).map_or(0, |(_, v)| *v);
        self.given(key, device).unwrap_or_else(default)
    }

    /// Adds to a count.
    pub fn count(&mut self, name: &'static str, by: i64) {
        *self.counts.entry(name).or_insert(0) += by;
    }

    /// Makes a count this value.
    pub fn note(&mut self, name: &'static str, value: i64) {
        self.counts.insert(name, value);
    }

    /// Reads a count.
    pub fn counted(&self, name: &str) -> i64 {
        self.counts.get(name).copied().unwrap_or(0)
    }

    /// A number below `n` (xorshift64).
    pub fn random(&mut self, n: u64) -> u64 {
        let mut x = self.random | 1;
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        self.random = x;
        (x >> 11) % n.max(1)
    }
}
