//! The manifests of `deploy`, as rendered by a current kubectl and as accepted by a real kube-apiserver.
//!
//! The server is of Kubernetes 1.20: it knows no ValidatingAdmissionPolicy, so only the form of those is checked
//! here, and their meaning in `api::admission`; and no `appArmorProfile`.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Parser;
use netattach::settings::{Arguments, Settings};
use netattach_tests::cluster::Cluster;
use netattach_tests::cluster::site::{archive, copy};
use netattach_tests::guide::{Page, example, first_cells};
use netattach_tests::map_memory::documented;
use netattach_tests::tools;
use serde::Deserialize;
use serde_json::{Value, json};

const INSTALL: Page = Page { path: "docs/install.md", text: include_str!("../../../docs/install.md") };

/// The directories that an operator applies.
const DIRECTORIES: [&str; 3] = ["deploy", "deploy/alone", "deploy/with-metrics"];

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// A field that a server before Kubernetes 1.30 does not know.
const PROFILE: &str = ".spec.template.spec.containers[0].securityContext.appArmorProfile";

/// The objects that kubectl makes of a directory.
fn rendered(kubectl: &Path, directory: &str) -> Vec<Value> {
    let output = Command::new(kubectl).arg("kustomize").arg(repository().join(directory)).output().unwrap();
    assert!(output.status.success(), "{directory}: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    serde_norway::Deserializer::from_str(&text)
        .map(|document| Value::deserialize(document).unwrap())
        .collect()
}

fn kubectl(test: &str) -> Option<PathBuf> {
    Some(tools::directory(test, "NETATTACH_KUBECTL", &["kubectl"])?.join("kubectl"))
}

/// Kind and name.
fn title(object: &Value) -> String {
    format!("{} {}", object["kind"].as_str().unwrap(), object["metadata"]["name"].as_str().unwrap())
}

fn of_kind<'o>(objects: &'o [Value], kind: &str) -> &'o Value {
    objects.iter().find(|object| object["kind"] == kind).unwrap()
}

/// Paths of everything in `sent` that `stored` does not have or has otherwise.
fn lost(sent: &Value, stored: &Value, path: &str, found: &mut BTreeSet<String>) {
    match (sent, stored) {
        (Value::Object(sent), Value::Object(stored)) => {
            for (key, value) in sent {
                lost(value, stored.get(key).unwrap_or(&Value::Null), &format!("{path}.{key}"), found);
            }
        }
        (Value::Array(sent), Value::Array(stored)) if sent.len() == stored.len() => {
            for (index, (value, kept)) in sent.iter().zip(stored).enumerate() {
                lost(value, kept, &format!("{path}[{index}]"), found);
            }
        }
        _ if sent == stored => {}
        _ => drop(found.insert(path.to_owned())),
    }
}

/// Returns the settings as read by an agent in a pod of the cluster.
fn read_settings(objects: &[Value]) -> Settings {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("config.yaml");
    std::fs::write(&file, of_kind(objects, "ConfigMap")["data"]["config.yaml"].as_str().unwrap()).unwrap();
    let words = ["netattachd", "--node-name", "a", "--config", file.to_str().unwrap()];
    Settings::read(Arguments::try_parse_from(words).unwrap()).unwrap()
}

