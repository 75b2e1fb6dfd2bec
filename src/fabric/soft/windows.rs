//! The end of a registration: who is at the memory then, and what is said where somebody stays there.

use super::gpu::Engine;
use super::link::Link;
use super::progress::Progress;
use super::shm::withdraw::withdraw;
use crate::error::{Error, Kind, Result};
use crate::memory::window::Guard;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// A registration that ends once.
pub struct Registered {
    shared: Arc<Progress>,
    id: u32,
    is_gpu: bool,
    has_ended: AtomicBool,
    /// When its end began, from which everything that waits has its time.
    began: OnceLock<Instant>,
}

impl Registered {
    /// Window `id` of this rank, in host memory or a GPU's.
    pub fn new(shared: Arc<Progress>, id: u32, is_gpu: bool) -> Self {
        Self { shared, id, is_gpu, has_ended: AtomicBool::new(false), began: OnceLock::new() }
    }

    /// What is left of the time that a deregistration may take.
    fn left(&self) -> Duration {
        let began = self.began.get_or_init(Instant::now);
        self.shared.config.dereg_timeout.saturating_sub(began.elapsed())
    }

    fn withdraw(&self) -> Result<()> {
        let (shared, id) = (&self.shared, self.id);
        if !self.is_gpu {
            // Kernels that read it by themselves end first, as below.
            let _closed = shared.engine.host_memory(id).map(|_| Closed::begin(shared, self.left()));
            shared.engine.remove_host_window(id);
            let mut peers = shared.share.withdraw(&**shared, id, self.left());
            shared.status.set_window(id, false);
            shared.links().iter().for_each(Link::pass_tx_queues);
            peers.extend(withdraw(&shared.status, shared.neighbours.met(), shared.world.rank, id, self.left()));
            // Engines copy from and to it for who put or got here.
            let passed = shared.engine.withdraw_caller(shared.world.rank, id, false, self.left());
            peers.extend(self.withdraw_from_engines());
            shared.share.retire(&**shared, id, &[]);
            return self.outcome(&peers, passed);
        }
        // Kernels of peers' and this rank's own that store by themselves end first, and look windows up anew.
        let _closed = Closed::begin(shared, self.left());
        // One after the other, out of one time.
        let mut peers = shared.share.withdraw(&**shared, id, self.left());
        shared.status.set_window(id, false);
        let staged = shared.tcp().gpu().remove_window(id, self.left());
        let passed = shared.engine.remove_window(id, self.left());
        peers.extend(self.withdraw_from_engines());
        shared.share.retire(&**shared, id, &[]);
        self.outcome(&peers, staged && passed)
    }

    /// Has engines of other ranks of this process end what they do there; those that have not, by their ranks.
    fn withdraw_from_engines(&self) -> Vec<u32> {
        let (me, engines) = (self.shared.world.rank, self.shared.engines_of_peers());
        let stands = |engine: &Engine| !engine.withdraw_caller(me, self.id, self.is_gpu, self.left());
        engines.into_iter().filter(|(_, engine)| stands(engine)).map(|(peer, _)| peer).collect()
    }

    /// `peers` are still at it; `is_idle`: this rank's GPU is not.
    fn outcome(&self, peers: &[u32], is_idle: bool) -> Result<()> {
        if peers.is_empty() && is_idle {
            return Ok(());
        }
        let seconds = self.shared.config.dereg_timeout.as_secs_f64();
        Err(Error::remote(sentence(self.shared.world.rank, self.id, seconds, peers)).of_kind(Kind::Timeout))
    }
}

/// The gate of a rank that is closed meanwhile.
struct Closed<'a>(&'a Progress);

impl<'a> Closed<'a> {
    /// Closes it, and waits until nobody is inside, who has little to do there.
    fn begin(shared: &'a Progress, within: Duration) -> Self {
        shared.engine.gate().close_and_wait(within);
        Self(shared)
    }
}

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        self.0.engine.gate().open();
    }
}

impl Guard for Registered {
    fn apply_arrived(&self) {
        let end = Instant::now() + self.left();
        self.shared.apply_arrived(if self.is_gpu { self.shared.wait_by(end) } else { end });
    }

    fn end(&self) -> Result<()> {
        if self.has_ended.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        self.withdraw()
    }
}

impl Drop for Registered {
    /// Where the communicator closes, nobody is there to be told but by the log.
    fn drop(&mut self) {
        if let Err(e) = self.end() {
            log::warn!("{}", e.message());
        }
    }
}

/// What is said where somebody is still at window `id` of rank `me`: peers, or else its own GPU.
#[cold]
fn sentence(me: u32, id: u32, seconds: f64, peers: &[u32]) -> String {
    let (who, remedy) = match peers {
        [] => (
            format!("the GPU of rank {me} has not ended its transfers"),
            "it waits for the application's kernels, or has failed: let them end, or end the process,",
        ),
        [one] => (
            format!("rank {one} has not ended a copy"),
            "its process or its GPU may be stopped: let it go on, or end it,",
        ),
        more => {
            let ranks: Vec<_> = more.iter().map(u32::to_string).collect();
            (
                format!("ranks {} have not ended their copies", ranks.join(", ")),
                "their processes or GPUs may be stopped: let them go on, or end them,",
            )
        }
    };
    format!(
        "{who} to or from window {id} of rank {me} in the {seconds} s of a deregistration (OXYGIN_DEREG_TIMEOUT); \
         {remedy} and leave the memory as it is until then, for it may still be read or written"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_is_still_at_it_is_named() {
        let said = [vec![], vec![3], vec![3, 5]].map(|peers| sentence(1, 7, 10.0, &peers));
        for (said, who) in said.iter().zip(["the GPU of rank 1 has", "rank 3 has", "ranks 3, 5 have"]) {
            assert!(said.starts_with(who) && said.contains("window 7 of rank 1 in the 10 s of"), "{said}");
        }
    }
}
