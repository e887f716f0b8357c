//! A node whose agent follows the tests' API server.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use netattach_tests::admission::Policies;
use netattach_tests::api_server::{ApiServer, Credential, Options, Request, TOKEN, Verb};
use netattach_tests::manifest::{self, NAMESPACE};
use netattach_tests::traffic::{PATIENCE, eventually};
use netattach_tests::{Call, Node, Outcome, Pod};
use serde_json::{Value, json};

/// The node's name in the cluster.
pub(crate) const NODE: &str = "node-1";
pub(crate) const STATUS: &str = "k8s.v1.cni.cncf.io/network-status";
/// The label that the agent sets with the status.
pub(crate) const LABEL: &str = "netattach.dev/networks";

/// A server and a node; the agent is not started.
pub(crate) struct Rig {
    pub(crate) node: Node,
    pub(crate) server: ApiServer,
}

impl Rig {
    /// A server with the namespace of the pods and the networks `lan-a` and `lan-b`.
    pub(crate) fn new(options: &Options) -> Self {
        let mut node = Node::new(&[]).unwrap();
        node.namespace.loopback_up().unwrap();
        let server = ApiServer::start_in(options, &node.namespace).unwrap();
        server.admit_by(Policies::of_deploy().unwrap(), agent(NODE));
        server.create(&manifest::namespace(NAMESPACE, &json!({}))).unwrap();
        for (name, bridge, subnet) in [("lan-a", "br1", "10.61.0.0/24"), ("lan-b", "br2", "10.62.0.0/24")] {
            let config = json!({
                "cniVersion": "1.0.0", "type": "bridge", "bridge": bridge, "ipam": node.host_local(&[subnet])
            });
            server.create(&manifest::network(NAMESPACE, name, &config)).unwrap();
        }
        let kubeconfig = server.kubeconfig(&node.path("kubeconfig"), &Credential::Token(TOKEN)).unwrap();
        node.join(kubeconfig, NODE).unwrap();
        Self { node, server }
    }

    /// A rig with an agent that follows everything.
    pub(crate) fn started() -> Self {
        let mut rig = Self::new(&Options::default());
        rig.start();
        rig
    }

    /// Returns a rig with an agent that knows the pod, and whose token the server no longer accepts: it accepts
    /// `renewed`. Also returns the token's file.
    pub(crate) fn with_an_expired_token() -> (Self, PathBuf, Pod) {
        let mut rig = Self::new(&Options::default());
        let token = rig.node.path("token");
        fs::write(&token, TOKEN).unwrap();
        rig.server.kubeconfig(&rig.node.path("kubeconfig"), &Credential::TokenFile(&token)).unwrap();
        rig.start();
        rig.settle("first");
        let known = rig.pod("known");
        rig.settle("second");
        rig.server.accept_tokens(&["renewed"]);
        rig.server.reset_connections();
        (rig, token, known)
    }

    /// Starts the agent, and waits until it follows everything.
    pub(crate) fn start(&mut self) {
        let mark = self.server.mark();
        self.node.start().unwrap();
        for resource in ["pods", "namespaces", "network-attachment-definitions", "multi-networkpolicies"] {
            self.await_watch(mark, resource);
        }
    }

    /// Waits for a watch of a resource after a mark.
    pub(crate) fn await_watch(&self, mark: usize, resource: &str) {
        let watches =
            |one: &Request| one.verb == Verb::Watch && one.resource == resource && one.answer == Some(200);
        assert!(
            self.server.wait_for(mark, |requests| requests.iter().any(watches)),
            "{resource} are not watched: {:#?}",
            seen(&self.server.requests_since(mark))
        );
    }

    /// Creates a pod of this node, with both networks, on the server; returns its sandbox.
    pub(crate) fn pod(&self, name: &str) -> Pod {
        self.server.create(&object(name, NODE)).unwrap();
        Pod::new(name).unwrap()
    }

    /// A call for a pod with its uid, as containerd makes it.
    pub(crate) fn call(&self, verb: &str, pod: &Pod) -> Call {
        self.call_by_uid(verb, pod, &format!("uid-{}", pod.name))
    }

    pub(crate) fn call_by_uid(&self, verb: &str, pod: &Pod, uid: &str) -> Call {
        let args = format!(
            "IgnoreUnknown=1;K8S_POD_NAMESPACE={NAMESPACE};K8S_POD_NAME={};K8S_POD_INFRA_CONTAINER_ID={};K8S_POD_UID={uid}",
            pod.name, pod.container
        );
        self.node.call(verb, pod).with("CNI_ARGS", &args)
    }

