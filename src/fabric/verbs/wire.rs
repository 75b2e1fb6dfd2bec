//! What ranks tell each other before they can send: one hello a rank, one slice a pair of ranks for each set of
//! contexts. All fields are little-endian at fixed places. Everything here came from a peer of any build:
//! `parse` is the one place where it earns trust.

use super::gid::is_ipv4_mapped;
use oxygin_ffi::verbs::types::*;
use std::fmt;

/// "oxVB", first in every message.
const MAGIC: u32 = u32::from_le_bytes(*b"oxVB");
/// Of the layouts below.
const VERSION: u16 = 3;

/// Why bytes are not what they should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Malformed {
    /// Other length.
    Length {
        /// Bytes that came.
        got: usize,
        /// Bytes that should have.
        want: usize,
    },
    /// No message of this kind.
    Magic(u32),
    /// Another version.
    Version(u16),
    /// A field has a value it cannot have.
    Field(&'static str, u64),
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length { got, want } => write!(f, "it has {got} bytes and not {want}"),
            Self::Magic(m) => write!(f, "it starts with {m:#010x} and not {MAGIC:#010x}"),
            Self::Version(v) => {
                write!(f, "its version is {v} and not {VERSION}; run the same oxygin on all ranks")
            }
            Self::Field(name, v) => write!(f, "{name} cannot be {v}"),
        }
    }
}

/// Reads fields one after the other from bytes of checked length.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        match self.0.split_first_chunk::<N>() {
            Some((head, tail)) => {
                self.0 = tail;
                *head
            }
            // Unreachable: `parse` checked the length. Zeros fail the field checks.
            None => [0; N],
        }
    }
    fn u8(&mut self) -> u8 {
        u8::from_le_bytes(self.take())
    }
    fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.take())
    }
    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }
    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }
}

/// What every peer knows of a rank's port and device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// `IBV_LINK_LAYER_*`.
    pub link_layer: u8,
    /// `IBV_MTU_*` that the port runs at.
    pub active_mtu: u8,
    /// Whether every packet to this port needs a global route header.
    pub grh_required: bool,
    /// Whether the device carries out remote atomics.
    pub atomics: bool,
    /// Whether its queue pairs may have options to agree on ([`ibv_ece`]).
    pub ece: bool,
    /// Whether it speaks iWARP; the GID is then the IP address (IPv4 as `::ffff:a.b.c.d`) to connect to.
    pub iwarp: bool,
    /// Local identifier; 0 on Ethernet.
    pub lid: u16,
    /// Reads and atomics a queue pair may have under way.
    pub max_rd_atomic: u8,
    /// Reads and atomics a queue pair may have arriving.
    pub max_dest_rd_atomic: u8,
    /// `IBV_GID_TYPE_*` of the GID.
    pub gid_type: u8,
    /// The port's GID.
    pub gid: [u8; 16],
    /// Largest message in bytes.
    pub max_msg_sz: u32,
}

