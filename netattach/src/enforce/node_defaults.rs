//! Settings of the node that apply to every attachment besides its policies.

use super::bandwidth::{BandwidthLimit, DirectionLimit};
use crate::bpf::{Attachment, Checks, Limits, Rate};
use crate::fast_path;
use crate::policy::explain::NodeRules;

/// Settings that apply to every attachment of this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NodeDefaults {
    /// Limit on new flows of one attachment per second; 0: no limit.
    pub new_flows_per_second: u32,
    /// Packets of connections that are older than the flow table are dropped.
    pub strict_connections: bool,
    /// Flows stay approved when their policy is replaced.
    pub keep_established: bool,
    /// ICMP passes under every policy.
    pub accept_icmp: bool,
    /// ICMPv6 passes under every policy.
    pub accept_icmpv6: bool,
    /// The kernel can pace devices, so that excess packets are queued before they are dropped.
    pub paced: bool,
    /// When the fast path is used.
    pub fast_path: fast_path::Mode,
    /// Whether uplinks drop early.
    pub xdp: fast_path::Xdp,
    /// On parents of attachments, frames of macvlans without an attachment pass.
    pub strangers: bool,
}

impl NodeDefaults {
    /// The settings that decide whether a packet passes.
    pub(super) fn rules(self) -> NodeRules {
        let Self { strict_connections, accept_icmp, accept_icmpv6, .. } = self;
        NodeRules { strict_connections, accept_icmp, accept_icmpv6 }
    }

    /// Returns the attachment with these settings and its own bandwidth.
    pub(super) fn applied_to(
        self,
        attachment: &Attachment,
        bandwidth: Option<&BandwidthLimit>,
    ) -> Attachment {
        let flows = u64::from(self.new_flows_per_second);
        let charged =
            |limit: Option<DirectionLimit>, charge: fn(DirectionLimit, bool) -> Rate, paced: bool| {
                limit.map_or(Rate::NONE, |limit| charge(limit, self.paced && paced))
            };
        let paced_to_pod = bandwidth.is_some_and(|limited| limited.is_paced_to_pod());
        Attachment {
            flags: Checks {
                strict_connections: self.strict_connections,
                keep_established: self.keep_established,
                accept_icmp: self.accept_icmp,
                accept_icmpv6: self.accept_icmpv6,
                ..attachment.flags
            },
            limits: Limits {
                flows: Rate::new(flows, flows),
                from_pod: charged(bandwidth.and_then(BandwidthLimit::sent), DirectionLimit::sent, true),
                to_pod: charged(
                    bandwidth.and_then(BandwidthLimit::received),
                    DirectionLimit::received,
                    paced_to_pod,
                ),
                ..attachment.limits
            },
            ..attachment.clone()
        }
    }
}
