//! The agent under test: netattach with a directory of manifests or in a cluster, called through the shim as by a
//! runtime.

use std::fs;
use std::io::{self, Read, Write};
use std::mem;
use std::net::{Ipv4Addr, TcpStream};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde_json::{Value, json};

use super::pods::{Node, Pod, make_directory};

/// Namespace of the pods.
pub(super) const NAMESPACE: &str = "bench";
/// Name of the agent in benches that have only one.
pub(super) const NAME: &str = "agent";
/// The name of the bench's node in a cluster.
pub(super) const NODE: &str = "node-1";
/// The default address of an agent's metrics.
const METRICS: &str = "127.0.0.1:10475";
/// The agent loads its programs before it listens.
const START_TIMEOUT: Duration = Duration::from_secs(20);
/// Concurrent requests while many pods are attached.
const ADDERS: usize = 4;
/// An agent that has used this little processor time for this long has finished its work.
const QUIET: Duration = Duration::from_millis(1500);
const NEXT_TO_NOTHING: Duration = Duration::from_millis(20);
/// Time without events after which the agent counts as idle: deferred work is done then. It returns free memory 30 s
/// after the last event at the earliest.
const SETTLING: Duration = Duration::from_secs(35);
/// Time limit for the agent to end after SIGTERM.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// A running agent; stopped, and its pins removed, when dropped.
pub(super) struct Agent {
    process: Child,
    files: Files,
}

/// Calls the agent for one pod, as its runtime.
pub(super) struct Caller {
    config: String,
    name: String,
    uid: String,
    netns: PathBuf,
}

/// The source of an agent's objects.
pub(super) enum Source<'a> {
    /// A directory with these manifests.
    Files(&'a [Value]),
    /// The cluster of this kubeconfig, as its node [`NODE`].
    Cluster(PathBuf),
}

/// The files that an agent is started on.
struct Files {
    config: PathBuf,
    source: PathBuf,
    kubeconfig: Option<PathBuf>,
    run: PathBuf,
    state: PathBuf,
    plugins: PathBuf,
    log: PathBuf,
    bpffs: PathBuf,
}

impl Files {
    /// Starts an agent with this source, with further arguments and a log of its own.
    fn start(&self, more: &[&str]) -> anyhow::Result<Child> {
        // An earlier agent may still write to the previous log.
        let _ = fs::remove_file(&self.log);
        let log = fs::File::create(&self.log).context("create the agent's log")?;
        let mut command = Command::new(super::dist().join("netattachd"));
        // SAFETY: between fork and exec only prctl(2) is called, which is safe there.
        unsafe { command.pre_exec(end_with_parent) };
        match &self.kubeconfig {
            Some(kubeconfig) => command.arg("--kubeconfig").arg(kubeconfig).args(["--node-name", NODE]),
            None => command.arg("--source").arg(&self.source),
        };
        command
            // One timing line for each request.
            .env("NETATTACH_LOG", "info,netattach::timing=debug")
            .arg("--config")
            .arg(&self.config)
            .arg("--run-dir")
            .arg(&self.run)
            .arg("--state-dir")
            .arg(&self.state)
            .arg("--bpffs")
            .arg(&self.bpffs)
            .args(["--default-network", "kube-system/default", "--cni-bin-dir"])
            .arg(super::reference_plugins())
            .arg("--cni-bin-dir")
            .arg(&self.plugins)
            .args(more)
            .stdin(Stdio::null())
            .stdout(log.try_clone().context("share the agent's log")?)
            .stderr(log)
            .spawn()
            .context("start netattachd")
    }

    fn socket(&self) -> PathBuf {
        self.run.join("netattach.sock")
    }

    /// Waits until an agent that was started does something.
    fn until(&self, process: &mut Child, what: &str, does: impl Fn() -> bool) -> anyhow::Result<()> {
        let deadline = Instant::now() + super::stretched(START_TIMEOUT);
        let mut poll = || {
            while !does() {
                if let Some(status) = process.try_wait().context("poll netattachd")? {
                    bail!("netattachd ended before it could {what} ({status})");
                }
                if Instant::now() > deadline {
                    bail!("netattachd does not {what} after {} s", super::stretched(START_TIMEOUT).as_secs());
                }
                // There is no event to wait for.
                thread::sleep(Duration::from_millis(1));
            }
            Ok(())
        };
        poll().map_err(|error: anyhow::Error| {
            let log = fs::read_to_string(&self.log).unwrap_or_default();
            error.context(format!("netattachd's log:\n{}", log.trim_end()))
        })
    }
}