impl Hello {
    /// What it speaks, in words.
    fn kind(&self) -> &'static str {
        match self.link_layer {
            _ if self.iwarp => "iWARP",
            IBV_LINK_LAYER_INFINIBAND => "InfiniBand",
            _ => "RoCE",
        }
    }

    /// The family of the GID's IP address, in words.
    fn family(&self) -> &'static str {
        match is_ipv4_mapped(&ibv_gid { raw: self.gid }) {
            true => "IPv4",
            false => "IPv6",
        }
    }

    /// Bytes of a hello.
    pub const LEN: usize = 40;

    /// The message.
    pub fn emit(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(Self::LEN);
        out.extend(MAGIC.to_le_bytes());
        out.extend(VERSION.to_le_bytes());
        out.extend(self.lid.to_le_bytes());
        out.push(self.link_layer);
        out.push(self.active_mtu);
        let flags = [self.grh_required, self.atomics, self.iwarp, self.ece];
        out.push(flags.iter().rev().fold(0, |bits, flag| bits << 1 | u8::from(*flag)));
        out.push(self.max_rd_atomic);
        out.push(self.max_dest_rd_atomic);
        out.push(self.gid_type);
        out.extend([0; 2]);
        out.extend(self.gid);
        out.extend(self.max_msg_sz.to_le_bytes());
        out.extend([0; 4]);
        out
    }

    /// Reads a message; unknown flags and reserved bytes must be zero.
    pub fn parse(bytes: &[u8]) -> Result<Self, Malformed> {
        // The version comes before the length, so that another version is not called a wrong length.
        let mut r = header(bytes)?;
        if bytes.len() != Self::LEN {
            return Err(Malformed::Length { got: bytes.len(), want: Self::LEN });
        }
        let lid = r.u16();
        let link_layer = r.u8();
        let active_mtu = r.u8();
        let flags = r.u8();
        let max_rd_atomic = r.u8();
        let max_dest_rd_atomic = r.u8();
        let gid_type = r.u8();
        let reserved = r.u16();
        let gid = r.take();
        let max_msg_sz = r.u32();
        let reserved = u64::from(r.u32()) | u64::from(reserved);
        field("the link layer", link_layer.into(), 1..=2)?;
        field("the MTU", active_mtu.into(), u64::from(IBV_MTU_256)..=u64::from(IBV_MTU_4096))?;
        field("the flags", flags.into(), 0..=15)?;
        field("the limit of reads and atomics", max_rd_atomic.into(), 1..=255)?;
        field("the limit of arriving reads and atomics", max_dest_rd_atomic.into(), 1..=255)?;
        field("the GID type", gid_type.into(), 0..=u64::from(IBV_GID_TYPE_ROCE_V2))?;
        field("a reserved field", reserved, 0..=0)?;
        field("the message limit", max_msg_sz.into(), 1..=u64::from(u32::MAX))?;
        Ok(Self {
            link_layer,
            active_mtu,
            grh_required: flags & 1 != 0,
            atomics: flags & 2 != 0,
            iwarp: flags & 4 != 0,
            ece: flags & 8 != 0,
            lid,
            max_rd_atomic,
            max_dest_rd_atomic,
            gid_type,
            gid,
            max_msg_sz,
        })
    }
}

/// Why the ranks' devices cannot be connected to each other, said alike on every rank; `None`: they can.
pub fn mismatch(hellos: &[Hello]) -> Option<String> {
    let first = hellos.first()?;
    hellos.iter().enumerate().find_map(|(rank, hello)| {
        if hello.kind() != first.kind() {
            return Some(format!(
                "rank {rank} is on {} and rank 0 on {}; choose devices of one kind on all ranks with NCCL_IB_HCA",
                hello.kind(),
                first.kind()
            ));
        }
        let roce = hello.link_layer == IBV_LINK_LAYER_ETHERNET && !hello.iwarp;
        if roce && hello.gid_type != first.gid_type {
            return Some(format!(
                "rank {rank} uses a RoCE v{} GID and rank 0 a RoCE v{} one; set NCCL_IB_GID_INDEX on all ranks \
                 to entries of one version",
                hello.gid_type, first.gid_type
            ));
        }
        // Kernels find no way from an address of one family to one of the other.
        let has_ip = hello.iwarp || (roce && u32::from(hello.gid_type) == IBV_GID_TYPE_ROCE_V2);
        (has_ip && hello.family() != first.family()).then(|| {
            let remedy = match hello.iwarp {
                true => "give the devices' interfaces addresses of one family",
                false => {
                    "set NCCL_IB_GID_INDEX on all ranks to entries of one family (NCCL_IB_ADDR_FAMILY chooses them)"
                }
            };
            format!("rank {rank} uses an {} address and rank 0 an {} one; {remedy}", hello.family(), first.family())
        })
    })
}

/// One context's queue pair towards one peer, as that peer needs to know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpInfo {
    /// Number, 24 bits.
    pub qpn: u32,
    /// First packet number that it sends, 24 bits.
    pub psn: u32,
    /// Where the peer writes how many signal messages it has taken; 0 without messages.
    pub credit_addr: u64,
    /// Key of that word.
    pub credit_rkey: u32,
    /// iWARP: where the context takes connect requests; else 0.
    pub port: u16,
    /// Options that its device knows, if it knows some.
    pub ece: Option<ibv_ece>,
}

/// Bytes of options in a message.
const ECE_LEN: usize = 16;

fn emit_ece(ece: Option<ibv_ece>, out: &mut Vec<u8>) {
    let ibv_ece { vendor_id, options, comp_mask } = ece.unwrap_or_default();
    for word in [ece.is_some().into(), vendor_id, options, comp_mask] {
        out.extend(word.to_le_bytes());
    }
}

