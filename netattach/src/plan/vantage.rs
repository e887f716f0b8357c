//! Where programs see what an interface sends and receives. Pure.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{AttachmentPlan, Interface, Output, StepRef};

/// Where programs see what an interface sends and receives.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Vantage {
    /// On the node's end of its link.
    Node,
    /// On the parent of the macvlan.
    Parent,
    /// On the interface itself, in the pod.
    Pod,
    /// Nowhere.
    Nowhere(Unseen),
}

/// Why no program sees what an interface sends and receives.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Unseen {
    /// It is made so that netattach does not judge it: loopback, macvlan in mode passthru.
    NotJudged,
    /// The network's definition or the agent's settings say so.
    LeftAlone,
    /// The pod has no interface of that name.
    NoInterface,
    /// Its frames are not Ethernet's.
    NotEthernet,
    /// The pod drives the device itself; of what type its device information says it is.
    Userspace(String),
    /// Besides the kernel's own, traffic by this RDMA device uses it.
    Rdma(String),
}

/// Annotation of a NetworkAttachmentDefinition: [`When`] programs run for its attachments, if other plugins make them; in
/// place of the agent's setting.
pub const ENFORCE_ANNOTATION: &str = "netattach.dev/enforce";

/// When the programs of an attachment run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum When {
    /// From the first policy on that selects the attachment, until its end.
    #[default]
    Selected,
    /// From its beginning.
    Always,
    /// Never.
    Never,
}

impl When {
    /// By its word.
    pub fn named(word: &str) -> Option<Self> {
        let words = [("selected", Self::Selected), ("always", Self::Always), ("never", Self::Never)];
        words.into_iter().find(|(name, _)| *name == word).map(|(_, when)| when)
    }

    /// What records say that do not say it: of interfaces that netattach made itself.
    pub(super) const fn always() -> Self {
        Self::Always
    }
}

/// What was found of an interface that another plugin made.
#[derive(Debug, Clone, PartialEq)]
pub struct Sight<'a> {
    /// The interface.
    pub pod: Option<Interface>,
    /// The other end of its link, if that is on the node.
    pub host: Option<Interface>,
    /// What its device information says.
    pub device: Option<&'a Value>,
}

impl Sight<'_> {
    /// What that is to the dataplane.
    pub fn output(self) -> Output {
        let vantage = match self.unseen() {
            Some(unseen) => Vantage::Nowhere(unseen),
            None if self.host.is_some() => Vantage::Node,
            None => Vantage::Pod,
        };
        Output::Device { vantage, host: self.host, pod: self.pod }
    }

    fn unseen(&self) -> Option<Unseen> {
        // The NPWG Device Information Specification, sections 3.1.3 to 3.1.6.
        let word = |path: &str| self.device?.pointer(path)?.as_str();
        match word("/type") {
            Some(kind @ ("vhost-user" | "memif")) => return Some(Unseen::Userspace(kind.to_owned())),
            Some("vdpa") if word("/vdpa/driver") == Some("vhost") => {
                return Some(Unseen::Userspace("vdpa".to_owned()));
            }
            _ => {}
        }
        let Some(pod) = &self.pod else { return Some(Unseen::NoInterface) };
        if let Some(rdma) = word("/pci/rdma-device") {
            return Some(Unseen::Rdma(rdma.to_owned()));
        }
        // Of loopback and tunnels, which have none or only zeros.
        let is_ethernet = pod.mac.is_some_and(|mac| mac.0 != [0; 6]);
        (!is_ethernet).then_some(Unseen::NotEthernet)
    }
}

/// Where programs see what an attachment's interface sends and receives, once its steps have been carried out.
pub fn of(number: u16, attachment: &AttachmentPlan, outputs: &BTreeMap<StepRef, Output>) -> Vantage {
    let found = || {
        // Step numbers fit: see `Plan::steps`.
        (0..attachment.steps.len()).find_map(|step| match outputs.get(&StepRef(number, step as u16)) {
            Some(Output::Device { vantage, .. }) => Some(vantage.clone()),
            _ => None,
        })
    };
    attachment.vantage().or_else(found).unwrap_or(Vantage::Nowhere(Unseen::NoInterface))
}

/// What an attachment's device information says, once it has been read.
pub fn device_info<'o>(
    number: u16,
    attachment: &AttachmentPlan,
    outputs: &'o BTreeMap<StepRef, Output>,
) -> Option<&'o Value> {
    // Step numbers fit: see `Plan::steps`.
    (0..attachment.steps.len()).find_map(|step| match outputs.get(&StepRef(number, step as u16)) {
        Some(Output::DeviceInfo { info }) => Some(info),
        _ => None,
    })
}

impl fmt::Display for Unseen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotJudged => f.write_str("interfaces of this kind are not judged"),
            Self::LeftAlone => {
                f.write_str("enforce is never, by the network's definition or the agent's settings")
            }
            Self::NoInterface => f.write_str("the pod has no interface of that name"),
            Self::NotEthernet => f.write_str("the interface is no Ethernet device"),
            Self::Userspace(kind) => write!(f, "the pod drives the device ({kind}) itself, past the kernel"),
            Self::Rdma(device) => write!(f, "the RDMA device {device} carries traffic past the kernel"),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn interface(mac: Option<[u8; 6]>) -> Interface {
        Interface { name: "net1".into(), index: 3, mac: mac.map(crate::mac::Mac), mtu: 1500 }
    }

    fn vantage(pod: Option<Interface>, host: Option<Interface>, device: Option<&Value>) -> Vantage {
        match (Sight { pod, host, device }).output() {
            Output::Device { vantage, .. } => vantage,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn an_interface_is_judged_on_the_node_if_it_can_be_else_in_the_pod() {
        let ethernet = || Some(interface(Some([2, 0, 0, 0, 0, 1])));
        assert_eq!(vantage(ethernet(), ethernet(), None), Vantage::Node);
        let device = json!({"type": "pci", "version": "1.1.0", "pci": {"pci-address": "0000:00:01.0"}});
        assert_eq!(vantage(ethernet(), None, Some(&device)), Vantage::Pod);
        let device = json!({"type": "vdpa", "vdpa": {"driver": "virtio"}});
        assert_eq!(vantage(ethernet(), None, Some(&device)), Vantage::Pod);
    }

    #[test]
    fn what_passes_the_kernel_by_is_judged_nowhere() {
        let ethernet = || Some(interface(Some([2, 0, 0, 0, 0, 1])));
        let userspace = |kind: &str| Unseen::Userspace(kind.to_owned());
        let table = [
            (None, json!({}), Unseen::NoInterface),
            (None, json!({"type": "pci", "pci": {"rdma-device": "mlx5_1"}}), Unseen::NoInterface),
            (
                ethernet(),
                json!({"type": "pci", "pci": {"rdma-device": "mlx5_1"}}),
                Unseen::Rdma("mlx5_1".into()),
            ),
            (ethernet(), json!({"type": "vdpa", "vdpa": {"driver": "vhost"}}), userspace("vdpa")),
            (None, json!({"type": "vhost-user"}), userspace("vhost-user")),
            (ethernet(), json!({"type": "memif"}), userspace("memif")),
            (Some(interface(None)), json!({}), Unseen::NotEthernet),
            (Some(interface(Some([0; 6]))), json!({}), Unseen::NotEthernet),
        ];
        for (pod, device, unseen) in table {
            let what = format!("{pod:?} {device}");
            assert_eq!(vantage(pod, None, Some(&device)), Vantage::Nowhere(unseen), "{what}");
        }
    }
}
