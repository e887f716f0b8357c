//! The policy part: the two sandboxes are pods, one of which is selected by a policy that changes from step
//! to step. A manifest in the agent's directory defines them, in a namespace of their own; in a cluster
//! `cluster` creates them.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::signal::unix::{SignalKind, signal};

use super::{Outcome, Sandbox, exchange};
use crate::settings::Settings;

/// Prefix of the names of objects, and of the manifest; in a manifest the pid of the process follows.
pub(super) const NAME: &str = "netattachctl-test-";
/// How long a connection that must fail is tried.
const REFUSED: Duration = Duration::from_millis(500);
/// How long a changed policy may take.
const IN_FORCE: Duration = Duration::from_secs(10);

/// The label of the pods of a test, whose value is the pod's own.
pub(super) const LABEL: &str = "netattach.dev/test";

/// The pods of the sandboxes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Pods {
    pub(super) namespace: String,
    /// Prefix of the names, followed by `-a` and `-b`. The policy has this name too.
    pub(super) name: String,
}

/// The manifest; removed when this is dropped.
#[derive(Debug)]
pub(super) struct Manifest {
    file: PathBuf,
    pub(super) pods: Pods,
}

/// The effect of each policy on pod `b`: which direction of new connections it stops.
pub(super) const STEPS: [Step; 3] = [
    Step {
        what: "no ingress to b",
        spec: |_| json!({"policyTypes": ["Ingress"], "ingress": []}),
        stops: Some(A_TO_B),
    },
    Step {
        what: "ingress to b from a",
        spec: |a| json!({"policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": a}]}]}),
        stops: None,
    },
    Step {
        what: "no egress from b",
        spec: |_| json!({"policyTypes": ["Egress"], "egress": []}),
        stops: Some(B_TO_A),
    },
];

const A_TO_B: &str = "a to b";
const B_TO_A: &str = "b to a";

/// One policy.
#[derive(Debug, Clone, Copy)]
pub(super) struct Step {
    what: &'static str,
    /// The policy's specification, given a selector of `a`.
    spec: fn(Value) -> Value,
    stops: Option<&'static str>,
}

impl Pods {
    /// The pod of a sandbox, as a runtime names it.
    pub(super) fn arguments(&self, pod: &str) -> String {
        let Self { namespace, name } = self;
        format!("IgnoreUnknown=1;K8S_POD_NAMESPACE={namespace};K8S_POD_NAME={name}-{pod}")
    }

    /// Returns the pods with that specification.
    pub(super) fn objects(&self, spec: &Value) -> [Value; 2] {
        ["a", "b"].map(|pod| {
            let name = format!("{}-{pod}", self.name);
            json!({
                "apiVersion": "v1", "kind": "Pod",
                "metadata": {"namespace": self.namespace, "labels": {LABEL: name}, "name": name},
                "spec": spec
            })
        })
    }

    /// The policy of a step, for these networks.
    pub(super) fn policy(&self, step: Step, networks: &[&str]) -> Value {
        let selector = |pod: &str| json!({"matchLabels": {LABEL: format!("{}-{pod}", self.name)}});
        let mut spec = (step.spec)(selector("a"));
        spec["podSelector"] = selector("b");
        json!({
            "apiVersion": "k8s.cni.cncf.io/v1beta1", "kind": "MultiNetworkPolicy",
            "metadata": {
                "namespace": self.namespace, "name": self.name, "labels": {LABEL: "policy"},
                "annotations": {"k8s.v1.cni.cncf.io/policy-for": networks.join(",")}
            },
            "spec": spec,
        })
    }
}

impl Step {
    /// Returns the results on these networks of both pods, while the policy in force selects `b`.
    pub(super) fn outcomes(
        self,
        [a, b]: [&Sandbox; 2],
        networks: &[&str],
        timeout: Duration,
    ) -> Vec<Outcome> {
        let mut outcomes = Vec::new();
        for network in networks {
            for (direction, from, to) in [(A_TO_B, a, b), (B_TO_A, b, a)] {
                let Some(address) = to.addresses.get(*network).and_then(|it| it.first()) else {
                    continue;
                };
                let is_stopped = self.stops == Some(direction);
                let (expected, tried) = match is_stopped {
                    true => ("stopped", stopped(from, to, *address)),
                    false => ("let through", exchange(from, to, *address, timeout).map(drop)),
                };
                let what = format!("policy: {}: {direction} {expected}", self.what);
                outcomes.push(match tried {
                    Ok(()) => Outcome {
                        network: (*network).to_owned(),
                        what,
                        passed: true,
                        detail: expected.to_owned(),
                    },
                    Err(error) => Outcome::failed(network, &what, error.to_string()),
                });
            }
        }
        outcomes
    }
}

