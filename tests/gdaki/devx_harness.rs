//! The fake libmlx5 as a program uses the real one: by its C functions alone. Commands are encoded here by hand, with
//! the numbers of bits that programmers know by heart from manuals, not from a table.

use crate::support::turn::{self, Turn};
use libloading::Library;
use oxygin_ffi::verbs::types::{ibv_context, ibv_device, ibv_mr, ibv_pd};
use std::ffi::{c_char, c_int, c_void, CString};
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How long a test waits for what must happen.
const PATIENCE: Duration = Duration::from_secs(20);
/// Write, read, atomics: `IBV_ACCESS_*`.
const EVERYTHING: c_int = 0xf;

/// Both libraries, whose turn it is.
pub struct Fake {
    verbs: Library,
    mlx5: Library,
    /// What a test that failed has left.
    before: [i64; 4],
    _turn: Turn,
}

/// Counts of what has been made and not ended.
const LIVE: [&str; 4] = ["live_mlx5", "live_regions", "live_pds", "live_contexts"];

/// Where cargo put the fake libibverbs.
pub fn verbs_path() -> PathBuf {
    let path = std::env::current_exe().unwrap().with_file_name("libfake_verbs.so");
    assert!(path.exists(), "{} is not there; build the package fake-verbs", path.display());
    path
}

impl Fake {
    pub fn take() -> Self {
        Self::take_with(Path::new(fake_verbs::mlx5::LIBRARY))
    }

    /// The same, with another libmlx5.
    pub fn take_with(mlx5: &Path) -> Self {
        let turn = turn::take();
        // SAFETY: our own libraries; the second one leads into the first.
        let (verbs, mlx5) = unsafe { (Library::new(verbs_path()).unwrap(), Library::new(mlx5).unwrap()) };
        let mut fake = Self { verbs, mlx5, before: [0; 4], _turn: turn };
        fake.set("reset", 0);
        fake.before = LIVE.map(|key| fake.count(key));
        fake
    }

    /// # Safety
    /// There is a function of this name and type.
    pub unsafe fn verbs<F: Copy>(&self, name: &str) -> F {
        // SAFETY: passed on.
        unsafe { *self.verbs.get::<F>(name.as_bytes()).unwrap_or_else(|e| panic!("{name}: {e}")) }
    }

    /// # Safety
    /// There is a function of this name and type.
    pub unsafe fn mlx5<F: Copy>(&self, name: &str) -> F {
        // SAFETY: passed on.
        unsafe { *self.mlx5.get::<F>(name.as_bytes()).unwrap_or_else(|e| panic!("{name}: {e}")) }
    }

    /// Whether libmlx5 has a function.
    pub fn has(&self, name: &str) -> bool {
        // SAFETY: only looked for.
        unsafe { self.mlx5.get::<*const c_void>(name.as_bytes()) }.is_ok()
    }

    pub fn set(&self, key: &str, value: i64) {
        let name = CString::new(key).unwrap();
        type Set = unsafe extern "C" fn(*const c_char, i64) -> i64;
        // SAFETY: the fake has a function of this type.
        assert_eq!(unsafe { self.verbs::<Set>("fake_verbs_control")(name.as_ptr(), value) }, 0, "no {key}");
    }

    pub fn count(&self, key: &str) -> i64 {
        let name = CString::new(key).unwrap();
        // SAFETY: as above.
        unsafe { self.verbs::<unsafe extern "C" fn(*const c_char) -> i64>("fake_verbs_query")(name.as_ptr()) }
    }

    /// Why the last command was refused.
    pub fn refusal(&self) -> String {
        let mut text = [0_u8; 256];
        type Why = unsafe extern "C" fn(*mut u8, usize) -> usize;
        // SAFETY: as above; as many bytes as it is told.
        let len = unsafe { self.verbs::<Why>("fake_mlx5_refusal")(text.as_mut_ptr(), text.len()) };
        String::from_utf8_lossy(&text[..len]).into_owned()
    }

    /// What has been made since the beginning and not ended.
    pub fn left(&self) -> [i64; 4] {
        std::array::from_fn(|i| self.count(LIVE[i]) - self.before[i])
    }

    /// Waits until a count is this.
    pub fn wait_for(&self, key: &str, value: i64) {
        wait(key, || self.count(key) == value);
    }
}

/// Waits for what must happen.
pub fn wait(what: &str, done: impl Fn() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < end, "{what} has not come");
        std::thread::sleep(Duration::from_micros(20));
    }
}

/// Whether something can be read there.
pub fn is_readable(fd: c_int) -> bool {
    let mut asked = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one descriptor, for no time.
    unsafe { libc::poll(&mut asked, 1, 0) == 1 }
}

