//! Devices that the kubelet assigned to a pod: the query, and the data for plugins, record and status.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use netattach::error_chain::Chain;
use netattach::kubelet::messages::{GET, LIST};
use netattach::kubelet::{ContainerDevices, Error, PodResources};
use netattach::objects::ObjectName;
use netattach_tests::kubelet::{Answers, Kubelet, checkpoint, pod as kubelet_pod};
use netattach_tests::manifest::{NAMESPACE, network, pod};
use netattach_tests::snapshot::Snapshot;
use netattach_tests::{Node, Pod};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::task::JoinSet;

const VF: &str = "example.com/vf";

struct Rig {
    directory: TempDir,
    client: Arc<PodResources>,
}

impl Rig {
    fn new() -> Self {
        let directory = TempDir::new().unwrap();
        let client =
            PodResources::new(&directory.path().join("socket"), &directory.path().join("checkpoint"));
        Self { directory, client: Arc::new(client) }
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("socket")
    }

    fn serve(&self, answers: Answers) -> Kubelet {
        Kubelet::serve(&self.socket(), answers).unwrap()
    }

    async fn of(&self, name: &str, uid: Option<&str>) -> Result<Vec<ContainerDevices>, String> {
        let devices = self.client.of_pod(&ObjectName::new("shop", name), uid).await;
        devices.map_err(|error| Chain(&*error).to_string())
    }
}

fn row(container: &str, ids: &[&str]) -> ContainerDevices {
    let ids = ids.iter().map(|id| (*id).to_owned()).collect();
    ContainerDevices { container: container.to_owned(), resource: VF.to_owned(), ids }
}

fn paths(kubelet: &Kubelet) -> Vec<String> {
    kubelet.take_calls().into_iter().map(|(path, _)| path).collect()
}

fn pods() -> Vec<netattach::kubelet::messages::PodResources> {
    vec![
        kubelet_pod("other", "a", &[("main", VF, &["9"])]),
        kubelet_pod("shop", "a", &[("main", VF, &["2", "1"]), ("side", VF, &["3"])]),
        kubelet_pod("shop", "bare", &[]),
    ]
}

#[tokio::test]
async fn get_is_asked_where_it_is_served_and_one_list_otherwise() {
    let rig = Rig::new();
    let kubelet = rig.serve(Answers { pods: pods(), serves_get: true, ..Answers::default() });
    let of_a = vec![row("main", &["2", "1"]), row("side", &["3"])];
    assert_eq!(rig.of("a", None).await.unwrap(), of_a);
    assert_eq!(rig.of("bare", None).await.unwrap(), []);
    let unknown = rig.of("nobody", None).await.unwrap_err();
    assert!(unknown.contains("pod not found"), "{unknown}");
    assert_eq!(paths(&kubelet), [GET; 3]);

    // An older kubelet is asked for `Get` once.
    kubelet.answers().serves_get = false;
    for _ in 0..2 {
        assert_eq!(rig.of("a", None).await.unwrap(), of_a);
    }
    assert_eq!(rig.of("nobody", None).await.unwrap(), []);
    assert_eq!(paths(&kubelet), [GET, LIST, LIST, LIST]);
}

#[tokio::test]
async fn twenty_who_wait_share_a_list_that_begins_after_they_came() {
    const WAITING: usize = 20;
    let rig = Rig::new();
    let kubelet =
        rig.serve(Answers { pods: pods(), takes: Duration::from_millis(150), ..Answers::default() });
    rig.of("a", None).await.unwrap();
    assert_eq!(paths(&kubelet), [GET, LIST]);
    let mut waiting = JoinSet::new();
    for _ in 0..WAITING {
        let client = Arc::clone(&rig.client);
        waiting.spawn(async move { client.of_pod(&ObjectName::new("shop", "a"), None).await.unwrap() });
    }
    // They wait for a list of before, or for their own: the devices of now are in neither yet.
    tokio::time::sleep(Duration::from_millis(20)).await;
    let given = waiting.join_all().await;
    assert_eq!(given.len(), WAITING);
    assert!(given.iter().all(|devices| devices.len() == 2));
    let calls = paths(&kubelet);
    assert!((1..=2).contains(&calls.len()) && calls.iter().all(|path| path == LIST), "{calls:?}");

    // A request during a query is answered by the next query.
    let client = Arc::clone(&rig.client);
    let early =
        tokio::spawn(async move { client.of_pod(&ObjectName::new("shop", "new"), None).await.unwrap() });
    while kubelet.answers().pods.len() == pods().len() && paths(&kubelet).is_empty() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    // The running query reads the kubelet's present state, before the pod exists.
    tokio::time::sleep(Duration::from_millis(20)).await;
    kubelet.answers().pods.push(kubelet_pod("shop", "new", &[("main", VF, &["7"])]));
    assert_eq!(rig.of("new", None).await.unwrap(), [row("main", &["7"])]);
    assert_eq!(early.await.unwrap(), []);
    assert_eq!(paths(&kubelet), [LIST]);
}