/// Sends SIGTERM to an agent. Returns whether it has ended in time.
fn ends(process: &mut Child) -> bool {
    if let Some(pid) = rustix::process::Pid::from_raw(process.id().cast_signed()) {
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
    }
    let deadline = Instant::now() + super::stretched(STOP_TIMEOUT);
    while matches!(process.try_wait(), Ok(None)) {
        if Instant::now() > deadline {
            return false;
        }
        thread::sleep(Duration::from_millis(10));
    }
    true
}

impl Agent {
    /// Starts an agent that reads these objects, and waits until it listens. The cluster-wide network is
    /// `kube-system/default`.
    pub(super) fn start(node: &Node, objects: &[Value]) -> anyhow::Result<Self> {
        Self::start_as(node, NAME, objects, &json!({}))
    }

    /// [`Agent::start`] in a cluster.
    #[cfg_attr(not(feature = "cluster"), expect(dead_code, reason = "only a cluster's bench needs it"))]
    pub(super) fn start_in(node: &Node, kubeconfig: PathBuf) -> anyhow::Result<Self> {
        Self::start_on(node, NAME, Source::Cluster(kubeconfig), &json!({}))
    }

    /// [`Agent::start`] for one of several agents, by name, with additional settings.
    pub(super) fn start_as(
        node: &Node,
        name: &str,
        objects: &[Value],
        settings: &Value,
    ) -> anyhow::Result<Self> {
        Self::start_on(node, name, Source::Files(objects), settings)
    }

    fn start_on(node: &Node, name: &str, objects: Source<'_>, settings: &Value) -> anyhow::Result<Self> {
        let own = make_directory(&node.scratch().join(name))?;
        let directory = |name: &str| make_directory(&own.join(name));
        let (source, run, state) = (directory("source")?, directory("run")?, directory("state")?);
        let plugins = directory("plugins")?;
        let config = own.join("config.yaml");
        fs::write(&config, settings.to_string()).context("write the agent's settings")?;
        let (objects, kubeconfig) = match objects {
            Source::Files(objects) => (objects, None),
            Source::Cluster(kubeconfig) => (&[][..], Some(kubeconfig)),
        };
        // JSON is YAML.
        for (number, object) in objects.iter().enumerate() {
            fs::write(source.join(format!("{number:04}.yaml")), format!("{object}\n"))
                .context("write a manifest")?;
        }
        let (log, bpffs) = (own.join("agent.log"), pins(name));
        let files = Files { config, source, kubeconfig, run, state, plugins, log, bpffs };
        let process = files.start(&[])?;
        let mut agent = Self { process, files };
        agent.wait_until_it_listens()?;
        Ok(agent)
    }

    /// Kills the agent and restarts it with its previous state. Returns the time from its start to its first answer.
    pub(super) fn restart(&mut self) -> anyhow::Result<Duration> {
        let began = self.start_again()?;
        self.ask(&["status"])?;
        Ok(began.elapsed())
    }

    /// Kills the agent and restarts it with its previous state, until it listens. Returns the time of its start.
    pub(super) fn start_again(&mut self) -> anyhow::Result<Instant> {
        self.process.kill().context("kill netattachd")?;
        self.process.wait().context("wait for netattachd")?;
        let began = Instant::now();
        self.process = self.files.start(&[])?;
        // The socket exists at once, and is answered when the agent is ready.
        self.wait_until_it_listens()?;
        Ok(began)
    }

    /// Starts the next agent, which stands by while this one serves, and waits until it does.
    pub(super) fn stand_by(&self) -> anyhow::Result<Child> {
        let mut next = self.files.start(&["--stand-by=300"])?;
        let stands_by = || self.log().is_ok_and(|log| log.contains(" standing by until "));
        self.files.until(&mut next, "stand by", stands_by)?;
        Ok(next)
    }

    /// Ends the agent, and waits until the next one, which stands by, answers instead.
    pub(super) fn hand_over(&mut self, next: Child) -> anyhow::Result<()> {
        let mut before = mem::replace(&mut self.process, next);
        ensure!(
            ends(&mut before),
            "netattachd does not end after {} s",
            super::stretched(STOP_TIMEOUT).as_secs()
        );
        self.wait_until_it_listens()?;
        self.ask(&["status"]).map(drop)
    }

