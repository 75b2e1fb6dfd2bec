//! The receiving side of a communicator: windows, and a thread for each connection that peers opened.

use crate::defect::{self, Defect};
use crate::wire::{Header, Hello, Kind, Token, CHUNK};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a message waits for a window that this rank has yet to register. On a busy machine, half a minute was too
/// little for a debug build with 129 contexts.
const REGISTRATION_PATIENCE: Duration = Duration::from_secs(120);

/// When this process last called into the plugin (milliseconds since its first call), for the defect `needs-progress`.
static LAST_CALL: AtomicU64 = AtomicU64::new(0);

fn now_ms() -> u64 {
    static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_millis() as u64
}

/// Notes that the process has called in.
pub fn called_in() {
    LAST_CALL.store(now_ms(), Ordering::Relaxed);
}

/// A registered range of this process's memory.
#[derive(Clone, Copy)]
struct Range {
    base: usize,
    len: usize,
}

/// Windows by number, and what came over the connections so far.
pub struct Inbox {
    token: Token,
    address: SocketAddr,
    stop: AtomicBool,
    /// A communicator took it over: closing the listener must leave it alone.
    adopted: AtomicBool,
    windows: Mutex<BTreeMap<u64, Range>>,
    registered: AtomicU64,
    dead: Mutex<BTreeSet<u32>>,
    acceptor: Mutex<Option<JoinHandle<()>>>,
    receivers: Mutex<Vec<(TcpStream, JoinHandle<()>)>>,
}

