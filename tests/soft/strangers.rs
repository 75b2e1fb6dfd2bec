//! Another user of the host sends whatever he likes to the contact sockets of ranks that call nothing, whose names he
//! has from /proc/net/unix: they are neither held up nor kept awake.

#[path = "../support/mod.rs"]
mod support;

use nix::sys::socket::{
    sendmsg, setsockopt, socket, sockopt, AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr,
};
use nix::sys::time::{TimeVal, TimeValLike};
use std::io::{IoSlice, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use support::children::again;
use support::common::*;

/// Set for the stranger's process: the names of the sockets.
const ENV: &str = "OXYGIN_TEST_STRANGER";
/// Messages to each socket.
const FLOOD: u64 = 20_000;
/// How long the sockets linger that he sends: longer than the test takes where nobody is held up.
const LINGER: Duration = Duration::from_secs(400);
/// Sockets that linger to each of ours.
const LINGERING: usize = 8;

/// Abstract names of this process's own contact sockets: others on the machine are left alone.
fn names() -> Vec<String> {
    let links = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let own: Vec<_> = links.filter_map(|fd| std::fs::read_link(fd.path()).ok()).collect();
    let is_own = |inode: &str| own.iter().any(|link| link.as_os_str() == &*format!("socket:[{inode}]"));
    let table = std::fs::read_to_string("/proc/net/unix").unwrap();
    let columns = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let named = columns.filter(|c| c.len() == 8 && c[7].starts_with("@oxygin-") && is_own(c[6]));
    named.map(|c| c[7][1..].to_owned()).collect()
}

/// A socket that whoever closes it last stands in `close` for.
fn lingering(listener: &TcpListener) -> TcpStream {
    let mut socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    socket.set_nonblocking(true).unwrap();
    while socket.write(&[0; 65536]).is_ok() {}
    let linger = libc::linger { l_onoff: 1, l_linger: LINGER.as_secs() as libc::c_int };
    setsockopt(&socket, sockopt::Linger, &linger).unwrap();
    socket
}

/// Has a thread that stands in `close` go on, again and again.
fn nag(thread: libc::pthread_t) {
    extern "C" fn nothing(_: libc::c_int) {}
    let nothing: extern "C" fn(libc::c_int) = nothing;
    // SAFETY: the handler does nothing; the thread stays until the process ends.
    unsafe { libc::signal(libc::SIGUSR1, nothing as libc::sighandler_t) };
    std::thread::spawn(move || loop {
        std::thread::sleep(Duration::from_millis(20));
        // SAFETY: as above.
        unsafe { libc::pthread_kill(thread, libc::SIGUSR1) };
    });
}

/// What the stranger does, in a process of his own, as another user where the test may choose one.
fn be_a_stranger(names: &str) {
    const NOBODY: libc::uid_t = 65534;
    // SAFETY: plain calls; this process has nothing that depends on who runs it.
    unsafe {
        if libc::getuid() == 0 {
            assert_eq!((libc::setgid(NOBODY), libc::setuid(NOBODY)), (0, 0));
        }
    }
    let from = socket(AddressFamily::Unix, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None).unwrap();
    setsockopt(&from, sockopt::SendTimeout, &TimeVal::seconds(1)).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let send = |name: &str, fds: &[i32]| {
        let to = UnixAddr::new_abstract(name.as_bytes()).unwrap();
        let rights = [ControlMessage::ScmRights(fds)];
        let rights = if fds.is_empty() { &[][..] } else { &rights[..] };
        sendmsg(from.as_raw_fd(), &[IoSlice::new(&[0])], rights, MsgFlags::empty(), Some(&to))
    };
    let names = names.split(' ');
    for name in names.clone() {
        // A full queue is waited for, so that all of them come, but not where its owner stands.
        let _ = (0..FLOOD).try_for_each(|_| send(name, &[]).map(drop));
    }
    // SAFETY: names the calling thread.
    nag(unsafe { libc::pthread_self() });
    for name in names {
        for _ in 0..LINGERING {
            let socket = lingering(&listener);
            let _ = send(name, &[socket.as_raw_fd()]);
            // At once, before whoever receives it closes it.
            drop(socket);
        }
    }
    println!("flooded");
    // Until the test is over; his death ends what lingers.
    let _ = std::io::stdin().read_line(&mut String::new());
}

/// How often the helper threads of this process went to sleep.
fn sleeps() -> u64 {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let of = |task: std::fs::DirEntry| {
        let status = std::fs::read_to_string(task.path().join("status")).ok()?;
        let is_helper = status.lines().next().is_some_and(|name| name.contains("oxygin-"));
        let line = status.lines().find(|line| line.starts_with("voluntary_ctxt_switches:"))?;
        is_helper.then(|| line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap())
    };
    tasks.filter_map(of).sum()
}

#[test]
fn strangers_neither_hold_up_nor_wake_idle_ranks() {
    if let Ok(names) = std::env::var(ENV) {
        return be_a_stranger(&names);
    }
    job(2, 1, |r| {
        let src = r.window(8, 0);
        let sig = r.window(1, 1);
        // They have met, and nothing is left to do.
        r.wait(r.put(0, (&src, 0), 0, (&src, 0), 1 - r.rank, Some((&sig, 0, 1))));
        r.wait_signal(&sig, 0, 1);
        r.job.barrier.wait();
        let mut stranger = None;
        if r.rank == 0 {
            std::thread::sleep(Duration::from_millis(300));
            let names = names();
            assert_eq!(names.len(), 2, "{names:?}");
            let before = sleeps();
            assert!(before > 0, "the helper threads are found by their names");
            let mut child = again("strangers_neither_hold_up_nor_wake_idle_ranks")
                .env(ENV, names.join(" "))
                .stdin(std::process::Stdio::piped())
                .stdout(std::process::Stdio::piped())
                .spawn()
                .unwrap();
            let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().unwrap()));
            assert!(lines.any(|line| line.unwrap().ends_with("flooded")), "the stranger failed");
            let woken = sleeps() - before;
            stranger = Some((child, lines));
            assert!(woken < FLOOD / 100, "the helper threads woke {woken} times for {FLOOD} messages to each");
        }
        r.job.barrier.wait();
        // The helper threads receive while nobody calls.
        r.wait(r.put(0, (&src, 0), 0, (&src, 0), 1 - r.rank, Some((&sig, 0, 1))));
        // SAFETY: an aligned word of the window.
        let word = unsafe { AtomicU64::from_ptr(sig.words.as_ptr().cast_mut()) };
        let end = Instant::now() + LINGER / 4;
        while word.load(Ordering::Acquire) < 2 {
            std::thread::sleep(Duration::from_millis(1));
            assert!(Instant::now() < end, "rank {}: its helper thread stands", r.rank);
        }
        r.job.barrier.wait();
        if let Some((mut child, lines)) = stranger {
            drop(child.stdin.take());
            // Read to the end, as it may say more.
            lines.for_each(drop);
            assert!(child.wait().unwrap().success());
        }
    });
}