/// Sets `bits` bits from bit `at` on.
pub fn put(command: &mut [u8], at: usize, bits: usize, value: u64) {
    for i in 0..bits {
        let on = value >> (bits - 1 - i) & 1 == 1;
        let (byte, mask) = ((at + i) / 8, 0x80 >> ((at + i) % 8));
        command[byte] = if on { command[byte] | mask } else { command[byte] & !mask };
    }
}

/// Reads them.
pub fn get(answer: &[u8], at: usize, bits: usize) -> u64 {
    (at..at + bits).fold(0, |value, bit| value << 1 | u64::from(answer[bit / 8] >> (7 - bit % 8) & 1))
}

/// An open device with a protection domain and a doorbell page.
pub struct Device<'a> {
    pub fake: &'a Fake,
    pub context: *mut ibv_context,
    pub pd: *mut ibv_pd,
    pub pdn: u32,
    pub uar: *mut UarHandle,
}

#[repr(C)]
pub struct UarHandle {
    pub reg: *mut c_void,
    pub base: *mut c_void,
    pub page: u32,
}

#[repr(C)]
struct OpenAsked {
    flags: u32,
    mask: u64,
    descriptors: *mut c_void,
}

/// Without a lock of the fake: errno of this thread.
pub fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

impl<'a> Device<'a> {
    pub fn open(fake: &'a Fake, index: usize) -> Self {
        // SAFETY: as libibverbs and libmlx5 are used; every object is made once and ended in drop.
        unsafe {
            type List = unsafe extern "C" fn(*mut c_int) -> *mut *mut ibv_device;
            let list = fake.verbs::<List>("ibv_get_device_list")(null_mut());
            let mut asked = OpenAsked { flags: 1, mask: 0, descriptors: null_mut() };
            type Open = unsafe extern "C" fn(*mut ibv_device, *mut OpenAsked) -> *mut ibv_context;
            let context = fake.mlx5::<Open>("mlx5dv_open_device")(*list.add(index), &mut asked);
            assert!(!context.is_null());
            fake.verbs::<unsafe extern "C" fn(*mut *mut ibv_device)>("ibv_free_device_list")(list);
            let pd = fake.verbs::<unsafe extern "C" fn(*mut ibv_context) -> *mut ibv_pd>("ibv_alloc_pd")(context);
            let mut number = [0_u64; 2];
            let mut object = [null_mut::<c_void>(); 16];
            (object[12], object[13]) = (pd.cast(), number.as_mut_ptr().cast());
            type Init = unsafe extern "C" fn(*mut c_void, u64) -> c_int;
            assert_eq!(fake.mlx5::<Init>("mlx5dv_init_obj")(object.as_mut_ptr().cast(), 1 << 6), 0);
            type Uar = unsafe extern "C" fn(*mut ibv_context, u32) -> *mut UarHandle;
            let uar = fake.mlx5::<Uar>("mlx5dv_devx_alloc_uar")(context, 1 << 31);
            assert!(!uar.is_null());
            Self { fake, context, pd, pdn: number[0] as u32, uar }
        }
    }

    /// Registers memory for queues; 0: it failed, see errno.
    pub fn umem(&self, memory: &[AtomicU64]) -> Umem<'a> {
        type Reg = unsafe extern "C" fn(*mut ibv_context, *mut c_void, usize, u32) -> *mut u32;
        let (at, bytes) = (memory.as_ptr().cast_mut().cast(), size_of_val(memory));
        // SAFETY: the memory outlives the queues in every test.
        let handle = unsafe { self.fake.mlx5::<Reg>("mlx5dv_devx_umem_reg")(self.context, at, bytes, 1) };
        assert!(!handle.is_null(), "errno {}", errno());
        Umem { fake: self.fake, handle }
    }

    /// A command that makes something: its object, or the errno; and the answer.
    pub fn create(&self, command: &[u8]) -> (Result<Object<'a>, i32>, [u8; 16]) {
        type Create = unsafe extern "C" fn(*mut ibv_context, *const u8, usize, *mut u8, usize) -> *mut c_void;
        let mut out = [0; 16];
        // SAFETY: as many bytes as it is told.
        let object = unsafe {
            let create = self.fake.mlx5::<Create>("mlx5dv_devx_obj_create");
            create(self.context, command.as_ptr(), command.len(), out.as_mut_ptr(), out.len())
        };
        let error = errno();
        let made = if object.is_null() { Err(error) } else { Ok(Object { fake: self.fake, handle: object }) };
        (made, out)
    }

    /// Registers memory that entries name: its local and its remote key.
    pub fn region(&self, memory: &[AtomicU64]) -> Region<'a> {
        type Reg = unsafe extern "C" fn(*mut ibv_pd, *mut c_void, usize, u64, u32) -> *mut ibv_mr;
        let (at, bytes) = (memory.as_ptr().cast_mut().cast(), size_of_val(memory));
        // SAFETY: as above. The first byte is called 0, as windows are.
        let mr = unsafe { self.fake.verbs::<Reg>("ibv_reg_mr_iova2")(self.pd, at, bytes, 0, EVERYTHING as u32) };
        assert!(!mr.is_null());
        // SAFETY: just made.
        let (lkey, rkey) = unsafe { ((*mr).lkey, (*mr).rkey) };
        Region { fake: self.fake, mr, lkey, rkey }
    }
}

