//! Monitoring of the agent: probes and metrics over HTTP, evaluated by a real Prometheus, the dashboard and the
//! alerts, lines of the log, and traces.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use netattach_tests::api_server::{Fault, Options, Verb, When};
use netattach_tests::manifest::{self, NAMESPACE};
use netattach_tests::node::executable;
use netattach_tests::traffic::{PATIENCE, SILENCE, connects, eventually, ping, stretched};
use netattach_tests::{Namespace, Node, Pod, tools};
use serde_json::{Value, json};

use crate::rig::{NODE, Rig, object};

/// The address of the agents of these tests, each in a namespace of its own.
const AGENT: &str = "127.0.0.1:10475";
const PROMETHEUS: &str = "127.0.0.1:9090";

/// Sends bytes and reads the whole answer: status, and the part after the header.
fn exchange(from: &Namespace, to: &str, bytes: &[u8]) -> std::io::Result<(u16, String)> {
    let to: SocketAddr = to.parse().unwrap();
    let mut stream = from.run(|| TcpStream::connect_timeout(&to, stretched(PATIENCE)))?;
    stream.set_read_timeout(Some(stretched(PATIENCE * 2)))?;
    // The other side may answer, and close, before all is written.
    let _ = stream.write_all(bytes);
    let mut answer = Vec::new();
    let read = stream.read_to_end(&mut answer);
    let text = String::from_utf8_lossy(&answer).into_owned();
    let Some((head, body)) = text.split_once("\r\n\r\n") else {
        read?;
        return Ok((0, text));
    };
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(0);
    let body = if head.to_lowercase().contains("transfer-encoding: chunked") {
        unchunked(body)
    } else {
        body.to_owned()
    };
    Ok((status, body))
}

fn unchunked(mut body: &str) -> String {
    let mut whole = String::new();
    while let Some((size, rest)) = body.split_once("\r\n") {
        let size = usize::from_str_radix(size.trim(), 16).unwrap_or(0);
        whole.push_str(&rest[..size]);
        body = rest[size..].trim_start_matches("\r\n");
    }
    whole
}

fn get(from: &Namespace, to: &str, path: &str) -> (u16, String) {
    let request = format!("GET {path} HTTP/1.1\r\nHost: {to}\r\nConnection: close\r\n\r\n");
    exchange(from, to, request.as_bytes()).unwrap()
}

/// A node with one pod `a` on `storage`, whose agent serves metrics; other keys of its settings.
fn node(settings: &[(&str, Value)]) -> (Node, Pod) {
    let mut node = Node::new(&[manifest::pod("a", &json!({}), &json!("storage"))]).unwrap();
    let storage = json!({"cniVersion": "1.0.0", "type": "veth", "ipam": node.host_local(&["10.51.0.0/29"])});
    node.write("storage", &manifest::network(NAMESPACE, "storage", &storage)).unwrap();
    node.namespace.loopback_up().unwrap();
    node.set("metrics", json!({"listen": AGENT, "perPod": true}));
    for (key, value) in settings {
        node.set(key, value.clone());
    }
    (node, Pod::new("a").unwrap())
}

/// Waits until the agent answers there.
fn await_served(node: &Node) {
    let served = || exchange(&node.namespace, AGENT, b"GET /livez HTTP/1.0\r\n\r\n").is_ok();
    assert!(eventually(PATIENCE, served), "nothing is served");
}

