//! The agent's own network on a real node: the runtime's configuration is the agent's, Services are kube-proxy's, and
//! the runtime passes `hostPort`.

use std::collections::BTreeMap;
use std::fs;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::path::Path;

use ipnet::IpNet;
use netattach_tests::Namespace;
use netattach_tests::cluster::{Loss, Setup};
use netattach_tests::machine::CONFIGURATIONS;
use netattach_tests::traffic::{Echo, SILENCE, connects, eventually};
use serde_json::{Value, json};

use crate::rig::{PATIENCE, PODS, Rig, busybox, is_ready};

const RANGE: &str = "10.244.0.0/16";
/// Default directory of leases.
const LEASES: &str = "/var/lib/cni/networks/builtin";
const BEHIND: u16 = 5432;
const HOST_PORT: u16 = 8443;
/// The API server, which has no way back to pods: they reach it by their node's address.
const SERVER: ([u8; 4], u16) = ([172, 30, 0, 1], 6443);

/// A pod, and a server in it.
struct Served {
    address: SocketAddr,
    namespace: Namespace,
    _echo: Echo,
}

impl Rig {
    /// The pods of these Deployments, once they are ready, with servers in them.
    #[track_caller]
    fn served(&self, replicas: &[(&str, usize)]) -> BTreeMap<String, Vec<Served>> {
        let expected: BTreeMap<&str, usize> = replicas.iter().copied().collect();
        let mut pods = Vec::new();
        let ready = eventually(PATIENCE, || {
            pods = self.get(PODS)["items"].as_array().cloned().unwrap_or_default();
            let mut of_app: BTreeMap<&str, usize> = BTreeMap::new();
            for pod in pods.iter().filter(|pod| is_ready(pod)) {
                *of_app.entry(pod["metadata"]["labels"]["app"].as_str().unwrap_or_default()).or_default() +=
                    1;
            }
            of_app == expected && pods.len() == expected.values().sum::<usize>() && self.are_attached(&pods)
        });
        assert!(ready, "{pods:#?}\n{:#}", self.get("/api/v1/namespaces/default/events"));
        let range = self.get("/api/v1/nodes/alone")["spec"]["podCIDR"].clone();
        let range: IpNet = range.as_str().unwrap().parse().unwrap();
        let mut served: BTreeMap<String, Vec<Served>> = BTreeMap::new();
        for pod in &pods {
            let ip: IpAddr = pod["status"]["podIP"].as_str().unwrap().parse().unwrap();
            assert!(range.contains(&ip), "{ip} of {range}");
            let address = SocketAddr::new(ip, BEHIND);
            let namespace = self.worker.namespace_of(pod["metadata"]["name"].as_str().unwrap()).unwrap();
            let echo = Echo::serve(&namespace, address).unwrap();
            let app = pod["metadata"]["labels"]["app"].as_str().unwrap().to_owned();
            served.entry(app).or_default().push(Served { address, namespace, _echo: echo });
        }
        served
    }

    /// Whether the addresses of the pods are those that the agent assigned: after a start of the node, the API has
    /// the previous ones for a while.
    fn are_attached(&self, pods: &[Value]) -> bool {
        let Ok(rows) = self.worker.node().ctl(&["attachments"]) else { return false };
        let rows = rows.as_array().cloned().unwrap_or_default();
        let has_address = |pod: &Value| {
            let of_pod = |row: &&Value| row["pod"]["name"] == pod["metadata"]["name"];
            rows.iter().filter(of_pod).any(|row| {
                let net = row["addresses"][0].as_str().unwrap_or_default();
                row["state"] == "attached" && net.split('/').next() == pod["status"]["podIP"].as_str()
            })
        };
        rows.len() == pods.len() && pods.iter().all(has_address)
    }

