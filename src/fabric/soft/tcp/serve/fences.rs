//! Fences: a peer is told once what it put before is visible here.

use super::*;

/// What a fence names.
const NO_PLACE: WindowBytes = WindowBytes { rkey: 0, addr: 0, len: 0 };

impl Inbound {
    /// A fence's frame is at the front. `false`: not all of it is here, or it is not to be read now.
    pub(super) fn take_fence(
        &mut self,
        lanes: &mut Lanes,
        held: &Held,
        (context, number, counted): (u32, u32, bool),
    ) -> io::Result<bool> {
        let header = lanes.header(counted);
        let staged = self.receive_buffer.staged();
        if staged.len() < header {
            return Ok(false);
        }
        if counted && lanes.is_choked() {
            self.starved = true;
            return Ok(false);
        }
        let counts = counted.then(|| parse_counts(&staged[HEADER..], lanes.stripes));
        self.receive_buffer.consume(header);
        self.take_due(lanes, held, (context, NO_PLACE), counts, Due::Fence(number));
        Ok(true)
    }

    /// All chunks of a context are in place: tells its sender, if nothing else of it is on its way to the GPU.
    pub(super) fn confirm(&mut self, lanes: &mut Lanes, context: u32, number: u32) {
        if lanes.is_refused(context) {
            return;
        }
        // It follows what was gathered.
        lanes.hand_over();
        let header = Frame::Fenced { context, number }.emit();
        let awaited = lanes.gpu.in_place(Source::far(lanes.sender, context));
        let awaited = awaited.map(|awaited| (Awaits::Bytes, awaited));
        self.answers.push_back(Answer { header, context, place: NO_PLACE, sent: 0, bare: true, buffer: None, awaited });
    }
}
