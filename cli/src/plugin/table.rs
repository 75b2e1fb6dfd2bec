//! One table of any version behind one set of calls.
//!
//! The calls are raw on purpose: they hand on whatever they are given, NULL and nonsense included, and return what
//! the plugin returned ([`MISSING`] where the table holds NULL). `session` in `ranks` is the comfortable way.

use super::kind::Kind;
use super::raw::{any, call, nulls, Raw};
use super::types::*;
use libloading::Library;
use nccl_plugin_api::{self as api, DebugLogger, DeviceHandle, NcclResult};
use std::ffi::{c_int, c_void, CStr};
use std::sync::Arc;

/// One table of a loaded plugin. Keeps the library loaded.
#[derive(Clone)]
pub struct Table {
    kind: Kind,
    raw: Raw,
    /// Keeps the code behind the pointers mapped.
    _library: Arc<Library>,
}

impl Table {
    pub(super) fn new(kind: Kind, raw: Raw, library: Arc<Library>) -> Self {
        Self { kind, raw, _library: library }
    }

    /// The table's version.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The plugin's name for itself; empty if NULL.
    pub fn name(&self) -> String {
        let name = any!(&self.raw, t => t.name);
        if name.is_null() {
            return String::new();
        }
        // SAFETY: a table's name is a C string that lives as long as the library, which this object keeps loaded.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }

    /// The functions that are NULL, by NCCL's names. Only progress may be NULL.
    pub fn missing(&self) -> Vec<&'static str> {
        let mut missing = any!(&self.raw, t => nulls!(t;
            init "init", devices "devices", get_properties "getProperties", listen "listen", connect "connect",
            create_context "createContext", reg_mr_sym "regMrSym", reg_mr_sym_dma_buf "regMrSymDmaBuf",
            dereg_mr_sym "deregMrSym", destroy_context "destroyContext", close_coll "closeColl",
            close_listen "closeListen", query_last_error "queryLastError", finalize "finalize"));
        match &self.raw {
            Raw::GinV11(t) => missing.extend(nulls!(t; iput "iput", iput_signal "iputSignal", test "test")),
            Raw::GinV12(t) => missing.extend(nulls!(t; iput "iput", iput_signal "iputSignal", test "test")),
            Raw::GinV14(t) => missing.extend(nulls!(t; get_gin_properties "getGinProperties")),
            _ => {}
        }
        macro_rules! with_gets {
            ($t:expr) => {
                missing.extend(nulls!($t;
                    iput "iput", iput_signal "iputSignal", iget "iget", iflush "iflush", test "test"))
            };
        }
        match &self.raw {
            Raw::GinV13(t) | Raw::RmaV13(t) => with_gets!(t),
            Raw::RmaV14(t) => with_gets!(t),
            Raw::RmaV15(t) => with_gets!(t),
            Raw::RmaV16(t) => {
                with_gets!(t);
                missing.extend(nulls!(t; get_rma_properties "getRmaProperties"));
            }
            _ => {}
        }
        if !self.has_progress() {
            missing.push("progress");
        }
        missing
    }

    /// Whether the progress function is there (NCCL permits NULL).
    pub fn has_progress(&self) -> bool {
        match &self.raw {
            Raw::GinV11(t) => t.gin_progress.is_some(),
            Raw::GinV12(t) => t.gin_progress.is_some(),
            Raw::GinV13(t) | Raw::RmaV13(t) => t.gin_progress.is_some(),
            Raw::GinV14(t) => t.gin_progress.is_some(),
            Raw::RmaV14(t) => t.rma_progress.is_some(),
            Raw::RmaV15(t) => t.rma_progress.is_some(),
            Raw::RmaV16(t) => t.rma_progress.is_some(),
        }
    }
}

/// Set-up and teardown. Each call is NCCL's of the same name.
///
/// # Safety
/// For all of them: pointers are valid for what the plugin does with them (or the plugin is trusted to check them:
/// that is what a test of bad input does), and objects are used as NCCL would use them.
#[allow(clippy::missing_safety_doc, clippy::too_many_arguments)]
impl Table {
    /// `init`.
    pub unsafe fn init(&self, ctx: *mut *mut c_void, comm_id: u64, log: Option<DebugLogger>) -> NcclResult {
        any!(&self.raw, t => call!(t.init, ctx, comm_id, log))
    }

