//! Receiving a datagram with what comes along. By libc: `nix` shows nothing of a message of which the kernel had to
//! leave descriptors out, because this process may open no more, and those that it has opened until then would be lost.

use std::mem::{size_of, zeroed};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// Descriptors that one datagram may carry: `SCM_MAX_FD` of include/net/scm.h. With room for fewer the kernel leaves
/// some out.
pub const MAX_FDS: usize = 253;

/// A datagram that arrived.
#[derive(Default)]
pub struct ReceivedDatagram {
    /// Bytes of it that are in the buffer; what the buffer had no room for is lost.
    pub bytes: usize,
    /// Who sent it, as process numbers are here; 0 if nobody says so.
    pub pid: i32,
    /// What came along, in its order. Closed unless somebody keeps it.
    pub files: Vec<OwnedFd>,
}

/// Room for what comes along, aligned as a header.
#[repr(C)]
union Control {
    header: libc::cmsghdr,
    bytes: [u8; Control::BYTES],
}

impl Control {
    // SAFETY: plain arithmetic.
    const BYTES: usize = unsafe {
        libc::CMSG_SPACE((MAX_FDS * size_of::<RawFd>()) as u32) + libc::CMSG_SPACE(size_of::<libc::ucred>() as u32)
    } as usize;
}

/// Takes the next datagram of a socket. Never waits; `None`: there is none.
pub fn receive(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> Option<ReceivedDatagram> {
    let mut control = Control { bytes: [0; Control::BYTES] };
    let mut io = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    // SAFETY: a structure of numbers and pointers.
    let mut header: libc::msghdr = unsafe { zeroed() };
    (header.msg_iov, header.msg_iovlen) = (&raw mut io, 1);
    (header.msg_control, header.msg_controllen) = ((&raw mut control).cast(), Control::BYTES as _);
    let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: all that the header points to lives through the call, and is as long as it says.
    let n = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut header, flags) };
    let mut datagram =
        ReceivedDatagram { bytes: usize::try_from(n).ok()?.min(buffer.len()), ..ReceivedDatagram::default() };
    // SAFETY: the kernel has filled the header, and the room behind it.
    let mut part = unsafe { libc::CMSG_FIRSTHDR(&raw const header) };
    while !part.is_null() {
        // SAFETY: a part of what the kernel wrote, as long as it says.
        unsafe { datagram.add(&*part, libc::CMSG_DATA(part)) };
        // SAFETY: as above.
        part = unsafe { libc::CMSG_NXTHDR(&raw const header, part) };
    }
    Some(datagram)
}

impl ReceivedDatagram {
    /// # Safety
    /// The kernel has just written a part with this header, whose bytes begin at `data`.
    unsafe fn add(&mut self, header: &libc::cmsghdr, data: *const u8) {
        // SAFETY: plain arithmetic.
        let bytes = header.cmsg_len.saturating_sub(unsafe { libc::CMSG_LEN(0) } as usize);
        match (header.cmsg_level, header.cmsg_type) {
            (libc::SOL_SOCKET, libc::SCM_RIGHTS) => {
                for at in 0..bytes / size_of::<RawFd>() {
                    // SAFETY: so many descriptors are there (caller), made for this process by this message.
                    let file = unsafe { OwnedFd::from_raw_fd(data.cast::<RawFd>().add(at).read_unaligned()) };
                    self.files.push(file);
                }
            }
            (libc::SOL_SOCKET, libc::SCM_CREDENTIALS) if bytes >= size_of::<libc::ucred>() => {
                // SAFETY: it is there (caller).
                self.pid = unsafe { data.cast::<libc::ucred>().read_unaligned() }.pid;
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::socket::{sendmsg, setsockopt, socketpair, sockopt, AddressFamily, ControlMessage, MsgFlags};
    use nix::sys::socket::{SockFlag, SockType, UnixAddr};
    use std::io::IoSlice;
    use std::os::fd::AsFd;

    fn pair() -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::Unix, SockType::Datagram, None, SockFlag::SOCK_CLOEXEC).unwrap()
    }

    fn send(from: &OwnedFd, bytes: &[u8], files: &[RawFd]) {
        let rights = [ControlMessage::ScmRights(files)];
        sendmsg::<UnixAddr>(from.as_raw_fd(), &[IoSlice::new(bytes)], &rights, MsgFlags::empty(), None).unwrap();
    }

    #[test]
    fn all_of_a_datagram_comes() {
        let (a, b) = pair();
        setsockopt(&b, sockopt::PassCred, &true).unwrap();
        let (read, write) = nix::unistd::pipe().unwrap();
        send(&a, b"abcdef", &[read.as_raw_fd(), write.as_raw_fd()]);
        let mut buffer = [0; 4];
        let ReceivedDatagram { bytes, pid, files } = receive(b.as_fd(), &mut buffer).unwrap();
        assert_eq!((bytes, &buffer, pid, files.len()), (4, b"abcd", std::process::id() as i32, 2));
        assert!(receive(b.as_fd(), &mut buffer).is_none());
    }

    /// A child, whose limit is its own: it may open one more, and two come.
    #[test]
    fn those_that_came_are_owned_where_others_had_no_room() {
        // SAFETY: the child calls nothing that a thread of its parent may hold.
        match unsafe { libc::fork() } {
            0 => {
                let (a, b) = pair();
                send(&a, b"x", &[0, 1]);
                let next = nix::unistd::dup(0).unwrap();
                nix::unistd::close(next).unwrap();
                let most = libc::rlimit { rlim_cur: next as u64 + 1, rlim_max: next as u64 + 1 };
                // SAFETY: the limit lives through the call.
                assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const most) }, 0);
                let came = receive(b.as_fd(), &mut [0; 4]).map(|datagram| datagram.files.len());
                let is_free = nix::unistd::dup(0) == Ok(next);
                // SAFETY: plain call.
                unsafe { libc::_exit(i32::from(came != Some(1)) + 2 * i32::from(!is_free)) }
            }
            child => {
                let ended = nix::sys::wait::waitpid(nix::unistd::Pid::from_raw(child), None).unwrap();
                assert!(matches!(ended, nix::sys::wait::WaitStatus::Exited(_, 0)), "{ended:?}");
            }
        }
    }
}