fn parse_ece(r: &mut Reader) -> Result<Option<ibv_ece>, Malformed> {
    let [has, vendor_id, options, comp_mask] = [(); 4].map(|()| r.u32());
    field("whether there are options", has.into(), 0..=1)?;
    let most = if has == 1 { u32::MAX } else { 0 };
    field("an option that is not there", (vendor_id | options | comp_mask).into(), 0..=most.into())?;
    Ok((has == 1).then_some(ibv_ece { vendor_id, options, comp_mask }))
}

/// Options that a rank's queue pairs towards one peer have taken, one a context: a slice for that peer.
pub fn emit_taken(taken: &[Option<ibv_ece>], out: &mut Vec<u8>) {
    taken.iter().for_each(|ece| emit_ece(*ece, out));
}

/// Reads the slice of a peer.
pub fn parse_taken(bytes: &[u8], contexts: usize) -> Result<Vec<Option<ibv_ece>>, Malformed> {
    let want = ECE_LEN * contexts;
    if bytes.len() != want {
        return Err(Malformed::Length { got: bytes.len(), want });
    }
    let mut r = Reader(bytes);
    (0..contexts).map(|_| parse_ece(&mut r)).collect()
}

/// Random bytes of one rank's set of contexts, which whoever connects to them by iWARP must know; else zeros.
pub type Token = [u8; 16];

/// What a rank says to one peer of a set of contexts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QpSlice {
    /// Its queue pairs towards that peer, one a context.
    pub infos: Vec<QpInfo>,
    /// Receives that it posted on each: none where signals are atomics, else a power of two.
    pub receives: u32,
    /// What its listeners want to hear.
    pub token: Token,
}

impl QpInfo {
    const LEN: usize = 24 + ECE_LEN;
    const HEADER: usize = 28;

    /// Bytes of the slice of `contexts` queue pairs.
    pub fn slice_len(contexts: usize) -> usize {
        Self::HEADER + contexts * Self::LEN
    }

    /// Appends the slice for one peer.
    pub fn emit_slice(infos: &[Self], receives: u32, token: &Token, out: &mut Vec<u8>) {
        out.extend(MAGIC.to_le_bytes());
        out.extend(VERSION.to_le_bytes());
        out.extend((receives as u16).to_le_bytes());
        out.extend((infos.len() as u32).to_le_bytes());
        out.extend(token);
        for info in infos {
            out.extend(info.qpn.to_le_bytes());
            out.extend(info.psn.to_le_bytes());
            out.extend(info.credit_addr.to_le_bytes());
            out.extend(info.credit_rkey.to_le_bytes());
            out.extend(info.port.to_le_bytes());
            out.extend([0; 2]);
            emit_ece(info.ece, out);
        }
    }

    /// Reads the slice of a peer that made `contexts` queue pairs, where signals are messages or not.
    pub fn parse_slice(bytes: &[u8], contexts: usize, by_message: bool) -> Result<QpSlice, Malformed> {
        let mut r = header(bytes)?;
        let want = Self::slice_len(contexts);
        if bytes.len() != want {
            return Err(Malformed::Length { got: bytes.len(), want });
        }
        let receives = u32::from(r.u16());
        if receives.is_power_of_two() != by_message || (receives > 0 && !by_message) {
            return Err(Malformed::Field("the number of receives", receives.into()));
        }
        field("the number of contexts", r.u32().into(), contexts as u64..=contexts as u64)?;
        let token = r.take();
        let infos: Result<_, _> = (0..contexts)
            .map(|_| {
                let (qpn, psn, credit_addr, credit_rkey, port) = (r.u32(), r.u32(), r.u64(), r.u32(), r.u16());
                let reserved = r.u16();
                let info = Self { qpn, psn, credit_addr, credit_rkey, port, ece: parse_ece(&mut r)? };
                field("a queue pair number", info.qpn.into(), 0..=0xff_ffff)?;
                field("a packet number", info.psn.into(), 0..=0xff_ffff)?;
                field("the credit word's alignment", info.credit_addr & 7, 0..=0)?;
                field("a reserved field", reserved.into(), 0..=0)?;
                Ok(info)
            })
            .collect();
        Ok(QpSlice { infos: infos?, receives, token })
    }
}

