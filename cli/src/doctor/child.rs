//! Doing something that may crash or hang in a child process, with a deadline.

use std::io::Read;
use std::os::fd::FromRawFd;
use std::time::{Duration, Instant};

/// How long a child that is killed may take to go; one that stands in a driver does not.
const KILLED_WITHIN: Duration = Duration::from_secs(2);

/// Runs `work` in a forked child and returns the text it made. A child that dies or takes longer than `limit` is an
/// error that says so. Call it while this process has one thread only: the child gets a copy of every lock as it is.
pub fn ask(limit: Duration, work: impl FnOnce() -> Result<String, String>) -> Result<String, String> {
    let mut fds = [0; 2];
    // SAFETY: `fds` has room for two descriptors.
    if unsafe { libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC) } != 0 {
        return Err(format!("pipe: {}", std::io::Error::last_os_error()));
    }
    // SAFETY: the child leaves through _exit and touches nothing that another thread could hold.
    let pid = unsafe { libc::fork() };
    if pid < 0 {
        return Err(format!("fork: {}", std::io::Error::last_os_error()));
    }
    if pid == 0 {
        let (mark, text) = match work() {
            Ok(text) => ("+", text),
            Err(text) => ("-", text),
        };
        let bytes = [mark, text.as_str()].concat();
        // SAFETY: writes this child's own bytes to its own descriptor, then ends without running destructors.
        unsafe {
            libc::write(fds[1], bytes.as_ptr().cast(), bytes.len());
            libc::_exit(0);
        }
    }
    // SAFETY: both descriptors are this function's own.
    let mut pipe = unsafe {
        libc::close(fds[1]);
        std::fs::File::from_raw_fd(fds[0])
    };
    let late = wait(pid, Instant::now() + limit);
    let mut text = String::new();
    if late.is_ok() {
        let _ = pipe.read_to_string(&mut text);
    }
    late?;
    match text.split_at_checked(1) {
        Some(("+", rest)) => Ok(rest.to_owned()),
        Some(("-", rest)) => Err(rest.to_owned()),
        _ => Err("the attempt ended without an answer".into()),
    }
}

/// Whether something holds, found out as by [`ask`]; not so where it cannot be.
pub fn holds(limit: Duration, whether: impl FnOnce() -> bool) -> bool {
    ask(limit, || Ok(whether().to_string())).is_ok_and(|said| said == "true")
}

/// Waits for a child; kills it at the deadline.
fn wait(pid: libc::pid_t, deadline: Instant) -> Result<(), String> {
    if let Some(status) = ended(pid, deadline) {
        return match libc::WIFSIGNALED(status) {
            true => Err(format!("the attempt was ended by signal {}", libc::WTERMSIG(status))),
            false => Ok(()),
        };
    }
    // SAFETY: `pid` is a child of this process that nobody has waited for.
    unsafe { libc::kill(pid, libc::SIGKILL) };
    Err(match ended(pid, Instant::now() + KILLED_WITHIN) {
        Some(_) => "the attempt did not end in time".into(),
        None => "the attempt did not end in time, nor when it was killed: it stands in the kernel".into(),
    })
}

/// How a child ended, if it does by then.
fn ended(pid: libc::pid_t, by: Instant) -> Option<libc::c_int> {
    let mut status = 0;
    // SAFETY: `pid` is a child of this process that nobody else waits for.
    while unsafe { libc::waitpid(pid, &mut status, libc::WNOHANG) } != pid {
        if Instant::now() > by {
            return None;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Some(status)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_refusals_crashes_and_hangs_come_back() {
        let limit = Duration::from_secs(20);
        assert_eq!(ask(limit, || Ok("7".into())), Ok("7".into()));
        assert_eq!(ask(limit, || Err("no".into())), Err("no".into()));
        assert!(ask(limit, || std::process::abort()).expect_err("crash").contains("signal 6"));
        let hang = || loop {
            std::thread::sleep(Duration::from_secs(1));
        };
        assert!(ask(Duration::from_millis(50), hang).expect_err("hang").contains("in time"));
    }
}
