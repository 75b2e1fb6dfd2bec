//! Atomic operations that a peer asks for: carried out in the order of its lane's signals, and answered.

use super::*;
use crate::fabric::soft::atomic::{change, AtomicRequest};

/// Answers that are looked into before their turn.
const AHEAD: usize = 16;

impl Inbound {
    /// The frame of an atomic operation is at the front. `false`: not all of it is here, or it is not to be read now.
    pub(super) fn take_atomic(
        &mut self,
        lanes: &mut Lanes,
        held: &Held,
        (context, place, counted): (u32, WindowBytes, bool),
    ) -> io::Result<bool> {
        let header = lanes.header(counted);
        let staged = self.receive_buffer.staged();
        let Some(body) = staged.get(header..header + AtomicRequest::LEN) else { return Ok(false) };
        if counted && lanes.is_choked() || lanes.gpu.is_full() {
            self.starved = true;
            return Ok(false);
        }
        let request = AtomicRequest::parse(body).filter(|r| r.width.bytes() == u64::from(place.len));
        let Some(request) = request else {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a malformed atomic operation"));
        };
        let counts = counted.then(|| parse_counts(&staged[HEADER..], lanes.stripes));
        self.receive_buffer.consume(header + AtomicRequest::LEN);
        self.take_due(lanes, held, (context, place), counts, Due::Atomic(place, request));
        Ok(true)
    }

    pub(super) fn change(
        &mut self,
        lanes: &mut Lanes,
        context: u32,
        place: &WindowBytes,
        request: &AtomicRequest,
        held: &Held,
    ) {
        if lanes.is_refused(context) {
            return;
        }
        let (width, bytes) = (request.width, request.width.bytes());
        let on_gpu = lanes.gpu.holds(place.rkey, place.addr, bytes);
        let at = held.resolve(place.rkey, place.addr, bytes);
        if !on_gpu && at.is_none() || place.addr % bytes != 0 {
            return self.say_refused(lanes, Refusal::Atomic, context, *place);
        }
        // It follows what was gathered.
        lanes.hand_over();
        let mut answer =
            Answer { header: [0; HEADER], context, place: *place, sent: 0, bare: true, buffer: None, awaited: None };
        match (lanes.gpu.atomic(Source::far(lanes.sender, context), place.rkey, place.addr, request), at) {
            (Some(Some(awaited)), _) => answer.awaited = Some((Awaits::Value(request.seq), awaited)),
            (None, Some(at)) => {
                // SAFETY: an aligned word of a registered window, which stays one while `held` lives.
                let value = unsafe { change(at, &request.change, width) };
                answer.header = Frame::Fetched { context, seq: request.seq, value }.emit();
            }
            // What comes of the context is dropped; or there is no engine any more.
            (Some(None), _) | (None, None) => return,
        }
        self.answers.push_back(answer);
    }

    /// Gives answers what the engine has done since; of what it refused, its sender is told otherwise.
    pub(super) fn take_fetched(&mut self) {
        let mut are_lost = false;
        for a in self.answers.iter_mut().take(AHEAD) {
            let Some((awaits, awaited)) = &a.awaited else { continue };
            match awaited.value() {
                Ok(None) => {}
                Ok(Some(value)) => {
                    if let Awaits::Value(seq) = *awaits {
                        a.header = Frame::Fetched { context: a.context, seq, value }.emit();
                    }
                    a.awaited = None;
                }
                Err(_) => are_lost = true,
            }
        }
        if are_lost {
            self.answers.retain(|a| a.awaited.as_ref().is_none_or(|(_, awaited)| awaited.value().is_ok()));
        }
    }
}
