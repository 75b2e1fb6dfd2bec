//! How ranks on one host find each other: a datagram socket in the abstract namespace.
//!
//! It carries four things: "give me your inbox" (the sender's status attached), the answer (inbox and status
//! attached), what `gpu::share` has to say, and what wakes a sleeping rank. Abstract names live in a network
//! namespace and in no file system: two ranks that share none simply cannot reach each other, which is how "the same
//! host" is tried and not guessed.
//!
//! Anybody on the host may send here: the names are in /proc/net/unix. So every message begins with the receiver's
//! token, and the kernel drops what does not (`filter.rs`). To receive it first and look at it then would not do: a
//! stranger's messages would keep this rank awake and fill its queue, and a descriptor in one of them is closed by
//! who received it, which takes as long as the stranger likes if it is a socket that lingers. To throw it away
//! unseen, without room for descriptors, closes them just so.
//!
//! Where the kernel has no such filters, or a sandbox refuses them, the socket has its name in a folder that only
//! this user can look into (`folder.rs`): others cannot send to it, and this user's processes can do worse things to
//! each other.

use super::filter;
use super::folder::PrivateFolder;
use crate::error::{Error, Result};
use crate::sys::datagram::{receive, ReceivedDatagram};
use crate::sys::secret;
use crate::sys::wire::{Reader, Writer};
use nix::sys::socket::{
    bind, sendmsg, setsockopt, socket, sockopt, AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr,
};
use std::ffi::OsStr;
use std::io::IoSlice;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::sync::Once;

const ASK: u8 = 1;
const ANSWER: u8 = 2;
const SHARE: u8 = 3;
const WAKE: u8 = 4;

/// Bytes before a body: the receiver's token, what it is, the sender's rank.
const HEAD: usize = 16 + 1 + 4;
/// Bytes of a body.
pub const MAX_BODY: usize = 192;

/// A socket under a random name.
pub struct Contact {
    fd: OwnedFd,
    name: Vec<u8>,
    token: [u8; 16],
    /// Where the name is, if nothing else keeps strangers out.
    _folder: Option<PrivateFolder>,
}

/// Something that arrived.
pub enum Event {
    /// Rank `rank` wants this rank's inbox.
    Asked {
        /// Who asks.
        rank: u32,
        /// Its status.
        status: OwnedFd,
    },
    /// Rank `rank` sent its inbox.
    Answered {
        /// Who answers.
        rank: u32,
        /// Its inbox.
        inbox: OwnedFd,
        /// Its status.
        status: OwnedFd,
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
    /// A reason to look around.
    Woken,
}

impl Contact {
    /// A new socket for those who know this rank's token.
    pub fn open(token: [u8; 16]) -> Result<Self> {
        let fd =
            socket(AddressFamily::Unix, SockType::Datagram, SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK, None)
                .map_err(|e| Error::system(format!("making a Unix socket failed: {e}")))?;
        let mut random = [0u8; 12];
        getrandom::fill(&mut random).map_err(|e| Error::system(format!("no random numbers: {e}")))?;
        let name = random.iter().fold("oxygin-".to_owned(), |name, b| name + &format!("{b:02x}"));
        setsockopt(&fd, sockopt::PassCred, &true)
            .map_err(|e| Error::system(format!("SO_PASSCRED on a Unix socket failed: {e}")))?;
        let folder = match filter::require(&fd, &token) {
            Ok(()) => None,
            Err(e) => {
                static SAID: Once = Once::new();
                SAID.call_once(|| {
                    log::info!(
                        "this kernel filters no Unix sockets ({e}); they are in a folder of this user's instead"
                    );
                });
                Some(PrivateFolder::make(&name)?)
            }
        };
        let name = folder.as_ref().map_or(name.into_bytes(), |folder| folder.socket().into_os_string().into_vec());
        let address = address(&name).map_err(|e| Error::system(format!("a Unix socket cannot be called so: {e}")))?;
        // Last: from here on anybody can send who can reach the name.
        bind(fd.as_raw_fd(), &address).map_err(|e| Error::system(format!("binding a Unix socket failed: {e}")))?;
        Ok(Self { fd, name, token, _folder: folder })
    }

    /// The name peers send to.
    pub fn name(&self) -> &[u8] {
        &self.name
    }

    /// For polling.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn send(&self, to: &[u8], bytes: &[u8], attach: &[BorrowedFd<'_>]) -> nix::Result<()> {
        let address = address(to)?;
        let raw: Vec<_> = attach.iter().map(AsRawFd::as_raw_fd).collect();
        let rights = (!raw.is_empty()).then_some(ControlMessage::ScmRights(&raw));
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
    pub fn ask(&self, name: &[u8], its_token: &[u8; 16], me: u32, status: BorrowedFd<'_>) -> nix::Result<bool> {
        self.try_send(name, &head(its_token, ASK, me).finish(), &[status])
    }

