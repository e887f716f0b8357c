//! What the dataplane is told of every attachment besides its policies: switches of the node, limits.

use crate::bpf::{Attachment, Checks, Limits, Rate};

/// What applies to every attachment of this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Passage {
    /// Most new flows of one attachment per second; 0: no limit.
    pub new_flows_per_second: u32,
    /// Connections that are older than the flow table are dropped.
    pub strict_connections: bool,
    /// Flows stay approved when their policy is replaced.
    pub keep_established: bool,
    /// ICMP passes whatever the policy says.
    pub accept_icmp: bool,
    /// ICMPv6 passes whatever the policy says.
    pub accept_icmpv6: bool,
}

impl Passage {
    /// The attachment with what applies to all of them.
    pub(super) fn applied_to(self, attachment: &Attachment) -> Attachment {
        let flows = u64::from(self.new_flows_per_second);
        Attachment {
            flags: Checks {
                strict_connections: self.strict_connections,
                keep_established: self.keep_established,
                accept_icmp: self.accept_icmp,
                accept_icmpv6: self.accept_icmpv6,
                ..attachment.flags
            },
            limits: Limits { flows: Rate::new(flows, flows), ..attachment.limits },
            ..attachment.clone()
        }
    }
}

/// A limit in bits per second with its burst in bits, as one of bytes.
///
/// The burst is at least three tenths of a second's worth: what is too much is dropped, and a TCP sender that has to wait
/// for its retransmission timer is silent for at least two tenths (Linux, `TCP_RTO_MIN`). The credit covers that silence.
pub(super) fn rate(bits: Option<(u64, u64)>) -> Rate {
    bits.map_or(Rate::NONE, |(rate, burst)| Rate::new(rate / 8, burst.max(rate / 10 * 3) / 8))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_is_long_enough_for_tcp() {
        assert_eq!(rate(None), Rate::NONE);
        assert_eq!(rate(Some((8_000_000, 80_000))), Rate::new(1_000_000, 300_000));
        assert_eq!(rate(Some((8_000_000, 8_000_000))), Rate::new(1_000_000, 1_000_000));
    }
}
