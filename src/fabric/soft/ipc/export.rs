//! A window as other processes may have it.

use super::wire::{Offer, Site, What, MAX_SEGMENTS};
use oxygin_ffi::cuda::{Allocation, Context, CudaError};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// A window of this rank, while a registration hands it out.
pub struct Export {
    /// The window's number.
    pub window: u32,
    context: Arc<Context>,
    segments: Vec<Allocation>,
}

impl Export {
    /// Finds the allocations under `len` bytes at `base`. An error is a reason for the log.
    pub fn new(context: &Arc<Context>, window: u32, base: u64, len: u64) -> (Option<Self>, Offer) {
        match walk(context, base, len) {
            Ok((segments, offset, sizes)) => {
                let site = match is_in_host_memory(&segments.iter().collect::<Vec<_>>()) {
                    Ok(true) => Site::Host,
                    Ok(false) => Site::Gpu(context.cuda().pci_address(context.device()).unwrap_or_default()),
                    Err(why) => return (None, Offer::Not(why)),
                };
                (Some(Self { window, context: context.clone(), segments }), Offer::Segments { offset, sizes, site })
            }
            Err(why) => (None, Offer::Not(why)),
        }
    }

    /// How many segments it has.
    pub fn segments(&self) -> u32 {
        self.segments.len() as u32
    }

    /// A segment for a peer. A descriptor is made for this one answer, so that none is kept.
    pub fn segment(&self, segment: u32) -> (What, Option<OwnedFd>) {
        let made = match self.segments.get(segment as usize) {
            None => Err(format!("there are {} segments", self.segments.len())),
            Some(one) => self.context.enter().and_then(|_current| one.export()).map_err(|e| e.to_string()),
        };
        match made {
            Ok(fd) => (What::Descriptor, Some(fd)),
            Err(why) => (What::Refused(why), None),
        }
    }
}

/// Whether all of them are; some may not.
pub fn is_in_host_memory(segments: &[&Allocation]) -> Result<bool, String> {
    let nodes = segments.iter().map(|one| one.node().map_err(|e| e.to_string())).collect::<Result<Vec<_>, _>>()?;
    match nodes.iter().flatten().count() {
        0 => Ok(false),
        some if some == segments.len() => Ok(true),
        _ => Err("some of it is GPU memory and some is host memory".into()),
    }
}

/// The memory under a window, where in it the window starts, and the sizes of its segments.
fn walk(context: &Context, base: u64, len: u64) -> Result<(Vec<Allocation>, u64, Vec<u64>), String> {
    let said = |e: CudaError| e.to_string();
    let _current = context.enter().map_err(said)?;
    let cuda = context.cuda();
    let (first, size) = cuda.address_range(base).map_err(said)?;
    // Of host memory some drivers give no address (NCCL: `src/include/alloc.h`): what is as long as the window is all
    // of it.
    let first = if first == 0 && size == len { base } else { first };
    let offset = base.checked_sub(first).ok_or("the driver names an allocation that starts behind the window")?;
    let (mut all, mut sizes) = (Vec::new(), Vec::new());
    let (mut next, mut at, mut size) = (Allocation::at(cuda, base).map_err(said)?, first, size);
    loop {
        if !next.has_descriptor().map_err(said)? {
            return Err("it was made by cuMemCreate without CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR".into());
        }
        all.push(next);
        sizes.push(size);
        at = at.checked_add(size).filter(|_| size > 0).ok_or("the driver names an impossible size")?;
        if at >= base + len {
            return Ok((all, offset, sizes));
        }
        if all.len() == MAX_SEGMENTS {
            return Err(format!("it has more than {MAX_SEGMENTS} segments"));
        }
        next = Allocation::at(cuda, at).map_err(said)?;
        let (start, bytes) = cuda.address_range(at).map_err(said)?;
        if start != at {
            return Err("its segments do not lie side by side".into());
        }
        size = bytes;
    }
}
