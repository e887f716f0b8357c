//! netattach as installed by an operator: `kubectl apply -k` of `deploy`, with the archive of `cargo xtask image`, on
//! a node without it. The agent is a pod, with only the rights of the manifests.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use netattach_tests::cluster::Cluster;
use netattach_tests::cluster::left::Left;
use netattach_tests::cluster::ready::Ready;
use netattach_tests::cluster::site::{Before, NEXT, RANGE, SOCKET, Site};
use netattach_tests::node::executable;
use netattach_tests::traffic::{Conversation, Echo, stretched};
use netattach_tests::{Namespace, tools};
use serde_json::{Value, json};

use crate::rig::{NETWORKS, PACE, PODS, busybox, definition, is_ready, published};
use crate::surge;

const REPLICAS: usize = 10;
/// Number of pods that are created while there is no agent.
const LATE: usize = 3;
/// An echo server in a pod.
const PORT: u16 = 5432;
/// A scrape that takes longer counts as none.
const SCRAPE: Duration = Duration::from_secs(5);

/// A conversation between two pods, counted.
struct Traffic {
    conversation: Conversation,
    _echo: Echo,
}

/// Three networks of a node, of different kinds.
fn create_networks(site: &Site) {
    let links = [
        ("storage", "10.51.0.0/24", json!({"type": "veth"})),
        ("lan", "10.52.0.0/24", json!({"type": "bridge", "bridge": "br-lan"})),
        ("segment", "10.53.0.0/24", json!({"type": "macvlan", "master": "eth0"})),
    ];
    for (name, subnet, mut config) in links {
        config["cniVersion"] = json!("1.0.0");
        config["ipam"] = json!({"type": "host-local", "ranges": [[{"subnet": subnet}]]});
        site.admin.create(&definition(name, &config)).unwrap();
    }
}

fn deploy(site: &Site, name: &str, replicas: usize) {
    let annotations = json!({NETWORKS: "storage, lan, segment"});
    let deployment = json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"namespace": "default", "name": name},
        "spec": {
            "replicas": replicas, "selector": {"matchLabels": {"app": name}},
            "template": {
                "metadata": {"labels": {"app": name}, "annotations": annotations},
                "spec": busybox(&json!({}))
            }
        }
    });
    site.admin.create(&deployment).unwrap();
}

/// The pods of a Deployment, once all are ready and have four networks.
#[track_caller]
fn settled(site: &Site, name: &str, replicas: usize) -> Vec<Value> {
    let mut pods = Vec::new();
    let has_four = |pod: &Value| is_ready(pod) && published(pod).len() == 4;
    let ready = site.eventually(|| {
        let all = site.get(PODS)["items"].as_array().cloned().unwrap_or_default();
        pods = all;
        pods.retain(|pod| pod["metadata"]["labels"]["app"] == name);
        pods.len() == replicas && pods.iter().all(has_four)
    });
    let events = || site.get("/api/v1/namespaces/default/events");
    assert!(ready, "{pods:#?}\n{:#}\n{}", events(), site.told());
    pods
}

/// The namespace of a pod that the agent has attached.
fn namespace(site: &Site, pod: &Value) -> Namespace {
    let rows = site.ctl(&["attachments"]);
    let row = rows.as_array().unwrap().iter().find(|row| row["pod"]["name"] == pod["metadata"]["name"]);
    let container = row.unwrap()["container_id"].as_str().unwrap();
    for entry in fs::read_dir("/var/lib/netattach/journal").unwrap() {
        let path = entry.unwrap().path();
        if !path.file_name().unwrap().to_string_lossy().starts_with(container) {
            continue;
        }
        let record = fs::read_to_string(path).unwrap();
        let lines = record.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let mut plans = lines.filter_map(|line| line.pointer("/1/planned/plan").cloned());
        let plan = plans.find(Value::is_object).unwrap();
        return Namespace::at(Path::new(plan["sandbox"]["netns"].as_str().unwrap())).unwrap();
    }
    panic!("{container} has no record")
}

/// Datagrams between the first two of these pods on a network, from here on.
fn traffic(site: &Site, pods: &[Value], network: &str) -> Traffic {
    let [client, server] = [0, 1].map(|number| namespace(site, &pods[number]));
    let entries = published(&pods[1]);
    let entry = entries.iter().find(|entry| entry["name"] == network).unwrap();
    let address = SocketAddr::new(entry["ips"][0].as_str().unwrap().parse().unwrap(), PORT);
    let echo = Echo::serve(&server, address).unwrap();
    Traffic { conversation: Conversation::paced(&client, address, PACE).unwrap(), _echo: echo }
}

