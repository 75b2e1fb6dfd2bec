//! Records of windows for device code of GDAKI: what a window's `ginHandle` points to, in memory that the GPU reads.

use super::coll::Coll;
use crate::error::{Error, Result};
use crate::gdaki::view::window;
use crate::memory::window::Window;
use crate::proxy::memory::Memory;
use crate::sys::handles;
use std::collections::BTreeMap;
use std::ffi::c_void;

/// Bytes allocated at a time: on a GPU each allocation takes 2 MiB of it, a record of 8 ranks takes 64 bytes.
const CHUNK_BYTES: usize = 256 << 10;
/// Where records begin.
const BORDER: usize = 64;

/// Memory for records of one size.
struct Chunk {
    memory: Memory,
    /// Where it begins, for device code.
    base: u64,
    /// Records that no window has, by number.
    free: Vec<u32>,
}

/// The records of a communicator's windows. Dropping it frees their memory: no kernel reads it any more by then.
#[derive(Default)]
pub(super) struct Records {
    chunks: Vec<Chunk>,
    /// By the window's handle: its chunk, and which record there.
    of: BTreeMap<u64, (usize, u32)>,
}

impl Records {
    /// Writes the record of a window that has none yet, and returns its address for device code. `rkeys` name it at
    /// every rank, `lkey` does here.
    fn add(&mut self, window: u64, rkeys: &[u32], lkey: u32) -> Result<u64> {
        let bytes = window::bytes(rkeys.len());
        let each = bytes.next_multiple_of(BORDER);
        let chunk = match self.chunks.iter().position(|chunk| !chunk.free.is_empty()) {
            Some(chunk) => chunk,
            None => {
                let count = (CHUNK_BYTES / each).max(1);
                let mut memory = Memory::here()?;
                let base = memory.zeroed(count * each)?;
                self.chunks.push(Chunk { memory, base, free: (0..count as u32).rev().collect() });
                self.chunks.len() - 1
            }
        };
        let Chunk { memory, base, free } = &mut self.chunks[chunk];
        let record = *free.last().ok_or_else(|| Error::internal("regMrSym: a chunk without a free record"))?;
        let at = *base + (record as usize * each) as u64;
        let mut contents = vec![0; bytes];
        window::write(rkeys, lkey, &mut contents, at)?;
        // SAFETY: inside the chunk, and no window has this record: no kernel knows its address.
        unsafe { memory.write_device(at, &contents)? };
        free.pop();
        self.of.insert(window, (chunk, record));
        Ok(at)
    }

    /// The window's registration is about to end: another one may get its record.
    pub(super) fn remove(&mut self, window: u64) {
        if let Some((chunk, record)) = self.of.remove(&window) {
            self.chunks[chunk].free.push(record);
        }
    }
}

impl Coll {
    /// What device code of GDAKI calls a window that was just registered: the address of a record with its keys, which
    /// are the software NIC's, or those of the ranks' mlx5 devices. It is good until the window is deregistered.
    pub fn gdaki_handle_of(&self, window: *mut c_void) -> Result<*mut c_void> {
        let (rkeys, lkey) = match &self.mlx5 {
            None => {
                let key = self.key_of(window)?;
                (vec![key; self.world.nranks as usize], key)
            }
            Some(_) => {
                let window = handles::clone::<Window>(window);
                let window = window.ok_or_else(|| Error::internal("regMrSym: a window without a handle"))?;
                (window.remote().iter().map(|remote| remote.load().rkey).collect(), window.lkey())
            }
        };
        let _gpu = self.enter_gpu()?;
        let at = self.records.lock().add(window as u64, &rkeys, lkey)?;
        Ok(at as *mut c_void)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_used_again_after_its_window_and_not_before() {
        let mut records = Records::default();
        let a = records.add(1, &[0x0102_0304; 3], 0x0102_0304).unwrap();
        let b = records.add(2, &[0x0506_0708; 3], 0x0506_0708).unwrap();
        assert!(a % 64 == 0 && b.abs_diff(a) >= window::bytes(3) as u64);
        // SAFETY: records are host memory where there is no GPU.
        let seen = |at: u64| unsafe { std::slice::from_raw_parts(at as *const u8, window::bytes(3)).to_vec() };
        let of_a = seen(a);
        assert_eq!(of_a[..8], (a + 16).to_ne_bytes());
        assert_eq!(of_a[8..12], [1, 2, 3, 4]);
        assert_eq!(of_a[16..28], [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4]);
        records.remove(2);
        assert_eq!(records.add(3, &[0x090a_0b0c; 3], 0x090a_0b0c).unwrap(), b);
        assert_eq!((&seen(b)[8..12], seen(a)), (&[9, 10, 11, 12][..], of_a));
    }

    #[test]
    fn there_is_always_another_chunk() {
        let mut records = Records::default();
        // Records of this many ranks are larger than a chunk.
        let places: Vec<u64> = (0..3).map(|window| records.add(window, &[7; 1 << 17], 7).unwrap()).collect();
        assert_eq!(records.chunks.len(), 3);
        assert!(places[0] != places[1] && places[1] != places[2] && places[0] != places[2]);
        let mut records = Records::default();
        for window in 0..5000 {
            records.add(window, &[7], 7).unwrap();
        }
        assert_eq!(records.chunks.len(), 5000_usize.div_ceil(CHUNK_BYTES / BORDER));
    }
}
