//! `oxygin top` as a user runs it, on terminals of its own: over pages of this process, whose numbers are known.

#[path = "support/page.rs"]
mod page;

use nix::errno::Errno;
use nix::fcntl::{fcntl, FcntlArg, FdFlag};
use nix::pty::{openpty, Winsize};
use nix::sys::termios::{tcgetattr, LocalFlags};
use oxygin::telemetry::stats::layout::{Way, VERSION};
use page::{page, turn, Stranger};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const OXYGIN: &str = env!("CARGO_BIN_EXE_oxygin");
const LIMIT: Duration = Duration::from_secs(60);

/// Starts `oxygin top` on a terminal, which is its own alone, as `nohup` would if it `ignores` that one goes.
fn on_terminal(terminal: &OwnedFd, line: &str, ignores: bool) -> Child {
    let mut command = Command::new(OXYGIN);
    command.arg("top").args(line.split_whitespace());
    let end = || Stdio::from(terminal.try_clone().expect("a descriptor"));
    command.stdin(end()).stdout(end()).stderr(end());
    // SAFETY: system calls alone; the terminal of whoever runs the tests is not the child's.
    unsafe {
        command.pre_exec(move || {
            if ignores {
                libc::signal(libc::SIGHUP, libc::SIG_IGN);
            }
            nix::unistd::setsid()?;
            Errno::result(libc::ioctl(0, libc::TIOCSCTTY, 0)).map(drop).map_err(Into::into)
        })
    };
    command.spawn().expect("oxygin runs")
}

