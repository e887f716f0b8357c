//! The quick start on a cluster, an upgrade with the way back, the check of a node, and the removal, word by word:
//! the commands of the pages, in order, with the real kubectl; the kubelet runs the Jobs that check and that remove.
//! The server is of Kubernetes 1.20, so `deploy/` is the kustomization of the operator that the pages describe, with
//! the components for that version.

use std::fs;
use std::path::Path;
use std::process::Command;

use netattach_tests::cluster::left::Left;
use netattach_tests::cluster::site::{Before, NODE, Site};
use netattach_tests::guide::{Operator, Page, example};
use netattach_tests::machine::IMAGE;
use netattach_tests::node::executable;
use serde_json::{Value, json};

use crate::daemonset::primary;
use crate::rig::{PODS, STATUS, busybox, definition, is_ready};
use crate::{surge, tested};

const QUICK_START: Page =
    Page { path: "docs/quick-start.md", text: include_str!("../../../docs/quick-start.md") };
const INSTALL: &str = include_str!("../../../docs/install.md");
const UPGRADE: Page = Page { path: "docs/upgrade.md", text: include_str!("../../../docs/upgrade.md") };
const TROUBLESHOOTING: Page =
    Page { path: "docs/troubleshooting.md", text: include_str!("../../../docs/troubleshooting.md") };
const REMOVE: Page = Page { path: "docs/remove.md", text: include_str!("../../../docs/remove.md") };

/// The previous image, and the one that the page on upgrades leads to.
const BEFORE: &str = concat!("localhost/netattach:", env!("CARGO_PKG_VERSION"));
const AFTER: &str = "localhost/netattach:0.2.0";
/// The image of the quick start's pod, as the kubelet requests it from the runtime.
const BUSYBOX: &str = "docker.io/library/busybox:1.36";
const COMPONENTS: &str = "\ncomponents:\n  - components/before-1.22\n  - components/before-1.30\n  - components/executed-plugins\n";

/// Adds the components to the directory that an operator applies.
fn with_components(site: &Site) {
    let file = site.deploy().join("kustomization.yaml");
    let text = fs::read_to_string(&file).unwrap();
    fs::write(file, text + COMPONENTS).unwrap();
}

/// Writes the kustomization of the page on installing, with the name of the image on the node. `deploy/` has the
/// components too.
fn own_kustomization(site: &Site) {
    let text = example(INSTALL, "yaml", "components:").unwrap();
    let mine = site.directory().join("mine");
    fs::create_dir(&mine).unwrap();
    fs::write(mine.join("kustomization.yaml"), text.replace("registry.example/", "localhost/")).unwrap();
}

/// Writes the page's line into the settings, instead of the line with that key.
fn set(site: &Site, key: &str) {
    let line = example(REMOVE.text, "yaml", key).unwrap();
    let file = site.deploy().join("base/config.yaml");
    let text = fs::read_to_string(&file).unwrap();
    let (name, _) = line.split_once(':').unwrap();
    let lines = text.lines().map(|of| if of.starts_with(&format!("{name}:")) { line.trim_end() } else { of });
    let changed: String = lines.map(|line| format!("{line}\n")).collect();
    assert_ne!(changed, text);
    fs::write(file, changed).unwrap();
}

/// Creates a pod on a network; once it is ready, returns the names of the networks in its status.
#[track_caller]
fn networks_of_new_pod(site: &Site, name: &str) -> Vec<String> {
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "spec": busybox(&json!({})),
        "metadata": {
            "namespace": "default", "name": name, "annotations": {"k8s.v1.cni.cncf.io/networks": "lan"}
        }
    });
    site.admin.create(&pod).unwrap();
    let path = format!("{PODS}/{name}");
    let ready = site.eventually(|| is_ready(&site.get(&path)));
    assert!(ready, "{:#}\n{}", site.get("/api/v1/namespaces/default/events"), site.told());
    let status = || site.get(&path)["metadata"]["annotations"][STATUS].as_str().map(str::to_owned);
    // The agent reports its attachments before a pod is ready, and by a query of its own.
    let rows = site.ctl(&["attachments"]);
    let of_pod = |row: &&Value| row["pod"]["name"] == name;
    if rows.as_array().is_some_and(|rows| rows.iter().any(|row| of_pod(&row))) {
        assert!(site.eventually(|| status().is_some()), "{:#}", site.get(&path));
    }
    let entries: Value = serde_json::from_str(&status().unwrap_or("[]".to_owned())).unwrap();
    entries.as_array().unwrap().iter().map(|entry| entry["name"].as_str().unwrap().to_owned()).collect()
}

