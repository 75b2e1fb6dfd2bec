//! The hand-written libmlx5 types against what a C compiler makes of `infiniband/mlx5dv.h` (package libibverbs-dev).

mod c_layout;

use c_layout::{compare, offsets, sizes, values};
use oxygin_ffi::mlx5::types::*;
use std::mem::{offset_of, size_of};

#[test]
fn types_are_laid_out_as_the_c_header_says() {
    let mut out = Vec::new();
    sizes!(
        out,
        mlx5dv_pd,
        mlx5dv_ah,
        mlx5_wqe_av,
        mlx5dv_devx_uar,
        mlx5dv_devx_umem,
        mlx5dv_devx_umem_in,
        mlx5dv_devx_event_channel,
        mlx5dv_devx_async_event_hdr
    );
    offsets! { out,
        mlx5dv_context_attr { flags, comp_mask }
        mlx5dv_pd { pdn, comp_mask }
        mlx5dv_ah { av, comp_mask }
        mlx5_wqe_av { rmac, tclass, rgid }
        mlx5dv_devx_uar { reg_addr, base_addr, page_id, mmap_off, comp_mask }
        mlx5dv_devx_umem { umem_id }
        mlx5dv_devx_umem_in { addr, size, access, pgsz_bitmap, comp_mask, dmabuf_fd }
        mlx5dv_devx_event_channel { fd }
        mlx5dv_devx_async_event_hdr { cookie }
    }
    for (field, at) in [("ah", offset_of!(mlx5dv_obj, ah)), ("pd", offset_of!(mlx5dv_obj, pd))] {
        let (input, output) = (at + offset_of!(Pair, input), at + offset_of!(Pair, output));
        out.push((format!("offsetof(struct mlx5dv_obj, {field}.in)"), input as u64));
        out.push((format!("offsetof(struct mlx5dv_obj, {field}.out)"), output as u64));
    }
    values!(out, MLX5DV_CONTEXT_FLAGS_DEVX, MLX5DV_OBJ_AH, MLX5DV_OBJ_PD, MLX5DV_UAR_ALLOC_TYPE_NC);
    // Those that came with rdma-core 45 and newer are not in every header.
    values!(out, MLX5DV_UMEM_MASK_DMABUF);
    values!(out, MLX5DV_DEVX_CREATE_EVENT_CHANNEL_FLAGS_OMIT_EV_DATA);
    compare("mlx5_layout", "infiniband/mlx5dv.h", "libibverbs-dev", &out);
}
