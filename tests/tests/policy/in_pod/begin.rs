//! Programs in a pod begin as filters if no process there can remove those, and get links when the ADD has been
//! answered.

use netattach::netlink::Handle;
use netattach::spec::TcHook;

use super::*;

/// Pods, each with a network and a device of that name.
const PODS: [&str; 3] = ["plain", "admin", "boxed"];

fn filters(pod: &Pod) -> usize {
    let mut inside = Handle::open_in(pod.namespace.netns()).unwrap();
    let index = inside.link("net1").unwrap().index;
    let hooks = [TcHook::Ingress, TcHook::Egress];
    hooks.into_iter().map(|hook| inside.find_filters(index, hook).unwrap().len()).sum()
}

fn node() -> Node {
    let node = Node::new(&[]).unwrap();
    for name in PODS {
        let far = format!("{name}-far");
        ip(&node.namespace, &["link", "add", name, "type", "veth", "peer", "name", &far]).unwrap();
        let config = json!({"cniVersion": "1.0.0", "type": "host-device", "device": name});
        node.write(&format!("net-{name}"), &network(NAMESPACE, name, &config)).unwrap();
        node.write(name, &pod(name, &json!({}), &json!(name))).unwrap();
    }
    let admin = pod("admin", &json!({}), &json!("admin"));
    let admin = with_security_context(admin, r#"{"capabilities": {"add": ["NET_ADMIN"]}}"#);
    node.write("admin", &admin).unwrap();
    let mut boxed = pod("boxed", &json!({}), &json!("boxed"));
    boxed["spec"]["runtimeClassName"] = json!("vm");
    node.write("boxed", &boxed).unwrap();
    node
}

#[test]
fn programs_begin_by_filters_and_have_links_soon_after_the_answer() {
    let mut node = node();
    node.start().unwrap();
    let [plain, admin, boxed] = PODS.map(|name| Pod::new(name).unwrap());
    node.add(&admin).success();
    assert_eq!((links(&node).len(), filters(&admin)), (2, 0), "this pod could take filters off");
    node.add(&boxed).success();
    assert_eq!((links(&node).len(), filters(&boxed)), (4, 0), "its runtime may put a qdisc there");
    node.add(&plain).success();
    // Whichever mode they run in, none is missing.
    node.check(&plain).success();
    let has_links = || links(&node).len() == 6 && filters(&plain) == 0;
    assert!(eventually(PATIENCE, has_links), "{:?}, {} filters", links(&node), filters(&plain));
    node.check(&plain).success();

    // The agent ends before it attaches them by links, or after.
    node.del(&plain).success();
    node.add(&plain).success();
    node.kill().unwrap();
    node.start().unwrap();
    assert_eq!((links(&node).len(), filters(&plain)), (6, 0));
    node.check(&plain).success();

    // A DEL that comes at once: no program is attached by a link any more.
    node.del(&plain).success();
    node.add(&plain).success();
    node.del(&plain).success();
    for other in [&admin, &boxed] {
        node.del(other).success();
    }
    assert_eq!(links(&node), BTreeMap::new());
    for device in PODS {
        ip(&node.namespace, &["link", "del", device]).unwrap();
    }
    Snapshot::take(&node, &[&plain, &admin, &boxed]).unwrap().assert_nothing_is_left();
}
