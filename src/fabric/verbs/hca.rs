//! `NCCL_IB_HCA`: which devices and ports may be used, in NCCL's syntax.
//!
//! A comma-separated list of `name[:port]`, names taken as prefixes. In front of the list `^` means all but these and
//! `=` means names are whole, in this order (`^=`). NCCL's further fields (`:port:rail:plane`) are read over.

/// A parsed `NCCL_IB_HCA`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HcaFilter {
    exclude: bool,
    exact: bool,
    entries: Vec<Entry>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    name: String,
    port: Option<i64>,
}

impl HcaFilter {
    /// Parses the variable's value; an empty list allows everything.
    pub fn parse(value: &str) -> Self {
        let (exclude, value) = strip(value, '^');
        let (exact, value) = strip(value, '=');
        let entries = value
            .split(',')
            .filter_map(|entry| {
                let mut fields = entry.split(':');
                let name = fields.next().filter(|n| !n.is_empty())?.to_owned();
                // NCCL reads ports with atoi, for which -1 and nothing mean any port and text means 0.
                let port = fields.next().filter(|p| !p.is_empty()).map(|p| p.trim().parse().unwrap_or(0));
                Some(Entry { name, port: port.filter(|&p| p != -1) })
            })
            .collect();
        Self { exclude, exact, entries }
    }

    /// Whether `port` of device `name` may be used.
    pub fn allows(&self, name: &str, port: u8) -> bool {
        // NCCL's list matcher answers "yes" to an empty list, which the `^` then turns round; a bare `^` there means no
        // device at all. Here it means no restriction, as an unset variable does.
        if self.entries.is_empty() {
            return true;
        }
        let listed = self.entries.iter().any(|e| {
            let named = if self.exact { name == e.name } else { name.starts_with(&e.name) };
            named && e.port.is_none_or(|p| p == i64::from(port))
        });
        listed != self.exclude
    }
}

fn strip(value: &str, mark: char) -> (bool, &str) {
    match value.strip_prefix(mark) {
        Some(rest) => (true, rest),
        None => (false, value),
    }
}

#[cfg(test)]
mod tests {
    use super::HcaFilter;

    #[test]
    fn lists_mean_what_they_mean_in_nccl() {
        let table = [
            ("", "mlx5_0", 1, true),
            ("mlx5", "mlx5_0", 1, true),
            ("mlx5_1", "mlx5_10", 2, true),
            ("=mlx5_1", "mlx5_10", 2, false),
            ("=mlx5_1", "mlx5_1", 2, true),
            ("mlx5_0:1", "mlx5_0", 1, true),
            ("mlx5_0:1", "mlx5_0", 2, false),
            ("^mlx5_0:1", "mlx5_0", 2, true),
            ("^mlx5_0", "mlx5_0", 2, false),
            ("^=mlx5_0", "mlx5_01", 1, true),
            ("^mlx5_3,rxe", "rxe0", 1, false),
            ("^mlx5_3,rxe", "mlx5_0", 1, true),
            ("mlx5_0,,mlx5_2:", "mlx5_2", 7, true),
            ("mlx5_0:1:0:3", "mlx5_0", 1, true),
            (":1", "mlx5_0", 1, true),
            ("mlx5_0:x", "mlx5_0", 1, false),
        ];
        for (list, name, port, allowed) in table {
            assert_eq!(HcaFilter::parse(list).allows(name, port), allowed, "{list:?} {name}:{port}");
        }
    }
}
