//! Enforcement levels by interface, and pods that require a higher one.

use super::*;

#[test]
fn where_programs_run_follows_from_the_link_and_the_level_from_there() {
    let test = "where_programs_run_follows_from_the_link";
    let needed = ["ptp", "bridge", "macvlan", "host-local"];
    let Some(from) = plugins(test, &needed) else { return };
    let mut node = Node::new(&[]).unwrap();
    node.add_wire().unwrap();
    install(&node, &from, &needed).unwrap();
    node.set("delegation", json!({"exec": ["bridge", "macvlan", "ptp", "host-local"]}));
    let own = |number: u8| node.host_local(&[&format!("10.7{number}.0.0/24")]);
    let networks = [
        ("ptp", json!({"type": "ptp", "ipam": own(1)}), "full", ""),
        ("bridge", json!({"type": "bridge", "bridge": "br7", "isGateway": true, "ipam": own(2)}), "full", ""),
        (
            "macvlan",
            json!({"type": "macvlan", "master": WIRE, "ipam": own(3)}),
            "full-unless-privileged",
            "programs run in the pod, and its container main has CAP_NET_RAW",
        ),
    ];
    let all = networks.each_ref().map(|(name, ..)| format!("shop/{name}")).join(", ");
    for (name, config, ..) in &networks {
        let mut config = config.clone();
        config["cniVersion"] = json!("1.0.0");
        node.write(name, &network(NAMESPACE, name, &config)).unwrap();
        node.write(&format!("pod-{name}"), &pod(name, &json!({}), &json!(name))).unwrap();
    }
    let nobody = policy("nobody", &all, &json!({"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}));
    node.write("nobody", &nobody).unwrap();
    node.start().unwrap();
    let pods = networks.each_ref().map(|(name, ..)| Pod::new(name).unwrap());
    for (pod, (name, _, level, why)) in pods.iter().zip(&networks) {
        node.add(pod).success();
        node.check(pod).success();
        let row = row(&node, name);
        let told = (&row["enforcement"], row["enforcement_detail"].as_str().unwrap_or_default());
        assert_eq!(told, (&json!(level), *why), "{name}");
        assert_eq!(row["host_interface"].is_string(), *level == "full", "{name}: {row:#}");
        assert_eq!(row.get("programs_wait"), None, "{name}");
        let id = row["id"].as_u64().unwrap();
        let in_pod = || links(&node).keys().filter(|pin| pin.starts_with(&format!("pod{id}_"))).count();
        let expected = if *level == "full" { 0 } else { 2 };
        assert!(eventually(PATIENCE, || in_pod() == expected), "{name}: {}", in_pod());
    }
    // Traffic through a gateway of the node is dropped on the node's end.
    for (pod, gateway) in [(&pods[0], "10.71.0.1"), (&pods[1], "10.72.0.1")] {
        let gateway: IpAddr = gateway.parse().unwrap();
        assert!(!ping(&pod.namespace, gateway, SILENCE).unwrap(), "{gateway}");
        let dropped = || {
            let stats = node.ctl(&["stats", "--pod", &format!("shop/{}", pod.name)]).unwrap();
            stats.as_array().unwrap().iter().any(|row| row["dropped"]["egress-peer"].as_u64() > Some(0))
        };
        assert!(eventually(PATIENCE, dropped), "{}", pod.name);
    }
    node.remove("nobody").unwrap();
    for (pod, gateway) in [(&pods[0], "10.71.0.1"), (&pods[1], "10.72.0.1")] {
        let gateway: IpAddr = gateway.parse().unwrap();
        assert!(eventually(PATIENCE, || ping(&pod.namespace, gateway, SILENCE).unwrap()), "{gateway}");
    }
    for pod in &pods {
        node.del(pod).success();
    }
    assert_eq!(links(&node), BTreeMap::new());
    Snapshot::take(&node, &pods.each_ref()).unwrap().assert_nothing_is_left();
}

#[test]
fn where_policies_do_not_hold_as_asked_an_add_fails_and_a_later_policy_is_reported() {
    let node = || {
        let mut node = Node::new(&[]).unwrap();
        node.set("unenforceable", json!("refuse"));
        // A plugin that creates an interface, and one that leaves the pod a device to drive itself.
        node.plugin("card", &json!({"link": "veth"})).unwrap();
        let info = json!({"type": "memif", "version": "1.1.0", "memif": {"role": "slave", "path": "/x", "mode": "ip"}});
        node.plugin("user", &json!({"deviceInfo": info})).unwrap();
        let capabilities = json!({"CNIDeviceInfoFile": true});
        let user = json!({"cniVersion": "1.0.0", "type": "user", "capabilities": capabilities});
        let user = network(NAMESPACE, "user", &user);
        let card = network(NAMESPACE, "card", &json!({"cniVersion": "1.0.0", "type": "card"}));
        let strict = annotated(card.clone(), "netattach.dev/unenforceable", "refuse-unless-full");
        let mut strict = annotated(strict, "netattach.dev/enforce", "always");
        strict["metadata"]["name"] = json!("strict");
        let mut alone = annotated(card.clone(), "netattach.dev/enforce", "never");
        alone["metadata"]["name"] = json!("alone");
        let mut wrong = annotated(card.clone(), "netattach.dev/enforce", "perhaps");
        wrong["metadata"]["name"] = json!("wrong");
        for (name, network) in
            [("user", user), ("card", card), ("strict", strict), ("alone", alone), ("wrong", wrong)]
        {
            node.write(name, &with_annotations(network)).unwrap();
            let pod = pod(name, &json!({}), &json!(name));
            node.write(&format!("pod-{name}"), &pod).unwrap();
        }
        let bare = pod("bare", &json!({}), &json!("strict"));
        node.write("pod-bare", &with_security_context(bare, DROPS_ALL)).unwrap();
        node
    };
    let all =
        policy("all", "user, card, strict, alone", &json!({"podSelector": {}, "policyTypes": ["Ingress"]}));
    let [user, card, strict, alone, wrong, bare] =
        ["user", "card", "strict", "alone", "wrong", "bare"].map(|name| Pod::new(name).unwrap());

    let mut first = node();
    first.write("all", &all).unwrap();
    first.start().unwrap();
    let refused = |pod: &Pod, network: &str, enforcement: &str, demand: &str| {
        let message = format!(
            "enforcement there is {enforcement}, unenforceable is set to {demand}, and the pod is \
             selected by shop/all"
        );
        let (code, told) = first.add(pod).failure();
        assert_eq!(code, 7);
        let step = if network == "alone" { "" } else { " load policy and counters:" };
        assert_eq!(told, format!("attach net1 (shop/{network}):{step} {message}"));
    };
    let by_agent = "refuse by the agent's settings";
    refused(&user, "user", "none (the pod drives the device (memif) itself, past the kernel)", by_agent);
    refused(
        &alone,
        "alone",
        "none (enforce is never, by the network's definition or the agent's settings)",
        by_agent,
    );
    refused(
        &strict,
        "strict",
        "full-unless-privileged (programs run in the pod, and its container main has CAP_NET_RAW)",
        "refuse-unless-full by annotation netattach.dev/unenforceable of the network",
    );
    let (code, told) = first.add(&wrong).failure();
    assert_eq!(code, 7);
    assert_eq!(
        told,
        "network shop/wrong: annotation netattach.dev/enforce is \"perhaps\", not selected, always or never"
    );
    for pod in [&card, &bare] {
        first.add(pod).success();
        first.del(pod).success();
    }
    let pods = [&user, &card, &strict, &alone, &bare];
    Snapshot::take(&first, &pods).unwrap().assert_nothing_is_left();

    let mut second = node();
    second.start().unwrap();
    for pod in pods {
        second.add(pod).success();
    }
    let waits: Vec<bool> = pods.map(|pod| row(&second, &pod.name)["programs_wait"] == true).into();
    assert_eq!(waits, [false, true, false, false, false]);
    let run = eventually(PATIENCE, || links(&second).len() == 4);
    assert!(run, "those of strict run from the ADD on: {:?}", links(&second));
    second.write("all", &all).unwrap();
    let conditions = || second.ctl(&["policy"]).unwrap()["conditions"].clone();
    assert!(eventually(PATIENCE, || conditions().as_array().unwrap().len() == 3), "{:#}", conditions());
    let problems: Vec<String> = conditions()
        .as_array()
        .unwrap()
        .iter()
        .map(|row| format!("{}: {}", row["object"].as_str().unwrap(), row["problem"].as_str().unwrap()))
        .collect();
    let of = |pod: &str, what: &str| {
        format!("multi-networkpolicy shop/all: selects net1 of shop/{pod} on shop/{pod}, where {what}")
    };
    let nothing = |why: &str| {
        format!(
            "nothing is enforced ({why}): it has no effect there; change that, or take a network of another kind \
             (docs/limits.md), and recreate the pod"
        )
    };
    assert_eq!(
        problems,
        [
            of("alone", &nothing("enforce is never, by the network's definition or the agent's settings")),
            of(
                "strict",
                "enforcement is full-unless-privileged (programs run in the pod, and its container main has CAP_NET_RAW)"
            ),
            of("user", &nothing("the pod drives the device (memif) itself, past the kernel")),
        ]
    );
    for pod in pods {
        second.del(pod).success();
    }
    assert_eq!(links(&second), BTreeMap::new());
    Snapshot::take(&second, &pods).unwrap().assert_nothing_is_left();
}

/// An object with a field for annotations.
fn with_annotations(mut object: Value) -> Value {
    if object["metadata"]["annotations"].is_null() {
        object["metadata"]["annotations"] = json!({});
    }
    object
}

/// A port that another plugin adds to a bridge is not an uplink, through which packets would take the fast path
/// unjudged.
#[test]
fn what_a_port_of_another_plugin_sends_into_a_bridge_with_a_fast_path_is_judged() {
    let test = "what_a_port_of_another_plugin_sends";
    let Some(from) = plugins(test, &["bridge", "static"]) else { return };
    let mut node = Node::new(&[]).unwrap();
    install(&node, &from, &["static"]).unwrap();
    std::os::unix::fs::symlink(from.join("bridge"), node.path("cni-bin/foreign")).unwrap();
    node.set("fastPath", json!("on"));
    let ipam = json!({"type": "static", "addresses": [{"address": "10.50.0.77/24"}]});
    let port = json!({"cniVersion": "1.0.0", "type": "foreign", "bridge": "br0", "ipam": ipam});
    node.write("port", &network(NAMESPACE, "port", &port)).unwrap();
    for (name, networks) in [("a", json!("port")), ("b", Value::Null)] {
        node.write(name, &pod(name, &json!({"app": name}), &networks)).unwrap();
    }
    let spec = json!({
        "podSelector": {}, "policyTypes": ["Egress"], "egress": [{"ports": [{"protocol": "UDP", "port": 7}]}]
    });
    node.write("policy", &policy("few", "shop/port", &spec)).unwrap();
    node.start().unwrap();
    let [a, b] = ["a", "b"].map(|name| Pod::new(name).unwrap());
    for pod in [&a, &b] {
        node.add(pod).success();
    }
    let rows = || node.ctl(&["attachments"]).unwrap();
    let default_of = |rows: &Value, pod: &str| {
        let mut rows = rows.as_array().unwrap().iter();
        rows.find(|row| row["pod"]["name"] == pod && row["ifname"] == "eth0").unwrap().clone()
    };
    let is_on = || default_of(&rows(), "b")["fast_path"]["state"] == "on";
    assert!(eventually(PATIENCE, is_on), "{:#}", rows());
    let own = row(&node, "a");
    assert_eq!((&own["enforcement"], &own["fast_path"]["state"]), (&json!("full"), &json!("plugin")));
    assert_eq!(node.ctl(&["status"]).unwrap()["uplinks"], json!([]));

    let mac = |row: &Value| row["mac"].as_str().unwrap().parse::<Mac>().unwrap();
    let witness = RawSocket::open(&b.namespace, "eth0").unwrap();
    let socket = RawSocket::open(&a.namespace, "net1").unwrap();
    let to_b = |port: u16| {
        let packet = Packet::between("10.50.0.77", "10.50.0.3").from_mac(mac(&own)).udp(4000 + port, port);
        let mut frame = packet.frame();
        frame[..6].copy_from_slice(&mac(&default_of(&rows(), "b")).0);
        frame
    };
    socket.send(&to_b(9)).unwrap();
    let dropped = || {
        let stats = node.ctl(&["stats", "--pod", "shop/a"]).unwrap();
        stats.as_array().unwrap().iter().any(|row| row["dropped"]["egress-port"].as_u64() > Some(0))
    };
    assert!(eventually(PATIENCE, dropped));
    let tail = |frame: &[u8]| frame[frame.len() - 12..].to_vec();
    socket.send(&to_b(7)).unwrap();
    let seen = witness.frames_until(&tail(&to_b(7)), PATIENCE).unwrap();
    let came = |port: u16| seen.iter().any(|frame| frame.ends_with(&tail(&to_b(port))));
    assert_eq!((came(7), came(9)), (true, false));
    for pod in [&a, &b] {
        node.del(pod).success();
    }
    Snapshot::take(&node, &[&a, &b]).unwrap().assert_nothing_is_left();
}