    /// `devices`.
    pub unsafe fn devices(&self, ndev: *mut c_int) -> NcclResult {
        any!(&self.raw, t => call!(t.devices, ndev))
    }

    /// `getProperties` into a structure of this version.
    pub unsafe fn properties(&self, dev: c_int) -> Result<Properties, CallError> {
        macro_rules! get {
            ($t:expr, $blank:ident, $from:ident) => {{
                let mut p = $blank();
                check("getProperties", call!($t.get_properties, dev, &mut p))?;
                // SAFETY: the plugin said that it filled the structure.
                Ok(unsafe { Properties::$from(&p) })
            }};
        }
        match &self.raw {
            Raw::GinV11(t) => get!(t, blank_v11, from_v11),
            Raw::GinV12(t) => get!(t, blank_v11, from_v11),
            Raw::GinV13(t) | Raw::RmaV13(t) => get!(t, blank_v12, from_v12),
            Raw::GinV14(t) => get!(t, blank_v12, from_v12),
            Raw::RmaV14(t) => get!(t, blank_v12, from_v12),
            Raw::RmaV15(t) => get!(t, blank_v12, from_v12),
            Raw::RmaV16(t) => get!(t, blank_v12, from_v12),
        }
    }

    /// `getProperties` with any pointer, NULL included.
    pub unsafe fn properties_raw(&self, dev: c_int, props: *mut c_void) -> NcclResult {
        any!(&self.raw, t => call!(t.get_properties, dev, props.cast()))
    }

    /// `getGinProperties` (GIN v14).
    pub unsafe fn gin_properties(&self, props: *mut api::gin_v14::GinPropertiesV14) -> NcclResult {
        match &self.raw {
            Raw::GinV14(t) => call!(t.get_gin_properties, props),
            _ => MISSING,
        }
    }

    /// `getRmaProperties` (RMA v16).
    pub unsafe fn rma_properties(
        &self,
        coll_comm: *mut c_void,
        props: *mut api::rma_v16::RmaPropertiesV16,
    ) -> NcclResult {
        match &self.raw {
            Raw::RmaV16(t) => call!(t.get_rma_properties, coll_comm, props),
            _ => MISSING,
        }
    }

    /// `listen`; `handle` has room for `HANDLE_BYTES`.
    pub unsafe fn listen(
        &self,
        ctx: *mut c_void,
        dev: c_int,
        handle: *mut c_void,
        listen_comm: *mut *mut c_void,
    ) -> NcclResult {
        any!(&self.raw, t => call!(t.listen, ctx, dev, handle, listen_comm))
    }

    /// `connect`, collective. `config` gives GIN v12 its number of connections and queue depth.
    pub unsafe fn connect(
        &self,
        ctx: *mut c_void,
        handles: *mut *mut c_void,
        nranks: c_int,
        rank: c_int,
        config: &ContextConfig,
        listen_comm: *mut c_void,
        coll_comm: *mut *mut c_void,
    ) -> NcclResult {
        macro_rules! plain {
            ($t:expr) => {
                call!($t.connect, ctx, handles, nranks, rank, listen_comm, coll_comm)
            };
        }
        match &self.raw {
            Raw::GinV11(t) => plain!(t),
            Raw::GinV12(t) => call!(
                t.connect,
                ctx,
                handles,
                nranks,
                rank,
                config.n_contexts,
                config.queue_depth,
                listen_comm,
                coll_comm
            ),
            Raw::GinV13(t) | Raw::RmaV13(t) => plain!(t),
            Raw::GinV14(t) => plain!(t),
            Raw::RmaV14(t) => plain!(t),
            Raw::RmaV15(t) => plain!(t),
            Raw::RmaV16(t) => plain!(t),
        }
    }