#[test]
fn probes_and_metrics_say_what_is_there() {
    let (mut node, pod) = node(&[]);
    node.start().unwrap();
    await_served(&node);
    let at = &node.namespace;
    assert_eq!(get(at, AGENT, "/livez"), (200, "ok: 0 sandboxes\n".into()));
    assert!(eventually(PATIENCE, || get(at, AGENT, "/readyz").0 == 200));
    let (_, ready) = get(at, AGENT, "/readyz");
    let lines: Vec<&str> = ready.lines().collect();
    assert_eq!(
        (lines.first(), lines.last()),
        (Some(&"[+] source: 1 pod, 2 networks, 0 policies"), Some(&"ready")),
        "{ready}"
    );
    assert!(lines.contains(&"[+] default network: kube-system/default"), "{ready}");

    node.add(&pod).success();
    let name = &pod.container;
    let of_pod = r#"netattach_attachment_info{namespace="shop",pod="a",interface="net1",network="shop/storage",host_interface="#;
    let expected = [
        "netattach_attachments{network=\"shop/storage\",kind=\"veth\",enforcement=\"full\"} 1.0".to_owned(),
        "netattach_attachments{network=\"kube-system/default\",kind=\"bridge\",enforcement=\"full\"} 1.0".to_owned(),
        "netattach_cni_operation_duration_seconds_count{verb=\"ADD\",result=\"ok\"} 1".to_owned(),
        "netattach_ready{condition=\"journal\"} 1.0".to_owned(),
        "netattach_journal_records 1.0".to_owned(),
        // 10.51.0.1 is the gateway.
        "netattach_ipam_pool_addresses{network=\"shop/storage\",family=\"IPv4\"} 5.0".to_owned(),
        "netattach_ipam_pool_addresses_used{network=\"shop/storage\",family=\"IPv4\"} 1.0".to_owned(),
        "netattach_attachment_packets_total{namespace=\"shop\",pod=\"a\",interface=\"net1\",network=\"shop/storage\",direction=\"received\"}".to_owned(),
        format!("container_id=\"{}\"}} 1.0", &name[..name.len().min(12)]),
        of_pod.to_owned(),
    ];
    let mut missing = Vec::new();
    let mut text = String::new();
    let complete = eventually(PATIENCE * 2, || {
        text = get(at, AGENT, "/metrics").1;
        missing = expected.iter().filter(|line| !text.contains(*line)).collect();
        missing.is_empty()
    });
    assert!(complete, "{missing:#?} in\n{text}");
    assert!(text.ends_with("# EOF\n"), "{text}");

    node.del(&pod).success();
    let (_, text) = get(at, AGENT, "/metrics");
    assert!(!text.contains("pod=\"a\""), "{text}");
    assert!(text.contains("netattach_packets_total{network=\"shop/storage\",direction=\"sent\"}"), "{text}");

    // Not ready, but alive.
    node.remove("default").unwrap();
    let mut answer = (0, String::new());
    assert!(
        eventually(PATIENCE, || {
            answer = get(at, AGENT, "/readyz");
            answer.0 == 503
        }),
        "{answer:?}"
    );
    assert!(
        answer.1.contains("[-] default network: ")
            && answer.1.lines().last().unwrap().starts_with("not ready: "),
        "{}",
        answer.1
    );
    assert_eq!(get(at, AGENT, "/livez").0, 200);
}

#[test]
fn an_attachment_has_no_series_of_its_own_if_none_is_wanted_and_a_stage_has_few() {
    let (mut node, pod) = node(&[("metrics", json!({"listen": AGENT, "attachmentInfo": false}))]);
    node.start().unwrap();
    await_served(&node);
    node.add(&pod).success();
    let mut text = String::new();
    let is_counted = eventually(PATIENCE, || {
        text = get(&node.namespace, AGENT, "/metrics").1;
        text.contains("netattach_add_stage_duration_seconds_bucket{")
    });
    assert!(is_counted, "{text}");
    let networks = "netattach_attachments{network=\"shop/storage\",kind=\"veth\",enforcement=\"full\"} 1.0";
    assert!(text.contains(networks), "{text}");
    assert!(!text.contains("pod=\"a\"") && !text.contains("netattach_attachment_info"), "{text}");
    let buckets = |name: &str| -> BTreeSet<&str> {
        let lines = text.lines().filter(|line| line.starts_with(name));
        lines.map(|line| line.split_once("le=\"").unwrap().1.split_once('"').unwrap().0).collect()
    };
    let few = BTreeSet::from(["0.001", "0.01", "0.1", "1.0", "+Inf"]);
    assert_eq!(buckets("netattach_add_stage_duration_seconds_bucket{"), few, "{text}");
    assert_eq!(buckets("netattach_cni_operation_duration_seconds_bucket{").len(), 17, "{text}");
}

/// Whichever call detaches it: here GC of a runtime that does not know the container any more.
#[test]
fn what_an_attachment_counted_since_the_last_scrape_outlives_it_when_gc_detaches_it() {
    let (mut node, pod) = node(&[]);
    node.start().unwrap();
    await_served(&node);
    node.add(&pod).success();
    let sent = || -> f64 {
        let (_, text) = get(&node.namespace, AGENT, "/metrics");
        let line = "netattach_packets_total{network=\"kube-system/default\",direction=\"sent\"} ";
        text.lines().find_map(|it| it.strip_prefix(line)?.parse().ok()).unwrap_or_default()
    };
    let before = sent();
    for _ in 0..3 {
        assert!(ping(&pod.namespace, "10.50.0.1".parse().unwrap(), PATIENCE).unwrap());
    }
    node.gc("pods", Some(&[])).success();
    let after = sent();
    assert!(after >= before + 3.0, "{before}, {after}");
    assert_eq!(node.ctl(&["attachments"]).unwrap(), json!([]));
    let log = node.stop().unwrap();
    let told: Vec<String> = log.lines().filter(|line| line.contains("without a DEL")).map(plain).collect();
    let line = format!(
        "netattach::agent::request::request_log: detached without a DEL pod=\"shop/a\" container=\"c-a\" {NETWORKS_OF_A} \
         why=\"GC: it is no longer in use\""
    );
    assert_eq!(told, [line], "{log}");
}

