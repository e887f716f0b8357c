//! Agents of two nodes of a real cluster: their pods, what they publish, and policies between them.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use netattach::kube::ATTACHED_LABEL;
use netattach_tests::cluster::{Client, Cluster};
use netattach_tests::traffic::{Echo, PATIENCE, SILENCE, connects, eventually};
use netattach_tests::{Node, Outcome, Pod};
use serde_json::{Value, json};

const STATUS: &str = "k8s.v1.cni.cncf.io/network-status";
const NETWORKS: &str = "k8s.v1.cni.cncf.io/networks";
const POLICY_FOR: &str = "k8s.v1.cni.cncf.io/policy-for";

/// Rigs so far. The nodes of all of them are on one segment, so that each has a subnet of its own: of two pods with one
/// address either may answer, and whom a client has found it goes on asking for up to a minute, also when that pod is gone.
static RIGS: AtomicU8 = AtomicU8::new(0);

/// Two nodes, each with an agent and a link to the same segment.
struct Rig {
    namespace: String,
    number: u8,
    admin: Client,
    nodes: [(String, Node); 2],
    // After the agents that use it.
    _cluster: Arc<Cluster>,
}

/// A pod's sandbox and its object.
struct Attached {
    sandbox: Pod,
    node: usize,
    args: String,
}

impl Rig {
    /// `name` is that of the namespace, and the beginning of those of the nodes.
    fn new(name: &str) -> Option<Self> {
        let cluster = Cluster::shared(name).unwrap()?;
        let admin = cluster.admin().unwrap();
        admin.create(&json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})).unwrap();
        let segment = json!({
            "cniVersion": "1.0.0", "type": "macvlan", "master": "eth0", "mode": "bridge",
            "capabilities": {"ips": true}, "ipam": {"type": "static"}
        });
        let definition = json!({
            "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
            "metadata": {"namespace": name, "name": "segment"}, "spec": {"config": segment.to_string()}
        });
        admin.create(&definition).unwrap();
        let nodes = ["a", "b"].map(|letter| {
            let node_name = format!("{name}-{letter}");
            admin
                .create(&json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node_name}}))
                .unwrap();
            let mut node = Node::new(&[]).unwrap();
            cluster.connect(&node.namespace).unwrap();
            node.join(cluster.agent_config(&node.path("source")).unwrap(), &node_name).unwrap();
            node.start().unwrap();
            (node_name, node)
        });
        let number = RIGS.fetch_add(1, Ordering::Relaxed);
        Some(Self { namespace: name.to_owned(), number, admin, nodes, _cluster: cluster })
    }

    fn path(&self, pod: &str) -> String {
        format!("/api/v1/namespaces/{}/pods/{pod}", self.namespace)
    }

    /// Address of a host on the segment.
    fn at(&self, host: u8) -> IpAddr {
        Ipv4Addr::new(10, 9, self.number, host).into()
    }

    fn object(&self, pod: &str) -> Value {
        self.admin.get(&self.path(pod)).unwrap().expect(200).unwrap()
    }

    /// Creates a pod on a node and attaches it, as a kubelet and its runtime do.
    fn attach(&self, name: &str, node: usize, labels: &Value, host: u8) -> Attached {
        let networks = json!([{"name": "segment", "ips": [format!("{}/24", self.at(host))]}]);
        let object = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "namespace": self.namespace, "name": name, "labels": labels,
                "annotations": {NETWORKS: networks.to_string()}
            },
            "spec": {
                "nodeName": self.nodes[node].0, "containers": [{"name": "main", "image": "example.com/x"}]
            }
        });
        let made = self.admin.create(&object).unwrap();
        let uid = made["metadata"]["uid"].as_str().unwrap();
        let sandbox = Pod::new(name).unwrap();
        let args = format!(
            "IgnoreUnknown=1;K8S_POD_NAMESPACE={};K8S_POD_NAME={name};K8S_POD_INFRA_CONTAINER_ID={};K8S_POD_UID={uid}",
            self.namespace, sandbox.container
        );
        let attached = Attached { sandbox, node, args };
        self.call("ADD", &attached).success();
        attached
    }

    fn call(&self, verb: &str, pod: &Attached) -> Outcome {
        self.nodes[pod.node].1.call(verb, &pod.sandbox).with("CNI_ARGS", &pod.args).run()
    }

    fn relabel(&self, pod: &str, role: &str) {
        let patch = json!({"metadata": {"labels": {"role": role}}});
        self.admin.merge(&self.path(pod), &patch).unwrap().expect(200).unwrap();
    }

    /// Waits until the status of a pod is published; returns it.
    fn published(&self, pod: &str) -> Value {
        let mut status = Value::Null;
        let found = eventually(PATIENCE, || {
            let object = self.object(pod);
            status = object["metadata"]["annotations"][STATUS].clone();
            status.is_string() && object["metadata"]["labels"].get(ATTACHED_LABEL).is_some()
        });
        assert!(found, "{:#}", self.object(pod)["metadata"]);
        serde_json::from_str(status.as_str().unwrap()).unwrap()
    }
}

