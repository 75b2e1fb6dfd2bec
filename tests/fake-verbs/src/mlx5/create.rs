//! Completion queues and queue pairs are made, checked as a device checks.

use super::capabilities as device_has;
use super::command::{refuse, Refusal};
use super::objects::{Cq, Kind, Qp, State};
use super::prm::commands::{CREATE_CQ_IN, CREATE_CQ_OUT, CREATE_QP_IN, CREATE_QP_OUT, QUERY_QP_OUT};
use super::prm::status;
use crate::world::World;

/// Bytes of an entry of either queue: rdma-core, `MLX5_SEND_WQE_BB`, and `MLX5_CQE_SIZE_64B` of DPDK.
const ENTRY_BYTES: u64 = 64;

/// What the fake's only event queue is called: of completion vector 0.
pub const EVENT_QUEUE: u32 = 11;

impl World {
    /// Where `bytes` at an offset of a umem lie.
    fn in_umem(&self, context: usize, id: u64, offset: u64, bytes: u64, what: &str) -> Result<u64, Refusal> {
        let Some(umem) = self.mlx5.umems.get(&(id as u32)).filter(|u| u.context == context) else {
            refuse!(status::BAD_RES, "{what}: the context has no umem {id}")
        };
        let end = offset.checked_add(bytes);
        if end.is_none_or(|end| end > umem.bytes) {
            refuse!(status::BAD_SIZE, "{what}: {bytes} bytes at {offset:#x} of a umem of {} bytes", umem.bytes);
        }
        Ok(umem.host + offset)
    }

    /// Where the entries of a queue lie. They begin a page of their umem: Linux, `drivers/infiniband/hw/mlx5/devx.c`,
    /// `devx_umem_reg_cmd_alloc`, on `umem_offset`.
    fn ring(&self, context: usize, id: u64, offset: u64, bytes: u64, what: &str) -> Result<u64, Refusal> {
        let at = self.in_umem(context, id, offset, bytes, what)?;
        match self.mlx5.umems.get(&(id as u32)).map(|umem| umem.page) {
            Some(page) if offset % page != 0 => {
                refuse!(status::BAD_PARAM, "{what} at {offset:#x} of a umem whose pages have {page:#x} bytes")
            }
            _ => Ok(at),
        }
    }

    /// The doorbell page of a queue.
    fn check_uar(&self, context: usize, page: u64) -> Result<u32, Refusal> {
        match self.mlx5.uars.get(&(page as u32)) {
            Some(uar) if uar.context == context => Ok(page as u32),
            _ => refuse!(status::BAD_RES, "the context has no doorbell page {page}"),
        }
    }

    /// Whether pages of this size can lie where the queue lies.
    fn check_pages(&self, at: u64, log_page_size: u64) -> Result<(), Refusal> {
        if log_page_size > 31 || at % (4096 << log_page_size) != 0 {
            refuse!(status::BAD_PARAM, "a queue at {at:#x} has no pages of 4096 << {log_page_size} bytes");
        }
        Ok(())
    }

