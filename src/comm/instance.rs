//! What `init` makes: the configuration of one communicator-to-be and the objects that must end with it.

use super::contexts::Contexts;
use crate::comm::coll::Coll;
use crate::comm::listen::Listen;
use crate::config::Config;
use crate::sys::handles::{self, Kind, Object};
use crate::sys::sync::Mutex;
use std::ffi::c_void;
use std::sync::{Arc, Weak};

/// One `init`.
pub struct Instance {
    /// The environment, as it was at `init`.
    pub config: Arc<Config>,
    /// NCCL's number for the communicator, for logs.
    pub comm_id: u64,
    children: Mutex<Children>,
}

#[derive(Default)]
struct Children {
    listens: Vec<u64>,
    contexts: Vec<u64>,
    colls: Vec<Weak<Coll>>,
}

impl Object for Instance {
    const KIND: Kind = Kind::Instance;
}

impl Instance {
    /// An instance without objects.
    pub fn new(config: Config, comm_id: u64) -> Self {
        Self { config: Arc::new(config), comm_id, children: Mutex::default() }
    }

    /// Remembers a listenComm, to end it with this instance.
    pub fn adopt_listen(&self, handle: *mut c_void) {
        self.children.lock().listens.push(handle as u64);
    }

    /// Remembers a set of contexts, to end it with this instance.
    pub fn adopt_contexts(&self, handle: *mut c_void) {
        self.children.lock().contexts.push(handle as u64);
    }

    /// Remembers a communicator, to end it with this instance.
    pub fn adopt_coll(&self, coll: &Arc<Coll>) {
        let mut children = self.children.lock();
        children.colls.retain(|c| c.strong_count() > 0);
        children.colls.push(Arc::downgrade(coll));
    }

    /// Ends what `listen` and `connect` made and the caller did not end: nothing stays behind a finalize.
    pub fn close(&self) {
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