    /// The names of the conditions of `netattachctl status` that do not hold.
    pub(crate) fn unmet(&self) -> Vec<String> {
        let status = self.node.whole_status().unwrap();
        let unmet = status["ready"].as_array().unwrap().iter().filter(|it| it["met"] == false);
        unmet.map(|it| it["condition"].as_str().unwrap().to_owned()).collect()
    }

    /// Sends STATUS, like a runtime without a pod.
    pub(crate) fn status(&self) -> Outcome {
        let env = [("CNI_COMMAND", "STATUS"), ("CNI_PATH", "/nonexistent/cni-bin")];
        let env = env.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        Call { env, stdin: self.node.cni_config("1.1.0").to_string() }.run()
    }

    pub(crate) fn add(&self, pod: &Pod) -> Outcome {
        self.call("ADD", pod).run()
    }

    pub(crate) fn del(&self, pod: &Pod) -> Outcome {
        self.call("DEL", pod).run()
    }

    /// Waits until a pod's status is on the server; returns it.
    pub(crate) fn published(&self, name: &str) -> Value {
        let mut metadata = Value::Null;
        let found = eventually(PATIENCE, || {
            metadata = self.server.get("pods", NAMESPACE, name).unwrap()["metadata"].take();
            metadata["annotations"][STATUS].is_string() && metadata["labels"].get(LABEL).is_some()
        });
        assert!(found, "{metadata:#}");
        serde_json::from_str(metadata["annotations"][STATUS].as_str().unwrap()).unwrap()
    }

    /// Attaches a new pod and waits for its status: earlier events of the server and writes of the agent are done
    /// then.
    pub(crate) fn settle(&self, name: &str) {
        let pod = self.pod(name);
        self.add(&pod).success();
        self.published(name);
    }

    /// The writes for a pod after a mark: the codes that they were answered with.
    pub(crate) fn writes(&self, mark: usize, name: &str) -> Vec<Option<u16>> {
        let requests = self.server.requests_since(mark);
        let of_pod = |one: &&Request| one.verb == Verb::Patch && one.name.as_deref() == Some(name);
        requests.iter().filter(of_pod).map(|one| one.answer).collect()
    }

    /// Returns the problem of an object in `netattachctl status`.
    pub(crate) fn trouble(&self, object: &str) -> Option<String> {
        let status = self.node.whole_status().unwrap();
        let row = status["troubles"].as_array().unwrap().iter().find(|row| row["object"] == object)?;
        Some(row["problem"].as_str().unwrap().to_owned())
    }

    /// Waits until `netattachctl status` reports that about an object.
    pub(crate) fn await_trouble(&self, object: &str, patience: Duration, text: &str) {
        let mut said = None;
        assert!(
            eventually(patience, || {
                said = self.trouble(object);
                said.as_ref().is_some_and(|said| said.contains(text))
            }),
            "{object}: {said:?}"
        );
    }
}

/// The user of an agent, in the form that a server passes to its admission policies.
pub(crate) fn agent(node: &str) -> Value {
    json!({
        "username": "system:serviceaccount:kube-system:netattach",
        "groups": ["system:serviceaccounts", "system:serviceaccounts:kube-system", "system:authenticated"],
        "extra": {
            "authentication.kubernetes.io/node-name": [node],
            "authentication.kubernetes.io/pod-name": ["netattach-x7k2p"],
        },
    })
}

/// A pod with both networks on a node.
pub(crate) fn object(name: &str, node: &str) -> Value {
    let mut pod = manifest::pod(name, &json!({}), &json!("lan-a,lan-b"));
    pod["metadata"]["uid"] = json!(format!("uid-{name}"));
    pod["spec"]["nodeName"] = json!(node);
    pod
}

/// Returns the subjects of requests.
pub(crate) fn seen(requests: &[Request]) -> Vec<(Verb, String, Option<u16>)> {
    requests.iter().map(|one| (one.verb, one.subject(), one.answer)).collect()
}

/// Returns the requests that read or write, other than by watches, as verb and subject. Events are tested elsewhere.
pub(crate) fn calls(requests: &[Request]) -> Vec<(Verb, String)> {
    requests
        .iter()
        .filter(|one| one.is_call() && one.resource != "events")
        .map(|one| (one.verb, one.subject()))
        .collect()
}

/// Returns the duration of a call, and its outcome.
pub(crate) fn timed(call: &Call) -> (Duration, Outcome) {
    let begin = Instant::now();
    let outcome = call.run();
    (begin.elapsed(), outcome)
}
