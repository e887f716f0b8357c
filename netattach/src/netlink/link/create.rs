//! Creation of links, those of a pod directly in its namespace.

use std::os::fd::{AsRawFd, BorrowedFd};

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{InfoData, InfoIpVlan, InfoKind, InfoVlan, VlanProtocol};
use rtnetlink::{LinkMessageBuilder, LinkUnspec};

use super::super::socket::{CREATE, EXCL, NetlinkRequest};
use super::super::{Error, Handle};
use super::mode::kernel_ipvlan_mode;
use super::new_link::{Chosen, NO_ACKNOWLEDGEMENT};
use super::{Ends, LinkState, NewLink, observed, show};
use crate::spec;

/// Temporary name of a new macvlan if the node has a link of the final name, see [`Handle::create_macvlan`].
const TEMPORARY_PREFIX: &str = "nat";

impl Handle {
    /// Creates a veth pair, as [`Handle::create_links`] does. Returns the near end and the far end.
    pub fn create_veth(
        &mut self,
        veth: &spec::Veth,
        bridge: Option<u32>,
        pod: BorrowedFd<'_>,
        pod_handle: &mut Handle,
    ) -> Result<(LinkState, LinkState), Error> {
        let made = self.create_links(&[NewLink::Veth { veth, bridge }], pod, pod_handle)?;
        match made.into_iter().next().transpose()? {
            Some((Some(near), far)) => Ok((near, far)),
            _ => Err(NO_ACKNOWLEDGEMENT),
        }
    }

    /// Creates a macvlan on `parent`, as [`Handle::create_links`] does.
    pub fn create_macvlan(
        &mut self,
        macvlan: &spec::Macvlan,
        parent: &LinkState,
        pod: BorrowedFd<'_>,
        pod_handle: &mut Handle,
    ) -> Result<LinkState, Error> {
        let made = self.create_links(&[NewLink::Macvlan { macvlan, parent }], pod, pod_handle)?;
        let made = made.into_iter().next().transpose()?;
        made.map(|(_, far)| far).ok_or(NO_ACKNOWLEDGEMENT)
    }

    /// Creates links of a pod in one datagram, directly in `pod` and down. A refused link does not prevent
    /// the others. Returns for each link its near end, if it has one, and its far end.
    ///
    /// A veth's near end is created up (and, for a port, in its bridge); the kernel cannot create the far end
    /// up. Both ends get one queue in each direction: otherwise veth creates one per CPU, and creation takes
    /// almost a third longer.
    ///
    /// # Errors
    /// The socket failed: some of the links may exist.
    pub fn create_links(
        &mut self,
        links: &[NewLink<'_>],
        pod: BorrowedFd<'_>,
        pod_handle: &mut Handle,
    ) -> Result<Vec<Result<Ends, Error>>, Error> {
        let chosen: Vec<_> = links.iter().map(NewLink::choose).collect();
        let tries = links.iter().zip(&chosen).map(|(link, chosen)| link.requests(pod, chosen));
        let tries: Vec<Vec<NetlinkRequest>> = tries.collect();
        let counts: Vec<usize> = tries.iter().map(Vec::len).collect();
        let mut replies = self.socket.batch(tries.into_iter().flatten().collect())?.into_iter();
        let mut made = Vec::with_capacity(links.len());
        for ((link, chosen), count) in links.iter().zip(&chosen).zip(counts) {
            // All replies of a link are consumed, so that the next reply belongs to the next link. Failures
            // of the further requests are ignored: these requests only save work.
            let own: Vec<_> = replies.by_ref().take(count).collect();
            let created = own.into_iter().next().ok_or(NO_ACKNOWLEDGEMENT)?;
            let ends = match created.map_err(Error::from) {
                Ok(_) => link.ends(chosen, pod_handle),
                Err(error) if error.is_taken() => self.create_again(link, chosen, pod, pod_handle),
                Err(error) => Err(error),
            };
            made.push(ends.and_then(|ends| {
                if let (NewLink::Veth { veth: spec::Veth { port: Some(port), .. }, .. }, Some(near)) =
                    (link, &ends.0)
                {
                    // No frame passes before this: the far end is down.
                    self.ensure_port(near.index, port)?;
                }
                Ok(ends)
            }));
        }
        Ok(made)
    }

    /// Creates a link whose chosen index or name is already taken.
    ///
    /// The kernel checks a macvlan's new name in the sender's namespace, so it refuses a name that the node also uses as
    /// existing; the link is then created under a temporary name and renamed by `pod_handle`.
    fn create_again(
        &mut self,
        link: &NewLink<'_>,
        chosen: &[Chosen],
        pod: BorrowedFd<'_>,
        pod_handle: &mut Handle,
    ) -> Result<Ends, Error> {
        let chosen: Vec<Chosen> = chosen.iter().map(Chosen::without_index).collect();
        let mut create = |link: &NewLink<'_>| {
            let replies = self.socket.batch(link.requests(pod, &chosen))?;
            let created = replies.into_iter().next().ok_or(NO_ACKNOWLEDGEMENT)?;
            Ok::<_, Error>(created.map(drop)?)
        };
        let created = create(link);
        match *link {
            NewLink::Veth { veth, .. } => {
                created?;
                Ok((Some(self.link(&veth.host_name)?), pod_handle.link(&veth.pod_name)?))
            }
            NewLink::Macvlan { macvlan, parent } => {
                let name = macvlan.pod_name.as_str();
                match created {
                    Err(error) if error.already_exists() && pod_handle.find_link(name)?.is_none() => {
                        let pod_name = format!("{TEMPORARY_PREFIX}{:08x}", fnv32(name.as_bytes()));
                        let temporary = spec::Macvlan { pod_name, ..macvlan.clone() };
                        create(&NewLink::Macvlan { macvlan: &temporary, parent })?;
                        let index = pod_handle.link(&temporary.pod_name)?.index;
                        let rename = LinkUnspec::new_with_index(index).name(name).build();
                        pod_handle.socket.request(RouteNetlinkMessage::SetLink(rename), 0)?;
                    }
                    other => other?,
                }
                Ok((None, pod_handle.link(name)?))
            }
        }
    }

