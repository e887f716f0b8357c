//! A node of the cluster as a machine has it: a kubelet and containerd, with netattach as the network of its pods.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, ensure};
use rustix::mount::{UnmountFlags, mount_bind, unmount};
use serde_json::{Value, json};

use super::program::Program;
use super::{Cluster, write_config};
use crate::Node;
use crate::machine::containerd::{Containerd, Version};
use crate::machine::{CONFIGURATIONS, Machine};
use crate::traffic::eventually;

/// A node that takes longer to get ready counts as hung.
const PATIENCE: Duration = Duration::from_secs(120);
const RUNTIME: &str = "unix:///run/containerd/containerd.sock";
/// Settings of the whole machine that a kubelet writes unless it reads these values.
const SYSCTLS: [(&str, &str); 6] = [
    ("vm/overcommit_memory", "1"),
    ("vm/panic_on_oom", "0"),
    ("kernel/panic", "10"),
    ("kernel/panic_on_oops", "1"),
    ("kernel/keys/root_maxkeys", "1000000"),
    ("kernel/keys/root_maxbytes", "25000000"),
];
/// containerd's control groups of pods whose kubelet names no parent for them.
const GROUPS: &str = "k8s.io";

/// A node that runs the pods which the scheduler gives it. It belongs to the thread that made it.
#[derive(Debug)]
pub struct Worker {
    kubelet: Program,
    /// Files mounted over settings.
    over: Vec<PathBuf>,
    containerd: Containerd,
}

impl Worker {
    /// Starts a node of that name and waits until it is ready. Without the runtimes the test is reported as skipped, and
    /// there is no node.
    ///
    /// # Errors
    /// It does not get ready.
    pub fn start(test: &str, cluster: &Cluster, name: &str) -> Result<Option<Self>> {
        let mut node = Node::new(&[])?;
        let address = cluster.connect(&node.namespace)?;
        node.join(cluster.agent_config(&node.path("source"))?, name)?;
        let directory = node.path("kubelet");
        fs::create_dir(&directory)?;
        let identity = cluster.pki.client(&format!("system:node:{name}"), Some("system:nodes"))?;
        let own = identity.write(&directory, "kubelet")?;
        let server = cluster.pki.server(name, &[address.into()])?.write(&directory, "server")?;
        let credentials = json!({"client-certificate": own.certificate, "client-key": own.key});
        let kubeconfig = write_config(&directory, "kubelet", &credentials, cluster.pki.authority_file())?;
        let resolver = directory.join("resolv.conf");
        fs::write(&resolver, "nameserver 192.0.2.53\n")?;
        let settings = json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
            "authentication": {
                "anonymous": {"enabled": false}, "webhook": {"enabled": true},
                "x509": {"clientCAFile": cluster.pki.authority_file()}
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": server.certificate, "tlsPrivateKeyFile": server.key,
            "address": address, "readOnlyPort": 0, "healthzPort": 0,
            "cgroupDriver": "cgroupfs", "cgroupsPerQOS": false, "enforceNodeAllocatable": [],
            "failSwapOn": false, "makeIPTablesUtilChains": false, "resolvConf": resolver,
            // A test machine's disk may be nearly full.
            "evictionHard": {"memory.available": "20Mi", "nodefs.available": "0%", "imagefs.available": "0%"},
            "imageGCHighThresholdPercent": 100
        });
        fs::write(directory.join("settings"), settings.to_string())?;

        let Some(mut machine) = Machine::new(test, node)? else { return Ok(None) };
        machine.node.start()?;
        machine.network(CONFIGURATIONS, "pods", Version::V1_6.cni())?;
        let containerd = Containerd::start(machine, Version::V1_6)?;
        let over = cover_settings(&directory)?;
        let mut kubelet = Command::new(cluster.tools.join("kubelet"));
        kubelet.arg("--config").arg(directory.join("settings")).arg("--kubeconfig").arg(kubeconfig);
        kubelet.args(["--hostname-override", name, "--node-ip", &address.to_string()]);
        kubelet.args(["--container-runtime", "remote", "--container-runtime-endpoint", RUNTIME]);
        let node = &containerd.machine.node;
        let kubelet = Program::start(&node.namespace, kubelet, &directory.join("log"))?;
        let worker = Self { kubelet, over, containerd };
        worker.wait_until_ready(cluster, name)?;
        Ok(Some(worker))
    }

    /// The node with its agent.
    pub fn node(&self) -> &Node {
        &self.containerd.machine.node
    }

    fn wait_until_ready(&self, cluster: &Cluster, name: &str) -> Result<()> {
        let admin = cluster.admin()?;
        let mut object = Value::Null;
        let is_ready = |object: &Value| {
            let conditions = object["status"]["conditions"].as_array().into_iter().flatten();
            let mut ready = conditions.filter(|condition| condition["type"] == "Ready");
            ready.next().is_some_and(|condition| condition["status"] == "True")
        };
        let ready = eventually(PATIENCE, || {
            object = admin.get(&format!("/api/v1/nodes/{name}")).map_or(Value::Null, |reply| reply.body);
            self.kubelet.has_ended() || is_ready(&object)
        });
        ensure!(ready && !self.kubelet.has_ended(), "{object:#}\n{}", self.kubelet.said());
        Ok(())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.kubelet.end();
        for file in &self.over {
            let _ = unmount(file, UnmountFlags::DETACH);
        }
        self.containerd.machine.also_remove(GROUPS);
    }
}

/// Mounts files over the machine's settings, for this thread's mounts only.
fn cover_settings(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut over = Vec::new();
    for (name, value) in SYSCTLS {
        let file = directory.join(name.replace('/', "."));
        fs::write(&file, format!("{value}\n"))?;
        let setting = Path::new("/proc/sys").join(name);
        mount_bind(&file, &setting)?;
        over.push(setting);
    }
    Ok(over)
}