/// Upgrades and downgrades: the agent is of the image that the page names each time, and the pod keeps its
/// attachments.
fn is_upgraded_and_comes_back(site: &Site, operator: &mut Operator) {
    site.worker.containerd().tag_for_pods(BEFORE, AFTER).unwrap();
    let attached = || {
        let mut rows = site.ctl(&["attachments"]);
        for row in rows.as_array_mut().into_iter().flatten() {
            row.as_object_mut()
                .unwrap()
                .retain(|key, _| ["pod", "ifname", "addresses", "mac"].contains(&key.as_str()));
        }
        rows
    };
    let before = attached();
    assert_eq!(before.as_array().map(Vec::len), Some(2), "{before:#}");
    own_kustomization(site);
    for (part, image) in
        [("upgrade", AFTER), ("way-back", BEFORE), ("upgrade-mine", AFTER), ("way-back", BEFORE)]
    {
        operator.run(UPGRADE, part).unwrap();
        let pods =
            site.get("/api/v1/namespaces/kube-system/pods?labelSelector=app.kubernetes.io/component=agent");
        let agents = pods["items"].as_array().unwrap().iter().map(|pod| &pod["spec"]["containers"][0]);
        let agents: Vec<&Value> = agents.collect();
        assert_eq!(agents.iter().map(|agent| &agent["image"]).collect::<Vec<_>>(), [image], "{part}");
        let words = agents[0]["args"].as_array().unwrap();
        assert!(words.contains(&json!("--plugin-root=/host")), "{part}: {words:?}");
        assert!(site.eventually(|| attached() == before), "{part}: {:#}", attached());
    }
}

#[test]
fn the_quick_start_an_upgrade_and_the_removal_run_as_written() {
    const TEST: &str = "the_quick_start_an_upgrade_and_the_removal_run_as_written";
    let Some((list, plugins)) = primary(TEST) else { return };
    let before = Before { primary: Some((list, &plugins)), has_bpffs: true };
    let Some(site) = Site::new(TEST, &before).unwrap() else { return };
    site.worker.containerd().tag_for_pods(IMAGE, BUSYBOX).unwrap();
    with_components(&site);
    let bare = Left::of(&site).unwrap();

    on_the_node(&site).run(QUICK_START, "node").unwrap();
    let mut operator = site.kubectl.operator(site.directory()).unwrap();
    operator.run(QUICK_START, "cluster").unwrap();
    operator.run(QUICK_START, "").unwrap();

    let lan = json!({
        "cniVersion": "1.0.0", "type": "bridge", "bridge": "br-lan",
        "ipam": {"type": "host-local", "subnet": "10.52.0.0/24"}
    });
    site.admin.create(&definition("lan", &lan)).unwrap();
    tested::policies_are_tried(&site);
    assert_eq!(networks_of_new_pod(&site, "old"), ["primary", "default/lan"]);
    is_upgraded_and_comes_back(&site, &mut operator);

    operator.run(TROUBLESHOOTING, "describe").unwrap();
    operator.run(TROUBLESHOOTING, "doctor-before-1.30").unwrap();
    operator.run(TROUBLESHOOTING, "doctor").unwrap();
    the_doctor_finds_nothing(&site);
    why_a_container_has_failed_is_in_its_pods_status(&site);
    why_an_agent_does_not_start_is_in_its_pods_status(&site);
    operator.run(TROUBLESHOOTING, "doctor-done").unwrap();

    set(&site, "remove: true");
    operator.run(REMOVE, "new-pods").unwrap();
    assert_eq!(networks_of_new_pod(&site, "new"), [""; 0]);
    let rows = site.ctl(&["attachments"]);
    let attached = rows.as_array().unwrap().iter().map(|row| row["pod"]["name"].as_str().unwrap());
    assert_eq!(attached.collect::<Vec<_>>(), ["old"; 2]);

    site.kubectl.run(&["delete", "pod", "old"]).unwrap();
    // The runtime has called the other plugin; the agent checks for deleted namespaces (`collectAfterSeconds`).
    let none = || site.ctl(&["attachments"]) == json!([]);
    assert!(site.eventually(none), "{:#}", site.ctl(&["attachments"]));
    operator.run(REMOVE, "old-pods").unwrap();
    operator.run(REMOVE, "agents-before-1.30").unwrap();
    operator.run(REMOVE, "agents").unwrap();

    // The other plugin's pod keeps running, and another one is created.
    let new = site.get(&format!("{PODS}/new"));
    assert!(is_ready(&new), "{new:#}");
    assert_eq!(networks_of_new_pod(&site, "newer"), [""; 0]);
    site.kubectl.run(&["delete", "pod", "new", "newer"]).unwrap();
    // The garbage collector deletes the pods of Jobs.
    assert!(site.eventually(|| objects(&site).is_empty()), "{:#?}", objects(&site));
    // Left are a bridge that had a port when the Job ran, and the runtime's cache of our ADD: its DEL went to the
    // other plugin. Pods are deleted from the API before they are from the node.
    let of_runtime = |file: &String| file.starts_with("/var/lib/cni/results/netattach-");
    let is_as_before = || {
        let (links, mut files) = bare.added(&site).unwrap();
        files.retain(|file| !of_runtime(file));
        links == ["cni0"] && files == ["/opt/cni/bin/loopback"]
    };
    assert!(site.eventually(is_as_before), "{:#?}", bare.added(&site).unwrap());
    let node = site.get(&format!("/api/v1/nodes/{NODE}"));
    assert!(is_ready(&node), "{node:#}");
}

