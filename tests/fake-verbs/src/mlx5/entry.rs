//! Send entries, as a device reads them: written apart from the library's own decoder, and never to share code with it.
//!
//! Segments: rdma-core `providers/mlx5/mlx5dv.h` (`mlx5_wqe_ctrl_seg`, `_raddr_seg`, `_atomic_seg`, `_data_seg`,
//! `_inl_data_seg`) and DPDK `mlx5_prm.h` (`mlx5_wqe_cseg`, `mlx5_wqe_send_en_seg`). Extended atomics: the device
//! code of NCCL's doca-gpunetio, `doca_gpu_dev_verbs_wqe_prepare_atomic_ext`, since neither of these has them.

/// Bytes of a slot.
pub const SLOT: usize = 64;
/// Bytes of a segment, by which entries are measured.
const SEGMENT: usize = 16;
/// Slots of the longest entry that is read: segments are counted in 6 bits.
pub const SLOTS_MOST: usize = 16;

/// Where bytes lie under a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keyed {
    pub key: u32,
    pub at: u64,
    pub bytes: u64,
}

/// What an atomic operation does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// `boundary` has a one at the highest bit of every field; a carry does not leave its field.
    Add {
        value: u64,
        boundary: u64,
    },
    Swap {
        compare: u64,
        compare_mask: u64,
        swap: u64,
        swap_mask: u64,
    },
}

/// What an entry asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Work {
    Nothing,
    Write {
        to: (u64, u32),
        from: Source,
    },
    Read {
        from: (u64, u32),
        to: Vec<Keyed>,
    },
    Atomic {
        at: (u64, u32),
        bytes: u64,
        change: Change,
        to: Vec<Keyed>,
    },
    Wait {
        cq: u32,
        index: u32,
    },
    Dump {
        from: Vec<Keyed>,
    },
    /// Two-sided: nobody receives here.
    Send,
}

/// Where a write's bytes come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    Inline(Vec<u8>),
    Memory(Vec<Keyed>),
}

/// An entry without what it asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    pub opcode: u8,
    modifier: u8,
    pub index: u16,
    pub queue: u32,
    segments: usize,
    flags: u8,
}

/// Why an entry is none.
pub type Malformed = String;

fn be32(bytes: &[u8], at: usize) -> u32 {
    let word: [u8; 4] = std::array::from_fn(|i| bytes[at + i]);
    u32::from_be_bytes(word)
}

fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from(be32(bytes, at)) << 32 | u64::from(be32(bytes, at + 4))
}

impl Head {
    /// Of an entry's first 16 bytes.
    pub fn read(bytes: &[u8]) -> Self {
        let (first, second) = (be32(bytes, 0), be32(bytes, 4));
        Self {
            opcode: first as u8,
            index: (first >> 8) as u16,
            modifier: (first >> 24) as u8,
            queue: second >> 8,
            segments: (second & 0x3f) as usize,
            flags: bytes[11],
        }
    }

    /// Slots that it takes.
    pub fn slots(&self) -> u64 {
        self.segments.div_ceil(SLOT / SEGMENT).max(1) as u64
    }

    /// Whether it is to be reported when it succeeds: rdma-core, `MLX5_WQE_CTRL_CQ_UPDATE`, 2 or 3 in these bits.
    pub fn is_reported(&self) -> bool {
        self.flags & 0b1000 != 0
    }