#[test]
fn every_directory_has_what_an_agent_needs() {
    let Some(kubectl) = kubectl("every_directory_has_what_an_agent_needs") else { return };
    for directory in DIRECTORIES {
        let objects = rendered(&kubectl, directory);
        let mut titles: Vec<String> = objects.iter().map(title).collect();
        titles.sort();
        let name = of_kind(&objects, "ConfigMap")["metadata"]["name"].as_str().unwrap();
        assert!(name.starts_with("netattach-"), "{name}");
        let mut expected = vec![
            "ClusterRole netattach".to_owned(),
            "ClusterRoleBinding netattach".to_owned(),
            format!("ConfigMap {name}"),
            "CustomResourceDefinition multi-networkpolicies.k8s.cni.cncf.io".to_owned(),
            "CustomResourceDefinition network-attachment-definitions.k8s.cni.cncf.io".to_owned(),
            "DaemonSet netattach".to_owned(),
            "ServiceAccount netattach".to_owned(),
            "ValidatingAdmissionPolicy netattach-own-events".to_owned(),
            "ValidatingAdmissionPolicy netattach-own-node".to_owned(),
            "ValidatingAdmissionPolicy netattach-pods-of-own-node".to_owned(),
            "ValidatingAdmissionPolicyBinding netattach-own-events".to_owned(),
            "ValidatingAdmissionPolicyBinding netattach-own-node".to_owned(),
            "ValidatingAdmissionPolicyBinding netattach-pods-of-own-node".to_owned(),
        ];
        if directory == "deploy/with-metrics" {
            expected.insert(6, "Service netattach-metrics".to_owned());
            expected.sort();
        }
        assert_eq!(titles, expected, "{directory}");
        let pod = &of_kind(&objects, "DaemonSet")["spec"]["template"]["spec"];
        assert_eq!(pod["volumes"][0]["configMap"]["name"], name);
        // An agent that gets no processor on a busy node answers STATUS late.
        let containers = ["initContainers", "containers"].map(|kind| pod[kind].as_array().unwrap().iter());
        for container in containers.into_iter().flatten() {
            let requests = &container["resources"]["requests"];
            assert!(
                requests["cpu"].is_string() && requests["memory"].is_string(),
                "{directory} {container:#}"
            );
            assert_eq!(container["terminationMessagePolicy"], "FallbackToLogsOnError", "{directory}");
        }
        assert_eq!(pod["priorityClassName"], "system-node-critical", "{directory}");
        // On any other node the image does not start.
        let nodes = json!({"kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"});
        assert_eq!(pod["nodeSelector"], nodes, "{directory}");
        read_settings(&objects);
    }
}

/// An answer takes up to 5 s, and a probe that waits less ends an agent that is only busy.
#[test]
fn probes_wait_as_long_as_the_page_on_them_says() {
    let Some(kubectl) = kubectl("probes_wait_as_long_as_the_page_on_them_says") else { return };
    let page = include_str!("../../../docs/metrics.md");
    for directory in DIRECTORIES {
        let objects = rendered(&kubectl, directory);
        let agent = &of_kind(&objects, "DaemonSet")["spec"]["template"]["spec"]["containers"][0];
        for probe in ["startupProbe", "livenessProbe", "readinessProbe"] {
            let said = format!("Give a probe {} s", agent[probe]["timeoutSeconds"]);
            assert!(page.contains(&said), "{directory} {probe}: {said}");
        }
    }
}

/// No more than documented in docs/install.md. `lifecycle::capabilities` proves that both capabilities are needed and
/// sufficient.
#[test]
fn the_agent_is_given_two_capabilities_and_a_read_only_image() {
    let Some(kubectl) = kubectl("the_agent_is_given_two_capabilities_and_a_read_only_image") else { return };
    let objects = rendered(&kubectl, "deploy");
    let pod = &of_kind(&objects, "DaemonSet")["spec"]["template"]["spec"];
    let rights = |container: &Value| {
        let context = &container["securityContext"];
        json!([context["privileged"], context["readOnlyRootFilesystem"], context["capabilities"]])
    };
    let given = json!([false, true, {"add": ["NET_ADMIN", "SYS_ADMIN"], "drop": ["ALL"]}]);
    assert_eq!(rights(&pod["containers"][0]), given);
    let first = &pod["initContainers"][0];
    assert_eq!(rights(first), json!([true, true, null]));
    let mounts = json!([{"name": "bpffs", "mountPath": "/sys/fs/bpf", "mountPropagation": "Bidirectional"}]);
    assert_eq!(first["volumeMounts"], mounts, "what is privileged sees nothing else of the node");
    assert_eq!(rights(&pod["initContainers"][1]), json!([false, true, {"drop": ["ALL"]}]));
    let shared = ["hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"].map(|key| pod[key].clone());
    assert_eq!(shared, [json!(true), Value::Null, Value::Null, Value::Null]);
    assert_eq!(pod["priorityClassName"], "system-node-critical");
    let image = format!("localhost/netattach:{}", env!("CARGO_PKG_VERSION"));
    let containers = ["containers", "initContainers"].map(|key| pod[key].as_array().unwrap());
    let images: Vec<&Value> = containers.into_iter().flatten().map(|it| &it["image"]).collect();
    assert_eq!(images, [&json!(image), &json!(image), &json!(image)]);
    // Only mounts may be written.
    let mounts = pod["containers"][0]["volumeMounts"].as_array().unwrap();
    let writable = mounts
        .iter()
        .filter(|mount| mount["readOnly"] != true)
        .map(|mount| mount["mountPath"].as_str().unwrap());
    let expected = [
        "/etc/cni",
        "/run/netattach",
        "/run/netns",
        "/sys/fs/bpf",
        "/var/lib/cni",
        "/var/lib/netattach",
        "/var/run/k8s.cni.cncf.io",
    ];
    assert_eq!(writable.collect::<BTreeSet<_>>(), BTreeSet::from(expected));
    // Later mounts of the node are visible, and mounts of the container are not visible on the node.
    let of_node = mounts.iter().filter(|mount| mount["mountPropagation"] != Value::Null);
    let of_node = of_node.map(|mount| json!([mount["mountPath"], mount["mountPropagation"]]));
    let expected = ["/sys/fs/bpf", "/run/netns"].map(|path| json!([path, "HostToContainer"]));
    assert_eq!(of_node.collect::<Vec<_>>(), expected);
}

