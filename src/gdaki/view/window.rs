//! What a window's `ginHandle` points to. Every context of the communicator uses it.

use super::emit::{emit_keys, Emit};
use crate::error::{Error, Result};
use nccl_plugin_api::gdaki::window::WindowHandle;

/// Bytes that a window of that many ranks takes.
pub fn bytes(ranks: usize) -> usize {
    size_of::<WindowHandle>() + 4 * ranks
}

/// Writes a window: `rkeys` by rank, and this rank's own `lkey`, as numbers. `out` is [`bytes`] long and seen by device
/// code at `address`, which is the window's `ginHandle` from then on.
pub fn write(rkeys: &[u32], lkey: u32, out: &mut [u8], address: u64) -> Result<()> {
    let (len, border) = (out.len(), align_of::<WindowHandle>() as u64);
    if len != bytes(rkeys.len()) || address == 0 || address % border != 0 {
        let ranks = rkeys.len();
        return Err(Error::internal(format!("a window of {ranks} ranks in {len} bytes at {address:#x}")));
    }
    out.fill(0);
    let keys_at = size_of::<WindowHandle>();
    WindowHandle { rkeys: address + keys_at as u64, lkey: lkey.to_be() }.emit(out, 0);
    emit_keys(rkeys, out, keys_at);
    Ok(())
}
