//! The sending side of one (context, peer): a queue and the thread that empties it.

use crate::defect::{self, Defect};
use crate::inbox::Inbox;
use crate::wire::{Header, Hello, Kind, Token, CHUNK};
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{channel, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// How an operation stands.
#[derive(Default)]
pub struct Request {
    /// The local memory may be reused.
    pub done: AtomicBool,
    /// It never will be done.
    pub failed: AtomicBool,
}

/// Local memory of an operation.
#[derive(Clone, Copy)]
pub struct Local {
    /// First byte.
    pub address: usize,
    /// Bytes.
    pub len: usize,
}

/// A range of the peer's memory.
#[derive(Clone, Copy)]
pub struct Remote {
    /// Window number.
    pub window: u64,
    /// Bytes into it.
    pub offset: u64,
}

/// One operation.
pub enum Job {
    /// Data, a signal, or data and then a signal.
    Put { from: Local, to: Remote, signal: Option<(Remote, u64)>, request: Arc<Request> },
    /// Data back.
    Get { from: Remote, to: Local, request: Arc<Request> },
}

/// The queue; closing it sends what is in it first.
pub struct Outbox {
    queue: Mutex<Option<Sender<Job>>>,
    stream: TcpStream,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// Operations queued and not yet done.
    pub unfinished: Arc<AtomicUsize>,
}

impl Outbox {
    /// Connects to `peer`, which listens on `port`.
    pub fn open(port: u16, token: Token, rank: u32, peer: u32, inbox: Arc<Inbox>) -> io::Result<Self> {
        let mut stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.set_nodelay(true)?;
        Hello { token, rank }.send(&mut stream)?;
        let (sender, receiver) = channel();
        let unfinished = Arc::new(AtomicUsize::new(0));
        let worker =
            Worker { stream: stream.try_clone()?, peer, own: peer == rank, inbox, unfinished: unfinished.clone() };
        let thread = std::thread::spawn(move || worker.run(&receiver));
        Ok(Self { queue: Mutex::new(Some(sender)), stream, thread: Mutex::new(Some(thread)), unfinished })
    }

    /// Queues an operation; `false` when the outbox is closed.
    pub fn push(&self, job: Job) -> bool {
        self.unfinished.fetch_add(1, Ordering::SeqCst);
        self.queue.lock().unwrap().as_ref().is_some_and(|queue| queue.send(job).is_ok())
    }

    /// Sends what is queued, sends its FIN and ends the thread. A peer that takes nothing for two seconds is cut off.
    pub fn close(&self) {
        drop(self.queue.lock().unwrap().take());
        if let Some(thread) = self.thread.lock().unwrap().take() {
            for _ in 0..2000 {
                if thread.is_finished() {
                    break;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            let _ = self.stream.shutdown(Shutdown::Both);
            let _ = thread.join();
        }
    }
}

struct Worker {
    stream: TcpStream,
    peer: u32,
    own: bool,
    inbox: Arc<Inbox>,
    unfinished: Arc<AtomicUsize>,
}

impl Worker {
    fn run(mut self, queue: &Receiver<Job>) {
        let mut held = None;
        while let Ok(job) = queue.recv() {
            let hold = matches!(&job, Job::Put { from, signal: None, .. } if from.len > 0);
            if hold && defect::on(Defect::StrongIsWeak) {
                if let Some(before) = held.replace(job) {
                    self.one(before);
                }
                continue;
            }
            self.one(job);
            if let Some(before) = held.take() {
                std::thread::sleep(Duration::from_micros(200));
                self.one(before);
            }
        }
        if let Some(before) = held {
            self.one(before);
        }
        let _ = Header { kind: Kind::Bye, window: 0, offset: 0, len: 0, value: 0 }.send(&mut self.stream);
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    fn one(&mut self, job: Job) {
        let (result, request) = match job {
            Job::Put { from, to, signal, request } => (self.put(from, to, signal, &request), request),
            Job::Get { from, to, request } => (self.get(from, to), request),
        };
        self.unfinished.fetch_sub(1, Ordering::SeqCst);
        match result {
            Ok(()) => request.done.store(true, Ordering::Release),
            Err(_) => {
                self.inbox.bury(self.peer);
                request.failed.store(true, Ordering::Release);
            }
        }
    }

    fn put(&mut self, from: Local, to: Remote, signal: Option<(Remote, u64)>, request: &Request) -> io::Result<()> {
        if defect::on(Defect::NoSelf) && self.own {
            return Ok(());
        }
        if defect::on(Defect::EarlyTest) {
            request.done.store(true, Ordering::Release);
            std::thread::sleep(Duration::from_micros(300));
        }
        if defect::on(Defect::SignalBeforeData) && from.len > 0 {
            self.signal(signal)?;
            std::thread::sleep(Duration::from_micros(200));
        }
        let mut data: &[u8] = &[];
        if from.len > 0 {
            // SAFETY: the caller keeps the source readable until the request is done, which it is after this.
            data = unsafe { std::slice::from_raw_parts(from.address as *const u8, from.len) };
        }
        let mut to = to;
        if defect::on(Defect::WrongOffset) && to.offset > 4096 && to.offset % 2 == 1 {
            to.offset -= 1;
        }
        if defect::on(Defect::LostByteUnaligned) && to.offset % 8 != 0 && !data.is_empty() {
            data = &data[..data.len() - 1];
        }
        for (i, chunk) in data.chunks(CHUNK).enumerate() {
            if i == 1 && defect::on(Defect::LostChunk) {
                continue;
            }
            let offset = to.offset + (i * CHUNK) as u64;
            let header = Header { kind: Kind::Put, window: to.window, offset, len: chunk.len() as u64, value: 0 };
            header.send(&mut self.stream)?;
            self.stream.write_all(chunk)?;
        }
        if !(defect::on(Defect::SignalBeforeData) && from.len > 0) {
            self.signal(signal)?;
        }
        Ok(())
    }

    fn signal(&mut self, signal: Option<(Remote, u64)>) -> io::Result<()> {
        let Some((Remote { window, offset }, value)) = signal else { return Ok(()) };
        static COUNT: AtomicU64 = AtomicU64::new(0);
        if defect::on(Defect::DropSignal) && COUNT.fetch_add(1, Ordering::Relaxed) % 5 == 4 {
            return Ok(());
        }
        Header { kind: Kind::Signal, window, offset, len: 0, value }.send(&mut self.stream)
    }

    fn get(&mut self, from: Remote, to: Local) -> io::Result<()> {
        let mut done = 0;
        // Nothing is fetched for an empty get, whatever its address.
        let len = to.len - usize::from(defect::on(Defect::ShortGet) && to.len > 0);
        while done < len {
            let chunk = (len - done).min(CHUNK);
            let offset = from.offset + done as u64;
            Header { kind: Kind::Get, window: from.window, offset, len: chunk as u64, value: 0 }
                .send(&mut self.stream)?;
            // SAFETY: the caller keeps the destination writable until the request is done.
            let into = unsafe { std::slice::from_raw_parts_mut((to.address + done) as *mut u8, chunk) };
            self.stream.read_exact(into)?;
            done += chunk;
        }
        Ok(())
    }
}
