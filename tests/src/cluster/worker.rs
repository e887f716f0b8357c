//! A node of the cluster, like a machine: a kubelet and containerd, with netattach as the network of its pods.

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rustix::mount::{UnmountFlags, mount_bind, unmount};
use serde_json::{Value, json};

use super::program::Program;
use super::{Cluster, write_config};
use crate::machine::containerd::{Containerd, Version};
use crate::machine::{CONFIGURATIONS, Machine, PLUGINS};
use crate::traffic::eventually;
use crate::{Namespace, Node};

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
/// The identity of a start of the machine.
const BOOT_SETTING: &str = "/proc/sys/kernel/random/boot_id";
const BOOT_ID: &str = "boot-id";
/// containerd's control groups of pods whose kubelet names no parent for them.
const GROUPS: &str = "k8s.io";

/// Workers of this process: the control groups are removed with the last one.
static WORKERS: Mutex<usize> = Mutex::new(0);

/// The configuration of a node.
#[derive(Debug, Default)]
pub struct Setup<'a> {
    /// Keys of the agent's configuration file. With `cniConf` only the agent writes the runtime's configuration.
    pub settings: &'a [(&'a str, Value)],
    /// The default network in place of the bridge of [`Node::default_config`].
    pub default: Option<fn(&Node) -> Value>,
    /// The default network is written by [`Worker::write_default`] only.
    pub default_is_late: bool,
    /// The key of a taint that the node is registered with.
    pub taint: Option<&'a str>,
}

/// A node without netattach, for a DaemonSet.
#[derive(Debug)]
pub struct Bare<'a> {
    /// Archives of images, which no kubelet pulls.
    pub images: &'a [&'a Path],
    /// Without it, no BPF file system is mounted.
    pub has_bpffs: bool,
    /// The executables of a primary network, copied to the directory where runtimes look for plugins.
    pub plugins: &'a [PathBuf],
    /// Its configuration.
    pub configuration: Option<Value>,
}

/// The loss in a power failure, in addition to everything in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loss {
    /// Nothing else.
    Memory,
    /// The disk of the container runtime.
    Runtime,
}

/// A node that runs the pods that the scheduler assigns to it. It belongs to the thread that created it.
#[derive(Debug)]
pub struct Worker {
    proxy: Option<Program>,
    device_plugin: Option<Program>,
    kubelet: Program,
    /// Files mounted over settings.
    over: Vec<PathBuf>,
    containerd: Containerd,
    name: String,
    address: Ipv4Addr,
    taint: Option<String>,
    default: Value,
    tools: PathBuf,
}

impl Worker {
    /// Starts a node of that name and waits until it is ready. Without the runtimes the test is reported as skipped, and
    /// there is no node.
    ///
    /// # Errors
    /// It does not get ready.
    pub fn start(test: &str, cluster: &Cluster, name: &str, setup: &Setup<'_>) -> Result<Option<Self>> {
        let mut node = Node::new(&[])?;
        let address = cluster.connect(&node.namespace)?;
        node.join(cluster.agent_config(&node.path("source"))?, name)?;
        let mut default = setup.default.map_or_else(|| node.default_config(), |of| of(&node));
        default["name"] = json!("default");
        for (key, value) in setup.settings {
            node.set(key, value.clone());
        }
        let directory = node.path("kubelet");
        configure(&directory, cluster, name, address)?;

        let Some(mut machine) = Machine::new(test, node)? else { return Ok(None) };
        let default_file = machine.node.path("default.conf");
        match setup.default_is_late {
            true => fs::remove_file(default_file)?,
            false => fs::write(default_file, default.to_string())?,
        }
        let over = cover_settings(&directory)?;
        machine.node.start()?;
        if !setup.settings.iter().any(|(key, _)| *key == "cniConf") {
            machine.network(CONFIGURATIONS, "pods", Version::V1_6.cni())?;
        }
        let containerd = Containerd::start(machine, Version::V1_6)?;
        let worker = Self::run(containerd, cluster, name, setup.taint, over, address, default)?;
        worker.wait_until_ready(cluster)?;
        Ok(Some(worker))
    }

