//! No pod waits for another network's plugin, pool or lock; DEL, STATUS, GC and queries have capacity of their own.
//! Work whose caller has hung up is not begun.

use std::fs::{self, File};
use std::path::PathBuf;
use std::thread::{JoinHandle, spawn};
use std::time::Duration;

use netattach::rpc::client::{ClientError, Patience, call};
use netattach::rpc::message::{AttachCall, CniCall, Request, Response, SandboxName};
use netattach_tests::manifest::{NAMESPACE, network, pod};
use netattach_tests::traffic::{PATIENCE, eventually};
use netattach_tests::{Call, Node, Outcome, Pod};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

/// Pods whose ADD or DEL hangs: more than may be attached at a time (`parallelAdds`), or may wait for one resource.
const MANY: usize = 40;

/// A plugin that answers VERSION, and hangs at the verbs in `verbs`.
fn hanging(verbs: &[&str]) -> Value {
    verbs.iter().map(|verb| ((*verb).to_owned(), json!({"sleepMs": 300_000}))).collect()
}

/// Returns a node with a network of the scripted plugin `odd`, pods that have it, and pods `a`, `b` and `c` that do
/// not.
fn node(script: &Value) -> (Node, Vec<Pod>) {
    let mut node = Node::new(&[]).unwrap();
    node.set("maxAttachments", json!(512));
    node.set("delegation", json!({"timeoutSeconds": 600}));
    node.plugin("odd", script).unwrap();
    node.write("odd", &network(NAMESPACE, "odd", &json!({"cniVersion": "1.1.0", "type": "odd"}))).unwrap();
    for name in ["a", "b", "c"] {
        node.write(name, &pod(name, &json!({}), &Value::Null)).unwrap();
    }
    let pods = (0..MANY).map(|number| {
        let name = format!("odd-{number}");
        node.write(&name, &pod(&name, &json!({}), &json!("odd"))).unwrap();
        Pod::new(&name).unwrap()
    });
    let pods = pods.collect();
    (node, pods)
}

fn begin(calls: impl IntoIterator<Item = Call>) -> Vec<JoinHandle<Outcome>> {
    calls.into_iter().map(|call| spawn(move || call.run())).collect()
}

/// Returns how often the scripted plugin was called with a verb.
fn called(node: &Node, verb: &str) -> usize {
    let text = fs::read_to_string(node.path("calls")).unwrap_or_default();
    text.matches(&format!("\"CNI_COMMAND\":\"{verb}\"")).count()
}

fn status(node: &Node) -> Outcome {
    let env = [("CNI_COMMAND", "STATUS"), ("CNI_PATH", "/nonexistent/cni-bin")];
    let env = env.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
    Call { env, stdin: node.cni_config("1.1.0").to_string() }.run()
}

fn assert_still_hang(begun: &[JoinHandle<Outcome>]) {
    assert_eq!(begun.iter().filter(|call| call.is_finished()).count(), 0);
}

/// All requests that do not depend on the hanging plugin are served at once: `a` is attached, `b` is not yet, `c` is
/// attached but no longer known to the runtime.
fn assert_others_are_served(node: &Node, [a, b, c]: [&Pod; 3], in_use: &[&Pod]) {
    node.add(b).success();
    node.check(b).success();
    node.del(a).success();
    status(node).success();
    node.ctl(&["attachments"]).unwrap();
    assert!(eventually(PATIENCE, || node.ctl(&["status"]).is_ok()));
    let known: Vec<&Pod> = in_use.iter().copied().chain([b]).collect();
    node.gc("pods", Some(&known));
    assert_eq!(node.check(c).failure().0, 3, "GC has taken it back");
    node.add(c).success();
}

#[test]
fn a_plugin_that_hangs_holds_up_no_pod_of_another_network() {
    let (mut node, pods) = node(&hanging(&["ADD"]));
    node.start().unwrap();
    let [a, b, c] = ["a", "b", "c"].map(|name| Pod::new(name).unwrap());
    node.add(&a).success();
    node.add(&c).success();
    let begun = begin(pods.iter().map(|pod| node.call("ADD", pod)));
    assert!(eventually(PATIENCE, || called(&node, "ADD") >= 8), "as many as may stand there");
    let all: Vec<&Pod> = pods.iter().collect();
    assert_others_are_served(&node, [&a, &b, &c], &all);
    assert_still_hang(&begun);
    assert!(called(&node, "ADD") < MANY, "the others wait in the queue, without a thread");
    node.kill().unwrap();
    // The restart ends the plugins, too.
    node.start().unwrap();
    for begun in begun {
        assert_eq!(begun.join().unwrap().failure().0, 11);
    }
}

