//! A communicator's hold on an mlx5 port.

use super::command::capabilities::{self, Answer, Capabilities, Group};
use super::doorbell::DoorbellPage;
use super::probe::check;
use super::ringer::Ringer;
use crate::config::{Config, ReliableDoorbell, RingerChoice};
use crate::error::{Error, Result};
use crate::fabric::verbs::{SharedPort, VerbsFabric};
use crate::proxy::memory::Memory;
use crate::sys::sync::Mutex;
use oxygin_ffi::mlx5::DevxDevice;
use std::sync::{Arc, OnceLock, Weak};

/// An mlx5 port, in the protection domain of the verbs fabric.
pub struct Mlx5Nic {
    pub(super) port: SharedPort,
    pub(super) capabilities: Capabilities,
    /// The protection domain's number.
    pub(super) domain: u32,
    pub(super) event_queue: u32,
    /// How kernels are to ring, as far as a set's queues can be rung so.
    pub(super) reliable_doorbell: ReliableDoorbell,
    /// By DMA-BUF, where there is a GPU (`NCCL_DMABUF_ENABLE`).
    pub(super) dma_buf: bool,
    uses_data_direct: bool,
    /// The page that all share which got none of their own.
    pub(super) shared_page: Mutex<Weak<DoorbellPage>>,
    /// Who is to ring, and who does: none before the first set.
    ringer_choice: RingerChoice,
    ringer: OnceLock<Ringer>,
    /// At which it is said that this process rings: users are told once, of what they run.
    says_at: log::Level,
}

impl Mlx5Nic {
    /// Takes hold of the fabric's port. From here on the fabric names windows from address 0 on, so that it has no
    /// contexts of its own.
    pub fn open(fabric: &VerbsFabric, config: &Config) -> Result<Arc<Self>> {
        Self::says_at(fabric, config, log::Level::Warn)
    }

    /// The same for a trial.
    pub(super) fn on_trial(fabric: &VerbsFabric, config: &Config) -> Result<Arc<Self>> {
        Self::says_at(fabric, config, log::Level::Debug)
    }

    fn says_at(fabric: &VerbsFabric, config: &Config, says_at: log::Level) -> Result<Arc<Self>> {
        let port = fabric.share_port()?;
        let system = |what: &str, e: std::io::Error| Error::system(format!("{}: {what}: {e}", port.label));
        let capabilities =
            query(&port.devx).map_err(|why| Error::system(why).context(format_args!("{}", port.label)))?;
        check(&capabilities, config.reliable_doorbell).map_err(|why| Error::usage(why).context(&port.label))?;
        let domain = port.devx.domain(&port.pd).map_err(|e| system("the number of its protection domain", e))?;
        let event_queue = port.devx.event_queue().map_err(|e| system("the number of an event queue", e))?;
        let nic = Self {
            capabilities,
            domain,
            event_queue,
            reliable_doorbell: config.reliable_doorbell,
            dma_buf: config.dma_buf,
            uses_data_direct: fabric.uses_data_direct(),
            shared_page: Mutex::default(),
            ringer_choice: config.ringer,
            ringer: OnceLock::new(),
            says_at,
            port,
        };
        Ok(Arc::new(nic))
    }

    /// Device and port, for messages.
    pub fn label(&self) -> &str {
        &self.port.label
    }

    /// Who rings the device for kernels in this memory's CUDA context.
    pub(super) fn ringer(&self, memory: &Memory) -> Result<Ringer> {
        if let Some(known) = self.ringer.get() {
            return Ok(*known);
        }
        let why = match self.ringer_choice {
            RingerChoice::Process => Some(Error::usage("NCCL_GIN_GDAKI_NIC_HANDLER=1")),
            _ => DoorbellPage::refused_to_kernels(&self.port.devx, memory.context())
                .map_err(|e| e.context(self.label()))?,
        };
        let ringer = match why {
            None => Ringer::Kernels,
            Some(why) if self.ringer_choice == RingerChoice::Kernels => return Err(why.context(self.label())),
            Some(why) => {
                log::log!(
                    self.says_at,
                    "{}: {why}. This process rings for kernels, which is slower (OXYGIN_PROXY_THREADS)",
                    self.label()
                );
                Ringer::Process
            }
        };
        Ok(*self.ringer.get_or_init(|| ringer))
    }

    /// Whether the device reaches GPU memory on a way of its own, so that what a get brought is visible behind a dump
    /// alone.
    pub fn uses_data_direct(&self) -> bool {
        self.uses_data_direct
    }
}

/// Asks a device what it can.
pub(super) fn query(device: &DevxDevice) -> std::result::Result<Capabilities, String> {
    let ask = |group: Group| {
        let mut answer = Box::<Answer>::default();
        device
            .command(capabilities::query(group).bytes(), answer.bytes_mut())
            .map(|()| answer)
            .map_err(|e| format!("the device's capabilities cannot be read (QUERY_HCA_CAP, {group:?}): {e}"))
    };
    let general = ask(Group::General)?;
    let known = Capabilities::new(&general, None, None);
    // What only some devices have is asked for where they say that there is some.
    let roce = if known.is_ethernet { Some(ask(Group::Roce)?) } else { None };
    let more = if known.has_more { Some(ask(Group::General2)?) } else { None };
    Ok(Capabilities::new(&general, roce.as_deref(), more.as_deref()))
}
