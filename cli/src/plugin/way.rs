//! Ways into a plugin: the calls of a table, or the queue behind its device handle.

use super::Kind;
use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

/// oxygin's variable for who drains what device code writes.
const ENGINE: &str = "OXYGIN_ENGINE";

/// What is driven, and how operations go in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Way {
    /// The table.
    pub kind: Kind,
    /// Descriptors into the queue that the plugin itself owns, as device code writes them; else calls.
    pub queue: bool,
}

impl From<Kind> for Way {
    fn from(kind: Kind) -> Self {
        Self { kind, queue: false }
    }
}

impl Way {
    /// The tables whose plugin may own the queue, by that queue.
    pub const QUEUES: [Self; 3] = [
        Self { kind: Kind::GinV12, queue: true },
        Self { kind: Kind::GinV13, queue: true },
        Self { kind: Kind::GinV14, queue: true },
    ];

    /// The name users type: `gin-v14`, `gin-v14-queue`.
    pub fn label(self) -> &'static str {
        match (self.queue, self.kind) {
            (false, kind) => kind.label(),
            (true, Kind::GinV12) => "gin-v12-queue",
            (true, Kind::GinV13) => "gin-v13-queue",
            (true, Kind::GinV14) => "gin-v14-queue",
            (true, _) => "no queue",
        }
    }

    /// Has oxygin let operations in this way from its next `init` on, unless the environment says who drains the queue
    /// of device code. Another plugin does not know the variable.
    pub fn ask_for(self) {
        static IS_SAID: OnceLock<bool> = OnceLock::new();
        if !IS_SAID.get_or_init(|| std::env::var_os(ENGINE).is_some()) {
            std::env::set_var(ENGINE, if self.queue { "own" } else { "nccl" });
        }
    }

    /// Puts and signals exist.
    pub fn has_data_operations(self) -> bool {
        self.queue || self.kind.has_data_operations()
    }

    /// Gets and flushes exist.
    pub fn has_gets(self) -> bool {
        self.kind.has_gets() || (self.queue && self.kind == Kind::GinV14)
    }

    /// The sender chooses between strong and weak signals; elsewhere all are strong.
    pub fn has_weak_signals(self) -> bool {
        self.kind.has_weak_signals() || (self.queue && self.kind == Kind::GinV14)
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.label())
    }
}

impl FromStr for Way {
    type Err = String;

    /// Takes what [`Kind`] takes, and that with `-queue` behind it.
    fn from_str(s: &str) -> Result<Self, String> {
        let lower = s.to_ascii_lowercase();
        let Some(table) = lower.strip_suffix("queue") else { return Ok(s.parse::<Kind>()?.into()) };
        let kind = table.trim_end_matches(['-', '_', ' ']).parse()?;
        Self::QUEUES.into_iter().find(|way| way.kind == kind).ok_or_else(|| {
            let queues = Self::QUEUES.map(Self::label).join(", ");
            format!("{kind} has no queue that a plugin may own; those that have are {queues}")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_leads_to_its_way() {
        for way in Kind::ALL.into_iter().map(Way::from).chain(Way::QUEUES) {
            assert_eq!(way.label().parse(), Ok(way));
        }
        assert_eq!("GIN14_queue".parse(), Ok(Way { kind: Kind::GinV14, queue: true }));
        assert!("rma-v16-queue".parse::<Way>().expect_err("no queue").contains("gin-v12-queue"));
        assert!("queue".parse::<Way>().is_err());
    }

    #[test]
    fn a_queue_moves_data_where_the_table_has_no_calls_for_it() {
        let [v12, v13, v14] = Way::QUEUES;
        assert!(v14.has_data_operations() && !Way::from(Kind::GinV14).has_data_operations());
        assert_eq!([v12, v13, v14].map(Way::has_gets), [false, true, true]);
        assert_eq!([v12, v13, v14].map(Way::has_weak_signals), [false, false, true]);
    }
}
