//! A libmlx5 of our own, in the same world as the libibverbs: its contexts, protection domains, memory keys and GPU
//! memory. Queue pairs made through DevX commands are really executed, by a thread of the fake (`executor.rs`).
//!
//! # For tests
//!
//! * **Library**: [`LIBRARY`] is the path of `libfake_mlx5.so`, which has the symbols in the real library's versions
//!   and leads into the `libfake_verbs.so` that the process has loaded. Set `OXYGIN_LIBMLX5` (or whatever names it)
//!   to this path. [`without`] makes a copy that lacks a symbol. `ibv_create_ah` and `mlx5dv_init_obj` of it give the
//!   MAC of a peer (`ah_errno`; `live_ahs`).
//! * **Switches** (`fake_verbs_control(name, value)`; `name@1` is for device 1 only; "reset" restores them):
//!   `mlx5` (1; 0: no mlx5 device), `mlx5_open_errno`, `mlx5_uar_dedicated` (1; 0: alloc_uar refuses flag 1 << 31 with
//!   EOPNOTSUPP, as older libraries do), `mlx5_uar_errno`, `mlx5_uar_dmabuf` (0: uar_export_dmabuf_fd says
//!   EOPNOTSUPP; 1: a descriptor), `mlx5_umem_errno`, `mlx5_umem_in` (n: only the n-th umem from now fails, with
//!   `mlx5_umem_errno`), `mlx5_umem_dmabuf` (1; 0: DMA-BUF umems say EOPNOTSUPP), `mlx5_umem_pages` (1; 0:
//!   umem_reg_ex says EPROTONOSUPPORT, as kernels do that cannot be told page sizes), `mlx5_eqn_errno`,
//!   `mlx5_channel_errno`, `mlx5_subscribe_errno`, `mlx5_events` (-1: all; else a bit for each event that the device
//!   tells of: asking for another one is EINVAL), `mlx5_false_alarms` (1: every completion is told of to whoever is
//!   armed for errors), `mlx5_data_direct` (0), `mlx5_data_direct_errno` (of its
//!   registrations), `mlx5_destroy_errno`. GPU memory by its
//!   address needs `peermem`, as for regions; `dmabuf_errno` is for umems, too.
//! * **Commands that fail**: `mlx5_fail_in` = n: the n-th command from now fails (1: the next), of those with the
//!   opcode `mlx5_fail_opcode` if that is not 0, with status `mlx5_fail_status` (3: BAD_PARAM) and syndrome
//!   `mlx5_fail_syndrome` (0x123456). A command that fails returns EREMOTEIO with status and syndrome in its answer,
//!   as a kernel does; destroying what is in use returns EBUSY.
//! * **Capabilities**: `mlx5_cap.NAME` for every field of `prm::capabilities`: `mlx5_cap.log_max_qp_sz`,
//!   `mlx5_cap.lag_tx_port_affinity`.
//! * **Execution**: `stopped` (as for verbs: what goes to the device stays in the senders' queues), `mlx5_held` (1:
//!   nothing is executed), `mlx5_lost_writes` (1: what is written is lost, and completes),
//!   `mlx5_strict_doorbells` (1: entries count only when the register has said so; without, the
//!   record is enough, since registers are plain memory here and a page can be shared: a doorbell that another one
//!   has overwritten would be lost), `mlx5_lag_forgotten` (1: a LAG port counts only where it is given to a queue pair
//!   that sends). `error_in`, `error_status` fail entries of verbs only; `mlx5_error_in` = n: the
//!   n-th entry from now ends with syndrome `mlx5_error_syndrome` (0x15).
//! * **Refusals**: `fake_mlx5_refusal(buffer, bytes)` copies the sentence why the last command was refused (a C
//!   string). The fake prints it as well, except for failures asked for.
//! * **Counts** (`fake_verbs_query(name)`): `live_mlx5_umems`, `live_mlx5_uars`, `live_mlx5_cqs`, `live_mlx5_qps`,
//!   `live_mlx5_channels`: what has been made and not ended; `live_mlx5`: their sum. `mlx5_commands`, `mlx5_refused`,
//!   `mlx5_entries` (executed), `mlx5_completions`, `mlx5_doorbells` (seen in registers), `mlx5_records` (entries
//!   that a record alone announced), `mlx5_born_armed` (completion queues whose record armed them when they were
//!   made), `mlx5_overruns` (of completion queues, and of send queues), `mlx5_lag_port` (of the last queue pair),
//!   `mlx5_dscp`, `mlx5_sl`, `mlx5_ack_timeout`, `mlx5_retry_count`, `mlx5_path_mtu`, `mlx5_sra_max`, `mlx5_rra_max`,
//!   and `misuse` (something ended that was in use, a doorbell in a page that is not the queue pair's, a context closed
//!   with objects).
//!
//! # How strict it is
//!
//! Every bit that neither source of [`prm`] knows must be zero. Addresses are offsets into umems and must be inside.
//! Both ends of a connection must agree on MTU, packet numbers and each other's numbers; on Ethernet the path needs
//! the GID of the peer's device, its MAC ([`mac`]), a hop limit and, for RoCE v2, a source port from 0xc000 on.
//! Atomic operations need `rae` and an `atomic_mode` at the responder. Not modelled, and refused: receive queues that
//! take anything, 128-byte completion entries, compressed or collapsed ones, signatures, XRC and the like. A queue
//! pair of DevX and one of `ibv_create_qp` cannot be connected.

pub mod entry;
pub mod prm;

mod abi;
mod capabilities;
mod command;
mod completion;
mod create;
mod events;
mod execute;
mod executor;
mod memory;
mod modify;
mod objects;
mod pages;

pub use capabilities::{is_one as is_capability, PREFIX};
pub use objects::{mac, Mlx5};

use std::path::{Path, PathBuf};

/// The library that has libmlx5's symbols in their versions.
pub const LIBRARY: &str = env!("FAKE_MLX5");

/// A copy of [`LIBRARY`] in `folder` that lacks `symbol`.
pub fn without(symbol: &str, folder: &Path) -> std::io::Result<PathBuf> {
    let mut bytes = std::fs::read(LIBRARY)?;
    let name = [b"\0", symbol.as_bytes(), b"\0"].concat();
    let places: Vec<usize> = (0..bytes.len() - name.len()).filter(|&at| bytes[at..].starts_with(&name)).collect();
    assert!(!places.is_empty(), "the library has no symbol {symbol}");
    for at in places {
        // Its hash stays, so that the dynamic linker comes by, compares names and goes on.
        bytes[at + name.len() - 2] = b'?';
    }
    let path = folder.join(format!("libfake_mlx5-without-{symbol}.so"));
    std::fs::write(&path, bytes)?;
    Ok(path)
}
