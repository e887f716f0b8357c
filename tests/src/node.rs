//! A node for one test: a network namespace that the agent runs in, directories, a directory for pins, and a container
//! runtime that calls the real CNI executable.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use netattach::bpf;
use netattach::delegate::end_orphans;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::agent::Agent;
use crate::manifest::{self, NAMESPACE};
use crate::traffic::eventually;
use crate::{Call, Namespace, Outcome};

/// `namespace/name` of every pod's default network.
pub const DEFAULT_NETWORK: &str = "kube-system/default";
/// Attachment numbers of a node are below this, unless a test sets another `maxAttachments`.
pub const MAX_ATTACHMENTS: u32 = 64;

/// A link with carrier on nodes that asked for one ([`Node::add_wire`]): parent of macvlans.
pub const WIRE: &str = "wire0";

/// How agents attach programs unless a test sets it (`attach` of their configuration): the same tests run in both
/// modes.
const ATTACH_VARIABLE: &str = "NETATTACH_ATTACH";

const BPFFS: &str = "/sys/fs/bpf";
/// How long the network-status of an attached pod may take to be written.
const PATIENCE: Duration = Duration::from_secs(60);

static NODES: AtomicU32 = AtomicU32::new(0);

/// A node. Its agent is started by [`Node::start`] and ends with this value, and so do plugins that it has called.
#[derive(Debug)]
pub struct Node {
    /// The node's network namespace.
    pub namespace: Namespace,
    dir: TempDir,
    bpffs: PathBuf,
    settings: serde_json::Map<String, Value>,
    cluster: Option<(Access, String)>,
    group: Option<PathBuf>,
    agent: Option<Agent>,
    /// The agent that stands by.
    next: Option<Agent>,
}

/// The agent's access to its cluster.
#[derive(Debug)]
enum Access {
    Kubeconfig(PathBuf),
    /// By the service account of its pod, with the address of the server that the kubelet sets.
    ServiceAccount(SocketAddr),
}

/// A pod's sandbox as a container runtime creates it: loopback down, nothing else.
#[derive(Debug)]
pub struct Pod {
    /// `CNI_CONTAINERID`.
    pub container: String,
    /// Name in [`NAMESPACE`].
    pub name: String,
    /// Its network namespace.
    pub namespace: Namespace,
}

impl Node {
    /// A node with a default network (a bridge named `br0`, both families) and these manifests. Needs root and
    /// mounts a BPF filesystem where there is none.
    ///
    /// # Errors
    /// The node cannot be made.
    pub fn new(manifests: &[Value]) -> Result<Self> {
        Self::within(Namespace::new()?, manifests)
    }

    /// [`Node::new`] in that namespace.
    ///
    /// # Errors
    /// As [`Node::new`].
    pub fn within(namespace: Namespace, manifests: &[Value]) -> Result<Self> {
        bpf::mount_bpffs(Path::new(BPFFS))?;
        let number = NODES.fetch_add(1, Ordering::Relaxed);
        let node = Self {
            namespace,
            dir: tempfile::Builder::new().prefix("netattach-node-").tempdir()?,
            bpffs: Path::new(BPFFS).join(format!("netattach-test-{}-{number}", std::process::id())),
            settings: serde_json::Map::new(),
            cluster: None,
            group: None,
            agent: None,
            next: None,
        };
        for directory in ["source", "run", "state", "leases", "cni-bin"] {
            fs::create_dir(node.path(directory))?;
        }
        node.write("default", &manifest::network("kube-system", "default", &node.default_config()))?;
        for (index, value) in manifests.iter().enumerate() {
            node.write(&format!("manifest-{index:02}"), value)?;
        }
        Ok(node)
    }

    /// Configuration of the default network.
    pub fn default_config(&self) -> Value {
        json!({
            "cniVersion": "1.0.0", "type": "bridge", "bridge": "br0",
            "isGateway": true, "isDefaultGateway": true,
            "ipam": self.host_local(&["10.50.0.0/24", "fd00:50::/64"])
        })
    }

    /// The `ipam` section for the node's own lease directory.
    pub fn host_local(&self, subnets: &[&str]) -> Value {
        let ranges: Vec<Value> = subnets.iter().map(|subnet| json!([{"subnet": subnet}])).collect();
        json!({"type": "host-local", "dataDir": self.path("leases"), "ranges": ranges})
    }

