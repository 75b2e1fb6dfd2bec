//! Memory of GPUs that was exported, and how bytes get there and back.

use oxygin_ffi::cuda::{Context, Copies, Cuda, CudaError, Pinned, Stream};
use std::ffi::c_int;
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes that go at once.
const PIECE: u64 = 1 << 20;

/// Ranges that were exported.
pub struct Exports(Vec<Export>);

struct Export {
    /// The file that stands for it.
    inode: u64,
    at: u64,
    bytes: u64,
}

static EXPORTS: Mutex<Exports> = Mutex::new(Exports(Vec::new()));

impl Exports {
    /// A new descriptor that stands for memory of a GPU; `None`: it is none, or there are no descriptors.
    pub fn add(at: u64, bytes: u64) -> Option<c_int> {
        let cuda = Cuda::load().ok()?;
        let device = home(&cuda, at)?;
        // Now, as it may wait for kernels.
        way(&cuda, &mut WAYS.lock().unwrap_or_else(PoisonError::into_inner), device).ok()?;
        // SAFETY: a name, and no memory that anybody has.
        let fd = unsafe { libc::memfd_create(c"gpu-memory".as_ptr(), libc::MFD_CLOEXEC) };
        let inode = inode(fd)?;
        EXPORTS.lock().unwrap_or_else(PoisonError::into_inner).0.push(Export { inode, at, bytes });
        Some(fd)
    }

    /// Where `bytes` at an offset of a descriptor's memory are, or at an address of such memory without one.
    pub fn find(fd: c_int, at: u64, bytes: u64) -> Option<u64> {
        let (inode, exports) = (inode(fd), EXPORTS.lock().unwrap_or_else(PoisonError::into_inner));
        // The newest one: an address, or a file's number, may have been another's.
        exports.0.iter().rev().find_map(|export| {
            let offset = match inode {
                Some(inode) => (inode == export.inode).then_some(at),
                None => at.checked_sub(export.at),
            };
            let offset = offset.filter(|offset| offset + bytes <= export.bytes)?;
            Some(export.at + offset)
        })
    }
}

/// The number of a descriptor's file.
fn inode(fd: c_int) -> Option<u64> {
    // SAFETY: a place for the answer.
    unsafe {
        let mut found: libc::stat = std::mem::zeroed();
        (libc::fstat(fd, &mut found) == 0).then_some(found.st_ino)
    }
}

/// What copies from and to a GPU take.
struct Way {
    device: c_int,
    stream: Stream,
    pinned: Pinned,
    context: Context,
}

static WAYS: Mutex<Vec<Way>> = Mutex::new(Vec::new());

/// Copies `bytes` to `to` from `from`, each memory of a GPU or of this process; 0: they are there.
pub extern "C" fn carry(to: u64, from: u64, bytes: u64) -> c_int {
    let done = (0..bytes).step_by(PIECE as usize).try_for_each(|at| {
        let n = PIECE.min(bytes - at);
        carry_piece(to + at, from + at, n)
    });
    match done {
        Ok(()) => 0,
        Err(e) => {
            eprintln!("fake gpudirect: {e}");
            e.code as c_int
        }
    }
}

fn carry_piece(to: u64, from: u64, bytes: u64) -> Result<(), CudaError> {
    let cuda = Cuda::load().map_err(|_| CudaError { call: "dlopen", code: 3, name: "no driver".into() })?;
    let mut ways = WAYS.lock().unwrap_or_else(PoisonError::into_inner);
    let mut piece = vec![0_u8; bytes as usize];
    match home(&cuda, from) {
        Some(device) => {
            let way = way(&cuda, &mut ways, device)?;
            way.copy(way.pinned.device(), from, bytes)?;
            // SAFETY: as many bytes, which the copy has written.
            unsafe { piece.as_mut_ptr().copy_from_nonoverlapping(way.pinned.host(), bytes as usize) };
        }
        // SAFETY: memory of the process (promised to the fake).
        None => unsafe { piece.as_mut_ptr().copy_from_nonoverlapping(from as *const u8, bytes as usize) },
    }
    match home(&cuda, to) {
        Some(device) => {
            let way = way(&cuda, &mut ways, device)?;
            // SAFETY: room for a piece, and no copy is under way.
            unsafe { way.pinned.host().copy_from_nonoverlapping(piece.as_ptr(), bytes as usize) };
            way.copy(to, way.pinned.device(), bytes)
        }
        // SAFETY: as above.
        None => {
            unsafe { (to as *mut u8).copy_from_nonoverlapping(piece.as_ptr(), bytes as usize) };
            Ok(())
        }
    }
}

/// Whose memory it is; `None`: the process's.
fn home(cuda: &Cuda, at: u64) -> Option<c_int> {
    cuda.pointer(at).ok().filter(|pointer| pointer.is_device).map(|pointer| pointer.device)
}

/// That of a device; made where there is none yet, which may wait for kernels.
fn way<'a>(cuda: &Arc<Cuda>, ways: &'a mut Vec<Way>, device: c_int) -> Result<&'a Way, CudaError> {
    let known = ways.iter().position(|way| way.device == device);
    let at = known.unwrap_or(ways.len());
    if known.is_none() {
        let context = Context::create(cuda, device)?;
        let (stream, pinned) = {
            let _current = context.enter()?;
            (Stream::create(cuda)?, Pinned::alloc(cuda, PIECE as usize)?)
        };
        ways.push(Way { device, stream, pinned, context });
    }
    Ok(&ways[at])
}

impl Way {
    /// Copies between pinned memory and the GPU's, and waits.
    fn copy(&self, to: u64, from: u64, bytes: u64) -> Result<(), CudaError> {
        let _current = self.context.enter()?;
        let mut copies = Copies::default();
        copies.push(to, from, bytes as usize);
        // SAFETY: both ends stay until the stream is done, which is waited for.
        unsafe { self.stream.copy_in(&copies) }?;
        while !self.stream.is_done()? {
            std::hint::spin_loop();
        }
        Ok(())
    }
}
