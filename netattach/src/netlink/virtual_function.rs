//! What a physical function (PF) sets for its virtual ones (VFs).

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{
    LinkAttribute, LinkExtentMask, LinkMessage, LinkVfInfo, VfInfo, VfInfoLinkState, VfInfoMac, VfInfoRate,
    VfInfoSpoofCheck, VfInfoTrust, VfLinkState as KernelLinkState, VfVlan as KernelVlan, VfVlanInfo,
    VlanProtocol,
};
use rtnetlink::LinkUnspec;

use super::{Error, Handle};
use crate::mac::Mac;
use crate::spec::{VfLinkState, VfRates, VfSettings, VfVlan};

impl Handle {
    /// The settings of a VF by the PF with that index; `None`: it has no such VF.
    ///
    /// # Errors
    /// There is no such link.
    pub fn vf_settings(&mut self, physical: u32, number: u32) -> Result<Option<VfSettings>, Error> {
        let mask = LinkAttribute::ExtMask(vec![LinkExtentMask::Vf, LinkExtentMask::SkipStats]);
        let show = LinkUnspec::new_with_index(physical).append_extra_attribute(mask).build();
        let shown = self.socket.request(RouteNetlinkMessage::GetLink(show), 0)?;
        let lists = shown.into_iter().filter_map(|message| match message {
            RouteNetlinkMessage::NewLink(LinkMessage { attributes, .. }) => Some(attributes),
            _ => None,
        });
        let all = lists.flatten().filter_map(|attribute| match attribute {
            LinkAttribute::VfInfoList(all) => Some(all),
            _ => None,
        });
        Ok(all.flatten().find(|vf| number_of(vf) == Some(number)).map(|vf| settings(&vf)))
    }

    /// Sets what is given of a VF.
    ///
    /// # Errors
    /// The card's driver refuses it, or does not know it.
    pub fn set_vf(&mut self, physical: u32, number: u32, wanted: &VfSettings) -> Result<(), Error> {
        let all = LinkAttribute::VfInfoList(vec![LinkVfInfo(infos(number, wanted))]);
        self.change(LinkUnspec::new_with_index(physical).append_extra_attribute(all))
    }
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
    use super::*;

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
