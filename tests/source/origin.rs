//! Where `build.rs` says that a source is from: checkouts, linked worktrees, unpacked source packages.

#[path = "../../build.rs"]
#[allow(dead_code)]
mod script;

use std::path::{Path, PathBuf};

const A: &str = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
const B: &str = "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb";

/// A folder that goes with the value.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("oxygin-origin-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a temporary folder");
        Self(path)
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.join(name);
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        std::fs::write(&path, text).expect("a file");
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn said(root: &Path) -> String {
    script::origin(root).0
}

#[test]
fn a_checkout_is_watched_where_its_next_commit_shows() {
    let folder = Folder::new("checkout");
    let head = folder.write(".git/HEAD", "ref: refs/heads/main\n");
    let branch = folder.write(".git/refs/heads/main", &format!("{A}\n"));
    let packed = folder.write(".git/packed-refs", &format!("# pack-refs with: peeled\n{B} refs/heads/main\n^{A}\n"));
    assert_eq!(script::origin(&folder.0), ("commit aaaaaaaaaaaa".into(), vec![head.clone(), branch.clone()]));
    std::fs::remove_file(branch).expect("it was there");
    assert_eq!(script::origin(&folder.0), ("commit bbbbbbbbbbbb".into(), vec![head.clone(), packed.clone()]));
    let log = folder.write(".git/logs/HEAD", "");
    assert_eq!(script::origin(&folder.0).1, [head, packed, log]);
    folder.write(".git/HEAD", A);
    assert_eq!(said(&folder.0), "commit aaaaaaaaaaaa");
    folder.write(".git/HEAD", "ref: refs/heads/.invalid\n");
    assert_eq!(said(&folder.0), "commit unknown", "a repository of another format");
}

#[test]
fn a_linked_worktree_has_a_head_of_its_own_and_the_branches_of_all() {
    let folder = Folder::new("worktree");
    let common = folder.0.join("main/.git");
    folder.write("main/.git/HEAD", A);
    folder.write("main/.git/refs/heads/other", B);
    folder.write("main/.git/worktrees/w/HEAD", "ref: refs/heads/other\n");
    folder.write("main/.git/worktrees/w/commondir", "../..\n");
    folder.write("w/.git", &format!("gitdir: {}/worktrees/w\n", common.display()));
    assert_eq!(said(&folder.0.join("w")), "commit bbbbbbbbbbbb");
    assert_eq!(said(&folder.0.join("main")), "commit aaaaaaaaaaaa");
}

#[test]
fn source_packages_carry_their_commit_and_what_has_none_says_so() {
    let folder = Folder::new("package");
    // A folder inside somebody else's checkout is not that checkout.
    folder.write(".git/HEAD", A);
    let root = folder.0.join("unpacked");
    folder.write("unpacked/packaging/commit", "$Format:%H$\n");
    assert_eq!(said(&root), "built outside git");
    folder.write("unpacked/packaging/commit", &format!("{B}\n"));
    assert_eq!(said(&root), "commit bbbbbbbbbbbb");
    folder.write("unpacked/.cargo_vcs_info.json", &format!("{{\n  \"git\": {{\n    \"sha1\": \"{A}\"\n  }}\n}}"));
    assert_eq!(said(&root), "commit aaaaaaaaaaaa");
}
