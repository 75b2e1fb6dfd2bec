//! How ranks on one host find each other: a datagram socket in the abstract namespace.
//!
//! It carries four things: "give me your inbox" (with the receiver's secret token), the answer (with the file
//! attached), what `gpu::share` has to say, and a single byte that wakes a sleeping rank. Abstract names live in a network namespace and in no file
//! system: two ranks that share none simply cannot reach each other, which is how "the same host" is tried and not
//! guessed. Anybody on the host may send here; without the token nothing happens but a wake-up.

use crate::error::{Error, Result};
use crate::wire::{Reader, Writer};
use nix::cmsg_space;
use nix::sys::socket::{
    bind, recvmsg, sendmsg, setsockopt, socket, sockopt, AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags,
    SockFlag, SockType, UnixAddr, UnixCredentials,
};
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

const MAGIC: u32 = 0x6f78_6379;
const ASK: u8 = 1;
const ANSWER: u8 = 2;
const SHARE: u8 = 3;

/// Bytes before a body.
const HEAD: usize = 4 + 1 + 4 + 16;
/// Bytes of a body.
pub const MAX_BODY: usize = 192;

/// Descriptors that one datagram may carry: `SCM_MAX_FD` of include/net/scm.h. With room for fewer the kernel says that
/// some were cut off, and those that it has opened until then would be lost.
const MAX_FDS: usize = 253;

/// A socket under a random name.
pub struct Contact {
    fd: OwnedFd,
    name: Vec<u8>,
}

/// Something that arrived.
pub enum Event {
    /// Rank `rank` wants this rank's inbox.
    Asked {
        /// Who asks.
        rank: u32,
    },
    /// Rank `rank` sent its inbox.
    Answered {
        /// Who answers.
        rank: u32,
        /// Its inbox.
        inbox: OwnedFd,
        /// Its process, as seen from here; 0 where process numbers do not reach.
        pid: i32,
    },
    /// Rank `rank` says something about shared GPU memory.
    Sharing {
        /// Who.
        rank: u32,
        /// What.
        body: Vec<u8>,
        /// A descriptor, if one came.
        file: Option<OwnedFd>,
    },
    /// Anything else: a reason to look around.
    Woken,
}

impl Contact {
    /// A new socket.
    pub fn open() -> Result<Self> {
        let fd =
            socket(AddressFamily::Unix, SockType::Datagram, SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK, None)
                .map_err(|e| Error::system(format!("making a Unix socket failed: {e}")))?;
        let mut random = [0u8; 12];
        getrandom::fill(&mut random).map_err(|e| Error::system(format!("no random numbers: {e}")))?;
        let name: Vec<u8> =
            b"oxygin-".iter().copied().chain(random.iter().flat_map(|b| format!("{b:02x}").into_bytes())).collect();
        let address = UnixAddr::new_abstract(&name).map_err(|e| Error::internal(e.to_string()))?;
        bind(fd.as_raw_fd(), &address).map_err(|e| Error::system(format!("binding a Unix socket failed: {e}")))?;
        setsockopt(&fd, sockopt::PassCred, &true)
            .map_err(|e| Error::system(format!("SO_PASSCRED on a Unix socket failed: {e}")))?;
        Ok(Self { fd, name })
    }

    /// The name peers send to.
    pub fn name(&self) -> &[u8] {
        &self.name
    }

