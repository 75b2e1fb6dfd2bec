//! Host memory between processes of one host: each rank owns an inbox in shared memory that its peers write messages
//! into; large transfers skip the inbox by cross-memory attach where the kernel allows that.

pub mod cma;
pub mod copy;
pub mod inbox;
pub mod message;
pub mod port;
mod positions;
pub mod ring;
pub mod withdraw;

#[cfg(test)]
mod tests {
    /// What a peer can write while it is looked at must not be behind a reference to plain bytes: not one that the
    /// language lets the compiler take for unchanging.
    #[test]
    fn no_slice_is_formed_over_what_peers_write() {
        let files = [
            ("inbox", include_str!("inbox.rs")),
            ("port", include_str!("port.rs")),
            ("ring", include_str!("ring.rs")),
            ("positions", include_str!("positions.rs")),
            ("status", include_str!("../status/mod.rs")),
            ("receive", include_str!("../receive.rs")),
            ("responses", include_str!("../link/responses.rs")),
        ];
        for (name, text) in files {
            for forms in ["from_raw_parts", "&*(", "&mut *", "&*self", "as_slice"] {
                assert!(!text.contains(forms), "{name}.rs has {forms}");
            }
        }
    }
}
