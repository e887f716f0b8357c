//! Input that is too large, or a file of the wrong type: refused with the reason, without effect on other pods.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use netattach::budget;
use netattach_tests::manifest::{NAMESPACE, annotated, network, pod, policy};
use netattach_tests::node::{DEFAULT_NETWORK, WIRE};
use netattach_tests::peak::Peak;
use netattach_tests::snapshot::{Network, Snapshot};
use netattach_tests::traffic::{PATIENCE, SILENCE, eventually, ping};
use netattach_tests::{Node, Outcome, Pod};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::{Value, json};

/// Limit of the agent's own resident memory, in KiB (`docs/budgets.md`), which no input below may exceed.
const MOST_MEMORY: u64 = 64 << 10;
/// How long the agent may take to read the largest manifest, and to read it again because it had just changed, while
/// compilers and other tests use the processors.
const READING: Duration = Duration::from_secs(120);

/// ADD of a pod that the source may not have read yet.
fn add(node: &Node, pod: &Pod) -> Outcome {
    let mut last = None;
    let known = || {
        let outcome = node.add(pod);
        let unknown = outcome.exit != 0 && outcome.json["msg"].as_str().unwrap().contains("not known to");
        last = Some(outcome);
        !unknown
    };
    assert!(eventually(PATIENCE, known));
    last.unwrap()
}

/// A pod with this annotation, under a unique name.
fn wanting(node: &Node, name: &str, networks: &str) -> Pod {
    let manifest = annotated(pod(name, &json!({}), &Value::Null), "k8s.v1.cni.cncf.io/networks", networks);
    node.write(name, &manifest).unwrap();
    Pod::new(name).unwrap()
}

fn defined(node: &Node, name: &str, config: &Value) {
    node.write(&format!("net-{name}"), &network(NAMESPACE, name, config)).unwrap();
}

fn fifo(path: &std::path::Path) {
    mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
}

fn assert_refused(outcome: Outcome, code: u64, words: &str) {
    let (found, message) = outcome.failure();
    assert_eq!(found, code, "{message}");
    assert!(message.contains(words), "{message}");
}

/// Runs `work` and checks that the agent stays within its memory limit.
fn within_memory<T>(node: &Node, what: &str, work: impl FnOnce() -> T) -> T {
    let peak = Peak::of(node);
    let done = work();
    let most = peak.most();
    // Shown when the test fails, and with --nocapture.
    eprintln!("{what}: at most {most} KiB");
    assert!(most <= MOST_MEMORY, "{what}: {most} KiB");
    done
}

/// Adds a pod like a runtime: repeated if others used the memory for as long as an ADD waits (code 11).
fn add_in_turn(node: &Node, pod: &Pod) -> Outcome {
    let mut result = add(node, pod);
    eventually(PATIENCE * 2, || {
        let is_told_to_wait = result.json["code"] == json!(11);
        if is_told_to_wait {
            result = add(node, pod);
        }
        !is_told_to_wait
    });
    result
}

fn bridge(node: &Node, name: &str) -> Value {
    json!({"cniVersion": "1.0.0", "type": "bridge", "bridge": name, "ipam": node.host_local(&["10.61.0.0/16"])})
}

