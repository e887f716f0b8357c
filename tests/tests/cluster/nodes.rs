//! Agents of several nodes of a real cluster: their pods, the statuses that they publish, and policies between them.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use netattach::kube::ATTACHED_LABEL;
use netattach_tests::cluster::{Client, Cluster};
use netattach_tests::node::ip;
use netattach_tests::snapshot::Network;
use netattach_tests::traffic::{Echo, PATIENCE, SILENCE, connects, eventually};
use netattach_tests::{Node, Outcome, Pod};
use serde_json::{Value, json};

const STATUS: &str = "k8s.v1.cni.cncf.io/network-status";
const NETWORKS: &str = "k8s.v1.cni.cncf.io/networks";
const POLICY_FOR: &str = "k8s.v1.cni.cncf.io/policy-for";
/// The port of the services.
const PORT: u16 = 5432;

/// The number of rigs so far. The nodes of all of them are on one segment, so each has a subnet of its own: of two
/// pods with one address either may answer, and a client keeps the one that it has found for up to a minute, even if
/// that pod is deleted.
static RIGS: AtomicU8 = AtomicU8::new(0);

/// Nodes, each with an agent and a link to the same segment.
struct Rig {
    namespace: String,
    number: u8,
    admin: Client,
    nodes: Vec<(String, Node)>,
    // After the agents that use it.
    _cluster: Arc<Cluster>,
}

/// A pod's sandbox and its object.
struct Attached {
    sandbox: Pod,
    node: usize,
    args: String,
    /// The API path of its object.
    path: String,
}

/// An echo in a pod.
struct Service {
    at: SocketAddr,
    _echo: Echo,
}

impl Service {
    fn admits(&self, pod: &Attached) -> bool {
        connects(&pod.sandbox.namespace, self.at, SILENCE)
    }
}

fn create_namespace(admin: &Client, name: &str) {
    admin.create(&json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})).unwrap();
}

fn namespace_path(name: &str) -> String {
    format!("/api/v1/namespaces/{name}")
}

/// A peer: the pods with that role, in the policy's namespace.
fn of_role(role: &str) -> Value {
    json!({"podSelector": {"matchLabels": {"role": role}}})
}

