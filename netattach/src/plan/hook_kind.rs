//! Decides where programs see the traffic of an interface. Pure.

use std::net::IpAddr;

use ipnet::IpNet;
use serde_json::Value;

use super::AttachmentPlan;
use crate::budget;
use crate::spec::{IpvlanMode, LinkMode};
use crate::step::{Brought, HookKind, Interface, NotObservable, Output};

/// The findings about an interface that another plugin created.
#[derive(Debug, Clone, PartialEq)]
pub struct FoundDevice<'a> {
    /// The interface.
    pub pod: Option<Interface>,
    /// The peer of its link, if that is on the node.
    pub host: Option<Interface>,
    /// Its device information.
    pub device: Option<&'a Value>,
    /// The addresses that the kernel has on it, if no result attributes an address to it.
    pub addresses: Vec<IpNet>,
    /// Its mode, if its kind has modes.
    pub mode: Option<LinkMode>,
}

impl FoundDevice<'_> {
    /// Converts the findings to a step's output.
    pub fn output(self) -> Output {
        let vantage = match self.unseen() {
            Some(unseen) => HookKind::Nowhere(unseen),
            None if self.host.is_some() => HookKind::Node,
            None => HookKind::Pod,
        };
        // At most as many as a result may have: the pod may not send from further ones.
        let own = self.addresses.into_iter().filter(is_its_own).take(budget::RESULT_IPS.most);
        Output::Device { vantage, host: self.host, pod: self.pod, addresses: own.collect() }
    }

    fn unseen(&self) -> Option<NotObservable> {
        // The NPWG Device Information Specification, sections 3.1.3 to 3.1.6.
        let word = |path: &str| self.device?.pointer(path)?.as_str();
        match word("/type") {
            Some(kind @ ("vhost-user" | "memif")) => return Some(NotObservable::Userspace(kind.to_owned())),
            Some("vdpa") if word("/vdpa/driver") == Some("vhost") => {
                return Some(NotObservable::Userspace("vdpa".to_owned()));
            }
            _ => {}
        }
        let Some(pod) = &self.pod else { return Some(NotObservable::NoInterface) };
        if let Some(rdma) = word("/pci/rdma-device") {
            return Some(NotObservable::Rdma(rdma.to_owned()));
        }
        // Its packets reach the pod after the hooks (`drivers/net/ipvlan/ipvlan_l3s.c`).
        if self.mode == Some(LinkMode::Ipvlan(IpvlanMode::L3s)) {
            return Some(NotObservable::NotJudged);
        }
        // Loopback and tunnels have no Ethernet address or only zeros.
        let is_ethernet = pod.mac.is_some_and(|mac| mac.0 != [0; 6]);
        (!is_ethernet).then_some(NotObservable::NotEthernet)
    }
}

/// Whether an address of an interface was assigned explicitly. The link-local address derived from its Ethernet
/// address may always be used, and another one is the pod's choice.
fn is_its_own(net: &IpNet) -> bool {
    let address = net.addr();
    let is_link_local = matches!(address, IpAddr::V6(address) if address.is_unicast_link_local());
    !is_link_local && !address.is_loopback() && !address.is_unspecified() && !address.is_multicast()
}

/// Returns where programs see the traffic of an attachment's interface after its steps have been carried out.
pub fn of(attachment: &AttachmentPlan, outputs: Brought<'_>) -> HookKind {
    let found = || {
        outputs.iter().find_map(|output| match output {
            Output::Device { vantage, .. } => Some(vantage.clone()),
            _ => None,
        })
    };
    attachment.vantage().or_else(found).unwrap_or(HookKind::Nowhere(NotObservable::NoInterface))
}