    /// Compares the number of its attachments.
    pub(super) fn has_attachments(&self, expected: u16) -> anyhow::Result<()> {
        let found = self.ask(&["attachments"])?.as_array().map_or(0, Vec::len);
        ensure!(found == usize::from(expected), "{found} of {expected} attachments are left");
        Ok(())
    }

    fn wait_until_it_listens(&mut self) -> anyhow::Result<()> {
        let Self { process, files } = self;
        files.until(process, "listen", || UnixStream::connect(files.socket()).is_ok())
    }

    /// Makes one CNI call for a pod.
    pub(super) fn call(&self, verb: &str, pod: &Pod, container: &str) -> anyhow::Result<()> {
        self.caller(pod).call(verb, container)
    }

    /// A request that needs no agent: the executable answers it itself.
    pub(super) fn version(&self) -> anyhow::Result<()> {
        // It does not read its standard input, and may have ended before anything is written there.
        let caller =
            Caller { config: String::new(), name: String::new(), uid: String::new(), netns: PathBuf::new() };
        caller.call("VERSION", "none")
    }

    /// The agent's log so far.
    pub(super) fn log(&self) -> anyhow::Result<String> {
        fs::read_to_string(&self.files.log).context("read the agent's log")
    }

    /// A handle that calls the agent for a pod, from any thread.
    pub(super) fn caller(&self, pod: &Pod) -> Caller {
        self.caller_with(pod, &json!({}))
    }

    /// [`Agent::caller`] with the runtime's `runtimeConfig`.
    pub(super) fn caller_with(&self, pod: &Pod, runtime_config: &Value) -> Caller {
        let config = json!({
            "cniVersion": "1.0.0", "name": "bench", "type": "netattach",
            "socket": self.files.socket(), "stateDir": self.files.state, "runtimeConfig": runtime_config,
        });
        Caller { config: config.to_string(), name: pod_name(pod), uid: uid(pod), netns: pod.path() }
    }

    /// The agent's own plugin directory.
    pub(super) fn plugins(&self) -> &Path {
        &self.files.plugins
    }

    /// ADD for many pods, several at the same time.
    pub(super) fn attach_all(&self, pods: &[Pod]) -> anyhow::Result<()> {
        thread::scope(|scope| {
            let attach = |part: usize| {
                let mut some = pods.iter().skip(part).step_by(ADDERS);
                some.try_for_each(|pod| self.call("ADD", pod, &pod.new_container()))
            };
            let parts: Vec<_> = (0..ADDERS).map(|part| scope.spawn(move || attach(part))).collect();
            parts.into_iter().try_for_each(|part| {
                part.join().map_err(|_| anyhow::anyhow!("a thread that attaches panicked"))?
            })
        })
    }

    /// Waits until that many attachments are on the fast path: they join it shortly after their ADD.
    pub(super) fn wait_for_fast_path(&self, wanted: usize) -> anyhow::Result<()> {
        self.wait_for(wanted, "attachments", || {
            let states = self.ask(&["attachments"])?;
            let states = states.as_array().into_iter().flatten().map(|row| row["fast_path"]["state"].clone());
            Ok(states.collect())
        })
    }

    /// Waits until that many uplinks are on the fast path.
    pub(super) fn wait_for_uplinks(&self, wanted: usize) -> anyhow::Result<()> {
        self.wait_for(wanted, "uplinks", || {
            let status = self.ask(&["status"])?;
            Ok(status["uplinks"].as_array().into_iter().flatten().map(|row| row["state"].clone()).collect())
        })
    }

