//! Little-endian fields in messages between ranks: written in order, read with every length checked.

/// Appends fields to a message.
#[derive(Default)]
pub struct Writer(Vec<u8>);

impl Writer {
    /// An empty message.
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends one byte.
    pub fn u8(&mut self, v: u8) -> &mut Self {
        self.0.push(v);
        self
    }

    /// Appends 2 bytes.
    pub fn u16(&mut self, v: u16) -> &mut Self {
        self.raw(&v.to_le_bytes())
    }

    /// Appends 4 bytes.
    pub fn u32(&mut self, v: u32) -> &mut Self {
        self.raw(&v.to_le_bytes())
    }

    /// Appends 8 bytes.
    pub fn u64(&mut self, v: u64) -> &mut Self {
        self.raw(&v.to_le_bytes())
    }

    /// Appends bytes whose number the reader knows.
    pub fn raw(&mut self, v: &[u8]) -> &mut Self {
        self.0.extend_from_slice(v);
        self
    }

    /// Appends a 4-byte length and that many bytes.
    pub fn bytes(&mut self, v: &[u8]) -> &mut Self {
        self.u32(v.len() as u32).raw(v)
    }

    /// The message.
    pub fn finish(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.0)
    }
}

/// Takes fields off a message; `None` as soon as it is too short.
pub struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    /// Reads from the start of `message`.
    pub fn new(message: &'a [u8]) -> Self {
        Self(message)
    }

    /// Takes `n` bytes.
    pub fn raw(&mut self, n: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(n)?;
        self.0 = tail;
        Some(head)
    }

    /// Takes a fixed number of bytes.
    pub fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.raw(N)?.try_into().ok()
    }

    /// Takes one byte.
    pub fn u8(&mut self) -> Option<u8> {
        self.array::<1>().map(|[b]| b)
    }

    /// Takes 2 bytes.
    pub fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    /// Takes 4 bytes.
    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    /// Takes 8 bytes.
    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// Takes a 4-byte length and that many bytes.
    pub fn bytes(&mut self) -> Option<&'a [u8]> {
        let n = self.u32()?;
        self.raw(n as usize)
    }

    /// `Some` when nothing is left over.
    pub fn end(&self) -> Option<()> {
        self.0.is_empty().then_some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let mut w = Writer::new();
        let m = w.u8(1).u16(2).u32(3).u64(4).bytes(b"abc").finish();
        let mut r = Reader::new(&m);
        assert_eq!((r.u8(), r.u16(), r.u32(), r.u64()), (Some(1), Some(2), Some(3), Some(4)));
        assert_eq!(r.bytes(), Some(&b"abc"[..]));
        assert_eq!(r.end(), Some(()));
        for cut in 0..m.len() {
            let mut r = Reader::new(&m[..cut]);
            let all = (|| Some((r.u8()?, r.u16()?, r.u32()?, r.u64()?, r.bytes()?)))();
            assert!(all.is_none(), "cut at {cut}");
        }
        assert!(Reader::new(&[255, 255, 255, 255, 0]).bytes().is_none());
    }
}