    /// Gives the node the link [`WIRE`]. Its other end, `wire1`, is in the node's namespace too.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn add_wire(&self) -> Result<()> {
        ip(&self.namespace, &["link", "add", WIRE, "up", "type", "veth", "peer", "name", "wire1"])?;
        ip(&self.namespace, &["link", "set", "wire1", "up"])
    }

    /// Adds a host outside the node, 192.0.2.2 at the other end of [`WIRE`], where the node is 192.0.2.1.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn add_outside(&self) -> Result<Namespace> {
        let outside = Namespace::new()?;
        self.add_wire()?;
        let path = outside.path().to_string_lossy().into_owned();
        ip(&self.namespace, &["link", "set", "wire1", "netns", &path])?;
        ip(&self.namespace, &["addr", "add", "192.0.2.1/24", "dev", WIRE])?;
        ip(&outside, &["addr", "add", "192.0.2.2/24", "dev", "wire1"])?;
        ip(&outside, &["link", "set", "wire1", "up"])?;
        Ok(outside)
    }

    /// Adds or replaces a manifest, atomically.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, file: &str, manifest: &Value) -> Result<()> {
        let temporary = self.path("source.tmp");
        fs::write(&temporary, manifest.to_string())?;
        Ok(fs::rename(temporary, self.path("source").join(format!("{file}.yaml")))?)
    }

    /// Removes a manifest.
    ///
    /// # Errors
    /// The file cannot be removed.
    pub fn remove(&self, file: &str) -> Result<()> {
        Ok(fs::remove_file(self.path("source").join(format!("{file}.yaml")))?)
    }

    /// Makes this node the one of that name in a cluster, which its agent reaches by that configuration: the
    /// manifests of this node are no longer read. The default network is still the node's own.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn join(&mut self, kubeconfig: PathBuf, name: &str) -> Result<()> {
        self.join_by(Access::Kubeconfig(kubeconfig), name)
    }

    /// As [`Node::join`], by the service account whose files are mounted, with that server.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn join_by_service_account(&mut self, server: SocketAddr, name: &str) -> Result<()> {
        self.join_by(Access::ServiceAccount(server), name)
    }

    fn join_by(&mut self, access: Access, name: &str) -> Result<()> {
        let mut default = self.default_config();
        default["name"] = "default".into();
        let path = self.path("default.conf");
        fs::write(&path, default.to_string())?;
        self.set("defaultNetwork", json!(path));
        self.cluster = Some((access, name.to_owned()));
        Ok(())
    }

    /// Changes a key of the agent's configuration file, for its next start.
    pub fn set(&mut self, key: &str, value: Value) {
        self.settings.insert(key.to_owned(), value);
    }

    /// Installs the scripted plugin under a name in the node's plugin directory, with its script; or replaces both at
    /// once.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn plugin(&self, name: &str, script: &Value) -> Result<()> {
        let path = self.path("cni-bin").join(name);
        if !path.exists() {
            symlink(beside_the_test("fake-plugin")?, &path)?;
        }
        let mut script = script.clone();
        script["record"] = json!(self.path("calls"));
        // The plugin may be called meanwhile.
        let temporary = path.with_extension("json.new");
        fs::write(&temporary, script.to_string())?;
        Ok(fs::rename(temporary, path.with_extension("json"))?)
    }

    /// The network-status published for an attached pod.
    ///
    /// # Errors
    /// None is published.
    pub fn status(&self, pod: &Pod) -> Result<Value> {
        let path = self.path("run/network-status").join(NAMESPACE).join(format!("{}.json", pod.name));
        Ok(serde_json::from_slice(&fs::read(path)?)?)
    }

    /// The calls of scripted plugins since the last query, in order.
    ///
    /// # Errors
    /// The record cannot be read.
    pub fn take_calls(&self) -> Result<Vec<Value>> {
        // Renamed before it is read: plugins write further calls to a new file.
        let taken = self.path("calls.taken");
        match fs::rename(self.path("calls"), &taken) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            renamed => renamed?,
        }
        let mut file = File::open(&taken)?;
        // A plugin that opened it before holds the lock until it has written.
        file.lock()?;
        let mut text = String::new();
        file.read_to_string(&mut text)?;
        fs::remove_file(&taken)?;
        text.lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
    }

    /// A path below the node's directory: `source`, `run`, `state`, `leases`, `cni-bin`.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Attachment numbers of this node are below that.
    pub fn max_attachments(&self) -> u32 {
        let set = self.settings.get("maxAttachments").and_then(Value::as_u64);
        set.and_then(|most| u32::try_from(most).ok()).unwrap_or(MAX_ATTACHMENTS)
    }

    /// The directory of the agent's pins.
    pub fn bpffs(&self) -> &Path {
        &self.bpffs
    }

    /// The agent's socket.
    pub fn socket(&self) -> PathBuf {
        self.path("run").join("netattach.sock")
    }

    /// Starts the agent inside the node's namespace and waits until it serves and has finished the work that an
    /// earlier agent left undone.
    ///
    /// # Errors
    /// The agent does not finish; the error has its log.
    pub fn start(&mut self) -> Result<()> {
        self.start_as(&executable("netattachd")?, &[])
    }

    /// Starts another agent executable, with these variables.
    ///
    /// # Errors
    /// As [`Node::start`].
    pub fn start_as(&mut self, executable: &Path, variables: &[(&str, &str)]) -> Result<()> {
        self.start_until(executable, variables, " operations of earlier agents are finished")
    }

    /// Starts the agent, and waits until it serves, but not until it has finished the work that an earlier agent left
    /// undone.
    ///
    /// # Errors
    /// As [`Node::start`].
    pub fn start_serving(&mut self) -> Result<()> {
        self.start_until(&executable("netattachd")?, &[], " serving socket=")
    }

    /// Starts the agent, and waits until its log has a line with that text.
    ///
    /// # Errors
    /// As [`Node::start`].
    pub fn start_until_line(&mut self, executable: &Path, said: &'static str) -> Result<()> {
        self.start_until(executable, &[], said)
    }

    fn start_until(
        &mut self,
        executable: &Path,
        variables: &[(&str, &str)],
        said: &'static str,
    ) -> Result<()> {
        let mut command = self.agent_command(executable)?;
        command.envs(variables.iter().copied());
        if let Some(group) = &self.group {
            let processes = fs::OpenOptions::new().write(true).open(group.join("cgroup.procs"))?;
            // SAFETY: the child makes one system call on a descriptor that it has from this process.
            unsafe {
                command.pre_exec(move || (&processes).write_all(b"0"));
            }
        }
        self.agent = Some(Agent::start(&self.namespace, command, said)?);
        Ok(())
    }

    /// Starts an agent that stands by while this node's serves, and waits until it does.
    ///
    /// # Errors
    /// It does not stand by; the error has its log.
    pub fn stand_by(&mut self) -> Result<()> {
        self.stand_by_as(&executable("netattachd")?)
    }

    /// As [`Node::stand_by`], with another agent executable.
    ///
    /// # Errors
    /// As [`Node::stand_by`].
    pub fn stand_by_as(&mut self, executable: &Path) -> Result<()> {
        let mut command = self.agent_command(executable)?;
        command.arg("--stand-by=300");
        self.next = Some(Agent::start(&self.namespace, command, " standing by until ")?);
        Ok(())
    }

    /// Ends this node's agent, and waits until the one that stands by serves instead; returns the log of the first
    /// one.
    ///
    /// # Errors
    /// The first one cannot be ended in this way, or the next one does not serve.
    pub fn hand_over(&mut self, end: impl FnOnce(&mut Self) -> Result<String>) -> Result<String> {
        let next = self.next.take().context("no agent stands by")?;
        let ended = end(self);
        let serves = eventually(PATIENCE, || next.log_so_far().contains(" serving socket="));
        ensure!(serves, "the next agent does not serve:\n{}", next.log_so_far());
        self.agent = Some(next);
        ended
    }

    /// Sends SIGTERM to the agent that stands by; returns its log, empty without one.
    ///
    /// # Errors
    /// It did not end by itself with success.
    pub fn dismiss(&mut self) -> Result<String> {
        self.next.take().map_or_else(|| Ok(String::new()), Agent::stop)
    }

    /// Agents from now on are started in this control group of version 2.
    pub fn set_group(&mut self, group: &Path) {
        self.group = Some(group.to_owned());
    }

    /// The command that starts an agent on this node, stderr to a pipe.
    ///
    /// # Errors
    /// The configuration file cannot be written.
    pub fn agent_command(&self, executable: &Path) -> Result<Command> {
        let mut settings = self.settings.clone();
        settings.entry("maxAttachments").or_insert(MAX_ATTACHMENTS.into());
        settings.entry("defaultNetwork").or_insert(DEFAULT_NETWORK.into());
        let delegation = settings.entry("delegation").or_insert_with(|| json!({}));
        if let Value::Object(delegation) = delegation {
            delegation.entry("cacheDir").or_insert(json!(self.path("cni-cache")));
        }
        if let Ok(mode) = std::env::var(ATTACH_VARIABLE) {
            settings.entry("attach").or_insert(json!(mode));
        }
        // The node may have no loopback; tests of probes or metrics set an address.
        settings.entry("metrics").or_insert(json!({"listen": ""}));
        settings.entry("deviceInfoDir").or_insert(json!(self.path("devinfo")));
        // The machine may have a kubelet.
        settings.entry("podResourcesSocket").or_insert(json!(self.path("kubelet.sock")));
        settings.entry("deviceCheckpoint").or_insert(json!(self.path("kubelet-checkpoint")));
        let config = self.path("netattachd.yaml");
        fs::write(&config, Value::Object(settings).to_string())?;
        let mut command = Command::new(executable);
        command
            .arg("--config")
            .arg(config)
            .arg("--run-dir")
            .arg(self.path("run"))
            .arg("--state-dir")
            .arg(self.path("state"))
            .arg("--bpffs")
            .arg(&self.bpffs)
            .arg("--cni-bin-dir")
            .arg(self.path("cni-bin"))
            .arg("--cni-conf-dir")
            .arg(self.path("cni-conf"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        match &self.cluster {
            None => command.arg("--source").arg(self.path("source")),
            Some((Access::Kubeconfig(path), name)) => {
                command.arg("--kubeconfig").arg(path).args(["--node-name", name])
            }
            Some((Access::ServiceAccount(server), name)) => command
                .args(["--kubernetes", "--node-name", name])
                .env("KUBERNETES_SERVICE_HOST", server.ip().to_string())
                .env("KUBERNETES_SERVICE_PORT", server.port().to_string()),
        };
        Ok(command)
    }

    /// Kills the agent (`kill -9`); returns its log, empty without an agent.
    ///
    /// # Errors
    /// The agent cannot be killed.
    pub fn kill(&mut self) -> Result<String> {
        self.agent.take().map_or_else(|| Ok(String::new()), Agent::kill)
    }

    /// Simulates a power failure and a restart of the kernel: files on disk stay. The agent, the namespace with its
    /// links, the pins and the directory `run` are gone.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(crate) fn lose_power(&mut self) -> Result<()> {
        self.kill()?;
        for lost in [self.bpffs.clone(), self.path("run")] {
            match fs::remove_dir_all(&lost) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error)?,
                _ => {}
            }
        }
        fs::create_dir(self.path("run"))?;
        self.namespace = Namespace::new()?;
        Ok(())
    }

    /// Sends SIGTERM; returns the agent's log.
    ///
    /// # Errors
    /// The agent did not end by itself with success.
    pub fn stop(&mut self) -> Result<String> {
        self.agent.take().map_or_else(|| Ok(String::new()), Agent::stop)
    }

    /// Returns the log of the agent so far; empty without an agent.
    pub fn log_so_far(&self) -> String {
        self.agent.as_ref().map_or_else(String::new, Agent::log_so_far)
    }

    /// Waits until the agent has ended by itself.
    ///
    /// # Errors
    /// No agent was started, or it still runs.
    pub fn wait_for_end(&mut self) -> Result<(ExitStatus, String)> {
        let agent = self.agent.as_mut().context("no agent was started")?;
        let status = agent.wait_for_end().context("the agent does not end")?;
        Ok((status, self.agent.take().map(Agent::log).unwrap_or_default()))
    }

    /// Process id of the running agent.
    ///
    /// # Panics
    /// No agent runs.
    pub fn agent_pid(&self) -> u32 {
        self.agent.as_ref().expect("the agent runs").pid()
    }

    /// A CNI call as containerd makes it for the pod's `eth0`.
    pub fn call(&self, command: &str, pod: &Pod) -> Call {
        let args = format!(
            "IgnoreUnknown=1;K8S_POD_NAMESPACE={NAMESPACE};K8S_POD_NAME={};K8S_POD_INFRA_CONTAINER_ID={}",
            pod.name, pod.container
        );
        let env = [
            ("CNI_COMMAND", command),
            ("CNI_CONTAINERID", &pod.container),
            ("CNI_NETNS", &pod.namespace.path().to_string_lossy()),
            ("CNI_IFNAME", "eth0"),
            ("CNI_ARGS", &args),
            ("CNI_PATH", "/nonexistent/cni-bin"),
        ];
        let env = env.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        Call { env, stdin: self.cni_config("1.0.0").to_string() }
    }

    /// The configuration of the CNI executable.
    pub fn cni_config(&self, version: &str) -> Value {
        json!({
            "cniVersion": version, "name": "pods", "type": "netattach",
            "socket": self.socket(), "stateDir": self.path("state")
        })
    }

    /// ADD for a pod.
    ///
    /// # Panics
    /// The executable cannot be run.
    pub fn add(&self, pod: &Pod) -> Outcome {
        let outcome = self.call("ADD", pod).run();
        if outcome.exit == 0 {
            self.await_status(pod);
        }
        outcome
    }

    /// Waits until the network-status of an attached pod is published: this happens after the answer to ADD, so that
    /// the runtime does not wait for it.
    ///
    /// # Panics
    /// It is not published in time.
    pub fn await_status(&self, pod: &Pod) {
        let status = self.path("run/network-status").join(NAMESPACE).join(format!("{}.json", pod.name));
        assert!(eventually(PATIENCE, || status.exists()), "{} is not published", status.display());
    }

    /// CHECK for a pod.
    ///
    /// # Panics
    /// The executable cannot be run.
    pub fn check(&self, pod: &Pod) -> Outcome {
        self.call("CHECK", pod).run()
    }

    /// DEL for a pod.
    ///
    /// # Panics
    /// The executable cannot be run.
    pub fn del(&self, pod: &Pod) -> Outcome {
        self.call("DEL", pod).run()
    }

    /// GC of the configuration `name` with the pods in use; `None`: a request without a list.
    ///
    /// # Panics
    /// The executable cannot be run.
    pub fn gc(&self, name: &str, in_use: Option<&[&Pod]>) -> Outcome {
        let mut config = self.cni_config("1.1.0");
        config["name"] = json!(name);
        if let Some(pods) = in_use {
            config["cni.dev/valid-attachments"] =
                pods.iter().map(|pod| json!({"containerID": pod.container, "ifname": "eth0"})).collect();
        }
        let env = [("CNI_COMMAND", "GC"), ("CNI_PATH", "/nonexistent/cni-bin")];
        let env = env.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        Call { env, stdin: config.to_string() }.run()
    }

    /// Returns the output of `netattachctl status`, also of an agent that is not ready.
    ///
    /// # Errors
    /// It prints no status.
    pub fn whole_status(&self) -> Result<Value> {
        let mut command = Command::new(executable("netattachctl")?);
        let output = command.arg("--socket").arg(self.socket()).args(["status", "-o", "json"]).output()?;
        Ok(serde_json::from_slice(&output.stdout)?)
    }

    /// The JSON output of `netattachctl`.
    ///
    /// # Errors
    /// netattachctl fails.
    pub fn ctl(&self, words: &[&str]) -> Result<Value> {
        let output = Command::new(executable("netattachctl")?)
            .arg("--socket")
            .arg(self.socket())
            .args(words)
            .args(["-o", "json"])
            .output()?;
        ensure!(output.status.success(), "netattachctl: {}", String::from_utf8_lossy(&output.stderr));
        Ok(serde_json::from_slice(&output.stdout)?)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Some(next) = self.next.take() {
            let _ = next.kill();
        }
        match self.kill() {
            Ok(log) if std::thread::panicking() && !log.is_empty() => eprintln!("--- agent\n{log}---"),
            // An agent that has ended by itself cannot be ended again.
            _ => {}
        }
        // No later agent ends the plugins that it was waiting for.
        if let Ok(state) = fs::canonicalize(self.path("state")) {
            end_orphans(&state.to_string_lossy());
        }
        // The directory does not exist when no agent was started.
        let _ = fs::remove_dir_all(&self.bpffs);
    }
}