    pub(super) fn create_cq(
        &mut self,
        context: usize,
        device: usize,
        input: &[u8],
        out: &mut [u8],
    ) -> Result<Kind, Refusal> {
        let get = |name: &str| CREATE_CQ_IN.get(input, name);
        let not_modelled = [
            "cqn",
            "cq_context.status",
            "cq_context.as_notify",
            "cq_context.initiator_src_dct",
            "cq_context.ext_element",
            "cq_context.cqe_sz",
            "cq_context.cc",
            "cq_context.cqe_comp_en",
            "cq_context.mini_cqe_res_format",
            "cq_context.st",
            "cq_context.cqe_comp_layout",
            "cq_context.page_offset",
            "cq_context.last_notified_index",
            "cq_context.last_solicit_index",
            "cq_context.consumer_counter",
            "cq_context.producer_counter",
            "cq_context.local_partition_id",
            "cq_context.process_id",
            "cq_context.thread_id",
        ];
        if let Some(name) = not_modelled.into_iter().find(|name| get(name) != 0) {
            refuse!(status::BAD_PARAM, "{name} is {:#x}: a completion queue of the fake has 0 there", get(name));
        }
        let valid = ["cq_umem_valid", "cq_context.dbr_umem_valid"];
        if let Some(name) = valid.into_iter().find(|name| get(name) != 1) {
            refuse!(status::BAD_PARAM, "{name} is not set: a user's queue lies in umems");
        }
        let log = get("cq_context.log_cq_size");
        if log > device_has::of(&self.settings, device, "log_max_cq_sz") {
            refuse!(status::BAD_SIZE, "2^{log} completion entries");
        }
        let offset = get("cq_umem_offset");
        if offset % ENTRY_BYTES != 0 {
            refuse!(status::BAD_PARAM, "completion entries at {offset:#x}");
        }
        let at = self.ring(context, get("cq_umem_id"), offset, ENTRY_BYTES << log, "completion entries")?;
        self.check_pages(at, get("cq_context.log_page_size"))?;
        let record_at = get("cq_context.dbr_addr");
        let record = self.in_umem(context, get("cq_context.dbr_umem_id"), record_at, 8, "doorbell record")?;
        if record % 8 != 0 {
            refuse!(status::BAD_PARAM, "a doorbell record at offset {record_at:#x}");
        }
        let uar = self.check_uar(context, get("cq_context.uar_page"))?;
        if get("cq_context.c_eqn") != u64::from(EVENT_QUEUE) {
            refuse!(status::BAD_RES, "no event queue {}", get("cq_context.c_eqn"));
        }
        let number = 0x400 + self.mlx5.number();
        let (umem, record_umem) = (get("cq_umem_id") as u32, get("cq_context.dbr_umem_id") as u32);
        self.use_umem(umem, 1);
        self.use_umem(record_umem, 1);
        self.use_uar(uar, 1);
        let cq = Cq {
            context,
            number,
            umem,
            record_umem,
            uar,
            at,
            log_entries: log as u32,
            record,
            ignores_overruns: get("cq_context.oi") == 1,
            produced: 0,
            is_broken: false,
            users: 0,
            sequence: 0,
        };
        self.settings.count("mlx5_born_armed", cq.is_armed().into());
        self.mlx5.cqs.insert(number, cq);
        CREATE_CQ_OUT.set(out, "cqn", number.into());
        Ok(Kind::Cq(number))
    }

    /// Counts a queue that is in a umem, or is not any more.
    fn use_umem(&mut self, id: u32, by: i32) {
        if let Some(umem) = self.mlx5.umems.get_mut(&id) {
            umem.users = umem.users.saturating_add_signed(by);
        }
    }

    fn use_uar(&mut self, id: u32, by: i32) {
        if let Some(uar) = self.mlx5.uars.get_mut(&id) {
            uar.users = uar.users.saturating_add_signed(by);
        }
    }

    fn use_cq(&mut self, number: u32, by: i32) {
        if let Some(cq) = self.mlx5.cqs.get_mut(&number) {
            cq.users = cq.users.saturating_add_signed(by);
        }
    }

