//! Parts of plans for tests, which change what each is about.

use serde_json::{Map, Value};

use super::attachment::Wanted;
use super::resolve::Network;
use super::{AttachmentPlan, CachedResults, Sandbox};
use crate::cni::{NetworkList, Version};
use crate::link::Facts;
use crate::netns::NetnsId;
use crate::spec::{Device, DeviceId};
use crate::step::Step;

/// The sandbox of a container that is no pod's.
pub(crate) fn sandbox(container: &str) -> Sandbox {
    Sandbox {
        container_id: container.to_owned(),
        ifname: "eth0".to_owned(),
        netns: format!("/run/netns/{container}"),
        netns_id: NetnsId { device: 4, inode: 5 },
        cni_args: String::new(),
        cni_path: Vec::new(),
        config_name: "pods".to_owned(),
        pod: None,
    }
}

/// The attachment `net1` to network `shop/lan`, by a plugin of that type with these steps.
pub(crate) fn attachment(kind: &str, steps: Vec<Step>) -> AttachmentPlan {
    AttachmentPlan {
        network: "shop/lan".into(),
        config_name: "lan".to_owned(),
        default: false,
        ifname: "net1".to_owned(),
        version: Version::LATEST,
        kind: kind.to_owned(),
        disable_check: false,
        disable_gc: false,
        steps,
        yields_to: None,
        warnings: Vec::new(),
        device: None,
    }
}

/// The network `shop/lan` with that configuration, as its definition has it.
pub(in crate::plan) fn network(config: &Value) -> Network {
    Network {
        name: "shop/lan".into(),
        list: NetworkList::from_map(config.as_object().unwrap().clone()).unwrap().into(),
        resource: None,
        enforce: None,
        ethertypes: Vec::new(),
        device: None,
    }
}

/// A network that a pod gets besides its default one, and asks nothing of.
pub(in crate::plan) fn wanted<'a>(network: &'a Network, facts: &'a Facts) -> Wanted<'a> {
    Wanted {
        network,
        ifname: "net1",
        default: false,
        remembered: CachedResults::Off,
        offered: Map::new(),
        asked: None,
        facts,
        made_before: None,
    }
}

/// A device of the node by its name on the bus, which the pod has as `net1`.
pub(crate) fn device() -> Device {
    Device {
        pod_name: "net1".to_owned(),
        id: DeviceId::Bus("0000:03:02.1".to_owned()),
        userspace: None,
        function: None,
        rdma: None,
        switchdev: false,
    }
}
