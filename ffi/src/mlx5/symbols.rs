//! The functions of libmlx5, resolved at run time, each in the version in which it came.

use super::types::*;
use crate::verbs::types::{ibv_context, ibv_device, ibv_mr, ibv_pd};
use crate::{InUse, Library, Missing};
use std::ffi::{c_char, c_int, c_void};
use std::mem::transmute;
use std::sync::Arc;

/// The file that the dynamic linker looks for.
pub const SONAME: &str = "libmlx5.so.1";

/// `OXYGIN_LIBMLX5`: path of another library to load in place of [`SONAME`], for tests and for installations outside
/// the library path.
pub const ENV_PATH: &str = "OXYGIN_LIBMLX5";

const REMEDY: &str =
    "install rdma-core (package ibverbs-providers, or libmlx5), or set OXYGIN_LIBMLX5 to the path of libmlx5.so.1";

/// `required` and `optional` ones: name, version, the rdma-core that has it, signature.
macro_rules! mlx5 {
    (
        required { $(
            $(#[$rdoc:meta])*
            $rfield:ident: $rname:literal $rversion:literal $rsince:literal fn($($rarg:ty),*) $(-> $rret:ty)?;
        )* }
        optional { $(
            $(#[$odoc:meta])*
            $ofield:ident: $oname:literal $oversion:literal $osince:literal fn($($oarg:ty),*) $(-> $oret:ty)?;
        )* }
    ) => {
        /// The functions of libmlx5. Holds the library: it is unloaded after the last owner went.
        pub struct Mlx5 {
            $($(#[$rdoc])* pub(super) $rfield: unsafe extern "C" fn($($rarg),*) $(-> $rret)?,)*
            $($(#[$odoc])* pub(super) $ofield: Result<unsafe extern "C" fn($($oarg),*) $(-> $oret)?, Missing>,)*
            library: Library,
        }

        impl Mlx5 {
            fn resolve(library: Library) -> Result<Self, Missing> {
                Ok(Self {
                    $($rfield: {
                        let at = library
                            .symbol($rname, Some($rversion))
                            .ok_or_else(|| lacks(&library, $rname, $rversion, $rsince))?;
                        // SAFETY: the symbol of this name and version has this signature.
                        unsafe {
                            transmute::<*mut c_void, unsafe extern "C" fn($($rarg),*) $(-> $rret)?>(at.as_ptr())
                        }
                    },)*
                    $($ofield: match library.symbol($oname, Some($oversion)) {
                        // SAFETY: the symbol of this name and version has this signature.
                        Some(at) => Ok(unsafe {
                            transmute::<*mut c_void, unsafe extern "C" fn($($oarg),*) $(-> $oret)?>(at.as_ptr())
                        }),
                        None => Err(lacks(&library, $oname, $oversion, $osince)),
                    },)*
                    library,
                })
            }
        }
    };
}

mlx5! {
    required {
        /// The number of a protection domain, the address vector of an address handle. The version of 1.0 is another
        /// function.
        init_obj: c"mlx5dv_init_obj" c"MLX5_1.2" "15" fn(*mut mlx5dv_obj, u64) -> c_int;
        /// Opens a device with DevX.
        open_device: c"mlx5dv_open_device" c"MLX5_1.7" "21"
            fn(*mut ibv_device, *mut mlx5dv_context_attr) -> *mut ibv_context;
        /// A doorbell page.
        alloc_uar: c"mlx5dv_devx_alloc_uar" c"MLX5_1.7" "21" fn(*mut ibv_context, u32) -> *mut mlx5dv_devx_uar;
        /// Gives it back.
        free_uar: c"mlx5dv_devx_free_uar" c"MLX5_1.7" "21" fn(*mut mlx5dv_devx_uar);
        /// A command about no object.
        general_cmd: c"mlx5dv_devx_general_cmd" c"MLX5_1.7" "21"
            fn(*mut ibv_context, *const c_void, usize, *mut c_void, usize) -> c_int;
        /// A command that makes an object.
        obj_create: c"mlx5dv_devx_obj_create" c"MLX5_1.7" "21"
            fn(*mut ibv_context, *const c_void, usize, *mut c_void, usize) -> *mut mlx5dv_devx_obj;
        /// A command that asks about one.
        obj_query: c"mlx5dv_devx_obj_query" c"MLX5_1.7" "21"
            fn(*mut mlx5dv_devx_obj, *const c_void, usize, *mut c_void, usize) -> c_int;
        /// A command that changes one.
        obj_modify: c"mlx5dv_devx_obj_modify" c"MLX5_1.7" "21"
            fn(*mut mlx5dv_devx_obj, *const c_void, usize, *mut c_void, usize) -> c_int;
        /// Ends one.
        obj_destroy: c"mlx5dv_devx_obj_destroy" c"MLX5_1.7" "21" fn(*mut mlx5dv_devx_obj) -> c_int;
        /// The event queue of a completion vector.
        query_eqn: c"mlx5dv_devx_query_eqn" c"MLX5_1.7" "21" fn(*mut ibv_context, u32, *mut u32) -> c_int;
        /// Memory for queues, by its address, in pages of the kernel's choice.
        umem_reg: c"mlx5dv_devx_umem_reg" c"MLX5_1.7" "21"
            fn(*mut ibv_context, *mut c_void, usize, u32) -> *mut mlx5dv_devx_umem;
        /// Gives it back.
        umem_dereg: c"mlx5dv_devx_umem_dereg" c"MLX5_1.7" "21" fn(*mut mlx5dv_devx_umem) -> c_int;
        /// Whether this library drives a device.
        is_supported: c"mlx5dv_is_supported" c"MLX5_1.8" "22" fn(*mut ibv_device) -> bool;
    }
    optional {
        /// Makes a channel for events.
        create_event_channel: c"mlx5dv_devx_create_event_channel" c"MLX5_1.11" "25"
            fn(*mut ibv_context, u32) -> *mut mlx5dv_devx_event_channel;
        /// Ends it.
        destroy_event_channel: c"mlx5dv_devx_destroy_event_channel" c"MLX5_1.11" "25"
            fn(*mut mlx5dv_devx_event_channel);
        /// Asks for events of an object; the length is in bytes.
        subscribe_devx_event: c"mlx5dv_devx_subscribe_devx_event" c"MLX5_1.11" "25"
            fn(*mut mlx5dv_devx_event_channel, *mut mlx5dv_devx_obj, u16, *const u16, u64) -> c_int;
        /// Takes an event.
        get_event: c"mlx5dv_devx_get_event" c"MLX5_1.11" "25"
            fn(*mut mlx5dv_devx_event_channel, *mut mlx5dv_devx_async_event_hdr, usize) -> isize;
        /// Memory for queues, also by a DMA-BUF, in pages of the caller's.
        umem_reg_ex: c"mlx5dv_devx_umem_reg_ex" c"MLX5_1.19" "35"
            fn(*mut ibv_context, *mut mlx5dv_devx_umem_in) -> *mut mlx5dv_devx_umem;
        /// Where a device's Data Direct function is, if it has one.
        get_data_direct_sysfs_path: c"mlx5dv_get_data_direct_sysfs_path" c"MLX5_1.25" "54"
            fn(*mut ibv_context, *mut c_char, usize) -> c_int;
        /// Registers a DMA-BUF in ways that only these devices know.
        reg_dmabuf_mr: c"mlx5dv_reg_dmabuf_mr" c"MLX5_1.25" "54"
            fn(*mut ibv_pd, u64, usize, u64, c_int, c_int, c_int) -> *mut ibv_mr;
    }
}

#[cold]
fn lacks(library: &Library, name: &std::ffi::CStr, version: &std::ffi::CStr, since: &str) -> Missing {
    Missing::new(format!(
        "{} has no function {} ({}); update rdma-core to version {since} or newer",
        library.path(),
        name.to_string_lossy(),
        version.to_string_lossy()
    ))
}

static LOADED: InUse<Mlx5> = InUse::none();

impl Mlx5 {
    /// Loads libmlx5, or the library that [`ENV_PATH`] names, unless it is in use already.
    pub fn load() -> Result<Arc<Self>, Missing> {
        // SAFETY: the administrator's libmlx5, or what the user put in its place.
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

    /// Whether it tells of events; else what it lacks.
    pub fn has_events(&self) -> Result<(), Missing> {
        let found = self.create_event_channel.as_ref().err();
        let found = found.or(self.destroy_event_channel.as_ref().err()).or(self.subscribe_devx_event.as_ref().err());
        found.or(self.get_event.as_ref().err()).map_or(Ok(()), |missing| Err(missing.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_without_the_symbols_names_the_first_and_its_version() {
        let e = Mlx5::load_path("libc.so.6").err().expect("libc is not libmlx5");
        for part in ["libc.so.6", "mlx5dv_init_obj", "MLX5_1.2", "rdma-core to version 15"] {
            assert!(e.sentence().contains(part), "{e}");
        }
    }

    #[test]
    fn a_missing_library_is_a_sentence() {
        let e = Mlx5::load_path("/nowhere/libmlx5.so.1").err().expect("no such file");
        assert!(e.sentence().contains("/nowhere/libmlx5.so.1") && e.sentence().contains("OXYGIN_LIBMLX5"), "{e}");
    }
}