fn header(bytes: &[u8]) -> Result<Reader<'_>, Malformed> {
    if bytes.len() < 8 {
        return Err(Malformed::Length { got: bytes.len(), want: Hello::LEN });
    }
    let mut r = Reader(bytes);
    match (r.u32(), r.u16()) {
        (MAGIC, VERSION) => Ok(r),
        (MAGIC, version) => Err(Malformed::Version(version)),
        (magic, _) => Err(Malformed::Magic(magic)),
    }
}

fn field(name: &'static str, value: u64, range: std::ops::RangeInclusive<u64>) -> Result<(), Malformed> {
    if range.contains(&value) {
        Ok(())
    } else {
        Err(Malformed::Field(name, value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hello() -> impl Strategy<Value = Hello> {
        (1u8..=2, 1u8..=5, any::<[bool; 4]>(), any::<u16>(), 1u8.., 1u8.., 0u8..=2, any::<[u8; 16]>(), 1u32..).prop_map(
            |(
                link_layer,
                active_mtu,
                [grh_required, atomics, iwarp, ece],
                lid,
                rd,
                dest,
                gid_type,
                gid,
                max_msg_sz,
            )| {
                Hello {
                    link_layer,
                    active_mtu,
                    grh_required,
                    atomics,
                    ece,
                    iwarp,
                    lid,
                    max_rd_atomic: rd,
                    max_dest_rd_atomic: dest,
                    gid_type,
                    gid,
                    max_msg_sz,
                }
            },
        )
    }

    fn ece() -> impl Strategy<Value = Option<ibv_ece>> {
        let some = any::<[u32; 3]>();
        proptest::option::of(some.prop_map(|[vendor_id, options, comp_mask]| ibv_ece { vendor_id, options, comp_mask }))
    }

    fn info() -> impl Strategy<Value = QpInfo> {
        (0u32..1 << 24, 0u32..1 << 24, any::<u64>(), any::<u32>(), any::<u16>(), ece()).prop_map(
            |(qpn, psn, a, credit_rkey, port, ece)| QpInfo { qpn, psn, credit_addr: a & !7, credit_rkey, port, ece },
        )
    }

    proptest! {
        #[test]
        fn hellos_come_back(h in hello()) {
            prop_assert_eq!(Hello::parse(&h.emit()), Ok(h));
        }

        #[test]
        fn slices_come_back(infos in proptest::collection::vec(info(), 0..20), log in 0u32..16, token: Token) {
            for receives in [0, 1 << log] {
                let (mut bytes, by_message) = (Vec::new(), receives > 0);
                QpInfo::emit_slice(&infos, receives, &token, &mut bytes);
                let said = Ok(QpSlice { infos: infos.clone(), receives, token });
                prop_assert_eq!(QpInfo::parse_slice(&bytes, infos.len(), by_message), said);
                prop_assert!(QpInfo::parse_slice(&bytes, infos.len() + 1, by_message).is_err());
                prop_assert!(QpInfo::parse_slice(&bytes, infos.len(), !by_message).is_err());
            }
            let mut bytes = Vec::new();
            QpInfo::emit_slice(&infos, 27, &token, &mut bytes);
            prop_assert!(QpInfo::parse_slice(&bytes, infos.len(), true).is_err());
        }

        #[test]
        fn a_changed_byte_is_refused_or_another_hello(h in hello(), at in 0..Hello::LEN, by in 1u8..) {
            let mut bytes = h.emit();
            bytes[at] ^= by;
            if let Ok(other) = Hello::parse(&bytes) {
                prop_assert_ne!(other, h);
                prop_assert_eq!(other.emit(), bytes);
            }
        }

        #[test]
        fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            let _ = Hello::parse(&bytes);
            let _ = QpInfo::parse_slice(&bytes, bytes.len() / 24, true);
        }
    }

    #[test]
    fn another_version_is_named_before_its_length() {
        let mut bytes = MAGIC.to_le_bytes().to_vec();
        bytes.extend([9, 0, 0, 0, 0]);
        assert_eq!(Hello::parse(&bytes), Err(Malformed::Version(9)));
        assert!(matches!(Hello::parse(b"GET / HTTP/1.1"), Err(Malformed::Magic(_))));
        assert!(matches!(Hello::parse(b""), Err(Malformed::Length { .. })));
    }
}