/// The kubelet takes 100 calls a second from all its clients together.
#[tokio::test]
async fn calls_are_spaced() {
    const CALLS: usize = 20;
    let rig = Rig::new();
    let kubelet = rig.serve(Answers { pods: pods(), serves_get: true, ..Answers::default() });
    let mut asking = JoinSet::new();
    for _ in 0..CALLS {
        let client = Arc::clone(&rig.client);
        asking.spawn(async move { client.of_pod(&ObjectName::new("shop", "a"), None).await.unwrap() });
    }
    asking.join_all().await;
    let calls: Vec<Instant> = kubelet.take_calls().into_iter().map(|(_, at)| at).collect();
    assert_eq!(calls.len(), CALLS);
    let took = calls[CALLS - 1].duration_since(calls[0]);
    // 50 a second, except for the first one's arrival.
    assert!(took >= Duration::from_millis(20) * (CALLS as u32 - 2), "{took:?}");
}

#[tokio::test]
async fn the_devices_of_an_earlier_pod_of_the_name_are_not_the_pods() {
    let rig = Rig::new();
    let both = vec![
        kubelet_pod("shop", "a", &[("main", VF, &["1"])]),
        kubelet_pod("shop", "a", &[("main", VF, &["2"])]),
    ];
    let _kubelet = rig.serve(Answers { pods: both, ..Answers::default() });
    let unread = rig.of("a", Some("new")).await.unwrap_err();
    assert!(
        unread.starts_with("read the kubelet's checkpoint ") && unread.contains("No such file"),
        "{unread}"
    );
    let allocated = checkpoint(&[("old", "main", VF, &["1"]), ("new", "main", VF, &["2"])]);
    fs::write(rig.directory.path().join("checkpoint"), allocated.to_string()).unwrap();
    assert_eq!(rig.of("a", Some("new")).await.unwrap(), [row("main", &["2"])]);
    assert_eq!(rig.of("a", Some("old")).await.unwrap(), [row("main", &["1"])]);
    assert_eq!(
        rig.of("a", Some("newer")).await.unwrap_err(),
        "the kubelet lists devices of pod shop/a, none of which its checkpoint has for uid newer: they may be an earlier \
         pod's"
    );
}

#[tokio::test]
async fn a_kubelet_that_is_away_or_slow_or_says_too_much_is_an_error_within_two_seconds() {
    let rig = Rig::new();
    let socket = rig.socket().display().to_string();
    let name = ObjectName::new("shop", "a");
    assert!(
        matches!(&*rig.client.of_pod(&name, None).await.unwrap_err(), Error::Absent(path) if *path == rig.socket())
    );
    // Left over by a kubelet that has died.
    drop(std::os::unix::net::UnixListener::bind(rig.socket()).unwrap());
    let refused = rig.of("a", None).await.unwrap_err();
    assert!(refused.starts_with(&format!("connect to the kubelet at {socket}")), "{refused}");

    let kubelet = rig.serve(Answers { pods: pods(), takes: Duration::from_secs(60), ..Answers::default() });
    let began = Instant::now();
    let expected = format!("the kubelet at {socket} did not answer within 2 s");
    assert_eq!(rig.of("a", None).await.unwrap_err(), expected);
    assert!(
        (Duration::from_secs(2)..Duration::from_secs(4)).contains(&began.elapsed()),
        "{:?}",
        began.elapsed()
    );

    *kubelet.answers() = Answers { pods: pods(), claims: Some((16 << 20) + 1), ..Answers::default() };
    let large = rig.of("a", None).await.unwrap_err();
    assert!(large.contains("16777217"), "{large}");
}

/// A node with two networks of one resource, and a pod that has both.
fn node(selections: &Value) -> Node {
    let mut node = Node::new(&[pod("a", &json!({}), selections)]).unwrap();
    for (name, plugin) in [("left", "vf"), ("right", "vf"), ("marked", "bridge")] {
        let mut config = json!({"cniVersion": "1.0.0", "type": plugin, "bridge": "br1"});
        if plugin == "vf" {
            config["capabilities"] = json!({"deviceID": true, "CNIDeviceInfoFile": true});
        }
        let mut defined = network(NAMESPACE, name, &config);
        defined["metadata"]["annotations"] = json!({"k8s.v1.cni.cncf.io/resourceName": VF});
        node.write(name, &defined).unwrap();
    }
    node.plugin("vf", &json!({"ADD": {"result": {"cniVersion": "1.0.0"}}})).unwrap();
    node.start().unwrap();
    node
}

