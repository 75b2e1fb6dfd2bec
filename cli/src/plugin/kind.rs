//! The eight table versions and what each can do.

use std::ffi::CStr;
use std::fmt;
use std::str::FromStr;

/// A table version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// `ncclGinPlugin_v11`.
    GinV11,
    /// `ncclGinPlugin_v12`.
    GinV12,
    /// `ncclGinPlugin_v13`.
    GinV13,
    /// `ncclGinPlugin_v14`: set-up only.
    GinV14,
    /// `ncclRmaPlugin_v13`.
    RmaV13,
    /// `ncclRmaPlugin_v14`.
    RmaV14,
    /// `ncclRmaPlugin_v15`.
    RmaV15,
    /// `ncclRmaPlugin_v16`.
    RmaV16,
}

impl Kind {
    /// All, oldest first; the last one with data operations is what tools take when nobody chooses.
    pub const ALL: [Self; 8] = [
        Self::GinV11,
        Self::GinV12,
        Self::GinV13,
        Self::GinV14,
        Self::RmaV13,
        Self::RmaV14,
        Self::RmaV15,
        Self::RmaV16,
    ];

    /// The exported symbol.
    pub fn symbol(self) -> &'static CStr {
        use nccl_plugin_api as api;
        match self {
            Self::GinV11 => api::gin_v11::SYMBOL,
            Self::GinV12 => api::gin_v12::SYMBOL,
            Self::GinV13 => api::gin_v13::SYMBOL,
            Self::GinV14 => api::gin_v14::SYMBOL,
            Self::RmaV13 => api::rma_v13::SYMBOL,
            Self::RmaV14 => api::rma_v14::SYMBOL,
            Self::RmaV15 => api::rma_v15::SYMBOL,
            Self::RmaV16 => api::rma_v16::SYMBOL,
        }
    }

    /// The name users type: `gin-v11` … `rma-v16`.
    pub fn label(self) -> &'static str {
        match self {
            Self::GinV11 => "gin-v11",
            Self::GinV12 => "gin-v12",
            Self::GinV13 => "gin-v13",
            Self::GinV14 => "gin-v14",
            Self::RmaV13 => "rma-v13",
            Self::RmaV14 => "rma-v14",
            Self::RmaV15 => "rma-v15",
            Self::RmaV16 => "rma-v16",
        }
    }

    /// Puts and signals exist.
    pub fn has_data_operations(self) -> bool {
        self != Self::GinV14
    }

    /// `iget` and `iflush` exist.
    pub fn has_gets(self) -> bool {
        self.has_data_operations() && self >= Self::GinV13
    }

    /// Operations and progress are addressed to the communicator (v11, v12) instead of the context.
    pub fn operations_name_comm(self) -> bool {
        self <= Self::GinV12
    }

    /// More than one context can exist (v11 has one).
    pub fn has_contexts(self) -> bool {
        self != Self::GinV11
    }

    /// The caller chooses between strong and weak signals; elsewhere all are strong.
    pub fn has_weak_signals(self) -> bool {
        self >= Self::RmaV14
    }

    /// Operations carry `OPT_*` flags.
    pub fn has_opt_flags(self) -> bool {
        self >= Self::RmaV15
    }

    /// `regMrSym` also gives a handle for device code.
    pub fn has_gin_handles(self) -> bool {
        self <= Self::RmaV13
    }

    /// `createContext` takes a place for a device handle.
    pub fn has_device_handle(self) -> bool {
        self.has_gin_handles()
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.label())
    }
}

impl FromStr for Kind {
    type Err = String;

    /// Takes `rma-v16`, `rma16`, `RMA_V16` and the symbol's name.
    fn from_str(s: &str) -> Result<Self, String> {
        let plain = |s: &str| -> String {
            s.to_ascii_lowercase().replace("nccl", "").replace("plugin", "").replace(['-', '_', 'v', ' '], "")
        };
        Self::ALL.into_iter().find(|k| plain(k.label()) == plain(s)).ok_or_else(|| {
            let all: Vec<_> = Self::ALL.iter().map(|k| k.label()).collect();
            format!("no table is called {s:?}; the tables are {}", all.join(", "))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_spelling_leads_to_its_table() {
        for kind in Kind::ALL {
            assert_eq!(kind.label().parse(), Ok(kind));
            assert_eq!(kind.symbol().to_str().expect("ASCII").parse(), Ok(kind));
            assert_eq!(kind.label().replace("-v", "").parse(), Ok(kind));
        }
        assert!("rma-v17".parse::<Kind>().expect_err("unknown").contains("rma-v16"));
    }

    #[test]
    fn capabilities_follow_the_versions() {
        let with = |f: fn(Kind) -> bool| Kind::ALL.into_iter().filter(|&k| f(k)).collect::<Vec<_>>();
        use Kind::*;
        assert_eq!(with(Kind::has_gets), [GinV13, RmaV13, RmaV14, RmaV15, RmaV16]);
        assert_eq!(with(Kind::operations_name_comm), [GinV11, GinV12]);
        assert_eq!(with(Kind::has_weak_signals), [RmaV14, RmaV15, RmaV16]);
        assert_eq!(with(Kind::has_opt_flags), [RmaV15, RmaV16]);
        assert_eq!(with(Kind::has_gin_handles), [GinV11, GinV12, GinV13, GinV14, RmaV13]);
    }
}