    /// Creates an ipvlan on `parent` directly in `pod`, down. Uses a temporary name, since the node may have
    /// a link of the final name, see [`Handle::create_macvlan`]. The link has its parent's address.
    pub fn create_ipvlan(
        &mut self,
        ipvlan: &spec::Ipvlan,
        parent: &LinkState,
        pod: BorrowedFd<'_>,
        pod_handle: &mut Handle,
    ) -> Result<LinkState, Error> {
        let link = new_ipvlan(ipvlan, parent).setns_by_fd(pod.as_raw_fd());
        self.create_and_rename(link, &ipvlan.pod_name, pod_handle)
    }

    /// Creates an ipvlan on `parent` in this namespace, down.
    pub fn create_ipvlan_here(
        &mut self,
        ipvlan: &spec::Ipvlan,
        parent: &LinkState,
    ) -> Result<LinkState, Error> {
        let link = new_ipvlan(ipvlan, parent).name(ipvlan.pod_name.clone());
        self.create_and_show(RouteNetlinkMessage::NewLink(link.build()), &ipvlan.pod_name)
    }

    /// Creates a VLAN of `parent` directly in `pod`, down. The link has its parent's address unless another
    /// one is requested.
    pub fn create_vlan(
        &mut self,
        vlan: &spec::Vlan,
        parent: &LinkState,
        pod: BorrowedFd<'_>,
        pod_handle: &mut Handle,
    ) -> Result<LinkState, Error> {
        let protocol = if vlan.tag.service { VlanProtocol::Ieee8021Ad } else { VlanProtocol::Ieee8021Q };
        let data = InfoData::Vlan(vec![InfoVlan::Id(vlan.tag.id), InfoVlan::Protocol(protocol)]);
        let mut link = LinkMessageBuilder::<LinkUnspec>::new_with_info_kind(InfoKind::Vlan)
            .link(parent.index)
            .setns_by_fd(pod.as_raw_fd())
            .link_group(vlan.group)
            .mtu(vlan.mtu.unwrap_or(parent.mtu))
            .set_info_data(data);
        if let Some(mac) = vlan.mac {
            link = link.address(mac.0.to_vec());
        }
        self.create_and_rename(link, &vlan.pod_name, pod_handle)
    }

    /// Creates a dummy in this namespace, down.
    pub fn create_dummy(&mut self, dummy: &spec::Dummy) -> Result<LinkState, Error> {
        let mut link = LinkMessageBuilder::<LinkUnspec>::new_with_info_kind(InfoKind::Dummy)
            .name(dummy.pod_name.clone())
            .link_group(dummy.group);
        if let Some(mtu) = dummy.mtu {
            link = link.mtu(mtu);
        }
        if let Some(mac) = dummy.mac {
            link = link.address(mac.0.to_vec());
        }
        self.create_and_show(RouteNetlinkMessage::NewLink(link.build()), &dummy.pod_name)
    }

