//! What `init` makes: the configuration of one communicator-to-be and the objects that must end with it.

use super::contexts::Contexts;
use crate::comm::coll::Coll;
use crate::comm::listen::Listen;
use crate::config::Config;
use crate::sys::handles::{self, Kind, Object};
use crate::sys::sync::Mutex;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

/// One `init`.
pub struct Instance {
    /// The environment, as it was at `init`.
    pub config: Arc<Config>,
    /// NCCL's number for the communicator, for logs.
    pub comm_id: u64,
    /// Version of the NCCL that has it; `None`: not known.
    pub nccl: Option<i32>,
    /// Whose table's it is.
    of: TableKind,
    children: Mutex<Children>,
    /// It has ended, as communicators see it that are yet to be.
    is_over: Arc<AtomicBool>,
}

/// Whose `init` made an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableKind {
    /// A GIN table's.
    Gin,
    /// An RMA table's.
    Rma,
}

/// Instances of RMA tables that live.
static OF_RMA: AtomicUsize = AtomicUsize::new(0);

#[derive(Default)]
struct Children {
    listens: Vec<u64>,
    contexts: Vec<u64>,
    colls: Vec<Weak<Coll>>,
}

/// Puts a handle to those that live. Whoever makes and ends one after the other adds nothing in the long run.
fn adopt<T: Object>(handles: &mut Vec<u64>, handle: *mut c_void) {
    if handles.len() == handles.capacity() {
        handles.retain(|&one| handles::is_live::<T>(one));
    }
    handles.push(handle as u64);
}

impl Object for Instance {
    const KIND: Kind = Kind::Instance;
}

impl Instance {
    /// An instance without objects, for an NCCL of this version.
    pub fn new(config: Config, comm_id: u64, of: TableKind, nccl: Option<i32>) -> Self {
        if of == TableKind::Rma {
            OF_RMA.fetch_add(1, Ordering::AcqRel);
        }
        Self { config: Arc::new(config), comm_id, nccl, of, children: Mutex::default(), is_over: Arc::default() }
    }

    /// Whether an RMA table is in use in this process.
    pub fn is_rma_in_use() -> bool {
        OF_RMA.load(Ordering::Acquire) > 0
    }

    /// Set once it has ended.
    pub fn is_over(&self) -> &Arc<AtomicBool> {
        &self.is_over
    }

    /// Remembers a listenComm, to end it with this instance.
    pub fn adopt_listen(&self, handle: *mut c_void) {
        adopt::<Listen>(&mut self.children.lock().listens, handle);
    }

    /// Remembers a set of contexts, to end it with this instance.
    pub fn adopt_contexts(&self, handle: *mut c_void) {
        adopt::<Contexts>(&mut self.children.lock().contexts, handle);
    }

    /// Remembers a communicator, to end it with this instance.
    pub fn adopt_coll(&self, coll: &Arc<Coll>) {
        let mut children = self.children.lock();
        children.colls.retain(|c| c.strong_count() > 0);
        children.colls.push(Arc::downgrade(coll));
    }

    /// A communicator has ended. Where finalize never comes, its memory would stay as long as it is remembered.
    pub fn forget_coll(&self, coll: *const Coll) {
        self.children.lock().colls.retain(|known| known.as_ptr() != coll && known.strong_count() > 0);
    }

    /// Ends what `listen` and `connect` made and the caller did not end: nothing stays behind a finalize.
    pub fn close(&self) {
        self.is_over.store(true, Ordering::Release);
        let children = std::mem::take(&mut *self.children.lock());
        for handle in children.listens {
            handles::remove::<Listen>(handle as *mut c_void);
        }
        for handle in children.contexts {
            if let Some(set) = handles::remove::<Contexts>(handle as *mut c_void) {
                set.destroy();
            }
        }
        for coll in children.colls.iter().filter_map(Weak::upgrade) {
            // The handle's reference would keep its sockets and shared memory.
            handles::remove::<Coll>(coll.handle());
            coll.close();
        }
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        if self.of == TableKind::Rma {
            OF_RMA.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::rendezvous::Listener;

    #[test]
    fn what_ended_before_is_not_remembered_for_ever() {
        let instance = Arc::new(Instance::new(Config::default(), 1, TableKind::Gin, None));
        let listener = Arc::new(Listener::open(&instance.config).unwrap());
        let make = || {
            let listen = Listen { instance: instance.clone(), device: 0, listener: listener.clone() };
            let handle = handles::insert(Arc::new(listen)).unwrap();
            instance.adopt_listen(handle);
            handle
        };
        let kept = [make(), make()];
        for _ in 0..1000 {
            handles::remove::<Listen>(make()).unwrap();
        }
        assert!(instance.children.lock().listens.len() < 16);
        instance.close();
        assert!(kept.iter().all(|&handle| handles::remove::<Listen>(handle).is_none()), "they end with it");
    }
}