impl Pod {
    /// A new sandbox for the pod of that name.
    ///
    /// # Errors
    /// The namespace cannot be made.
    pub fn new(name: &str) -> Result<Self> {
        Ok(Self { container: format!("c-{name}"), name: name.to_owned(), namespace: Namespace::new()? })
    }
}

/// Runs `ip` in a namespace.
///
/// # Errors
/// `ip` fails.
pub fn ip(namespace: &Namespace, words: &[&str]) -> Result<()> {
    let output = namespace.run(|| Command::new("ip").args(words).output())?;
    ensure!(output.status.success(), "ip {words:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// Returns the path of an executable of netattach: in the directory `NETATTACH_DIST`, or else beside this test.
///
/// # Errors
/// The executable is not built.
pub fn executable(name: &str) -> Result<PathBuf> {
    let built = match std::env::var_os("NETATTACH_DIST") {
        Some(dist) => Path::new(&dist).join(name),
        None => beside_the_test(name)?,
    };
    ensure!(built.is_file(), "{} is not built: cargo build -p netattach", built.display());
    Ok(built)
}

fn beside_the_test(name: &str) -> Result<PathBuf> {
    let test = std::env::current_exe()?;
    Ok(test.ancestors().nth(2).context("tests are built in a directory")?.join(name))
}
