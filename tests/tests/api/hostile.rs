//! Authors who create as many objects as the server allows, beside tenants who attach their pods meanwhile.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use netattach_tests::api_server::Request;
use netattach_tests::manifest::{self, NAMESPACE};
use netattach_tests::traffic::{Ending, PATIENCE, eventually, stretched};
use netattach_tests::{Node, Pod};
use serde_json::{Value, json};

use crate::rig::{NODE, Rig, timed};

/// The namespace of the author.
const HOSTILE: &str = "aardvark";
/// The author's number of definitions.
const MANY: usize = 10_000;
/// The most that a runtime's call and a question may take meanwhile.
const IN_TIME: Duration = Duration::from_secs(10);

/// The author's definitions: some are valid, some invalid in different ways, some are no definitions at all. Together
/// they exceed the bound on a cluster's definitions.
fn definition(number: usize) -> Value {
    let name = format!("d{number:05}");
    let padding = " ".repeat(8000);
    match number % 6 {
        0 => {
            let subnet = format!("10.{}.{}.0/24", 100 + number / 256 % 100, number % 256);
            let config = json!({
                "cniVersion": "1.0.0", "type": "bridge", "bridge": format!("h{number}"),
                "ipam": {"type": "host-local", "ranges": [[{"subnet": subnet}]]}
            });
            let mut network = manifest::network(HOSTILE, &name, &config);
            network["spec"]["config"] = json!(format!("{config}{padding}"));
            network
        }
        1 => {
            let mut network = manifest::network(HOSTILE, &name, &json!({}));
            network["spec"]["config"] = json!(format!("{{{padding}"));
            network
        }
        2 => {
            let ipam = json!({"type": "host-local", "ranges": [[{"subnet": "10.0.0.0/33"}]]});
            manifest::network(HOSTILE, &name, &json!({"cniVersion": "1.0.0", "type": "bridge", "ipam": ipam}))
        }
        3 => {
            // The refusal must not repeat all of it.
            let kind = format!("no-such-plugin-{}", "x".repeat(8000));
            manifest::network(HOSTILE, &name, &json!({"cniVersion": "1.0.0", "type": kind}))
        }
        4 => {
            // Its configuration would be a file of the node.
            let mut network = manifest::network(HOSTILE, &name, &json!({}));
            network["spec"] = json!({});
            network
        }
        _ => {
            let mut network = manifest::network(HOSTILE, &name, &json!({}));
            network["spec"]["config"] = json!({"type": "bridge"});
            network
        }
    }
}

/// Returns the output of `netattachctl status`, with the size and the duration of the answer.
fn status(rig: &Rig) -> (Value, Duration) {
    let begin = Instant::now();
    let status = rig.node.whole_status().unwrap();
    (status, begin.elapsed())
}

/// Returns the rows about objects of the author, and of others.
fn rows(status: &Value) -> (Vec<String>, Vec<String>) {
    let text =
        |row: &Value| format!("{}: {}", row["object"].as_str().unwrap(), row["problem"].as_str().unwrap());
    let both = ["source", "troubles"].iter().flat_map(|list| status[list].as_array().unwrap());
    both.map(text).partition(|row| row.contains(HOSTILE))
}

/// The longest calls and questions.
#[derive(Debug, Default)]
struct Longest {
    add: Duration,
    del: Duration,
    status: Duration,
    rounds: usize,
}

impl Longest {
    /// Attaches and detaches a pod, and asks how things are.
    fn round(&mut self, rig: &Rig) {
        let pod = Pod::new("good").unwrap();
        let (took, added) = timed(&rig.call("ADD", &pod));
        added.success();
        self.add = self.add.max(took);
        self.status = self.status.max(status(rig).1);
        let (took, deleted) = timed(&rig.call("DEL", &pod));
        deleted.success();
        self.del = self.del.max(took);
        self.rounds += 1;
    }

    fn check(&self, when: &str) {
        eprintln!("{when}: {self:?}");
        let most = stretched(IN_TIME);
        assert!(self.add < most && self.del < most && self.status < most, "{when}: {self:?}");
    }
}

