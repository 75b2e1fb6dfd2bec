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

    /// Options that a queue pair's device knows, or that it has taken.
    pub fn ece(&self, number: u32) -> Result<ibv_ece, i32> {
        let pair = self.pairs.get(&number).ok_or(libc::EINVAL)?;
        match self.settings.get("ece", pair.device) as u32 {
            0 => Err(libc::EOPNOTSUPP),
            options if pair.attr.qp_state < IBV_QPS_RTR => Ok(ibv_ece { vendor_id: 7, options, comp_mask: 0 }),
            _ => Ok(pair.ece.unwrap_or_default()),
        }
    }

    /// What the other end offers.
    pub fn set_ece(&mut self, number: u32, ece: ibv_ece) -> Result<(), i32> {
        let pair = self.pairs.get_mut(&number).ok_or(libc::EINVAL)?;
        match self.settings.get("ece", pair.device) {
            0 => Err(libc::EOPNOTSUPP),
            _ if self.settings.get("ece_refusals", pair.device) > 0 => {
                let left = self.settings.get("ece_refusals", pair.device);
                self.settings.set("ece_refusals", left - 1);
                Err(libc::EINVAL)
            }
            _ if ece.vendor_id != 7 || ece.comp_mask != 0 || pair.attr.qp_state >= IBV_QPS_RTR => Err(libc::EINVAL),
            _ => {
                pair.ece = Some(ece);
                Ok(())
            }
        }
    }

    /// Pairs of queue pairs that have taken these options at both ends, and those whose ends have taken others.
    pub fn agreed(&self, options: u32) -> (i64, i64) {
        let taken = |number: u32| self.pairs.get(&number).and_then(|pair| pair.ece).map(|ece| ece.options);
        let ends = self.pairs.iter().filter(|(number, pair)| pair.attr.dest_qp_num > **number);
        let ends = ends.map(|(number, pair)| (taken(*number), taken(pair.attr.dest_qp_num)));
        ends.fold((0, 0), |(alike, apart), (one, other)| {
            (alike + i64::from(one == other && one == Some(options)), apart + i64::from(one != other))
        })
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
            IBV_QPS_RTR => {
                receives(pair, attr, &mut self.settings)?;
                let own = self.settings.get("ece", pair.device) as u32;
                pair.ece = pair.ece.map(|ece| ibv_ece { options: ece.options & own, ..ece });
            }
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
