//! A queue pair goes from state to state, checked as a device checks.

use super::capabilities as device_has;
use super::command::{refuse, Refusal};
use super::objects::{Qp, State};
use super::prm::commands::{MODIFY_QP_IN, QUERY_QP_IN, QUERY_QP_OUT, STOP_QP_IN};
use super::prm::{opcode, status, Layout};
use crate::settings::Settings;
use crate::world::World;

/// `opt_param_mask`: the LAG port is given. Linux `include/linux/mlx5/qp.h`, `MLX5_QP_OPTPAR_LAG_TX_AFF`.
const LAG_PORT_GIVEN: u64 = 1 << 15;
/// The lowest source port of RoCE v2.
const FIRST_SOURCE_PORT: u64 = 0xc000;

/// In each of them the path is called so.
fn path(name: &str) -> String {
    format!("qpc.primary_address_path.{name}")
}

/// A change that is asked for.
struct Change<'a> {
    input: &'a [u8],
    settings: &'a mut Settings,
    device: usize,
    gid_types: &'a dyn Fn(u64) -> Option<u32>,
}

impl Change<'_> {
    fn get(&self, name: &str) -> u64 {
        MODIFY_QP_IN.get(self.input, name)
    }

    fn has(&self, capability: &str) -> u64 {
        device_has::of(self.settings, self.device, capability)
    }

    /// The port through which a bonded device sends.
    fn lag(&mut self, qp: &mut Qp, to: State) -> Result<(), Refusal> {
        if self.get("opt_param_mask") & LAG_PORT_GIVEN == 0 {
            return Ok(());
        }
        let (port, ports) = (self.get("qpc.lag_tx_port_affinity"), self.has("num_lag_ports"));
        let sends = qp.state == State::Rts;
        let may_here = match to {
            State::Init => self.has("init2_lag_tx_port_affinity"),
            _ if sends => self.has("rts2rts_lag_tx_port_affinity"),
            _ => 1,
        };
        let may = self.has("lag_tx_port_affinity") == 1 && may_here == 1;
        if !may || port > ports {
            refuse!(status::BAD_PARAM, "LAG port {port} of {ports} on the way to {to:?}, which may be given: {may}");
        }
        if !sends && self.settings.get("mlx5_lag_forgotten", self.device) != 0 {
            return Ok(());
        }
        qp.set("lag_tx_port_affinity", port);
        self.settings.note("mlx5_lag_port", port as i64);
        Ok(())
    }

    fn port(&self) -> Result<(), Refusal> {
        let port = self.get(&path("vhca_port_num"));
        if port == 0 || port > self.has("num_ports") {
            refuse!(status::BAD_PARAM, "vhca_port_num is {port}");
        }
        Ok(())
    }

    fn reset_to_init(&mut self, qp: &mut Qp) -> Result<(), Refusal> {
        self.port()?;
        if self.get(&path("pkey_index")) != 0 {
            refuse!(status::BAD_PARAM, "pkey_index {} of a table of 1", self.get(&path("pkey_index")));
        }
        if !matches!(self.get("qpc.pm_state"), 0 | 3) {
            refuse!(status::BAD_PARAM, "qpc.pm_state is {}", self.get("qpc.pm_state"));
        }
        self.lag(qp, State::Init)?;
        let access = ["rre", "rwe", "rae", "atomic_mode"];
        qp.take(&MODIFY_QP_IN, self.input, &access);
        qp.take(&MODIFY_QP_IN, self.input, &["primary_address_path.vhca_port_num", "primary_address_path.pkey_index"]);
        Ok(())
    }

    /// The way to the peer.
    fn check_path(&self) -> Result<(), Refusal> {
        let is_set = |name: &str| MODIFY_QP_IN.bytes_of(self.input, &path(name)).iter().any(|&b| b != 0);
        if self.has("port_type") == 0 {
            if self.get(&path("rlid")) == 0 && (self.get(&path("grh")) == 0 || !is_set("rgid_rip")) {
                refuse!(status::BAD_PARAM, "InfiniBand, and neither a LID nor a GID of the peer");
            }
            return Ok(());
        }
        let index = self.get(&path("src_addr_index"));
        let Some(kind) = (self.gid_types)(index) else {
            refuse!(status::BAD_PARAM, "the port has no GID {index} (src_addr_index)")
        };
        if !is_set("rgid_rip") || !(is_set("rmac_47_32") || is_set("rmac_31_0")) || self.get(&path("hop_limit")) == 0 {
            refuse!(status::BAD_PARAM, "Ethernet, and the peer's GID, its MAC, or the hop limit is missing");
        }
        let port = self.get(&path("udp_sport"));
        if kind == oxygin_ffi::verbs::types::IBV_GID_TYPE_ROCE_V2 && port < FIRST_SOURCE_PORT {
            refuse!(status::BAD_PARAM, "source port {port:#x} of RoCE v2");
        }
        if self.get(&path("rlid")) != 0 {
            refuse!(status::BAD_PARAM, "a LID on Ethernet");
        }
        Ok(())
    }

    fn init_to_rtr(&mut self, qp: &mut Qp) -> Result<(), Refusal> {
        self.port()?;
        let port_mtu = self.settings.get("active_mtu", self.device) as u64;
        let (mtu, log_msg) = (self.get("qpc.mtu"), self.get("qpc.log_msg_max"));
        if mtu == 0 || mtu > port_mtu {
            refuse!(status::BAD_PARAM, "mtu {mtu}, and the port's is {port_mtu}");
        }
        if log_msg > self.has("log_max_msg") {
            refuse!(status::BAD_PARAM, "log_msg_max {log_msg}");
        }
        if self.get("qpc.log_rra_max") > self.has("log_max_ra_res_qp") {
            refuse!(status::BAD_PARAM, "log_rra_max {}", self.get("qpc.log_rra_max"));
        }
        if self.get("qpc.remote_qpn") == 0 {
            refuse!(status::BAD_PARAM, "remote_qpn is 0");
        }
        self.check_path()?;
        self.lag(qp, State::Rtr)?;
        let names = ["mtu", "log_msg_max", "remote_qpn", "min_rnr_nak", "next_rcv_psn", "log_rra_max"];
        qp.take(&MODIFY_QP_IN, self.input, &names);
        let names = [
            "fl",
            "free_ar",
            "grh",
            "mlid",
            "rlid",
            "src_addr_index",
            "stat_rate",
            "hop_limit",
            "tclass",
            "flow_label",
            "rgid_rip",
            "ecn",
            "dscp",
            "udp_sport",
            "eth_prio",
            "sl",
            "vhca_port_num",
            "rmac_47_32",
            "rmac_31_0",
        ];
        for name in names {
            qp.take(&MODIFY_QP_IN, self.input, &[&format!("primary_address_path.{name}")]);
        }
        for (count, name) in
            [("mlx5_dscp", "dscp"), ("mlx5_tclass", "tclass"), ("mlx5_sl", "sl"), ("mlx5_prio", "eth_prio")]
        {
            let value = self.get(&path(name));
            self.settings.note(count, value as i64);
        }
        self.settings.note("mlx5_path_mtu", mtu as i64);
        self.note("mlx5_rra_max", "qpc.log_rra_max");
        Ok(())
    }

    fn note(&mut self, count: &'static str, name: &str) {
        let value = self.get(name);
        self.settings.note(count, value as i64);
    }

    fn rtr_to_rts(&mut self, qp: &mut Qp) -> Result<(), Refusal> {
        if self.get("qpc.log_sra_max") > self.has("log_max_ra_req_qp") {
            refuse!(status::BAD_PARAM, "log_sra_max {}", self.get("qpc.log_sra_max"));
        }
        self.lag(qp, State::Rts)?;
        let names = ["log_ack_req_freq", "log_sra_max", "retry_count", "rnr_retry", "next_send_psn"];
        qp.take(&MODIFY_QP_IN, self.input, &names);
        qp.take(&MODIFY_QP_IN, self.input, &["primary_address_path.ack_timeout"]);
        self.note("mlx5_ack_timeout", "qpc.primary_address_path.ack_timeout");
        self.note("mlx5_retry_count", "qpc.retry_count");
        self.note("mlx5_sra_max", "qpc.log_sra_max");
        Ok(())
    }
}