/// The usual SELinux type of containers may not write to directories of the node; privileged ones have another type
/// anyway.
#[test]
fn whatever_writes_to_the_node_has_a_type_of_selinux_that_may() {
    let Some(kubectl) = kubectl("whatever_writes_to_the_node_has_a_type_of_selinux_that_may") else { return };
    let jobs = JOBS.map(|(file, ..)| job(file, "worker-1"));
    let sets = DIRECTORIES.map(|directory| of_kind(&rendered(&kubectl, directory), "DaemonSet").clone());
    for object in jobs.iter().chain(&sets) {
        let pod = &object["spec"]["template"]["spec"];
        let volumes = pod["volumes"].as_array().unwrap().iter();
        let of_node: BTreeSet<&str> = volumes
            .filter(|volume| volume["hostPath"].is_object())
            .map(|volume| volume["name"].as_str().unwrap())
            .collect();
        let containers = ["initContainers", "containers"].map(|kind| pod[kind].as_array());
        for container in containers.into_iter().flatten().flatten() {
            let mut mounts = container["volumeMounts"].as_array().unwrap().iter();
            let writes = mounts
                .any(|mount| mount["readOnly"] != true && of_node.contains(mount["name"].as_str().unwrap()));
            let context = &container["securityContext"];
            let may = context["privileged"] == true || context["seLinuxOptions"]["type"] == "spc_t";
            assert!(!writes || may, "{} {}", title_or_generated(object), container["name"]);
        }
    }
}

/// Kind and name, of a Job the beginning of its name.
fn title_or_generated(object: &Value) -> String {
    let metadata = &object["metadata"];
    let name = metadata["name"].as_str().or(metadata["generateName"].as_str()).unwrap();
    format!("{} {name}", object["kind"].as_str().unwrap())
}

/// A quantity of memory of a manifest.
fn mib(quantity: &Value) -> u64 {
    let text = quantity.as_str().unwrap();
    let (number, unit) = text.split_at(text.find(|it: char| !it.is_ascii_digit()).unwrap());
    let of_unit = match unit {
        "Mi" => 1,
        "Gi" => 1024,
        _ => panic!("{text}"),
    };
    number.parse::<u64>().unwrap() * of_unit
}