    /// `createContext`, collective. `config` `None` passes NULL where the version takes a pointer. `dev_handle` may
    /// be NULL and is not passed on by RMA v14 and newer.
    pub unsafe fn create_context(
        &self,
        coll_comm: *mut c_void,
        config: Option<&ContextConfig>,
        ctx: *mut *mut c_void,
        dev_handle: *mut *mut DeviceHandle,
    ) -> NcclResult {
        let c = config.copied().unwrap_or_default();
        let or_null = |p: *mut c_void| if config.is_some() { p } else { std::ptr::null_mut() };
        match &self.raw {
            Raw::GinV11(t) => call!(t.create_context, coll_comm, c.n_signals, c.n_counters, ctx, dev_handle),
            Raw::GinV12(t) => {
                call!(t.create_context, coll_comm, c.n_signals, c.n_counters, c.n_contexts, ctx, dev_handle)
            }
            Raw::GinV13(t) | Raw::RmaV13(t) => {
                let mut raw = api::gin_v13::ConfigV13 {
                    n_signals: c.n_signals,
                    n_counters: c.n_counters,
                    n_contexts: c.n_contexts,
                    queue_depth: c.queue_depth,
                    traffic_class: c.traffic_class,
                };
                call!(t.create_context, coll_comm, or_null((&raw mut raw).cast()).cast(), ctx, dev_handle)
            }
            Raw::GinV14(t) => {
                let mut raw = api::gin_v14::ConfigV14 {
                    n_signals: c.n_signals,
                    n_counters: c.n_counters,
                    n_contexts: c.n_contexts,
                    queue_depth: c.queue_depth,
                    traffic_class: c.traffic_class,
                    backend_version: c.backend_version,
                    rank_stride: c.rank_stride,
                };
                call!(t.create_context, coll_comm, or_null((&raw mut raw).cast()).cast(), ctx, dev_handle)
            }
            Raw::RmaV14(api::rma_v14::RmaV14 { create_context, .. })
            | Raw::RmaV15(api::rma_v15::RmaV15 { create_context, .. })
            | Raw::RmaV16(api::rma_v16::RmaV16 { create_context, .. }) => {
                let mut raw = api::rma_v14::ConfigV14 {
                    n_contexts: c.n_contexts,
                    traffic_class: c.traffic_class,
                    rank_stride: c.rank_stride,
                };
                call!(create_context, coll_comm, or_null((&raw mut raw).cast()).cast(), ctx)
            }
        }
    }

    /// `regMrSym`, collective. `gin_handle` is passed on where the version has it.
    pub unsafe fn reg(
        &self,
        coll_comm: *mut c_void,
        data: *mut c_void,
        size: usize,
        ptr_type: c_int,
        flags: u64,
        mhandle: *mut *mut c_void,
        gin_handle: *mut *mut c_void,
    ) -> NcclResult {
        macro_rules! gin {
            ($t:expr) => {
                call!($t.reg_mr_sym, coll_comm, data, size, ptr_type, flags, mhandle, gin_handle)
            };
        }
        match &self.raw {
            Raw::GinV11(t) => gin!(t),
            Raw::GinV12(t) => gin!(t),
            Raw::GinV13(t) | Raw::RmaV13(t) => gin!(t),
            Raw::GinV14(t) => gin!(t),
            Raw::RmaV14(t) => call!(t.reg_mr_sym, coll_comm, data, size, ptr_type, flags, mhandle),
            Raw::RmaV15(t) => call!(t.reg_mr_sym, coll_comm, data, size, ptr_type, flags, mhandle),
            Raw::RmaV16(t) => call!(t.reg_mr_sym, coll_comm, data, size, ptr_type, flags, mhandle),
        }
    }

