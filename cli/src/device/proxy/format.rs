//! Which layouts device code of which NCCL uses.

use crate::plugin::Kind;
use nccl_plugin_api::descriptor::Form;
use nccl_plugin_api::device_context::{ContextV1, ContextV2, ContextV3};

/// How descriptors are written and contexts are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    form: Form,
    version: u8,
    element: usize,
}

impl Format {
    /// The layouts of device code that uses this table: 64-byte descriptors for GIN v12 (NCCL 2.29.7), 128-byte ones of
    /// version 1 for GIN v13 (2.30.3), of version 2 for GIN v14. `None` for tables that cannot own a queue.
    pub fn of(kind: Kind) -> Option<Self> {
        let (form, version, element) = match kind {
            Kind::GinV12 => (Form::Bytes64, 0, size_of::<ContextV1>()),
            Kind::GinV13 => (Form::Bytes128, 1, size_of::<ContextV1>()),
            Kind::GinV14 => (Form::Bytes128, 2, size_of::<ContextV3>()),
            _ => return None,
        };
        Some(Self { form, version, element })
    }

    /// The same with contexts of `bytes` bytes: 48, 72 or 80. Version 2 of descriptors came with those of 72.
    pub fn with_element(self, bytes: usize) -> Option<Self> {
        let version = match (self.form, bytes) {
            (Form::Bytes64, _) => 0,
            (Form::Bytes128, 48) => 1,
            (Form::Bytes128, _) => 2,
        };
        [48, 72, 80].contains(&bytes).then_some(Self { version, element: bytes, ..self })
    }

    /// [`Format::of`], and [`Format::with_element`] where the environment variable `OXYGIN_DEVICE_LAYOUT` asks for it,
    /// as the plugin will do.
    pub fn from_env(kind: Kind) -> Result<Option<Self>, String> {
        let Some(format) = Self::of(kind) else { return Ok(None) };
        let Ok(text) = std::env::var("OXYGIN_DEVICE_LAYOUT") else { return Ok(Some(format)) };
        match text.trim().parse().ok().and_then(|bytes| format.with_element(bytes)) {
            Some(format) => Ok(Some(format)),
            None => Err(format!("OXYGIN_DEVICE_LAYOUT={text}: contexts have 48, 72 or 80 bytes")),
        }
    }

    /// The form of descriptors.
    pub fn form(self) -> Form {
        self.form
    }

    /// The version that descriptors name.
    pub fn version(self) -> u8 {
        self.version
    }

    /// Bytes of a context in the array.
    pub fn element(self) -> usize {
        self.element
    }

    /// Signals are reset by an offset, and gets are counted (NCCL 2.30.7 and later).
    pub fn has_offsets(self) -> bool {
        self.element >= size_of::<ContextV2>()
    }

    /// Gets and flushes exist.
    pub fn has_gets(self) -> bool {
        self.form == Form::Bytes128
    }

    /// Signals may be weak.
    pub fn has_weak_signals(self) -> bool {
        self.version >= 2
    }

    /// The backendVersion that asks GIN v14 for this layout: 1 or 2.
    pub fn backend_version(self) -> i32 {
        1 + i32::from(self.has_offsets())
    }
}
