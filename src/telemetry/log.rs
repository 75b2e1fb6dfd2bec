//! The `log` crate's records, handed to NCCL's logger.
//!
//! NCCL passes its logger to `init`, once a communicator. The last one holds;
//! with none the library is silent. Nothing is ever printed from here.

use log::{Level, LevelFilter, Log, Metadata, Record};
use nccl_plugin_api::{DebugLogger, LOG_INFO, LOG_TRACE, LOG_WARN, SUBSYS_INIT, SUBSYS_NET};
use std::ffi::{c_int, c_ulong, CString};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The installed function as an address; 0: none.
static INSTALLED: AtomicUsize = AtomicUsize::new(0);

struct Forward;

/// Sends every record of this library to `logger` from now on; `None` silences it. May be called any number of
/// times, from any thread.
///
/// # Safety
/// `logger` is NCCL's: callable from any thread for as long as it is installed.
pub unsafe fn install(logger: Option<DebugLogger>) {
    INSTALLED.store(logger.map_or(0, |function| function as usize), Ordering::Release);
    // Fails when a logger is set already: ours, from an earlier init, or the program's that links this crate.
    let _ = log::set_logger(&Forward);
    log::set_max_level(if logger.is_some() { LevelFilter::Trace } else { LevelFilter::Off });
}

fn installed() -> Option<DebugLogger> {
    let address = INSTALLED.load(Ordering::Acquire);
    // SAFETY: the value is 0 or what `install` stored, a `DebugLogger`; function pointers and `Option`s of them have
    // the size of an address, and 0 is `None`.
    unsafe { std::mem::transmute::<usize, Option<DebugLogger>>(address) }
}

fn level(level: Level) -> c_int {
    match level {
        Level::Error | Level::Warn => LOG_WARN,
        Level::Info => LOG_INFO,
        Level::Debug | Level::Trace => LOG_TRACE,
    }
}

/// NCCL drops what belongs to a subsystem that is not asked for, warnings too; its own belong to all (`NCCL_ALL`). Of
/// the rest it shows INIT by default and NET on demand: what moves data is NET, the rest is set-up.
fn subsystem(level: Level, target: &str) -> c_ulong {
    if level <= Level::Warn {
        c_ulong::MAX
    } else if matches!(target.split("::").nth(1), Some("fabric" | "rma" | "proxy" | "gdaki")) {
        SUBSYS_NET
    } else {
        SUBSYS_INIT
    }
}

/// A C string of `text`; a NUL inside, which would end it early, shows as `\0`.
fn c_string(text: String) -> CString {
    CString::new(text).unwrap_or_else(|error| {
        let text = String::from_utf8_lossy(&error.into_vec()).replace('\0', "\\0");
        CString::new(text).unwrap_or_default()
    })
}

impl Log for Forward {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        INSTALLED.load(Ordering::Relaxed) != 0
    }

    fn log(&self, record: &Record<'_>) {
        let Some(logger) = installed() else { return };
        let message = c_string(record.args().to_string());
        let file = c_string(record.file().unwrap_or("oxygin").to_owned());
        let line = c_int::try_from(record.line().unwrap_or(0)).unwrap_or(0);
        // SAFETY: NCCL's logger is a variadic printf-like function; "%s" takes exactly the one string that follows.
        // All strings are terminated and outlive the call.
        unsafe {
            logger(
                level(record.level()),
                subsystem(record.level(), record.target()),
                file.as_ptr(),
                line,
                c"%s".as_ptr(),
                message.as_ptr(),
            )
        }
    }

    fn flush(&self) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::{c_char, CStr};
    use std::sync::Mutex;

    type Line = (c_int, c_ulong, String, c_int, String, String);
    static LINES: Mutex<Vec<Line>> = Mutex::new(Vec::new());

    /// Stands in for NCCL's logger. A Rust function cannot be variadic, but on the ABIs that NCCL runs on (System V
    /// x86-64, AAPCS64) a pointer argument after `fmt` arrives in the same register either way.
    unsafe extern "C" fn collect(
        level: c_int,
        subsys: c_ulong,
        file: *const c_char,
        line: c_int,
        fmt: *const c_char,
        argument: *const c_char,
    ) {
        // SAFETY: the caller passes terminated strings.
        let text = |p: *const c_char| unsafe { CStr::from_ptr(p) }.to_string_lossy().into_owned();
        let line = (level, subsys, text(file), line, text(fmt), text(argument));
        if line.5.contains("telemetry test") {
            LINES.lock().unwrap().push(line);
        }
    }

    #[test]
    fn records_reach_the_logger_until_it_is_taken_away() {
        // SAFETY: both are function pointers; see `collect` for why the call works.
        let logger = unsafe {
            std::mem::transmute::<
                unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, *const c_char),
                DebugLogger,
            >(collect)
        };
        // SAFETY: `collect` lives as long as the test program and may be called from any thread.
        unsafe { install(Some(logger)) };
        // SAFETY: as above.
        unsafe { install(Some(logger)) };
        log::warn!("telemetry test 100%s");
        log::info!(target: "oxygin::fabric::soft", "telemetry test with a NUL\0inside");
        log::debug!("telemetry test");
        // SAFETY: nothing is installed.
        unsafe { install(None) };
        log::error!("telemetry test: nobody hears this");
        let lines = std::mem::take(&mut *LINES.lock().unwrap());
        let seen: Vec<_> = lines.iter().map(|l| (l.0, l.1, l.4.as_str(), l.5.as_str())).collect();
        assert_eq!(
            seen,
            [
                (LOG_WARN, c_ulong::MAX, "%s", "telemetry test 100%s"),
                (LOG_INFO, SUBSYS_NET, "%s", "telemetry test with a NUL\\0inside"),
                (LOG_TRACE, SUBSYS_INIT, "%s", "telemetry test"),
            ]
        );
        assert!(lines.iter().all(|l| l.2.ends_with("log.rs") && l.3 > 0));
    }

    /// What NCCL shows without being asked is what users and `oxygin doctor --job` read: which fabric, which engine.
    #[test]
    fn lines_of_set_up_are_shown_by_default() {
        for target in ["oxygin::comm::fabrics", "oxygin::comm::coll", "oxygin::comm::device", "oxygin::config"] {
            assert_eq!(subsystem(Level::Info, target), SUBSYS_INIT, "{target}");
        }
        for target in ["oxygin::fabric::soft::link::route", "oxygin::rma", "oxygin::proxy::affinity", "oxygin::gdaki"] {
            assert_eq!(subsystem(Level::Info, target), SUBSYS_NET, "{target}");
            assert_eq!(subsystem(Level::Warn, target), c_ulong::MAX, "{target}");
        }
    }
}
