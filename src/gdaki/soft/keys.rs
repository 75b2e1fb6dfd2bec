//! Memory keys of the software NIC: the numbers by which entries name windows.
//!
//! A queue pair has one peer, so one number names a window here and at any peer. It has the form of a device's: 24 bits
//! for the window, 8 that change when these are used again.

use crate::sys::sync::RwLock;

/// Names 8 bytes that nobody reads: where fetched values go that nobody wants. No window's key.
pub const SINK: u32 = 1 << 8;
/// Bytes of the sink.
pub const SINK_BYTES: u64 = 8;
/// Of the first window.
const FIRST: u32 = 2;
/// Windows at most: as many as there are handles.
const MOST: usize = 1 << 18;

struct Slot {
    /// The window's; 0: free.
    handle: u64,
    /// How often the slot has been used, modulo 256.
    used: u8,
}

/// Which windows have keys. One for a communicator.
#[derive(Default)]
pub struct Keys {
    slots: RwLock<Vec<Slot>>,
}

fn key(at: usize, slot: &Slot) -> u32 {
    (at as u32 + FIRST) << 8 | u32::from(slot.used)
}

impl Keys {
    /// The key of the window with this handle; it gets one if it has none. `None`: there are too many.
    pub fn add(&self, handle: u64) -> Option<u32> {
        let mut slots = self.slots.write();
        if let Some(at) = slots.iter().position(|slot| slot.handle == handle) {
            return Some(key(at, &slots[at]));
        }
        let at = match slots.iter().position(|slot| slot.handle == 0) {
            Some(free) => free,
            None if slots.len() < MOST => {
                slots.push(Slot { handle: 0, used: 0 });
                slots.len() - 1
            }
            None => return None,
        };
        slots[at].handle = handle;
        Some(key(at, &slots[at]))
    }

    /// The window's registration is about to end: its key names nothing from here on.
    pub fn remove(&self, handle: u64) {
        if let Some(slot) = self.slots.write().iter_mut().find(|slot| slot.handle == handle) {
            *slot = Slot { handle: 0, used: slot.used.wrapping_add(1) };
        }
    }

    /// The handle of the window that a key names.
    pub fn find(&self, named: u32) -> Option<u64> {
        let at = (named >> 8).checked_sub(FIRST)? as usize;
        let slots = self.slots.read();
        let slot = slots.get(at).filter(|slot| slot.handle != 0 && key(at, slot) == named)?;
        Some(slot.handle)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_ends_with_its_window() {
        let keys = Keys::default();
        let (a, b) = (keys.add(70).unwrap(), keys.add(80).unwrap());
        assert_eq!((keys.add(70), keys.find(a), keys.find(b)), (Some(a), Some(70), Some(80)));
        keys.remove(70);
        assert_eq!((keys.find(a), keys.find(b), keys.find(SINK), keys.find(u32::MAX)), (None, Some(80), None, None));
        let c = keys.add(90).unwrap();
        assert!(c != a && c >> 8 == a >> 8);
        assert_eq!((keys.find(a), keys.find(c)), (None, Some(90)));
    }
}
