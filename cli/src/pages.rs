//! `oxygin pages`: what packages bring beside the program, made from its own options: man pages, and completions for
//! shells.

use clap::Command;
use clap_complete::Shell;
use std::error::Error;
use std::path::{Path, PathBuf};

/// Options of `oxygin pages`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Write into this folder, where they would be below /usr/share
    folder: PathBuf,
}

/// Where each shell that Debian has looks for what packages bring, below /usr/share.
const COMPLETIONS: [(Shell, &str); 3] = [
    (Shell::Bash, "bash-completion/completions/oxygin"),
    (Shell::Zsh, "zsh/vendor-completions/_oxygin"),
    (Shell::Fish, "fish/vendor_completions.d/oxygin.fish"),
];

/// Writes the pages of `command`, the whole program; always true.
pub fn run(args: Args, command: Command) -> Result<bool, Box<dyn Error>> {
    for (shell, path) in COMPLETIONS {
        let mut text = Vec::new();
        clap_complete::generate(shell, &mut command.clone(), "oxygin", &mut text);
        write(&args.folder.join(path), &text)?;
    }
    let manual = args.folder.join("man/man1");
    std::fs::create_dir_all(&manual).map_err(|e| format!("{}: {e}", manual.display()))?;
    clap_mangen::generate_to(command.disable_help_subcommand(true), &manual)?;
    Ok(true)
}

fn write(path: &Path, text: &[u8]) -> Result<(), Box<dyn Error>> {
    let made = path.parent().map_or(Ok(()), std::fs::create_dir_all);
    made.and_then(|()| std::fs::write(path, text)).map_err(|e| format!("{}: {e}", path.display()).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_but_hidden_ones_has_a_page_and_every_shell_its_completions() {
        let folder = std::env::temp_dir().join(format!("oxygin-pages-{}", std::process::id()));
        let command = Command::new("oxygin")
            .about("About the whole")
            .subcommand(Command::new("seen").about("About it").arg(clap::arg!(--marked "An option")))
            .subcommand(Command::new("unseen").hide(true));
        assert!(run(Args { folder: folder.clone() }, command).expect("written"));
        let text = |path: &str| std::fs::read_to_string(folder.join(path)).unwrap_or_default();
        assert!(text("man/man1/oxygin.1").contains("About the whole"));
        let page = text("man/man1/oxygin-seen.1");
        assert!(page.contains("About it") && page.contains("An option"), "{page}");
        assert!(!folder.join("man/man1/oxygin-unseen.1").exists());
        for (_, path) in COMPLETIONS {
            assert!(text(path).contains("marked"), "{path}");
        }
        let _ = std::fs::remove_dir_all(folder);
    }
}
