//! A plugin library, loaded by path as NCCL loads it, and its tables behind one abstraction.

mod kind;
pub mod library;
pub mod log;
mod raw;
mod table;
mod types;
mod way;

pub use kind::Kind;
pub use table::Table;
pub use types::*;
pub use way::{Via, Way};

use libloading::Library;
use raw::Raw;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A library that could not be loaded or lacks what was asked for. The text says what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadError(String);

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for LoadError {}

/// A loaded plugin library. The library is unloaded when this object and every [`Table`] of it are gone.
pub struct Plugin {
    path: PathBuf,
    tables: Vec<Table>,
    _library: Arc<Library>,
}

impl Plugin {
    /// Loads the library at `path` (or, without a `/` in it, wherever the dynamic linker finds it) and looks up all
    /// eight tables. No function of a table is called yet.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, LoadError> {
        let path = path.as_ref().to_path_buf();
        // SAFETY: loading runs the library's constructors: that is what the user asked for.
        let library = unsafe { Library::new(&path) }.map_err(|e| {
            let (name, not_here) = (path.display(), library::not_here(&path));
            LoadError(format!("cannot load {name}: {}; give the path of a plugin library{not_here}", cause(&e)))
        })?;
        let library = Arc::new(library);
        let tables: Vec<_> = Kind::ALL
            .into_iter()
            .filter_map(|kind| {
                // SAFETY: the symbol's name says which structure it is.
                let raw = unsafe { read(&library, kind) }?;
                Some(Table::new(kind, raw, library.clone()))
            })
            .collect();
        if tables.is_empty() {
            return Err(LoadError(format!(
                "{} exports none of the tables ncclGinPlugin_v11 to v14 and ncclRmaPlugin_v13 to v16: it is no \
                 GIN or RMA plugin",
                path.display()
            )));
        }
        Ok(Self { path, tables, _library: library })
    }

    /// The path it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The tables that the library exports, oldest first, GIN before RMA.
    pub fn tables(&self) -> &[Table] {
        &self.tables
    }

    /// One table.
    pub fn table(&self, kind: Kind) -> Result<&Table, LoadError> {
        self.tables.iter().find(|t| t.kind() == kind).ok_or_else(|| {
            let there: Vec<_> = self.tables.iter().map(|t| t.kind().label()).collect();
            LoadError(format!("{} has no table {kind}; it has {}", self.path.display(), there.join(", ")))
        })
    }

    /// The newest table with data operations, RMA before GIN.
    pub fn newest(&self) -> Result<&Table, LoadError> {
        self.tables.iter().rev().find(|t| t.kind().has_data_operations()).ok_or_else(|| {
            LoadError(format!(
                "{} has only set-up tables (ncclGinPlugin_v14): nothing to move data with",
                self.path.display()
            ))
        })
    }
}

/// The linker's own sentence, which libloading hides behind "dlopen failed".
fn cause(error: &libloading::Error) -> String {
    match std::error::Error::source(error) {
        Some(source) => source.to_string(),
        None => error.to_string(),
    }
}

/// Copies one table out of the library; `None` if it is not there.
///
/// # Safety
/// Exported symbols of these names have these types.
unsafe fn read(library: &Library, kind: Kind) -> Option<Raw> {
    macro_rules! copy {
        ($variant:ident) => {{
            // SAFETY: as the caller promises; the address of an exported object is never NULL here because the
            // symbol is looked up as the object itself.
            let symbol = unsafe { library.get::<*const _>(kind.symbol().to_bytes_with_nul()) }.ok()?;
            // SAFETY: as above; tables are plain data, complete once the library is loaded.
            Raw::$variant(unsafe { std::ptr::read(*symbol) })
        }};
    }
    Some(match kind {
        Kind::GinV11 => copy!(GinV11),
        Kind::GinV12 => copy!(GinV12),
        Kind::GinV13 => copy!(GinV13),
        Kind::GinV14 => copy!(GinV14),
        Kind::RmaV13 => copy!(RmaV13),
        Kind::RmaV14 => copy!(RmaV14),
        Kind::RmaV15 => copy!(RmaV15),
        Kind::RmaV16 => copy!(RmaV16),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_file_and_a_foreign_library_are_told_apart() {
        let missing = Plugin::open("/nonexistent/libplugin.so").err().expect("no such file").to_string();
        assert!(missing.contains("/nonexistent/libplugin.so") && missing.contains("cannot load"), "{missing}");
        let foreign = Plugin::open("libm.so.6").err().expect("libm is no plugin").to_string();
        assert!(foreign.contains("none of the tables"), "{foreign}");
    }
}