    /// What it asks for; `bytes` has all of its slots.
    pub fn work(&self, bytes: &[u8]) -> Result<Work, Malformed> {
        let end = self.segments * SEGMENT;
        if self.segments == 0 || end > bytes.len() {
            return Err(format!("{} segments", self.segments));
        }
        let body = &bytes[SEGMENT..end];
        if self.modifier != 0 && !matches!(self.opcode, 0x14 | 0x15) {
            return Err(format!("opcode modifier {:#x} of opcode {:#x}", self.modifier, self.opcode));
        }
        let remote = |body: &[u8]| match body.len() {
            0..SEGMENT => Err("no remote address".to_owned()),
            _ => Ok((be64(body, 0), be32(body, 8))),
        };
        Ok(match self.opcode {
            0x00 => Work::Nothing,
            0x08 => Work::Write { to: remote(body)?, from: source(&body[SEGMENT..])? },
            0x09..=0x0b => Work::Send,
            0x0f if body.len() != SEGMENT => return Err(format!("a wait of {} bytes", body.len())),
            0x0f => Work::Wait { index: be32(body, 8), cq: be32(body, 12) & 0xff_ffff },
            0x10 => Work::Read { from: remote(body)?, to: pieces(&body[SEGMENT..])? },
            0x11 | 0x12 | 0x14 | 0x15 => self.atomic(remote(body)?, &body[SEGMENT..])?,
            0x23 => Work::Dump { from: pieces(body)? },
            other => return Err(format!("opcode {other:#x}")),
        })
    }

    /// An atomic operation, behind its remote address.
    fn atomic(&self, at: (u64, u32), body: &[u8]) -> Result<Work, Malformed> {
        // MLX5_OPC_MOD of extended atomics: 8 for words of 4 bytes, 9 for those of 8.
        let bytes = match (self.opcode, self.modifier) {
            (0x11 | 0x12, _) | (_, 9) => 8,
            (_, 8) => 4,
            (_, other) => return Err(format!("opcode modifier {other:#x} of an extended atomic operation")),
        };
        let operands = if (self.opcode, bytes) == (0x14, 8) { 2 * SEGMENT } else { SEGMENT };
        if body.len() < operands {
            return Err("operands are missing".into());
        }
        let all = u64::MAX;
        let change = match (self.opcode, bytes) {
            (0x12, _) => Change::Add { value: be64(body, 0), boundary: 0 },
            (0x15, 8) => Change::Add { value: be64(body, 0), boundary: be64(body, 8) },
            (0x15, _) => Change::Add { value: be32(body, 0).into(), boundary: be32(body, 4).into() },
            (0x11, _) => {
                Change::Swap { swap: be64(body, 0), compare: be64(body, 8), swap_mask: all, compare_mask: all }
            }
            (_, 8) => Change::Swap {
                swap: be64(body, 0),
                compare: be64(body, 8),
                swap_mask: be64(body, 16),
                compare_mask: be64(body, 24),
            },
            _ => Change::Swap {
                swap: be32(body, 0).into(),
                compare: be32(body, 4).into(),
                swap_mask: be32(body, 8).into(),
                compare_mask: be32(body, 12).into(),
            },
        };
        Ok(Work::Atomic { at, bytes, change, to: pieces(&body[operands..])? })
    }
}

/// Pointers to memory, up to the end.
fn pieces(body: &[u8]) -> Result<Vec<Keyed>, Malformed> {
    body.chunks(SEGMENT)
        .map(|piece| match be32(piece, 0) {
            bytes if bytes & 1 << 31 != 0 => Err("bytes inside the entry, where memory must be".to_owned()),
            // A segment cannot say that it has none: zero is the largest length.
            0 => Ok(Keyed { key: be32(piece, 4), at: be64(piece, 8), bytes: 1 << 31 }),
            bytes => Ok(Keyed { key: be32(piece, 4), at: be64(piece, 8), bytes: bytes.into() }),
        })
        .collect()
}

/// A write's bytes: inside the entry, or pointers to memory.
fn source(body: &[u8]) -> Result<Source, Malformed> {
    if body.len() < 4 || be32(body, 0) & 1 << 31 == 0 {
        return pieces(body).map(Source::Memory);
    }
    let bytes = (be32(body, 0) & 0x7fff_ffff) as usize;
    // Segments that the entry has beyond its bytes would be something that nobody asked for.
    if 4 + bytes > body.len() || (4 + bytes).div_ceil(SEGMENT) * SEGMENT != body.len() {
        return Err(format!("{bytes} bytes inside an entry with room for {}", body.len() - 4));
    }
    Ok(Source::Inline(body[4..4 + bytes].to_vec()))
}