impl Rig {
    /// `name` is the name of the namespace, and the prefix of the names of the nodes, of which there is one for each
    /// letter.
    fn new(name: &str, letters: &[&str]) -> Option<Self> {
        let cluster = Cluster::shared(name).unwrap()?;
        let admin = cluster.admin().unwrap();
        create_namespace(&admin, name);
        let segment = json!({
            "cniVersion": "1.0.0", "type": "macvlan", "master": "eth0", "mode": "bridge",
            "capabilities": {"ips": true}, "ipam": {"type": "static"}
        });
        let definition = json!({
            "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
            "metadata": {"namespace": name, "name": "segment"}, "spec": {"config": segment.to_string()}
        });
        admin.create(&definition).unwrap();
        let start = |letter: &&str| {
            let node_name = format!("{name}-{letter}");
            admin
                .create(&json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node_name}}))
                .unwrap();
            let mut node = Node::new(&[]).unwrap();
            cluster.connect(&node.namespace).unwrap();
            node.join(cluster.agent_config(&node.path("source")).unwrap(), &node_name).unwrap();
            node.start().unwrap();
            let is_ready = || node.log_so_far().contains(" netattach::agent::health::readiness: ready");
            assert!(eventually(PATIENCE, is_ready), "{}", node.log_so_far());
            (node_name, node)
        };
        let nodes = letters.iter().map(start).collect();
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

    /// Creates a pod on a node and attaches it, like a kubelet and its runtime.
    fn attach(&self, name: &str, node: usize, labels: &Value, host: u8) -> Attached {
        self.attach_in(&self.namespace, name, node, labels, host)
    }

    /// The same, in that namespace.
    fn attach_in(&self, namespace: &str, name: &str, node: usize, labels: &Value, host: u8) -> Attached {
        let ips = [format!("{}/24", self.at(host))];
        let networks = json!([{"namespace": self.namespace, "name": "segment", "ips": ips}]);
        let object = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "namespace": namespace, "name": name, "labels": labels,
                "annotations": {NETWORKS: networks.to_string()}
            },
            "spec": {
                "nodeName": self.nodes[node].0, "containers": [{"name": "main", "image": "example.com/x"}]
            }
        });
        let made = self.admin.create(&object).unwrap();
        let uid = made["metadata"]["uid"].as_str().unwrap();
        let mut sandbox = Pod::new(name).unwrap();
        // A later pod of the same name has another sandbox.
        sandbox.container = uid.to_owned();
        let args = format!(
            "IgnoreUnknown=1;K8S_POD_NAMESPACE={namespace};K8S_POD_NAME={name};K8S_POD_INFRA_CONTAINER_ID={};K8S_POD_UID={uid}",
            sandbox.container
        );
        let path = format!("/api/v1/namespaces/{namespace}/pods/{name}");
        let attached = Attached { sandbox, node, args, path };
        self.call("ADD", &attached).success();
        attached
    }

    fn call(&self, verb: &str, pod: &Attached) -> Outcome {
        self.nodes[pod.node].1.call(verb, &pod.sandbox).with("CNI_ARGS", &pod.args).run()
    }

    fn relabel(&self, pod: &Attached, role: &str) {
        self.label(&pod.path, &json!({"role": role}));
    }

    fn label(&self, path: &str, labels: &Value) {
        self.admin.merge(path, &json!({"metadata": {"labels": labels}})).unwrap().expect(200).unwrap();
    }

    /// Deletes the object of a pod. Its sandbox stays: only a policy may stop its traffic.
    fn end(&self, pod: &Attached) {
        self.admin.delete(&pod.path).unwrap().expect(200).unwrap();
    }

    /// A policy for the database on the first node, with these rules.
    fn police(&self, rules: Value) {
        let mut spec = rules;
        spec["podSelector"] = json!({"matchLabels": {"app": "db"}});
        let policy = json!({
            "apiVersion": "k8s.cni.cncf.io/v1beta1", "kind": "MultiNetworkPolicy",
            "metadata": {
                "namespace": self.namespace, "name": "db",
                "annotations": {POLICY_FOR: format!("{}/segment", self.namespace)}
            },
            "spec": spec
        });
        self.admin.create(&policy).unwrap();
    }

    /// Serves in a pod, at its address on the segment.
    fn serve(&self, pod: &Attached, host: u8) -> Service {
        self.serve_at(pod, host, PORT)
    }

    fn serve_at(&self, pod: &Attached, host: u8, port: u16) -> Service {
        let at = SocketAddr::new(self.at(host), port);
        Service { at, _echo: Echo::serve(&pod.sandbox.namespace, at).unwrap() }
    }

    /// Makes a pod send packets for that address to another's link, whichever other host answers for it.
    fn pin_neighbour(&self, of: &Attached, to: &Attached, host: u8) {
        let mac = Network::of(&to.sandbox.namespace).unwrap().links["net1"].mac.unwrap();
        let (address, mac) = (self.at(host).to_string(), mac.to_string());
        let words = ["neighbour", "replace", &address, "lladdr", &mac, "dev", "net1", "nud", "permanent"];
        ip(&of.sandbox.namespace, &words).unwrap();
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
    let Some(rig) = Rig::new("published", &["a"]) else { return };
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
    let Some(rig) = Rig::new("across", &["a", "b"]) else { return };
    let server = rig.attach("server", 0, &json!({"app": "db"}), 1);
    let client = rig.attach("client", 1, &json!({"role": "client"}), 2);
    let database = rig.serve(&server, 1);
    let from = |pod: &Attached| database.admits(pod);
    assert!(eventually(PATIENCE, || from(&client)), "before there is a policy");
    rig.police(json!({"policyTypes": ["Ingress"], "ingress": [{"from": [of_role("other")]}]}));
    assert!(eventually(PATIENCE, || !from(&client)), "isolated");
    rig.relabel(&client, "other");
    assert!(eventually(PATIENCE, || from(&client)), "its label allows it");
    rig.relabel(&client, "client");
    assert!(eventually(PATIENCE, || !from(&client)), "it has lost the label");

    let next = rig.attach("next", 1, &json!({"role": "other"}), 3);
    assert!(eventually(PATIENCE, || from(&next)), "a pod that starts with the label");
    rig.end(&next);
    assert!(eventually(PATIENCE, || !from(&next)), "its pod is gone");
    for pod in [&server, &client, &next] {
        rig.call("DEL", pod).success();
    }
}