impl Drop for Device<'_> {
    fn drop(&mut self) {
        // SAFETY: each of them once; what was made of them has ended, or a test wants to see that it has not.
        unsafe {
            self.fake.mlx5::<unsafe extern "C" fn(*mut UarHandle)>("mlx5dv_devx_free_uar")(self.uar);
            self.fake.verbs::<unsafe extern "C" fn(*mut ibv_pd) -> c_int>("ibv_dealloc_pd")(self.pd);
            self.fake.verbs::<unsafe extern "C" fn(*mut ibv_context) -> c_int>("ibv_close_device")(self.context);
        }
    }
}

/// Memory of queues.
pub struct Umem<'a> {
    pub fake: &'a Fake,
    pub handle: *mut u32,
}

impl Umem<'_> {
    pub fn id(&self) -> u32 {
        // SAFETY: the number is first.
        unsafe { *self.handle }
    }

    /// Ends it; an errno if it is in use.
    pub fn end(&self) -> i32 {
        type End = unsafe extern "C" fn(*mut u32) -> c_int;
        // SAFETY: once more only after an error.
        unsafe { self.fake.mlx5::<End>("mlx5dv_devx_umem_dereg")(self.handle) }
    }
}

/// What a command has made.
pub struct Object<'a> {
    pub fake: &'a Fake,
    pub handle: *mut c_void,
}

impl Object<'_> {
    fn call(&self, name: &str, command: &[u8], out: &mut [u8]) -> i32 {
        type Call = unsafe extern "C" fn(*mut c_void, *const u8, usize, *mut u8, usize) -> c_int;
        // SAFETY: as many bytes as it is told.
        unsafe {
            let call = self.fake.mlx5::<Call>(name);
            call(self.handle, command.as_ptr(), command.len(), out.as_mut_ptr(), out.len())
        }
    }

    /// Errno, then status.
    pub fn modify(&self, command: &[u8]) -> (i32, u8) {
        let mut out = [0; 16];
        (self.call("mlx5dv_devx_obj_modify", command, &mut out), out[0])
    }

    /// `QUERY_QP`.
    pub fn query(&self, number: u32) -> [u8; 272] {
        let (mut command, mut out) = ([0; 16], [0; 272]);
        put(&mut command, 0, 16, 0x50b);
        put(&mut command, 0x48, 24, number.into());
        assert_eq!(self.call("mlx5dv_devx_obj_query", &command, &mut out), 0);
        out
    }

    /// Ends it; an errno if it is in use.
    pub fn end(&self) -> i32 {
        // SAFETY: once more only after an error.
        unsafe { self.fake.mlx5::<unsafe extern "C" fn(*mut c_void) -> c_int>("mlx5dv_devx_obj_destroy")(self.handle) }
    }
}

/// Memory that entries name.
pub struct Region<'a> {
    fake: &'a Fake,
    mr: *mut ibv_mr,
    pub lkey: u32,
    pub rkey: u32,
}

impl Drop for Region<'_> {
    fn drop(&mut self) {
        // SAFETY: once.
        unsafe { self.fake.verbs::<unsafe extern "C" fn(*mut ibv_mr) -> c_int>("ibv_dereg_mr")(self.mr) };
    }
}

/// Words in whole pages, aligned to them; given back never, since queues of the fake may still look at them.
pub fn words(count: usize) -> &'static [AtomicU64] {
    let all = vec![0_u64; count.next_multiple_of(512) + 512].leak();
    let at = all.as_ptr().align_offset(4096);
    let part = &mut all[at..at + count];
    // SAFETY: an AtomicU64 is a u64, and nobody else has them.
    unsafe { &*(std::ptr::from_mut::<[u64]>(part) as *const [AtomicU64]) }
}

/// A completion queue's and a queue pair's doorbell record, big-endian.
pub fn record(words: &'static [AtomicU64], half: usize) -> &'static AtomicU32 {
    // SAFETY: one of the first word's halves, which nobody uses as a whole.
    unsafe { AtomicU32::from_ptr(words.as_ptr().cast::<u32>().cast_mut().add(half)) }
}

/// Rings a doorbell register.
pub fn ring(register: *mut c_void, index: u64, number: u32) {
    let word = u64::from(number) << 8 | (index & 0xffff) << 40;
    // SAFETY: a register of a page that the test has; eight aligned bytes.
    unsafe { AtomicU64::from_ptr(register.cast()) }.store(word.to_be(), Ordering::Release);
}
