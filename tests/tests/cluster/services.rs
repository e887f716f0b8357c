//! Features of a cluster for its pods besides starting them: Services by kube-proxy, NetworkPolicies, taints, static
//! pods, and commands in containers.

use std::fs;
use std::net::{IpAddr, SocketAddr};

use netattach_tests::Node;
use netattach_tests::cluster::Setup;
use netattach_tests::traffic::{Echo, SILENCE, connects, eventually};
use serde_json::{Value, json};

use crate::rig::{NETWORKS, PATIENCE, PODS, Rig, busybox, published};

const TAINT: &str = "netattach.dev/agent-not-ready";
/// Pods of the default network.
const DEFAULT: &str = "10.50.0.0/24";
const BEHIND: u16 = 5432;
const NODE_PORT: u16 = 30080;

fn routed(node: &Node) -> Value {
    json!({
        "cniVersion": "1.0.0", "type": "veth", "isDefaultGateway": true, "ipam": node.host_local(&[DEFAULT])
    })
}

#[test]
fn what_a_cluster_does_with_its_pods_works() {
    let settings = [
        ("networkPolicy", json!(true)),
        ("kubernetes", json!({"startupTaint": TAINT})),
        // A pod that is older than this limit and listed by the runtime is not collected: the agent queries the real
        // runtime.
        ("collectAfterSeconds", json!(1)),
        ("runtimeSocket", json!("/run/containerd/containerd.sock")),
    ];
    let setup =
        Setup { settings: &settings, default: Some(routed), default_is_late: true, taint: Some(TAINT) };
    let Some(mut rig) = Rig::new("services", &setup) else { return };
    the_startup_taint_goes_when_the_node_is_ready(&rig);
    services_lead_to_pods_whose_policies_hold(&mut rig);
    commands_run_in_containers(&rig);
    static_pods_have_networks(&rig);
    let collected = rig.status();
    assert_eq!(
        (&collected["collected"], &collected["troubles"]),
        (&Value::Null, &json!([])),
        "{collected:#}"
    );
    rig.assert_nothing_is_left();
}

fn the_startup_taint_goes_when_the_node_is_ready(rig: &Rig) {
    rig.pod("web", &json!({"app": "web"}), "storage", &busybox(&json!({})));
    let taints = || rig.get("/api/v1/nodes/services")["spec"]["taints"].to_string();
    let scheduled = || rig.get(&format!("{PODS}/web"))["status"]["conditions"][0].clone();
    let refused = eventually(PATIENCE, || {
        let condition = scheduled();
        condition["type"] == "PodScheduled"
            && condition["status"] == "False"
            && condition["message"].to_string().contains(TAINT)
    });
    assert!(refused, "{:#}", scheduled());
    let status = rig.status();
    let unmet: Vec<_> = status["ready"].as_array().unwrap().iter().filter(|it| it["met"] == false).collect();
    assert!(unmet.len() == 1 && unmet[0]["condition"] == "default network", "{status:#}");
    assert!(taints().contains(TAINT), "{}", taints());
    rig.worker.write_default().unwrap();
    rig.ready("web", 2);
    assert!(!taints().contains(TAINT), "{}", taints());
}

