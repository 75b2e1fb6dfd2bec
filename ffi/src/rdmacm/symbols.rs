//! The functions of librdmacm, resolved at run time.

use super::types::*;
use crate::{InUse, Library, Missing};
use std::ffi::{c_int, c_void, CStr};
use std::sync::Arc;

/// The file that the dynamic linker looks for.
pub const SONAME: &str = "librdmacm.so.1";

/// `OXYGIN_LIBRDMACM`: path of another library to load in place of [`SONAME`], for tests and for installations
/// outside the library path.
pub const ENV_PATH: &str = "OXYGIN_LIBRDMACM";

const REMEDY: &str = "install rdma-core's librdmacm (packages librdmacm1, or librdmacm), or set OXYGIN_LIBRDMACM to \
                      the path of librdmacm.so.1";

/// The symbol version of every function used here.
const VERSION: &CStr = c"RDMACM_1.0";

macro_rules! functions {
    ($($(#[$doc:meta])* $field:ident: $name:literal fn($($arg:ty),*) $(-> $ret:ty)?;)*) => {
        /// The functions of librdmacm. Holds the library: it is unloaded after the last owner went.
        pub struct RdmaCm {
            $($(#[$doc])* pub(super) $field: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)*
            library: Library,
        }

        impl RdmaCm {
            fn resolve(library: Library) -> Result<Self, Missing> {
                Ok(Self {
                    $($field: {
                        let at = library.symbol($name, Some(VERSION)).ok_or_else(|| library.lacks($name, REMEDY))?;
                        // SAFETY: the symbol of this name and version has this signature.
                        unsafe {
                            std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($arg),*) $(-> $ret)?>(at.as_ptr())
                        }
                    },)*
                    library,
                })
            }
        }
    };
}

functions! {
    /// Makes an event channel.
    create_event_channel: c"rdma_create_event_channel" fn() -> *mut rdma_event_channel;
    /// Ends it.
    destroy_event_channel: c"rdma_destroy_event_channel" fn(*mut rdma_event_channel);
    /// Takes an event.
    get_cm_event: c"rdma_get_cm_event" fn(*mut rdma_event_channel, *mut *mut rdma_cm_event) -> c_int;
    /// Gives it back.
    ack_cm_event: c"rdma_ack_cm_event" fn(*mut rdma_cm_event) -> c_int;
    /// Makes an identifier.
    create_id: c"rdma_create_id" fn(*mut rdma_event_channel, *mut *mut rdma_cm_id, *mut c_void, u32) -> c_int;
    /// Ends it, and its connection.
    destroy_id: c"rdma_destroy_id" fn(*mut rdma_cm_id) -> c_int;
    /// Binds it to an address, and to the device that has it.
    bind_addr: c"rdma_bind_addr" fn(*mut rdma_cm_id, *mut libc::sockaddr) -> c_int;
    /// Its port, network byte order.
    get_src_port: c"rdma_get_src_port" fn(*mut rdma_cm_id) -> u16;
    /// Takes connect requests.
    listen: c"rdma_listen" fn(*mut rdma_cm_id, c_int) -> c_int;
    /// Finds the device that leads to an address.
    resolve_addr: c"rdma_resolve_addr" fn(*mut rdma_cm_id, *mut libc::sockaddr, *mut libc::sockaddr, c_int) -> c_int;
    /// Finds the way there.
    resolve_route: c"rdma_resolve_route" fn(*mut rdma_cm_id, c_int) -> c_int;
    /// Asks the peer to connect.
    connect: c"rdma_connect" fn(*mut rdma_cm_id, *mut rdma_conn_param) -> c_int;
    /// Answers a connect request.
    accept: c"rdma_accept" fn(*mut rdma_cm_id, *mut rdma_conn_param) -> c_int;
    /// Refuses one.
    reject: c"rdma_reject" fn(*mut rdma_cm_id, *const c_void, u8) -> c_int;
    /// Ends a connection in order.
    disconnect: c"rdma_disconnect" fn(*mut rdma_cm_id) -> c_int;
    /// Sets an option.
    set_option: c"rdma_set_option" fn(*mut rdma_cm_id, c_int, c_int, *mut c_void, usize) -> c_int;
}

static LOADED: InUse<RdmaCm> = InUse::none();

impl RdmaCm {
    /// Loads librdmacm, or the library that [`ENV_PATH`] names, unless it is in use already.
    pub fn load() -> Result<Arc<Self>, Missing> {
        // SAFETY: the administrator's librdmacm, or what the user put in its place.
        unsafe { LOADED.load(ENV_PATH, SONAME, REMEDY, Self::found_in) }
    }

    /// Loads the library at `path` unless it is in use already.
    pub fn load_path(path: &str) -> Result<Arc<Self>, Missing> {
        // SAFETY: as above.
        unsafe { LOADED.load_path(path, REMEDY, Self::found_in) }
    }

    fn found_in(library: Library) -> Result<Self, Missing> {
        let cm = Self::resolve(library)?;
        // It never closes the devices that it opened, so that each unloading would leave their descriptors behind.
        cm.library.keep();
        Ok(cm)
    }

    /// Where it was loaded from.
    pub fn path(&self) -> &str {
        self.library.path()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_without_the_symbols_names_the_first() {
        let e = RdmaCm::load_path("libc.so.6").err().expect("libc is not librdmacm");
        assert!(e.sentence().contains("rdma_create_event_channel"), "{e}");
        assert!(e.sentence().contains("librdmacm1"), "{e}");
    }

    #[test]
    fn a_missing_library_is_a_sentence() {
        let e = RdmaCm::load_path("/nowhere/librdmacm.so.1").err().expect("no such file");
        assert!(e.sentence().contains("/nowhere/librdmacm.so.1"), "{e}");
    }
}