    fn wait_for(
        &self,
        wanted: usize,
        what: &str,
        states: impl Fn() -> anyhow::Result<Vec<Value>>,
    ) -> anyhow::Result<()> {
        let deadline = Instant::now() + super::stretched(START_TIMEOUT);
        loop {
            let states = states()?;
            if states.iter().filter(|state| **state == "on").count() == wanted {
                return Ok(());
            }
            if Instant::now() > deadline {
                bail!("{wanted} {what} should be on the fast path: {states:?}");
            }
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// The output of netattachctl for these arguments.
    pub(super) fn ask(&self, arguments: &[&str]) -> anyhow::Result<Value> {
        let answer = Command::new(super::dist().join("netattachctl"))
            .args(["-o", "json", "--socket"])
            .arg(self.files.socket())
            .args(arguments)
            .output()
            .context("start netattachctl")?;
        if !answer.status.success() {
            bail!("netattachctl refused: {}", String::from_utf8_lossy(&answer.stderr).trim());
        }
        serde_json::from_slice(&answer.stdout).context("read what netattachctl says")
    }

    /// The directory of its manifests.
    pub(super) fn source(&self) -> &Path {
        &self.files.source
    }

    /// The path of one of its pins, in any version of the layout.
    pub(super) fn pin(&self, name: &str) -> anyhow::Result<PathBuf> {
        let versions = fs::read_dir(&self.files.bpffs).context("list the agent's pins")?;
        let mut paths = versions.filter_map(Result::ok).map(|version| version.path().join(name));
        paths.find(|path| path.exists()).with_context(|| format!("there is no pin {name}"))
    }

    /// Processor time of its threads since it was started, those that have ended included.
    pub(super) fn processor_time(&self) -> anyhow::Result<Duration> {
        let mut clock = 0;
        // SAFETY: the kernel's number for the clock is written to a variable that lives through the call.
        let refused = unsafe { libc::clock_getcpuclockid(self.process_id(), &raw mut clock) };
        if refused != 0 {
            return Err(io::Error::from_raw_os_error(refused)).context("find netattachd's clock");
        }
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the time is written to a variable that lives through the call.
        if unsafe { libc::clock_gettime(clock, &raw mut time) } != 0 {
            return Err(io::Error::last_os_error()).context("read netattachd's clock");
        }
        Ok(Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or_default()))
    }

    /// Waits until the agent is idle: [`SETTLING`] after its last work. Returns whether it became idle within this
    /// time.
    pub(super) fn rest(&self, patience: Duration) -> anyhow::Result<bool> {
        let settled = self.settle(patience)?;
        thread::sleep(SETTLING);
        Ok(settled)
    }

    /// Waits until the agent has used nearly no processor time for a while: its work is done, and memory is returned.
    /// Returns whether that happened within this time.
    pub(super) fn settle(&self, patience: Duration) -> anyhow::Result<bool> {
        let deadline = Instant::now() + patience;
        let (mut used, mut since) = (self.processor_time()?, Instant::now());
        while since.elapsed() < QUIET {
            if Instant::now() > deadline {
                return Ok(false);
            }
            thread::sleep(Duration::from_millis(20));
            let now = self.processor_time()?;
            if now > used + NEXT_TO_NOTHING {
                (used, since) = (now, Instant::now());
            }
        }
        Ok(true)
    }

    /// Its process.
    pub(super) fn process_id(&self) -> libc::pid_t {
        self.process.id().cast_signed()
    }

    /// The first address of one of a pod's interfaces.
    pub(super) fn address_of(&self, pod: &Pod, interface: &str) -> anyhow::Result<Ipv4Addr> {
        let row = self.row_of(pod, interface)?;
        let address = row["addresses"][0].as_str().and_then(|text| text.split('/').next()?.parse().ok());
        address.with_context(|| format!("{interface} of {} has no address", pod_name(pod)))
    }

    /// Returns the agent's row for one of a pod's interfaces.
    pub(super) fn row_of(&self, pod: &Pod, interface: &str) -> anyhow::Result<Value> {
        let (mut rows, name) = (self.ask(&["attachments"])?, pod_name(pod));
        let is_it = |row: &Value| row["pod"]["name"] == *name && row["ifname"] == interface;
        let found = rows.as_array_mut().into_iter().flatten().find(|row| is_it(row)).map(Value::take);
        found.with_context(|| format!("{interface} of {name} is not attached"))
    }

    /// Returns how long a scrape of the agent's metrics takes, from the connection to the last byte.
    pub(super) fn scrape(&self) -> anyhow::Result<Duration> {
        let deadline = Instant::now() + super::stretched(START_TIMEOUT);
        let begun = loop {
            let begun = Instant::now();
            match TcpStream::connect(METRICS) {
                Ok(mut stream) => {
                    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").context("ask for metrics")?;
                    let mut answer = String::new();
                    stream.read_to_string(&mut answer).context("read metrics")?;
                    ensure!(answer.ends_with("# EOF\n"), "no metrics: {answer}");
                    break begun;
                }
                // It binds once the port of the agent before is free.
                Err(error) if Instant::now() > deadline => {
                    return Err(error).context("no metrics are served");
                }
                Err(_) => thread::sleep(Duration::from_millis(10)),
            }
        };
        Ok(begun.elapsed())
    }

    /// Resident memory in KiB.
    pub(super) fn resident_kib(&self) -> Option<u64> {
        self.memory_kib("VmRSS:")
    }

    /// Its own resident memory in KiB: without files, of which its executable is one.
    #[cfg_attr(not(feature = "cluster"), expect(dead_code, reason = "only a cluster's bench needs it"))]
    pub(super) fn own_kib(&self) -> Option<u64> {
        self.memory_kib("RssAnon:")
    }

    /// The most that was ever resident, in KiB.
    #[cfg_attr(not(feature = "cluster"), expect(dead_code, reason = "only a cluster's bench needs it"))]
    pub(super) fn most_resident_kib(&self) -> Option<u64> {
        self.memory_kib("VmHWM:")
    }

    fn memory_kib(&self, name: &str) -> Option<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.process.id())).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().trim_end_matches(" kB").parse().ok()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        ends(&mut self.process);
        // Harmless when it has ended by itself.
        let _ = self.process.kill();
        let _ = self.process.wait();
        // The pins outlive the agent by design; these were made for this run.
        let _ = fs::remove_dir_all(&self.files.bpffs);
    }
}