#[test]
fn what_is_no_request_gets_no_metrics() {
    let (mut node, _) = node(&[]);
    node.start().unwrap();
    await_served(&node);
    let at = &node.namespace;
    let long = format!("GET /{} HTTP/1.1\r\n\r\n", "x".repeat(64 << 10));
    let many = format!("GET / HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(100));
    let table: [(&str, &[u16]); 6] = [
        ("POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n", &[405]),
        ("GET /debug HTTP/1.1\r\nHost: x\r\n\r\n", &[404]),
        ("GET /metrics/ HTTP/1.1\r\nHost: x\r\n\r\n", &[404]),
        ("\u{16}\u{3}\u{1} what\r\n\r\n", &[400]),
        (&long, &[414, 431]),
        (&many, &[431]),
    ];
    for (request, codes) in table {
        let (code, body) = exchange(at, AGENT, request.as_bytes()).unwrap();
        assert!(codes.contains(&code), "{}: {code} {body}", &request[..request.len().min(60)]);
    }
    // A client that sends nothing does not delay the answers to others.
    let to: SocketAddr = AGENT.parse().unwrap();
    let silent: Vec<TcpStream> = (0..40).map(|_| at.run(|| TcpStream::connect(to)).unwrap()).collect();
    assert_eq!(get(at, AGENT, "/livez").0, 200);
    drop(silent);
}

/// A probe waits no longer than that.
const PROBE: Duration = Duration::from_secs(6);

#[test]
fn connections_of_others_keep_no_probe_waiting() {
    let (mut node, pod) = node(&[("metrics", json!({"listen": "0.0.0.0:10475"}))]);
    node.start().unwrap();
    await_served(&node);
    node.add(&pod).success();
    let at = &node.namespace;
    // The node by another address than the loopback's, as used by pods and other hosts.
    let by_pool: SocketAddr = "10.50.0.1:10475".parse().unwrap();
    let silent: Vec<TcpStream> = (0..200).map(|_| at.run(|| TcpStream::connect(by_pool)).unwrap()).collect();
    let begun = std::time::Instant::now();
    assert_eq!(get(at, AGENT, "/livez").0, 200);
    assert!(begun.elapsed() < stretched(PROBE) / 2, "{:?}", begun.elapsed());
    drop(silent);
    node.del(&pod).success();
}

#[test]
fn a_port_that_is_taken_keeps_no_pod_waiting() {
    let (mut node, pod) = node(&[]);
    let holder = node.namespace.run(|| TcpListener::bind(AGENT)).unwrap();
    node.start().unwrap();
    node.add(&pod).success();
    let status = node.whole_status().unwrap();
    let row = json!({"object": "metrics and probes on 127.0.0.1:10475",
                     "problem": "not served, will try again: Address already in use (os error 98); see metrics.listen"});
    assert!(status["troubles"].as_array().unwrap().contains(&row), "{status:#}");
    drop(holder);
    await_served(&node);
    assert!(!node.whole_status().unwrap()["troubles"].as_array().unwrap().contains(&row));
}

/// A line of the log without its time, and with its milliseconds as `MS`.
fn plain(line: &str) -> String {
    let line = line.split_once(" INFO ").or(line.split_once(" WARN ")).map_or(line, |(_, rest)| rest);
    let words = line.split(' ').map(|word| match word.strip_prefix("ms=") {
        Some(number) => format!("ms={}", number.parse::<f64>().map_or("?", |_| "MS")),
        None => word.to_owned(),
    });
    words.collect::<Vec<_>>().join(" ")
}

/// The lines of requests.
fn of_requests(log: &str) -> Vec<String> {
    log.lines().filter(|line| line.contains("request_log")).map(plain).collect()
}

/// The part of a line about the networks of pod `a`.
const NETWORKS_OF_A: &str = "networks=\"kube-system/default,shop/storage\" addresses=\"10.50.0.2/24,fd00:50::2/64,10.51.0.2/32\" ms=MS";

#[test]
fn every_request_is_one_line() {
    let (mut node, pod) = node(&[]);
    node.write("b", &manifest::pod("b", &json!({}), &json!("nosuch"))).unwrap();
    node.start().unwrap();
    node.add(&pod).success();
    node.ctl(&["attach", "shop/a", "storage"]).unwrap();
    node.ctl(&["attach", "shop/a", "gone"]).unwrap_err();
    node.ctl(&["detach", "shop/a", "net9"]).unwrap_err();
    node.ctl(&["detach", "shop/a", "net2"]).unwrap();
    node.del(&pod).success();
    let other = Pod::new("b").unwrap();
    node.add(&other).failure();
    let log = node.stop().unwrap();
    let module = "netattach::agent::request::request_log:";
    let networks = NETWORKS_OF_A;
    let live = "networks=\"shop/storage\" addresses=\"10.51.0.3/32\" ms=MS";
    let expected = [
        format!("{module} done verb=\"ADD\" pod=\"shop/a\" container=\"c-a\" ifname=\"eth0\" {networks}"),
        format!(
            "{module} done verb=\"attach\" pod=\"shop/a\" container=\"c-a\" what=\"{{\\\"name\\\":\\\"storage\\\"}}\" {live}"
        ),
        format!(
            "{module} failed verb=\"attach\" pod=\"shop/a\" container=\"c-a\" what=\"{{\\\"name\\\":\\\"gone\\\"}}\" \
             networks=\"shop/gone\" addresses=\"\" ms=MS code=7 msg=\"network shop/gone is not defined; namespace shop has \
             storage\" details=\"\""
        ),
        format!(
            "{module} failed verb=\"detach\" pod=\"shop/a\" container=\"c-a\" what=\"net9\" networks=\"\" addresses=\"\" \
             ms=MS code=3 msg=\"pod shop/a has no interface net9 that was attached while it was live; it has net2\" details=\"\""
        ),
        format!("{module} done verb=\"detach\" pod=\"shop/a\" container=\"c-a\" what=\"net2\" {live}"),
        format!("{module} done verb=\"DEL\" pod=\"shop/a\" container=\"c-a\" ifname=\"eth0\" {networks}"),
        format!(
            "{module} failed verb=\"ADD\" pod=\"shop/b\" container=\"c-b\" ifname=\"eth0\" \
             networks=\"kube-system/default,shop/nosuch\" addresses=\"\" ms=MS code=7 msg=\"network shop/nosuch is not defined\" \
             details=\"\""
        ),
    ];
    assert_eq!(of_requests(&log), expected, "{log}");
    assert_eq!(log.lines().filter(|line| line.contains("nosuch")).count(), 1, "{log}");
}

#[test]
fn a_del_that_came_while_no_agent_ran_is_one_line_and_its_failure_another() {
    let (mut node, pod) = node(&[("collectAfterSeconds", json!(1))]);
    node.plugin("odd", &json!({})).unwrap();
    let odd = json!({"cniVersion": "1.0.0", "type": "odd"});
    node.write("odd", &manifest::network(NAMESPACE, "odd", &odd)).unwrap();
    node.write("b", &manifest::pod("b", &json!({}), &json!("odd"))).unwrap();
    node.start().unwrap();
    let refused = Pod::new("b").unwrap();
    node.add(&pod).success();
    node.add(&refused).success();
    node.stop().unwrap();
    for pod in [&pod, &refused] {
        node.del(pod).success();
    }
    node.plugin("odd", &json!({"DEL": {"error": {"code": 11, "msg": "not now"}}})).unwrap();
    node.start().unwrap();
    let problem = || {
        let status = node.whole_status().unwrap();
        let row = status["troubles"].as_array().unwrap().iter().find(|row| row["object"] == "container c-b");
        row.map(|row| row["problem"].as_str().unwrap().to_owned())
    };
    let is_repeated = || problem().is_some_and(|it| it.contains("failed") && !it.contains("failed 1 times"));
    assert!(eventually(PATIENCE, is_repeated), "{:?}", problem());
    node.plugin("odd", &json!({})).unwrap();
    assert!(eventually(PATIENCE, || problem().is_none()), "{:?}", problem());
    let log = node.stop().unwrap();
    let mut lines = of_requests(&log);
    lines.sort();
    let module = "netattach::agent::request::request_log:";
    let of_b = "pod=\"shop/b\" container=\"c-b\" ifname=\"eth0\" networks=\"kube-system/default,shop/odd\" \
                addresses=\"10.50.0.3/24,fd00:50::3/64\" ms=MS";
    let expected = [
        format!(
            "{module} done verb=\"DEL\" pod=\"shop/a\" container=\"c-a\" ifname=\"eth0\" {NETWORKS_OF_A}"
        ),
        format!("{module} done verb=\"DEL\" {of_b}"),
        format!(
            "{module} failed verb=\"DEL\" {of_b} code=11 msg=\"detach net1 (shop/odd): plugin \\\"odd\\\" failed (DEL): not now\" \
             details=\"\""
        ),
    ];
    assert_eq!(lines, expected, "{log}");
}

#[test]
fn lines_are_objects_where_that_is_asked_for() {
    let (mut node, pod) = node(&[("log", json!({"format": "json"}))]);
    node.start_until_line(&executable("netattachd").unwrap(), "operations of earlier agents are finished")
        .unwrap();
    node.add(&pod).success();
    let log = node.stop().unwrap();
    let lines: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let mut done = lines.iter().find(|line| line["verb"] == "ADD").unwrap_or_else(|| panic!("{log}")).clone();
    assert!(done["ms"].take().is_f64() && done["timestamp"].take().is_string(), "{log}");
    assert_eq!(
        done,
        json!({
            "timestamp": null, "level": "INFO", "message": "done", "verb": "ADD", "pod": "shop/a", "container": "c-a",
            "ifname": "eth0", "networks": "kube-system/default,shop/storage",
            "addresses": "10.50.0.2/24,fd00:50::2/64,10.51.0.2/32", "ms": null,
            "target": "netattach::agent::request::request_log"
        })
    );
}

/// The body of a request whose length is in its head.
fn posted(stream: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let mut reader = BufReader::new(stream);
    let mut length = 0;
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 || line == "\r\n" {
            break;
        }
        if let Some((_, number)) = line.to_lowercase().split_once("content-length:") {
            length = number.trim().parse().unwrap_or(0);
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    Ok(body)
}

/// A collector: returns the bodies that are posted to it, which it accepts unless it refuses.
fn collector(at: &Namespace, refuses: &Arc<AtomicBool>) -> mpsc::Receiver<Value> {
    let listener = at.run(|| TcpListener::bind("127.0.0.1:4318")).unwrap();
    let (found, bodies) = mpsc::channel();
    let refuses = Arc::clone(refuses);
    std::thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            let body = posted(&mut stream).unwrap_or_default();
            let status = if refuses.load(Ordering::Relaxed) { "503 Service Unavailable" } else { "200 OK" };
            let rest = "Content-Length: 2\r\nContent-Type: application/json\r\n\r\n{}";
            let _ = stream.write_all(format!("HTTP/1.1 {status}\r\n{rest}").as_bytes());
            if found.send(serde_json::from_slice(&body).unwrap_or(Value::Null)).is_err() {
                return;
            }
        }
    });
    bodies
}

