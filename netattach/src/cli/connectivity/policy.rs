//! The policy part: the two sandboxes are pods of a namespace of their own, which a manifest in the agent's directory has
//! beside a policy that is changed from step to step.
//!
//! A cluster's objects are not this command's to make: there the sandboxes are no pods, and that is said.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{Outcome, Sandbox, exchange};
use crate::agent::Settings;

/// How the manifest's name and the namespace begin; the number of the process follows.
const NAME: &str = "netattachctl-test-";
/// How long a connection that has to fail is tried.
const REFUSED: Duration = Duration::from_millis(500);
/// How long a changed policy may take.
const IN_FORCE: Duration = Duration::from_secs(10);

/// The manifest; it goes with this value.
#[derive(Debug)]
pub(super) struct Manifest {
    file: PathBuf,
    namespace: String,
}

/// What a policy does to pod `b`, and which direction of new connections it stops.
const STEPS: [(&str, Step); 3] = [
    (
        "ingress to b from nobody",
        Step { spec: || json!({"policyTypes": ["Ingress"], "ingress": []}), stops: Some(A_TO_B) },
    ),
    (
        "ingress to b from a",
        Step {
            spec: || {
                let from = json!([{"podSelector": {"matchLabels": {"pod": "a"}}}]);
                json!({"policyTypes": ["Ingress"], "ingress": [{"from": from}]})
            },
            stops: None,
        },
    ),
    (
        "egress from b to nobody",
        Step { spec: || json!({"policyTypes": ["Egress"], "egress": []}), stops: Some(B_TO_A) },
    ),
];

const A_TO_B: &str = "a to b";
const B_TO_A: &str = "b to a";

#[derive(Clone, Copy)]
struct Step {
    spec: fn() -> Value,
    stops: Option<&'static str>,
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
        let namespace = format!("{NAME}{}", std::process::id());
        let manifest = Self { file: settings.source.join(format!("{namespace}.yaml")), namespace };
        manifest.put(&[])?;
        manifest.remove_at_a_signal();
        Ok(Some(manifest))
    }

    /// The pod of a sandbox, as a runtime names it.
    pub(super) fn arguments(&self, name: &str) -> String {
        format!("IgnoreUnknown=1;K8S_POD_NAMESPACE={};K8S_POD_NAME={name}", self.namespace)
    }

    /// The outcomes of every step on these networks of both pods.
    pub(super) fn outcomes(
        &self,
        [a, b]: [&Sandbox; 2],
        networks: &[&str],
        timeout: Duration,
    ) -> io::Result<Vec<Outcome>> {
        let mut outcomes = Vec::new();
        for (what, step) in STEPS {
            self.put(&[self.policy(networks, (step.spec)())])?;
            for network in networks {
                for (direction, from, to) in [(A_TO_B, a, b), (B_TO_A, b, a)] {
                    let Some(address) = to.addresses.get(*network).and_then(|it| it.first()) else {
                        continue;
                    };
                    let expected = if step.stops == Some(direction) { "stopped" } else { "let through" };
                    let tried = if step.stops == Some(direction) {
                        stopped(from, to, *address)
                    } else {
                        exchange(from, to, *address, timeout).map(drop)
                    };
                    let what = format!("policy: {what}: {direction} {expected}");
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
        }
        self.put(&[])?;
        Ok(outcomes)
    }

    fn policy(&self, networks: &[&str], mut spec: Value) -> Value {
        spec["podSelector"] = json!({"matchLabels": {"pod": "b"}});
        json!({
            "apiVersion": "k8s.cni.cncf.io/v1beta1", "kind": "MultiNetworkPolicy",
            "metadata": {
                "namespace": self.namespace, "name": "test",
                "annotations": {"k8s.v1.cni.cncf.io/policy-for": networks.join(",")}
            },
            "spec": spec,
        })
    }

    /// Writes pods and policies, at once.
    fn put(&self, policies: &[Value]) -> io::Result<()> {
        let pod = |name: &str| {
            json!({
                "apiVersion": "v1", "kind": "Pod",
                "metadata": {"namespace": self.namespace, "name": name, "labels": {"pod": name}},
                "spec": {"containers": [{"name": "test", "image": "none"}]}
            })
        };
        let namespace =
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.namespace}});
        let mut objects = vec![namespace, pod("a"), pod("b")];
        objects.extend_from_slice(policies);
        // JSON is YAML.
        let text: Vec<String> = objects.iter().map(|object| format!("{object}\n")).collect();
        // No name of a manifest, until it is whole.
        let unfinished = self.file.with_extension("unfinished");
        fs::write(&unfinished, text.join("---\n"))?;
        fs::rename(&unfinished, &self.file)
    }

    /// A signal ends this process without the values that it holds.
    fn remove_at_a_signal(&self) {
        use tokio::signal::unix::{SignalKind, signal};
        let file = self.file.clone();
        let wait = move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                let (mut interrupt, mut end) =
                    (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
                let number = tokio::select! {
                    _ = interrupt.recv() => 2,
                    _ = end.recv() => 15,
                };
                let _ = fs::remove_file(&file);
                // The sandboxes' namespaces go with this process, and the agent detaches them.
                std::process::exit(128 + number)
            })
        };
        // Without it the next test removes the file.
        std::thread::spawn(move || -> io::Result<()> { wait() });
    }
}

impl Drop for Manifest {
    fn drop(&mut self) {
        // What cannot be removed now is removed by the next test.
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

/// Tries until a new connection fails, for as long as a policy may take.
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
