//! GPU memory of other processes, and host memory of theirs that the driver made for GPUs: exported, imported, mapped;
//! each object is ended by its drop.
//!
//! What cuMemCreate made (and ncclMemAlloc) travels as a file descriptor and is mapped where the importer likes.
//! Nothing here waits for a running kernel. Memory of cuMemAlloc or cudaMalloc, which travels as 64 bytes and belongs
//! to a context, does not come here: closing it waits for kernels.

use super::group::group;
use super::types::{CUdevice, CUdeviceptr, CUmemLocation, CUresult, CUDA_SUCCESS};
use super::{Cuda, CudaError, CUDA_ERROR_NOT_SUPPORTED};
use crate::Library;
use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

/// `CUmemGenericAllocationHandle`.
pub type CUmemHandle = c_ulonglong;

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
pub const CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR: c_int = 1;
/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
pub const CU_MEM_ALLOCATION_TYPE_PINNED: c_int = 1;
/// `CU_MEM_LOCATION_TYPE_DEVICE`.
pub const CU_MEM_LOCATION_TYPE_DEVICE: c_uint = 1;
/// `CU_MEM_LOCATION_TYPE_HOST_NUMA`: host memory, of the NUMA node with that number.
pub const CU_MEM_LOCATION_TYPE_HOST_NUMA: c_uint = 3;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
pub const CU_MEM_ACCESS_FLAGS_PROT_READWRITE: c_uint = 3;

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CUmemAllocationProp {
    /// 1: pinned, the only kind.
    pub kind: c_int,
    /// Ways it may be exported, as bits.
    pub requested_handle_types: c_int,
    /// Where it is.
    pub location: CUmemLocation,
    /// For other systems.
    pub win32: *mut c_void,
    /// Compression, RDMA, usage.
    pub flags: [u8; 8],
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CUmemAccessDesc {
    /// Who.
    pub location: CUmemLocation,
    /// May do what.
    pub flags: c_uint,
}

group! {
    /// The functions for sharing.
    Sharing {
        address_range: c"cuMemGetAddressRange_v2" fn(*mut CUdeviceptr, *mut usize, CUdeviceptr);
        retain: c"cuMemRetainAllocationHandle" fn(*mut CUmemHandle, *mut c_void);
        release: c"cuMemRelease" fn(CUmemHandle);
        properties: c"cuMemGetAllocationPropertiesFromHandle" fn(*mut CUmemAllocationProp, CUmemHandle);
        export: c"cuMemExportToShareableHandle" fn(*mut c_void, CUmemHandle, c_int, c_ulonglong);
        import: c"cuMemImportFromShareableHandle" fn(*mut CUmemHandle, *mut c_void, c_int);
        reserve: c"cuMemAddressReserve" fn(*mut CUdeviceptr, usize, usize, CUdeviceptr, c_ulonglong);
        address_free: c"cuMemAddressFree" fn(CUdeviceptr, usize);
        map: c"cuMemMap" fn(CUdeviceptr, usize, usize, CUmemHandle, c_ulonglong);
        unmap: c"cuMemUnmap" fn(CUdeviceptr, usize);
        set_access: c"cuMemSetAccess" fn(CUdeviceptr, usize, *const CUmemAccessDesc, usize);
        create: c"cuMemCreate" fn(*mut CUmemHandle, usize, *const CUmemAllocationProp, c_ulonglong);
        granularity: c"cuMemGetAllocationGranularity" fn(*mut usize, *const CUmemAllocationProp, c_int);
    }
}

impl Cuda {
    fn share(&self, call: &'static str) -> Result<&Sharing, CudaError> {
        self.sharing.as_ref().ok_or_else(|| self.error(call, CUDA_ERROR_NOT_SUPPORTED))
    }

    /// First byte and size of the allocation (or of the mapping of one) that holds `at`.
    pub fn address_range(&self, at: CUdeviceptr) -> Result<(CUdeviceptr, u64), CudaError> {
        let call = "cuMemGetAddressRange";
        let (mut base, mut size) = (0, 0);
        // SAFETY: places for the answers.
        self.check(call, unsafe { (self.share(call)?.address_range)(&mut base, &mut size, at) })?;
        Ok((base, size as u64))
    }
}

/// Physical memory; this holds one reference to it.
pub struct Allocation {
    cuda: Arc<Cuda>,
    raw: CUmemHandle,
}

/// In `CUmemAllocationProp::flags`: NICs may reach the memory.
const GPU_DIRECT_RDMA_CAPABLE: usize = 1;
/// `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED`.
const CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED: c_int = 110;

impl Allocation {
    /// New memory of a device, at least `bytes`, which other processes and NICs may be let to; also returns how many
    /// bytes it has. May take a while: set-up only.
    pub fn create(cuda: &Arc<Cuda>, device: CUdevice, bytes: usize) -> Result<(Self, u64), CudaError> {
        let share = cuda.share("cuMemCreate")?;
        let mut properties = CUmemAllocationProp {
            kind: CU_MEM_ALLOCATION_TYPE_PINNED,
            requested_handle_types: CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            location: CUmemLocation { kind: CU_MEM_LOCATION_TYPE_DEVICE, id: device },
            win32: std::ptr::null_mut(),
            flags: [0; 8],
        };
        let (mut capable, which) = (0, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
        // SAFETY: a place for the answer; a driver that does not know the attribute fails.
        if unsafe { (cuda.device_attribute)(&mut capable, which, device) } == CUDA_SUCCESS && capable != 0 {
            properties.flags[GPU_DIRECT_RDMA_CAPABLE] = 1;
        }
        let mut unit = 0;
        // SAFETY: a place for the answer and properties that live during the call; 0 asks for the least granularity.
        let code = unsafe { (share.granularity)(&mut unit, &properties, 0) };
        cuda.check("cuMemGetAllocationGranularity", code)?;
        let (size, mut raw) = (bytes.max(1).next_multiple_of(unit.max(1)), 0);
        // SAFETY: as above.
        cuda.call(&"cuMemCreate", || unsafe { (share.create)(&mut raw, size, &properties, 0) })?;
        Ok((Self { cuda: cuda.clone(), raw }, size as u64))
    }

    /// The allocation that is mapped at `at`; an error where there is none, as for memory of cudaMalloc.
    pub fn at(cuda: &Arc<Cuda>, at: CUdeviceptr) -> Result<Self, CudaError> {
        let call = "cuMemRetainAllocationHandle";
        let mut raw = 0;
        // SAFETY: a place for the answer; any address may be asked for.
        cuda.check(call, unsafe { (cuda.share(call)?.retain)(&mut raw, at as *mut c_void) })?;
        Ok(Self { cuda: cuda.clone(), raw })
    }

    fn properties(&self) -> Result<CUmemAllocationProp, CudaError> {
        let call = "cuMemGetAllocationPropertiesFromHandle";
        // SAFETY: plain data, for which zero is a value.
        let mut properties: CUmemAllocationProp = unsafe { std::mem::zeroed() };
        // SAFETY: a place for the answer; the handle is ours.
        self.cuda.check(call, unsafe { (self.cuda.share(call)?.properties)(&mut properties, self.raw) })?;
        Ok(properties)
    }

    /// Whether it was made so that it can be exported as a descriptor.
    pub fn has_descriptor(&self) -> Result<bool, CudaError> {
        Ok(self.properties()?.requested_handle_types & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR != 0)
    }

    /// The NUMA node that it is host memory of; `None`: it is a GPU's.
    pub fn node(&self) -> Result<Option<c_int>, CudaError> {
        let location = self.properties()?.location;
        Ok((location.kind == CU_MEM_LOCATION_TYPE_HOST_NUMA).then_some(location.id))
    }

    /// A new descriptor for it.
    pub fn export(&self) -> Result<OwnedFd, CudaError> {
        let call = "cuMemExportToShareableHandle";
        let mut fd: c_int = -1;
        let kind = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        // SAFETY: for this kind of handle the place is an int's; the handle is ours.
        let code = unsafe { (self.cuda.share(call)?.export)((&mut fd as *mut c_int).cast(), self.raw, kind, 0) };
        self.cuda.check(call, code)?;
        // SAFETY: the driver made the descriptor for the caller.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// The allocation behind a descriptor, which may be closed afterwards.
    pub fn import(cuda: &Arc<Cuda>, fd: BorrowedFd<'_>) -> Result<Self, CudaError> {
        let call = "cuMemImportFromShareableHandle";
        let mut raw = 0;
        let kind = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        // SAFETY: for this kind the descriptor itself is passed in place of a pointer; the driver checks what it is.
        let code = unsafe { (cuda.share(call)?.import)(&mut raw, fd.as_raw_fd() as usize as *mut c_void, kind) };
        cuda.check(call, code)?;
        Ok(Self { cuda: cuda.clone(), raw })
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if let Some(share) = &self.cuda.sharing {
            // SAFETY: gives back the one reference.
            unsafe { (share.release)(self.raw) };
        }
    }
}

/// Allocations mapped side by side, read- and writable by one GPU, and by the CPUs where they are host memory. The
/// mapping keeps the memory alive.
pub struct Mapped {
    cuda: Arc<Cuda>,
    base: CUdeviceptr,
    bytes: usize,
    /// Sizes of what is mapped so far, from `base` on.
    parts: Vec<usize>,
}

impl Mapped {
    /// Maps them in their order, each with the bytes that the exporter says it has. The driver refuses a size that is
    /// larger than the allocation or no multiple of the granularity.
    pub fn new(cuda: &Arc<Cuda>, parts: &[(Allocation, u64)], device: CUdevice) -> Result<Self, CudaError> {
        let share = cuda.share("cuMemAddressReserve")?;
        let bytes = parts.iter().map(|(_, bytes)| *bytes as usize).sum();
        let mut made = Self { cuda: cuda.clone(), base: 0, bytes, parts: Vec::new() };
        // SAFETY: a place for the answer; the driver picks the range.
        let code = unsafe { (share.reserve)(&mut made.base, bytes, 0, 0, 0) };
        if code != CUDA_SUCCESS {
            made.bytes = 0;
            return Err(cuda.error("cuMemAddressReserve", code));
        }
        for (allocation, bytes) in parts {
            let at = made.base + made.parts.iter().sum::<usize>() as u64;
            // SAFETY: a part of the range that was just reserved and is unmapped.
            cuda.check("cuMemMap", unsafe { (share.map)(at, *bytes as usize, 0, allocation.raw, 0) })?;
            made.parts.push(*bytes as usize);
        }
        made.allow(CUmemLocation { kind: CU_MEM_LOCATION_TYPE_DEVICE, id: device })?;
        // The driver copies some of what it takes for host memory by the CPU.
        let mut nodes = parts.iter().map(|(allocation, _)| allocation.node()).collect::<Result<Vec<_>, _>>()?;
        nodes.dedup();
        for node in nodes.into_iter().flatten() {
            made.allow(CUmemLocation { kind: CU_MEM_LOCATION_TYPE_HOST_NUMA, id: node })?;
        }
        Ok(made)
    }

    /// Lets somebody load from all of it and store to it.
    fn allow(&self, location: CUmemLocation) -> Result<(), CudaError> {
        let call = "cuMemSetAccess";
        let access = CUmemAccessDesc { location, flags: CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
        // SAFETY: the whole range is mapped; one description.
        self.cuda.check(call, unsafe { (self.cuda.share(call)?.set_access)(self.base, self.bytes, &access, 1) })
    }

    /// Lets the other GPUs of this process that can reach it load from it and store to it. The driver refuses those
    /// that cannot.
    pub fn open_to_peers(&self, home: CUdevice) {
        for device in (0..self.cuda.devices()).filter(|&device| device != home) {
            let _ = self.allow(CUmemLocation { kind: CU_MEM_LOCATION_TYPE_DEVICE, id: device });
        }
    }

    /// First byte.
    pub fn base(&self) -> CUdeviceptr {
        self.base
    }

    /// Bytes of all of them.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let Some(share) = self.cuda.sharing.as_ref().filter(|_| self.bytes > 0) else { return };
        let mut at = self.base;
        for &bytes in &self.parts {
            // SAFETY: mapped by `new`; the owner has seen the GPU's last access.
            unsafe { (share.unmap)(at, bytes) };
            at += bytes as u64;
        }
        // SAFETY: reserved by `new`, and nothing is mapped there any more.
        unsafe { (share.address_free)(self.base, self.bytes) };
    }
}

/// What tests compare with the driver's header.
const _: () = assert!(std::mem::size_of::<CUmemAllocationProp>() == 32 && std::mem::size_of::<CUmemAccessDesc>() == 12);
