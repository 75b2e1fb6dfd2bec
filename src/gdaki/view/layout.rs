//! Which structures device code reads, by the table that NCCL loaded, what it asks for, and its own version.

use crate::error::{Error, Result};
use crate::proxy::descriptor::layout::{NcclVersion, Table, FIRST_UNKNOWN};
use nccl_plugin_api::gdaki::context_v1::ContextV1;
use nccl_plugin_api::gdaki::context_v2::ContextV2;
use nccl_plugin_api::gdaki::queue_pair_v1::{self, QueuePairV1};
use nccl_plugin_api::gdaki::queue_pair_v2::{self, QueuePairV2};
use std::ffi::c_int;

/// What one NCCL's device code reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// NCCL 2.29.7: contexts of 72 bytes, queue pairs of 280.
    V1,
    /// Kernels compiled with NCCL 2.30.3 and 2.30.4: contexts of 72 bytes, queue pairs of 296.
    V2,
    /// Kernels compiled with NCCL 2.30.5 to 2.32: contexts of 88 bytes, queue pairs of 296.
    V3,
}

impl Layout {
    /// What device code reads, or why this library does not know it.
    ///
    /// `nccl` is what `comm::nccl` found. Where that is `None` (a program that is no NCCL, or has NCCL linked
    /// into it statically) the table and `backendVersion` decide alone.
    pub fn choose(table: Table, nccl: Option<NcclVersion>) -> Result<Self> {
        let is_within = |first: NcclVersion, end: NcclVersion| nccl.is_none_or(|v| (first..end).contains(&v));
        match table {
            Table::V12 if is_within(22_907, 23_000) => Ok(Self::V1),
            Table::V13 if is_within(23_003, 23_005) => Ok(Self::V2),
            Table::V14(1) if is_within(23_005, FIRST_UNKNOWN) => Ok(Self::V2),
            Table::V14(2) if is_within(23_005, FIRST_UNKNOWN) => Ok(Self::V3),
            Table::V14(0) => Err(Error::usage(format!(
                "backendVersion = 0: the program's kernels were compiled with headers of an NCCL older than 2.30.3, \
                 whose GDAKI queues {} does not have any more: compile them with newer headers",
                Seen(nccl)
            ))),
            _ => {
                let asked = match table {
                    Table::V12 => "GIN v12".into(),
                    Table::V13 => "GIN v13".into(),
                    Table::V14(backend) => format!("GIN v14 with backendVersion = {backend}"),
                };
                Err(Error::usage(format!(
                    "{} asks through {asked}; the GDAKI structures known are those of NCCL 2.29.7 (v12), 2.30.3 and \
                     2.30.4 (v13), and 2.30.7 to 2.32 (v14, backendVersion 1 and 2): use a newer oxygin, or \
                     OXYGIN_ENGINE=own or nccl with kernels that are compiled for the proxy backend too",
                    Seen(nccl)
                )))
            }
        }
    }

    /// Bytes of a context in the array.
    pub fn context_bytes(self) -> usize {
        match self {
            Self::V1 | Self::V2 => size_of::<ContextV1>(),
            Self::V3 => size_of::<ContextV2>(),
        }
    }

    /// Bytes of a queue pair in its array.
    pub fn queue_pair_bytes(self) -> usize {
        match self {
            Self::V1 => size_of::<QueuePairV1>(),
            Self::V2 | Self::V3 => size_of::<QueuePairV2>(),
        }
    }

    /// For `DeviceHandle::net_device_version`.
    pub fn net_device_version(self) -> c_int {
        match self {
            Self::V1 => queue_pair_v1::VERSION,
            Self::V2 | Self::V3 => queue_pair_v2::VERSION,
        }
    }

    /// Whether device code notes its gets by peer, so that flushes without a get before them cost nothing.
    pub fn notes_gets(self) -> bool {
        self == Self::V3
    }
}

/// NCCL's version as people write it.
struct Seen(Option<NcclVersion>);

impl std::fmt::Display for Seen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Some(v) => write!(f, "NCCL {}.{}.{}", v / 10_000, v / 100 % 100, v % 100),
            None => write!(f, "an NCCL of unknown version"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_nccl_gets_its_own() {
        for (table, nccl, layout, context, queue_pair, version) in [
            (Table::V12, Some(22_907), Layout::V1, 72, 280, 100),
            (Table::V12, None, Layout::V1, 72, 280, 100),
            (Table::V13, Some(23_003), Layout::V2, 72, 296, 200),
            (Table::V13, Some(23_004), Layout::V2, 72, 296, 200),
            (Table::V14(1), Some(23_007), Layout::V2, 72, 296, 200),
            (Table::V14(2), Some(23_007), Layout::V3, 88, 296, 200),
            (Table::V14(2), Some(23_102), Layout::V3, 88, 296, 200),
            (Table::V14(1), Some(23_203), Layout::V2, 72, 296, 200),
            (Table::V14(2), Some(23_203), Layout::V3, 88, 296, 200),
            (Table::V14(2), None, Layout::V3, 88, 296, 200),
        ] {
            let chosen = Layout::choose(table, nccl).unwrap();
            assert_eq!(chosen, layout, "{table:?} {nccl:?}");
            assert_eq!((chosen.context_bytes(), chosen.queue_pair_bytes()), (context, queue_pair));
            assert_eq!((chosen.net_device_version(), chosen.notes_gets()), (version, context == 88));
        }
    }

    #[test]
    fn what_is_not_known_is_refused_with_what_was_seen_and_a_remedy() {
        for (table, nccl, seen) in [
            (Table::V12, Some(22_903), ["NCCL 2.29.3 ", "GIN v12;", "2.29.7"]),
            (Table::V12, Some(23_004), ["NCCL 2.30.4 ", "GIN v12;", "2.29.7"]),
            (Table::V13, Some(22_907), ["NCCL 2.29.7 ", "GIN v13;", "OXYGIN_ENGINE=own"]),
            (Table::V13, Some(23_203), ["NCCL 2.32.3 ", "GIN v13;", "OXYGIN_ENGINE=own"]),
            (Table::V14(2), Some(23_004), ["NCCL 2.30.4 ", "backendVersion = 2", "OXYGIN_ENGINE=own"]),
            (Table::V14(2), Some(23_300), ["NCCL 2.33.0 ", "backendVersion = 2", "newer oxygin"]),
            (Table::V14(1), Some(30_000), ["NCCL 3.0.0 ", "backendVersion = 1", "newer oxygin"]),
            (Table::V14(3), Some(23_203), ["NCCL 2.32.3 ", "backendVersion = 3", "newer oxygin"]),
            (Table::V14(-1), None, ["unknown version", "backendVersion = -1", "newer oxygin"]),
            (Table::V14(0), Some(23_007), ["NCCL 2.30.7 ", "backendVersion = 0", "compile them"]),
        ] {
            let refused = Layout::choose(table, nccl).unwrap_err();
            for part in seen {
                assert!(refused.message().contains(part), "{table:?} {nccl:?}: {refused}");
            }
        }
    }
}
