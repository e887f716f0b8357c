//! CNI plugins executed one after the other, like the reference's: `bridge`, `macvlan`, `macvlan`, each with
//! host-local.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Mutex;

use anyhow::{Context, bail, ensure};
use serde_json::{Value, json};

use super::Contender;
use crate::pods::{INTERFACES, Node, PARENT, Pod, make_directory};

pub(super) const NAME: &str = "reference plugins";

/// The directories where the reference's `tap` looks for `ip`, and its masquerade for iptables.
const PATH: &str = "/usr/sbin:/usr/bin:/sbin:/bin";

/// A runtime that executes a pod's plugins one after the other, as a meta plugin would, each for an interface of its
/// own.
pub(super) struct InTurn {
    name: &'static str,
    description: &'static str,
    plugins: PathBuf,
    networks: Vec<Value>,
    /// The output of each ADD: a runtime passes it to DEL.
    results: Vec<Mutex<Vec<Value>>>,
}

impl InTurn {
    pub(super) fn new(node: &Node, pods: usize) -> anyhow::Result<Self> {
        let leases = make_directory(&node.scratch().join("host-local"))?;
        let ipam = |network: u8| {
            json!({
                "type": "host-local",
                "dataDir": leases,
                "ranges": [[{"subnet": format!("10.{}.0.0/16", 100 + network)}]],
            })
        };
        let macvlan = |network: u8| {
            json!({
                "cniVersion": "1.0.0", "name": format!("bench-macvlan-{network}"), "type": "macvlan",
                "master": PARENT, "mode": "bridge", "ipam": ipam(network),
            })
        };
        let bridge = json!({
            "cniVersion": "1.0.0", "name": "bench-bridge", "type": "bridge", "bridge": "reference0",
            "isDefaultGateway": true, "ipam": ipam(0),
        });
        let description = "containernetworking bridge, macvlan, macvlan with host-local, executed in turn";
        Ok(Self::of((NAME, description), plugins()?, vec![bridge, macvlan(1), macvlan(2)], pods))
    }

    /// Executables of a directory, with the configuration of each network, for that many pods.
    pub(super) fn of(
        (name, description): (&'static str, &'static str),
        plugins: PathBuf,
        networks: Vec<Value>,
        pods: usize,
    ) -> Self {
        let results = (0..pods).map(|_| Mutex::new(Vec::new())).collect();
        Self { name, description, plugins, networks, results }
    }

    fn call(
        &self,
        verb: &str,
        pod: &Pod,
        position: usize,
        container: &str,
        config: &Value,
    ) -> anyhow::Result<Value> {
        let plugin = config["type"].as_str().context("a network without a type")?;
        let mut child = Command::new(self.plugins.join(plugin))
            .env_clear()
            .env("PATH", PATH)
            .env("CNI_COMMAND", verb)
            .env("CNI_CONTAINERID", container)
            .env("CNI_NETNS", pod.path())
            .env("CNI_IFNAME", INTERFACES[position])
            .env("CNI_PATH", &self.plugins)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("start {plugin}"))?;
        if let Some(mut stdin) = child.stdin.take() {
            stdin.write_all(config.to_string().as_bytes()).with_context(|| format!("configure {plugin}"))?;
        }
        let answer = child.wait_with_output().with_context(|| format!("wait for {plugin}"))?;
        if !answer.status.success() {
            bail!("{plugin} refused: {}", String::from_utf8_lossy(&answer.stdout).trim());
        }
        if answer.stdout.is_empty() {
            return Ok(Value::Null);
        }
        serde_json::from_slice(&answer.stdout).with_context(|| format!("read what {plugin} answered"))
    }
}

impl Contender for InTurn {
    fn name(&self) -> &'static str {
        self.name
    }

    fn describe(&self) -> String {
        self.description.to_owned()
    }

    fn add(&self, pod: &Pod) -> anyhow::Result<()> {
        let container = pod.new_container();
        let mut results = Vec::new();
        for (position, network) in self.networks.iter().enumerate() {
            let mut result = Value::Null;
            for mut config in plugins_of(network) {
                if !result.is_null() {
                    config["prevResult"] = result;
                }
                result = self.call("ADD", pod, position, &container, &config)?;
            }
            results.push(result);
        }
        *self.stored(pod)? = results;
        Ok(())
    }

    fn del(&self, pod: &Pod) -> anyhow::Result<()> {
        let results = std::mem::take(&mut *self.stored(pod)?);
        let container = pod.container();
        // In reverse, as the specification requires.
        for (position, (network, result)) in self.networks.iter().zip(results).enumerate().rev() {
            for mut config in plugins_of(network).into_iter().rev() {
                config["prevResult"] = result.clone();
                self.call("DEL", pod, position, &container, &config)?;
            }
        }
        Ok(())
    }
}

impl InTurn {
    fn stored(&self, pod: &Pod) -> anyhow::Result<std::sync::MutexGuard<'_, Vec<Value>>> {
        let slot = self
            .results
            .get(usize::from(pod.number))
            .context("more pods than the benchmark keeps results of")?;
        slot.lock().map_err(|_| anyhow::anyhow!("another request of this pod panicked"))
    }
}

/// Returns the configuration of each plugin of a network, without a result: its part of a list, with the list's name
/// and version.
fn plugins_of(network: &Value) -> Vec<Value> {
    let Some(plugins) = network["plugins"].as_array() else { return vec![network.clone()] };
    let told = |plugin: &Value| {
        let mut told = plugin.clone();
        for key in ["cniVersion", "name"] {
            told[key] = network[key].clone();
        }
        told
    };
    plugins.iter().map(told).collect()
}

/// The directory of the reference's executables.
pub(super) fn plugins() -> anyhow::Result<PathBuf> {
    let plugins = crate::reference_plugins();
    ensure!(plugins.join("bridge").is_file(), "the reference plugins are missing: run `cargo xtask setup`");
    Ok(plugins)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_plugin_of_a_list_is_told_its_name_and_version() {
        let alone = json!({"cniVersion": "1.0.0", "name": "n", "type": "bridge"});
        assert_eq!(plugins_of(&alone), [alone]);
        let list =
            json!({"cniVersion": "0.4.0", "name": "l", "plugins": [{"type": "a", "mtu": 1}, {"type": "b"}]});
        let expected = [
            json!({"cniVersion": "0.4.0", "name": "l", "type": "a", "mtu": 1}),
            json!({"cniVersion": "0.4.0", "name": "l", "type": "b"}),
        ];
        assert_eq!(plugins_of(&list), expected);
    }
}
