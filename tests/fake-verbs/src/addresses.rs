//! Address handles: the way to a peer's port, with its MAC, which a kernel looks up in its tables of neighbours.

use crate::devices::index_of;
use crate::{fail, mlx5, new, world};
use oxygin_ffi::verbs::types::{ibv_ah_attr, ibv_context, ibv_pd};
use std::ffi::{c_int, c_void};

/// `struct ibv_ah`, with the address vector that an mlx5 device's has (rdma-core, `struct mlx5_wqe_av`).
#[repr(C)]
pub struct AddressHandle {
    context: *mut ibv_context,
    pd: *mut ibv_pd,
    handle: u32,
    vector: Vector,
}

/// `struct mlx5_wqe_av`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Vector {
    key: u64,
    dqp_dct: u32,
    stat_rate_sl: u8,
    fl_mlid: u8,
    rlid: u16,
    reserved: [u8; 4],
    rmac: [u8; 6],
    tclass: u8,
    hop_limit: u8,
    grh_gid_fl: u32,
    rgid: [u8; 16],
}

/// Where the vector of an address handle is.
pub unsafe fn vector_of(ah: *mut c_void) -> *mut c_void {
    unsafe { (&raw mut (*ah.cast::<AddressHandle>()).vector).cast() }
}

#[no_mangle]
pub unsafe extern "C" fn ibv_create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut AddressHandle {
    let (context, attr) = unsafe { ((*pd).context, &*attr) };
    let device = unsafe { index_of(context) };
    let mut world = world();
    let errno = world.settings.get("ah_errno", device) as i32;
    if errno != 0 {
        return fail(errno);
    }
    let ethernet = world.settings.get("link_layer", device) == 2;
    let rgid = attr.grh.dgid.raw;
    let Some(peer) = world.device_with(&rgid).filter(|_| attr.is_global == 1).or((!ethernet).then_some(0)) else {
        // As when nobody answers for the address.
        return fail(libc::EHOSTUNREACH);
    };
    if attr.port_num != 1 || (ethernet && world.gid(device, attr.grh.sgid_index.into()).is_none()) {
        return fail(libc::EINVAL);
    }
    world.settings.count("live_ahs", 1);
    let vector = Vector {
        key: 0,
        // MLX5_EXTENDED_UD_AV.
        dqp_dct: 0x8000_0000_u32.to_be(),
        stat_rate_sl: attr.static_rate << 4 | attr.sl,
        fl_mlid: attr.src_path_bits & 0x7f,
        rlid: attr.dlid.to_be(),
        reserved: [0; 4],
        rmac: if ethernet { mlx5::mac(peer) } else { [0; 6] },
        tclass: attr.grh.traffic_class,
        hop_limit: attr.grh.hop_limit,
        grh_gid_fl: (1 << 30 | u32::from(attr.grh.sgid_index) << 20 | attr.grh.flow_label & 0xf_ffff).to_be(),
        rgid,
    };
    new(AddressHandle { context, pd, handle: 0, vector })
}

#[no_mangle]
pub unsafe extern "C" fn ibv_destroy_ah(ah: *mut AddressHandle) -> c_int {
    drop(unsafe { Box::from_raw(ah) });
    world().settings.count("live_ahs", -1);
    0
}