    /// What of a queue pair's context has to be as it is.
    fn check_context(&self, context: usize, device: usize, input: &[u8]) -> Result<(), Refusal> {
        let get = |name: &str| CREATE_QP_IN.get(input, name);
        let not_modelled = [
            "qpc_ext",
            "input_qpn",
            "cmd_on_behalf",
            "vhca_id",
            "qpc.state",
            "qpc.st",
            "qpc.offload_type",
            "qpc.wq_signature",
            "qpc.latency_sensitive",
            "qpc.no_sq",
            "qpc.page_offset",
            "qpc.hw_sq_wqebb_counter",
            "qpc.sw_sq_wqebb_counter",
            "qpc.srqn_rmpn_xrqn",
            "qpc.xrcd",
        ];
        if let Some(name) = not_modelled.into_iter().find(|name| get(name) != 0) {
            refuse!(status::BAD_PARAM, "{name} is {:#x}: a queue pair of the fake has 0 there", get(name));
        }
        // Migrated: rdma-core, tests/mlx5_prm_structs.py, MLX5_QPC_PM_STATE_MIGRATED.
        if get("qpc.pm_state") != 3 {
            refuse!(status::BAD_PARAM, "qpc.pm_state is {}", get("qpc.pm_state"));
        }
        if get("wq_umem_valid") != 1 {
            refuse!(status::BAD_PARAM, "wq_umem_valid is not set: a user's queue lies in a umem");
        }
        if !self.mlx5.domains.values().any(|d| *d == (get("qpc.pd") as u32, context)) {
            refuse!(status::BAD_RES, "the context has no protection domain {}", get("qpc.pd"));
        }
        let log = get("qpc.log_sq_size");
        if log > device_has::of(&self.settings, device, "log_max_qp_sz") {
            refuse!(status::BAD_SIZE, "2^{log} send slots");
        }
        // DPDK, mlx5_prm.h: MLX5_HCA_CAP_TIMESTAMP_FORMAT_*, MLX5_QPC_TIMESTAMP_FORMAT_*.
        let clocks = device_has::of(&self.settings, device, "qp_ts_format");
        match (clocks, get("qpc.ts_format")) {
            (0 | 2, 0) | (1 | 2, 1 | 2) => {}
            (_, asked) => {
                refuse!(status::BAD_PARAM, "qpc.ts_format {asked} on a device whose qp_ts_format is {clocks}")
            }
        }
        // DPDK, mlx5_prm.h: MLX5_ZERO_LEN_RQ.
        if get("qpc.rq_type") != 3 || get("qpc.log_rq_size") != 0 || get("qpc.log_rq_stride") != 0 {
            refuse!(status::BAD_PARAM, "a queue pair of the fake has no receive queue: rq_type 3 and no size");
        }
        for (field, capability) in
            [("qpc.cd_master", "cd"), ("qpc.cd_slave_send", "cd"), ("qpc.cd_slave_receive", "cd")]
        {
            if get(field) != 0 && device_has::of(&self.settings, device, capability) == 0 {
                refuse!(status::BAD_PARAM, "{field}, and the device has no {capability}");
            }
        }
        Ok(())
    }

    /// Where the doorbell record of a new queue pair is, and its umem; none: it rings without.
    fn record_of(&self, context: usize, device: usize, input: &[u8]) -> Result<Option<(u32, u64)>, Refusal> {
        let get = |name: &str| CREATE_QP_IN.get(input, name);
        let has = |name| device_has::of(&self.settings, device, name) != 0;
        match (get("qpc.send_dbr_mode"), get("qpc.dbr_umem_valid")) {
            (0, 1) => {}
            (0, _) => {
                refuse!(status::BAD_PARAM, "qpc.dbr_umem_valid is not set: a user's doorbell record lies in a umem")
            }
            (1, _) if has("send_dbr_mode_no_dbr_ext") => {
                let most = device_has::of(&self.settings, device, "log_max_send_dbr_less_qp_sq");
                let log = get("qpc.log_sq_size");
                if log > most {
                    refuse!(status::BAD_SIZE, "2^{log} send slots without a doorbell record; the device has 2^{most}");
                }
                return Ok(None);
            }
            (mode, _) => refuse!(status::BAD_PARAM, "the device has no send_dbr_mode {mode}"),
        }
        let (umem, at) = (get("qpc.dbr_umem_id"), get("qpc.dbr_addr"));
        let record = self.in_umem(context, umem, at, 8, "doorbell record")?;
        if record % 8 != 0 {
            refuse!(status::BAD_PARAM, "a doorbell record at offset {at:#x}");
        }
        Ok(Some((umem as u32, record)))
    }