#[test]
fn the_largest_of_everything_is_refused_or_carried_out_within_64_mib() {
    /// Number of pods on one bridge, which has at most 1,023 ports.
    const PODS: usize = 8;
    const LARGE: usize = 8;
    let mut node = Node::new(&[]).unwrap();
    node.set("maxAttachments", json!(2048));
    defined(&node, "lan", &bridge(&node, "br1"));
    let mut padded = bridge(&node, "br1");
    // The maximum number of values and, nearly, of bytes.
    padded["padding"] = json!(vec![100_000; 36 << 10]);
    defined(&node, "large", &padded);
    node.start().unwrap();
    let flood = vec![json!({"name": "lan"}); 12_000];
    let flood = wanting(&node, "flood", &Value::Array(flood).to_string());
    assert_refused(add(&node, &flood), 7, "networks annotation: ");
    let many = vec!["lan"; 65].join(",");
    assert_refused(
        add(&node, &wanting(&node, "many", &many)),
        7,
        "networks of a pod: 65 networks, and at most 64",
    );
    let deep =
        format!(r#"[{{"name": "lan", "cni-args": {{"a": {}1{}}}}}]"#, "[".repeat(4000), "]".repeat(4000));
    assert_refused(add(&node, &wanting(&node, "deep", &deep)), 7, "recursion limit");
    // The maximum number of networks, all at once.
    let all = vec!["lan"; 64].join(",");
    let pods: Vec<Pod> = (0..PODS).map(|number| wanting(&node, &format!("p{number}"), &all)).collect();
    // Each needs a third of the available memory: they are not planned at once.
    let of_large: Vec<Pod> =
        (0..LARGE).map(|number| wanting(&node, &format!("of-large-{number}"), "large")).collect();
    let all_pods = || pods.iter().chain(&of_large);
    within_memory(&node, "ADD", || {
        std::thread::scope(|scope| {
            let added = all_pods().map(|pod| (pod, scope.spawn(|| add_in_turn(&node, pod))));
            for (pod, added) in added.collect::<Vec<_>>() {
                let result = added.join().unwrap();
                assert_eq!(result.exit, 0, "{}: {:#}", pod.name, result.json);
            }
        });
    });
    within_memory(&node, "CHECK", || {
        std::thread::scope(|scope| {
            all_pods().for_each(|pod| drop(scope.spawn(|| node.check(pod).success())));
        });
    });
    within_memory(&node, "DEL", || {
        std::thread::scope(|scope| {
            all_pods().for_each(|pod| drop(scope.spawn(|| node.del(pod).success())));
        });
    });
    node.del(&flood).success();
    let links = Network::of(&node.namespace).unwrap().links;
    assert_eq!(links.keys().collect::<Vec<_>>(), ["br0", "br1", "lo"]);
}

/// The limits of a manifest: bytes, and objects.
const MANIFEST: (usize, usize) = (budget::MANIFEST.most, budget::OBJECTS.most);

/// A list padded to the maximum size.
fn list(items: &[String]) -> String {
    let text = format!(r#"{{"apiVersion": "v1", "kind": "List", "items": [{}]}}"#, items.join(","));
    format!("{text}{}", " ".repeat(MANIFEST.0 - text.len()))
}

fn many_pods(label: &str) -> String {
    const AROUND: usize = 300;
    let pod = |number: usize| {
        let pod = pod(&format!("many-{number}"), &json!({"app": label}), &Value::Null);
        annotated(pod, "filling", &"x".repeat(MANIFEST.0 / MANIFEST.1 - AROUND)).to_string()
    };
    list(&(0..MANIFEST.1).map(pod).collect::<Vec<_>>())
}

/// A list of pods in YAML, as `kubectl get` writes it.
fn many_yaml_pods(label: &str) -> String {
    const AROUND: usize = 200;
    let mut text = "apiVersion: v1\nitems:\n".to_owned();
    for number in 0..MANIFEST.1 - 192 {
        let filling = "x".repeat(MANIFEST.0 / MANIFEST.1 - AROUND);
        text.push_str(&format!(
            "- apiVersion: v1\n  kind: Pod\n  metadata:\n    name: many-{number}\n    namespace: {NAMESPACE}\n    labels:\n      app: \
             {label}\n    annotations:\n      filling: {filling}\n"
        ));
    }
    let last = MANIFEST.1 - 1;
    text.push_str(&format!(
        "- {{apiVersion: v1, kind: Pod, metadata: {{name: many-{last}, namespace: {NAMESPACE}}}}}\n"
    ));
    text + "kind: List\nmetadata:\n  resourceVersion: \"\"\n"
}

/// Policies with as many network names as an annotation of a cluster can have.
fn many_networks() -> String {
    const SIZE: usize = 255 << 10;
    const EACH: usize = "n00000,".len();
    let networks = (0..SIZE / EACH).map(|number| format!("n{number:05}")).collect::<Vec<_>>().join(",");
    let spec = json!({"podSelector": {}, "policyTypes": ["Ingress"]});
    let policy = |number: usize| policy(&format!("many-{number}"), &networks, &spec).to_string();
    list(&(0..MANIFEST.0 / SIZE - 2).map(policy).collect::<Vec<_>>())
}

fn large_definitions(label: &str) -> String {
    const SIZE: usize = 250 << 10;
    let config =
        json!({"cniVersion": "1.0.0", "type": "bridge", "label": label, "padding": "x".repeat(SIZE)});
    let definition = |number: usize| network(NAMESPACE, &format!("large-{number}"), &config).to_string();
    list(&(0..MANIFEST.0 / SIZE - 1).map(definition).collect::<Vec<_>>())
}

#[test]
fn the_largest_manifests_and_standard_input_are_read_within_64_mib() {
    let mut node = Node::new(&[]).unwrap();
    node.start().unwrap();
    let last = Pod::new(&format!("many-{}", MANIFEST.1 - 1)).unwrap();
    // An ADD waits 5 s for its pod to be read.
    let attach = |pod: &Pod| {
        let mut answer = Value::Null;
        let is_attached = eventually(READING, || {
            let outcome = node.add(pod);
            answer = outcome.json;
            outcome.exit == 0
        });
        assert!(is_attached, "{}: {answer:#}", pod.name);
    };
    let write = |text: String, name: &str| {
        fs::write(node.path("many.tmp"), text).unwrap();
        fs::rename(node.path("many.tmp"), node.path("source").join(name)).unwrap();
        // Files are read one after the other.
        let after = wanting(&node, "after", "");
        attach(&after);
        node.del(&after).success();
        node.remove("after").unwrap();
    };
    within_memory(&node, "definitions", || write(large_definitions("first"), "a.json"));
    within_memory(&node, "other definitions", || write(large_definitions("second"), "a.json"));
    fs::remove_file(node.path("source").join("a.json")).unwrap();
    within_memory(&node, "pods", || {
        write(many_pods("first"), "b.json");
        attach(&last);
        node.del(&last).success();
    });
    within_memory(&node, "other pods", || write(many_pods("second"), "b.json"));
    fs::remove_file(node.path("source").join("b.json")).unwrap();
    within_memory(&node, "pods in YAML", || write(many_yaml_pods("first"), "c.yaml"));
    // Flow mappings and quotes: the full parser reads each of these.
    within_memory(&node, "other pods in YAML", || write(many_yaml_pods("\"second\" # not plain"), "c.yaml"));
    attach(&last);
    node.del(&last).success();
    fs::remove_file(node.path("source").join("c.yaml")).unwrap();
    // The maximum number of keys that reach the YAML parser, each with an empty value, in the largest file. Beside the
    // commas, a document has three dashes, a colon and a bracket.
    within_memory(&node, "values in YAML", || {
        let document = format!("a: {{{}}}\n---\n", "12345,".repeat(budget::YAML_MARKS.most - 5));
        write(document.repeat(MANIFEST.0 / document.len()), "d.yaml");
    });
    fs::remove_file(node.path("source").join("d.yaml")).unwrap();
    within_memory(&node, "items without content", || {
        write(list(&vec!["{}".to_owned(); 5_000_000]), "e.json");
    });
    fs::remove_file(node.path("source").join("e.json")).unwrap();
    within_memory(&node, "policies for very many networks", || {
        write(many_networks(), "f.json");
        // The policies are in force, and their networks are checked. The agent may read the file again meanwhile, as it
        // has just changed, and is not ready while that takes longer than 10 s.
        let asked = || node.whole_status().unwrap().to_string();
        assert!(eventually(READING, || asked().contains("is for more than 256 networks")), "{}", asked());
    });
    fs::remove_file(node.path("source").join("f.json")).unwrap();
    node.write("last", &pod(&last.name, &json!({}), &Value::Null)).unwrap();
    // The calls below are not repeated: the pod has been read before them.
    attach(&last);
    node.del(&last).success();
    // The list around it has few values.
    let mut list = node.cni_config("1.0.0");
    let most = budget::STDIN_VALUES.most;
    list["padding"] = json!(vec![0; most]);
    let text = list.to_string();
    assert_refused(node.call("ADD", &last).stdin(text).run(), 6, "values of standard input: ");
    list["padding"] = json!(vec![0; most - 16]);
    let text = list.to_string();
    let text = format!("{text}{}", " ".repeat(budget::STDIN.most - text.len()));
    within_memory(&node, "standard input", || {
        std::thread::scope(|scope| {
            for verb in ["ADD", "STATUS", "DEL"] {
                scope.spawn(|| drop(node.call(verb, &last).stdin(&text).run()));
            }
        });
        node.call("DEL", &last).stdin(&text).run().success();
        node.call("ADD", &last).stdin(&text).run().success();
        node.call("DEL", &last).stdin(&text).run().success();
    });
}

/// One policy with the maximum number of rules, each with a block and a port of its own.
#[test]
fn the_largest_policy_is_in_force_within_64_mib() {
    const RULES: usize = 100_000;
    const SERVER: &str = "fd00:50::2";
    const CLIENT: &str = "fd00:50::3";
    let rule = |number: usize| {
        let block = format!("10.{}.{}.{}/32", 128 + (number >> 16), number >> 8 & 255, number & 255);
        let ports = json!([{"protocol": "TCP", "port": 1 + number % 60_000}]);
        json!({"from": [{"ipBlock": {"cidr": block}}], "ports": ports})
    };
    let write = |node: &Node, first: usize, last: Value| {
        let rules = (first..first + RULES - 1).map(rule).chain([last]).collect::<Vec<_>>();
        let spec = json!({"podSelector": {}, "policyTypes": ["Ingress"], "ingress": rules});
        node.write("many", &policy("many", DEFAULT_NETWORK, &spec)).unwrap();
    };
    let mut node = Node::new(&[]).unwrap();
    let pods = ["server", "client"].map(|name| wanting(&node, name, ""));
    node.start().unwrap();
    for pod in &pods {
        node.add(pod).success();
    }
    // Checked by traffic: a query about that many rules would take memory of its own.
    let reaches = || ping(&pods[1].namespace, SERVER.parse().unwrap(), SILENCE).unwrap();
    assert!(eventually(PATIENCE, reaches));
    within_memory(&node, "policy", || {
        write(&node, 0, rule(RULES));
        assert!(eventually(PATIENCE, || !reaches()));
    });
    within_memory(&node, "policy in place of another", || {
        write(&node, 7, json!({"from": [{"ipBlock": {"cidr": format!("{CLIENT}/128")}}]}));
        assert!(eventually(PATIENCE, reaches));
        // The previous contents are removed meanwhile.
        std::thread::sleep(std::time::Duration::from_secs(6));
    });
    within_memory(&node, "afterwards", || std::thread::sleep(std::time::Duration::from_secs(1)));
    assert_eq!(node.ctl(&["policy"]).unwrap()["conditions"], json!([]));
    for pod in &pods {
        node.del(pod).success();
    }
}

#[test]
fn one_pod_does_not_take_all_numbers() {
    let mut node = Node::new(&[]).unwrap();
    defined(&node, "lan", &bridge(&node, "br1"));
    let plain = wanting(&node, "plain", "lan");
    let greedy = wanting(&node, "greedy", &vec!["lan"; 32].join(","));
    node.start().unwrap();
    assert_refused(node.add(&greedy), 7, "attachments of a pod: 33 attachments, and at most 32");
    node.add(&plain).success();
    node.del(&plain).success();
    node.del(&greedy).success();
    Snapshot::take(&node, &[&plain, &greedy]).unwrap().assert_nothing_is_left();
}

#[test]
fn what_is_no_regular_file_holds_nobody_up() {
    let mut node = Node::new(&[]).unwrap();
    let with = |resolv_conf: &str| {
        let mut config = bridge(&node, "br1");
        config["ipam"]["resolvConf"] = json!(resolv_conf);
        config
    };
    let at = |name: &str| node.path(name).to_string_lossy().into_owned();
    fifo(&node.path("resolv-fifo"));
    fs::write(node.path("resolv-large"), vec![b'#'; (64 << 10) + 1]).unwrap();
    defined(&node, "fifo", &with(&at("resolv-fifo")));
    defined(&node, "zeros", &with("/dev/zero"));
    defined(&node, "large", &with(&at("resolv-large")));
    // The source keeps working, and reads later files.
    fifo(&node.path("source").join("a-fifo.yaml"));
    fs::create_dir_all(node.path("cni-conf")).unwrap();
    fifo(&node.path("cni-conf").join("a-fifo.conf"));
    node.set("delegation", json!({"timeoutSeconds": 20}));
    node.start().unwrap();
    let began = Instant::now();
    for (name, words) in [
        ("fifo", "is no regular file"),
        ("zeros", "is no regular file"),
        ("large", "longer than 65536 bytes"),
    ] {
        let pod = wanting(&node, name, name);
        assert_refused(add(&node, &pod), 5, words);
        node.del(&pod).success();
    }
    assert!(began.elapsed() < PATIENCE, "{:?}", began.elapsed());
    let problems = node.ctl(&["status"]).unwrap().to_string();
    assert!(problems.contains("a-fifo.yaml"), "{problems}");
    let after = wanting(&node, "after", "");
    assert_eq!(add(&node, &after).exit, 0);
    node.del(&after).success();
}

#[test]
fn a_directory_or_name_that_cannot_be_keeps_no_pod_from_ending() {
    let mut node = Node::new(&[]).unwrap();
    fs::write(node.path("file"), "").unwrap();
    std::os::unix::fs::symlink("loop", node.path("loop")).unwrap();
    let long = format!("/{}", "x".repeat(300));
    let data_dir = |directory: &str| {
        let mut config = bridge(&node, "br1");
        config["ipam"]["dataDir"] = json!(directory);
        config
    };
    let below = |name: &str| node.path(name).join("leases").to_string_lossy().into_owned();
    defined(&node, "file", &data_dir(&below("file")));
    defined(&node, "loop", &data_dir(&below("loop")));
    defined(&node, "long", &data_dir(&long));
    let mut named = bridge(&node, "br1");
    named["name"] = json!("x".repeat(300));
    defined(&node, "named", &named);
    node.start().unwrap();
    for (name, code) in [("file", 5), ("loop", 5), ("long", 7), ("named", 7)] {
        let pod = wanting(&node, name, name);
        for _ in 0..3 {
            let (found, message) = add(&node, &pod).failure();
            assert_eq!(found, code, "{name}: {message}");
        }
        node.del(&pod).success();
        node.del(&pod).success();
        Snapshot::take(&node, &[&pod]).unwrap().assert_nothing_is_left();
    }
    assert!(!Network::of(&node.namespace).unwrap().links.contains_key("br1"), "made for an ADD that failed");
}

#[test]
fn a_bridge_that_is_made_for_an_add_that_fails_goes_with_it() {
    let mut node = Node::new(&[]).unwrap();
    node.plugin("fails", &json!({"ADD": {"error": {"code": 100, "msg": "no"}}})).unwrap();
    let config = |bridge: &str| {
        let ipam = json!({"type": "fails"});
        json!({"cniVersion": "1.0.0", "type": "bridge", "bridge": bridge, "ipam": ipam})
    };
    defined(&node, "fails", &config("br9"));
    defined(&node, "pattern", &config("x%d"));
    defined(&node, "works", &bridge(&node, "br8"));
    node.start().unwrap();
    let bridges = || -> Vec<String> {
        let links = Network::of(&node.namespace).unwrap().links;
        links.into_iter().filter(|(_, link)| link.kind == "bridge").map(|(name, _)| name).collect()
    };
    let pod = wanting(&node, "fails", "fails");
    assert_refused(add(&node, &pod), 100, "no");
    assert_eq!(bridges(), Vec::<String>::new());
    let pattern = wanting(&node, "pattern", "pattern");
    assert_refused(add(&node, &pattern), 7, "key bridge: \"x%d\"");
    let call = node.call("ADD", &pattern).with("CNI_IFNAME", "%d");
    assert_refused(call.run(), 4, "interface name contains %");
    assert_eq!(bridges(), Vec::<String>::new());
    // A bridge that existed before, or that has a port, stays.
    let works = wanting(&node, "works", "works");
    assert_eq!(add(&node, &works).exit, 0);
    let made = || Command::new("ip").args(["link", "add", "br9", "type", "bridge"]).status();
    assert!(node.namespace.run(made).unwrap().success());
    assert_refused(add(&node, &pod), 100, "no");
    assert_eq!(bridges(), ["br0", "br8", "br9"]);
    for pod in [&pod, &pattern, &works] {
        node.del(pod).success();
    }
    Snapshot::take(&node, &[&pod, &pattern, &works]).unwrap().assert_nothing_is_left();
}

#[test]
fn thousands_of_routes_are_installed_and_refusals_have_their_codes() {
    const ROUTES: usize = 4000;
    let mut node = Node::new(&[]).unwrap();
    node.add_wire().unwrap();
    let mut routes = bridge(&node, "br1");
    routes["ipam"]["routes"] = (0..ROUTES)
        .map(|number| json!({"dst": format!("10.{}.{}.0/24", 100 + number / 256, number % 256)}))
        .collect();
    defined(&node, "routes", &routes);
    let table = [
        (
            "zeros",
            {
                let mut config = bridge(&node, "br1");
                config["ipam"]["ranges"] = json!([[{"subnet": "010.3.0.0/24"}]]);
                config
            },
            7,
            "010.3.0.0/24",
        ),
        (
            "multicast",
            {
                let mut config = bridge(&node, "br1");
                config["ipam"]["ranges"] = json!([[{"subnet": "224.0.1.0/24"}]]);
                config
            },
            7,
            "subnet 224.0.1.0/24 is multicast",
        ),
        (
            "small",
            json!({
                "cniVersion": "1.0.0", "type": "bridge", "bridge": "br1", "mtu": 68,
                "ipam": node.host_local(&["fd00:61::/64"])
            }),
            7,
            "mtu 68 is below 1280",
        ),
        (
            "gateway",
            {
                let mut config = bridge(&node, "br1");
                config["ipam"]["routes"] = json!([{"dst": "10.9.0.0/24", "gw": "192.0.2.1"}]);
                config
            },
            7,
            "unreachable",
        ),
    ];
    for (name, config, ..) in &table {
        defined(&node, name, config);
    }
    node.start().unwrap();
    let pod = wanting(&node, "routes", "routes");
    assert_eq!(add(&node, &pod).exit, 0);
    let found = Network::of(&pod.namespace).unwrap().routes.len();
    assert!(found >= ROUTES, "{found} routes");
    node.check(&pod).success();
    node.del(&pod).success();
    for (name, _, code, words) in table {
        let pod = wanting(&node, name, name);
        assert_refused(add(&node, &pod), code, words);
        node.del(&pod).success();
    }
    let list = node.cni_config("1.0.0").as_object().unwrap().clone();
    let mut list = Value::Object(list);
    list["runtimeConfig"] = json!([1]);
    assert_refused(node.call("ADD", &pod).stdin(list).run(), 7, "key runtimeConfig: expected an object");
    // Another macvlan has the address.
    let lan = json!({
        "cniVersion": "1.0.0", "type": "macvlan", "master": WIRE, "capabilities": {"mac": true},
        "ipam": node.host_local(&["10.52.0.0/24"])
    });
    defined(&node, "lan", &lan);
    let words = format!("link add other link {WIRE} address 02:00:00:00:00:77 type macvlan mode bridge");
    let elsewhere = netattach_tests::Namespace::new().unwrap();
    let run = || {
        Command::new("ip")
            .args(words.replace("other", &format!("other netns {}", elsewhere.task())).split(' '))
            .status()
    };
    assert!(node.namespace.run(run).unwrap().success());
    netattach_tests::node::ip(&elsewhere, &["link", "set", "other", "up"]).unwrap();
    let taken = wanting(&node, "taken", r#"[{"name": "lan", "mac": "02:00:00:00:00:77"}]"#);
    assert_refused(add(&node, &taken), 11, "Address already in use");
    node.del(&taken).success();
    Snapshot::take(&node, &[&pod, &taken]).unwrap().assert_nothing_is_left();
}
