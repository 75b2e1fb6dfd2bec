//! A filter in the kernel for a socket that anybody may send to: what does not begin with the token is never queued.
//!
//! The kernel runs it in the sender's call. What it refuses is freed there, descriptors in it are let go by the sender,
//! and the owner of the socket is not woken: it costs the owner nothing, however much comes.

use libc::{
    c_int, sock_filter, sock_fprog, socklen_t, BPF_ABS, BPF_ALU, BPF_JEQ, BPF_JMP, BPF_K, BPF_LD, BPF_LDX, BPF_MEM,
    BPF_OR, BPF_RET, BPF_ST, BPF_W, BPF_X, BPF_XOR,
};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

/// Attaches the filter for good. To be called before the socket has a name: nothing comes in unfiltered then.
pub fn require(fd: &OwnedFd, token: &[u8; 16]) -> io::Result<()> {
    let mut code = program(token);
    let filter = sock_fprog { len: code.len() as u16, filter: code.as_mut_ptr() };
    set(fd, libc::SO_ATTACH_FILTER, &filter)?;
    // Nobody whom the descriptor reaches, a forked child for one, can take it off again.
    set(fd, libc::SO_LOCK_FILTER, &(1 as c_int))
}

fn set<T>(fd: &OwnedFd, option: c_int, value: &T) -> io::Result<()> {
    // SAFETY: `value` lives through the call and has the size that is given; a program's code lives as long (caller).
    let code = unsafe {
        let size = size_of::<T>() as socklen_t;
        libc::setsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, option, (&raw const *value).cast(), size)
    };
    if code == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

const fn step(code: u32, k: u32) -> sock_filter {
    sock_filter { code: code as u16, jt: 0, jf: 0, k }
}

/// Classic BPF: the differences of all four words are gathered before one comparison, so that the time which a sender
/// can measure does not say where a guess goes wrong. A load beyond the end of a message refuses it.
fn program(token: &[u8; 16]) -> Vec<sock_filter> {
    let mut code = Vec::new();
    for (word, bytes) in (0..).zip(token.chunks_exact(4)) {
        // Loads are big-endian.
        let expected = u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        code.push(step(BPF_LD | BPF_W | BPF_ABS, word * 4));
        code.push(step(BPF_ALU | BPF_XOR | BPF_K, expected));
        if word > 0 {
            code.push(step(BPF_LDX | BPF_MEM, 0));
            code.push(step(BPF_ALU | BPF_OR | BPF_X, 0));
        }
        code.push(step(BPF_ST, 0));
    }
    code.push(sock_filter { jf: 1, ..step(BPF_JMP | BPF_JEQ | BPF_K, 0) });
    code.push(step(BPF_RET | BPF_K, u32::MAX));
    code.push(step(BPF_RET | BPF_K, 0));
    code
}
