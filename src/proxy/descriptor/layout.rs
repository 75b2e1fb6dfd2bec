//! Which structures device code expects, by the table that NCCL loaded, its own version, and what it asks for.

use crate::error::{Error, Result};
use nccl_plugin_api::descriptor::Form;

/// What device code is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// How descriptors look.
    pub form: Form,
    /// Bytes of a context in the array: 48, 72 or 80.
    pub context_bytes: usize,
}

/// The GIN table whose createContext is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Table {
    /// Loaded by NCCL 2.29.7 alone.
    V12,
    /// Loaded by NCCL 2.30.3 and 2.30.4.
    V13,
    /// Loaded by NCCL 2.30.7 and newer, with this `backendVersion`.
    V14(i32),
}

/// Version of NCCL as `ncclGetVersion` gives it: 23203 is 2.32.3.
pub type NcclVersion = i32;

/// The first NCCL whose contexts have 80 bytes.
const FLUSHES_FIELD: NcclVersion = 23_200;
/// The first NCCL whose headers nobody has compared with the structures for device code that are known here: its
/// `backendVersion` may be the same and its structures others, as 2.32 has shown.
pub const FIRST_UNKNOWN: NcclVersion = 23_300;

impl Layout {
    const fn of(form: Form, context_bytes: usize) -> Self {
        Self { form, context_bytes }
    }

    /// What device code expects. `forced` is `OXYGIN_DEVICE_LAYOUT`: bytes of a context.
    ///
    /// `backendVersion` of a plugin that reports device type 3 counts the layouts of GDAKI, not those of the proxy: 1
    /// up to NCCL 2.30.4, 2 since. NCCL 2.32 added a field to the proxy's context without a step of that number, so
    /// its own version decides between 72 and 80 bytes, and an NCCL that is newer than the library may have added
    /// others. Who is no NCCL (`None`) is given the newest.
    pub fn choose(table: Table, nccl: Option<NcclVersion>, forced: Option<u32>) -> Result<Self> {
        let form = if table == Table::V12 { Form::Bytes64 } else { Form::Bytes128 };
        if let Some(bytes @ (48 | 72 | 80)) = forced {
            return Ok(Self::of(form, bytes as usize));
        }
        match table {
            Table::V12 | Table::V13 | Table::V14(1) => Ok(Self::of(form, 48)),
            Table::V14(2) if nccl.is_some_and(|version| version < FLUSHES_FIELD) => Ok(Self::of(form, 72)),
            Table::V14(2) if nccl.is_none_or(|version| version < FIRST_UNKNOWN) => Ok(Self::of(form, 80)),
            Table::V14(version) => Err(Error::usage(format!(
                "backendVersion = {version} of an NCCL {}: the device structures known are those of 1 and 2, \
                 up to NCCL 2.32; use a newer oxygin, set OXYGIN_DEVICE_LAYOUT to 48, 72 or 80 if a context has so \
                 many bytes there, or OXYGIN_ENGINE=nccl and NCCL_RMA_PLUGIN",
                nccl.map_or("of unknown version".into(), |v| v.to_string())
            ))),
        }
    }

    /// Whether device code resets signals by offsets, so that their memory only ever counts up.
    pub fn has_signal_offsets(self) -> bool {
        self.context_bytes > 48
    }
}

/// Slots of a queue for a depth that was asked for; 0 and negative: as many as NCCL's own proxy has.
pub fn queue_size(asked: i32) -> Result<u32> {
    const DEFAULT: u32 = 256;
    /// Device code computes `peer * queue_size` in 32 bits.
    const MOST: u32 = 1 << 15;
    match u32::try_from(asked) {
        Err(_) | Ok(0) => Ok(DEFAULT),
        Ok(depth) if depth <= MOST => Ok(depth.next_power_of_two()),
        Ok(depth) => Err(Error::argument(format!("queueDepth = {depth}; a queue has at most {MOST} entries"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_nccl_gets_its_own() {
        let layout = |table, nccl, forced| Layout::choose(table, nccl, forced).map(|l| (l.form, l.context_bytes));
        for (table, nccl, form, bytes) in [
            (Table::V12, Some(22_907), Form::Bytes64, 48),
            (Table::V13, Some(23_003), Form::Bytes128, 48),
            (Table::V13, Some(23_004), Form::Bytes128, 48),
            (Table::V14(1), Some(23_007), Form::Bytes128, 48),
            (Table::V14(2), Some(23_007), Form::Bytes128, 72),
            (Table::V14(2), Some(23_102), Form::Bytes128, 72),
            (Table::V14(2), Some(23_203), Form::Bytes128, 80),
            (Table::V14(1), Some(23_203), Form::Bytes128, 48),
            (Table::V14(2), None, Form::Bytes128, 80),
        ] {
            assert_eq!(layout(table, nccl, None).unwrap(), (form, bytes), "{table:?} {nccl:?}");
        }
        assert_eq!(layout(Table::V14(2), Some(23_203), Some(72)).unwrap(), (Form::Bytes128, 72));
        assert_eq!(layout(Table::V14(9), None, Some(80)).unwrap(), (Form::Bytes128, 80));
        assert_eq!(layout(Table::V14(2), Some(23_300), Some(80)).unwrap(), (Form::Bytes128, 80));
        for (table, nccl) in [(Table::V14(3), None), (Table::V14(3), Some(23_203)), (Table::V14(2), Some(23_300))] {
            let refused = Layout::choose(table, nccl, None).unwrap_err();
            assert!(refused.message().contains("OXYGIN_DEVICE_LAYOUT"), "{refused}");
        }
    }

    #[test]
    fn depths_are_rounded_up() {
        let sizes: Vec<_> = [-1, 0, 1, 2, 3, 193, 1024, 32768].map(|n| queue_size(n).unwrap()).into();
        assert_eq!(sizes, [256, 256, 1, 2, 4, 256, 1024, 32768]);
        assert!(queue_size(32769).is_err());
    }
}
