//! The values of a pod of another node that are not shared, in one block of memory.

use std::net::IpAddr;

use super::budget::ADDRESSES_OF_REMOTE_POD;

/// Claims of addresses, an identity and a name.
///
/// The first two bytes hold the position of the name; their first bit says whether there is an identity.
/// Then follow the claims, each as the number of its network (with [`V6`] for IPv6) and its address; the
/// identity's 16 bytes; the name.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Packed(Box<[u8]>);

/// Flag in the number of a claim's network: the address is IPv6.
const V6: u8 = 1 << 7;
/// Flag in the position of the name: an identity precedes the name.
const IDENTIFIED: u16 = 1 << 15;
/// Most claims; each may be on another network.
const MOST: usize = ADDRESSES_OF_REMOTE_POD;
// Numbers and positions can represent that many.
const _: () = assert!(MOST <= V6 as usize && 2 + 17 * MOST + 16 < IDENTIFIED as usize);

impl Packed {
    /// Packs the first [`MOST`] claims.
    pub(super) fn new(claims: &[(usize, IpAddr)], uuid: Option<[u8; 16]>, name: &str) -> Self {
        let claims = claims.get(..MOST).unwrap_or(claims);
        let size_of = |(_, address): &(usize, IpAddr)| if address.is_ipv4() { 5 } else { 17 };
        let size = 2 + claims.iter().map(size_of).sum::<usize>() + uuid.map_or(0, |_| 16) + name.len();
        // Allocated exactly, as shrinking an allocation may leave unused memory.
        let mut bytes = Vec::with_capacity(size);
        bytes.extend([0; 2]);
        for (network, address) in claims {
            let network = (network % MOST) as u8;
            match address {
                IpAddr::V4(address) => {
                    bytes.push(network);
                    bytes.extend(address.octets());
                }
                IpAddr::V6(address) => {
                    bytes.push(network | V6);
                    bytes.extend(address.octets());
                }
            }
        }
        bytes.extend(uuid.into_iter().flatten());
        let begin = bytes.len() as u16 | if uuid.is_some() { IDENTIFIED } else { 0 };
        bytes[..2].copy_from_slice(&begin.to_ne_bytes());
        bytes.extend(name.bytes());
        Self(bytes.into())
    }

    /// Its length in bytes.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns where the claims end and where the name begins.
    fn ends(&self) -> (usize, usize) {
        let begin = self.0.first_chunk().map_or(0, |begin| u16::from_ne_bytes(*begin));
        let name = usize::from(begin & !IDENTIFIED);
        (if begin & IDENTIFIED == 0 { name } else { name.saturating_sub(16) }, name)
    }

    /// The claims, as they were given.
    pub(super) fn claims(&self) -> impl Iterator<Item = (usize, IpAddr)> {
        let mut left = self.0.get(2..self.ends().0).unwrap_or_default();
        std::iter::from_fn(move || {
            let (network, rest) = left.split_first()?;
            let address;
            (address, left) = if network & V6 == 0 {
                let (octets, rest) = rest.split_first_chunk::<4>()?;
                (IpAddr::from(*octets), rest)
            } else {
                let (octets, rest) = rest.split_first_chunk::<16>()?;
                (IpAddr::from(*octets), rest)
            };
            Some((usize::from(network & !V6), address))
        })
    }

    /// The identity.
    pub(super) fn uuid(&self) -> Option<[u8; 16]> {
        let (claims, name) = self.ends();
        self.0.get(claims..name)?.try_into().ok()
    }

    /// The name.
    pub(super) fn name(&self) -> &str {
        // The bytes were valid UTF-8 when they were written.
        std::str::from_utf8(self.name_bytes()).unwrap_or_default()
    }

    /// Returns the name for comparisons: bytes sort like their text.
    pub(super) fn name_bytes(&self) -> &[u8] {
        self.0.get(self.ends().1..).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_packed_is_as_it_was() {
        let (v4, v6) = (IpAddr::from([10, 0, 0, 1]), IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, 1]));
        let most: Vec<(usize, IpAddr)> = (0..MOST).map(|network| (network, v6)).collect();
        let long = "ä".repeat(70_000);
        for claims in [vec![], vec![(0, v4)], vec![(0, v6), (0, v4), (1, v4), (63, v6)], most] {
            for uuid in [None, Some([0; 16]), Some([255; 16])] {
                for name in ["", "db-0", &long] {
                    let packed = Packed::new(&claims, uuid, name);
                    assert_eq!((packed.uuid(), packed.name()), (uuid, name));
                    assert_eq!(packed.name_bytes(), name.as_bytes());
                    assert_eq!(packed.claims().collect::<Vec<_>>(), claims);
                }
            }
        }
    }

    #[test]
    fn two_addresses_and_a_name_of_40_bytes_take_68() {
        let claims = [(0, IpAddr::from([10, 0, 0, 1])), (1, IpAddr::from([10, 1, 0, 1]))];
        assert_eq!(Packed::new(&claims, Some([1; 16]), &"x".repeat(40)).len(), 68);
    }
}