/// The spans of a message.
fn spans_of(body: &Value) -> Vec<Value> {
    let spans = body["resourceSpans"][0]["scopeSpans"][0]["spans"].as_array();
    spans.unwrap_or_else(|| panic!("{body}")).clone()
}

/// First no collector runs, then one that refuses.
#[test]
fn traces_that_nobody_takes_are_one_line_until_they_are_taken_again() {
    let (mut node, pod) = node(&[("traces", json!({"endpoint": "http://127.0.0.1:4318"}))]);
    node.write("b", &manifest::pod("b", &json!({}), &json!("nosuch"))).unwrap();
    node.start().unwrap();
    let requests = || {
        node.add(&pod).success();
        node.del(&pod).success();
    };
    let [dropped, taken] = ["traces are dropped until the collector takes them", "traces are taken again"];
    let is_told = |text: &str| eventually(PATIENCE, || node.log_so_far().contains(text));
    requests();
    assert!(is_told(dropped), "{}", node.log_so_far());
    let refuses = Arc::new(AtomicBool::new(true));
    let bodies = collector(&node.namespace, &refuses);
    let next = || bodies.recv_timeout(stretched(PATIENCE)).unwrap();
    for _ in 0..2 {
        requests();
        next();
    }
    refuses.store(false, Ordering::Relaxed);
    node.add(&Pod::new("b").unwrap()).failure();
    let failed = loop {
        if let Some(failed) = spans_of(&next()).into_iter().find(|span| span.get("status").is_some()) {
            break failed;
        }
    };
    assert_eq!(
        [&failed["name"], &failed["kind"], &failed["status"]],
        [&json!("ADD"), &json!(2), &json!({"code": 2, "message": "network shop/nosuch is not defined"})]
    );
    assert!(is_told(taken), "{}", node.log_so_far());
    let log = node.stop().unwrap();
    assert_eq!([dropped, taken].map(|text| log.matches(text).count()), [1, 1], "{log}");
}