#[test]
fn a_plugin_that_hangs_in_del_holds_up_no_del_of_another_network() {
    let (mut node, pods) = node(&hanging(&["DEL"]));
    node.start().unwrap();
    let [a, b, c] = ["a", "b", "c"].map(|name| Pod::new(name).unwrap());
    for pod in pods.iter().chain([&a, &c]) {
        node.add(pod).success();
    }
    let begun = begin(pods.iter().map(|pod| node.call("DEL", pod)));
    assert!(eventually(PATIENCE, || called(&node, "DEL") >= 32), "as many as may stand there");
    let all: Vec<&Pod> = pods.iter().collect();
    assert_others_are_served(&node, [&a, &b, &c], &all);
    assert_still_hang(&begun);
    node.plugin("odd", &json!({})).unwrap();
    node.kill().unwrap();
    node.start().unwrap();
    for pod in pods.iter().chain([&b, &c]) {
        node.del(pod).success();
    }
    let left = fs::read_dir(node.path("state/journal")).unwrap().flatten().map(|entry| entry.file_name());
    assert_eq!(left.filter(|name| name.to_string_lossy().contains('@')).count(), 0);
    assert_eq!(node.ctl(&["attachments"]).unwrap(), json!([]));
}

#[test]
fn a_pool_that_somebody_keeps_locked_holds_up_no_pod_of_another() {
    let (mut node, pods) = node(&json!({}));
    let pool = json!({"cniVersion": "1.0.0", "name": "locked", "type": "veth", "ipam": node.host_local(&["10.57.0.0/24"])});
    node.write("odd", &network(NAMESPACE, "odd", &pool)).unwrap();
    node.start().unwrap();
    let [a, b, c] = ["a", "b", "c"].map(|name| Pod::new(name).unwrap());
    node.add(&a).success();
    node.add(&c).success();
    let directory = node.path("leases/locked");
    fs::create_dir_all(&directory).unwrap();
    let lock = File::create(directory.join("lock")).unwrap();
    lock.lock().unwrap();
    let begun = begin(pods.iter().map(|pod| node.call("ADD", pod)));
    let stand = || {
        let open = fs::read_dir(format!("/proc/{}/fd", node.agent_pid())).unwrap();
        open.flatten().any(|fd| fs::read_link(fd.path()).is_ok_and(|file| file == directory.join("lock")))
    };
    assert!(eventually(PATIENCE, stand));
    let all: Vec<&Pod> = pods.iter().collect();
    assert_others_are_served(&node, [&a, &b, &c], &all);
    assert!(begun.iter().any(|call| !call.is_finished()));
    lock.unlock().unwrap();
    for (begun, pod) in begun.into_iter().zip(&pods) {
        // Requests that waited for the lock for ten seconds have given up, as they should.
        let outcome = begun.join().unwrap();
        assert!(outcome.exit == 0 || outcome.failure().0 == 11);
        node.del(pod).success();
    }
}

/// The kernel takes a second or two for each of them, during which the node has no work with them.
#[test]
fn pods_whose_addresses_are_looked_for_elsewhere_hold_up_no_pod_of_another_network() {
    let (mut node, pods) = node(&json!({}));
    let ipam = node.host_local(&["fd00:58::/64"]);
    let detects = json!({"cniVersion": "1.0.0", "name": "detects", "type": "bridge", "bridge": "detects0",
        "enabledad": true, "ipam": ipam});
    node.write("odd", &network(NAMESPACE, "odd", &detects)).unwrap();
    node.start().unwrap();
    let sockets = || {
        let open = fs::read_dir(format!("/proc/{}/fd", node.agent_pid())).unwrap();
        let is_socket = |link: PathBuf| link.to_string_lossy().starts_with("socket:");
        open.flatten().filter(|fd| fs::read_link(fd.path()).is_ok_and(is_socket)).count()
    };
    let at_rest = sockets();
    let b = Pod::new("b").unwrap();
    let begun = begin(pods.iter().map(|pod| node.call("ADD", pod)));
    assert!(eventually(PATIENCE, || sockets() >= at_rest + MANY), "they wait, or are being attached");
    node.add(&b).success();
    let ended = begun.iter().filter(|call| call.is_finished()).count();
    assert!(ended < 8, "{ended} of {MANY} had ended before it, so it waited for a place");
    for (begun, pod) in begun.into_iter().zip(&pods) {
        begun.join().unwrap().success();
        node.del(pod).success();
    }
}