/// The states between which a command moves.
fn states(op: u16) -> Option<(State, State)> {
    Some(match op {
        opcode::RST2INIT => (State::Rst, State::Init),
        opcode::INIT2RTR => (State::Init, State::Rtr),
        opcode::RTR2RTS => (State::Rtr, State::Rts),
        opcode::RTS2RTS => (State::Rts, State::Rts),
        _ => return None,
    })
}

impl World {
    /// Whether a command is for the queue pair whose object it came with.
    fn check_number(number: u32, layout: &Layout, input: &[u8]) -> Result<(), Refusal> {
        if layout.get(input, "qpn") != u64::from(number) {
            refuse!(status::BAD_RES, "qpn {:#x} with the object of {number:#x}", layout.get(input, "qpn"));
        }
        Ok(())
    }

    pub(super) fn query_qp(&mut self, number: u32, input: &[u8], out: &mut [u8]) -> Result<(), Refusal> {
        Self::check_number(number, &QUERY_QP_IN, input)?;
        let Some(qp) = self.mlx5.qps.get(&number) else { refuse!(status::BAD_RES, "no queue pair {number:#x}") };
        let answer = &mut out[..QUERY_QP_OUT.bytes];
        answer.copy_from_slice(&qp.answer);
        QUERY_QP_OUT.set(answer, "qpc.state", qp.state as u64);
        QUERY_QP_OUT.set(answer, "qpc.hw_sq_wqebb_counter", qp.done & 0xffff);
        QUERY_QP_OUT.set(answer, "qpc.sw_sq_wqebb_counter", qp.rung & 0xffff);
        Ok(())
    }