/// Checks that the Job that checks the node has succeeded, which means that no check failed.
fn the_doctor_finds_nothing(site: &Site) {
    let jobs = || {
        let label = "app.kubernetes.io%2Fname%3Dnetattach-doctor";
        site.get(&format!("/apis/batch/v1/namespaces/kube-system/jobs?labelSelector={label}"))
    };
    let is_complete = || jobs()["items"][0]["status"]["succeeded"] == 1;
    assert!(site.eventually(is_complete), "{:#}", jobs());
}

/// The same Job, without the settings: its last output is in the field that `kubectl describe` shows.
fn why_a_container_has_failed_is_in_its_pods_status(site: &Site) {
    let set = site.get("/apis/apps/v1/namespaces/kube-system/daemonsets/netattach");
    let image = set["spec"]["template"]["spec"]["containers"][0]["image"].as_str().unwrap();
    let job = fs::read_to_string(site.deploy().join("doctor/job.yaml")).unwrap();
    let job = job.replace("NODE", NODE).replace("IMAGE", image).replace("CONFIG", "nowhere");
    site.admin.create(&serde_norway::from_str(&job).unwrap()).unwrap();
    let label = "app.kubernetes.io%2Fname%3Dnetattach-doctor";
    let pods = || site.get(&format!("/api/v1/namespaces/kube-system/pods?labelSelector={label}"));
    let ended = |pod: &Value| pod["status"]["containerStatuses"][0]["state"]["terminated"].clone();
    let failed = || {
        let pods = pods();
        pods["items"].as_array()?.iter().map(ended).find(|it| it["exitCode"] == 1)
    };
    assert!(site.eventually(|| failed().is_some()), "{:#}", pods());
    let message = failed().unwrap()["message"].as_str().unwrap_or_default().to_owned();
    // The runtime reads the container's two outputs side by side: which line is the last differs.
    let said = "checks failed; each is shown with its details";
    assert!(message.lines().any(|line| line.ends_with(said)), "{message}");
}

/// An agent whose pins are on no BPF file system, beside the one that serves: its pod shows the remedy, as for
/// everything that prevents an agent's start (`lifecycle::bad_node` has each case), and the other one continues.
fn why_an_agent_does_not_start_is_in_its_pods_status(site: &Site) {
    const NAME: &str = "netattach-without-bpffs";
    const PINS: &str = "/run/netattach/pins";
    let attached = || {
        let rows = site.ctl(&["attachments"]);
        let rows = rows.as_array().into_iter().flatten();
        let row = |row: &Value| json!([row["pod"]["name"], row["ifname"], row["state"]]);
        rows.map(row).collect::<Vec<_>>()
    };
    let before = attached();
    let mut pod = surge::by_hand(site, NAME);
    pod["spec"]["restartPolicy"] = json!("Never");
    let words = pod["spec"]["containers"][0]["args"].as_array_mut().unwrap();
    words.push(json!(format!("--bpffs={PINS}")));
    site.admin.create(&pod).unwrap();
    let status = || site.get(&format!("/api/v1/namespaces/kube-system/pods/{NAME}"))["status"].clone();
    let ended = || status()["containerStatuses"][0]["state"]["terminated"].clone();
    assert!(site.eventually(|| ended()["exitCode"] == 1), "{:#}\n{}", status(), site.told());
    let message = ended()["message"].as_str().unwrap_or_default().to_owned();
    let said = format!(
        "set up the dataplane: {PINS} is not on a BPF filesystem: run `mount -t bpf bpf /sys/fs/bpf`"
    );
    assert!(message.lines().any(|line| line.contains("ERROR") && line.ends_with(&said)), "{message}");
    site.kubectl.run(&["delete", "pod", NAME, "--namespace=kube-system"]).unwrap();
    site.rolled_out().unwrap();
    assert_eq!(attached(), before);
}

/// Returns a shell on the node, with the executables of an archive in the path.
fn on_the_node(site: &Site) -> Operator {
    let executables = executable("netattachd").unwrap();
    let path = [executables.parent().unwrap(), Path::new("/usr/sbin"), Path::new("/usr/bin")];
    let mut shell = Command::new("bash");
    shell.env("PATH", std::env::join_paths(path).unwrap());
    site.worker.node().namespace.run(|| Operator::start(shell, site.directory())).unwrap()
}

/// Returns netattach's objects in the API: all with the labels of its manifests and its Jobs, and the definitions.
fn objects(site: &Site) -> Vec<String> {
    let labels = "app.kubernetes.io/part-of=netattach";
    let kinds = "daemonsets,jobs,pods,configmaps,serviceaccounts,clusterroles,clusterrolebindings,customresourcedefinitions";
    let listed = site.kubectl.run(&["get", kinds, "--all-namespaces", "--selector", labels, "--output=name"]);
    listed.unwrap().lines().map(str::to_owned).collect()
}