/// Like a Prometheus of the cluster on another node: it finds the agents by the Service.
fn is_scraped(site: &Site) {
    let endpoints = || site.get("/api/v1/namespaces/kube-system/endpoints/netattach-metrics");
    let found = || {
        let subset = endpoints()["subsets"][0].clone();
        json!([subset["addresses"][0]["ip"], subset["ports"][0]["port"]])
    };
    let address = SocketAddr::new(site.worker.address().into(), 10475);
    let expected = json!([address.ip(), address.port()]);
    assert!(site.eventually(|| found() == expected), "{:#}", endpoints());
    let mut scrape =
        site.cluster().outside().run(|| TcpStream::connect_timeout(&address, stretched(SCRAPE))).unwrap();
    scrape.set_read_timeout(Some(stretched(SCRAPE))).unwrap();
    scrape.write_all(b"GET /metrics HTTP/1.1\r\nHost: node-1\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    scrape.read_to_string(&mut answer).unwrap();
    let series = format!(
        "netattach_attachments{{network=\"default/storage\",kind=\"veth\",enforcement=\"full\"}} {REPLICAS}.0"
    );
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    assert!(answer.lines().any(|line| line == series), "{series} is not in {answer}");
}

/// A primary network of the reference plugins, as an administrator writes it, and its executables.
pub(crate) fn primary(test: &str) -> Option<(Value, Vec<PathBuf>)> {
    let names = ["bridge", "host-local", "portmap"];
    let directory = tools::directory(test, "NETATTACH_REFERENCE_PLUGINS", &names)?;
    let list = json!({
        "cniVersion": "1.0.0", "name": "primary",
        "plugins": [
            {
                "type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": true, "hairpinMode": true,
                "ipam": {"type": "host-local", "ranges": [[{"subnet": RANGE}]], "routes": [{"dst": "0.0.0.0/0"}]}
            },
            {"type": "portmap", "capabilities": {"portMappings": true}}
        ]
    });
    Some((list, names.map(|name| directory.join(name)).into()))
}

/// Measures the longest time from here on in which no agent listens on the socket.
struct Absence {
    ending: Arc<AtomicBool>,
    thread: JoinHandle<Duration>,
}

impl Absence {
    fn watch() -> Self {
        let ending = Arc::new(AtomicBool::new(false));
        let over = Arc::clone(&ending);
        let thread = std::thread::spawn(move || {
            let (mut longest, mut since) = (Duration::ZERO, None);
            while !over.load(Ordering::SeqCst) {
                match UnixStream::connect(SOCKET) {
                    Ok(_) => since = None,
                    Err(_) => longest = longest.max(since.get_or_insert_with(Instant::now).elapsed()),
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            longest
        });
        Self { ending, thread }
    }

    fn end(self) -> Duration {
        self.ending.store(true, Ordering::SeqCst);
        self.thread.join().unwrap()
    }
}

/// A release that an operator applies.
#[derive(Clone, Copy)]
pub(crate) struct Release {
    /// The directory of its manifests.
    pub(crate) manifests: &'static str,
    /// The tag of its image, unless it is that of the manifests.
    pub(crate) tag: Option<&'static str>,
}

/// The release under test, with its manifests.
const THIS: Release = Release { manifests: "deploy", tag: None };
/// The same executables under another tag.
pub(crate) const AGAIN: Release = Release { manifests: "deploy", tag: Some(NEXT) };

/// One of the directories of manifests, with components.
#[derive(Clone, Copy)]
pub(crate) struct Way {
    pub(crate) overlay: &'static str,
    pub(crate) components: &'static [&'static str],
}

/// Beside a primary network.
pub(crate) const BESIDE: Way =
    Way { overlay: "with-metrics", components: &["before-1.22", "before-1.30", "executed-plugins"] };

impl Way {
    /// Writes the operator's kustomization, and applies it by kubectl; returns its directory.
    fn apply(&self, site: &Site, release: Release) -> String {
        let base = Path::new(release.manifests).join(self.overlay);
        let mine = site.kustomization(base.to_str().unwrap(), self.components, release.tag).unwrap();
        let mine = mine.to_str().unwrap().to_owned();
        site.kubectl.run(&["apply", "-k", &mine]).unwrap();
        mine
    }
}

/// Installs a release; ten pods get their networks; the agent is replaced by those of the other releases one after
/// the other, while the pods exchange traffic and others are created; then the pods are deleted, and netattach is
/// removed.
pub(crate) fn lives(site: &Site, way: &Way, first: Release, others: &[Release]) {
    let before = Left::of(site).unwrap();
    let what = Path::new(first.manifests).join(way.overlay).display().to_string();
    let ready = Ready::begin().unwrap();
    let mine = way.apply(site, first);
    eprintln!("{what}: {}", ready.in_time(site).unwrap());
    site.rolled_out().unwrap();

    create_networks(site);
    let began = Instant::now();
    deploy(site, "web", REPLICAS);
    let pods = settled(site, "web", REPLICAS);
    let attached = began.elapsed();
    eprintln!("{what}: {REPLICAS} pods after {:.1} s", attached.as_secs_f64());
    let flows: Vec<Traffic> = ["default/storage", "default/lan", "default/segment"]
        .iter()
        .map(|network| traffic(site, &pods, network))
        .collect();
    if way.overlay == "with-metrics" {
        is_scraped(site);
    }

    for (number, release) in others.iter().enumerate() {
        is_replaced(site, way, *release, &format!("late-{number}"));
    }
    surge::goes_on(site);
    for flow in flows {
        let (sent, lost) = flow.conversation.end();
        assert!(sent > 100 && lost == 0, "{lost} of {sent} are lost");
    }
    is_removed(site, &mine, &before);
}

/// Replaces the agent by that of a release, while a Deployment is created.
fn is_replaced(site: &Site, way: &Way, release: Release, late: &str) {
    let absence = Absence::watch();
    way.apply(site, release);
    deploy(site, late, LATE);
    settled(site, late, LATE);
    site.rolled_out().unwrap();
    let away = absence.end();
    let set = site.get("/apis/apps/v1/namespaces/kube-system/daemonsets/netattach");
    let image = &set["spec"]["template"]["spec"]["containers"][0]["image"];
    let tag = release.tag.unwrap_or(env!("CARGO_PKG_VERSION"));
    assert_eq!(image, &json!(format!("localhost/netattach:{tag}")));
    eprintln!("replaced by {image}: no agent for {:.1} s", away.as_secs_f64());
}

/// In the order of docs/remove.md; `guides` runs its commands.
fn is_removed(site: &Site, mine: &str, before: &Left) {
    site.kubectl.run(&["delete", "deployment", "--all", "--grace-period=0"]).unwrap();
    let gone = site.eventually(|| site.get(PODS)["items"] == json!([]));
    assert!(gone, "{:#}", site.get(PODS));
    // The API forgets pods without a grace period before the node does.
    let none = || site.ctl(&["attachments"]).as_array().is_some_and(Vec::is_empty);
    assert!(site.eventually(none), "{:#}", site.ctl(&["attachments"]));
    site.kubectl.run(&["delete", "-k", mine]).unwrap();
    let is_gone = || !Path::new(SOCKET).exists() || UnixStream::connect(SOCKET).is_err();
    assert!(site.eventually(is_gone));
    let mut uninstall = Command::new(executable("netattachctl").unwrap());
    uninstall.args(["uninstall", "--cni-bin-dir", "/opt/cni/bin"]);
    // An agent that ends serves no longer, and has its state for a moment more.
    let mut said = String::new();
    let is_done = site.eventually(|| {
        let done = site.worker.node().namespace.run(|| uninstall.output()).unwrap();
        said = String::from_utf8_lossy(&done.stderr).into_owned();
        done.status.success()
    });
    assert!(is_done, "{said}");
    assert_eq!(before.added(site).unwrap(), (Vec::new(), vec!["/opt/cni/bin/loopback".to_owned()]));
}

/// Cheap enough for every change: the agent that landed last takes minutes to build.
fn is_upgraded_to_itself(site: &Site, way: &Way) {
    eprintln!(
        "upgraded to the same executables under another tag; cargo xtask test --upgrade has the previous ones"
    );
    lives(site, way, THIS, &[AGAIN]);
}

#[test]
fn it_is_installed_upgraded_and_removed_beside_a_primary_network() {
    const TEST: &str = "it_is_installed_upgraded_and_removed_beside_a_primary_network";
    let Some((list, plugins)) = primary(TEST) else { return };
    let before = Before { primary: Some((list, &plugins)), has_bpffs: true };
    let Some(site) = Site::new(TEST, &before).unwrap() else { return };
    is_upgraded_to_itself(&site, &BESIDE);
}

#[test]
fn it_is_installed_upgraded_and_removed_where_there_is_no_other_network() {
    const TEST: &str = "it_is_installed_upgraded_and_removed_where_there_is_no_other_network";
    let before = Before { primary: None, has_bpffs: false };
    let Some(site) = Site::new(TEST, &before).unwrap() else { return };
    is_upgraded_to_itself(&site, &Way { overlay: "alone", components: &["before-1.22", "before-1.30"] });
}

/// Without the component, the server refuses unknown fields, and names them.
#[test]
fn a_server_before_1_30_refuses_what_it_does_not_know() {
    const TEST: &str = "a_server_before_1_30_refuses_what_it_does_not_know";
    let Some(cluster) = Cluster::shared("deploy").unwrap() else { return };
    let Some(kubectl) = cluster.kubectl(TEST).unwrap() else { return };
    let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy");
    let ended = kubectl.attempt(&["apply", "--dry-run=server", "-k", deploy.to_str().unwrap()]).unwrap();
    let named = [
        "no matches for kind \"ValidatingAdmissionPolicy\" in version \"admissionregistration.k8s.io/v1\"",
        "no matches for kind \"ValidatingAdmissionPolicyBinding\" in version \"admissionregistration.k8s.io/v1\"",
        "unknown field \"appArmorProfile\" in io.k8s.api.core.v1.SecurityContext",
        "unknown field \"maxSurge\" in io.k8s.api.apps.v1.RollingUpdateDaemonSet",
    ];
    assert!(!ended.success && named.iter().all(|what| ended.stderr.contains(what)), "{ended:#?}");
    assert!(!ended.stdout.contains("daemonset"), "{ended:#?}");
}
