//! How far a communicator has come: one type, which every call that depends on it asks.

use crate::comm::backend::choose::EngineChosen;
use crate::comm::contexts::EngineKind;
use crate::error::{Error, Result};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::OnceLock;

/// A stage of its life. They follow each other in this order; windows and contexts may come in any order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum LifeStage {
    /// `connect` has begun.
    Uninitialised,
    /// This rank looks at what it can, and hears what the others can.
    Probing,
    /// All ranks have taken the same fabric and the same engine.
    Chosen,
    /// A window is registered, for device code of that engine.
    WindowsRegistered,
    /// A set of contexts is made: device code may run.
    Active,
    /// Closed: every further call is refused.
    Destroyed,
}

const STAGES: [LifeStage; 6] = [
    LifeStage::Uninitialised,
    LifeStage::Probing,
    LifeStage::Chosen,
    LifeStage::WindowsRegistered,
    LifeStage::Active,
    LifeStage::Destroyed,
];

/// The life of one communicator. From any thread.
pub struct Life {
    stage: AtomicU8,
    chosen: OnceLock<EngineChosen>,
}

impl Default for Life {
    fn default() -> Self {
        Self { stage: AtomicU8::new(LifeStage::Uninitialised as u8), chosen: OnceLock::new() }
    }
}

impl Life {
    /// Where it is.
    pub fn stage(&self) -> LifeStage {
        STAGES[usize::from(self.stage.load(Ordering::Acquire))]
    }

    /// It has come to `stage`, or was past it. An error: it is closed, or a stage before was left out.
    fn come_to(&self, stage: LifeStage) -> Result<()> {
        let step = |now: u8| {
            let now = STAGES[usize::from(now)];
            let follows = now >= LifeStage::Chosen || stage as u8 == now as u8 + 1;
            (now != LifeStage::Destroyed && follows).then(|| now.max(stage) as u8)
        };
        match self.stage.fetch_update(Ordering::AcqRel, Ordering::Acquire, step) {
            Ok(_) => Ok(()),
            Err(now) if STAGES[usize::from(now)] == LifeStage::Destroyed => Err(closed()),
            Err(now) => {
                Err(Error::internal(format!("a communicator goes from {:?} to {stage:?}", STAGES[usize::from(now)])))
            }
        }
    }

    /// Ranks tell each other what they can from here on.
    pub fn probing(&self) -> Result<()> {
        self.come_to(LifeStage::Probing)
    }

    /// They took this.
    pub fn choose(&self, chosen: EngineChosen) -> Result<()> {
        self.come_to(LifeStage::Chosen)?;
        let _ = self.chosen.set(chosen);
        Ok(())
    }

    /// A window is registered.
    pub fn window_registered(&self) -> Result<()> {
        self.come_to(LifeStage::WindowsRegistered)
    }

    /// A set of contexts is made.
    pub fn active(&self) -> Result<()> {
        self.come_to(LifeStage::Active)
    }

    /// It is closed. Whether this call closed it.
    pub fn destroy(&self) -> bool {
        self.stage.swap(LifeStage::Destroyed as u8, Ordering::AcqRel) != LifeStage::Destroyed as u8
    }

    /// Whether calls are taken.
    pub fn check_open(&self) -> Result<()> {
        match self.stage() {
            LifeStage::Destroyed => Err(closed()),
            _ => Ok(()),
        }
    }

    /// The engine that all ranks took; before they did, NCCL's.
    pub fn engine(&self) -> EngineKind {
        self.chosen.get().map_or(EngineKind::Nccl, |chosen| chosen.kind)
    }
}

fn closed() -> Error {
    Error::usage("this communicator is closed; make no more calls with it")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own() -> EngineChosen {
        EngineChosen { kind: EngineKind::Own, against: Vec::new() }
    }

    #[test]
    fn stages_follow_each_other() {
        let life = Life::default();
        assert!(life.choose(own()).is_err() && life.active().is_err() && life.window_registered().is_err());
        assert_eq!((life.stage(), life.engine()), (LifeStage::Uninitialised, EngineKind::Nccl));
        life.probing().unwrap();
        life.choose(own()).unwrap();
        assert_eq!((life.stage(), life.engine()), (LifeStage::Chosen, EngineKind::Own));
        life.active().unwrap();
        life.window_registered().unwrap();
        assert_eq!(life.stage(), LifeStage::Active, "windows after contexts change nothing");
    }

    #[test]
    fn a_closed_one_takes_nothing_and_closes_once() {
        let life = Life::default();
        life.probing().unwrap();
        life.choose(own()).unwrap();
        assert!(life.check_open().is_ok() && life.destroy() && !life.destroy());
        for refused in [life.check_open(), life.active(), life.window_registered(), life.probing()] {
            assert!(refused.unwrap_err().message().contains("is closed"));
        }
        assert_eq!(life.stage(), LifeStage::Destroyed);
    }
}
