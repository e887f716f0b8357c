//! The agent's own network in a real cluster, whose controller manager assigns each node its range.

use std::net::IpAddr;

use ipnet::IpNet;
use netattach_tests::cluster::Cluster;
use netattach_tests::traffic::{PATIENCE, eventually, ping};
use netattach_tests::{Node, Pod};
use serde_json::{Value, json};

const RANGE: &str = "10.244.0.0/16";

#[test]
fn pods_have_addresses_of_the_ranges_that_the_controller_manager_gives_to_nodes() {
    let Some(mut cluster) = Cluster::new("ranges").unwrap() else { return };
    cluster.start_ranges(RANGE).unwrap();
    let admin = cluster.admin().unwrap();
    admin.create(&json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "ranges"}})).unwrap();
    let attached: Vec<(Node, Pod, IpAddr)> = ["a", "b"]
        .map(|name| {
            let mut node = Node::new(&[]).unwrap();
            let address = cluster.connect(&node.namespace).unwrap();
            let object = json!({
                "apiVersion": "v1", "kind": "Node", "metadata": {"name": name},
                "status": {"addresses": [{"type": "InternalIP", "address": address}]}
            });
            admin.create(&object).unwrap();
            node.join(cluster.agent_config(&node.path("source")).unwrap(), name).unwrap();
            node.set("defaultNetwork", json!("builtin"));
            node.set("builtin", json!({"dataDir": node.path("leases")}));
            node.start().unwrap();
            let pod = json!({
                "apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": "ranges", "name": name},
                "spec": {"nodeName": name, "containers": [{"name": "main", "image": "example.com/x"}]}
            });
            let uid = admin.create(&pod).unwrap()["metadata"]["uid"].as_str().unwrap().to_owned();
            let pod = Pod::new(name).unwrap();
            let args = format!(
                "IgnoreUnknown=1;K8S_POD_NAMESPACE=ranges;K8S_POD_NAME={name};K8S_POD_INFRA_CONTAINER_ID={};K8S_POD_UID={uid}",
                pod.container
            );
            let mut result = Value::Null;
            let add = node.call("ADD", &pod).with("CNI_ARGS", &args);
            assert!(
                eventually(PATIENCE, || {
                    let outcome = add.run();
                    result = outcome.json;
                    outcome.exit == 0
                }),
                "{result:#}"
            );
            let own: IpNet = result["ips"][0]["address"].as_str().unwrap().parse().unwrap();
            let object = admin.get(&format!("/api/v1/nodes/{name}")).unwrap().body;
            assert_eq!(object["spec"]["podCIDRs"], json!([own.trunc()]));
            assert!(RANGE.parse::<IpNet>().unwrap().contains(&own));
            (node, pod, own.addr())
        })
        .into();
    let [(_, a, _), (_, _, of_b)] = attached.as_slice() else { panic!("two nodes") };
    assert!(eventually(PATIENCE, || ping(&a.namespace, *of_b, PATIENCE).unwrap()), "by the nodes' routes");
}
