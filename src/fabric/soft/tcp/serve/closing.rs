//! This rank closes its communicator: what becomes of the connections that a peer opened.

use super::*;

/// Bytes of a connection that are thrown away before others, and what this rank has to send itself, have their turn.
const AT_ONCE: usize = 256 << 10;

impl Serving {
    /// Throws away what has come: nobody looks at it any more, and a peer that closes as well waits until its bytes are
    /// taken.
    pub fn throw_away(&self) {
        let mut nowhere = [0; 16 << 10];
        for slot in &self.slots {
            let conn = slot.conn.lock();
            let Some(conn) = conn.as_ref() else { continue };
            for _ in 0..AT_ONCE / nowhere.len() {
                // An end or an error is nobody's affair: the connection is closed soon.
                let Ok(Moved::Bytes(_)) = sock::receive_into(&conn.fd, &mut nowhere) else { break };
            }
        }
    }

    /// Sends its FIN where that does not cut an answer in two, and closes everything.
    pub fn close(&self) {
        for slot in &self.slots {
            let Some(c) = slot.conn.lock().take() else { continue };
            if c.answers.is_empty() {
                // The peer may have gone first.
                let _ = sock::send_whole(&c.fd, &Frame::Fin.emit());
            }
        }
        self.orders.lock().clear();
    }
}
