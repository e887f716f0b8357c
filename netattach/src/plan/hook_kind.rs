//! Decides where programs see the traffic of an interface. Pure.

use serde_json::Value;

use super::AttachmentPlan;
use crate::step::{Brought, HookKind, Interface, NotObservable, Output};

/// The findings about an interface that another plugin made.
#[derive(Debug, Clone, PartialEq)]
pub struct FoundDevice<'a> {
    /// The interface.
    pub pod: Option<Interface>,
    /// The other end of its link, if that is on the node.
    pub host: Option<Interface>,
    /// Its device information.
    pub device: Option<&'a Value>,
}

impl FoundDevice<'_> {
    /// Converts the findings to a step's output.
    pub fn output(self) -> Output {
        let vantage = match self.unseen() {
            Some(unseen) => HookKind::Nowhere(unseen),
            None if self.host.is_some() => HookKind::Node,
            None => HookKind::Pod,
        };
        Output::Device { vantage, host: self.host, pod: self.pod }
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
        // Loopback and tunnels have no Ethernet address or only zeros.
        let is_ethernet = pod.mac.is_some_and(|mac| mac.0 != [0; 6]);
        (!is_ethernet).then_some(NotObservable::NotEthernet)
    }
}

/// Where programs see the traffic of an attachment's interface after its steps have been carried out.
pub fn of(attachment: &AttachmentPlan, outputs: Brought<'_>) -> HookKind {
    let found = || {
        outputs.iter().find_map(|output| match output {
            Output::Device { vantage, .. } => Some(vantage.clone()),
            _ => None,
        })
    };
    attachment.vantage().or_else(found).unwrap_or(HookKind::Nowhere(NotObservable::NoInterface))
}

/// The attachment's device information, if it has been read.
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
        match (FoundDevice { pod, host, device }).output() {
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
}
