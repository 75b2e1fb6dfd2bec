//! Which library `--plugin` and `OXYGIN_PLUGIN` mean, for all tools: what the dynamic linker makes of the name, as NCCL
//! does of the names in its variables.

use crate::env::find::loads;
use std::path::{Path, PathBuf};

/// The name to load: what was asked for; else liboxygin.so beside this program or in `../lib`, else by the linker.
pub fn named(asked: Option<PathBuf>) -> PathBuf {
    asked.unwrap_or_else(|| {
        let here = std::env::current_exe().ok();
        let folder = here.as_deref().and_then(Path::parent);
        // Debian's packages have it in a folder of their own below that of the architecture.
        let in_package = format!("../lib/{}-linux-gnu/oxygin/liboxygin.so", std::env::consts::ARCH);
        let beside = folder.map(|f| ["liboxygin.so", "../lib/liboxygin.so", &in_package].map(|name| f.join(name)));
        let found = beside.into_iter().flatten().find(|p| p.exists());
        found.unwrap_or_else(|| PathBuf::from("liboxygin.so"))
    })
}

/// The file behind that name, with all links followed: names that are links may be changed while a program runs.
pub fn file(name: &Path) -> Result<PathBuf, String> {
    let found = loads(&name.display().to_string());
    found.map(PathBuf::from).map_err(|e| format!("{e}{}", not_here(name)))
}

/// What to add where a name leads nowhere: the linker does not look into the working directory for a name alone.
pub fn not_here(name: &Path) -> String {
    let is_bare = name.components().count() == 1 && name.is_file();
    let said = || format!("; the linker does not look here for a name alone: the file is ./{}", name.display());
    is_bare.then(said).unwrap_or_default()
}