#[test]
fn the_networks_of_a_pod_are_published_on_its_object() {
    let Some(rig) = Rig::new("published") else { return };
    let pod = rig.attach("web", 0, &json!({}), 1);
    let before = rig.object("web");
    let status = rig.published("web");
    let [default, segment] = status.as_array().unwrap().as_slice() else {
        panic!("two networks: {status:#}")
    };
    assert_eq!(
        (
            &default["interface"],
            &default["default"],
            &segment["name"],
            &segment["interface"],
            &segment["ips"]
        ),
        (&json!("eth0"), &json!(true), &json!("published/segment"), &json!("net1"), &json!([rig.at(1)]))
    );
    let after = rig.object("web");
    assert_eq!((&after["spec"], &after["status"]), (&before["spec"], &before["status"]));
    rig.call("DEL", &pod).success();
}

/// A policy of one node selects pods of another one by their labels; their addresses are those that the other agent
/// published.
#[test]
fn a_policy_follows_the_pods_of_another_node() {
    let Some(rig) = Rig::new("across") else { return };
    let server = rig.attach("server", 0, &json!({"app": "db"}), 1);
    let client = rig.attach("client", 1, &json!({"role": "client"}), 2);
    let database = SocketAddr::new(rig.at(1), 5432);
    let _echo = Echo::serve(&server.sandbox.namespace, database).unwrap();
    let from = |pod: &Attached| connects(&pod.sandbox.namespace, database, SILENCE);
    assert!(eventually(PATIENCE, || from(&client)), "before there is a policy");
    let policy = json!({
        "apiVersion": "k8s.cni.cncf.io/v1beta1", "kind": "MultiNetworkPolicy",
        "metadata": {
            "namespace": "across", "name": "db", "annotations": {POLICY_FOR: "across/segment"}
        },
        "spec": {
            "podSelector": {"matchLabels": {"app": "db"}}, "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": {"matchLabels": {"role": "other"}}}]}]
        }
    });
    rig.admin.create(&policy).unwrap();
    assert!(eventually(PATIENCE, || !from(&client)), "isolated");
    rig.relabel("client", "other");
    assert!(eventually(PATIENCE, || from(&client)), "its label allows it");
    rig.relabel("client", "client");
    assert!(eventually(PATIENCE, || !from(&client)), "it has lost the label");

    let next = rig.attach("next", 1, &json!({"role": "other"}), 3);
    assert!(eventually(PATIENCE, || from(&next)), "a pod that starts with the label");
    // The sandbox stays: nothing but the policy may stop it.
    rig.admin.delete(&rig.path("next")).unwrap().expect(200).unwrap();
    assert!(eventually(PATIENCE, || !from(&next)), "its pod is gone");
    for pod in [&server, &client, &next] {
        rig.call("DEL", pod).success();
    }
}
