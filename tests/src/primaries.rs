//! Configurations of primary networks, as their products write them, with their properties.

use serde_json::Value;

/// A primary network.
#[derive(Debug, Clone, Copy)]
pub struct Primary {
    /// The file in the runtime's directory.
    pub file: &'static str,
    /// Its content.
    pub text: &'static str,
    /// Name of the network.
    pub network: &'static str,
    /// The version of CNI that it speaks.
    pub version: &'static str,
    /// Its plugins, in the order of ADD.
    pub plugins: &'static [&'static str],
    /// The capabilities that they declare, in their order.
    pub capabilities: &'static [&'static str],
}

macro_rules! text {
    ($file:literal) => {
        include_str!(concat!("../primaries/", $file))
    };
}

/// All of them, in the order of their files.
pub const PRIMARIES: [Primary; 8] = [
    Primary {
        file: "01-kube-ovn.conflist",
        text: text!("01-kube-ovn.conflist"),
        network: "kube-ovn",
        version: "0.3.1",
        plugins: &["kube-ovn", "portmap"],
        capabilities: &["portMappings"],
    },
    Primary {
        file: "05-cilium.conflist",
        text: text!("05-cilium.conflist"),
        network: "cilium",
        version: "0.3.1",
        plugins: &["cilium-cni"],
        capabilities: &[],
    },
    Primary {
        file: "10-antrea.conflist",
        text: text!("10-antrea.conflist"),
        network: "antrea",
        version: "0.3.0",
        plugins: &["antrea", "portmap", "bandwidth"],
        capabilities: &["portMappings", "bandwidth"],
    },
    Primary {
        file: "10-aws.conflist",
        text: text!("10-aws.conflist"),
        network: "aws-cni",
        version: "1.0.0",
        plugins: &["aws-cni", "egress-cni", "portmap"],
        capabilities: &["portMappings"],
    },
    Primary {
        file: "10-calico.conflist",
        text: text!("10-calico.conflist"),
        network: "k8s-pod-network",
        version: "0.3.1",
        plugins: &["calico", "bandwidth", "portmap"],
        capabilities: &["bandwidth", "portMappings"],
    },
    Primary {
        file: "10-flannel.conflist",
        text: text!("10-flannel.conflist"),
        network: "cbr0",
        version: "0.3.1",
        plugins: &["flannel", "portmap"],
        capabilities: &["portMappings"],
    },
    Primary {
        file: "10-ovn-kubernetes.conf",
        text: text!("10-ovn-kubernetes.conf"),
        network: "ovn-kubernetes",
        version: "1.1.0",
        plugins: &["ovn-k8s-cni-overlay"],
        capabilities: &[],
    },
    Primary {
        file: "10-weave.conflist",
        text: text!("10-weave.conflist"),
        network: "weave",
        version: "0.3.0",
        plugins: &["weave-net", "portmap"],
        capabilities: &["portMappings"],
    },
];

/// File and content of Multus's configuration.
pub const MULTUS: (&str, &str) = ("00-multus.conf", text!("00-multus.conf"));

impl Primary {
    /// Returns the one whose network has that name.
    ///
    /// # Panics
    /// There is none.
    pub fn named(network: &str) -> Self {
        *PRIMARIES.iter().find(|it| it.network == network).expect("a network of the table")
    }

    /// Returns the configuration of a plugin as passed by every verb, without `runtimeConfig` and `prevResult`.
    ///
    /// # Panics
    /// The file is not JSON.
    pub fn config(&self, plugin: usize) -> Value {
        let list: Value = serde_json::from_str(self.text).expect("JSON");
        let mut config = if list["plugins"].is_array() { list["plugins"][plugin].clone() } else { list };
        config["name"] = self.network.into();
        config["cniVersion"] = self.version.into();
        config
    }
}