/// Rules that select namespaces, and rules of egress, between nodes: the tests `ingress-ns-selector-no-pods` and
/// `simple-v4-egress-list` of Multus' policy agent, and changes of labels.
#[test]
fn a_policy_follows_the_namespaces_of_pods_of_another_node_and_where_packets_go() {
    let Some(rig) = Rig::new("peers", &["a", "b"]) else { return };
    create_namespace(&rig.admin, "peers-elsewhere");
    let elsewhere = namespace_path("peers-elsewhere");
    let server = rig.attach("server", 0, &json!({"app": "db"}), 1);
    let near = rig.attach("near", 1, &json!({"role": "a"}), 2);
    let far = rig.attach_in("peers-elsewhere", "far", 1, &json!({"role": "b"}), 3);
    let database = rig.serve(&server, 1);
    let (at_near, at_far) = (rig.serve(&near, 2), rig.serve(&far, 3));
    // Whether the server is reached from each, and reaches each.
    let verdicts = || {
        let from = [&near, &far].map(|pod| database.admits(pod));
        (from, [&at_near, &at_far].map(|service| service.admits(&server)))
    };
    let expect = |from: [bool; 2], to: [bool; 2], why: &str| {
        let are_so = eventually(PATIENCE, || verdicts() == (from, to));
        assert!(are_so, "{why}: {:?} in place of {:?}", verdicts(), (from, to));
    };
    expect([true; 2], [true; 2], "before there is a policy");
    rig.police(json!({
        "ingress": [{"from": [{"namespaceSelector": {"matchLabels": {"team": "shop"}}}]}],
        "policyTypes": ["Ingress"]
    }));
    expect([false; 2], [true; 2], "a label that no namespace has");
    rig.label(&elsewhere, &json!({"team": "shop"}));
    expect([false, true], [true; 2], "a namespace that was relabelled");
    rig.label(&namespace_path(&rig.namespace), &json!({"team": "shop"}));
    expect([true; 2], [true; 2], "and the policy's own");
    rig.label(&elsewhere, &json!({"team": null}));
    expect([true, false], [true; 2], "a namespace that has lost the label");

    let path = format!("/apis/k8s.cni.cncf.io/v1beta1/namespaces/{}/multi-networkpolicies/db", rig.namespace);
    rig.admin.delete(&path).unwrap().expect(200).unwrap();
    expect([true; 2], [true; 2], "the policy is gone");
    let any = json!({"namespaceSelector": {}, "podSelector": {"matchLabels": {"role": "b"}}});
    rig.police(json!({"policyTypes": ["Egress"], "egress": [{"to": [of_role("c")]}, {"to": [any]}]}));
    expect([true; 2], [false, true], "egress to a pod of another namespace");
    rig.relabel(&near, "c");
    expect([true; 2], [true; 2], "and of its own, by another rule");
    rig.relabel(&far, "c");
    expect([true; 2], [true, false], "a label that the rule means in its own namespace");
    rig.end(&near);
    expect([true; 2], [false; 2], "the pod is gone");
    for pod in [&server, &near, &far] {
        rig.call("DEL", pod).success();
    }
}

/// An address is judged by the pod that has it: by one of the same name that was created again, on any node, and by
/// both if two pods claim it.
#[test]
fn an_address_is_judged_by_who_has_it_now_and_by_all_who_claim_it() {
    let Some(rig) = Rig::new("moves", &["a", "b", "c"]) else { return };
    let server = rig.attach("server", 0, &json!({"app": "db"}), 1);
    let database = rig.serve(&server, 1);
    // Open to the label that a pod begins with: the pod that is let in there is known by its own claim.
    let door_port = PORT + 1;
    let door = rig.serve_at(&server, 1, door_port);
    let rule = |role: &str, port: u16| json!({"from": [of_role(role)], "ports": [{"port": port}]});
    rig.police(
        json!({"policyTypes": ["Ingress"], "ingress": [rule("other", PORT), rule("client", door_port)]}),
    );
    let expect = |pod: &Attached, expected: bool, why: &str| {
        assert!(eventually(PATIENCE, || database.admits(pod) == expected), "{why}");
    };
    let mut before = rig.attach("client", 1, &json!({"role": "other"}), 2);
    expect(&before, true, "its label allows it");
    // To the server's node, back to the first one, and to a third one.
    for node in [0, 1, 2] {
        rig.end(&before);
        expect(&before, false, "its pod is gone");
        rig.call("DEL", &before).success();
        let after = rig.attach("client", node, &json!({"role": "client"}), 2);
        assert!(eventually(PATIENCE, || door.admits(&after)), "by the label that it has");
        assert!(!database.admits(&after), "its namesake's label does not count");
        rig.relabel(&after, "other");
        expect(&after, true, "its own does");
        before = after;
    }

    let client = before;
    let twin = rig.attach("twin", 1, &json!({"role": "client"}), 2);
    // This test is not about which host answers for the address on the link.
    rig.pin_neighbour(&server, &client, 2);
    expect(&client, false, "the other pod with the address may not");
    rig.relabel(&twin, "other");
    expect(&client, true, "both may");
    rig.relabel(&client, "client");
    expect(&client, false, "it may not itself");
    rig.end(&twin);
    rig.relabel(&client, "other");
    expect(&client, true, "it is alone again");
    for pod in [&server, &client, &twin] {
        rig.call("DEL", pod).success();
    }
}
