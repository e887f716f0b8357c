//! Arithmetic of traffic: ranges of ports as blocks, and the wider traffic around a given one.

use super::lookup::Traffic;
use crate::npwg::selection::PortProtocol;

/// One port of a protocol.
pub(super) fn one_port(protocol: PortProtocol, port: u16) -> Traffic {
    Traffic::Ports { protocol: protocol.number(), port, bits: 16 }
}

/// The fewest blocks that make up a range of ports, at most 30. `first` is not 0, so no block is all ports.
pub(super) fn port_blocks(protocol: PortProtocol, first: u16, last: u16) -> Vec<Traffic> {
    let mut blocks = Vec::new();
    let (mut low, last) = (u32::from(first.max(1)), u32::from(last));
    while low <= last {
        let mut size = 1 << low.trailing_zeros();
        while low + size - 1 > last {
            size /= 2;
        }
        let bits = 16 - size.trailing_zeros();
        // Both are at most 16 bits wide: `low` by the loop's condition, `bits` because `size` is at least 1.
        #[expect(clippy::cast_possible_truncation, reason = "see above")]
        blocks.push(Traffic::Ports { protocol: protocol.number(), port: low as u16, bits: bits as u8 });
        low += size;
    }
    blocks
}

/// Every traffic that contains this one and is wider, from narrow to wide.
pub(super) fn wider(traffic: Traffic) -> impl Iterator<Item = Traffic> {
    let (protocol, port, bits) = match traffic {
        Traffic::Any => (None, 0, 0),
        Traffic::Protocol(_) => (None, 0, 0),
        Traffic::Ports { protocol, port, bits } => (Some(protocol), port, bits),
    };
    let blocks = (1..bits).rev().map(move |bits| Traffic::Ports {
        protocol: protocol.unwrap_or_default(),
        port: port & (u16::MAX << (16 - bits)),
        bits,
    });
    let any = (traffic != Traffic::Any).then_some(Traffic::Any);
    blocks.chain(protocol.map(Traffic::Protocol)).chain(any)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ranges_become_at_most_thirty_blocks() {
        let tcp = |first, last| port_blocks(PortProtocol::Tcp, first, last);
        assert_eq!(tcp(80, 80), [one_port(PortProtocol::Tcp, 80)]);
        assert_eq!(tcp(1, u16::MAX).len(), 16);
        assert_eq!(tcp(1, 65534).len(), 30);
        assert_eq!(
            tcp(6, 9),
            [
                Traffic::Ports { protocol: 6, port: 6, bits: 15 },
                Traffic::Ports { protocol: 6, port: 8, bits: 15 }
            ]
        );
    }

    proptest! {
        #[test]
        fn a_range_holds_its_ports_and_no_other(a in 1_u16.., b in 1_u16.., probe in any::<u16>()) {
            let (first, last) = (a.min(b), a.max(b));
            let blocks = port_blocks(PortProtocol::Tcp, first, last);
            prop_assert!(blocks.len() <= 30);
            for port in [probe, first, last, first - 1, last.saturating_add(1)] {
                let exact = one_port(PortProtocol::Tcp, port);
                let found = blocks.contains(&exact) || wider(exact).any(|wide| blocks.contains(&wide));
                prop_assert_eq!(found, (first..=last).contains(&port));
            }
        }
    }
}