    fn try_send(&self, name: &[u8], message: &[u8], files: &[BorrowedFd<'_>]) -> nix::Result<bool> {
        match self.send(name, message, files) {
            Ok(()) => Ok(true),
            // The last: descriptors in messages that nobody has received yet are limited, all those of this user
            // together.
            Err(nix::Error::EAGAIN | nix::Error::ENOBUFS | nix::Error::EINTR | nix::Error::ETOOMANYREFS) => Ok(false),
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
        self.try_send(name, &head(its_token, SHARE, me).raw(body).finish(), file.as_slice())
    }

    /// Whether there is a socket behind `name`. Its filter drops an empty message; without one it wakes its rank for
    /// nothing.
    pub fn reaches(&self, name: &[u8]) -> bool {
        self.try_send(name, &[], &[]).is_ok()
    }

    /// Answers a peer that asked. A full socket there is its loss: it asks again.
    pub fn answer(&self, name: &[u8], its_token: &[u8; 16], me: u32, inbox_and_status: [BorrowedFd<'_>; 2]) {
        let _ = self.send(name, &head(its_token, ANSWER, me).finish(), &inbox_and_status);
    }

    /// Wakes the rank behind `name`. `false`: not now. Its socket may be full, or this one may have as much on its way
    /// to others, who receive nothing, as a socket may.
    pub fn wake(&self, name: &[u8], its_token: &[u8; 16], me: u32) -> bool {
        !matches!(self.try_send(name, &head(its_token, WAKE, me).finish(), &[]), Ok(false))
    }

    /// The next thing that arrived, if any.
    pub fn receive(&self) -> Option<Event> {
        let mut bytes = [0u8; HEAD + MAX_BODY];
        let ReceivedDatagram { bytes: n, pid, files } = receive(self.fd.as_fd(), &mut bytes)?;
        let message = &bytes[..n];
        let mut files = files.into_iter();
        let said = parse(message, &self.token);
        Some(said.map_or(Event::Woken, |(kind, rank)| match (kind, files.next(), files.next()) {
            (ASK, Some(status), _) => Event::Asked { rank, status },
            (ANSWER, Some(inbox), Some(status)) => Event::Answered { rank, inbox, status, pid },
            (SHARE, file, _) => Event::Sharing { rank, body: message[HEAD..].to_vec(), file },
            _ => Event::Woken,
        }))
    }
}

#[cfg(test)]
impl Contact {
    /// Sends to one that receives nothing until there is no room for more, whoever it is for.
    pub fn fill(&self, stranger: &Contact, its_token: &[u8; 16]) {
        // The least that the kernel grants is less than the shortest queue of a socket takes.
        setsockopt(&self.fd, sockopt::SndBuf, &0).unwrap();
        while self.wake(stranger.name(), its_token, 0) {}
    }
}

/// A name with a slash in front is in the file system, another one in the abstract namespace.
fn address(name: &[u8]) -> nix::Result<UnixAddr> {
    match name.first() {
        Some(b'/') => UnixAddr::new(OsStr::from_bytes(name)),
        _ => UnixAddr::new_abstract(name),
    }
}

fn head(its_token: &[u8; 16], kind: u8, me: u32) -> Writer {
    let mut w = Writer::new();
    w.raw(its_token).u8(kind).u32(me);
    w
}

/// The kind and sender of a datagram that presents the token.
pub fn parse(bytes: &[u8], my_token: &[u8; 16]) -> Option<(u8, u32)> {
    let mut r = Reader::new(bytes);
    let token: [u8; 16] = r.array()?;
    let kind = r.u8()?;
    let rank = r.u32()?;
    if kind != SHARE {
        r.end()?;
    }
    (secret::same(&token, my_token) && [ASK, ANSWER, SHARE, WAKE].contains(&kind)).then_some((kind, rank))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::datagram::MAX_FDS;
    use libc::{sock_filter, sock_fprog};
    use nix::sys::socket::recv;
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::fs::PermissionsExt;
    use std::time::Duration;

    const TOKEN: [u8; 16] = *b"an honest token.";

    /// Sends `bytes` and descriptors to `to` as anybody can.
    fn throw(to: &Contact, bytes: &[u8], fds: &[i32]) -> usize {
        let fd = socket(AddressFamily::Unix, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None).unwrap();
        let to = address(to.name()).unwrap();
        let rights = [ControlMessage::ScmRights(fds)];
        let rights = if fds.is_empty() { &[][..] } else { &rights[..] };
        sendmsg(fd.as_raw_fd(), &[IoSlice::new(bytes)], rights, MsgFlags::MSG_DONTWAIT, Some(&to)).unwrap()
    }

    /// Whether the kernel has queued anything.
    fn is_empty(contact: &Contact) -> bool {
        let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
        recv(contact.fd.as_raw_fd(), &mut [0], flags) == Err(nix::Error::EAGAIN)
    }

    /// Whether nobody has the other end of a pipe open any more.
    fn has_ended(read: &OwnedFd) -> bool {
        nix::fcntl::fcntl(read.as_raw_fd(), nix::fcntl::F_SETFL(nix::fcntl::OFlag::O_NONBLOCK)).unwrap();
        nix::unistd::read(read.as_raw_fd(), &mut [0]) == Ok(0)
    }

    #[test]
    fn the_kernel_drops_what_lacks_the_token() {
        let contact = Contact::open(TOKEN).unwrap();
        let whole = head(&TOKEN, ASK, 5).finish();
        let mut guesses: Vec<Vec<u8>> = vec![vec![], vec![0], TOKEN[..15].to_vec(), vec![0; 60_000]];
        guesses.push([&[0], &whole[..]].concat());
        guesses.push(whole[1..].to_vec());
        for bit in 0..128 {
            let mut guess = whole.clone();
            guess[bit / 8] ^= 1 << (bit % 8);
            guesses.push(guess);
        }
        // Two wrong words whose differences are the same: gathered, they must not be gone.
        let mut guess = whole.clone();
        (0..8).for_each(|i| guess[i] ^= 0x55);
        guesses.push(guess);
        for guess in guesses {
            let (read, write) = nix::unistd::pipe().unwrap();
            assert_eq!(throw(&contact, &guess, &[write.as_raw_fd(); 3]), guess.len(), "the sender is told nothing");
            assert!(is_empty(&contact), "{guess:?}");
            drop(write);
            assert!(has_ended(&read), "a descriptor that came with {} bytes is open", guess.len());
        }
        assert!(contact.receive().is_none());
        // Honest peers get through after as much as ever came.
        let file = crate::sys::memfd::create(4096).unwrap();
        throw(&contact, &whole, &[file.as_raw_fd()]);
        assert!(matches!(contact.receive(), Some(Event::Asked { rank: 5, .. })));
    }

    #[test]
    fn nobody_takes_the_filter_off() {
        let contact = Contact::open(TOKEN).unwrap();
        let zero = 0 as libc::c_int;
        for option in [libc::SO_DETACH_FILTER, libc::SO_LOCK_FILTER] {
            // SAFETY: an option of the size of an int, which lives through the call.
            let code = unsafe {
                let fd = contact.fd.as_raw_fd();
                libc::setsockopt(fd, libc::SOL_SOCKET, option, (&raw const zero).cast(), 4)
            };
            assert_eq!((code, nix::Error::last()), (-1, nix::Error::EPERM));
        }
    }

    /// The last one to close such a socket stands in `close` until its bytes are gone or its time is over.
    #[test]
    fn a_stranger_closes_what_lingers_himself() {
        const LINGER: Duration = Duration::from_secs(400);
        let contact = Contact::open(TOKEN).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut lingering = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        lingering.set_nonblocking(true).unwrap();
        while lingering.write(&[0; 65536]).is_ok() {}
        let linger = libc::linger { l_onoff: 1, l_linger: LINGER.as_secs() as libc::c_int };
        setsockopt(&lingering, sockopt::Linger, &linger).unwrap();
        throw(&contact, &[0], &[lingering.as_raw_fd()]);
        // Whoever has it last: the stranger, in a thread of his own, if it was dropped; the receiver, if it was queued.
        let stranger = std::thread::spawn(move || drop(lingering));
        let (done, is_done) = std::sync::mpsc::channel();
        let receiver = std::thread::spawn(move || {
            while !stranger.is_finished() && !is_empty(&contact) {
                std::thread::yield_now();
            }
            let _ = contact.receive();
            done.send(()).unwrap();
            stranger
        });
        is_done.recv_timeout(LINGER / 4).expect("the receiver stands in close");
        // Ends the wait of the stranger: his peer is gone.
        drop(listener);
        receiver.join().unwrap().join().unwrap();
    }

    /// Has the kernel refuse this thread, and no other, socket filters: with this error.
    fn without_filters(error: i32) {
        let step = |code, jt, jf, k| sock_filter { code, jt, jf, k };
        let mut filter = [
            step(0x20, 0, 0, 0), // load the number of the system call
            step(0x15, 0, 3, libc::SYS_setsockopt as u32),
            step(0x20, 0, 0, 32), // load the option
            step(0x15, 0, 1, libc::SO_ATTACH_FILTER as u32),
            step(0x06, 0, 0, libc::SECCOMP_RET_ERRNO | error as u32),
            step(0x06, 0, 0, libc::SECCOMP_RET_ALLOW),
        ];
        let program = sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
        // SAFETY: the kernel copies the program, which outlives the call.
        let result = unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
                | libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program)
        };
        assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    }

    #[test]
    fn without_filters_other_users_find_no_name() {
        for error in [libc::ENOPROTOOPT, libc::EPERM, libc::EINVAL] {
            let open = move || {
                without_filters(error);
                Contact::open(TOKEN).unwrap()
            };
            let contact = std::thread::spawn(open).join().unwrap();
            let folder = contact._folder.as_ref().expect("no filter, no folder").socket().parent().unwrap().to_owned();
            assert_eq!(folder.metadata().unwrap().permissions().mode() & 0o777, 0o700);
            // Peers of this user find it, whatever kind their own is.
            let peer = Contact::open([2; 16]).unwrap();
            assert!(peer._folder.is_none() && peer.reaches(contact.name()));
            assert!(matches!(contact.receive(), Some(Event::Woken)));
            let file = crate::sys::memfd::create(4096).unwrap();
            assert!(peer.ask(contact.name(), &TOKEN, 7, file.as_fd()).unwrap());
            assert!(matches!(contact.receive(), Some(Event::Asked { rank: 7, .. })));
            contact.answer(peer.name(), &[2; 16], 6, [file.as_fd(); 2]);
            assert!(matches!(peer.receive(), Some(Event::Answered { rank: 6, .. })));
            // SAFETY: plain call.
            if unsafe { libc::geteuid() } == 0 {
                let name = contact.name().to_vec();
                let stranger = std::thread::spawn(move || {
                    let peer = Contact::open([3; 16]).unwrap();
                    // SAFETY: the system call itself: this thread alone becomes somebody else.
                    assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, 65_534, 65_534, 65_534) }, 0);
                    peer.try_send(&name, &head(&TOKEN, ASK, 5).finish(), &[])
                });
                assert_eq!(stranger.join().unwrap(), Err(nix::Error::EACCES));
                assert!(is_empty(&contact));
            }
            drop(contact);
            assert!(!folder.exists());
        }
    }

    #[test]
    fn descriptors_that_nobody_wants_are_closed() {
        let contact = Contact::open(TOKEN).unwrap();
        for n in [1, 4, 5, 100, MAX_FDS] {
            let (read, write) = nix::unistd::pipe().unwrap();
            throw(&contact, &head(&TOKEN, WAKE, 0).finish(), &vec![write.as_raw_fd(); n]);
            assert!(matches!(contact.receive(), Some(Event::Woken)));
            drop(write);
            assert!(has_ended(&read), "{n} descriptors");
        }
    }

    #[test]
    fn ask_answer_wake() {
        use crate::sys::memfd::{create, sealed_len};
        let (a, b) = (Contact::open([1; 16]).unwrap(), Contact::open([2; 16]).unwrap());
        let (file, other) = (create(4096).unwrap(), create(8192).unwrap());
        assert!(a.receive().is_none());
        assert!(a.ask(b.name(), &[2; 16], 5, other.as_fd()).unwrap());
        match b.receive() {
            Some(Event::Asked { rank: 5, status }) => assert_eq!(sealed_len(status.as_fd()), Some(8192)),
            _ => panic!("no probe"),
        }
        assert!(a.ask(b.name(), &[9; 16], 5, other.as_fd()).unwrap());
        assert!(b.receive().is_none(), "a wrong token does nothing");
        b.answer(a.name(), &[1; 16], 6, [file.as_fd(), other.as_fd()]);
        match a.receive() {
            Some(Event::Answered { rank: 6, inbox, status, pid }) => {
                assert_eq!(pid, std::process::id() as i32);
                assert_eq!([inbox, status].map(|f| sealed_len(f.as_fd())), [Some(4096), Some(8192)]);
            }
            _ => panic!("no answer"),
        }
        assert!(b.share(a.name(), &[1; 16], 6, b"body", Some(file.as_fd())).unwrap());
        match a.receive() {
            Some(Event::Sharing { rank: 6, body, file: Some(_) }) => assert_eq!(body, b"body"),
            _ => panic!("no body"),
        }
        assert!(b.wake(a.name(), &[1; 16], 6));
        assert!(matches!(a.receive(), Some(Event::Woken)));
        // Those that nobody receives fill the sender's own room, too.
        let sleeper = Contact::open([3; 16]).unwrap();
        b.fill(&sleeper, &[3; 16]);
        assert!(!b.wake(a.name(), &[1; 16], 6));
        drop(sleeper);
        assert!(b.wake(a.name(), &[1; 16], 6));
        assert!(matches!(a.receive(), Some(Event::Woken)));
        assert!(a.reaches(b.name()) && !a.reaches(b"oxygin-nobody"));
        assert!(b.receive().is_none(), "looking for a rank does not wake it");
        assert!(a.ask(b"oxygin-nobody", &[0; 16], 1, file.as_fd()).is_err());
    }
}
