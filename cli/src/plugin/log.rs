//! What the plugin logs: kept, so that tests can look at it, and printed when asked for.

use nccl_plugin_api::{DebugLogger, LOG_INFO, LOG_TRACE, LOG_WARN};
use std::ffi::{c_char, c_int, c_ulong, CStr};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::Mutex;

/// Lines kept at most; older ones are forgotten, so that a chatty plugin cannot eat the memory of a long run.
const KEPT: usize = 4096;

/// One line that the plugin logged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogLine {
    /// `nccl_plugin_api::LOG_*`.
    pub level: i32,
    /// Subsystem mask, `nccl_plugin_api::SUBSYS_*`.
    pub subsys: u64,
    /// Source file that the plugin named; empty if NULL.
    pub file: String,
    /// Line in that file.
    pub line: i32,
    /// The formatted text, at most 4095 bytes.
    pub text: String,
}

static LINES: Mutex<std::collections::VecDeque<LogLine>> = Mutex::new(std::collections::VecDeque::new());
static COUNT: AtomicU64 = AtomicU64::new(0);
static PRINT_UP_TO: AtomicI32 = AtomicI32::new(0);
static RANK: AtomicI32 = AtomicI32::new(-1);

extern "C" {
    /// In log_shim.c.
    fn oxygin_cli_logger(level: c_int, subsys: c_ulong, file: *const c_char, line: c_int, fmt: *const c_char, ...);
}

/// The logger to hand to `init`. Callable from any thread.
pub fn logger() -> Option<DebugLogger> {
    Some(oxygin_cli_logger)
}

/// Prints lines of this level and graver to standard error from now on (0: none; `LOG_WARN`, `LOG_INFO`,
/// `LOG_TRACE`), each with the rank if there is one.
pub fn print_up_to(level: i32) {
    PRINT_UP_TO.store(level, Ordering::Relaxed);
}

/// Names this process in printed lines.
pub fn set_rank(rank: u32) {
    RANK.store(rank as i32, Ordering::Relaxed);
}

/// How many lines have been logged in this process so far: a mark for [`since`].
pub fn mark() -> u64 {
    COUNT.load(Ordering::Acquire)
}

/// The lines logged after `mark` (as far as they are still kept), oldest first.
pub fn since(mark: u64) -> Vec<LogLine> {
    let lines = lock();
    let fresh = COUNT.load(Ordering::Acquire).saturating_sub(mark).min(lines.len() as u64) as usize;
    lines.iter().skip(lines.len() - fresh).cloned().collect()
}

/// The lines of level `LOG_WARN` logged after `mark`.
pub fn warnings_since(mark: u64) -> Vec<LogLine> {
    since(mark).into_iter().filter(|l| l.level <= LOG_WARN).collect()
}

fn lock() -> std::sync::MutexGuard<'static, std::collections::VecDeque<LogLine>> {
    LINES.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn text_of(s: *const c_char) -> String {
    if s.is_null() {
        return String::new();
    }
    // SAFETY: not NULL; the plugin (or the shim) passes a C string that lives during the call.
    unsafe { CStr::from_ptr(s) }.to_string_lossy().into_owned()
}

/// Where the shim delivers a formatted line.
#[no_mangle]
extern "C" fn oxygin_cli_log_line(
    level: c_int,
    subsys: c_ulong,
    file: *const c_char,
    line: c_int,
    text: *const c_char,
) {
    let entry = LogLine { level, subsys, file: text_of(file), line, text: text_of(text) };
    if level <= PRINT_UP_TO.load(Ordering::Relaxed) {
        let word = match level {
            i32::MIN..=LOG_WARN => "WARN",
            LOG_INFO => "INFO",
            LOG_TRACE => "TRACE",
            _ => "LOG",
        };
        let rank = RANK.load(Ordering::Relaxed);
        use std::io::Write;
        // `eprintln!` would panic when standard error is closed; a panic must not cross into the plugin.
        let _ = match rank {
            0.. => writeln!(std::io::stderr(), "[rank {rank}] {word} {}", entry.text),
            _ => writeln!(std::io::stderr(), "{word} {}", entry.text),
        };
    }
    let mut lines = lock();
    if lines.len() == KEPT {
        lines.pop_front();
    }
    lines.push_back(entry);
    COUNT.fetch_add(1, Ordering::Release);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variadic_lines_arrive_formatted() {
        let mark = mark();
        let log = logger().expect("the shim is linked in");
        // SAFETY: the format takes an int and a string, and that is what is passed.
        unsafe { log(LOG_WARN, 0x10, c"file.rs".as_ptr(), 7, c"rank %d: %s".as_ptr(), 3 as c_int, c"gone".as_ptr()) };
        // SAFETY: a NULL format is what this call is about; the shim checks it.
        unsafe { log(LOG_INFO, 0x1, std::ptr::null(), 0, std::ptr::null()) };
        let lines = since(mark);
        let line = lines.iter().find(|l| l.text == "rank 3: gone").expect("the line was kept");
        assert_eq!((line.level, line.subsys, line.file.as_str(), line.line), (LOG_WARN, 0x10, "file.rs", 7));
        assert!(lines.iter().any(|l| l.text.contains("NULL format")));
        assert_eq!(warnings_since(mark).iter().filter(|l| l.text == "rank 3: gone").count(), 1);
    }
}
