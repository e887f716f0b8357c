//! A cluster of one node without netattach, and the actions of an operator there: `kubectl apply -k` of a directory
//! of `deploy`, with the archive of `cargo xtask image` on the node.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{Bare, Client, Cluster, Kubectl, Worker};
use crate::node::executable;
use crate::tools;
use crate::traffic::eventually;

/// How long a cluster on a busy machine may take.
const PATIENCE: Duration = Duration::from_secs(120);
/// Between two questions to the API server.
const PAUSE: Duration = Duration::from_millis(100);
/// The agent's socket on the node.
pub const SOCKET: &str = "/run/netattach/netattach.sock";
/// The agent's image, as the manifests name it.
const IMAGE: &str = "localhost/netattach";
/// The tag of the image to upgrade to: the same executables.
pub const NEXT: &str = "next";
/// Addresses for the node's pods, IPv4, if netattach is the only network.
pub const RANGE: &str = "10.244.0.0/16";
/// The name of the node.
pub const NODE: &str = "node-1";

/// The state before netattach is installed.
#[derive(Debug)]
pub struct Before<'a> {
    /// The configuration of a primary network, and the paths of its executables.
    pub primary: Option<(Value, &'a [PathBuf])>,
    /// Whether the node's system mounts a BPF file system.
    pub has_bpffs: bool,
}

/// The cluster.
#[derive(Debug)]
pub struct Site {
    /// The operator's tool.
    pub kubectl: Kubectl,
    /// The node.
    pub worker: Worker,
    /// Everything that the API has.
    pub admin: Client,
    directory: TempDir,
    // After the node that uses it.
    cluster: Cluster,
}

impl Site {
    /// Creates the site; `None` without the programs: the test is reported as skipped.
    ///
    /// # Errors
    /// A part does not start.
    pub fn new(test: &str, before: &Before<'_>) -> Result<Option<Self>> {
        let archive = archive();
        let Some(images) = tools::directory(test, "NETATTACH_IMAGES", &[&archive]) else { return Ok(None) };
        let Some(mut cluster) = Cluster::empty(test)? else { return Ok(None) };
        let Some(kubectl) = cluster.kubectl(test)? else { return Ok(None) };
        cluster.start_controllers()?;
        if before.primary.is_none() {
            cluster.start_ranges(RANGE)?;
        }
        let (configuration, plugins) = before.primary.clone().unzip();
        let setup = Bare {
            images: &[&images.join(archive)],
            has_bpffs: before.has_bpffs,
            plugins: plugins.unwrap_or_default(),
            configuration,
        };
        let Some(mut worker) = Worker::bare(test, &cluster, NODE, &setup)? else { return Ok(None) };
        let version = env!("CARGO_PKG_VERSION");
        worker.containerd().tag_for_pods(&format!("{IMAGE}:{version}"), &format!("{IMAGE}:{NEXT}"))?;
        // Pods of a DaemonSet ask the server by its Service, as everywhere.
        worker.start_proxy(&cluster, RANGE)?;
        let admin = cluster.admin()?;
        let directory = tempfile::Builder::new().prefix("netattach-deploy-").tempdir()?;
        let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy");
        copy(&deploy, &directory.path().join("deploy"))?;
        symlink_plugin(kubectl.home())?;
        let site = Self { kubectl, worker, admin, directory, cluster };
        let registered = || site.get(&format!("/api/v1/nodes/{NODE}"))["kind"] == "Node";
        ensure!(site.eventually(registered), "the node does not register: {}", site.worker.kubelet_said());
        Ok(Some(site))
    }

