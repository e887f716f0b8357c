//! The section `builtin` of the agent's settings.

use std::path::{Path, PathBuf};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::cidr;
use crate::cni::identifier::check_ifname;

/// The network that the agent provides itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Settings {
    /// How pods are connected to the node.
    pub mode: Mode,
    /// Name of the bridge.
    pub bridge: String,
    /// MTU in bytes; 0: that of the device of the default route.
    pub mtu: u32,
    /// Whether frames may leave the bridge through the port on which they arrived.
    pub hairpin: bool,
    /// Whether pods use the node's address towards destinations outside the cluster.
    pub masquerade: bool,
    /// Destinations that see the pods' own addresses; empty: the pods of the cluster, link-local and multicast addresses.
    #[serde(rename = "nonMasqueradeCIDRs", deserialize_with = "cidr::deserialize_all")]
    pub non_masquerade_cidrs: Vec<IpNet>,
    /// Whether routes to the pods of other nodes are installed.
    pub routes: bool,
    /// The ranges of this node's pods, which take precedence over those of its object.
    #[serde(rename = "podCIDRs", deserialize_with = "cidr::deserialize_all")]
    pub pod_cidrs: Vec<IpNet>,
    /// Directory of the pool.
    pub data_dir: PathBuf,
}

/// How pods are connected to the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// By a bridge: they share a segment.
    #[default]
    Bridge,
    /// By a routed link each.
    Routed,
}

/// Why a value is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidSettings {
    /// The name is invalid for a bridge.
    #[error("builtin.bridge: {0:?} is not the name of a link: 1 to 15 bytes, without / and white space")]
    Bridge(String),
    /// The MTU is out of range.
    #[error("builtin.mtu: {0} is not 0, or between 1280 and 65535")]
    Mtu(u32),
    /// There are two ranges of one family.
    #[error("builtin.podCIDRs: {0} is the second of its family: at most one of IPv4 and one of IPv6")]
    SecondOfFamily(IpNet),
    /// The path of the directory is relative.
    #[error("builtin.dataDir: {0} is not an absolute path")]
    DataDir(PathBuf),
    /// `hairpin` is set, but the mode is routed: only a bridge has hairpin ports.
    #[error("builtin.hairpin: it is of a bridge, and builtin.mode is routed")]
    Hairpin,
    /// No source provides this node's range.
    #[error(
        "defaultNetwork: builtin takes the addresses of pods from the node's podCIDRs, which a directory of manifests does \
         not have: set builtin.podCIDRs, such as [10.244.1.0/24], different on each node"
    )]
    NoRange,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            mode: Mode::default(),
            bridge: "pods0".into(),
            mtu: 0,
            hairpin: false,
            masquerade: true,
            non_masquerade_cidrs: Vec::new(),
            routes: true,
            pod_cidrs: Vec::new(),
            data_dir: Path::new("/var/lib/cni/networks").into(),
        }
    }
}

impl Settings {
    /// Checks each value separately.
    ///
    /// # Errors
    /// [`InvalidSettings`], which names the key.
    pub fn validate(&self) -> Result<(), InvalidSettings> {
        if check_ifname(&self.bridge).is_err() {
            return Err(InvalidSettings::Bridge(self.bridge.clone()));
        }
        // IPv6 requires at least 1280 bytes.
        if self.mtu != 0 && !(1280..=65_535).contains(&self.mtu) {
            return Err(InvalidSettings::Mtu(self.mtu));
        }
        for (position, range) in self.pod_cidrs.iter().enumerate() {
            if self.pod_cidrs[..position].iter().any(|one| one.addr().is_ipv4() == range.addr().is_ipv4()) {
                return Err(InvalidSettings::SecondOfFamily(*range));
            }
        }
        if self.data_dir.is_relative() {
            return Err(InvalidSettings::DataDir(self.data_dir.clone()));
        }
        if self.hairpin && self.mode == Mode::Routed {
            return Err(InvalidSettings::Hairpin);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_cannot_be_carried_out_are_refused_by_their_key() {
        let default = Settings::default;
        let net = |text: &str| text.parse::<IpNet>().unwrap();
        assert_eq!(default().validate(), Ok(()));
        let table = [
            (Settings { bridge: "a/b".into(), ..default() }, InvalidSettings::Bridge("a/b".into())),
            (Settings { mtu: 68, ..default() }, InvalidSettings::Mtu(68)),
            (
                Settings {
                    pod_cidrs: vec![net("10.1.0.0/24"), net("fd00::/64"), net("10.2.0.0/24")],
                    ..default()
                },
                InvalidSettings::SecondOfFamily(net("10.2.0.0/24")),
            ),
            (
                Settings { data_dir: "networks".into(), ..default() },
                InvalidSettings::DataDir("networks".into()),
            ),
            (Settings { hairpin: true, mode: Mode::Routed, ..default() }, InvalidSettings::Hairpin),
        ];
        for (settings, error) in table {
            assert_eq!(settings.validate(), Err(error));
        }
    }
}
