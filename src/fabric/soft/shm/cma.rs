//! Cross-memory attach: one copy from our memory into a peer's, by the kernel, at our expense.

use std::io;

fn iovec(at: u64, len: usize) -> libc::iovec {
    libc::iovec { iov_base: at as *mut libc::c_void, iov_len: len }
}

/// Copies from this process to `remote` in process `pid`. Returns the bytes copied.
///
/// # Safety
/// `len` bytes at `local` are readable. (A bad remote address is an error, not a fault.)
pub unsafe fn write(pid: libc::pid_t, local: u64, remote: u64, len: usize) -> io::Result<usize> {
    let (l, r) = (iovec(local, len), iovec(remote, len));
    // SAFETY: one valid iovec each; the kernel checks the remote side.
    check(unsafe { libc::process_vm_writev(pid, &l, 1, &r, 1, 0) })
}

/// Copies from `remote` in process `pid` to this process. Returns the bytes copied.
///
/// # Safety
/// `len` bytes at `local` are writable.
pub unsafe fn read(pid: libc::pid_t, local: u64, remote: u64, len: usize) -> io::Result<usize> {
    let (l, r) = (iovec(local, len), iovec(remote, len));
    // SAFETY: one valid iovec each; the kernel checks the remote side.
    check(unsafe { libc::process_vm_readv(pid, &l, 1, &r, 1, 0) })
}

fn check(n: isize) -> io::Result<usize> {
    if n < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(n as usize)
    }
}

/// Whether process `pid` is the one that holds `expected` at `probe`, and may be attached to.
fn usable(pid: libc::pid_t, probe: u64, expected: &[u8; 16]) -> io::Result<bool> {
    let mut seen = [0u8; 16];
    // SAFETY: `seen` has 16 bytes.
    let n = unsafe { read(pid, seen.as_mut_ptr() as u64, probe, 16)? };
    Ok(n == 16 && &seen == expected)
}

/// Whether cross-memory attach reaches the rank that says to be process `pid` and to hold `value` at `probe`; otherwise
/// why not.
pub fn try_reach(pid: libc::pid_t, probe: u64, value: &[u8; 16]) -> Result<(), String> {
    if pid <= 0 {
        return Err("its process is not visible from here".into());
    }
    match usable(pid, probe, value) {
        Ok(true) => Ok(()),
        Ok(false) => Err("its process number means another process here".into()),
        Err(e) if e.raw_os_error() == Some(libc::EPERM) => {
            Err("cross-memory attach is not permitted: kernel.yama.ptrace_scope is not 0 and CAP_SYS_PTRACE is missing"
                .into())
        }
        Err(e) => Err(format!("cross-memory attach failed: {e}")),
    }
}
