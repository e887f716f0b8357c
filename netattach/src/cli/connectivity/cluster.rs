//! The test by `kubectl netattach`. `netattachctl` in the agent's pod attaches the sandboxes; this process
//! creates pods and policies with the rights of its user, in the namespace of the agent's pod and with
//! names that begin with `netattachctl-test-`.
//!
//! The pods are assigned to the node and need a volume that does not exist: the kubelet does not start such
//! a pod, and the agent considers it a pod of its node. They are deleted in any case; if this process is
//! killed, by the next test.

use std::io::{self, Write};
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::json;

use super::policy::{LABEL, NAME, Pods, STEPS, interrupted};
use super::{Outcome, Test, render};
use crate::cli::kubectl::{Kept, REMOTE};
use crate::cli::output::Format;
use crate::cli::{CliError, missing, visible};
use crate::error_chain::Chain;
use crate::kube::exec::{AgentPod, Remote, RemoteError};

/// Pods and policies of a test that began so long ago belong to a test that was killed.
const OLD: Duration = Duration::from_secs(3600);

/// The kinds of created objects: their path in the API, their group, and their name.
const KINDS: [(&str, &str, &str); 2] =
    [("/api/v1", "", "pods"), ("/apis/k8s.cni.cncf.io/v1beta1", "k8s.cni.cncf.io", "multi-networkpolicies")];
const POD: usize = 0;
const POLICY: usize = 1;

/// The agent's pod that runs the test, and the connection to it.
struct Asked<'a> {
    test: &'a Test,
    remote: &'a Remote,
    agent: &'a AgentPod,
    socket: &'a Path,
}

impl Test {
    /// As [`Test::run`], in an agent's pod. Returns the exit code.
    ///
    /// # Errors
    /// The test could not begin, or some of its objects may be left.
    pub(in crate::cli) async fn through(
        &self,
        remote: &Remote,
        agent: &AgentPod,
        socket: &Path,
        format: Format,
        out: &mut (impl Write + Send),
    ) -> Result<u8, CliError> {
        let asked = Asked { test: self, remote, agent, socket };
        let mut outcomes = match asked.run(&[]).await? {
            Ok(outcomes) => outcomes,
            Err(code) => return Ok(code),
        };
        // The names of definitions have a namespace.
        let mut networks: Vec<String> =
            outcomes.iter().map(|it| it.network.clone()).filter(|it| it.contains('/')).collect();
        networks.dedup();
        let mut said = None;
        match asked.policies(&networks).await {
            Ok(Ok(of_policies)) => outcomes.extend(of_policies),
            Ok(Err(lacking)) => {
                let (rights, namespace) = (missing::list(lacking), &agent.pod.namespace);
                said =
                    Some(format!("policies: not tested, as you may not {rights} in namespace {namespace}"));
            }
            Err(error) => outcomes.push(Outcome::failed("-", "policy", Chain(&error).to_string())),
        }
        let failed = outcomes.iter().any(|it| !it.passed);
        out.write_all(format.show(&outcomes, |width| render(&outcomes, width))?.as_bytes())?;
        if let Some(said) = said {
            // If standard error fails, there is no other place to report it.
            let _ = writeln!(io::stderr(), "{said}");
        }
        Ok(u8::from(failed))
    }
}