/// Returns the attachment's device information, if it has been read.
pub fn device_info(outputs: Brought<'_>) -> Option<&Value> {
    outputs.iter().find_map(|output| match output {
        Output::DeviceInfo { info } => Some(info),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn interface(mac: Option<[u8; 6]>) -> Interface {
        Interface { name: "net1".into(), index: 3, mac: mac.map(crate::mac::Mac), mtu: 1500 }
    }

    fn vantage(pod: Option<Interface>, host: Option<Interface>, device: Option<&Value>) -> HookKind {
        match (FoundDevice { pod, host, device, addresses: Vec::new(), mode: None }).output() {
            Output::Device { vantage, .. } => vantage,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn an_interface_is_judged_on_the_node_if_it_can_be_else_in_the_pod() {
        let ethernet = || Some(interface(Some([2, 0, 0, 0, 0, 1])));
        assert_eq!(vantage(ethernet(), ethernet(), None), HookKind::Node);
        let device = json!({"type": "pci", "version": "1.1.0", "pci": {"pci-address": "0000:00:01.0"}});
        assert_eq!(vantage(ethernet(), None, Some(&device)), HookKind::Pod);
        let device = json!({"type": "vdpa", "vdpa": {"driver": "virtio"}});
        assert_eq!(vantage(ethernet(), None, Some(&device)), HookKind::Pod);
    }

    #[test]
    fn interfaces_that_bypass_the_kernel_are_judged_nowhere() {
        let ethernet = || Some(interface(Some([2, 0, 0, 0, 0, 1])));
        let userspace = |kind: &str| NotObservable::Userspace(kind.to_owned());
        let table = [
            (None, json!({}), NotObservable::NoInterface),
            (None, json!({"type": "pci", "pci": {"rdma-device": "mlx5_1"}}), NotObservable::NoInterface),
            (
                ethernet(),
                json!({"type": "pci", "pci": {"rdma-device": "mlx5_1"}}),
                NotObservable::Rdma("mlx5_1".into()),
            ),
            (ethernet(), json!({"type": "vdpa", "vdpa": {"driver": "vhost"}}), userspace("vdpa")),
            (None, json!({"type": "vhost-user"}), userspace("vhost-user")),
            (ethernet(), json!({"type": "memif"}), userspace("memif")),
            (Some(interface(None)), json!({}), NotObservable::NotEthernet),
            (Some(interface(Some([0; 6]))), json!({}), NotObservable::NotEthernet),
        ];
        for (pod, device, unseen) in table {
            let what = format!("{pod:?} {device}");
            assert_eq!(vantage(pod, None, Some(&device)), HookKind::Nowhere(unseen), "{what}");
        }
    }

    /// Rows: IVL-chained.
    #[test]
    fn an_ipvlan_that_another_plugin_made_is_judged_in_the_pod_but_in_mode_l3s() {
        let vantage = |mode| {
            let pod = Some(interface(Some([2, 0, 0, 0, 0, 1])));
            let mode = Some(LinkMode::Ipvlan(mode));
            match (FoundDevice { pod, host: None, device: None, addresses: Vec::new(), mode }).output() {
                Output::Device { vantage, .. } => vantage,
                other => panic!("{other:?}"),
            }
        };
        let nowhere = HookKind::Nowhere(NotObservable::NotJudged);
        for (mode, expected) in
            [(IpvlanMode::L2, HookKind::Pod), (IpvlanMode::L3, HookKind::Pod), (IpvlanMode::L3s, nowhere)]
        {
            assert_eq!(vantage(mode), expected, "{mode:?}");
        }
    }

    #[test]
    fn addresses_that_an_interface_has_anyway_are_none_that_it_was_given() {
        let found = ["fe80::2/64", "10.7.0.2/24", "fd00:7::2/64", "169.254.7.2/16", "127.0.0.1/8"];
        let addresses: Vec<IpNet> = found.map(|net| net.parse().unwrap()).into();
        let pod = Some(interface(Some([2; 6])));
        let found = FoundDevice { pod, host: None, device: None, addresses, mode: None };
        let Output::Device { addresses, .. } = found.output() else { panic!("another output") };
        let told: Vec<String> = addresses.iter().map(ToString::to_string).collect();
        assert_eq!(told, ["10.7.0.2/24", "fd00:7::2/64", "169.254.7.2/16"]);
    }
}