    /// For polling.
    pub fn fd(&self) -> BorrowedFd<'_> {
        use std::os::fd::AsFd;
        self.fd.as_fd()
    }

    fn send(&self, to: &[u8], bytes: &[u8], attach: Option<BorrowedFd<'_>>) -> nix::Result<()> {
        let address = UnixAddr::new_abstract(to)?;
        let raw = attach.map(|fd| [fd.as_raw_fd()]);
        let rights = raw.as_ref().map(|fds| ControlMessage::ScmRights(fds));
        sendmsg(
            self.fd.as_raw_fd(),
            &[IoSlice::new(bytes)],
            rights.as_slice(),
            MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL,
            Some(&address),
        )
        .map(drop)
    }

    /// Asks the rank behind `name` for its inbox. `Ok(false)`: its socket is full, ask again later. An error: it cannot
    /// be reached, so it is on another host (or gone).
    pub fn ask(&self, name: &[u8], its_token: &[u8; 16], me: u32) -> std::result::Result<bool, nix::Error> {
        let message = Writer::new().u32(MAGIC).u8(ASK).u32(me).raw(its_token).finish();
        self.try_send(name, &message, None)
    }

    fn try_send(&self, name: &[u8], message: &[u8], file: Option<BorrowedFd<'_>>) -> nix::Result<bool> {
        match self.send(name, message, file) {
            Ok(()) => Ok(true),
            Err(nix::Error::EAGAIN | nix::Error::ENOBUFS | nix::Error::EINTR) => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// Says something about shared GPU memory (`body` has at most [`MAX_BODY`] bytes). Results as for `ask`.
    pub fn share(
        &self,
        name: &[u8],
        its_token: &[u8; 16],
        me: u32,
        body: &[u8],
        file: Option<BorrowedFd<'_>>,
    ) -> nix::Result<bool> {
        let message = Writer::new().u32(MAGIC).u8(SHARE).u32(me).raw(its_token).raw(body).finish();
        self.try_send(name, &message, file)
    }

    /// Whether there is a socket behind `name`.
    pub fn reaches(&self, name: &[u8]) -> bool {
        self.try_send(name, &[0], None).is_ok()
    }

    /// Answers a peer that asked. A full socket there is its loss: it asks again.
    pub fn answer(&self, name: &[u8], its_token: &[u8; 16], me: u32, inbox: BorrowedFd<'_>) {
        let message = Writer::new().u32(MAGIC).u8(ANSWER).u32(me).raw(its_token).finish();
        let _ = self.send(name, &message, Some(inbox));
    }

    /// Wakes the rank behind `name`. A full socket means that it has enough reasons to be awake.
    pub fn wake(&self, name: &[u8]) {
        let _ = self.send(name, &[0], None);
    }

    /// The next thing that arrived, if any. `my_token` is what honest peers present.
    pub fn receive(&self, my_token: &[u8; 16]) -> Option<Event> {
        let mut bytes = [0u8; HEAD + MAX_BODY];
        let mut space = cmsg_space!([i32; MAX_FDS], UnixCredentials);
        let mut io = [IoSliceMut::new(&mut bytes)];
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC;
        let message = recvmsg::<UnixAddr>(self.fd.as_raw_fd(), &mut io, Some(&mut space), flags).ok()?;
        let n = message.bytes;
        let mut pid = 0;
        let mut files = Vec::new();
        if let Ok(parts) = message.cmsgs() {
            for part in parts {
                match part {
                    ControlMessageOwned::ScmRights(fds) => {
                        // SAFETY: the kernel just made these descriptors for us; owning them closes what is not wanted.
                        files.extend(fds.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
                    }
                    ControlMessageOwned::ScmCredentials(c) => pid = c.pid(),
                    _ => {}
                }
            }
        }
        let message = &bytes[..n.min(bytes.len())];
        Some(parse(message, my_token).map_or(Event::Woken, |(kind, rank)| match kind {
            ASK => Event::Asked { rank },
            SHARE => Event::Sharing { rank, body: message[HEAD..].to_vec(), file: files.pop() },
            _ => match files.pop() {
                Some(inbox) => Event::Answered { rank, inbox, pid },
                None => Event::Woken,
            },
        }))
    }
}

/// The kind and sender of a datagram that presents the token.
pub fn parse(bytes: &[u8], my_token: &[u8; 16]) -> Option<(u8, u32)> {
    let mut r = Reader::new(bytes);
    if r.u32()? != MAGIC {
        return None;
    }
    let kind = r.u8()?;
    let rank = r.u32()?;
    let token: [u8; 16] = r.array()?;
    if kind != SHARE {
        r.end()?;
    }
    let differs = token.iter().zip(my_token).fold(0, |d, (a, b)| d | (a ^ b));
    (differs == 0 && [ASK, ANSWER, SHARE].contains(&kind)).then_some((kind, rank))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_that_nobody_wants_are_closed() {
        let (a, b) = (Contact::open().unwrap(), Contact::open().unwrap());
        for n in [1, 4, 5, 100, MAX_FDS] {
            let (read, write) = nix::unistd::pipe().unwrap();
            let fds = vec![write.as_raw_fd(); n];
            let to = UnixAddr::new_abstract(b.name()).unwrap();
            let rights = [ControlMessage::ScmRights(&fds)];
            sendmsg(a.fd.as_raw_fd(), &[IoSlice::new(&[0])], &rights, MsgFlags::empty(), Some(&to)).unwrap();
            assert!(matches!(b.receive(&[1; 16]), Some(Event::Woken)));
            drop(write);
            // The end of the pipe shows once nobody has it open for writing.
            nix::fcntl::fcntl(read.as_raw_fd(), nix::fcntl::F_SETFL(nix::fcntl::OFlag::O_NONBLOCK)).unwrap();
            assert_eq!(nix::unistd::read(read.as_raw_fd(), &mut [0]), Ok(0), "{n} descriptors");
        }
    }

    #[test]
    fn ask_answer_wake() {
        let (a, b) = (Contact::open().unwrap(), Contact::open().unwrap());
        assert!(a.receive(&[1; 16]).is_none());
        assert!(a.ask(b.name(), &[2; 16], 5).unwrap());
        assert!(matches!(b.receive(&[2; 16]), Some(Event::Asked { rank: 5 })));
        assert!(a.ask(b.name(), &[9; 16], 5).unwrap());
        assert!(matches!(b.receive(&[2; 16]), Some(Event::Woken)), "a wrong token does nothing");
        let file = super::super::shm::create(4096).unwrap();
        use std::os::fd::AsFd;
        b.answer(a.name(), &[1; 16], 6, file.as_fd());
        match a.receive(&[1; 16]) {
            Some(Event::Answered { rank: 6, pid, .. }) => assert_eq!(pid, std::process::id() as i32),
            _ => panic!("no answer"),
        }
        assert!(b.share(a.name(), &[1; 16], 6, b"body", Some(file.as_fd())).unwrap());
        match a.receive(&[1; 16]) {
            Some(Event::Sharing { rank: 6, body, file: Some(_) }) => assert_eq!(body, b"body"),
            _ => panic!("no body"),
        }
        b.wake(a.name());
        assert!(matches!(a.receive(&[1; 16]), Some(Event::Woken)));
        assert!(a.reaches(b.name()) && !a.reaches(b"oxygin-nobody"));
        assert!(a.ask(b"oxygin-nobody", &[0; 16], 1).is_err());
    }
}