    pub(super) fn modify_qp(&mut self, number: u32, op: u16, input: &[u8]) -> Result<(), Refusal> {
        let layout = if matches!(op, opcode::TO_ERR | opcode::TO_RST) { &STOP_QP_IN } else { &MODIFY_QP_IN };
        Self::check_number(number, layout, input)?;
        let Some(mut qp) = self.mlx5.qps.remove(&number) else { refuse!(status::BAD_RES, "no queue pair {number:#x}") };
        let done = self.change(&mut qp, op, input);
        self.mlx5.qps.insert(number, qp);
        done?;
        self.watch();
        Ok(())
    }

    fn change(&mut self, qp: &mut Qp, op: u16, input: &[u8]) -> Result<(), Refusal> {
        match op {
            opcode::TO_RST => {
                (qp.state, qp.done, qp.rung, qp.is_failed) = (State::Rst, 0, 0, false);
                return Ok(());
            }
            opcode::TO_ERR if qp.state == State::Rst => refuse!(status::BAD_QP_STATE, "from RST to ERR"),
            opcode::TO_ERR => {
                qp.state = State::Err;
                return Ok(());
            }
            _ => {}
        }
        let Some((from, to)) = states(op) else { refuse!(status::BAD_OP, "no command {op:#x}") };
        if qp.state != from {
            refuse!(status::BAD_QP_STATE, "command {op:#x} in state {:?}", qp.state);
        }
        let device = qp.device;
        let gids: Vec<Option<u32>> = (0..8).map(|i| self.gid(device, i).map(|(_, kind)| kind)).collect();
        let gid_types = |index: u64| gids.get(index as usize).copied().flatten();
        let mut change = Change { input, settings: &mut self.settings, device, gid_types: &gid_types };
        match op {
            opcode::RST2INIT => change.reset_to_init(qp)?,
            opcode::INIT2RTR => change.init_to_rtr(qp)?,
            opcode::RTR2RTS => change.rtr_to_rts(qp)?,
            _ => change.lag(qp, State::Rts)?,
        }
        qp.state = to;
        Ok(())
    }
}
