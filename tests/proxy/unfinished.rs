//! Sets of contexts that come to nothing when their windows are registered already: the windows end before the memory
//! under them does.

use crate::support::common::ok;
use crate::support::device::own;
use nccl_plugin_api::HANDLE_BYTES;
use oxygin::comm::backend::report::QueueOwner;
use oxygin::comm::coll::{Coll, Connecting, Observer};
use oxygin::comm::contexts::Contexts;
use oxygin::comm::device::DeviceSpec;
use oxygin::comm::listen::Listen;
use oxygin::comm::nic::NicSpec;
use oxygin::config::Ringing;
use oxygin::error::Error;
use oxygin::fabric::{ContextSpec, World};
use oxygin::memory::window::Window;
use oxygin::proxy::descriptor::layout::{Layout, Table};
use oxygin::sys::handles;
use oxygin::vtable::rma_v16::ncclRmaPlugin_v16 as T;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex};

/// What became of the windows: their first bytes as they came, and as they went whether memory was still there.
#[derive(Default)]
struct Seen {
    added: Mutex<Vec<u64>>,
    removed: Mutex<Vec<(u64, bool)>>,
}

struct Watch(Arc<Seen>);

impl Observer for Watch {
    fn window_added(&self, window: &Window) {
        self.0.added.lock().unwrap().push(window.base());
    }

    fn window_removed(&self, window: &Window) {
        self.0.removed.lock().unwrap().push((window.base(), is_mapped(window.base())));
    }

    fn contexts_added(&self, _: &Contexts) {}
    fn coll_named(&self, _: *mut c_void) {}
}

/// Whether there is memory at an address.
fn is_mapped(at: u64) -> bool {
    let mut resident = 0;
    let page = at & !4095;
    // SAFETY: a place for one page's answer; the page itself is not touched.
    unsafe { libc::mincore(page as *mut c_void, 1, &mut resident) == 0 }
}

/// From here on the calling thread can start no thread: pthread_create says EAGAIN, as where a limit is reached.
fn refuse_threads() {
    let statement = |code: u32, k: u32, jt: u8, jf: u8| libc::sock_filter { code: code as u16, jt, jf, k };
    let (load, is, give) = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, libc::BPF_JMP | libc::BPF_JEQ, libc::BPF_RET);
    let mut program = [
        // The number of the call.
        statement(load, 0, 0, 0),
        statement(is, libc::SYS_clone as u32, 2, 0),
        statement(is, libc::SYS_clone3 as u32, 1, 0),
        statement(give, libc::SECCOMP_RET_ALLOW, 0, 0),
        statement(give, libc::SECCOMP_RET_ERRNO | libc::EAGAIN as u32, 0, 0),
    ];
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: a filter of these statements, which the kernel copies; it holds for this thread alone.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &filter), 0);
    }
}

/// A communicator of one rank, whose windows `seen` hears of; `body` gets it on a thread of its own.
fn alone(body: impl FnOnce(&Arc<Coll>, &Seen) + Send) {
    let _turn = own();
    std::env::set_var("OXYGIN_FABRIC", "soft");
    std::thread::scope(|s| {
        s.spawn(|| {
            let (mut instance, mut listen) = (null_mut(), null_mut());
            let mut handle = [0u8; HANDLE_BYTES];
            // SAFETY: pointers to locals.
            unsafe {
                ok(T.init.unwrap()(&mut instance, 1, None));
                ok(T.listen.unwrap()(instance, 0, handle.as_mut_ptr().cast(), &mut listen));
            }
            let seen = Arc::new(Seen::default());
            let listener = handles::clone::<Listen>(listen).unwrap();
            let world = World { rank: 0, nranks: 1 };
            let table = Connecting { owner: QueueOwner::Plugin, gdaki_first: true };
            let observer = Box::new(Watch(seen.clone()));
            let (coll, _place) = Coll::connect(&listener, world, &[Some(handle)], Ok(()), table, observer).unwrap();
            drop(listener);
            body(&coll, &seen);
            coll.close();
            // SAFETY: plain call.
            ok(unsafe { T.finalize.unwrap()(instance) });
        });
    });
    std::env::remove_var("OXYGIN_FABRIC");
}

fn spec() -> ContextSpec {
    ContextSpec { contexts: 3, queue_depth: 0, traffic_class: None, rank_stride: 1 }
}

/// What failed said so, and so many windows ended over memory that was there, which is not any more.
fn came_to_nothing(why: Option<Error>, seen: &Seen, windows: usize) {
    let why = why.expect("no thread, and a set all the same");
    assert!(why.message().contains("starting a thread failed"), "{}", why.message());
    let (added, removed) = (seen.added.lock().unwrap(), seen.removed.lock().unwrap());
    assert_eq!(added.len(), windows, "windows of the set were registered before the engine was asked");
    assert_eq!(*removed, added.iter().map(|&base| (base, true)).collect::<Vec<_>>(), "(base, is memory there)");
    assert!(added.iter().all(|&base| !is_mapped(base)), "memory that nobody uses stays");
}

#[test]
fn signals_end_before_their_memory_where_no_engine_starts() {
    alone(|coll, seen| {
        refuse_threads();
        let layout = Layout::choose(Table::V14(2), None, None).unwrap();
        let asked = DeviceSpec { contexts: spec(), depth: 64, signals: 8, counters: 8, layout };
        // Signals and credits.
        came_to_nothing(coll.create_device_contexts(|| Ok(asked)).err(), seen, 2);
    });
}

#[test]
fn windows_of_queue_pairs_end_before_their_memory_where_no_engine_starts() {
    alone(|coll, seen| {
        refuse_threads();
        let asked =
            NicSpec { contexts: spec(), depth: 64, signals: 8, counters: 8, handler: Ringing::Doorbell, layout: None };
        // Signals, counters and credits.
        came_to_nothing(coll.create_nic_contexts(|| Ok(asked)).err(), seen, 3);
    });
}