#[test]
fn an_author_of_ten_thousand_definitions_keeps_no_other_tenant_waiting() {
    let rig = Rig::started();
    rig.pod("good");
    // An error of another tenant is reported all the same.
    let policy =
        manifest::policy("lost", "shop/nowhere", &json!({"podSelector": {}, "policyTypes": ["Ingress"]}));
    rig.server.create(&policy).unwrap();
    rig.server.create(&manifest::network(NAMESPACE, "wrong", &json!({"type": "bridge", "ipam": 7}))).unwrap();
    rig.server.create(&manifest::namespace(HOSTILE, &json!({}))).unwrap();
    let said_of_others = |status: &Value| {
        let (_, others) = rows(status);
        others.iter().any(|row| row.contains("multi-networkpolicy shop/lost: "))
            && others.iter().any(|row| row.contains("network-attachment-definition shop/wrong: "))
    };
    assert!(eventually(PATIENCE, || said_of_others(&status(&rig).0)));

    let done = AtomicBool::new(false);
    let mut longest = Longest::default();
    thread::scope(|scope| {
        scope.spawn(|| {
            let _ending = Ending(&done);
            let mut large = manifest::pod("large", &json!({}), &json!("x".repeat(1 << 20)));
            large["metadata"]["namespace"] = json!(HOSTILE);
            large["spec"]["nodeName"] = json!(NODE);
            rig.server.create(&large).unwrap();
            for number in 0..MANY {
                rig.server.create(&definition(number)).unwrap();
            }
        });
        while !done.load(Ordering::Relaxed) {
            longest.round(&rig);
        }
    });
    longest.check("while they are made");

    // All of it has been read when the last one is known.
    let mut last = Value::Null;
    let is_known = || {
        last = status(&rig).0;
        let (hostile, _) = rows(&last);
        hostile.iter().any(|row| row.contains("definitions of a cluster have at most"))
            && hostile.iter().any(|row| row.starts_with(&format!("pod {HOSTILE}/large: ")))
    };
    assert!(eventually(PATIENCE, is_known), "{last:#}");
    let mut longest = Longest::default();
    for _ in 0..5 {
        longest.round(&rig);
    }
    longest.check("while they are there");
    let (hostile, others) = rows(&last);
    let bytes = last.to_string().len();
    eprintln!("{} rows about its objects, {bytes} bytes, agent {}", hostile.len(), last["memory_bytes"]);
    assert!(said_of_others(&last), "{others:#?}");
    // 128 unreadable ones, 100 readable ones, 100 whose plugin does not exist, and the count of the others.
    assert!(hostile.len() <= 340, "{} rows", hostile.len());
    assert!(bytes < 256 << 10, "{bytes} bytes");

    let mut longest = Longest::default();
    for number in 0..MANY {
        rig.server.delete("network-attachment-definitions", HOSTILE, &format!("d{number:05}")).unwrap();
        if number % 2000 == 0 {
            longest.round(&rig);
        }
    }
    rig.server.delete("pods", HOSTILE, "large").unwrap();
    longest.check("while they go");
    let is_gone = || {
        last = status(&rig).0;
        rows(&last).0.is_empty()
    };
    assert!(eventually(PATIENCE, is_gone), "{:#?}", rows(&last).0);
    assert!(said_of_others(&last), "{last:#}");
}

/// Unreadable definitions, each with its own event: more than the queue of events holds, at one a second.
#[test]
fn authors_of_very_many_events_keep_those_of_no_other_tenant_waiting() {
    let authors = ["author-a", "author-b", "author-c"];
    let mut rig = Rig::started();
    let unreadable = |namespace: &str, name: &str| {
        let anything = json!({"metadata": {"namespace": namespace, "name": name}, "spec": {"config": [1]}});
        rig.server.put_as_is("network-attachment-definitions", namespace, name, anything).unwrap();
    };
    let is_of = |one: &Request, namespace: &str| {
        one.resource == "events" && one.body["regarding"]["namespace"] == namespace
    };
    // Something of their namespaces is on the node.
    for namespace in authors.into_iter().chain([NAMESPACE]) {
        let mut pod = manifest::pod("there", &json!({}), &json!(""));
        pod["metadata"]["namespace"] = json!(namespace);
        pod["spec"]["nodeName"] = json!(NODE);
        rig.server.create(&pod).unwrap();
    }
    let mark = rig.server.mark();
    for author in authors {
        for number in 0..128 {
            unreadable(author, &format!("d{number}"));
        }
    }
    // The events of a check are queued together, and use up the burst. Each waits for up to 30 s before.
    let late = Duration::from_secs(60);
    let count =
        |namespace: &str| rig.server.requests_since(mark).iter().filter(|one| is_of(one, namespace)).count();
    assert!(eventually(late, || count(authors[0]) > 5));
    unreadable(NAMESPACE, "wrong");
    assert!(eventually(late, || count(NAMESPACE) > 0), "those of others go first");
    let log = rig.node.stop().unwrap();
    assert!(log.contains("network-attachment-definition shop/wrong: "), "{log}");
    for author in authors {
        let lines = log.lines().filter(|line| line.contains(author)).count();
        assert!((1..50).contains(&lines), "{author}: {lines} lines");
    }
}