/// The memory of the maps, with the agent at rest or at its maximum and with the plugins that it executes, on a node
/// with the number of processors in docs/install.md.
#[test]
fn the_agent_is_given_the_memory_that_it_and_its_maps_take() {
    /// Memory of the agent, in MiB: resident at rest (`bench cluster --check`), and the maximum (docs/budgets.md).
    const AT_REST: u64 = 30;
    const MOST: u64 = 64;
    let Some(kubectl) = kubectl("the_agent_is_given_the_memory_that_it_and_its_maps_take") else { return };
    let [at_start, full] = documented()["all"];
    for directory in DIRECTORIES {
        let objects = rendered(&kubectl, directory);
        let agent = &of_kind(&objects, "DaemonSet")["spec"]["template"]["spec"]["containers"][0];
        let plugins = read_settings(&objects).plugin_memory().unwrap() >> 20;
        for (what, processors, maps, rest) in
            [("request", 16, at_start, AT_REST), ("limit", 64, full, MOST + plugins)]
        {
            let given = &agent["resources"][format!("{what}s")]["memory"];
            let needed = rest + maps.with(processors).div_ceil(1024);
            assert!(mib(given) >= needed, "{directory}: the {what} is {given}, and {needed} MiB are needed");
            let row = INSTALL.text.lines().find(|line| line.starts_with(&format!("| {what} | "))).unwrap();
            assert!(row.contains(&format!("| {} |", given.as_str().unwrap())), "{row}");
            assert!(row.ends_with(&format!("up to {processors} possible processors |")), "{row}");
        }
        // They get at most half of the limit.
        assert!(mib(&agent["resources"]["limits"]["memory"]) >= 2 * plugins, "{directory}");
    }
}