    /// Starts a node of that name, which becomes ready when a network is installed.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn bare(test: &str, cluster: &Cluster, name: &str, setup: &Bare<'_>) -> Result<Option<Self>> {
        let node = Node::new(&[])?;
        let address = cluster.connect(&node.namespace)?;
        let directory = node.path("kubelet");
        configure(&directory, cluster, name, address)?;
        let Some(machine) = Machine::bare(test, node, setup.has_bpffs)? else { return Ok(None) };
        for plugin in setup.plugins {
            fs::copy(plugin, Path::new(PLUGINS).join(plugin.file_name().context("a plugin has a name")?))?;
        }
        if let Some(configuration) = &setup.configuration {
            fs::write(Path::new(CONFIGURATIONS).join("10-primary.conflist"), configuration.to_string())?;
        }
        let over = cover_settings(&directory)?;
        let containerd = Containerd::start(machine, Version::V1_6)?;
        for archive in setup.images {
            containerd.import_for_pods(archive)?;
        }
        Self::run(containerd, cluster, name, None, over, address, Value::Null).map(Some)
    }

    fn run(
        containerd: Containerd,
        cluster: &Cluster,
        name: &str,
        taint: Option<&str>,
        over: Vec<PathBuf>,
        address: Ipv4Addr,
        default: Value,
    ) -> Result<Self> {
        let (name, tools, taint) = (name.to_owned(), cluster.tools.clone(), taint.map(str::to_owned));
        let kubelet = start_kubelet(&containerd.machine.node, &tools, &name, address, taint.as_deref())?;
        *WORKERS.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        let (proxy, device_plugin) = (None, None);
        Ok(Self { proxy, device_plugin, kubelet, over, containerd, name, address, taint, default, tools })
    }

    /// The node with its agent.
    pub fn node(&self) -> &Node {
        &self.containerd.machine.node
    }

    /// [`Worker::node`], to end its agent and start it.
    pub fn node_mut(&mut self) -> &mut Node {
        &mut self.containerd.machine.node
    }

    /// The container runtime.
    pub fn containerd(&self) -> &Containerd {
        &self.containerd
    }

    /// The node's address in the cluster.
    pub fn address(&self) -> Ipv4Addr {
        self.address
    }

    /// Writes the default network that is late.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write_default(&self) -> Result<()> {
        Ok(fs::write(self.node().path("default.conf"), self.default.to_string())?)
    }

    /// Returns the directory of static pods, which are in no cluster until the kubelet runs them.
    pub fn static_pods(&self) -> PathBuf {
        self.node().path("kubelet").join("static")
    }

    /// Starts kube-proxy, which translates Services by iptables.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start_proxy(&mut self, cluster: &Cluster, pods: &str) -> Result<()> {
        let directory = self.node().path("kubelet");
        let own = cluster.pki.client("system:kube-proxy", None)?.write(&directory, "proxy")?;
        let credentials = json!({"client-certificate": own.certificate, "client-key": own.key});
        let kubeconfig = write_config(&directory, "proxy", &credentials, cluster.pki.authority_file())?;
        let settings = json!({
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration",
            "clientConnection": {"kubeconfig": kubeconfig}, "hostnameOverride": self.name, "mode": "iptables",
            "clusterCIDR": pods, "oomScoreAdj": 0,
            "iptables": {"minSyncPeriod": "0s", "syncPeriod": "30s"},
            // Settings of the whole machine stay.
            "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"}
        });
        fs::write(directory.join("proxy-settings"), settings.to_string())?;
        self.run_proxy()
    }

    /// Starts kube-proxy with the settings of before.
    fn run_proxy(&mut self) -> Result<()> {
        let directory = self.node().path("kubelet");
        let mut proxy = Command::new(self.tools.join("kube-proxy"));
        proxy.arg("--config").arg(directory.join("proxy-settings"));
        self.proxy = Some(Program::start(&self.node().namespace, proxy, &directory.join("proxy-log"))?);
        Ok(())
    }

    /// Returns the last output of kube-proxy, for a test that fails.
    pub fn proxy_said(&self) -> String {
        self.proxy.as_ref().map(Program::said).unwrap_or_default()
    }

    /// Starts a device plugin, which registers devices of a resource with the kubelet. It registers again with a
    /// restarted kubelet.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start_device_plugin(&mut self, resource: &str, ids: &[&str]) -> Result<()> {
        let mut plugin = Command::new(self.tools.join("device-plugin"));
        plugin.arg(resource).args(ids);
        let log = self.node().path("kubelet").join("device-plugin-log");
        self.device_plugin = Some(Program::start(&self.node().namespace, plugin, &log)?);
        Ok(())
    }

    /// Returns the output of the device plugin.
    pub fn device_plugin_said(&self) -> String {
        self.device_plugin.as_ref().map(Program::said).unwrap_or_default()
    }

    /// Returns the last output of the kubelet, for a test that fails.
    pub fn kubelet_said(&self) -> String {
        self.kubelet.said()
    }

    /// Kills the kubelet and starts it again.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn restart_kubelet(&mut self) -> Result<()> {
        self.kubelet.end();
        self.start_kubelet()
    }

    fn start_kubelet(&mut self) -> Result<()> {
        let node = &self.containerd.machine.node;
        self.kubelet = start_kubelet(node, &self.tools, &self.name, self.address, self.taint.as_deref())?;
        Ok(())
    }

    /// Simulates a power failure and a restart of the node: with the same disk and address, and with the agent
    /// started last.
    ///
    /// # Errors
    /// A program does not start.
    pub fn reboot(&mut self, cluster: &Cluster, loss: Loss) -> Result<()> {
        self.kubelet.end();
        let is_proxied = self.proxy.take().is_some();
        ensure!(self.device_plugin.is_none(), "a node with a device plugin is not started again");
        let wiped = loss == Loss::Runtime;
        self.containerd.machine.lose_power(wiped)?;
        cluster.reconnect(&self.node().namespace, self.address)?;
        write_boot_id(&self.node().path("kubelet"))?;
        self.containerd.serve_anew(wiped)?;
        self.start_kubelet()?;
        if is_proxied {
            self.run_proxy()?;
        }
        self.node_mut().start()
    }

    /// The namespace of an attached pod of that name, to make connections from there.
    ///
    /// # Errors
    /// The pod is not attached.
    pub fn namespace_of(&self, pod: &str) -> Result<Namespace> {
        let record = self.record_of(pod)?;
        let path = record["sandbox"]["netns"].as_str().context("a record has a namespace")?;
        Namespace::at(Path::new(path))
    }

    /// Returns the plan with which a pod of that name is attached, from its record.
    ///
    /// # Errors
    /// The pod is not attached.
    pub fn record_of(&self, pod: &str) -> Result<Value> {
        let rows = self.node().ctl(&["attachments"])?;
        let rows = rows.as_array().context("attachments are a list")?;
        let row = rows.iter().find(|row| row["pod"]["name"] == pod && row["state"] == "attached");
        let container = row.and_then(|row| row["container_id"].as_str());
        let container = container.with_context(|| format!("{pod} is not attached"))?;
        for entry in fs::read_dir(self.node().path("state/journal"))? {
            let entry = entry?;
            if !entry.file_name().to_string_lossy().starts_with(container) {
                continue;
            }
            let record = fs::read_to_string(entry.path())?;
            // Each line with its checksum.
            let lines = record.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
            let mut plans = lines.filter_map(|mut line| Some(line.pointer_mut("/1/planned/plan")?.take()));
            return plans.find(Value::is_object).context("a record has a plan");
        }
        bail!("{pod} has no record")
    }

    /// Waits until the node can run pods.
    ///
    /// # Errors
    /// It does not get ready.
    pub fn wait_until_ready(&self, cluster: &Cluster) -> Result<()> {
        let admin = cluster.admin()?;
        let mut object = Value::Null;
        let is_ready = |object: &Value| {
            let conditions = object["status"]["conditions"].as_array().into_iter().flatten();
            let mut ready = conditions.filter(|condition| condition["type"] == "Ready");
            ready.next().is_some_and(|condition| condition["status"] == "True")
        };
        let ready = eventually(PATIENCE, || {
            let path = format!("/api/v1/nodes/{}", self.name);
            object = admin.get(&path).map_or(Value::Null, |reply| reply.body);
            self.kubelet.has_ended() || is_ready(&object)
        });
        ensure!(ready && !self.kubelet.has_ended(), "{object:#}\n{}", self.kubelet.said());
        Ok(())
    }
}

