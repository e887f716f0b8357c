//! Access to the bytes of a packet.

use core::ops::Deref;

use crate::{DropReason, Ip4, Ip6, Mac, Ports};

/// A type that bytes of a packet can be read as.
///
/// # Safety
/// The type consists of integers and arrays of them: any bytes are a valid value.
pub unsafe trait Plain: Copy {}

// SAFETY: an integer.
unsafe impl Plain for u8 {}
// SAFETY: integers side by side.
unsafe impl<const N: usize> Plain for [u8; N] {}
// SAFETY: `repr(transparent)`, an integer.
unsafe impl Plain for Ports {}
// SAFETY: `repr(C)`, as long as its bytes.
unsafe impl Plain for Mac {}
// SAFETY: as above.
unsafe impl Plain for Ip4 {}
// SAFETY: as above.
unsafe impl Plain for Ip6 {}

/// A packet to be read.
pub trait Bytes {
    /// A header in place.
    type At<'a, T: Plain + 'a>: Deref<Target = T>
    where
        Self: 'a;

    /// How long it is.
    fn length(&self) -> u32;

    /// Whether it is still to be segmented.
    fn is_uncut(&self) -> bool;

    /// Whether a VLAN tag is stored beside the packet's bytes, and that tag's control information.
    fn tag_beside(&self) -> (bool, u16);

    /// A header at a constant offset, in place.
    ///
    /// # Errors
    /// [`DropReason::Malformed`]: the header is truncated or cannot be read in place.
    fn at<T: Plain>(&self, offset: usize) -> Result<Self::At<'_, T>, DropReason>;

    /// A copy of a header at any offset.
    ///
    /// # Errors
    /// [`DropReason::Malformed`]: the header is truncated.
    fn load<T: Plain>(&self, offset: usize) -> Result<T, DropReason>;

    /// Reads a header that is usually at `usual`, a constant. `plain` says whether it is there: the verifier would
    /// track each compared offset separately.
    ///
    /// # Errors
    /// As for [`at`](Self::at) and [`load`](Self::load).
    #[inline(always)]
    fn header<T: Plain>(&self, plain: bool, usual: usize, offset: usize) -> Result<T, DropReason> {
        if plain { self.at(usual).map(|there| *there) } else { self.load(offset) }
    }
}

/// A packet in memory, outside of the kernel.
#[derive(Debug, Clone, Copy)]
pub struct InMemory<'a> {
    /// All of it.
    pub bytes: &'a [u8],
    /// Number of leading bytes that can be read in place; the kernel may store the others elsewhere.
    pub in_place: usize,
    /// See [`Bytes::is_uncut`].
    pub is_uncut: bool,
    /// See [`Bytes::tag_beside`].
    pub tag_beside: Option<u16>,
}

/// A header of a packet in memory, where it need not be aligned.
#[derive(Debug)]
pub struct Copied<T>(T);

impl<T> Deref for Copied<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl Bytes for InMemory<'_> {
    type At<'b, T: Plain + 'b>
        = Copied<T>
    where
        Self: 'b;

    fn length(&self) -> u32 {
        u32::try_from(self.bytes.len()).unwrap_or(u32::MAX)
    }

    fn is_uncut(&self) -> bool {
        self.is_uncut
    }

    fn tag_beside(&self) -> (bool, u16) {
        (self.tag_beside.is_some(), self.tag_beside.unwrap_or_default())
    }

    fn at<T: Plain>(&self, offset: usize) -> Result<Copied<T>, DropReason> {
        let first = &self.bytes[..self.in_place.min(self.bytes.len())];
        read(first, offset).map(Copied)
    }

    fn load<T: Plain>(&self, offset: usize) -> Result<T, DropReason> {
        read(self.bytes, offset)
    }
}

fn read<T: Plain>(bytes: &[u8], offset: usize) -> Result<T, DropReason> {
    let end = offset.checked_add(size_of::<T>()).ok_or(DropReason::Malformed)?;
    let there = bytes.get(offset..end).ok_or(DropReason::Malformed)?;
    // SAFETY: as many bytes as the value has, which may be any (`Plain`); it need not be aligned.
    Ok(unsafe { there.as_ptr().cast::<T>().read_unaligned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_read_where_they_lie_and_nowhere_else() {
        let packet = InMemory { bytes: &[1, 2, 3, 4, 5, 6], in_place: 5, is_uncut: false, tag_beside: None };
        let at = |offset| packet.at::<[u8; 2]>(offset).map(|there| *there);
        assert_eq!(
            [0, 3, 4, 5].map(at),
            [Ok([1, 2]), Ok([4, 5]), Err(DropReason::Malformed), Err(DropReason::Malformed)]
        );
        let load = |offset| packet.load::<[u8; 2]>(offset);
        assert_eq!(
            [4, 5, usize::MAX].map(load),
            [Ok([5, 6]), Err(DropReason::Malformed), Err(DropReason::Malformed)]
        );
        assert_eq!(packet.header::<u8>(true, 5, 0), Err(DropReason::Malformed));
        assert_eq!(packet.header::<u8>(false, 5, 0), Ok(1));
    }
}