impl Manifest {
    /// Writes the pods. `None`: the agent's objects come from a cluster.
    ///
    /// # Errors
    /// The directory of manifests cannot be written.
    pub(super) fn write(settings: &Settings) -> io::Result<Option<Self>> {
        if settings.kubernetes.enabled {
            return Ok(None);
        }
        remove_left_over(&settings.source);
        let name = format!("{NAME}{}", std::process::id());
        let file = settings.source.join(format!("{name}.yaml"));
        let manifest = Self { file, pods: Pods { namespace: name.clone(), name } };
        manifest.put(&[])?;
        manifest.remove_at_a_signal();
        Ok(Some(manifest))
    }

    /// Returns the results of every step on these networks of both pods.
    pub(super) fn outcomes(
        &self,
        pods: [&Sandbox; 2],
        networks: &[&str],
        timeout: Duration,
    ) -> io::Result<Vec<Outcome>> {
        let mut outcomes = Vec::new();
        for step in STEPS {
            self.put(&[self.pods.policy(step, networks)])?;
            outcomes.extend(step.outcomes(pods, networks, timeout));
        }
        self.put(&[])?;
        Ok(outcomes)
    }

    /// Writes pods and policies atomically.
    fn put(&self, policies: &[Value]) -> io::Result<()> {
        let namespace =
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.pods.namespace}});
        let mut objects = vec![namespace];
        objects.extend(self.pods.objects(&json!({"containers": [{"name": "test", "image": "none"}]})));
        objects.extend_from_slice(policies);
        // JSON is YAML.
        let text: Vec<String> = objects.iter().map(|object| format!("{object}\n")).collect();
        // Not named as a manifest until it is complete.
        let unfinished = self.file.with_extension("unfinished");
        fs::write(&unfinished, text.join("---\n"))?;
        fs::rename(&unfinished, &self.file)
    }

    /// Removes the manifest at a signal, which ends this process without running destructors.
    fn remove_at_a_signal(&self) {
        let file = self.file.clone();
        let wait = move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            let number = runtime.block_on(interrupted())?;
            let _ = fs::remove_file(&file);
            // The sandboxes' namespaces are deleted with this process, and the agent detaches them.
            std::process::exit(128 + number)
        };
        // If the thread cannot be started, the next test removes the file.
        std::thread::spawn(move || -> io::Result<()> { wait() });
    }
}

/// Waits for a signal that ends this process; returns its number.
pub(super) async fn interrupted() -> io::Result<i32> {
    let (mut interrupt, mut end) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    Ok(tokio::select! {
        _ = interrupt.recv() => 2,
        _ = end.recv() => 15,
    })
}

impl Drop for Manifest {
    fn drop(&mut self) {
        // If the file cannot be removed now, the next test removes it.
        let _ = fs::remove_file(&self.file);
    }
}

/// Removes the manifests of tests that were killed.
fn remove_left_over(directory: &Path) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let number =
            name.to_str().and_then(|name| name.strip_prefix(NAME)?.split_once('.')?.0.parse::<u32>().ok());
        if number.is_some_and(|number| !Path::new("/proc").join(number.to_string()).exists()) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Retries until a new connection fails, for as long as a policy may take.
fn stopped(from: &Sandbox, to: &Sandbox, address: std::net::IpAddr) -> io::Result<()> {
    let deadline = Instant::now() + IN_FORCE;
    loop {
        match exchange(from, to, address, REFUSED) {
            Err(_) => return Ok(()),
            Ok(_) if Instant::now() > deadline => return Err(io::Error::other("it was let through")),
            Ok(_) => {}
        }
    }
}