/// Writes the files that the kubelet reads.
fn configure(directory: &Path, cluster: &Cluster, name: &str, address: Ipv4Addr) -> Result<()> {
    let static_pods = directory.join("static");
    fs::create_dir_all(&static_pods)?;
    let identity = cluster.pki.client(&format!("system:node:{name}"), Some("system:nodes"))?;
    let own = identity.write(directory, "kubelet")?;
    let server = cluster.pki.server(name, &[address.into()])?.write(directory, "server")?;
    let credentials = json!({"client-certificate": own.certificate, "client-key": own.key});
    write_config(directory, "kubelet", &credentials, cluster.pki.authority_file())?;
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
        "staticPodPath": static_pods, "fileCheckFrequency": "1s", "nodeStatusUpdateFrequency": "2s",
        // A test machine's disk may be nearly full.
        "evictionHard": {"memory.available": "20Mi", "nodefs.available": "0%", "imagefs.available": "0%"},
        "imageGCHighThresholdPercent": 100
    });
    Ok(fs::write(directory.join("settings"), settings.to_string())?)
}

fn start_kubelet(
    node: &Node,
    tools: &Path,
    name: &str,
    address: Ipv4Addr,
    taint: Option<&str>,
) -> Result<Program> {
    let directory = node.path("kubelet");
    let mut kubelet = Command::new(tools.join("kubelet"));
    kubelet.arg("--config").arg(directory.join("settings"));
    kubelet.arg("--kubeconfig").arg(directory.join("kubelet.kubeconfig"));
    kubelet.args(["--hostname-override", name, "--node-ip", &address.to_string()]);
    kubelet.args(["--container-runtime", "remote", "--container-runtime-endpoint", RUNTIME]);
    kubelet.args(taint.map(|key| format!("--register-with-taints={key}=:NoSchedule")));
    Program::start(&node.namespace, kubelet, &directory.join("log"))
}

impl Drop for Worker {
    fn drop(&mut self) {
        drop((self.proxy.take(), self.device_plugin.take()));
        self.kubelet.end();
        for file in &self.over {
            let _ = unmount(file, UnmountFlags::DETACH);
        }
        let mut workers = WORKERS.lock().unwrap_or_else(PoisonError::into_inner);
        *workers -= 1;
        if *workers == 0 {
            self.containerd.machine.also_remove(GROUPS);
        }
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
    write_boot_id(directory)?;
    mount_bind(directory.join(BOOT_ID), BOOT_SETTING)?;
    over.push(BOOT_SETTING.into());
    Ok(over)
}

/// Writes the boot id, by which a node knows that it was restarted.
fn write_boot_id(directory: &Path) -> Result<()> {
    // Written in place, as the file is a mount.
    Ok(fs::write(directory.join(BOOT_ID), fs::read("/proc/sys/kernel/random/uuid")?)?)
}