    /// The cluster itself.
    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// Writes an operator's own kustomization of a directory of manifests, such as `deploy/alone`, with components beside it
    /// and a tag of the image; returns its directory.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn kustomization(&self, base: &str, components: &[&str], tag: Option<&str>) -> Result<PathBuf> {
        let mine = self.directory.path().join("mine");
        fs::create_dir_all(&mine)?;
        let (manifests, _) = base.split_once('/').unwrap_or((base, ""));
        let components: Vec<String> =
            components.iter().map(|name| format!("../{manifests}/components/{name}")).collect();
        let mut own = json!({
            "apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization",
            "resources": [format!("../{base}")], "components": components
        });
        if let Some(tag) = tag {
            own["images"] = json!([{"name": IMAGE, "newTag": tag}]);
        }
        fs::write(mine.join("kustomization.yaml"), own.to_string())?;
        Ok(mine)
    }

    /// The directory that has `deploy` and the operator's own kustomization.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// A copy of a directory of this repository's `deploy`.
    pub fn deploy(&self) -> PathBuf {
        self.directory.path().join("deploy")
    }

    /// [`eventually`] for queries of the API server, which is busy meanwhile.
    pub fn eventually(&self, mut question: impl FnMut() -> bool) -> bool {
        eventually(PATIENCE, || {
            let answer = question();
            if !answer {
                std::thread::sleep(PAUSE);
            }
            answer
        })
    }

    /// Returns an object of the API; null if there is none.
    pub fn get(&self, path: &str) -> Value {
        self.admin.get(path).map_or(Value::Null, |reply| reply.body)
    }

    /// Waits until the DaemonSet's pods are those of its last version, and ready.
    ///
    /// # Errors
    /// They do not become ready; the error has the agent's log.
    pub fn rolled_out(&self) -> Result<()> {
        let mut set = Value::Null;
        let done = self.eventually(|| {
            set = self.get("/apis/apps/v1/namespaces/kube-system/daemonsets/netattach");
            let status = &set["status"];
            status["observedGeneration"] == set["metadata"]["generation"]
                && status["updatedNumberScheduled"] == 1
                && status["numberAvailable"] == 1
                && status["numberUnavailable"].is_null()
        });
        ensure!(done, "the DaemonSet is not rolled out: {:#}\n{}", set["status"], self.told());
        Ok(())
    }

    /// Returns the JSON output of `netattachctl` on the node, whatever its exit code.
    pub fn ctl(&self, words: &[&str]) -> Value {
        let Ok(program) = executable("netattachctl") else { return Value::Null };
        let mut ctl = Command::new(program);
        ctl.args(["--socket", SOCKET]).args(words).args(["-o", "json"]);
        ctl.output().ok().and_then(|output| serde_json::from_slice(&output.stdout).ok()).unwrap_or_default()
    }

    /// Returns the output of the agent's pods and their containers, to investigate a failure.
    pub fn told(&self) -> String {
        let mut text = String::new();
        let pods = self.get("/api/v1/namespaces/kube-system/pods");
        for pod in pods["items"].as_array().into_iter().flatten() {
            let name = pod["metadata"]["name"].as_str().unwrap_or_default();
            text.push_str(&format!("--- {name} {:#}\n", pod["status"]));
            for container in ["bpffs", "install", "agent"] {
                let path = format!(
                    "/api/v1/namespaces/kube-system/pods/{name}/log?container={container}&tailLines=40"
                );
                text.push_str(&format!(
                    "--- {container}: {}\n",
                    self.get(&path).as_str().unwrap_or_default()
                ));
            }
        }
        let events = self.get("/api/v1/namespaces/kube-system/events");
        for event in events["items"].as_array().into_iter().flatten() {
            text.push_str(&format!("{}: {}\n", event["reason"], event["message"]));
        }
        text
    }
}

/// The name of the archive of `cargo xtask image` for this machine, in the directory `NETATTACH_IMAGES`.
pub fn archive() -> String {
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    format!("netattach-{}-{architecture}.oci.tar", env!("CARGO_PKG_VERSION"))
}

/// Creates `netattachctl` under the name by which kubectl finds it.
fn symlink_plugin(home: &Path) -> Result<()> {
    Ok(std::os::unix::fs::symlink(executable("netattachctl")?, home.join("kubectl-netattach"))?)
}

/// Copies a directory with its contents.
///
/// # Errors
/// A file cannot be read or written.
pub fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        match entry.file_type()?.is_dir() {
            true => copy(&entry.path(), &target)?,
            false => drop(fs::copy(entry.path(), target)?),
        }
    }
    Ok(())
}