fn services_lead_to_pods_whose_policies_hold(rig: &mut Rig) {
    rig.worker.start_proxy(&rig.cluster, DEFAULT).unwrap();
    let service = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"namespace": "default", "name": "web"},
        "spec": {
            "type": "NodePort", "selector": {"app": "web"},
            "ports": [{"port": 80, "targetPort": BEHIND, "nodePort": NODE_PORT}]
        }
    });
    let service = rig.admin.create(&service).unwrap();
    let cluster_ip: IpAddr = service["spec"]["clusterIP"].as_str().unwrap().parse().unwrap();
    for name in ["friend", "stranger"] {
        rig.pod(name, &json!({"app": name}), "", &busybox(&json!({})));
    }
    let [_, stranger] = ["friend", "stranger"].map(|name| rig.ready(name, 1));
    let web = rig.ready("web", 2);
    let direct =
        |pod: &Value| SocketAddr::new(pod["status"]["podIP"].as_str().unwrap().parse().unwrap(), BEHIND);
    let inside = |name: &str| rig.worker.namespace_of(name).unwrap();
    let [server, friend, other] = ["web", "friend", "stranger"].map(inside);
    let _echo = Echo::serve(&server, direct(&web)).unwrap();
    let by_service = SocketAddr::new(cluster_ip, 80);
    let by_node = SocketAddr::new(rig.worker.address().into(), NODE_PORT);
    let node = &rig.worker.node().namespace;
    let outside = rig.cluster.outside();
    let table = |expected: [bool; 5]| {
        let ways = [
            (&friend, by_service),
            (&other, by_service),
            (&other, by_node),
            (outside, by_node),
            (node, by_service),
        ];
        let mut seen = Vec::new();
        let as_expected = eventually(PATIENCE, || {
            seen = ways.iter().map(|(from, to)| connects(from, *to, SILENCE)).collect();
            seen == expected
        });
        assert!(as_expected, "{seen:?} in place of {expected:?}\n{}", rig.worker.proxy_said());
    };
    table([true; 5]);
    let policy = |from: &Value| {
        json!({
            "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
            "metadata": {"namespace": "default", "name": "web"},
            "spec": {
                "podSelector": {"matchLabels": {"app": "web"}}, "policyTypes": ["Ingress"],
                "ingress": [{"from": from, "ports": [{"protocol": "TCP", "port": BEHIND}]}]
            }
        })
    };
    // An allowed client is known by its own address, whatever the Service makes of it; the node is never blocked.
    let friend_alone = json!([{"podSelector": {"matchLabels": {"app": "friend"}}}]);
    rig.admin.create(&policy(&friend_alone)).unwrap();
    table([true, false, false, false, true]);
    let with_outside =
        json!([{"podSelector": {"matchLabels": {"app": "friend"}}}, {"ipBlock": {"cidr": "172.30.0.0/16"}}]);
    let path = "/apis/networking.k8s.io/v1/namespaces/default/networkpolicies/web";
    rig.admin.merge(path, &json!({"spec": policy(&with_outside)["spec"]})).unwrap().expect(200).unwrap();
    table([true, false, false, true, true]);

    // Traffic of a pod is judged by the pod behind the Service.
    rig.admin.delete(path).unwrap().expect(200).unwrap();
    table([true; 5]);
    let out_of = |to: &str| {
        json!({
            "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
            "metadata": {"namespace": "default", "name": "out"},
            "spec": {
                "podSelector": {"matchLabels": {"app": "stranger"}}, "policyTypes": ["Egress"],
                "egress": [{"to": [{"podSelector": {"matchLabels": {"app": to}}}]}]
            }
        })
    };
    rig.admin.create(&out_of("friend")).unwrap();
    table([true, false, false, true, true]);
    let path = "/apis/networking.k8s.io/v1/namespaces/default/networkpolicies/out";
    rig.admin.merge(path, &json!({"spec": out_of("web")["spec"]})).unwrap().expect(200).unwrap();
    table([true; 5]);
    assert_ne!(direct(&stranger), direct(&web));
    rig.admin.delete(path).unwrap().expect(200).unwrap();
    for name in ["friend", "stranger"] {
        rig.delete(name);
    }
}

fn commands_run_in_containers(rig: &Rig) {
    let pod = rig.ready("web", 2);
    let addresses: Vec<Value> = published(&pod).iter().map(|entry| entry["ips"][0].clone()).collect();
    let path = format!("{PODS}/web");
    let ran = rig.admin.exec(&path, "main", &["ip", "-o", "-4", "address"]).unwrap();
    assert_eq!(ran.outcome["status"], "Success", "{ran:?}");
    for (link, address) in ["eth0", "net1"].iter().zip(&addresses) {
        let address = address.as_str().unwrap();
        let has = |line: &str| line.contains(link) && line.contains(&format!(" {address}/"));
        assert!(ran.stdout.lines().any(has), "{link} {address}: {ran:?}");
    }
    let ran = rig.admin.exec(&path, "main", &["sh", "-c", "echo no >&2; exit 3"]).unwrap();
    assert_eq!(
        (&*ran.stderr, &ran.outcome["details"]["causes"][0]["message"]),
        ("no\n", &json!("3")),
        "{ran:?}"
    );
    rig.delete("web");
}

/// The kubelet names a static pod by the hash of its file, its mirror in the API has another UID.
fn static_pods_have_networks(rig: &Rig) {
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"namespace": "default", "name": "still", "annotations": {NETWORKS: "storage"}},
        "spec": busybox(&json!({}))
    });
    let file = rig.worker.static_pods().join("still.json");
    fs::write(&file, pod.to_string()).unwrap();
    let mirror = rig.ready("still-services", 2);
    assert!(mirror["metadata"]["annotations"]["kubernetes.io/config.mirror"].is_string(), "{mirror:#}");
    fs::remove_file(&file).unwrap();
}