/// So that new pods wait for no agent, and a version that a node cannot run ends no other one.
#[test]
fn the_next_agent_stands_by_before_the_one_that_serves_is_ended() {
    let Some(kubectl) = kubectl("the_next_agent_stands_by_before_the_one_that_serves_is_ended") else {
        return;
    };
    for directory in DIRECTORIES {
        let objects = rendered(&kubectl, directory);
        let set = &of_kind(&objects, "DaemonSet")["spec"];
        let strategy =
            json!({"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "10%", "maxUnavailable": 0}});
        assert_eq!((&set["updateStrategy"], &set["minReadySeconds"]), (&strategy, &json!(10)), "{directory}");
        let pod = &set["template"]["spec"];
        let agent = &pod["containers"][0];
        let words = agent["args"].as_array().unwrap().iter().map(|word| word.as_str().unwrap());
        let arguments = Arguments::try_parse_from(std::iter::once("netattachd").chain(words)).unwrap();
        assert_eq!(arguments.stand_by, Some(300), "{directory}");
        // An agent that ends is waited for 30 s; and a port would keep the second pod from the node.
        assert_eq!((&pod["terminationGracePeriodSeconds"], &agent["ports"]), (&json!(20), &Value::Null));
    }
}

/// The Jobs for a node, with the page that documents them, and the words that an operator replaces in each.
const JOBS: [(&str, &str, &[&str]); 2] = [
    ("deploy/uninstall/job.yaml", "docs/remove.md", &["NODE", "IMAGE"]),
    ("deploy/doctor/job.yaml", "docs/troubleshooting.md", &["NODE", "IMAGE", "CONFIG"]),
];

/// Returns one of them, with the words replaced.
fn job(file: &str, node: &str) -> Value {
    filled(file, &std::fs::read_to_string(repository().join(file)).unwrap(), node)
}

fn filled(file: &str, text: &str, node: &str) -> Value {
    let image = format!("localhost/netattach:{}", env!("CARGO_PKG_VERSION"));
    let (_, _, words) = JOBS.into_iter().find(|(of, ..)| *of == file).unwrap();
    assert!(words.iter().all(|word| text.contains(word)), "{file}");
    let filled = text.replace("NODE", node).replace("IMAGE", &image).replace("CONFIG", "netattach-abc");
    serde_norway::from_str(&filled).unwrap()
}

/// On a full node the kubelet ends other pods for critical ones: not for a check that changes nothing.
#[test]
fn a_job_that_only_looks_ends_no_pod_of_others() {
    let priority = |file| job(file, "worker-1")["spec"]["template"]["spec"]["priorityClassName"].clone();
    let found = JOBS.map(|(file, ..)| priority(file));
    assert_eq!(found, [json!("system-node-critical"), Value::Null]);
}

/// The directories of the node that a pod sees.
fn of_node(pod: &Value) -> BTreeSet<String> {
    let volumes = pod["volumes"].as_array().unwrap().iter();
    volumes.filter_map(|volume| volume["hostPath"]["path"].as_str().map(str::to_owned)).collect()
}

/// Returns one of them as changed by an operator of an API server before Kubernetes 1.30, according to its page.
fn older(job: &str, node: &str) -> Value {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(dir.path().join(job).parent().unwrap()).unwrap();
    std::fs::copy(repository().join(job), dir.path().join(job)).unwrap();
    let (_, page, _) = JOBS.into_iter().find(|(of, ..)| *of == job).unwrap();
    let page = std::fs::read_to_string(repository().join(page)).unwrap();
    let script = example(&page, "sh", "appArmorProfile").unwrap();
    assert!(std::fs::read_to_string(repository().join(job)).unwrap().contains(script.trim_end()));
    let done = Command::new("sh").args(["-ec", &script]).current_dir(dir.path()).status().unwrap();
    assert!(done.success(), "{script}");
    filled(job, &std::fs::read_to_string(dir.path().join(job)).unwrap(), node)
}

/// Checks that one of the Jobs sees no more of the node than the agent, at the paths that it reads, and has no more
/// rights than the agent, on an older server too; its failure is in its pod.
fn is_bound_like_the_agent(file: &str, agent: &Value) -> Value {
    let job = job(file, "worker-1");
    let pod = &job["spec"]["template"]["spec"];
    let container = &pod["containers"][0];
    assert_eq!(
        json!([
            pod["nodeName"],
            pod["hostNetwork"],
            pod["restartPolicy"],
            container["terminationMessagePolicy"]
        ]),
        json!(["worker-1", true, "Never", "FallbackToLogsOnError"])
    );
    assert_eq!(
        container["securityContext"],
        agent["spec"]["template"]["spec"]["containers"][0]["securityContext"]
    );
    let mut before_130 = older(file, "worker-1");
    let name = container["name"].as_str().unwrap();
    let key = format!("container.apparmor.security.beta.kubernetes.io/{name}");
    let said = before_130["spec"]["template"]["metadata"].as_object_mut().unwrap().remove("annotations");
    assert_eq!(said, Some(json!({key: "unconfined"})));
    let context = &mut before_130["spec"]["template"]["spec"]["containers"][0]["securityContext"];
    context["appArmorProfile"] = json!({"type": "Unconfined"});
    assert_eq!(before_130, job, "it is said otherwise, and all else is the same");
    let (seen, agents) = (of_node(pod), of_node(&agent["spec"]["template"]["spec"]));
    let around = |path: &&String| !agents.iter().any(|of_agent| path.starts_with(of_agent));
    assert_eq!(seen.iter().filter(around).collect::<Vec<_>>(), Vec::<&String>::new());
    let mounts = container["volumeMounts"].as_array().unwrap().iter();
    for mount in mounts.filter(|mount| mount["name"] != "config") {
        let path = mount["mountPath"].as_str().unwrap();
        assert!(seen.contains(path), "{path} of the node is at its own path");
    }
    // `kubectl netattach` does not take these pods for agents.
    assert_ne!(
        job["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/name"],
        agent["metadata"]["labels"]["app.kubernetes.io/name"]
    );
    job
}

/// `lifecycle::removal` proves that its capabilities are sufficient.
#[test]
fn the_job_that_removes_netattach_sees_what_the_agent_has_written() {
    let Some(kubectl) = kubectl("the_job_that_removes_netattach_sees_what_the_agent_has_written") else {
        return;
    };
    let objects = rendered(&kubectl, "deploy");
    let job = is_bound_like_the_agent("deploy/uninstall/job.yaml", of_kind(&objects, "DaemonSet"));
    let pod = &job["spec"]["template"]["spec"];
    assert_eq!(pod["automountServiceAccountToken"], false);
    let command = json!(["/usr/bin/netattachctl", "uninstall", "--cni-bin-dir=/opt/cni/bin"]);
    assert_eq!(pod["containers"][0]["command"], command);
}

/// It has the same mounts as the agent for the same purpose, so that a finding holds for the agent.
#[test]
fn the_job_that_looks_at_a_node_sees_it_as_the_agent_does() {
    let Some(kubectl) = kubectl("the_job_that_looks_at_a_node_sees_it_as_the_agent_does") else { return };
    let objects = rendered(&kubectl, "deploy");
    let set = of_kind(&objects, "DaemonSet");
    let job = is_bound_like_the_agent("deploy/doctor/job.yaml", set);
    let (pod, agent) = (&job["spec"]["template"]["spec"], &set["spec"]["template"]["spec"]);
    assert_eq!(pod["serviceAccountName"], agent["serviceAccountName"]);
    let container = &pod["containers"][0];
    let settings = &agent["containers"][0]["args"][0];
    assert_eq!(container["command"], json!(["/usr/bin/netattachctl", "doctor", settings]));
    let named = |list: &Value, name: &Value| -> Value {
        list.as_array().unwrap().iter().find(|it| it["name"] == *name).cloned().unwrap()
    };
    for mount in container["volumeMounts"].as_array().unwrap() {
        let name = &mount["name"];
        assert_eq!(mount, &named(&agent["containers"][0]["volumeMounts"], name));
        if name != "config" {
            assert_eq!(named(&pod["volumes"], name), named(&agent["volumes"], name));
        }
    }
    let config = json!({"name": "config", "configMap": {"name": "netattach-abc", "optional": true}});
    assert_eq!(pod["volumes"][0], config);
}

/// The policies identify the agent by its service account, and every name in an expression is one of the policy's own
/// or of Kubernetes'.
#[test]
fn the_admission_policies_are_about_the_agent_of_these_manifests() {
    let Some(kubectl) = kubectl("the_admission_policies_are_about_the_agent_of_these_manifests") else {
        return;
    };
    let objects = rendered(&kubectl, "deploy");
    let account = &of_kind(&objects, "ServiceAccount")["metadata"];
    let agent = format!(
        "request.userInfo.username == \"system:serviceaccount:{}:{}\"",
        account["namespace"].as_str().unwrap(),
        account["name"].as_str().unwrap()
    );
    let policies: Vec<&Value> =
        objects.iter().filter(|object| object["kind"] == "ValidatingAdmissionPolicy").collect();
    assert_eq!(policies.len(), 3);
    for policy in policies {
        let spec = &policy["spec"];
        assert_eq!(spec["failurePolicy"], "Fail");
        assert_eq!(spec["matchConditions"], json!([{"name": "is-an-agent", "expression": agent}]));
        let list = |key: &str| spec[key].as_array().unwrap();
        let known: Vec<String> = list("variables")
            .iter()
            .map(|it| format!("variables.{}", it["name"].as_str().unwrap()))
            .collect();
        for validation in list("validations") {
            let expression = validation["expression"].as_str().unwrap();
            for (at, start) in expression.match_indices("variables.") {
                let rest = expression[at + start.len()..].chars();
                let name: String = start.chars().chain(rest.take_while(|it| it.is_alphanumeric())).collect();
                assert!(known.contains(&name), "{name} in {expression}");
            }
            assert_eq!(expression.matches('(').count(), expression.matches(')').count(), "{expression}");
            assert!(validation["message"].as_str().unwrap().starts_with("an agent of netattach "));
        }
        let binding = objects.iter().find(|object| {
            object["kind"] == "ValidatingAdmissionPolicyBinding"
                && object["spec"]["policyName"] == policy["metadata"]["name"]
        });
        assert_eq!(binding.unwrap()["spec"]["validationActions"], json!(["Deny"]));
    }
}

/// A present server accepts them as well: it has these fields and more. Fields that the server does not know are
/// dropped by it, and reported here.
#[test]
fn a_real_server_takes_every_object_and_drops_nothing_of_it() {
    let Some(kubectl) = kubectl("a_real_server_takes_every_object_and_drops_nothing_of_it") else { return };
    let Some(cluster) = Cluster::shared("deploy").unwrap() else { return };
    let admin = cluster.admin().unwrap();
    for (file, ..) in JOBS {
        let node = format!("ip-10-0-0-1.{}.example", "a".repeat(60));
        for (job, expected) in [(job(file, &node), &[PROFILE][..]), (older(file, &node), &[])] {
            let reply = admin.try_out(&job).unwrap();
            assert_eq!(reply.status, 201, "{file}: {}", reply.body);
            let mut dropped = BTreeSet::new();
            lost(&job, &reply.body, "", &mut dropped);
            assert_eq!(dropped.iter().collect::<Vec<_>>(), expected, "{file}");
        }
    }
    for directory in DIRECTORIES {
        for mut object in rendered(&kubectl, directory) {
            if object["apiVersion"] == "admissionregistration.k8s.io/v1" {
                continue;
            }
            if object["kind"] == "DaemonSet" {
                // The server drops maxSurge, and refuses the rest.
                let reply = admin.try_out(&object).unwrap();
                let refused = reply.body["message"].as_str().unwrap_or_default();
                assert!(reply.status == 422 && refused.contains("maxUnavailable"), "{}", reply.body);
                // As in deploy/components/before-1.22.
                object["spec"]["updateStrategy"]["rollingUpdate"] = json!({"maxUnavailable": "10%"});
            }
            let reply = admin.try_out(&object).unwrap();
            assert!(matches!(reply.status, 200 | 201), "{directory}: {}: {}", title(&object), reply.body);
            let mut dropped = BTreeSet::new();
            lost(&object, &reply.body, "", &mut dropped);
            let expected: &[&str] = match object["kind"].as_str().unwrap() {
                "DaemonSet" => &[PROFILE],
                _ => &[],
            };
            assert_eq!(
                dropped,
                expected.iter().map(|path| (*path).to_owned()).collect(),
                "{}",
                title(&object)
            );
        }
    }
}

/// Writes substitutes for the programs of the page that are missing here, into the operator's own directory: one that
/// has built the archive already, and one that pushes it to a registry. Each records the name that it gets.
fn programs_of_the_page(home: &Path, archive: &Path) {
    let build = format!(
        r#"[ "$1 $2 $3 $#" = "xtask image --name 4" ] && mkdir -p target/image && ln -s '{}' target/image/ && echo "$4" > built"#,
        archive.display()
    );
    let push = r#"[ "$1 $#" = "copy 3" ] && tar -tf "${2#oci-archive:}" index.json && echo "${3#docker://}" > pushed"#;
    for (name, line) in [("cargo", build.as_str()), ("skopeo", push)] {
        let path = home.join(name);
        std::fs::write(&path, format!("#!/bin/sh\n{line}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
}

/// All files that pages make an operator write, together: each contains a component once, and its agents have the
/// image of the operator's registry.
#[test]
fn kustomizations_of_the_pages_stand_beside_one_another() {
    let Some(kubectl) = kubectl("kustomizations_of_the_pages_stand_beside_one_another") else { return };
    let page = |path: &str| std::fs::read_to_string(repository().join(path)).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let deploy = dir.path().join("deploy");
    copy(&repository().join("deploy"), &deploy).unwrap();
    let components = "components: [components/executed-plugins]";
    let changed = example(&page("docs/quick-start.md"), "yaml", components).unwrap();
    std::fs::write(deploy.join("kustomization.yaml"), changed).unwrap();
    let secrets = example(INSTALL.text, "yaml", "imagePullSecrets").unwrap();
    let of_install = example(INSTALL.text, "yaml", "images:").unwrap() + &secrets;
    let of_migration = example(&page("docs/migrate-from-multus.md"), "yaml", "configMapGenerator").unwrap();
    for (directory, text) in [("mine", of_install), ("deploy/mine", of_migration)] {
        let mine = dir.path().join(directory);
        std::fs::create_dir(&mine).unwrap();
        std::fs::write(mine.join("kustomization.yaml"), &text).unwrap();
        std::fs::copy(deploy.join("base/config.yaml"), mine.join("config.yaml")).unwrap();
        let objects = rendered(&kubectl, mine.to_str().unwrap());
        let pod = &of_kind(&objects, "DaemonSet")["spec"]["template"]["spec"];
        let names = pod["volumes"].as_array().unwrap().iter().map(|it| it["name"].as_str().unwrap());
        assert_eq!(names.filter(|name| *name == "host").count(), 1, "{directory}");
        let images = ["initContainers", "containers"].map(|kind| pod[kind].as_array().unwrap());
        for container in images.into_iter().flatten() {
            assert_eq!(container["image"], "registry.example/netattach:0.1.0", "{directory}");
        }
        let account = of_kind(&objects, "ServiceAccount");
        let named =
            if text.contains("imagePullSecrets") { json!([{"name": "registry"}]) } else { Value::Null };
        assert_eq!(account["imagePullSecrets"], named, "{directory}");
    }
}

/// The commented line for a registry with a password is in the right place once it is uncommented.
#[test]
fn each_job_can_be_given_the_secret_of_a_registry() {
    for job in ["deploy/doctor/job.yaml", "deploy/uninstall/job.yaml"] {
        let text = std::fs::read_to_string(repository().join(job)).unwrap();
        let given: Value =
            serde_norway::from_str(&text.replace("# imagePullSecrets:", "imagePullSecrets:")).unwrap();
        let secrets = &given["spec"]["template"]["spec"]["imagePullSecrets"];
        assert_eq!(*secrets, json!([{"name": "registry"}]), "{job}");
    }
}

#[test]
fn the_page_on_installing_has_every_component_and_every_volume() {
    let written = |head: &str| -> BTreeSet<String> {
        first_cells(INSTALL.text, head).unwrap().into_iter().flatten().collect()
    };
    let components = std::fs::read_dir(repository().join("deploy/components")).unwrap();
    let components = components.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert_eq!(written("| component | for |"), components.collect::<BTreeSet<_>>());
    let set = std::fs::read_to_string(repository().join("deploy/base/daemonset.yaml")).unwrap();
    let set: Value = serde_norway::from_str(&set).unwrap();
    assert_eq!(written("| volume | for |"), of_node(&set["spec"]["template"]["spec"]));
}

/// Up to the step that needs a node: `guides` runs that, and the same image under its own name.
#[test]
fn the_page_on_installing_runs_as_written() {
    const TEST: &str = "the_page_on_installing_runs_as_written";
    let archive = archive();
    let Some(images) = tools::directory(TEST, "NETATTACH_IMAGES", &[&archive]) else { return };
    let Some(cluster) = Cluster::shared("deploy").unwrap() else { return };
    let Some(kubectl) = cluster.kubectl(TEST).unwrap() else { return };
    let dir = tempfile::tempdir().unwrap();
    copy(&repository().join("deploy"), &dir.path().join("deploy")).unwrap();
    programs_of_the_page(kubectl.home(), &images.join(archive));
    kubectl.operator(dir.path()).unwrap().run(INSTALL, "").unwrap();

    let noted = |file: &str| std::fs::read_to_string(dir.path().join(file)).unwrap().trim_end().to_owned();
    let image = noted("built");
    assert_eq!(noted("pushed"), image);
    let set =
        cluster.admin().unwrap().get("/apis/apps/v1/namespaces/kube-system/daemonsets/netattach").unwrap();
    let spec = &set.body["spec"];
    let pod = &spec["template"]["spec"];
    let containers = ["initContainers", "containers"].map(|kind| pod[kind].as_array().unwrap());
    let of_all: Vec<&Value> = containers.into_iter().flatten().map(|it| &it["image"]).collect();
    assert_eq!(of_all, [&json!(image); 3]);
    // One object or field of each of the components that the page names.
    let agent = &pod["containers"][0];
    assert_eq!(spec["updateStrategy"]["rollingUpdate"]["maxUnavailable"], "10%");
    assert_eq!(
        spec["template"]["metadata"]["annotations"]["container.apparmor.security.beta.kubernetes.io/agent"],
        "unconfined"
    );
    let added = agent["securityContext"]["capabilities"]["add"].as_array().unwrap();
    assert!(added.contains(&json!("SYS_CHROOT")), "{added:?}");
}