    pub(super) fn create_qp(
        &mut self,
        context: usize,
        device: usize,
        input: &[u8],
        out: &mut [u8],
    ) -> Result<Kind, Refusal> {
        let get = |name: &str| CREATE_QP_IN.get(input, name);
        self.check_context(context, device, input)?;
        let (offset, log) = (get("wq_umem_offset"), get("qpc.log_sq_size"));
        if offset % ENTRY_BYTES != 0 {
            refuse!(status::BAD_PARAM, "send slots at {offset:#x}");
        }
        let slots = self.ring(context, get("wq_umem_id"), offset, ENTRY_BYTES << log, "send slots")?;
        self.check_pages(slots, get("qpc.log_page_size"))?;
        let record = self.record_of(context, device, input)?;
        let uar = self.check_uar(context, get("qpc.uar_page"))?;
        let send_cq = self.check_cq(context, get("qpc.cqn_snd"))?;
        let receive_cq = match get("qpc.cqn_rcv") {
            0 => None,
            number => Some(self.check_cq(context, number)?),
        };
        let mut answer = vec![0; QUERY_QP_OUT.bytes];
        // The context of a command and that of an answer lie at one place.
        answer[0x0c0 / 8..0x800 / 8].copy_from_slice(&input[0x0c0 / 8..0x800 / 8]);
        let number = 0x20_0000 + self.mlx5.number();
        let umem = get("wq_umem_id") as u32;
        let qp = Qp {
            context,
            device,
            number,
            state: State::Rst,
            umem,
            record_umem: record.map(|(umem, _)| umem),
            uar,
            send_cq,
            receive_cq,
            slots,
            log_slots: log as u32,
            record: record.map(|(_, at)| at + 4),
            is_companion: get("qpc.cd_master") == 1,
            answer,
            done: 0,
            rung: 0,
            is_to_look: false,
            is_failed: false,
        };
        self.count_uses(&qp, 1);
        self.mlx5.qps.insert(number, qp);
        CREATE_QP_OUT.set(out, "qpn", number.into());
        Ok(Kind::Qp(number))
    }

    fn check_cq(&self, context: usize, number: u64) -> Result<u32, Refusal> {
        match self.mlx5.cqs.get(&(number as u32)) {
            Some(cq) if cq.context == context => Ok(number as u32),
            _ => refuse!(status::BAD_RES, "the context has no completion queue {number:#x}"),
        }
    }

    fn count_uses(&mut self, qp: &Qp, by: i32) {
        self.use_umem(qp.umem, by);
        qp.record_umem.inspect(|&id| self.use_umem(id, by));
        self.use_uar(qp.uar, by);
        self.use_cq(qp.send_cq, by);
        qp.receive_cq.inspect(|&number| self.use_cq(number, by));
    }

    /// Ends an object; an errno if that cannot be.
    pub fn destroy_object(&mut self, kind: Kind) -> Result<(), i32> {
        match kind {
            Kind::Cq(number) => {
                let users = self.mlx5.cqs.get(&number).ok_or(libc::ENOENT)?.users;
                if users > 0 {
                    self.settings.count("misuse", 1);
                    eprintln!(
                        "fake mlx5: completion queue {number:#x} is ended, and {users} queue pairs complete there"
                    );
                    return Err(libc::EBUSY);
                }
                let Some(cq) = self.mlx5.cqs.remove(&number) else { return Err(libc::ENOENT) };
                self.use_umem(cq.umem, -1);
                self.use_umem(cq.record_umem, -1);
                self.use_uar(cq.uar, -1);
            }
            Kind::Qp(number) => {
                // Its record may have announced what it was rung for: a device sees each doorbell when it is written.
                self.read_registers();
                let qp = self.mlx5.qps.remove(&number).ok_or(libc::ENOENT)?;
                self.count_uses(&qp, -1);
            }
        }
        for channel in self.mlx5.channels.values_mut() {
            channel.subscribed.retain(|s| s.0 != kind);
        }
        Ok(())
    }
}
