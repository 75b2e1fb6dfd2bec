//! Numbers for windows: small, so that tables by number stay small, and not used again soon, so that a late message
//! to a dead window rarely meets a new one.

use std::collections::VecDeque;

/// Free numbers kept back before one is used again.
const REST: usize = 64;

/// The numbers of one communicator's windows.
#[derive(Default)]
pub struct WindowIds {
    next: u32,
    resting: VecDeque<u32>,
}

impl WindowIds {
    /// A number that no live window has.
    pub fn take(&mut self) -> u32 {
        if self.resting.len() > REST {
            if let Some(id) = self.resting.pop_front() {
                return id;
            }
        }
        self.next += 1;
        self.next - 1
    }

    /// The window with this number is gone.
    pub fn give_back(&mut self, id: u32) {
        self.resting.push_back(id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_stay_small_and_rest() {
        let mut ids = WindowIds::default();
        let mut last = std::collections::VecDeque::new();
        for _ in 0..10_000 {
            let id = ids.take();
            assert!(!last.contains(&id), "{id} came back too soon");
            assert!(id <= REST as u32 + 1);
            last.push_back(id);
            if last.len() > REST {
                last.pop_front();
            }
            ids.give_back(id);
        }
    }
}
