//! Queue pairs.

use super::command::fields::Plain;
use super::command::queue_pair::{self, Created, DoorbellMode, NewQueuePair, QueuePairState, State};
use super::command::transition::{self, Patience, RcConnection};
use super::completion_queue::{Mlx5CompletionQueue, QueuePlace};
use super::doorbell::DoorbellPage;
use super::memory::QueueUmem;
use super::nic::Mlx5Nic;
use crate::error::{Error, Result};
use crate::gdaki::view::{Handler, QueuePair};
use oxygin_ffi::mlx5::{CommandError, Object};
use std::sync::atomic::AtomicBool;
use std::sync::Arc;

/// In a pair of doorbell records that of the send queue is the second (`MLX5_SND_DBR`).
const SEND_RECORD: u64 = 4;

/// What a queue pair is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Carries operations of device code.
    Main,
    /// Increments counters: its entries wait for completions of other queues.
    Companion,
    /// The other end of a connection to oneself, which sends nothing.
    Responder,
}

impl std::fmt::Display for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Main => "queue pair",
            Self::Companion => "companion",
            Self::Responder => "responder",
        })
    }
}

/// How a queue pair is rung.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rung {
    /// By kernels, at the device's register.
    ByKernels(DoorbellMode),
    /// By this process: kernels write the index behind their last entry to this word. There is a record.
    ByProcess {
        /// For device code.
        word: u64,
    },
}

impl Rung {
    fn mode(self) -> DoorbellMode {
        match self {
            Self::ByKernels(mode) => mode,
            Self::ByProcess { .. } => DoorbellMode::Record,
        }
    }
}

/// A queue pair of reliable connections, whose slots are in memory of device code.
pub struct Mlx5QueuePair {
    /// Ended before what it uses.
    pub(super) object: Object,
    number: u32,
    role: Role,
    place: QueuePlace,
    rung: Rung,
    pub(super) completions: Arc<Mlx5CompletionQueue>,
    memory: Arc<QueueUmem>,
    /// In which its doorbell record is.
    records: Arc<QueueUmem>,
    page: Arc<DoorbellPage>,
}

#[cold]
fn refused(step: &str, what: impl std::fmt::Display, e: &CommandError, remedy: &str) -> Error {
    Error::system(format!("{what} ({step}): {e}; {remedy}"))
}

impl Mlx5QueuePair {
    /// Makes one that is rung in this way, in state RESET. `stays` is set if the device refuses to end it later.
    pub fn new(
        nic: &Mlx5Nic,
        (role, rung): (Role, Rung),
        place: QueuePlace,
        (memory, records): (&Arc<QueueUmem>, &Arc<QueueUmem>),
        (completions, page): (&Arc<Mlx5CompletionQueue>, &Arc<DoorbellPage>),
        stays: &Arc<AtomicBool>,
    ) -> Result<Self> {
        let command = NewQueuePair {
            domain: nic.domain,
            log_slots: place.log_entries,
            ring: memory.place(place.ring),
            record: records.place(place.record),
            uar: page.number(),
            completion_queue: completions.number(),
            mode: rung.mode(),
            is_master: role == Role::Companion,
            any_clock: nic.capabilities.has_clocks,
        }
        .create();
        let mut answer = Created::default();
        let object = Object::create(&nic.port.devx, command.bytes(), answer.bytes_mut(), stays).map_err(|e| {
            let slots = 1_u64 << place.log_entries;
            refused("CREATE_QP", format_args!("a {role} of {slots} slots"), &e, "ask for fewer contexts, or less depth")
        })?;
        let (completions, page) = (completions.clone(), page.clone());
        let (memory, records) = (memory.clone(), records.clone());
        let uses = (completions.clone(), memory.clone(), records.clone(), page.clone(), nic.port.pd.clone());
        let (object, number) = (object.using(uses), queue_pair::number(&answer));
        Ok(Self { object, number, role, place, rung, completions, memory, records, page })
    }

    /// On the wire.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// What it is for.
    pub fn role(&self) -> Role {
        self.role
    }

    /// RESET to INIT, RTR and RTS, and there to its port of a LAG.
    pub fn connect(&self, nic: &Mlx5Nic, to: &RcConnection, patience: &Patience) -> Result<()> {
        let (number, path) = (self.number, &to.path);
        let init = transition::init(number, path.way.port_num, path.pkey_index, to.lag_port);
        let way = "check that both ends' GIDs are of one kind and reach each other (NCCL_IB_GID_INDEX)";
        let steps = [
            ("RST2INIT_QP", init, "check port and P_Key (NCCL_IB_PKEY)"),
            ("INIT2RTR_QP", transition::ready_to_receive(number, to), way),
            ("RTR2RTS_QP", transition::ready_to_send(number, patience), "see the kernel log"),
        ];
        for (step, command, remedy) in steps {
            self.object.modify(command.bytes(), Plain::default().bytes_mut()).map_err(|e| {
                let what = format_args!("{} {number} on {} towards queue pair {}", self.role, nic.label(), to.peer);
                refused(step, what, &e, remedy)
            })?;
        }
        if to.lag_again {
            // Without it the queue pair sends as well, through whichever port the device chose.
            let command = transition::bound_to(number, to.lag_port);
            let bound = self.object.modify(command.bytes(), Plain::default().bytes_mut());
            if let Err(e) = bound {
                log::debug!("{} {number} on {} and its port of the LAG (RTS2RTS_QP): {e}", self.role, nic.label());
            }
        }
        Ok(())
    }

    /// To ERR: nothing is executed any more, and completion entries say so for what was outstanding.
    pub fn stop(&self) -> std::result::Result<(), CommandError> {
        self.object.modify(transition::error(self.number).bytes(), Plain::default().bytes_mut())
    }

    /// Its state, the entries that the device took, and those that it was rung for. Takes some 250 µs.
    pub fn state(&self) -> std::result::Result<(QueuePairState, u16, u16), CommandError> {
        let mut answer = State::default();
        self.object.query(queue_pair::query(self.number).bytes(), answer.bytes_mut())?;
        Ok(queue_pair::state(&answer))
    }

    /// Its send queue's doorbell record, for device code, or for this process where it rings.
    pub fn record(&self) -> u64 {
        self.records.for_kernels(self.place.record + SEND_RECORD)
    }

    /// As device code is told of it.
    pub fn for_kernels(&self) -> QueuePair {
        QueuePair {
            number: self.number,
            slots: 1 << self.place.log_entries,
            send_queue: self.memory.for_kernels(self.place.ring),
            // Of this process's kernels know nothing.
            send_record: if matches!(self.rung, Rung::ByProcess { .. }) { 0 } else { self.record() },
            doorbell: match self.rung {
                Rung::ByKernels(mode) => self.page.for_kernels(mode),
                Rung::ByProcess { word } => word,
            },
            completion_number: self.completions.number(),
            is_counted: false,
            completion_queue: self.completions.for_kernels(),
            completion_record: 0,
            handler: match self.rung {
                Rung::ByKernels(DoorbellMode::Record) => Handler::Doorbell,
                Rung::ByKernels(DoorbellMode::NoRecord) => Handler::NoRecord,
                Rung::ByProcess { .. } => Handler::CpuProxy,
            },
        }
    }
}

impl Drop for Mlx5QueuePair {
    fn drop(&mut self) {
        // As the kernel does with queue pairs of its own: should ending it be refused, it is at least at rest.
        let _ = self.object.modify(transition::reset(self.number).bytes(), Plain::default().bytes_mut());
    }
}