impl Caller {
    /// Makes one CNI call.
    pub(super) fn call(&self, verb: &str, container: &str) -> anyhow::Result<()> {
        let args = format!(
            "IgnoreUnknown=1;K8S_POD_NAMESPACE={NAMESPACE};K8S_POD_NAME={};K8S_POD_INFRA_CONTAINER_ID={container};K8S_POD_UID={}",
            self.name, self.uid
        );
        let mut child = Command::new(super::dist().join("netattach"))
            .env_clear()
            .env("CNI_COMMAND", verb)
            .env("CNI_CONTAINERID", container)
            .env("CNI_NETNS", &self.netns)
            .env("CNI_IFNAME", "eth0")
            .env("CNI_ARGS", args)
            .env("CNI_PATH", super::reference_plugins())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("start the shim")?;
        if let Some(mut stdin) = child.stdin.take() {
            stdin.write_all(self.config.as_bytes()).context("configure the shim")?;
        }
        let answer = child.wait_with_output().context("wait for the shim")?;
        if !answer.status.success() {
            bail!(
                "the shim refused: {}{}",
                String::from_utf8_lossy(&answer.stdout).trim(),
                String::from_utf8_lossy(&answer.stderr).trim()
            );
        }
        Ok(())
    }
}

/// Makes the agent end with an interrupted benchmark.
fn end_with_parent() -> std::io::Result<()> {
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::TERM))?;
    Ok(())
}

/// The directory in which an agent started by this process pins its maps and programs.
pub(super) fn pins(name: &str) -> PathBuf {
    PathBuf::from(format!("/sys/fs/bpf/netattach-bench-{}-{name}", std::process::id()))
}

/// Name of a pod's manifest.
pub(super) fn pod_name(pod: &Pod) -> String {
    format!("pod-{}", pod.number)
}

/// Uid of a pod's manifest.
fn uid(pod: &Pod) -> String {
    format!("00000000-0000-0000-0000-{:012}", pod.number)
}

/// The manifest of a network.
pub(super) fn network(namespace: &str, name: &str, config: &Value) -> Value {
    json!({
        "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
        "metadata": {"namespace": namespace, "name": name},
        "spec": {"config": config.to_string()},
    })
}

/// The manifests of the namespaces in use.
pub(super) fn namespaces() -> [Value; 2] {
    ["kube-system", NAMESPACE]
        .map(|name| json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}))
}

/// Returns the manifest of a pod whose networks besides the default are `networks`.
pub(super) fn pod(pod: &Pod, networks: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "namespace": NAMESPACE, "name": pod_name(pod), "uid": uid(pod),
            "labels": {"number": pod.number.to_string()},
            "annotations": {"k8s.v1.cni.cncf.io/networks": networks},
        },
        "spec": {"containers": [{"name": "main", "image": "none"}]},
    })
}
