//! A folder that only this user can look into, for a socket that no filter guards.

use crate::error::{Error, Result};
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;

/// What the socket is called in it.
const NAME: &str = "contact";

/// A folder of this process, gone with this value. (A killed process leaves it behind, empty but for a dead socket.)
#[derive(Debug)]
pub struct PrivateFolder {
    folder: PathBuf,
    owner: u32,
}

impl PrivateFolder {
    /// Makes a folder called `name`, which nobody has used before, where temporary files go.
    pub fn make(name: &str) -> Result<Self> {
        let folder = std::env::temp_dir().join(name);
        // The mode comes with the folder: there is no moment in which others could look in.
        DirBuilder::new().mode(0o700).create(&folder).map_err(|e| {
            Error::system(format!(
                "making the folder {} failed: {e}; this kernel filters no Unix sockets, so one that others cannot \
                 reach is needed: set TMPDIR to a folder that can be written",
                folder.display()
            ))
        })?;
        Ok(Self { folder, owner: std::process::id() })
    }

    /// Where the socket goes.
    pub fn socket(&self) -> PathBuf {
        self.folder.join(NAME)
    }
}

impl Drop for PrivateFolder {
    fn drop(&mut self) {
        // A forked child's copy is its parent's folder.
        if std::process::id() == self.owner {
            let _ = std::fs::remove_file(self.socket());
            let _ = std::fs::remove_dir(&self.folder);
        }
    }
}
