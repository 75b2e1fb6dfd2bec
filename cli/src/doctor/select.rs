//! NCCL's list syntax for devices: `mlx5_0,mlx5_2`, `^mlx4`, `=mlx5_0:1`.

/// A parsed `NCCL_IB_HCA`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    exclude: bool,
    exact: bool,
    entries: Vec<(String, Option<u16>)>,
}

impl Choice {
    /// Reads the value.
    pub fn parse(value: &str) -> Self {
        let (exclude, rest) = value.strip_prefix('^').map_or((false, value), |r| (true, r));
        let (exact, rest) = rest.strip_prefix('=').map_or((false, rest), |r| (true, r));
        let entry = |text: &str| match text.split_once(':') {
            Some((name, port)) => (name.to_owned(), port.parse().ok()),
            _ => (text.to_owned(), None),
        };
        let entries = rest.split(',').filter(|e| !e.is_empty()).map(entry).collect();
        Self { exclude, exact, entries }
    }

    /// Whether the name (and port) is chosen.
    pub fn takes(&self, name: &str, port: Option<u16>) -> bool {
        let hit = |(want, at): &(String, Option<u16>)| {
            let named = if self.exact { name == want } else { name.starts_with(want.as_str()) };
            named && (at.is_none() || port.is_none() || *at == port)
        };
        self.entries.is_empty() || self.entries.iter().any(hit) != self.exclude
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_exclusion_exactness_and_ports() {
        let takes = |value, name, port| Choice::parse(value).takes(name, port);
        assert!(takes("eth", "eth1", None));
        assert!(!takes("=eth", "eth1", None));
        assert!(!takes("^eth", "eth1", None));
        assert!(takes("^=eth", "eth1", None));
        assert!(takes("mlx5_0:1,mlx5_2", "mlx5_2", Some(2)));
        assert!(!takes("mlx5_0:1", "mlx5_0", Some(2)));
        assert!(takes("", "lo", None));
    }
}
