//! The kernel that these tests hand lanes to.

use super::*;

/// A kernel that does what a test says.
pub(super) struct Orders {
    pub(super) stage: Stage,
    /// One is called, or there behind the one that serves; whether a call is heard.
    pub(super) is_awaited: bool,
    pub(super) hears: bool,
    /// It has a place beside the one that serves, or has waited for so long.
    pub(super) has_place: bool,
    pub(super) waited: Duration,
    /// Somebody keeps it from all memory.
    pub(super) is_kept_out: bool,
    pub(super) room: usize,
    /// Launches that were called, each for so many lanes.
    pub(super) calls: Vec<usize>,
    /// How far it has come with the lanes that it was given.
    pub(super) positions: Vec<u32>,
    pub(super) given: usize,
    /// Which of these it was to watch, and which it has closed.
    pub(super) watched: Vec<bool>,
    pub(super) closed: Vec<bool>,
    /// How often it was to bring their queues to its GPU.
    pub(super) brought: u32,
}

impl Default for Orders {
    fn default() -> Self {
        Self {
            stage: Stage::Off,
            is_awaited: false,
            hears: true,
            has_place: true,
            waited: Duration::ZERO,
            is_kept_out: false,
            room: 8,
            calls: Vec::new(),
            positions: Vec::new(),
            given: 0,
            watched: Vec::new(),
            closed: Vec::new(),
            brought: 0,
        }
    }
}

pub(super) struct Kernel(pub(super) Arc<Mutex<Orders>>);

impl LaneServer for Kernel {
    fn poll(&mut self, _: bool) -> Stage {
        self.0.lock().unwrap().stage
    }
    fn reaches(&self, _: u32) -> bool {
        true
    }
    fn is_let_in(&self, _: u32) -> bool {
        !self.0.lock().unwrap().is_kept_out
    }
    fn is_awaited(&self) -> bool {
        self.0.lock().unwrap().is_awaited
    }
    fn awaited_since(&self) -> Option<Instant> {
        let waited = self.0.lock().unwrap().waited;
        Some(Instant::now() - waited).filter(|_| self.is_awaited() && !self.has_next())
    }
    fn call(&mut self, _: Instant, lanes: usize) {
        let mut told = self.0.lock().unwrap();
        if told.hears {
            told.is_awaited = true;
            told.calls.push(lanes);
            if told.stage == Stage::Off {
                told.stage = Stage::Called;
            }
        }
    }
    fn has_next(&self) -> bool {
        let told = self.0.lock().unwrap();
        told.is_awaited && told.has_place && matches!(told.stage, Stage::Ready | Stage::Serving)
    }
    fn room(&self) -> usize {
        self.0.lock().unwrap().room
    }
    fn serve(&mut self, lanes: &[LaneView]) -> Vec<bool> {
        let mut told = self.0.lock().unwrap();
        assert!(told.stage == Stage::Ready && lanes.len() <= told.room);
        (told.stage, told.is_awaited) = (Stage::Serving, false);
        told.positions = lanes.iter().map(|lane| lane.next as u32).collect();
        told.given = lanes.len();
        told.watched = lanes.iter().map(|lane| lane.is_watched).collect();
        told.closed = vec![false; lanes.len()];
        vec![true; lanes.len()]
    }
    fn steady(&self) -> u32 {
        2
    }
    fn bring(&mut self) {
        self.0.lock().unwrap().brought += 1;
    }
    fn position(&self, nth: usize) -> Position {
        let told = self.0.lock().unwrap();
        Position { next: told.positions[nth], is_over: told.closed[nth] }
    }
    fn stop(&mut self) {
        let mut told = self.0.lock().unwrap();
        if told.stage == Stage::Serving {
            told.stage = Stage::Over;
        }
    }
    fn settle(&mut self) {
        let mut told = self.0.lock().unwrap();
        if told.stage == Stage::Over {
            told.stage = if told.is_awaited { Stage::Ready } else { Stage::Off };
        }
    }
}