    /// `regMrSymDmaBuf`, collective. `gin_handle` is passed on where the version has it.
    pub unsafe fn reg_dmabuf(
        &self,
        coll_comm: *mut c_void,
        data: *mut c_void,
        size: usize,
        ptr_type: c_int,
        offset: u64,
        fd: c_int,
        flags: u64,
        mhandle: *mut *mut c_void,
        gin_handle: *mut *mut c_void,
    ) -> NcclResult {
        macro_rules! gin {
            ($t:expr) => {
                call!($t.reg_mr_sym_dma_buf, coll_comm, data, size, ptr_type, offset, fd, flags, mhandle, gin_handle)
            };
        }
        macro_rules! rma {
            ($t:expr) => {
                call!($t.reg_mr_sym_dma_buf, coll_comm, data, size, ptr_type, offset, fd, flags, mhandle)
            };
        }
        match &self.raw {
            Raw::GinV11(t) => gin!(t),
            Raw::GinV12(t) => gin!(t),
            Raw::GinV13(t) | Raw::RmaV13(t) => gin!(t),
            Raw::GinV14(t) => gin!(t),
            Raw::RmaV14(t) => rma!(t),
            Raw::RmaV15(t) => rma!(t),
            Raw::RmaV16(t) => rma!(t),
        }
    }

    /// `deregMrSym`.
    pub unsafe fn dereg(&self, coll_comm: *mut c_void, mhandle: *mut c_void) -> NcclResult {
        any!(&self.raw, t => call!(t.dereg_mr_sym, coll_comm, mhandle))
    }

    /// `destroyContext`.
    pub unsafe fn destroy_context(&self, ctx: *mut c_void) -> NcclResult {
        any!(&self.raw, t => call!(t.destroy_context, ctx))
    }

    /// `closeColl`.
    pub unsafe fn close_coll(&self, coll_comm: *mut c_void) -> NcclResult {
        any!(&self.raw, t => call!(t.close_coll, coll_comm))
    }

    /// `closeListen`.
    pub unsafe fn close_listen(&self, listen_comm: *mut c_void) -> NcclResult {
        any!(&self.raw, t => call!(t.close_listen, listen_comm))
    }

    /// `queryLastError`.
    pub unsafe fn query_last_error(&self, ctx: *mut c_void, has_error: *mut bool) -> NcclResult {
        any!(&self.raw, t => call!(t.query_last_error, ctx, has_error))
    }

    /// `finalize`.
    pub unsafe fn finalize(&self, ctx: *mut c_void) -> NcclResult {
        any!(&self.raw, t => call!(t.finalize, ctx))
    }
}

/// The data path. Each call is NCCL's of the same name, with the object that the version addresses.
///
/// # Safety
/// As for set-up; the windows stay registered until the request is done.
#[allow(clippy::missing_safety_doc)]
impl Table {
    /// `iput`.
    #[inline]
    pub unsafe fn put(&self, to: &Target, p: &Put, request: *mut *mut c_void) -> NcclResult {
        macro_rules! by_context {
            ($t:expr $(, $flags:expr)?) => {
                call!($t.iput, to.ctx, p.context, p.src_off, p.src, p.size, p.dst_off, p.dst, p.rank
                    $(, $flags)?, request)
            };
        }
        match &self.raw {
            Raw::GinV11(t) => {
                call!(t.iput, to.coll_comm, p.src_off, p.src, p.size, p.dst_off, p.dst, p.rank, request)
            }
            Raw::GinV12(t) => {
                call!(t.iput, to.coll_comm, p.src_off, p.src, p.size, p.dst_off, p.dst, p.rank, p.context, request)
            }
            Raw::GinV13(t) | Raw::RmaV13(t) => by_context!(t),
            Raw::GinV14(_) => MISSING,
            Raw::RmaV14(t) => by_context!(t),
            Raw::RmaV15(t) => by_context!(t, p.opt_flags),
            Raw::RmaV16(t) => by_context!(t, p.opt_flags),
        }
    }