#[test]
fn a_request_continues_the_trace_of_its_caller() {
    let (mut node, pod) = node(&[("traces", json!({"endpoint": "http://127.0.0.1:4318"}))]);
    let bodies = collector(&node.namespace, &Arc::default());
    node.start().unwrap();
    let (trace, parent) = ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331");
    node.call("ADD", &pod).with("TRACEPARENT", &format!("00-{trace}-{parent}-01")).run().success();
    // A trace that its caller does not sample, and one without a caller.
    node.call("CHECK", &pod).with("TRACEPARENT", &format!("00-{trace}-{parent}-00")).run();
    let continued = |words: &[&str]| {
        let mut command = Command::new(executable("netattachctl").unwrap());
        command.arg("--socket").arg(node.socket()).args(words);
        command.env("TRACEPARENT", format!("00-{trace}-{parent}-01"));
        assert!(command.output().unwrap().status.success(), "{words:?}");
    };
    continued(&["attach", "shop/a", "storage"]);
    continued(&["detach", "shop/a", "net2"]);
    node.call("DEL", &pod).with("TRACEPARENT", "nonsense").run().success();
    let mut spans = Vec::new();
    let is_root = |span: &&Value| span["kind"] == 2;
    while spans.iter().filter(is_root).count() < 4 {
        spans.extend(spans_of(&bodies.recv_timeout(stretched(PATIENCE)).unwrap()));
    }
    let roots: Vec<&Value> = spans.iter().filter(is_root).collect();
    let named: Vec<&str> = roots.iter().map(|span| span["name"].as_str().unwrap()).collect();
    assert_eq!(named, ["ADD", "attach", "detach", "DEL"], "{spans:#?}");
    for live in &roots[1..3] {
        assert_eq!((&live["traceId"], &live["parentSpanId"]), (&json!(trace), &json!(parent)), "{live:#}");
        let own = |span: &&Value| span["parentSpanId"] == live["spanId"];
        assert!(spans.iter().filter(own).any(|span| span["name"] == "journal"), "{spans:#?}");
    }
    let told = |key: &str, text: &str| json!({"key": key, "value": {"stringValue": text}});
    assert_eq!(
        roots[2]["attributes"],
        json!([
            told("k8s.namespace.name", "shop"),
            told("k8s.pod.name", "a"),
            told("container.id", "c-a"),
            told("network.interface.name", "net2")
        ])
    );
    assert_eq!((&roots[0]["traceId"], &roots[0]["parentSpanId"]), (&json!(trace), &json!(parent)));
    let value = |text: &str| json!({"stringValue": text});
    let pairs = [
        ("k8s.namespace.name", "shop"),
        ("k8s.pod.name", "a"),
        ("container.id", "c-a"),
        ("network.interface.name", "eth0"),
    ];
    let attributes: Vec<Value> =
        pairs.iter().map(|(key, text)| json!({"key": key, "value": value(text)})).collect();
    assert_eq!(roots[0]["attributes"], json!(attributes));
    assert_ne!(roots[3]["traceId"], json!(trace));
    assert_eq!(roots[3].get("parentSpanId"), None);
    let parts: Vec<&str> = spans
        .iter()
        .filter(|span| span["parentSpanId"] == roots[0]["spanId"] && span["traceId"] == trace)
        .map(|span| span["name"].as_str().unwrap())
        .collect();
    assert!(
        ["reading", "planning", "journal", "lease", "policy"].iter().all(|part| parts.contains(part)),
        "{parts:?}"
    );
}