/// One ADD hangs, and this many more wait for their container's turn.
#[test]
fn however_many_adds_wait_a_del_and_a_status_are_served_and_the_adds_beyond_are_told_to_come_again() {
    const WAITING: usize = 511;
    let (mut node, pods) = node(&hanging(&["ADD"]));
    node.start().unwrap();
    let [a, b] = ["a", "b"].map(|name| Pod::new(name).unwrap());
    node.add(&a).success();
    let hanging = begin([node.call("ADD", &pods[0])]);
    assert!(eventually(PATIENCE, || called(&node, "ADD") == 1));

    let Call { env, stdin } = node.call("ADD", &pods[0]);
    let request = Request::Cni(CniCall { env, stdin });
    let add = |answer: Duration| {
        let (socket, request) = (node.socket(), request.clone());
        spawn(move || call(&socket, &request, Patience { connect: PATIENCE, answer }))
    };
    let waiting: Vec<_> = (0..WAITING).map(|_| add(Duration::from_secs(600))).collect();
    // The first refusal means that the limit is reached.
    let is_told = || {
        let Ok(Ok(Response::Cni(reply))) = add(Duration::from_millis(500)).join() else { return false };
        let error: Value = serde_json::from_str(&reply.stdout).unwrap();
        assert_eq!((reply.exit, &error["code"]), (1, &json!(11)), "{error:#}");
        true
    };
    assert!(eventually(PATIENCE, is_told));
    assert_eq!(node.call("ADD", &b).run().failure().0, 11, "beyond the bound, whichever pod it is");
    status(&node).success();
    node.check(&a).success();
    node.del(&a).success();
    node.gc("pods", Some(&[&pods[0]]));
    node.ctl(&["status"]).unwrap();
    assert_still_hang(&hanging);
    node.kill().unwrap();
    node.start().unwrap();
    drop((hanging, waiting));
}

/// Makes a request, and hangs up while it waits.
fn hang_up_on(node: &Node, request: &Request) {
    let patience = Patience { connect: PATIENCE, answer: Duration::from_millis(500) };
    assert!(matches!(call::<Response>(&node.socket(), request, patience), Err(ClientError::Slow { .. })));
}

/// Ends the scripted plugin that was called last.
fn end_plugin(node: &Node) {
    let calls = fs::read_to_string(node.path("calls")).unwrap();
    let last: Value = serde_json::from_str(calls.lines().last().unwrap()).unwrap();
    let pid = Pid::from_raw(i32::try_from(last["pid"].as_i64().unwrap()).unwrap());
    kill_process(pid.unwrap(), Signal::KILL).unwrap();
}

#[test]
fn an_add_whose_client_hangs_up_while_it_waits_attaches_nothing_nor_does_a_request_to_attach() {
    let (mut node, pods) = node(&hanging(&["ADD"]));
    node.start().unwrap();
    let pod = &pods[0];
    // It has the container's turn.
    let first = begin([node.call("ADD", pod)]);
    assert!(eventually(PATIENCE, || called(&node, "ADD") == 1));
    let Call { env, stdin } = node.call("ADD", pod);
    hang_up_on(&node, &Request::Cni(CniCall { env, stdin }));
    node.plugin("odd", &json!({})).unwrap();
    end_plugin(&node);
    for first in first {
        first.join().unwrap().failure();
    }
    // It waits for its turn after the other ADD.
    assert_eq!(node.check(pod).failure().0, 3);
    assert_eq!((called(&node, "ADD"), node.ctl(&["attachments"]).unwrap()), (1, json!([])));

    node.add(pod).success();
    node.plugin("odd", &hanging(&["CHECK"])).unwrap();
    let check = begin([node.call("CHECK", pod)]);
    assert!(eventually(PATIENCE, || called(&node, "CHECK") == 1));
    let sandbox = SandboxName::Container(pod.container.clone());
    let (selection, by) = (json!({"name": "odd", "namespace": NAMESPACE}), "a-test".to_owned());
    hang_up_on(&node, &Request::Attach(AttachCall { sandbox, selection, by, traceparent: None }));
    node.plugin("odd", &json!({})).unwrap();
    end_plugin(&node);
    for check in check {
        check.join().unwrap().failure();
    }
    node.check(pod).success();
    assert_eq!(called(&node, "ADD"), 2);
    node.del(pod).success();
}