/// Returns the remaining attachments and leases.
fn left(node: &Node) -> (usize, Vec<String>) {
    let attachments = node.ctl(&["attachments"]).unwrap().as_array().unwrap().len();
    let mut leases = Vec::new();
    let mut directories = vec![node.path("leases")];
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(directory).unwrap() {
            let entry = entry.unwrap();
            let name = entry.file_name().to_string_lossy().into_owned();
            if entry.file_type().unwrap().is_dir() {
                directories.push(entry.path());
            } else if name.parse::<std::net::IpAddr>().is_ok() {
                leases.push(name);
            }
        }
    }
    (attachments, leases)
}

/// An author's change of the definition.
type Spoil<'a> = &'a dyn Fn(&Rig);

#[test]
fn a_definition_that_changes_under_a_pod_changes_nothing_of_its_del() {
    let rig = Rig::started();
    let spoiled: [(&str, Spoil<'_>); 4] = [
        ("another-bridge", &|rig| {
            let config = json!({
                "cniVersion": "1.0.0", "type": "bridge", "bridge": "br9",
                "ipam": rig.node.host_local(&["10.9.0.0/24"])
            });
            rig.server.apply(&manifest::network(NAMESPACE, "lan-a", &config)).unwrap();
        }),
        ("another-plugin", &|rig| {
            let config = json!({"cniVersion": "1.0.0", "type": "no-such-plugin"});
            rig.server.apply(&manifest::network(NAMESPACE, "lan-a", &config)).unwrap();
        }),
        ("unreadable", &|rig| {
            let anything =
                json!({"metadata": {"namespace": NAMESPACE, "name": "lan-a"}, "spec": {"config": [1]}});
            rig.server.put_as_is("network-attachment-definitions", NAMESPACE, "lan-a", anything).unwrap();
        }),
        ("gone", &|rig| rig.server.delete("network-attachment-definitions", NAMESPACE, "lan-a").unwrap()),
    ];
    let whole = rig.server.get("network-attachment-definitions", NAMESPACE, "lan-a").unwrap();
    for (name, spoil) in spoiled {
        let mut network = manifest::network(NAMESPACE, "lan-a", &json!({}));
        network["spec"] = whole["spec"].clone();
        rig.server.apply(&network).unwrap();
        let pod = rig.pod(name);
        let mut last = None;
        let attached = eventually(PATIENCE, || {
            let outcome = rig.add(&pod);
            let exit = outcome.exit;
            last = Some(outcome);
            exit == 0
        });
        assert!(attached, "{name}: {last:?}");
        assert_eq!(left(&rig.node).0, 3, "{name}");
        spoil(&rig);
        // The agent has seen the change: it attaches another pod with the present definition, reports the problem, or
        // attaches none.
        let other = rig.pod(&format!("{name}-2"));
        let is_seen = eventually(PATIENCE, || {
            let exit = rig.add(&other).exit;
            let attachments = rig.node.ctl(&["attachments"]).unwrap().to_string();
            rig.del(&other).success();
            let rows = rows(&status(&rig).0).1;
            let is_said =
                rows.iter().any(|row| row.starts_with("network-attachment-definition shop/lan-a: "));
            exit != 0 || is_said || attachments.contains("10.9.0.")
        });
        assert!(is_seen, "{name}");
        rig.del(&pod).success();
        assert_eq!(left(&rig.node), (0, Vec::new()), "{name}");
    }
}

/// A renamed definition has another pool, which would begin with the addresses of existing pods.
#[test]
fn a_definition_that_is_renamed_under_a_pod_gives_nobody_its_address() {
    let rig = Rig::started();
    let address = |name: &str| {
        let rows = rig.node.ctl(&["attachments"]).unwrap();
        let row =
            rows.as_array().unwrap().iter().find(|row| row["pod"]["name"] == name && row["ifname"] == "net1");
        row.unwrap()["addresses"][0].as_str().unwrap().to_owned()
    };
    let first = rig.pod("first");
    rig.add(&first).success();
    let taken = address("first");
    let renamed = json!({
        "cniVersion": "1.0.0", "name": "renamed", "type": "bridge", "bridge": "br1",
        "ipam": rig.node.host_local(&["10.61.0.0/24"])
    });
    rig.server.apply(&manifest::network(NAMESPACE, "lan-a", &renamed)).unwrap();
    let second = rig.pod("second");
    let mut others = Vec::new();
    let is_said = eventually(PATIENCE, || {
        rig.add(&second).success();
        assert_ne!(address("second"), taken);
        rig.del(&second).success();
        others = rows(&status(&rig).0).1;
        others.iter().any(|row| row.contains("attachments live in pool"))
    });
    assert!(is_said, "{others:#?}");
    rig.del(&first).success();
    let is_over = || !rows(&status(&rig).0).1.iter().any(|row| row.contains("attachments live in pool"));
    assert!(eventually(PATIENCE, is_over), "the last pod of the pool has gone");
    rig.add(&second).success();
    assert_eq!(address("second"), taken, "of the new pool");
    rig.del(&second).success();
    assert_eq!(left(&rig.node), (0, Vec::new()));
}