/// How it has ended; `None`: it has not until then.
fn ended(child: &mut Child, end: Instant) -> Option<ExitStatus> {
    loop {
        let status = child.try_wait().expect("a child");
        if status.is_some() || Instant::now() >= end {
            return status;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// `oxygin top` on a terminal.
struct Top {
    child: Child,
    keyboard: File,
    screen: Arc<Mutex<vt100::Parser>>,
}

impl Top {
    /// On one of 80 columns and 24 lines.
    fn start(line: &str) -> Self {
        Self::sized(line, 24, 80)
    }

    fn sized(line: &str, rows: u16, columns: u16) -> Self {
        let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        let pty = openpty(Some(&size), None).expect("a terminal");
        let child = on_terminal(&pty.slave, line, false);
        let keyboard = File::from(pty.master);
        let screen = Arc::new(Mutex::new(vt100::Parser::new(rows, columns, 0)));
        let (mut from, to) = (keyboard.try_clone().expect("a descriptor"), screen.clone());
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            // Ends with an error when nobody has the other side any more.
            while let Ok(n @ 1..) = from.read(&mut bytes) {
                to.lock().unwrap().process(&bytes[..n]);
            }
        });
        drop(pty.slave);
        Self { child, keyboard, screen }
    }

    fn text(&self) -> String {
        self.screen.lock().unwrap().screen().contents()
    }

    fn until(&self, good: impl Fn(&str) -> bool) -> String {
        let end = Instant::now() + LIMIT;
        loop {
            let text = self.text();
            if good(&text) {
                return text;
            }
            assert!(Instant::now() < end, "on the screen:\n{text}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Presses a key after which it ends.
    fn ends_after(mut self, key: &[u8]) {
        self.keyboard.write_all(key).expect("a terminal");
        self.ends(0);
    }

    /// It ends with this status, and leaves the terminal as it was.
    fn ends(mut self, status: i32) {
        let end = Instant::now() + LIMIT;
        let ended = ended(&mut self.child, end).unwrap_or_else(|| panic!("it still runs:\n{}", self.text()));
        assert_eq!(ended.code(), Some(status), "{ended}: {}", self.text());
        // Once all that was written to it is read.
        let has = |test: fn(&vt100::Screen) -> bool| test(self.screen.lock().unwrap().screen());
        while has(vt100::Screen::alternate_screen) || has(vt100::Screen::hide_cursor) {
            assert!(Instant::now() < end, "it still has the other screen:\n{}", self.text());
            std::thread::sleep(Duration::from_millis(20));
        }
        let modes = tcgetattr(&self.keyboard).expect("a terminal").local_flags;
        assert!(modes.contains(LocalFlags::ICANON | LocalFlags::ECHO | LocalFlags::ISIG), "{modes:?}");
    }
}

impl Drop for Top {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn shows_numbers_and_their_changes() {
    const COMM: u64 = 55;
    let _turn = turn();
    let page = page(COMM, Way::Engine);
    let top = Top::start(&format!("{} --interval 0.2", std::process::id()));
    let line = |text: &str, words: &[&str]| {
        let has = |l: &&str| words.iter().all(|word| l.split_whitespace().any(|w| w == *word));
        text.lines().find(has).map(str::to_owned)
    };
    let text = top.until(|text| line(text, &["55.1", "12.3M"]).is_some() && line(text, &["55.1", "FAILED"]).is_some());
    assert!(text.starts_with("oxygin top: "), "{text}");
    assert!(line(&text, &["PID", "CTX", "PEER", "TOTAL", "OLDEST", "STATE"]).is_some(), "{text}");
    let set = line(&text, &["55.1", "0/3", "soft", "engine", "2"]).expect(&text);
    // Ten minutes, in seconds; and the errors of the set.
    assert!(set.split_whitespace().any(|w| w.starts_with("60") && w.ends_with('s')), "{set}");
    assert_eq!(set.split_whitespace().last(), Some("7"), "{set}");
    assert!(line(&text, &["55.1", "12.3M"]).unwrap().contains("131.1us"), "{text}");
    assert!(text.lines().all(|l| l.chars().count() <= 80) && text.lines().count() <= 24);
    assert!(text.contains("q quits"), "{text}");
    // It refreshes itself, and says a rate.
    page.record(page.index(1, 1)).entries.store(99_000_000, Ordering::Relaxed);
    top.until(|text| line(text, &["55.1", "99.0M"]).is_some());
    let (stop, page) = (Arc::new(AtomicU64::new(0)), Arc::new(page));
    let (until, to) = (stop.clone(), page.clone());
    let adds = std::thread::spawn(move || {
        let entries = &to.record(to.index(1, 1)).entries;
        while until.load(Ordering::Relaxed) == 0 {
            entries.store(entries.load(Ordering::Relaxed) + 50_000, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(10));
        }
    });
    let moves = |text: &str| text.lines().any(|l| l.contains("55.1") && l.contains("M/s"));
    top.until(moves);
    stop.store(1, Ordering::Relaxed);
    adds.join().expect("it ends");
    top.ends_after(b"q");
}

#[test]
fn names_statistics_of_another_version() {
    let stranger = Stranger::new(99);
    // What to do about it may be cut on a screen.
    let said = format!("process {} has statistics of version 99, not {VERSION}", stranger.pid());
    let top = Top::start("--interval 0.1");
    top.until(|text| text.contains(&said) && text.contains("q quits"));
    top.ends_after(b"q");
    // Where nothing else is asked for there is no screen.
    let mut top = Top::start(&stranger.pid().to_string());
    top.until(|text| text.contains(&said));
    assert_eq!(top.child.wait().expect("a child").code(), Some(2));
}

#[test]
fn survives_the_end_of_what_it_shows() {
    let mut other = Command::new("sleep").arg("600").spawn().expect("sleep runs");
    let top = Top::start(&format!("{} --interval 0.1", other.id()));
    top.until(|text| text.contains("oxygin top: 0 sets"));
    other.kill().and_then(|()| other.wait().map(drop)).expect("it ends");
    top.until(|text| text.contains(&format!("there is no process {}", other.id())));
    top.ends_after(b"\x03");
}

#[test]
fn gives_the_terminal_back_when_it_is_asked_to_end() {
    for signal in [libc::SIGTERM, libc::SIGHUP, libc::SIGINT] {
        // It waits for nothing but the signal.
        let top = Top::start("--interval 600");
        top.until(|text| text.contains("oxygin top: "));
        // SAFETY: plain call, for a child of this test's own.
        assert_eq!(unsafe { libc::kill(top.child.id() as i32, signal) }, 0);
        top.ends(128 + signal);
    }
}

/// A window that is closed, a connection that breaks. What fails by it comes before the signal, behind it, or alone.
#[test]
fn ends_with_its_terminal() {
    for (line, ignores) in [("--interval 600", false), ("--interval 0.1", false), ("--interval 0.1", true)] {
        let pty = openpty(None, None).expect("a terminal");
        fcntl(pty.master.as_raw_fd(), FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC)).expect("a descriptor");
        let mut child = on_terminal(&pty.slave, line, ignores);
        drop(pty.slave);
        let mut keyboard = File::from(pty.master);
        let mut drawn = [0; 64];
        assert!(keyboard.read(&mut drawn).expect("a terminal") > 0);
        // It waits for keys by then.
        std::thread::sleep(Duration::from_millis(500));
        drop(keyboard);
        let status = ended(&mut child, Instant::now() + LIMIT).unwrap_or_else(|| {
            let _ = child.kill();
            panic!("{line}: it still runs")
        });
        assert_eq!(status.code(), Some(128 + libc::SIGHUP), "{line}: {status}");
    }
}

#[test]
fn shows_those_that_live_beside_one_that_has_ended() {
    let _turn = turn();
    let (page, me) = (page(57, Way::Engine), std::process::id());
    let mut other = Command::new("sleep").arg("600").spawn().expect("sleep runs");
    let top = Top::start(&format!("{} {me} --interval 0.1", other.id()));
    top.until(|text| text.contains("57.1") && text.contains("12.3M"));
    other.kill().and_then(|()| other.wait().map(drop)).expect("it ends");
    page.record(page.index(1, 1)).entries.store(99_000_000, Ordering::Relaxed);
    top.until(|text| text.contains(&format!("there is no process {}", other.id())) && text.contains("99.0M"));
    top.ends_after(b"q");
}

#[test]
fn shows_what_fits_a_small_terminal() {
    let _turn = turn();
    let _page = page(56, Way::Table);
    for (rows, columns) in [(3, 20), (1, 1), (8, 40)] {
        let top = Top::sized(&format!("{} --interval 0.1", std::process::id()), rows, columns);
        // One character says nothing, but neither does it end the program.
        top.until(|text| top.screen.lock().unwrap().screen().alternate_screen() && (rows == 1 || text.trim() != ""));
        if rows == 8 {
            top.until(|text| text.contains(" 56. ") && text.contains(" PEE "));
        }
        top.ends_after(b"q");
    }
}

#[test]
fn says_that_it_needs_a_terminal() {
    let output = Command::new(OXYGIN).arg("top").stdin(Stdio::null()).output().expect("oxygin runs");
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("needs a terminal"), "{output:?}");
    assert!(output.stdout.is_empty());
}
