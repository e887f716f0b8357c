//! Netkit pairs.

use std::os::fd::{AsRawFd, BorrowedFd};

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{InfoData, InfoKind, InfoNetkit, NetkitMode, NetkitPolicy};
use rtnetlink::{LinkMessageBuilder, LinkUnspec};

use super::{Error, Handle, LinkState};
use crate::spec::{self, NetkitWays};

impl Handle {
    /// Creates a netkit pair, the pod's end directly in `pod` under its final name and down. The node's end is up. Returns
    /// the node's end and the pod's.
    ///
    /// # Errors
    /// [`Error::already_exists`]: one of the names is taken. The kernel refuses.
    pub fn create_netkit(
        &mut self,
        netkit: &spec::Netkit,
        pod: BorrowedFd<'_>,
        pod_handle: &mut Handle,
    ) -> Result<(LinkState, LinkState), Error> {
        let mut far =
            LinkUnspec::new_with_name(&netkit.pod_name).setns_by_fd(pod.as_raw_fd()).link_group(netkit.group);
        let mut near = LinkMessageBuilder::<LinkUnspec>::new_with_info_kind(InfoKind::Netkit)
            .name(netkit.host_name.clone())
            .up()
            .link_group(netkit.group);
        if let Some(mtu) = netkit.mtu {
            (far, near) = (far.mtu(mtu), near.mtu(mtu));
        }
        if let Some(mac) = netkit.mac {
            far = far.address(mac.0.to_vec());
        }
        let NetkitWays { mode, policy, peer_policy } = netkit.ways;
        let data = vec![
            InfoNetkit::Mode(match mode {
                spec::NetkitMode::L2 => NetkitMode::L2,
                spec::NetkitMode::L3 => NetkitMode::L3,
            }),
            InfoNetkit::Policy(kernel_policy(policy)),
            InfoNetkit::PeerPolicy(kernel_policy(peer_policy)),
            InfoNetkit::Peer(far.build()),
        ];
        let create = near.set_info_data(InfoData::Netkit(data)).build();
        let near = self.create_and_show(RouteNetlinkMessage::NewLink(create), &netkit.host_name)?;
        Ok((near, pod_handle.link(&netkit.pod_name)?))
    }
}

impl Handle {
    /// Sets the policies of both ends of a netkit pair; `index` is that of the primary end, the only one that
    /// accepts the request.
    ///
    /// # Errors
    /// The kernel refuses: the link is gone, or is no primary end.
    pub fn set_netkit_policies(&mut self, index: u32, ways: NetkitWays) -> Result<(), Error> {
        let policy = InfoNetkit::Policy(kernel_policy(ways.policy));
        let peer_policy = InfoNetkit::PeerPolicy(kernel_policy(ways.peer_policy));
        let set = LinkMessageBuilder::<LinkUnspec>::new_with_info_kind(InfoKind::Netkit)
            .index(index)
            .set_info_data(InfoData::Netkit(vec![policy, peer_policy]))
            .build();
        // Without creation flags, `RTM_NEWLINK` changes an existing link; `RTM_SETLINK` ignores attributes of
        // the kind.
        self.socket.request(RouteNetlinkMessage::NewLink(set), 0).map(drop)
    }
}

fn kernel_policy(policy: spec::NetkitPolicy) -> NetkitPolicy {
    match policy {
        spec::NetkitPolicy::Pass => NetkitPolicy::Pass,
        spec::NetkitPolicy::Drop => NetkitPolicy::Drop,
    }
}

/// The configuration of a pair, as reported by the primary end; `None`: the kernel reports a mode or a policy
/// that is unknown here.
pub(super) fn observed_ways(data: &[InfoNetkit]) -> Option<NetkitWays> {
    let (mut mode, mut own, mut other, mut is_primary) = (None, None, None, false);
    for datum in data {
        match datum {
            InfoNetkit::Mode(NetkitMode::L2) => mode = Some(spec::NetkitMode::L2),
            InfoNetkit::Mode(NetkitMode::L3) => mode = Some(spec::NetkitMode::L3),
            InfoNetkit::Policy(policy) => own = observed_policy(*policy),
            InfoNetkit::PeerPolicy(policy) => other = observed_policy(*policy),
            InfoNetkit::Primary(primary) => is_primary = *primary,
            _ => {}
        }
    }
    let (policy, peer_policy) = if is_primary { (own?, other?) } else { (other?, own?) };
    Some(NetkitWays { mode: mode?, policy, peer_policy })
}

fn observed_policy(policy: NetkitPolicy) -> Option<spec::NetkitPolicy> {
    match policy {
        NetkitPolicy::Pass => Some(spec::NetkitPolicy::Pass),
        NetkitPolicy::Drop => Some(spec::NetkitPolicy::Drop),
        _ => None,
    }
}
