//! Options in packets from a pod.

use super::bytes::{Bytes, Plain};
use crate::{DropReason, Mac};

/// A neighbour discovery option that holds an Ethernet address (RFC 4861, 4.6.1).
#[repr(C)]
#[derive(Clone, Copy)]
struct LinkLayerOption {
    kind: u8,
    eights: u8,
    address: Mac,
}

const _: () = assert!(size_of::<LinkLayerOption>() == 8);

// SAFETY: integers and an address, as long as these together (asserted above).
unsafe impl Plain for LinkLayerOption {}

/// Looks for loose and strict source routing (RFC 791, 3.1) among the IPv4 options from one offset to another.
///
/// # Errors
/// Such an option is there, or the options are malformed.
#[inline(always)]
pub fn ipv4<B: Bytes>(bytes: &B, from: u32, to: u32) -> Result<(), DropReason> {
    const END: u8 = 0;
    const NO_OPERATION: u8 = 1;
    const LOOSE: u8 = 131;
    const STRICT: u8 = 137;
    /// More options than any header in use has; each costs verifier time.
    const LIMIT: usize = 12;
    let (mut offset, transport) = (from as usize, to as usize);
    for _ in 0..LIMIT {
        if offset >= transport {
            return Ok(());
        }
        let [kind]: [u8; 1] = bytes.load(offset)?;
        match kind {
            END => return Ok(()),
            NO_OPERATION => offset += 1,
            LOOSE | STRICT => return Err(DropReason::SourceRoute),
            _ => {
                let [length]: [u8; 1] = bytes.load(offset + 1)?;
                offset += usize::from(length);
                if length < 2 || offset > transport {
                    return Err(DropReason::Malformed);
                }
            }
        }
    }
    if offset >= transport { Ok(()) } else { Err(DropReason::Malformed) }
}

/// Looks through the options of neighbour discovery from one offset to another: source and target link-layer addresses
/// (RFC 4861, 4.6.1) must be `mac`.
///
/// # Errors
/// One is another address, or the options are malformed.
#[inline(always)]
pub fn neighbour<B: Bytes>(bytes: &B, mac: &Mac, from: usize, to: usize) -> Result<(), DropReason> {
    /// More options than any of these messages has.
    const LIMIT: usize = 8;
    const SOURCE: u8 = 1;
    const TARGET: u8 = 2;
    let (mut offset, end) = (from, to);
    for _ in 0..LIMIT {
        if offset == end {
            return Ok(());
        }
        if offset + size_of::<LinkLayerOption>() > end {
            return Err(DropReason::Malformed);
        }
        let option: LinkLayerOption = bytes.load(offset)?;
        if option.eights == 0 {
            return Err(DropReason::Malformed);
        }
        if (option.kind == SOURCE || option.kind == TARGET) && !option.address.same(mac) {
            return Err(DropReason::NdLinkLayer);
        }
        offset += usize::from(option.eights) * 8;
    }
    if offset == end { Ok(()) } else { Err(DropReason::Malformed) }
}