/// A running Prometheus, ended with this value.
struct Prometheus<'n> {
    at: &'n Namespace,
    child: Child,
}

impl Drop for Prometheus<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl<'n> Prometheus<'n> {
    fn start(at: &'n Namespace, programs: &Path, directory: &Path) -> Self {
        let config = json!({
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "scrape_configs": [{"job_name": "netattach", "static_configs": [{"targets": [AGENT]}]}],
            "rule_files": [metrics("alerts.yaml")]
        });
        std::fs::create_dir_all(directory).unwrap();
        let file = directory.join("prometheus.yaml");
        std::fs::write(&file, config.to_string()).unwrap();
        let mut command = Command::new(programs.join("prometheus"));
        command
            .arg(format!("--config.file={}", file.display()))
            .arg(format!("--storage.tsdb.path={}", directory.join("data").display()))
            .arg(format!("--web.listen-address={PROMETHEUS}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let child = at.run(|| command.spawn()).unwrap();
        Self { at, child }
    }

    /// The series that an expression returns, and an error in it.
    fn query(&self, expression: &str) -> Result<Vec<Value>, String> {
        let answer = self.ask(&format!("query?query={}", Self::encoded(expression)))?;
        answer["data"]["result"].as_array().cloned().ok_or_else(|| answer.to_string())
    }

    /// Returns the rules, and the result of each one's last evaluation: `ok`, or another word and an error.
    fn rules(&self) -> BTreeMap<String, String> {
        let answer = self.ask("rules").unwrap();
        let rules = answer["data"]["groups"][0]["rules"].as_array().unwrap().iter();
        let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        rules.map(|rule| (word(&rule["name"]), word(&rule["health"]) + &word(&rule["lastError"]))).collect()
    }

    fn encoded(expression: &str) -> String {
        expression
            .bytes()
            .map(|byte| match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' => char::from(byte).to_string(),
                other => format!("%{other:02X}"),
            })
            .collect()
    }

    fn ask(&self, what: &str) -> Result<Value, String> {
        let request = format!("GET /api/v1/{what} HTTP/1.0\r\n\r\n");
        let (_, body) =
            exchange(self.at, PROMETHEUS, request.as_bytes()).map_err(|error| error.to_string())?;
        serde_json::from_str(&body).map_err(|error| format!("{error}: {body}"))
    }
}

/// The selectors of an expression: names of metrics with their matchers.
fn selectors(expression: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut rest = expression;
    while let Some(at) = rest.find("netattach_") {
        let word = &rest[at..];
        let name = word.find(|it: char| !it.is_ascii_alphanumeric() && it != '_').unwrap_or(word.len());
        let matchers = if word[name..].starts_with('{') { word[name..].find('}').unwrap() + 1 } else { 0 };
        found.push(word[..name + matchers].to_owned());
        rest = &word[name + matchers..];
    }
    found
}

/// A file of `deploy/metrics`.
fn metrics(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/metrics").canonicalize().unwrap().join(name)
}

fn rules() -> Vec<Value> {
    let alerts: Value =
        serde_norway::from_str(&std::fs::read_to_string(metrics("alerts.yaml")).unwrap()).unwrap();
    alerts["groups"][0]["rules"].as_array().unwrap().clone()
}

/// The tests of the alerts, which promtool runs.
fn tests_of_alerts() -> Vec<Value> {
    let text = std::fs::read_to_string(metrics("alerts_test.yaml")).unwrap();
    let file: Value = serde_norway::from_str(&text).unwrap();
    file["tests"].as_array().unwrap().clone()
}

/// Returns the metrics that the tests of the alerts use, with the names of their labels.
fn made_up(tests: &[Value]) -> BTreeSet<(String, BTreeSet<String>)> {
    let series = tests.iter().flat_map(|test| test["input_series"].as_array().unwrap());
    series
        .map(|series| {
            let (name, labels) = series["series"].as_str().unwrap().split_once('{').unwrap();
            let labels =
                labels.trim_end_matches('}').split(',').map(|label| label.split_once('=').unwrap().0);
            (name.to_owned(), labels.map(str::to_owned).collect())
        })
        .collect()
}

/// Returns every expression of the dashboard as a whole, and the selectors of every alert: with a condition that does
/// not hold there is no series, so the compared series must exist. The whole alerts are evaluated by promtool, with
/// their own series.
fn expressions() -> Vec<String> {
    let dashboard: Value =
        serde_json::from_str(&std::fs::read_to_string(metrics("dashboard.json")).unwrap()).unwrap();
    let targets =
        dashboard["panels"].as_array().unwrap().iter().flat_map(|panel| panel["targets"].as_array().unwrap());
    let mut all: Vec<String> = targets
        .map(|target| {
            target["expr"].as_str().unwrap().replace("$__rate_interval", "1m").replace("$instance", ".*")
        })
        .collect();
    assert!(all.len() > 20, "{all:?}");
    for rule in rules() {
        let selectors = selectors(rule["expr"].as_str().unwrap());
        assert!(!selectors.is_empty(), "{rule}");
        all.extend(selectors);
    }
    all
}

/// Returns the joins of the page and the dashboard with the metrics of cAdvisor, as a test of promtool: while two
/// sandboxes have the name of one pod.
fn test_of_joins() -> Value {
    let page = std::fs::read_to_string(metrics("../../docs/metrics.md")).unwrap();
    let (_, of_page) = page.split_once("```promql\n").unwrap();
    let (of_page, _) = of_page.split_once("```").unwrap();
    let dashboard = std::fs::read_to_string(metrics("dashboard.json")).unwrap();
    let (_, of_dashboard) = dashboard.split_once("\"Joins with cAdvisor: ").unwrap();
    let (of_dashboard, _) = of_dashboard.split_once('"').unwrap();
    let interface = r#"namespace="shop",pod="a",interface="net1""#;
    let agent = r#"instance="n1",job="netattach",host_interface="na0123456789abc""#;
    let info = |container: &str| {
        let series = format!(
            r#"netattach_attachment_info{{{agent},{interface},network="shop/lan",container_id="{container}"}}"#
        );
        json!({"series": series, "values": "1x10"})
    };
    let received = format!(r#"container_network_receive_bytes_total{{id="/kubepods/a",{interface}}}"#);
    let joined = format!(r#"id="/kubepods/a",{interface},network="shop/lan""#);
    let expected = |expression: &str, labels: String, value: u32| {
        let samples = json!([{"labels": labels, "value": value}]);
        json!({"expr": expression, "eval_time": "10m", "exp_samples": samples})
    };
    json!({
        "interval": "1m",
        "input_series": [info("c-1"), info("c-2"), {"series": received, "values": "0+60x10"}],
        "promql_expr_test": [
            expected(of_page, format!("{{{joined}}}"), 1),
            expected(of_dashboard, format!("{{{joined}}}"), 600),
        ]
    })
}

#[test]
fn the_network_of_an_interface_is_joined_with_what_cadvisor_counts() {
    let test = "the_network_of_an_interface_is_joined_with_what_cadvisor_counts";
    let Some(programs) = tools::directory(test, "NETATTACH_PROMETHEUS", &["promtool"]) else { return };
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("joins.yaml");
    let tests = json!({"evaluation_interval": "1m", "tests": [test_of_joins()]});
    std::fs::write(&file, tests.to_string()).unwrap();
    promtool(&programs, &["test", "rules", &file.to_string_lossy()]);
}

/// Runs promtool, and asserts that it finds no error.
fn promtool(programs: &Path, words: &[&str]) {
    let output = Command::new(programs.join("promtool")).args(words).output().unwrap();
    let said =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "promtool {words:?}: {said}");
}

/// Every alert as a whole, with series for it: when it has to fire, with its labels and its text, and when it must
/// not.
#[test]
fn every_alert_fires_when_it_has_to_and_is_silent_when_it_must() {
    let test = "every_alert_fires_when_it_has_to_and_is_silent_when_it_must";
    let Some(programs) = tools::directory(test, "NETATTACH_PROMETHEUS", &["promtool"]) else { return };
    promtool(&programs, &["check", "rules", &metrics("alerts.yaml").to_string_lossy()]);
    promtool(&programs, &["test", "rules", &metrics("alerts_test.yaml").to_string_lossy()]);
    // The number of evaluations of each alert, and the expected number of firings.
    let mut looks: BTreeMap<String, (usize, usize)> = BTreeMap::new();
    for look in tests_of_alerts().iter().flat_map(|test| test["alert_rule_test"].as_array().unwrap()) {
        let (all, firing) = looks.entry(look["alertname"].as_str().unwrap().to_owned()).or_default();
        *all += 1;
        *firing += usize::from(look["exp_alerts"] != json!([]));
    }
    let names = rules().into_iter().map(|rule| rule["alert"].as_str().unwrap().to_owned());
    // An agent that is down for days is looked at once more.
    let expected = |name: String| if name == "NetattachDown" { (name, (3, 2)) } else { (name, (2, 1)) };
    assert_eq!(looks, names.map(expected).collect());
}

#[test]
fn the_page_says_what_to_do_on_each_alert() {
    let page = std::fs::read_to_string(metrics("../../docs/metrics.md")).unwrap();
    let (_, table) = page.split_once("\n| alert | what to do |\n|---|---|\n").unwrap();
    let named = table.lines().map_while(|line| line.strip_prefix("| `")?.split_once('`'));
    let named: Vec<String> = named.map(|(name, _)| name.to_owned()).collect();
    let alerts: Vec<String> = rules().iter().map(|rule| rule["alert"].as_str().unwrap().to_owned()).collect();
    assert_eq!(named, alerts);
}

#[test]
fn every_expression_of_the_dashboard_and_of_the_alerts_has_data_in_prometheus() {
    let test = "every_expression_of_the_dashboard_and_of_the_alerts_has_data_in_prometheus";
    let Some(programs) = tools::directory(test, "NETATTACH_PROMETHEUS", &["prometheus"]) else {
        return;
    };
    let mut rig = Rig::new(&Options::default());
    rig.node.set("metrics", json!({"listen": AGENT}));
    rig.node.plugin("fake", &json!({"link": "veth"})).unwrap();
    let fake = json!({"cniVersion": "1.0.0", "type": "fake"});
    rig.server.create(&manifest::network(NAMESPACE, "lan-x", &fake)).unwrap();
    let web = json!({"podSelector": {"matchLabels": {"app": "b"}}, "policyTypes": ["Ingress"],
                     "ingress": [{"ports": [{"protocol": "TCP", "port": 80}]}]});
    rig.server.create(&manifest::policy("web", "lan-a", &web)).unwrap();
    rig.start();
    await_served(&rig.node);
    let prometheus = Prometheus::start(&rig.node.namespace, &programs, &rig.node.path("prometheus"));

    let labelled = |name: &str, networks: &str| {
        let mut pod = object(name, NODE);
        pod["metadata"]["labels"] = json!({"app": name});
        pod["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] = networks.into();
        pod
    };
    for (name, networks) in [("a", "lan-a"), ("b", "lan-a"), ("x", "lan-x"), ("bad", "nosuch")] {
        rig.server.create(&labelled(name, networks)).unwrap();
    }
    let [a, b, x, bad] = ["a", "b", "x", "bad"].map(|name| Pod::new(name).unwrap());
    for pod in [&a, &b] {
        rig.add(pod).success();
    }
    let to = rig.published("b")[1]["ips"][0].as_str().unwrap().to_owned();
    let wait = Duration::from_millis(500);
    // Something of everything happens until each expression has had two scrapes of it.
    let mut without = expressions();
    // This agent keeps no file of the runtime's.
    without.retain(|expression| !expression.contains("CNI configuration"));
    let mut said = String::new();
    let complete = eventually(PATIENCE * 6, || {
        for port in [80, 81] {
            let _ = connects(&a.namespace, format!("{to}:{port}").parse().unwrap(), SILENCE);
        }
        rig.add(&bad).failure();
        rig.add(&x).success();
        rig.del(&x).success();
        let refused = rig.server.faults().times(1, When::on(Verb::Patch, "pods/status"), Fault::Answer(500));
        let mut changed = web.clone();
        changed["ingress"][0]["ports"][0]["port"] = json!(1000 + without.len());
        let _ = rig.server.apply(&manifest::policy("web", "lan-a", &changed));
        std::thread::sleep(wait);
        rig.server.faults().lift(refused);
        without.retain(|expression| match prometheus.query(expression) {
            Ok(series) => series.is_empty(),
            Err(error) => {
                said = error;
                true
            }
        });
        without.is_empty()
    });
    let (_, text) = get(&rig.node.namespace, AGENT, "/metrics");
    assert!(complete, "no data: {without:#?} ({said})\n{text}");
    // Series of each pod were not requested.
    for name in ["packets", "bytes", "drops"] {
        assert!(!text.contains(&format!("netattach_attachment_{name}_total{{")), "{text}");
    }
    let rules = rules().into_iter().map(|rule| (rule["alert"].as_str().unwrap().to_owned(), "ok".to_owned()));
    assert_eq!(prometheus.rules(), rules.collect());
    // The tests of the alerts are worth as much as their series are like those that agents have.
    let real = |(name, _): &(String, BTreeSet<String>)| {
        let series = prometheus.query(name).unwrap();
        let labels = series[0]["metric"].as_object().unwrap().keys().filter(|key| *key != "__name__");
        (name.clone(), labels.cloned().collect())
    };
    let mut made_up = made_up(&[tests_of_alerts(), vec![test_of_joins()]].concat());
    made_up.retain(|(name, _)| name.starts_with("netattach_"));
    assert_eq!(made_up.iter().map(real).collect::<BTreeSet<_>>(), made_up);
}
