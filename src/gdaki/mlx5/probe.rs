//! Whether a port can serve kernels of GDAKI, before a communicator is there.

use super::command::capabilities::Capabilities;
use super::command::queue_pair::DoorbellMode;
use super::doorbell::DoorbellPage;
use super::memory::QueueUmem;
use super::nic::query;
use super::trial;
use crate::config::{Config, ReliableDoorbell, RingerChoice};
use crate::error::Error;
use crate::fabric::verbs::DeviceInfo;
use crate::proxy::memory::Memory;
use oxygin_ffi::mlx5::EventChannel;
use std::sync::Arc;

/// Bytes of the memory that is tried.
const TRIED: usize = 4096;

/// What a port can, or a sentence that says what it lacks and what helps. Opens the device, asks it, and tries on it
/// what depends on drivers: a doorbell page; memory for queues of the GPU of the calling thread's CUDA context; events;
/// and, unless `OXYGIN_GDAKI_TRIAL` says no, a put. All of it is given back.
pub fn probe(device: &DeviceInfo, config: &Config) -> Result<Capabilities, String> {
    if let Some(problem) = &device.problem {
        return Err(problem.clone());
    }
    let label = format!("{}:{}", device.name, device.port);
    let with_label = |e: Error| format!("{label}: {e}");
    let devx = device.open_devx()?;
    let capabilities = query(&devx).map_err(|why| format!("{label}: {why}"))?;
    check(&capabilities, config.reliable_doorbell).map_err(|why| format!("{label}: {why}"))?;
    let mut memory = Memory::here().map_err(with_label)?;
    if let Some(why) = DoorbellPage::refused_to_kernels(&devx, memory.context()).map_err(with_label)? {
        match config.ringer {
            RingerChoice::Kernels => return Err(with_label(why)),
            RingerChoice::Auto | RingerChoice::Process => log::debug!("{label}: {why}"),
        }
    }
    let at = memory.device(&[0; TRIED]).map_err(with_label)?;
    QueueUmem::on_device(&devx, &Arc::new(memory), at, TRIED, config.dma_buf).map_err(with_label)?;
    EventChannel::new(&devx).map_err(|e| format!("{label}: {}", no_channel(&e)))?;
    drop(devx);
    if config.gdaki_trial {
        let remedy = "set OXYGIN_GDAKI_TRIAL=0 beside OXYGIN_ENGINE=gdaki to go on all the same";
        trial::run(device, config).map_err(|e| format!("{e}; {remedy}"))?;
    }
    Ok(capabilities)
}

/// Why a device of these capabilities cannot do it.
pub(super) fn check(capabilities: &Capabilities, asked: ReliableDoorbell) -> Result<(), String> {
    let needs_record = asked != ReliableDoorbell::On;
    let lacking = [
        (capabilities.rc, "reliable connections (rc)"),
        (capabilities.atomics, "atomic operations (atomic)"),
        (needs_record || capabilities.can_do_without_record(), "doorbells without a record (send_dbr_mode_no_dbr_ext)"),
    ];
    let lacking: Vec<_> = lacking.into_iter().filter(|(has, _)| !has).map(|(_, name)| name).collect();
    if lacking.is_empty() {
        return Ok(());
    }
    let remedy = match asked {
        ReliableDoorbell::On if !capabilities.can_do_without_record() => "set NCCL_GDAKI_USE_RELIABLE_DB to 0 or 2",
        _ => "use a ConnectX-6 Dx or newer, with current firmware",
    };
    Err(format!("the device has no {}; {remedy}", lacking.join(", no ")))
}

/// How kernels are to ring queues of so many slots.
pub(super) fn mode(capabilities: &Capabilities, asked: ReliableDoorbell, slots: u32) -> DoorbellMode {
    match asked {
        ReliableDoorbell::On => DoorbellMode::NoRecord,
        ReliableDoorbell::IfPossible if slots <= capabilities.no_record_slots => DoorbellMode::NoRecord,
        ReliableDoorbell::IfPossible | ReliableDoorbell::Off => DoorbellMode::Record,
    }
}

/// Why there is no channel for events.
pub(super) fn no_channel(e: &std::io::Error) -> String {
    format!("no channel for the device's events: {e}; Linux 5.3 and rdma-core 25 or newer are needed")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_device_lacks_is_named() {
        let full = Capabilities { rc: true, atomics: true, ..Capabilities::default() };
        assert_eq!(check(&full, ReliableDoorbell::IfPossible), Ok(()));
        let why = check(&Capabilities { atomics: false, rc: false, ..full }, ReliableDoorbell::Off);
        let why = why.expect_err("it lacks two");
        assert!(why.contains("(rc), no atomic operations (atomic)") && why.contains("ConnectX-6 Dx"), "{why}");
        let why = check(&full, ReliableDoorbell::On).expect_err("it needs records");
        assert!(why.contains("send_dbr_mode_no_dbr_ext") && why.contains("NCCL_GDAKI_USE_RELIABLE_DB"), "{why}");
    }

    #[test]
    fn records_are_left_out_where_that_is_asked_for_and_possible() {
        use ReliableDoorbell::*;
        for (asked, most, chosen) in [
            (Off, 64, DoorbellMode::Record),
            (IfPossible, 0, DoorbellMode::Record),
            (IfPossible, 32, DoorbellMode::Record),
            (IfPossible, 64, DoorbellMode::NoRecord),
            (On, 32, DoorbellMode::NoRecord),
        ] {
            let capabilities = Capabilities { no_record_slots: most, ..Capabilities::default() };
            assert_eq!(mode(&capabilities, asked, 64), chosen);
        }
    }
}
