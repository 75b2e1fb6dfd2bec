//! The states of a queue pair, and what each change asks for.

use super::{Pair, World};
use crate::settings::Settings;
use oxygin_ffi::verbs::types::*;

impl World {
    /// Connects two queue pairs of iWARP devices, as the connection manager does.
    pub fn link(&mut self, active: u32, passive: u32) -> Result<(), i32> {
        for (own, peer) in [(active, passive), (passive, active)] {
            let iwarp = self.pairs.get(&own).is_some_and(|p| self.settings.get("iwarp", p.device) != 0);
            let pair = self.pairs.get_mut(&own).filter(|p| iwarp && p.attr.qp_state == IBV_QPS_INIT);
            let pair = pair.ok_or(libc::EINVAL)?;
            pair.attr.qp_state = IBV_QPS_RTS;
            pair.attr.dest_qp_num = peer;
            pair.attr.max_rd_atomic = 1;
            pair.must_wait = own == passive;
        }
        Ok(())
    }

    /// Moves a queue pair to another state as a strict device would.
    pub fn modify(&mut self, number: u32, attr: &ibv_qp_attr, mask: i32) -> Result<(), i32> {
        let pair = self.pairs.get_mut(&number).ok_or(libc::EINVAL)?;
        if attr.qp_state == IBV_QPS_ERR && mask == IBV_QP_STATE {
            self.break_pair(number);
            return Ok(());
        }
        let now = &mut pair.attr;
        if self.settings.get("iwarp", pair.device) != 0 {
            // All that an iWARP device knows of it; the rest is the connection manager's.
            let init = (IBV_QPS_RESET, IBV_QPS_INIT, IBV_QP_STATE | IBV_QP_ACCESS_FLAGS);
            if (now.qp_state, attr.qp_state, mask) != init {
                return Err(libc::EINVAL);
            }
            *now = *attr;
            return Ok(());
        }
        let (from, needed) = before(attr.qp_state).ok_or(libc::EINVAL)?;
        if now.qp_state != from || mask != needed {
            return Err(libc::EINVAL);
        }
        match attr.qp_state {
            IBV_QPS_INIT if attr.port_num != 1 || attr.pkey_index != 0 => return Err(libc::EINVAL),
            IBV_QPS_INIT => *now = *attr,
            IBV_QPS_RTR if self.settings.get("rtr_timeouts", pair.device) > 0 => {
                let left = self.settings.get("rtr_timeouts", pair.device);
                self.settings.set("rtr_timeouts", left - 1);
                self.settings.count("rtr_refusals", 1);
                return Err(self.settings.get("rtr_errno", pair.device) as i32);
            }
            IBV_QPS_RTR => receives(pair, attr, &mut self.settings)?,
            _ => sends(pair, attr, &mut self.settings)?,
        }
        Ok(())
    }
}

/// The state before, and the mask that the change to a state needs; `None`: a state that nothing here moves to.
fn before(state: u32) -> Option<(u32, i32)> {
    Some(match state {
        IBV_QPS_INIT => (IBV_QPS_RESET, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS),
        IBV_QPS_RTR => (
            IBV_QPS_INIT,
            IBV_QP_STATE
                | IBV_QP_AV
                | IBV_QP_PATH_MTU
                | IBV_QP_DEST_QPN
                | IBV_QP_RQ_PSN
                | IBV_QP_MAX_DEST_RD_ATOMIC
                | IBV_QP_MIN_RNR_TIMER,
        ),
        IBV_QPS_RTS => (
            IBV_QPS_RTR,
            IBV_QP_STATE
                | IBV_QP_TIMEOUT
                | IBV_QP_RETRY_CNT
                | IBV_QP_RNR_RETRY
                | IBV_QP_SQ_PSN
                | IBV_QP_MAX_QP_RD_ATOMIC,
        ),
        _ => return None,
    })
}

/// To RTR: it knows its peer.
fn receives(pair: &mut Pair, attr: &ibv_qp_attr, settings: &mut Settings) -> Result<(), i32> {
    let ethernet = settings.get("link_layer", 0) == i64::from(IBV_LINK_LAYER_ETHERNET);
    let port_mtu = settings.get("active_mtu", pair.device) as u32;
    let ah = &attr.ah_attr;
    let routed = ah.is_global == 1 && ah.grh.hop_limit > 0 && ah.grh.dgid.raw != [0; 16];
    let addressed = ah.port_num == 1 && (routed || (!ethernet && ah.dlid != 0));
    let max_dest = settings.get("max_qp_rd_atom", pair.device);
    if !addressed || attr.path_mtu > port_mtu || i64::from(attr.max_dest_rd_atomic) > max_dest {
        return Err(libc::EINVAL);
    }
    let now = &mut pair.attr;
    now.qp_state = attr.qp_state;
    now.path_mtu = attr.path_mtu;
    now.dest_qp_num = attr.dest_qp_num;
    now.rq_psn = attr.rq_psn;
    now.max_dest_rd_atomic = attr.max_dest_rd_atomic;
    settings.note("last_path_mtu", attr.path_mtu.into());
    settings.note("last_traffic_class", ah.grh.traffic_class.into());
    settings.note("last_sl", ah.sl.into());
    settings.note("last_sgid_index", ah.grh.sgid_index.into());
    settings.note("last_max_dest_rd_atomic", attr.max_dest_rd_atomic.into());
    Ok(())
}

/// To RTS.
fn sends(pair: &mut Pair, attr: &ibv_qp_attr, settings: &mut Settings) -> Result<(), i32> {
    let max = settings.get("max_qp_init_rd_atom", pair.device);
    if i64::from(attr.max_rd_atomic) > max || attr.timeout > 31 || attr.retry_cnt > 7 {
        return Err(libc::EINVAL);
    }
    let now = &mut pair.attr;
    now.qp_state = attr.qp_state;
    now.sq_psn = attr.sq_psn;
    now.max_rd_atomic = attr.max_rd_atomic;
    settings.note("last_max_rd_atomic", attr.max_rd_atomic.into());
    settings.note("last_timeout", attr.timeout.into());
    settings.note("last_retry_cnt", attr.retry_cnt.into());
    Ok(())
}