    /// Asserts that every way to the pods is open.
    #[track_caller]
    fn assert_all_is_reached(&self, served: &BTreeMap<String, Vec<Served>>, service: SocketAddr) {
        let client = &served["client"][0].namespace;
        let (outside, node) = (self.cluster.outside(), &self.worker.node().namespace);
        let port = SocketAddr::new(self.worker.address().into(), HOST_PORT);
        let mut ways = vec![
            ("a Service from a pod", client, service),
            ("a Service from a pod behind it", &served["web"][0].namespace, service),
            ("a Service from the node", node, service),
            ("a port of the node from outside", outside, port),
            ("a port of the node from a pod", client, port),
            ("a port of the node from the node", node, port),
        ];
        ways.extend(served["web"].iter().map(|pod| ("another pod", client, pod.address)));
        let mut closed = Vec::new();
        let are_open = eventually(PATIENCE, || {
            let is_closed = |(_, from, to): &&(&str, &Namespace, SocketAddr)| !connects(from, *to, SILENCE);
            closed = ways.iter().filter(is_closed).map(|(way, _, to)| format!("{way}: {to}")).collect();
            closed.is_empty()
        });
        assert!(are_open, "{closed:#?}\n{:#}\n{}", self.status(), self.worker.proxy_said());
        let outside = client.run(|| TcpStream::connect_timeout(&SERVER.into(), PATIENCE));
        assert!(outside.is_ok(), "what is not in the cluster: {outside:?}");
    }
}

/// Without `br_netfilter`, packets between ports of a bridge bypass the translation of Services.
fn mode() -> &'static str {
    if Path::new("/proc/sys/net/bridge").exists() { "bridge" } else { "routed" }
}

#[test]
fn a_cluster_without_any_other_network_serves_its_pods() {
    let settings = [
        ("defaultNetwork", json!("builtin")),
        ("builtin", json!({"mode": mode(), "hairpin": true})),
        ("cniConf", json!({"dir": CONFIGURATIONS})),
    ];
    let setup = Setup { settings: &settings, ..Setup::default() };
    let Some(mut rig) = Rig::bare("alone", &setup, Some(RANGE)) else { return };
    rig.worker.start_proxy(&rig.cluster, RANGE).unwrap();
    let service = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"namespace": "default", "name": "web"},
        "spec": {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": BEHIND}]}
    });
    let service = rig.admin.create(&service).unwrap();
    let service = SocketAddr::new(service["spec"]["clusterIP"].as_str().unwrap().parse().unwrap(), 80);
    let mut open = busybox(&json!({}));
    open["containers"][0]["ports"] = json!([{"containerPort": BEHIND, "hostPort": HOST_PORT}]);
    let all = [("client", 1), ("edge", 1), ("web", 2)];
    for (name, replicas) in all {
        let spec = if name == "edge" { open.clone() } else { busybox(&json!({})) };
        rig.deploy_pods(name, replicas, &json!({}), &spec);
    }
    let served = rig.served(&all);
    rig.assert_all_is_reached(&served, service);

    // No other component enforces policies here.
    let policy = json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": {"namespace": "default", "name": "web"},
        "spec": {"podSelector": {"matchLabels": {"app": "web"}}, "policyTypes": ["Ingress"]}
    });
    rig.admin.create(&policy).unwrap();
    let client = &served["client"][0].namespace;
    for to in [service, served["web"][0].address] {
        assert!(eventually(PATIENCE, || !connects(client, to, SILENCE)), "{to}");
    }
    rig.admin.delete("/apis/networking.k8s.io/v1/namespaces/default/networkpolicies/web").unwrap();
    rig.worker.node_mut().kill().unwrap();
    rig.worker.node_mut().start().unwrap();
    rig.assert_all_is_reached(&served, service);
    drop(served);

    rig.worker.reboot(&rig.cluster, Loss::Memory).unwrap();
    rig.assert_all_is_reached(&rig.served(&all), service);

    for (name, _) in all {
        rig.delete_deployment(name);
    }
    rig.assert_nothing_is_left();
    let leases = fs::read_dir(LEASES).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let leases: Vec<String> = leases.filter(|name| name.parse::<IpAddr>().is_ok()).collect();
    assert_eq!(leases, Vec::<String>::new());
    let port = SocketAddr::new(rig.worker.address().into(), HOST_PORT);
    assert!(!connects(rig.cluster.outside(), port, SILENCE), "the port of a pod that is gone");
}
