//! Puts that are complete only when they are visible at the peer: it is asked behind them, and answers by context and
//! number on whichever connection brought the last of them.

use super::*;

impl Initiator {
    /// Asks the peer about puts that await confirmation, as far as there is room: once for all that a lane has on its
    /// way.
    pub(super) fn send_fences(&mut self) {
        if !self.fences_due {
            return;
        }
        self.fences_due = false;
        let (stripes, send_buffer) = (self.conns.len(), &mut self.conns[EXPRESS].send_buffer);
        for lane in self.lanes.iter_mut().flatten().filter(|lane| lane.wants_fence) {
            if !send_buffer.has_room(HEADER + 4 * stripes) {
                self.fences_due = true;
                break;
            }
            let number = lane.ask().0;
            send_buffer.copy(&Frame::Fence { context: lane.lane.context, number, counted: lane.bulk }.emit());
            if lane.bulk {
                copy_counts(lane, send_buffer, stripes);
            }
        }
    }

    /// Completes puts whose fences were answered on a connection. Answers of contexts that are gone are nobody's.
    pub(super) fn take_fenced(&mut self, stripe: usize) {
        for (context, number) in std::mem::take(&mut self.conns[stripe].fenced) {
            if let Some(lane) = self.lanes.iter_mut().flatten().find(|lane| lane.lane.context == context) {
                lane.answered(number);
            }
        }
    }

    /// The peer has closed its communicator in good order: what it was sent it needs no more, and answers no more.
    pub fn confirm_all(&mut self) {
        self.lanes.iter_mut().flatten().for_each(|lane| lane.confirm_all());
    }
}
