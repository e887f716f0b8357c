//! Settings of virtual functions (VFs), made through their physical function (PF).

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{
    LinkAttribute, LinkExtentMask, LinkMessage, LinkVfInfo, VfInfo, VfInfoLinkState, VfInfoMac, VfInfoRate,
    VfInfoSpoofCheck, VfInfoTrust, VfLinkState as KernelLinkState, VfVlan as KernelVlan, VfVlanInfo,
    VlanProtocol,
};
use rtnetlink::LinkUnspec;

use super::device::shown;
use super::link::show;
use super::socket::NetlinkRequest;
use super::{DeviceState, Error, Handle};
use crate::mac::Mac;
use crate::spec::{VfLinkState, VfRates, VfSettings, VfVlan};

impl Handle {
    /// Returns the settings of a VF of the PF with that index; `None`: the PF has no such VF.
    ///
    /// # Errors
    /// There is no such link.
    pub fn vf_settings(&mut self, physical: u32, number: u32) -> Result<Option<VfSettings>, Error> {
        let shown = self.socket.request(show_functions(physical), 0)?;
        Ok(shown_of(number, shown))
    }

    /// Returns the settings of all VFs of the PF with that index, each with the VF's number.
    ///
    /// # Errors
    /// There is no such link.
    pub fn all_vf_settings(&mut self, physical: u32) -> Result<Vec<(u32, VfSettings)>, Error> {
        Ok(all_of(self.socket.request(show_functions(physical), 0)?))
    }

    /// Sets those settings of a VF that are given.
    ///
    /// # Errors
    /// The card's driver refuses it, or does not know it.
    pub fn set_vf(&mut self, physical: u32, number: u32, wanted: &VfSettings) -> Result<(), Error> {
        self.socket.request(set_function(physical, number, wanted), 0).map(drop)
    }

    /// Sets several settings of a VF in their order, in one datagram. A refused setting does not prevent the
    /// others. Returns the result of each.
    ///
    /// # Errors
    /// The socket failed: some settings may have been made.
    pub fn set_vf_each(
        &mut self,
        physical: u32,
        number: u32,
        each: &[VfSettings],
    ) -> Result<Vec<Result<(), Error>>, Error> {
        let request = |one: &VfSettings| NetlinkRequest::new(set_function(physical, number, one), 0);
        let replies = self.socket.batch(each.iter().map(request).collect())?;
        Ok(replies.into_iter().map(|reply| reply.map(drop).map_err(Error::from)).collect())
    }

    /// Sets those settings of a VF that are given. The same datagram requests the resulting state: the device
    /// with index `own`, which is the VF's interface (`None` if it is gone), and the VF's settings as in
    /// [`Handle::vf_settings`].
    ///
    /// # Errors
    /// The card's driver refuses it, or does not know it; the kernel does not answer.
    pub fn set_vf_and_show(
        &mut self,
        (physical, number): (u32, u32),
        wanted: &VfSettings,
        own: u32,
    ) -> Result<(Option<DeviceState>, Option<VfSettings>), Error> {
        let requests = [
            set_function(physical, number, wanted),
            show(LinkUnspec::new_with_index(own)),
            show_functions(physical),
        ];
        let requests = requests.map(|message| NetlinkRequest::new(message, 0));
        let mut replies = self.socket.batch(requests.into())?.into_iter();
        replies.next().transpose()?;
        let own = replies.next().map_or(Ok(None), shown)?;
        let settings = shown_of(number, replies.next().transpose()?.unwrap_or_default());
        Ok((own, settings))
    }
}

/// Requests a PF with the settings of all its VFs.
fn show_functions(physical: u32) -> RouteNetlinkMessage {
    let mask = LinkAttribute::ExtMask(vec![LinkExtentMask::Vf, LinkExtentMask::SkipStats]);
    RouteNetlinkMessage::GetLink(LinkUnspec::new_with_index(physical).append_extra_attribute(mask).build())
}

fn set_function(physical: u32, number: u32, wanted: &VfSettings) -> RouteNetlinkMessage {
    let all = LinkAttribute::VfInfoList(vec![LinkVfInfo(infos(number, wanted))]);
    RouteNetlinkMessage::SetLink(LinkUnspec::new_with_index(physical).append_extra_attribute(all).build())
}

