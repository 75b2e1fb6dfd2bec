//! The functions of libibverbs, resolved at run time.

use super::types::*;
use crate::{InUse, Library, Missing};
use std::ffi::{c_char, c_int, c_uint, c_void, CStr};
use std::mem::transmute;
use std::sync::Arc;

/// The file that the dynamic linker looks for.
pub const SONAME: &str = "libibverbs.so.1";

/// `OXYGIN_LIBIBVERBS`: path of another library to load in place of [`SONAME`], for tests and for installations
/// outside the library path.
pub const ENV_PATH: &str = "OXYGIN_LIBIBVERBS";

const REMEDY: &str = "install rdma-core (packages libibverbs1 and ibverbs-providers, or libibverbs), or set \
                      OXYGIN_LIBIBVERBS to the path of libibverbs.so.1";

macro_rules! verbs {
    (
        required { $(
            $(#[$rdoc:meta])*
            $rfield:ident: $rname:literal $rversion:literal fn($($rarg:ty),*) $(-> $rret:ty)?;
        )* }
        optional { $(
            $(#[$odoc:meta])*
            $ofield:ident: $oname:literal $oversion:literal fn($($oarg:ty),*) $(-> $oret:ty)?;
        )* }
    ) => {
        /// The functions of libibverbs. Holds the library: it is unloaded after the last owner went.
        pub struct Verbs {
            $($(#[$rdoc])* pub(super) $rfield: unsafe extern "C" fn($($rarg),*) $(-> $rret)?,)*
            $($(#[$odoc])* pub(super) $ofield: Option<unsafe extern "C" fn($($oarg),*) $(-> $oret)?>,)*
            library: Library,
        }

        impl Verbs {
            fn resolve(library: Library) -> Result<Self, Missing> {
                Ok(Self {
                    $($rfield: {
                        let at = library.symbol($rname, Some($rversion)).ok_or_else(|| library.lacks($rname, REMEDY))?;
                        // SAFETY: the symbol of this name and version has this signature.
                        unsafe {
                            transmute::<*mut c_void, unsafe extern "C" fn($($rarg),*) $(-> $rret)?>(at.as_ptr())
                        }
                    },)*
                    $($ofield: library.symbol($oname, Some($oversion)).map(|at| {
                        // SAFETY: the symbol of this name and version has this signature.
                        unsafe {
                            transmute::<*mut c_void, unsafe extern "C" fn($($oarg),*) $(-> $oret)?>(at.as_ptr())
                        }
                    }),)*
                    library,
                })
            }
        }
    };
}

verbs! {
    required {
        /// All devices.
        get_device_list: c"ibv_get_device_list" c"IBVERBS_1.1" fn(*mut c_int) -> *mut *mut ibv_device;
        /// Frees that list.
        free_device_list: c"ibv_free_device_list" c"IBVERBS_1.1" fn(*mut *mut ibv_device);
        /// Opens a device.
        open_device: c"ibv_open_device" c"IBVERBS_1.1" fn(*mut ibv_device) -> *mut ibv_context;
        /// Closes it.
        close_device: c"ibv_close_device" c"IBVERBS_1.1" fn(*mut ibv_context) -> c_int;
        /// Limits of a device.
        query_device: c"ibv_query_device" c"IBVERBS_1.1" fn(*mut ibv_context, *mut ibv_device_attr) -> c_int;
        /// State of a port; writes no further than `flags`.
        query_port: c"ibv_query_port" c"IBVERBS_1.1" fn(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int;
        /// A GID.
        query_gid: c"ibv_query_gid" c"IBVERBS_1.1" fn(*mut ibv_context, u8, c_int, *mut ibv_gid) -> c_int;
        /// Makes a protection domain.
        alloc_pd: c"ibv_alloc_pd" c"IBVERBS_1.1" fn(*mut ibv_context) -> *mut ibv_pd;
        /// Ends it.
        dealloc_pd: c"ibv_dealloc_pd" c"IBVERBS_1.1" fn(*mut ibv_pd) -> c_int;
        /// Registers memory.
        reg_mr: c"ibv_reg_mr" c"IBVERBS_1.1" fn(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
        /// Ends a registration.
        dereg_mr: c"ibv_dereg_mr" c"IBVERBS_1.1" fn(*mut ibv_mr) -> c_int;
        /// Makes a completion channel.
        create_comp_channel: c"ibv_create_comp_channel" c"IBVERBS_1.0" fn(*mut ibv_context) -> *mut ibv_comp_channel;
        /// Ends it.
        destroy_comp_channel: c"ibv_destroy_comp_channel" c"IBVERBS_1.0" fn(*mut ibv_comp_channel) -> c_int;
        /// Makes a completion queue.
        create_cq: c"ibv_create_cq" c"IBVERBS_1.1"
            fn(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
        /// Ends it.
        destroy_cq: c"ibv_destroy_cq" c"IBVERBS_1.1" fn(*mut ibv_cq) -> c_int;
        /// Takes a completion event.
        get_cq_event: c"ibv_get_cq_event" c"IBVERBS_1.1"
            fn(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
        /// Acknowledges events.
        ack_cq_events: c"ibv_ack_cq_events" c"IBVERBS_1.1" fn(*mut ibv_cq, c_uint);
        /// Makes a queue pair.
        create_qp: c"ibv_create_qp" c"IBVERBS_1.1" fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
        /// Moves it from state to state.
        modify_qp: c"ibv_modify_qp" c"IBVERBS_1.1" fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
        /// Ends it.
        destroy_qp: c"ibv_destroy_qp" c"IBVERBS_1.1" fn(*mut ibv_qp) -> c_int;
        /// A completion status in words.
        wc_status_str: c"ibv_wc_status_str" c"IBVERBS_1.1" fn(c_uint) -> *const c_char;
    }
    optional {
        /// Registers memory with optional access flags.
        reg_mr_iova2: c"ibv_reg_mr_iova2" c"IBVERBS_1.8"
            fn(*mut ibv_pd, *mut c_void, usize, u64, c_uint) -> *mut ibv_mr;
        /// Registers a DMA-BUF.
        reg_dmabuf_mr: c"ibv_reg_dmabuf_mr" c"IBVERBS_1.12"
            fn(*mut ibv_pd, u64, usize, u64, c_int, c_int) -> *mut ibv_mr;
        /// Takes an asynchronous event of a device.
        get_async_event: c"ibv_get_async_event" c"IBVERBS_1.1" fn(*mut ibv_context, *mut ibv_async_event) -> c_int;
        /// Acknowledges it.
        ack_async_event: c"ibv_ack_async_event" c"IBVERBS_1.1" fn(*mut ibv_async_event);
        /// The way to a peer's port; the kernel finds the next hop on Ethernet.
        create_ah: c"ibv_create_ah" c"IBVERBS_1.1" fn(*mut ibv_pd, *mut ibv_ah_attr) -> *mut c_void;
        /// Ends it.
        destroy_ah: c"ibv_destroy_ah" c"IBVERBS_1.1" fn(*mut c_void) -> c_int;
        /// Options that a queue pair's device knows, or once it is connected, has taken.
        query_ece: c"ibv_query_ece" c"IBVERBS_1.10" fn(*mut ibv_qp, *mut ibv_ece) -> c_int;
        /// Has it connect with these options.
        set_ece: c"ibv_set_ece" c"IBVERBS_1.10" fn(*mut ibv_qp, *mut ibv_ece) -> c_int;
        /// A GID with its type.
        query_gid_ex: c"_ibv_query_gid_ex" c"IBVERBS_1.11"
            fn(*mut ibv_context, u32, u32, *mut ibv_gid_entry, u32, usize) -> c_int;
    }
}

static LOADED: InUse<Verbs> = InUse::none();

impl Verbs {
    /// Whether it knows options of connections: rdma-core 28 and newer.
    pub fn has_ece(&self) -> bool {
        self.query_ece.is_some() && self.set_ece.is_some()
    }

    /// Loads libibverbs, or the library that [`ENV_PATH`] names, unless it is in use already.
    pub fn load() -> Result<Arc<Self>, Missing> {
        // SAFETY: the administrator's libibverbs, or what the user put in its place.
        unsafe { LOADED.load(ENV_PATH, SONAME, REMEDY, Self::resolve) }
    }

    /// Loads the library at `path` unless it is in use already.
    pub fn load_path(path: &str) -> Result<Arc<Self>, Missing> {
        // SAFETY: as above.
        unsafe { LOADED.load_path(path, REMEDY, Self::resolve) }
    }

    /// Where it was loaded from.
    pub fn path(&self) -> &str {
        self.library.path()
    }

    /// Whether regions may use relaxed ordering where kernel and device can.
    pub fn has_optional_access(&self) -> bool {
        self.reg_mr_iova2.is_some()
    }

    /// Whether the library can register DMA-BUFs.
    pub fn has_dmabuf(&self) -> bool {
        self.reg_dmabuf_mr.is_some()
    }

    /// A completion status in the library's words.
    pub fn status_text(&self, status: c_uint) -> String {
        // SAFETY: takes any value and returns a static C string or NULL.
        unsafe {
            let text = (self.wc_status_str)(status);
            if text.is_null() {
                format!("status {status}")
            } else {
                CStr::from_ptr(text).to_string_lossy().into_owned()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_without_the_symbols_names_the_first() {
        let e = Verbs::load_path("libc.so.6").err().expect("libc is not libibverbs");
        assert!(e.sentence().contains("ibv_get_device_list"), "{e}");
        assert!(e.sentence().contains("install rdma-core"), "{e}");
    }

    #[test]
    fn a_missing_library_is_a_sentence() {
        let e = Verbs::load_path("/nowhere/libibverbs.so.1").err().expect("no such file");
        assert!(e.sentence().contains("/nowhere/libibverbs.so.1"), "{e}");
    }
}