    /// Creates a link under a temporary name and has `pod_handle` rename it.
    fn create_and_rename(
        &mut self,
        link: LinkMessageBuilder<LinkUnspec>,
        name: &str,
        pod_handle: &mut Handle,
    ) -> Result<LinkState, Error> {
        let temporary = format!("{TEMPORARY_PREFIX}{:08x}", fnv32(name.as_bytes()));
        let link = link.name(temporary.clone()).build();
        self.socket.request(RouteNetlinkMessage::NewLink(link), CREATE | EXCL)?;
        let index = pod_handle.link(&temporary)?.index;
        let rename = LinkUnspec::new_with_index(index).name(name).build();
        pod_handle.socket.request(RouteNetlinkMessage::SetLink(rename), 0)?;
        pod_handle.link(name)
    }

    /// Creates a link and returns its state.
    ///
    /// # Errors
    /// A link of that name exists ([`Error::already_exists`]), or the kernel refuses.
    pub(in crate::netlink) fn create_and_show(
        &mut self,
        create: RouteNetlinkMessage,
        name: &str,
    ) -> Result<LinkState, Error> {
        self.create_change_and_show(create, None, name)
    }

    /// As [`Handle::create_and_show`], with a change of the link in the same datagram, which the kernel carries out
    /// as a whole: this process cannot end between the two. The change is also carried out if the link is not
    /// created.
    pub(in crate::netlink) fn create_change_and_show(
        &mut self,
        create: RouteNetlinkMessage,
        change: Option<RouteNetlinkMessage>,
        name: &str,
    ) -> Result<LinkState, Error> {
        let mut requests = vec![NetlinkRequest::new(create, CREATE | EXCL)];
        requests.extend(change.map(|change| NetlinkRequest::new(change, 0)));
        requests.push(NetlinkRequest::new(show(LinkUnspec::new_with_name(name)), 0));
        let mut replies = self.socket.batch(requests)?;
        let shown = replies.pop();
        for reply in replies {
            reply?;
        }
        let shown = shown.transpose()?.unwrap_or_default();
        shown.into_iter().find_map(observed).ok_or_else(|| Error::Vanished(name.to_owned()))
    }
}

fn new_ipvlan(ipvlan: &spec::Ipvlan, parent: &LinkState) -> LinkMessageBuilder<LinkUnspec> {
    let data = InfoData::IpVlan(vec![InfoIpVlan::Mode(kernel_ipvlan_mode(ipvlan.mode))]);
    LinkMessageBuilder::<LinkUnspec>::new_with_info_kind(InfoKind::IpVlan)
        .link(parent.index)
        .link_group(ipvlan.group)
        .mtu(ipvlan.mtu.unwrap_or(parent.mtu))
        .set_info_data(data)
}

/// FNV-1a, for a short name that differs between the interfaces of one pod.
fn fnv32(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::netns::Netns;

    fn veth(number: u8) -> spec::Veth {
        spec::Veth {
            host_name: format!("near{number}"),
            pod_name: format!("far{number}"),
            mtu: None,
            mac: None,
            group: 7,
            port: Some(spec::BridgePort {
                bridge: "br0".to_owned(),
                hairpin: number == 1,
                isolated: false,
                vlans: None,
            }),
        }
    }

    #[test]
    fn of_links_created_together_each_has_its_own_outcome() {
        let (node, pod) = (Netns::private().unwrap(), Netns::private().unwrap());
        let (mut host, mut inside) = (Handle::open_in(&node).unwrap(), Handle::open_in(&pod).unwrap());
        let bridge =
            spec::Bridge { name: "br0".into(), mtu: None, promiscuous: false, vlan_filtering: false };
        let index = host.ensure_bridge(&bridge).unwrap().link.index;
        let taken = spec::Bridge { name: "near2".into(), ..bridge };
        host.ensure_bridge(&taken).unwrap();
        let veths = [1, 2, 3].map(veth);
        let links = veths.each_ref().map(|veth| NewLink::Veth { veth, bridge: Some(index) });
        let made = host.create_links(&links, pod.as_fd(), &mut inside).unwrap();
        let [Ok(first), Err(second), Ok(third)] = <[_; 3]>::try_from(made).unwrap() else {
            panic!("the second alone is refused")
        };
        assert!(second.already_exists(), "{second}");
        for ((near, far), number) in [(first, 1), (third, 3)] {
            assert_eq!(host.link(&format!("near{number}")).unwrap(), near.unwrap());
            assert_eq!(inside.link(&format!("far{number}")).unwrap(), far);
        }
        assert_eq!(inside.find_link("far2").unwrap(), None);
    }
}