impl Asked<'_> {
    /// Runs the test in the agent's pod with more arguments. Returns its results, or its exit code if it
    /// has printed why there are none.
    async fn run(&self, more: &[String]) -> Result<Result<Vec<Outcome>, u8>, CliError> {
        let Test { network, timeout, config, .. } = self.test;
        let socket = self.socket.display().to_string();
        let mut words = [REMOTE, "--socket", &socket, "--output=json", "test"].map(str::to_owned).to_vec();
        words.push(format!("--timeout={}ms", timeout.as_millis()));
        words.extend(network.iter().map(|name| format!("--network={name}")));
        words.extend(config.iter().map(|path| format!("--config={}", path.display())));
        words.extend_from_slice(more);
        let mut kept = Kept::default();
        let code = self.remote.run(self.agent, &words, &mut kept).await?;
        if let Ok(outcomes) = serde_json::from_slice(&kept.out) {
            return Ok(Ok(outcomes));
        }
        let _ = io::stderr().write_all(visible::lines(&String::from_utf8_lossy(&kept.err)).as_bytes());
        Ok(Err(code.max(1)))
    }

    /// Returns the rights needed by the policy part that the API server denies.
    async fn missing_rights(&self) -> Result<Vec<String>, RemoteError> {
        let mut lacking = Vec::new();
        for (_, group, resource) in KINDS {
            for verb in ["create", "delete", "list"] {
                let asked = json!({
                    "apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
                    "spec": {"resourceAttributes": {
                        "namespace": self.agent.pod.namespace, "verb": verb, "group": group, "resource": resource
                    }}
                });
                let path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";
                let answer = self.remote.request("POST", path, Some(&asked)).await?;
                if answer["status"]["allowed"] != true {
                    lacking.push(format!("{verb} {resource}"));
                }
            }
        }
        Ok(lacking)
    }

    /// Returns the results of the policy part on these networks, or the missing rights. The created objects
    /// are deleted in any case.
    async fn policies(&self, networks: &[String]) -> Result<Result<Vec<Outcome>, Vec<String>>, CliError> {
        if networks.is_empty() {
            return Ok(Ok(Vec::new()));
        }
        let lacking = self.missing_rights().await?;
        if !lacking.is_empty() {
            return Ok(Err(lacking));
        }
        self.remove_left_over().await?;
        let name = format!("{NAME}{}-{}", now().as_secs(), std::process::id());
        let pods = Pods { namespace: self.agent.pod.namespace.clone(), name };
        let done = tokio::select! {
            done = self.steps(&pods, networks) => done,
            number = interrupted() => {
                self.remove(&pods).await?;
                std::process::exit(128 + number?)
            }
        };
        let removed = self.remove(&pods).await;
        let outcomes = done?;
        removed?;
        Ok(Ok(outcomes))
    }

    async fn steps(&self, pods: &Pods, networks: &[String]) -> Result<Vec<Outcome>, CliError> {
        let spec = json!({
            "nodeName": self.agent.node, "automountServiceAccountToken": false,
            "terminationGracePeriodSeconds": 0, "tolerations": [{"operator": "Exists"}],
            "volumes": [{"name": "none", "configMap": {"name": pods.name}}],
            // A kubelet waits for volumes that a container mounts.
            "containers": [
                {"name": "test", "image": "none", "volumeMounts": [{"name": "none", "mountPath": "/none"}]}
            ]
        });
        for pod in pods.objects(&spec) {
            self.remote.request("POST", &self.path(POD, ""), Some(&pod)).await?;
        }
        let networks: Vec<&str> = networks.iter().map(String::as_str).collect();
        let mut outcomes = Vec::new();
        for (number, step) in STEPS.into_iter().enumerate() {
            let policy = pods.policy(step, &networks);
            self.remote.request("POST", &self.path(POLICY, ""), Some(&policy)).await?;
            let more = [format!("--pods={}/{}", pods.namespace, pods.name), format!("--policy={number}")];
            match self.run(&more).await? {
                Ok(tried) => outcomes.extend(tried),
                Err(code) => {
                    outcomes.push(Outcome::failed("-", "policy", format!("the test ended with code {code}")));
                }
            }
            self.remote.request("DELETE", &self.path(POLICY, &pods.name), None).await?;
        }
        Ok(outcomes)
    }

    /// Deletes the objects of a test, some of which may not exist.
    async fn remove(&self, pods: &Pods) -> Result<(), RemoteError> {
        let mut outcome = Ok(());
        for (kind, name) in [(POLICY, ""), (POD, "-a"), (POD, "-b")] {
            let path = self.path(kind, &format!("{}{name}", pods.name));
            match self.remote.request("DELETE", &path, None).await {
                Err(error) if !error.is_not_found() => outcome = Err(error),
                _ => {}
            }
        }
        outcome
    }

    /// Deletes the objects of tests that were killed.
    async fn remove_left_over(&self) -> Result<(), RemoteError> {
        for kind in [POLICY, POD] {
            let path = format!("{}?labelSelector={}", self.path(kind, ""), LABEL.replace('/', "%2F"));
            let listed = self.remote.request("GET", &path, None).await?;
            let names = listed["items"].as_array().into_iter().flatten();
            for name in
                names.filter_map(|it| it["metadata"]["name"].as_str()).filter(|name| is_old(name, now()))
            {
                match self.remote.request("DELETE", &self.path(kind, name), None).await {
                    Err(error) if !error.is_not_found() => return Err(error),
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// The path of an object of that kind, or of the collection.
    fn path(&self, kind: usize, name: &str) -> String {
        let (version, _, resource) = KINDS[kind];
        let path = format!("{version}/namespaces/{}/{resource}", self.agent.pod.namespace);
        if name.is_empty() { path } else { format!("{path}/{name}") }
    }
}

fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Whether an object of that name belongs to a test that must have ended: the name has the second of the test's begin
/// after [`NAME`].
fn is_old(name: &str, now: Duration) -> bool {
    let began = name.strip_prefix(NAME).and_then(|rest| rest.split('-').next()?.parse().ok());
    began.is_some_and(|began| now.saturating_sub(Duration::from_secs(began)) > OLD)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_is_known_by_its_name() {
        let now = Duration::from_secs(1_800_000_000);
        let table = [
            ("netattachctl-test-1799996399-7-a", true),
            ("netattachctl-test-1799996400-7", false),
            ("netattachctl-test-1900000000-7", false),
            ("netattachctl-test-x", false),
            ("cart", false),
        ];
        for (name, expected) in table {
            assert_eq!(is_old(name, now), expected, "{name}");
        }
    }
}
