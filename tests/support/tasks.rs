//! The threads of this process.

use std::path::{Path, PathBuf};

/// Those that run on, by their folders in /proc. One that was joined may be listed for a while, by its name: the kernel
/// lets the joiner go before it takes the thread off the list.
pub fn running() -> Vec<PathBuf> {
    let tasks = std::fs::read_dir("/proc/self/task").expect("threads");
    tasks.map(|task| task.expect("a thread").path()).filter(|task| runs_on(task)).collect()
}

fn runs_on(task: &Path) -> bool {
    const PF_EXITING: u64 = 0x4; // include/linux/sched.h; set before a joiner is let go
    let Ok(stat) = std::fs::read_to_string(task.join("stat")) else { return false };
    // Field 9, and the second is a name in parentheses that may hold anything: proc(5).
    let fields = stat.rsplit_once(')').expect("a name").1;
    let flags = fields.split_whitespace().nth(6).and_then(|f| f.parse::<u64>().ok()).expect("flags");
    flags & PF_EXITING == 0
}