impl Inbox {
    /// Listens on loopback and starts to accept.
    pub fn open() -> io::Result<Arc<Self>> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let mut token = Token::default();
        std::fs::File::open("/dev/urandom")?.read_exact(&mut token)?;
        let inbox = Arc::new(Self {
            token,
            address: listener.local_addr()?,
            stop: AtomicBool::new(false),
            adopted: AtomicBool::new(false),
            windows: Mutex::default(),
            registered: AtomicU64::new(0),
            dead: Mutex::default(),
            acceptor: Mutex::default(),
            receivers: Mutex::default(),
        });
        let own = inbox.clone();
        *inbox.acceptor.lock().unwrap() = Some(std::thread::spawn(move || own.accept(&listener)));
        Ok(inbox)
    }

    /// Port and token, for the handle.
    pub fn coordinates(&self) -> (u16, Token) {
        (self.address.port(), self.token)
    }

    /// Hands the inbox from its listener to a communicator.
    pub fn adopt(&self) {
        self.adopted.store(true, Ordering::SeqCst);
    }

    /// Whether a communicator has it.
    pub fn is_adopted(&self) -> bool {
        self.adopted.load(Ordering::SeqCst)
    }

    /// Gives `base..base + len` the next window number.
    pub fn register(&self, base: usize, len: usize) -> u64 {
        let mut windows = self.windows.lock().unwrap();
        let number = self.registered.load(Ordering::Relaxed);
        windows.insert(number, Range { base, len });
        self.registered.store(number + 1, Ordering::Release);
        number
    }

    /// Leaves out the next window number: a registration was refused here, and the other ranks take the number.
    pub fn skip(&self) {
        let _windows = self.windows.lock().unwrap();
        self.registered.store(self.registered.load(Ordering::Relaxed) + 1, Ordering::Release);
    }

    /// Forgets a window; once this returns nothing touches its memory.
    pub fn deregister(&self, number: u64) {
        self.windows.lock().unwrap().remove(&number);
    }

    /// Notes that a rank is gone.
    pub fn bury(&self, rank: u32) {
        self.dead.lock().unwrap().insert(rank);
    }

    /// Whether a rank is known to be gone.
    pub fn is_dead(&self, rank: u32) -> bool {
        !defect::on(Defect::DeafToDeath) && self.dead.lock().unwrap().contains(&rank)
    }

    /// Whether any rank is known to be gone.
    pub fn any_dead(&self) -> bool {
        !defect::on(Defect::DeafToDeath) && !self.dead.lock().unwrap().is_empty()
    }

    /// Ends all threads and connections.
    pub fn close(&self) {
        if self.stop.swap(true, Ordering::SeqCst) {
            return;
        }
        // The acceptor sits in accept; a connection wakes it.
        drop(TcpStream::connect(self.address));
        if let Some(thread) = self.acceptor.lock().unwrap().take() {
            let _ = thread.join();
        }
        for (stream, thread) in std::mem::take(&mut *self.receivers.lock().unwrap()) {
            let _ = stream.shutdown(Shutdown::Both);
            let _ = thread.join();
        }
    }

    fn accept(self: &Arc<Self>, listener: &TcpListener) {
        for stream in listener.incoming() {
            if self.stop.load(Ordering::SeqCst) {
                return;
            }
            let Ok(stream) = stream else { continue };
            let Ok(copy) = stream.try_clone() else { continue };
            let own = self.clone();
            let thread = std::thread::spawn(move || own.serve(stream));
            self.receivers.lock().unwrap().push((copy, thread));
        }
    }

    fn serve(&self, mut stream: TcpStream) {
        let Ok(hello) = Hello::receive(&mut stream) else { return };
        if hello.token != self.token {
            return;
        }
        if self.apply_all(&mut stream).is_err() && !self.stop.load(Ordering::SeqCst) {
            self.bury(hello.rank);
        }
        let _ = stream.shutdown(Shutdown::Both);
    }

    fn apply_all(&self, stream: &mut TcpStream) -> io::Result<()> {
        let mut buffer = vec![0; CHUNK];
        loop {
            let header = Header::receive(stream)?;
            if defect::on(Defect::NeedsProgress) {
                while now_ms() > LAST_CALL.load(Ordering::Relaxed) + 20 && !self.stop.load(Ordering::SeqCst) {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            match header.kind {
                Kind::Bye => return Ok(()),
                Kind::Put => {
                    let data = &mut buffer[..header.len as usize];
                    stream.read_exact(data)?;
                    // SAFETY: `with_range` hands out a range of registered memory, which it keeps registered.
                    self.with_range(&header, header.len, |to| unsafe {
                        std::ptr::copy_nonoverlapping(data.as_ptr(), to, data.len());
                    });
                }
                Kind::Get => {
                    let data = &mut buffer[..header.len as usize];
                    // SAFETY: as above.
                    self.with_range(&header, header.len, |from| unsafe {
                        std::ptr::copy_nonoverlapping(from, data.as_mut_ptr(), data.len());
                    });
                    stream.write_all(data)?;
                }
                Kind::Signal if defect::on(Defect::LostUpdate) => {
                    let mut sum = 0;
                    // SAFETY: as above, 8-byte aligned by the sender's check.
                    let word = |at: *mut u8| unsafe { AtomicU64::from_ptr(at.cast()) };
                    self.with_range(&header, 8, |at| sum = word(at).load(Ordering::SeqCst).wrapping_add(header.value));
                    std::thread::sleep(Duration::from_micros(50));
                    self.with_range(&header, 8, |at| word(at).store(sum, Ordering::SeqCst));
                }
                Kind::Signal => self.with_range(&header, 8, |word| add(word, header.value)),
            }
        }
    }

    /// Calls `with` with the address of the range, unless it is not, or no longer, registered.
    fn with_range(&self, header: &Header, len: u64, with: impl FnOnce(*mut u8)) {
        let deadline = Instant::now() + REGISTRATION_PATIENCE;
        while self.registered.load(Ordering::Acquire) <= header.window {
            if self.stop.load(Ordering::SeqCst) || Instant::now() > deadline {
                return;
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        let windows = self.windows.lock().unwrap();
        if let Some(range) = windows.get(&header.window) {
            if header.offset.checked_add(len).is_some_and(|end| end <= range.len as u64) {
                with((range.base + header.offset as usize) as *mut u8);
            }
        }
    }
}

fn add(word: *mut u8, value: u64) {
    if defect::on(Defect::TornAdd) {
        // SAFETY: the caller's range is 8 registered bytes, 8-byte aligned by the sender's check.
        let halves = unsafe { [AtomicU32::from_ptr(word.cast()), AtomicU32::from_ptr(word.add(4).cast())] };
        halves[0].fetch_add(value as u32, Ordering::SeqCst);
        halves[1].fetch_add((value >> 32) as u32, Ordering::SeqCst);
        return;
    }
    // SAFETY: as above.
    let word = unsafe { AtomicU64::from_ptr(word.cast()) };
    word.fetch_add(value, Ordering::SeqCst);
}
