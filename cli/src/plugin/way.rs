//! Ways into a plugin: the calls of a table, or what is behind its device handle.

use super::Kind;
use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

/// oxygin's variable for who drains what device code writes.
const ENGINE: &str = "OXYGIN_ENGINE";

/// How operations go in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Via {
    /// Calls of the table.
    Calls,
    /// Descriptors into the queue that the plugin itself owns, as proxy device code writes them.
    Queue,
    /// Entries into queue pairs, as GDAKI device code of this NCCL writes them.
    Gdaki(&'static str),
}

/// What is driven, and how operations go in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Way {
    /// The table.
    pub kind: Kind,
    /// How operations go in.
    pub via: Via,
}

impl From<Kind> for Way {
    fn from(kind: Kind) -> Self {
        Self { kind, via: Via::Calls }
    }
}

/// By device code, and the names that users type.
const DEVICE_CODE: [(&str, Way); 9] = [
    ("gin-v12-queue", queue(Kind::GinV12)),
    ("gin-v13-queue", queue(Kind::GinV13)),
    ("gin-v14-queue", queue(Kind::GinV14)),
    ("gin-v12-gdaki", gdaki(Kind::GinV12, "2.29.7")),
    ("gin-v13-gdaki", gdaki(Kind::GinV13, "2.30.4")),
    ("gin-v14-gdaki", gdaki(Kind::GinV14, "2.32.3")),
    ("gin-v14-gdaki-2.30.4", gdaki(Kind::GinV14, "2.30.4")),
    ("gin-v14-gdaki-2.30.7", gdaki(Kind::GinV14, "2.30.7")),
    ("gin-v14-gdaki-2.31.2", gdaki(Kind::GinV14, "2.31.2")),
];

const fn queue(kind: Kind) -> Way {
    Way { kind, via: Via::Queue }
}

const fn gdaki(kind: Kind, nccl: &'static str) -> Way {
    Way { kind, via: Via::Gdaki(nccl) }
}

impl Way {
    /// The ways by device code, each table once for either kind: with the newest NCCL that uses it.
    pub fn by_device_code() -> impl Iterator<Item = Self> {
        DEVICE_CODE.into_iter().take(6).map(|(_, way)| way)
    }

    /// The name users type: `gin-v14`, `gin-v14-queue`, `gin-v14-gdaki`.
    pub fn label(self) -> &'static str {
        let known = DEVICE_CODE.into_iter().find(|(_, way)| *way == self);
        match (self.via, known) {
            (Via::Calls, _) => self.kind.label(),
            (_, Some((label, _))) => label,
            (_, None) => "no queue",
        }
    }

    /// Operations go in by device code.
    pub fn is_by_device_code(self) -> bool {
        self.via != Via::Calls
    }

    /// By entries for a NIC.
    pub fn is_gdaki(self) -> bool {
        matches!(self.via, Via::Gdaki(_))
    }

    /// Has oxygin let operations in this way from its next `init` on, unless the environment says who drains the queue
    /// of device code. Another plugin does not know the variable.
    pub fn ask_for(self) {
        static IS_SAID: OnceLock<bool> = OnceLock::new();
        if !IS_SAID.get_or_init(|| std::env::var_os(ENGINE).is_some()) {
            let engine = match self.via {
                Via::Calls => "nccl",
                Via::Queue => "own",
                Via::Gdaki(_) => "gdaki-soft",
            };
            std::env::set_var(ENGINE, engine);
        }
    }

    /// Puts and signals exist.
    pub fn has_data_operations(self) -> bool {
        self.is_by_device_code() || self.kind.has_data_operations()
    }

    /// Gets and flushes exist.
    pub fn has_gets(self) -> bool {
        self.kind.has_gets() || (self.is_by_device_code() && self.kind == Kind::GinV14)
    }

    /// The sender chooses between strong and weak signals; elsewhere all are strong.
    pub fn has_weak_signals(self) -> bool {
        self.kind.has_weak_signals() || (self.via == Via::Queue && self.kind == Kind::GinV14)
    }

    /// Contexts may be for some peers only. Device code of 2.30.4 flushes all of them by an entry.
    pub fn has_stride(self) -> bool {
        self.kind == Kind::GinV14 && self.via != Via::Gdaki("2.30.4")
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.label())
    }
}

impl FromStr for Way {
    type Err = String;

    /// Takes what [`Kind`] takes, and that with `-queue` or `-gdaki` behind it, the latter with an NCCL behind that.
    fn from_str(s: &str) -> Result<Self, String> {
        let lower = s.to_ascii_lowercase();
        let Some(at) = lower.find("queue").or(lower.find("gdaki")) else { return Ok(s.parse::<Kind>()?.into()) };
        let (table, via) = lower.split_at(at);
        let kind: Kind = table.trim_end_matches(['-', '_', ' ']).parse()?;
        let label = format!("{}-{}", kind.label(), via.replace('_', "-"));
        DEVICE_CODE.into_iter().find(|(known, _)| *known == label).map(|(_, way)| way).ok_or_else(|| {
            let all = DEVICE_CODE.map(|(label, _)| label).join(", ");
            format!("{kind} has no {via} that a plugin may own; those that have are {all}")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_leads_to_its_way() {
        for way in Kind::ALL.into_iter().map(Way::from).chain(DEVICE_CODE.map(|(_, way)| way)) {
            assert_eq!(way.label().parse(), Ok(way));
        }
        assert_eq!("GIN14_queue".parse(), Ok(queue(Kind::GinV14)));
        assert_eq!("gin14_gdaki_2.30.7".parse(), Ok(gdaki(Kind::GinV14, "2.30.7")));
        for bad in ["rma-v16-queue", "rma-v16-gdaki", "gin-v14-gdaki-2.29.7", "gin-v11-gdaki"] {
            assert!(bad.parse::<Way>().expect_err("no queue").contains("gin-v12-queue"), "{bad}");
        }
        assert!("queue".parse::<Way>().is_err());
        let kinds = Way::by_device_code().map(|way| way.kind).collect::<Vec<_>>();
        assert_eq!(kinds, [Kind::GinV12, Kind::GinV13, Kind::GinV14].repeat(2));
    }

    #[test]
    fn device_code_moves_data_where_the_table_has_no_calls_for_it() {
        let all: Vec<Way> = Way::by_device_code().collect();
        assert!(all.iter().all(|way| way.has_data_operations()));
        assert!(!Way::from(Kind::GinV14).has_data_operations());
        let with = |f: fn(Way) -> bool| all.iter().map(|way| f(*way)).collect::<Vec<_>>();
        assert_eq!(with(Way::has_gets), [false, true, true, false, true, true]);
        assert_eq!(with(Way::has_weak_signals), [false, false, true, false, false, false]);
        assert_eq!(with(Way::has_stride), [false, false, true, false, false, true]);
    }
}