    /// `iputSignal`.
    #[inline]
    pub unsafe fn put_signal(&self, to: &Target, p: &Put, s: &Signal, request: *mut *mut c_void) -> NcclResult {
        macro_rules! signalled {
            ($t:expr; $($object:expr),+; $($more:expr),*) => {
                call!($t.iput_signal, $($object),+, p.src_off, p.src, p.size, p.dst_off, p.dst, p.rank, s.off, s.mh,
                    s.value, s.op, $($more,)* request)
            };
        }
        match &self.raw {
            Raw::GinV11(t) => signalled!(t; to.coll_comm;),
            Raw::GinV12(t) => signalled!(t; to.coll_comm; p.context),
            Raw::GinV13(t) | Raw::RmaV13(t) => signalled!(t; to.ctx, p.context;),
            Raw::GinV14(_) => MISSING,
            Raw::RmaV14(t) => signalled!(t; to.ctx, p.context; s.strong),
            Raw::RmaV15(t) => signalled!(t; to.ctx, p.context; s.strong, p.opt_flags),
            Raw::RmaV16(t) => signalled!(t; to.ctx, p.context; s.strong, p.opt_flags),
        }
    }

    /// `iget`.
    #[inline]
    pub unsafe fn get(&self, to: &Target, g: &Get, request: *mut *mut c_void) -> NcclResult {
        macro_rules! get {
            ($t:expr $(, $flags:expr)?) => {
                call!($t.iget, to.ctx, g.context, g.remote_off, g.remote, g.size, g.local_off, g.local, g.rank
                    $(, $flags)?, request)
            };
        }
        match &self.raw {
            Raw::GinV11(_) | Raw::GinV12(_) | Raw::GinV14(_) => MISSING,
            Raw::GinV13(t) | Raw::RmaV13(t) => get!(t),
            Raw::RmaV14(t) => get!(t),
            Raw::RmaV15(t) => get!(t, g.opt_flags),
            Raw::RmaV16(t) => get!(t, g.opt_flags),
        }
    }

    /// `iflush`. The request may come back NULL: nothing to wait for.
    #[inline]
    pub unsafe fn flush(
        &self,
        to: &Target,
        context: c_int,
        mhandle: *mut c_void,
        rank: u32,
        request: *mut *mut c_void,
    ) -> NcclResult {
        match &self.raw {
            Raw::GinV11(_) | Raw::GinV12(_) | Raw::GinV14(_) => MISSING,
            Raw::GinV13(t) | Raw::RmaV13(t) => call!(t.iflush, to.ctx, context, mhandle, rank, request),
            Raw::RmaV14(t) => call!(t.iflush, to.ctx, context, mhandle, rank, request),
            Raw::RmaV15(t) => call!(t.iflush, to.ctx, context, mhandle, rank, request),
            Raw::RmaV16(t) => call!(t.iflush, to.ctx, context, mhandle, rank, request),
        }
    }

    /// `test`.
    #[inline]
    pub unsafe fn test(&self, to: &Target, request: *mut c_void, done: *mut c_int) -> NcclResult {
        match &self.raw {
            Raw::GinV11(t) => call!(t.test, to.coll_comm, request, done),
            Raw::GinV12(t) => call!(t.test, to.coll_comm, request, done),
            Raw::GinV13(t) | Raw::RmaV13(t) => call!(t.test, to.coll_comm, request, done),
            Raw::GinV14(_) => MISSING,
            Raw::RmaV14(t) => call!(t.test, to.coll_comm, request, done),
            Raw::RmaV15(t) => call!(t.test, to.coll_comm, request, done),
            Raw::RmaV16(t) => call!(t.test, to.coll_comm, request, done),
        }
    }

    /// `ginProgress` or `rmaProgress`.
    #[inline]
    pub unsafe fn progress(&self, to: &Target) -> NcclResult {
        match &self.raw {
            Raw::GinV11(t) => call!(t.gin_progress, to.coll_comm),
            Raw::GinV12(t) => call!(t.gin_progress, to.coll_comm),
            Raw::GinV13(t) | Raw::RmaV13(t) => call!(t.gin_progress, to.ctx),
            Raw::GinV14(t) => call!(t.gin_progress, to.ctx),
            Raw::RmaV14(t) => call!(t.rma_progress, to.ctx),
            Raw::RmaV15(t) => call!(t.rma_progress, to.ctx),
            Raw::RmaV16(t) => call!(t.rma_progress, to.ctx),
        }
    }
}