/// Returns verb, interface and device of each call, by each of the ways in which a plugin gets the device.
fn told(node: &Node) -> Vec<[Value; 5]> {
    let calls = node.take_calls().unwrap();
    let row = |call: &Value| {
        let (env, stdin) = (&call["env"], &call["stdin"]);
        let of_runtime = &stdin["runtimeConfig"]["deviceID"];
        [&env["CNI_COMMAND"], &env["CNI_IFNAME"], &stdin["deviceID"], &stdin["pciBusID"], of_runtime]
            .map(Value::clone)
    };
    calls.iter().map(row).collect()
}

#[test]
fn each_network_of_a_resource_gets_a_device_of_its_own_which_record_and_status_keep() {
    let mut node = node(&json!("left, marked, right"));
    let [first, second] = ["0000:03:02.7", "0000:03:02.1"];
    let given = kubelet_pod(NAMESPACE, "a", &[("main", VF, &[first]), ("side", VF, &[second])]);
    let kubelet =
        Kubelet::serve(&node.path("kubelet.sock"), Answers { pods: vec![given], ..Answers::default() })
            .unwrap();
    let described = json!({"type": "pci", "version": "1.1.0", "pci": {"pci-address": second}});
    fs::create_dir_all(node.path("devinfo/dp")).unwrap();
    fs::write(node.path(&format!("devinfo/dp/example.com-vf-{second}-device.json")), described.to_string())
        .unwrap();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    let row = |verb: &str, ifname: &str, id: &str| [verb, ifname, id, id, id].map(Value::from);
    assert_eq!(told(&node), [row("ADD", "net1", first), row("ADD", "net3", second)]);
    let status = node.status(&a).unwrap();
    let device = |id: &str, container: &str| json!({"resource": VF, "id": id, "container": container});
    let devices: Vec<&Value> = (0..4).map(|entry| &status[entry]["dev.netattach.device"]).collect();
    assert_eq!(devices, [&Value::Null, &device(first, "main"), &Value::Null, &device(second, "side")]);
    assert_eq!((&status[1]["device-info"], &status[3]["device-info"]), (&Value::Null, &described));

    // From here on the kubelet is not queried: the record has the device.
    drop(kubelet);
    node.kill().unwrap();
    fs::remove_dir_all(node.path("run/network-status")).unwrap();
    node.start().unwrap();
    node.await_status(&a);
    assert_eq!(node.status(&a).unwrap(), status);
    node.check(&a).success();
    node.del(&a).success();
    let expected = [
        ("CHECK", "net1", first),
        ("CHECK", "net3", second),
        ("DEL", "net3", second),
        ("DEL", "net1", first),
    ];
    assert_eq!(told(&node), expected.map(|(verb, ifname, id)| row(verb, ifname, id)));
    Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
}

#[test]
fn a_pod_that_was_not_given_what_its_networks_need_is_refused_with_what_it_was_given() {
    let named = json!([{"name": "left"}, {"name": "right", "deviceID": "0000:03:02.7"}]);
    let node = node(&named);
    let a = Pod::new("a").unwrap();
    let answers = |ids: &[&str]| {
        let given = kubelet_pod(NAMESPACE, "a", &[("main", VF, ids)]);
        Answers { pods: vec![given], serves_get: true, ..Answers::default() }
    };
    let kubelet = Kubelet::serve(&node.path("kubelet.sock"), answers(&["0000:03:02.7"])).unwrap();
    let none_left = "network shop/left: no device of resource example.com/vf is left for the network: 2 networks of the pod \
                     need one, and its containers were given main: example.com/vf 0000:03:02.7";
    assert_eq!(node.add(&a).failure(), (7, none_left.to_owned()));
    *kubelet.answers() = answers(&["0000:03:02.1"]);
    let not_the_pods = "network shop/right: deviceID 0000:03:02.7 is no device of resource example.com/vf that the pod has: \
                        its containers were given main: example.com/vf 0000:03:02.1";
    assert_eq!(node.add(&a).failure(), (7, not_the_pods.to_owned()));
    *kubelet.answers() = Answers { takes: Duration::from_secs(60), ..answers(&[]) };
    let (code, late) = node.add(&a).failure();
    assert!(code == 11 && late.ends_with("did not answer within 2 s"), "{code} {late}");
    assert_eq!(told(&node), Vec::<[Value; 5]>::new());
    // A device that the selection names is left to the selection.
    *kubelet.answers() = answers(&["0000:03:02.7", "0000:03:02.1"]);
    node.add(&a).success();
    let devices: Vec<Value> = told(&node).into_iter().map(|[_, _, id, ..]| id).collect();
    assert_eq!(devices, ["0000:03:02.1", "0000:03:02.7"]);
    node.del(&a).success();
    Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
}