/// Finds the settings of a VF in the kernel's message about its PF.
fn shown_of(number: u32, shown: Vec<RouteNetlinkMessage>) -> Option<VfSettings> {
    all_of(shown).into_iter().find(|(of, _)| *of == number).map(|(_, settings)| settings)
}

/// The settings of all VFs in that message, each with the VF's number.
fn all_of(shown: Vec<RouteNetlinkMessage>) -> Vec<(u32, VfSettings)> {
    let lists = shown.into_iter().filter_map(|message| match message {
        RouteNetlinkMessage::NewLink(LinkMessage { attributes, .. }) => Some(attributes),
        _ => None,
    });
    let all = lists.flatten().filter_map(|attribute| match attribute {
        LinkAttribute::VfInfoList(all) => Some(all),
        _ => None,
    });
    all.flatten().filter_map(|vf| Some((number_of(&vf)?, settings(&vf)))).collect()
}

fn infos(number: u32, wanted: &VfSettings) -> Vec<VfInfo> {
    let VfSettings { mac, vlan, rates, spoof_check, trust, link_state } = wanted;
    let vlan = vlan.map(|VfVlan { id, priority, service }| {
        let protocol = if service { VlanProtocol::Ieee8021Ad } else { VlanProtocol::Ieee8021Q };
        let info = VfVlanInfo::new(number, id.into(), priority.into(), protocol);
        VfInfo::VlanList(vec![KernelVlan::Info(info)])
    });
    let state = link_state.map(|state| {
        let state = match state {
            VfLinkState::Auto => KernelLinkState::Auto,
            VfLinkState::Enable => KernelLinkState::Enable,
            VfLinkState::Disable => KernelLinkState::Disable,
        };
        VfInfo::LinkState(VfInfoLinkState::new(number, state))
    });
    [
        vlan,
        mac.map(|mac| VfInfo::Mac(VfInfoMac::new(number, &mac.0))),
        rates.map(|VfRates { min, max }| VfInfo::Rate(VfInfoRate::new(number, min, max))),
        spoof_check.map(|on| VfInfo::SpoofCheck(VfInfoSpoofCheck::new(number, on))),
        trust.map(|on| VfInfo::Trust(VfInfoTrust::new(number, on))),
        state,
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn number_of(vf: &LinkVfInfo) -> Option<u32> {
    vf.0.iter().find_map(|info| match info {
        VfInfo::Mac(mac) => Some(mac.vf_id),
        _ => None,
    })
}

fn settings(vf: &LinkVfInfo) -> VfSettings {
    let mut found = VfSettings::default();
    for info in &vf.0 {
        match info {
            VfInfo::Mac(info) => {
                found.mac = info.mac.first_chunk::<6>().map(|octets| Mac(*octets));
            }
            VfInfo::VlanList(all) => {
                found.vlan = all.iter().find_map(|one| match one {
                    KernelVlan::Info(info) => Some(VfVlan {
                        id: u16::try_from(info.vlan_id).ok()?,
                        priority: u8::try_from(info.qos).ok()?,
                        service: info.vlan_id != 0 && info.protocol == VlanProtocol::Ieee8021Ad,
                    }),
                    _ => None,
                });
            }
            VfInfo::Rate(info) => {
                found.rates = Some(VfRates { min: info.min_tx_rate, max: info.max_tx_rate });
            }
            VfInfo::SpoofCheck(info) => found.spoof_check = Some(info.enabled),
            VfInfo::Trust(info) => found.trust = Some(info.enabled),
            VfInfo::LinkState(info) => {
                found.link_state = match info.state {
                    KernelLinkState::Auto => Some(VfLinkState::Auto),
                    KernelLinkState::Enable => Some(VfLinkState::Enable),
                    KernelLinkState::Disable => Some(VfLinkState::Disable),
                    _ => None,
                };
            }
            _ => {}
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use netlink_packet_core::{NetlinkDeserializable, NetlinkHeader};

    use super::super::lean::tests::{attribute, message};
    use super::super::lean::{RTM_NEWLINK, lean};
    use super::*;

    /// The settings that a driver reports for a VF, as the numbers in the message.
    struct Told {
        mac: u8,
        /// Number, priority, ethertype.
        vlan: (u32, u32, u16),
        rates: (u32, u32),
        spoof_check: u32,
        link_state: u32,
        trust: u32,
    }

    /// Attributes in the order of the kernel (`rtnl_fill_vfinfo`).
    fn function(number: u32, told: &Told) -> Vec<u8> {
        let words = |words: &[u32]| {
            let all: Vec<u8> =
                std::iter::once(&number).chain(words).flat_map(|it| it.to_ne_bytes()).collect();
            all
        };
        let mut mac = words(&[]);
        mac.extend([2, 0, 0, 0, 0, told.mac]);
        mac.resize(36, 0);
        let (id, priority, ethertype) = told.vlan;
        let mut tag = words(&[id, priority]);
        tag.extend(ethertype.to_be_bytes());
        tag.extend([0; 2]);
        let attributes = [
            attribute(1, &mac),
            attribute(13, &[0xff; 32]),
            attribute(2, &words(&[id, priority])),
            attribute(6, &words(&[told.rates.0, told.rates.1])),
            attribute(3, &words(&[told.rates.1])),
            attribute(4, &words(&[told.spoof_check])),
            attribute(5, &words(&[told.link_state])),
            attribute(7, &words(&[u32::MAX])),
            attribute(9, &words(&[told.trust])),
            attribute(12, &attribute(1, &tag)),
        ];
        attribute(1, &attributes.concat())
    }

    fn shown(functions: &[Vec<u8>]) -> Vec<RouteNetlinkMessage> {
        let bytes = message(0, &[attribute(3, b"pf0\0"), attribute(22, &functions.concat())]);
        let mut header = NetlinkHeader::default();
        header.message_type = RTM_NEWLINK;
        vec![RouteNetlinkMessage::deserialize(&header, &lean(RTM_NEWLINK, &bytes)).unwrap()]
    }

    /// As the driver igb reports them, and as a driver that does not report two switches.
    #[test]
    fn what_a_driver_does_not_tell_is_not_off() {
        let all =
            Told { mac: 7, vlan: (100, 3, 0x8100), rates: (0, 200), spoof_check: 0, link_state: 0, trust: 1 };
        let silent = Told {
            mac: 8,
            vlan: (0, 0, 0x8100),
            rates: (0, 0),
            spoof_check: u32::MAX,
            link_state: 0,
            trust: u32::MAX,
        };
        let list = || shown(&[function(0, &silent), function(1, &all)]);
        let expected = VfSettings {
            mac: Some(Mac([2, 0, 0, 0, 0, 7])),
            vlan: Some(VfVlan { id: 100, priority: 3, service: false }),
            rates: Some(VfRates { min: 0, max: 200 }),
            spoof_check: Some(false),
            trust: Some(true),
            link_state: Some(VfLinkState::Auto),
        };
        assert_eq!(shown_of(1, list()), Some(expected));
        let expected = VfSettings {
            mac: Some(Mac([2, 0, 0, 0, 0, 8])),
            vlan: Some(VfVlan::default()),
            rates: Some(VfRates::default()),
            spoof_check: None,
            trust: None,
            link_state: Some(VfLinkState::Auto),
        };
        assert_eq!(shown_of(0, list()), Some(expected));
        assert_eq!(shown_of(2, list()), None);
        let addresses = all_of(list()).into_iter().map(|(number, it)| (number, it.mac.map(|mac| mac.0[5])));
        assert_eq!(addresses.collect::<Vec<_>>(), [(0, Some(8)), (1, Some(7))]);
    }

    #[test]
    fn what_is_set_is_what_is_read() {
        let all = VfSettings {
            mac: Some(Mac([2, 0, 0, 0, 0, 7])),
            vlan: Some(VfVlan { id: 100, priority: 3, service: true }),
            rates: Some(VfRates { min: 10, max: 100 }),
            spoof_check: Some(false),
            trust: Some(true),
            link_state: Some(VfLinkState::Enable),
        };
        let shown = LinkVfInfo(infos(5, &all));
        assert_eq!((number_of(&shown), settings(&shown)), (Some(5), all));
        assert_eq!(infos(5, &VfSettings::default()), []);
    }
}
