//! Devices of a node that lead out of it, as network cards do: for plugins that move them into pods.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use anyhow::Result;
use serde_json::{Value, json};

use crate::node::ip;
use crate::{Namespace, Node};

/// Addresses beyond the wires, on the switch that they are connected to.
pub const BEYOND: [&str; 2] = ["10.60.0.9", "fd00:60::9"];

/// Wires from a node to a switch beyond it.
#[derive(Debug)]
pub struct Wires {
    /// The switch's namespace, which has the addresses [`BEYOND`].
    pub beyond: Namespace,
}

impl Wires {
    /// Gives the node devices with these names.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn new(node: &Node, names: &[&str]) -> Result<Self> {
        let beyond = Namespace::new()?;
        let run = |words: &str| ip(&beyond, &words.split(' ').collect::<Vec<_>>());
        run("link add switch up type bridge")?;
        for address in BEYOND {
            let prefix = if address.contains(':') { 64 } else { 24 };
            run(&format!("address add {address}/{prefix} dev switch"))?;
        }
        for name in names {
            run(&format!("link add name {name} type veth peer name to-{name}"))?;
            run(&format!("link set dev to-{name} master switch up"))?;
            run(&format!("link set dev {name} netns {}", node.namespace.path().display()))?;
        }
        Ok(Self { beyond })
    }

    /// Configuration of a network whose only attachment is that device, with the addresses of this host number.
    pub fn config(device: &str, host: u8) -> Value {
        json!({
            "cniVersion": "1.0.0", "type": "host-device", "device": device,
            "ipam": {"type": "static", "addresses": [
                {"address": format!("10.60.0.{host}/24")}, {"address": format!("fd00:60::{host}/64")}
            ]}
        })
    }
}

/// Installs plugins of that directory on the node.
///
/// # Errors
/// A link cannot be made.
pub fn install(node: &Node, from: &Path, plugins: &[&str]) -> Result<()> {
    for plugin in plugins {
        let path = node.path("cni-bin").join(plugin);
        if fs::symlink_metadata(&path).is_err() {
            symlink(from.join(plugin), &path)?;
        }
    }
    Ok(())
}
