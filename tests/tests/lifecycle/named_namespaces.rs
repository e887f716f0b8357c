//! An agent in a container where `/var/run` is no link to `/run`, and only one of both has the pods' namespaces.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use netattach_tests::manifest::{NAMESPACE, network, pod};
use netattach_tests::node::executable;
use netattach_tests::{Bound, Node, Pod};
use serde_json::json;

/// A pod's namespace under a name in `/run/netns`.
fn named(pod: &Pod) -> Bound {
    fs::create_dir_all("/run/netns").unwrap();
    let name = format!("netattach-test-{}-{}", std::process::id(), pod.name);
    pod.namespace.bind(&Path::new("/run/netns").join(name)).unwrap()
}

#[test]
fn a_namespace_is_found_in_run_when_the_runtime_names_it_in_var_run() {
    let mut node = Node::new(&[pod("a", &json!({}), &json!("odd"))]).unwrap();
    node.plugin("odd", &json!({})).unwrap();
    node.write("odd", &network(NAMESPACE, "odd", &json!({"cniVersion": "1.0.0", "type": "odd"}))).unwrap();
    let a = Pod::new("a").unwrap();
    let named = named(&a);
    let asked = format!("/var{}", named.path().display());
    // In the agent's own mounts `/var` is empty.
    let script = node.path("netattachd-in-container");
    let agent = executable("netattachd").unwrap();
    let text = format!(
        "#!/bin/sh\nexec unshare -m sh -c 'mount -t tmpfs tmpfs /var && mkdir -p /var/run/netns && exec {} \"$@\"' sh \"$@\"\n",
        agent.display()
    );
    fs::write(&script, text).unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    node.start_as(&script, &[]).unwrap();

    let call = |verb: &str| node.call(verb, &a).with("CNI_NETNS", &asked).run();
    let result = call("ADD").success();
    assert_eq!(
        result["interfaces"].as_array().unwrap().last().unwrap()["sandbox"],
        json!(asked),
        "as it was given"
    );
    node.await_status(&a);
    call("CHECK").success();
    call("DEL").success();
    for call in node.take_calls().unwrap().iter().filter(|call| call["env"]["CNI_COMMAND"] != "VERSION") {
        assert_eq!(call["env"]["CNI_NETNS"], json!(named.path()), "{call:#}");
    }
}
