//! Which links have an XDP program. The kernel does not tell when one is attached by a link or goes.

use std::collections::BTreeSet;

use rtnetlink::{LinkMessageBuilder, LinkUnspec};

use super::link::show;
use super::nft::attribute_in;
use super::{Error, Handle};

/// `IFLA_XDP` and `IFLA_XDP_ATTACHED` of `linux/if_link.h`.
const XDP: u16 = 43;
const ATTACHED: u16 = 2;
/// Length of `ifinfomsg`, and offset of the index in it.
const HEADER: usize = 16;
const INDEX_AT: usize = 4;

impl Handle {
    /// The links of the namespace that have an XDP program, by index.
    pub fn links_with_xdp(&mut self) -> Result<BTreeSet<u32>, Error> {
        let all = show(LinkMessageBuilder::<LinkUnspec>::new());
        Ok(self.socket.scan(all, with_xdp)?.into_iter().collect())
    }
}

/// The index of a link that has a program.
fn with_xdp(message: &[u8]) -> Option<u32> {
    let index = u32::from_ne_bytes(message.get(INDEX_AT..INDEX_AT + 4)?.try_into().ok()?);
    let xdp = attribute_in(message.get(HEADER..)?, XDP)?;
    // A mode (`XDP_ATTACHED_*`), 0 for none.
    attribute_in(xdp, ATTACHED)?.first().is_some_and(|mode| *mode != 0).then_some(index)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encoded(kind: u16, value: &[u8]) -> Vec<u8> {
        let mut bytes = (4 + value.len() as u16).to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    #[test]
    fn a_link_has_a_program_if_its_message_names_a_mode() {
        let message = |mode: u8| {
            let mut message = vec![0; HEADER];
            message[INDEX_AT..INDEX_AT + 4].copy_from_slice(&9_u32.to_ne_bytes());
            message.extend(encoded(3, b"net1\0"));
            message.extend(encoded(XDP | 0x8000, &encoded(ATTACHED, &[mode])));
            message
        };
        assert_eq!([0, 1, 2].map(|mode| with_xdp(&message(mode))), [None, Some(9), Some(9)]);
        assert_eq!(with_xdp(&message(1)[..HEADER + 12]), None);
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_read(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..128)) {
            let _ = with_xdp(&bytes);
        }
    }
}
