//! A cluster with a kubelet, containerd, the scheduler and controllers: pods from Deployments, with nothing but what
//! Kubernetes and the runtime do.

use std::time::Duration;

use netattach_tests::cluster::{Cluster, Worker};
use netattach_tests::machine::IMAGE;
use netattach_tests::snapshot::{Maps, Snapshot};
use netattach_tests::traffic::eventually;
use serde_json::{Value, json};

const STATUS: &str = "k8s.v1.cni.cncf.io/network-status";
const NETWORKS: &str = "k8s.v1.cni.cncf.io/networks";
const PATIENCE: Duration = Duration::from_secs(120);
const DEPLOYMENT: &str = "/apis/apps/v1/namespaces/default/deployments/web";
const PODS: &str = "/api/v1/namespaces/default/pods";
const REPLICAS: usize = 10;

#[test]
fn the_pods_of_a_deployment_get_their_networks_and_leave_nothing() {
    let Some(mut cluster) = Cluster::new("workloads").unwrap() else { return };
    cluster.start_controllers().unwrap();
    let admin = cluster.admin().unwrap();
    let Some(worker) = Worker::start("workloads", &cluster, "worker").unwrap() else { return };
    let leases = worker.node().path("leases");
    for (name, config) in [
        ("storage", json!({"type": "veth"})),
        ("lan", json!({"type": "bridge", "bridge": "br-lan"})),
        ("segment", json!({"type": "macvlan", "master": "eth0"})),
    ] {
        let mut config = config;
        config["cniVersion"] = json!("1.0.0");
        let subnet = match name {
            "storage" => "10.51.0.0/24",
            "lan" => "10.52.0.0/24",
            _ => "10.53.0.0/24",
        };
        config["ipam"] = json!({"type": "host-local", "dataDir": leases, "ranges": [[{"subnet": subnet}]]});
        admin
            .create(&json!({
                "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
                "metadata": {"namespace": "default", "name": name}, "spec": {"config": config.to_string()}
            }))
            .unwrap();
    }
    let before = Snapshot::take(worker.node(), &[]).unwrap();
    let template = json!({
        "metadata": {"labels": {"app": "web"}, "annotations": {NETWORKS: "storage, lan, segment"}},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "main", "image": IMAGE, "imagePullPolicy": "Never"}]
        }
    });
    let deployment = json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"namespace": "default", "name": "web"},
        "spec": {
            "replicas": REPLICAS, "selector": {"matchLabels": {"app": "web"}}, "template": template
        }
    });
    admin.create(&deployment).unwrap();
    let get = |path: &str| admin.get(path).unwrap().body;
    assert!(
        eventually(PATIENCE, || get(DEPLOYMENT)["status"]["readyReplicas"] == REPLICAS),
        "{:#}",
        get(PODS)["items"].as_array().unwrap().iter().map(|pod| pod["status"].clone()).collect::<Value>()
    );
    let networks = |pod: &Value| -> Vec<String> {
        let status = pod["metadata"]["annotations"][STATUS].as_str().unwrap_or("[]");
        let status: Value = serde_json::from_str(status).unwrap();
        let name = |network: &Value| network["name"].as_str().unwrap_or_default().to_owned();
        status.as_array().unwrap().iter().map(name).collect()
    };
    // The default network, and the three of the annotation.
    let published =
        || get(PODS)["items"].as_array().unwrap().iter().filter(|pod| networks(pod).len() == 4).count();
    assert!(eventually(PATIENCE, || published() == REPLICAS), "{:#}", get(PODS));

    admin.delete(DEPLOYMENT).unwrap().expect(200).unwrap();
    assert!(eventually(PATIENCE, || get(PODS)["items"] == json!([])), "{:#}", get(PODS));
    let left = || {
        let after = Snapshot::take(worker.node(), &[]).unwrap();
        let links = |snapshot: &Snapshot| -> Vec<String> {
            let links = snapshot.node.links.iter().filter(|(_, link)| link.kind != "bridge");
            links.map(|(name, _)| name.clone()).collect()
        };
        (after.files.clone(), after.dataplane.clone() == Maps::default(), links(&after), links(&before))
    };
    let is_clean = || {
        let (files, dataplane, now, then) = left();
        files.is_empty() && dataplane && now == then
    };
    assert!(eventually(PATIENCE, is_clean), "{:#?}", left());
}
