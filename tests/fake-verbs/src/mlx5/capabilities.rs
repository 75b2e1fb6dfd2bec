//! What the device says that it can.

use super::command::{refuse, Refusal};
use super::prm::{capabilities, commands, status, Field};
use crate::settings::Settings;
use crate::world::World;

/// What holds where tests say nothing: a device of today with one port, on Ethernet.
const DEFAULTS: &[(&str, u64)] = &[
    ("hca_cap_2", 1),
    ("log_max_qp_sz", 15),
    ("log_max_qp", 17),
    ("log_max_cq_sz", 22),
    ("log_max_cq", 24),
    ("log_max_mkey", 24),
    ("relaxed_ordering_write", 1),
    ("relaxed_ordering_read_pci_enabled", 1),
    ("log_max_ra_req_qp", 4),
    ("log_max_ra_res_qp", 4),
    ("gid_table_size", 8),
    ("pkey_table_size", 0),
    ("num_ports", 1),
    ("log_max_msg", 30),
    ("init2_lag_tx_port_affinity", 1),
    ("cqe_version", 1),
    ("roce", 1),
    ("atomic", 1),
    ("cq_oi", 1),
    ("cd", 1),
    ("rc", 1),
    ("uar_4k", 1),
    ("log_bf_reg_size", 9),
    ("bf", 1),
    ("num_lag_ports", 1),
    ("max_wqe_sz_sq", 1024),
    ("log_max_pd", 23),
    ("log_max_umem", 20),
    ("log_max_uctx", 10),
    ("local_ca_ack_delay", 16),
    ("log_max_atomic_size_qp", 3),
    ("send_dbr_mode_no_dbr_ext", 1),
    ("log_max_send_dbr_less_qp_sq", 13),
    ("r_roce_min_src_udp_port", 0xc000),
    ("r_roce_max_src_udp_port", 0xffff),
];

/// Before the name of a capability, as tests set it.
pub const PREFIX: &str = "mlx5_cap.";

/// Whether there is a capability of this name.
pub fn is_one(name: &str) -> bool {
    let all = [capabilities::GENERAL, capabilities::GENERAL_2, capabilities::ROCE];
    all.into_iter().flatten().any(|Field(n, ..)| *n == name)
}

/// A capability of a device.
pub fn of(settings: &Settings, device: usize, name: &str) -> u64 {
    let key = format!("{PREFIX}{name}");
    if let Some(value) = settings.given(&key, device) {
        return value as u64;
    }
    match name {
        // 0: InfiniBand, 1: Ethernet.
        "port_type" => u64::from(settings.get("link_layer", device) == 2),
        _ => DEFAULTS.iter().find(|(n, _)| *n == name).map_or(0, |(_, v)| *v),
    }
}

impl World {
    /// `QUERY_HCA_CAP`: `op_mod` is the kind of capabilities, then 1 bit for the current values in place of the
    /// largest.
    pub(super) fn query_capabilities(&mut self, device: usize, input: &[u8], out: &mut [u8]) -> Result<(), Refusal> {
        let op_mod = commands::QUERY_HCA_CAP_IN.get(input, "op_mod");
        let (layout, fields) = match op_mod >> 1 {
            0 => (&commands::GENERAL_CAP_OUT, capabilities::GENERAL),
            0x04 => (&commands::ROCE_CAP_OUT, capabilities::ROCE),
            0x20 if of(&self.settings, device, "hca_cap_2") == 1 => {
                (&commands::GENERAL_2_CAP_OUT, capabilities::GENERAL_2)
            }
            kind => refuse!(status::BAD_PARAM, "the device has no capabilities of kind {kind:#x} (op_mod {op_mod:#x})"),
        };
        if out.len() < layout.bytes {
            refuse!(status::BAD_OUTP_LEN, "room for {} bytes of capabilities", out.len());
        }
        for Field(name, ..) in fields {
            layout.set(out, &format!("capability.{name}"), of(&self.settings, device, name));
        }
        Ok(())
    }
}
