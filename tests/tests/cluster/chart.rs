//! The helm chart of `deploy/helm`, compared with the manifests that kubectl renders. It is rendered by Go's
//! text/template with sprig and a few functions of ours, not by helm.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use boon::{Compiler, ErrorKind, SchemaIndex, Schemas, ValidationError};
use clap::Parser;
use netattach::settings::{Arguments, Settings};
use netattach_tests::guide::{example, first_cells};
use netattach_tests::tools;
use serde::Deserialize;
use serde_json::{Value, json};

/// The directories that kubectl renders, and the values for which the chart renders the same.
const SAME: [(&str, &[&str]); 3] = [
    ("deploy", &[]),
    ("deploy/alone", &["deploy/helm/ci/alone.yaml"]),
    ("deploy/with-metrics", &["deploy/helm/ci/with-metrics.yaml"]),
];

const INSTALL: &str = include_str!("../../../docs/install.md");

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

fn renderer(test: &str) -> Option<PathBuf> {
    let directory = tools::directory(test, "NETATTACH_HELM_RENDERER", &["helm-renderer"])?;
    Some(directory.join("helm-renderer"))
}

fn render(renderer: &Path, values: &[&str]) -> Output {
    render_chart(renderer, Path::new("deploy/helm"), values)
}

fn render_chart(renderer: &Path, chart: &Path, values: &[&str]) -> Output {
    render_into(renderer, chart, "kube-system", values)
}

fn render_into(renderer: &Path, chart: &Path, namespace: &str, values: &[&str]) -> Output {
    let mut command = Command::new(renderer);
    command.arg(chart).args(["netattach", namespace]).args(values).current_dir(repository());
    command.output().unwrap()
}

/// Returns the objects of a command's output by kind and name, without intended differences:
/// - the definitions, which helm takes from `crds` unchanged;
/// - helm's own labels, and `part-of`, which the Service of `with-metrics` has only in the chart;
/// - the name of the ConfigMap, which kustomize and the chart derive from its content in ways of their own, and the
///   annotations by which helm keeps it;
/// - the Job that stops `helm uninstall`, which is no object of the release;
/// - comments and the order of keys in the settings.
fn objects(output: &Output) -> BTreeMap<(String, String), Value> {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = std::str::from_utf8(&output.stdout).unwrap();
    let documents = serde_norway::Deserializer::from_str(text).map(|it| Value::deserialize(it).unwrap());
    let mut found = BTreeMap::new();
    for mut object in documents {
        let kind = object["kind"].as_str().unwrap_or_default().to_owned();
        if kind.is_empty() || kind == "CustomResourceDefinition" || is_guard(&object) {
            continue;
        }
        let labels = object.pointer_mut("/metadata/labels").and_then(Value::as_object_mut).unwrap();
        for label in ["helm.sh/chart", "app.kubernetes.io/managed-by"] {
            labels.remove(label);
        }
        match kind.as_str() {
            "Service" => drop(labels.remove("app.kubernetes.io/part-of")),
            "ConfigMap" => {
                object["metadata"]["name"] = json!("netattach");
                object["metadata"].as_object_mut().unwrap().remove("annotations");
                let settings = object["data"]["config.yaml"].as_str().unwrap();
                object["data"]["config.yaml"] = serde_norway::from_str(settings).unwrap();
            }
            "DaemonSet" => {
                let template = &mut object["spec"]["template"];
                template["spec"]["volumes"][0]["configMap"]["name"] = json!("netattach");
            }
            _ => {}
        }
        let name = object["metadata"]["name"].as_str().unwrap().to_owned();
        found.insert((kind, name), object);
    }
    found
}

/// Whether helm makes this object when it is asked to remove the release.
fn is_guard(object: &Value) -> bool {
    object["metadata"]["annotations"]["helm.sh/hook"] == "pre-delete"
}

/// The objects of the chart as they are.
fn documents(output: &Output) -> Vec<Value> {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = std::str::from_utf8(&output.stdout).unwrap();
    let all = serde_norway::Deserializer::from_str(text).map(|it| Value::deserialize(it).unwrap());
    all.filter(|object| object.is_object()).collect()
}

/// Writes values to a file, and returns its path.
fn values_file(dir: &Path, values: &str) -> String {
    let file = dir.join("mine.yaml");
    std::fs::write(&file, values).unwrap();
    file.to_str().unwrap().to_owned()
}

#[test]
fn the_chart_makes_the_objects_that_kubectl_makes() {
    let test = "the_chart_makes_the_objects_that_kubectl_makes";
    let Some(renderer) = renderer(test) else { return };
    let Some(kubectl) = tools::directory(test, "NETATTACH_KUBECTL", &["kubectl"]) else { return };
    let mine = tempfile::tempdir().unwrap();
    let with_components = format!("{}/with-components", mine.path().display());
    let all = ["before-1.22", "before-1.30", "executed-plugins", "evict", "startup-taint", "runtime-socket"];
    kustomization(Path::new(&with_components), "deploy", &all, SETTINGS);
    let components: (&str, &[&str]) = (&with_components, &["deploy/helm/ci/components.yaml"]);
    for (directory, values) in SAME.into_iter().chain([components]) {
        let mut kustomize = Command::new(kubectl.join("kubectl"));
        let expected =
            objects(&kustomize.arg("kustomize").arg(repository().join(directory)).output().unwrap());
        let made = objects(&render(&renderer, values));
        assert_eq!(made.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>(), "{directory}");
        for (title, object) in made {
            assert_eq!(object, expected[&title], "{directory}: {title:?}");
        }
    }
}

/// Account, binding, ConfigMap, DaemonSet and Jobs, and the user that the admission policies bind: nothing else
/// contains the namespace.
#[test]
fn the_chart_is_the_same_in_another_namespace_but_for_its_name() {
    let Some(renderer) = renderer("the_chart_is_the_same_in_another_namespace_but_for_its_name") else {
        return;
    };
    let chart = Path::new("deploy/helm");
    for values in ["deploy/helm/ci/with-metrics.yaml", "deploy/helm/ci/uninstall.yaml"] {
        let mut usual = render(&renderer, &[values]);
        let text = String::from_utf8(usual.stdout).unwrap();
        for name in ["namespace: kube-system", "system:serviceaccount:kube-system:netattach"] {
            assert!(text.contains(name), "{values}: {name}");
        }
        usual.stdout = text.replace("kube-system", "elsewhere").into_bytes();
        let elsewhere = render_into(&renderer, chart, "elsewhere", &[values]);
        assert_eq!(objects(&elsewhere), objects(&usual), "{values}");
    }
}

/// The command of the page on installing, with its values in a file, as this is not helm.
#[test]
fn the_chart_is_installed_as_the_page_says() {
    let Some(renderer) = renderer("the_chart_is_installed_as_the_page_says") else { return };
    let line = example(INSTALL, "text", "helm install").unwrap();
    let words: Vec<&str> = line.split_whitespace().filter(|word| *word != "\\").collect();
    let (first, set) = words.split_at(6);
    assert_eq!(
        first,
        ["helm", "install", "netattach", "deploy/helm", "--namespace", "kube-system"],
        "{line}"
    );
    let mut values = json!({});
    for pair in set.chunks(2) {
        let ["--set", value] = pair else { panic!("{line}") };
        let (key, value) = value.split_once('=').unwrap();
        let (above, below) = key.split_once('.').unwrap();
        values[above][below] = if value == "true" { json!(true) } else { json!(value) };
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("values.yaml");
    std::fs::write(&file, values.to_string()).unwrap();
    let made = objects(&render(&renderer, &[file.to_str().unwrap()]));
    let set = &made[&("DaemonSet".to_owned(), "netattach".to_owned())];
    let pod = &set["spec"]["template"]["spec"];
    let containers = ["initContainers", "containers"].map(|kind| pod[kind].as_array().unwrap());
    let image = json!(concat!("registry.example/netattach:", env!("CARGO_PKG_VERSION")));
    let images: Vec<&Value> = containers.into_iter().flatten().map(|it| &it["image"]).collect();
    assert_eq!(images, [&image; 3]);
    // If flannel or others are the primary network, no pod starts without it.
    assert!(pod["containers"][0]["args"].as_array().unwrap().contains(&json!("--plugin-root=/host")));
}

/// The Jobs of the chart equal that of `deploy/uninstall`, one on each node, except for their names; no agent runs
/// beside them.
#[test]
fn the_chart_takes_itself_off_by_the_job_of_deploy_on_each_node() {
    let Some(renderer) = renderer("the_chart_takes_itself_off_by_the_job_of_deploy_on_each_node") else {
        return;
    };
    let job = std::fs::read_to_string(repository().join("deploy/uninstall/job.yaml")).unwrap();
    // As the page on removal describes.
    let mut older: String = job
        .lines()
        .filter(|line| !line.contains("appArmorProfile:"))
        .map(|line| format!("{line}\n"))
        .collect();
    older = older.replace("# annotations:", "annotations:");
    let on = |job: &str, node: &str, words: &[&str]| {
        let image = concat!("localhost/netattach:", env!("CARGO_PKG_VERSION"));
        let text = job.replace("NODE", node).replace("IMAGE", image);
        let mut job: Value = serde_norway::from_str(&text).unwrap();
        assert_eq!(
            job["metadata"].as_object_mut().unwrap().remove("generateName"),
            Some(json!("netattach-uninstall-"))
        );
        let command = job.pointer_mut("/spec/template/spec/containers/0/command").unwrap();
        command.as_array_mut().unwrap().extend(words.iter().map(|word| json!(word)));
        job
    };
    let dir = tempfile::tempdir().unwrap();
    let more = dir.path().join("more.yaml");
    std::fs::write(&more, "uninstall: {dryRun: true, force: true}").unwrap();
    let before_130 = dir.path().join("before-1.30.yaml");
    std::fs::write(&before_130, "{kubernetesBefore130: true, admissionPolicy: {enabled: false}}").unwrap();
    let (more, before_130) = (more.to_str().unwrap(), before_130.to_str().unwrap());
    let cases: [(&[&str], &str, &[&str]); 3] =
        [(&[], &job, &[]), (&[more], &job, &["--force", "--dry-run"]), (&[before_130], &older, &[])];
    for (values, job, words) in cases {
        let mine = [&["deploy/helm/ci/uninstall.yaml"], values].concat();
        let made = objects(&render(&renderer, &mine));
        let without: Vec<&str> = values.iter().copied().filter(|file| *file != more).collect();
        let usual = objects(&render(&renderer, &without));
        let mut kinds: Vec<_> = made.keys().filter(|(kind, _)| kind != "Job").collect();
        kinds.push(usual.keys().find(|(kind, _)| kind == "DaemonSet").unwrap());
        kinds.sort();
        assert_eq!(kinds, usual.keys().collect::<Vec<_>>());
        let mut jobs: Vec<Value> =
            made.into_iter().filter(|((kind, _), _)| kind == "Job").map(|(_, job)| job).collect();
        for job in &mut jobs {
            let name = job["metadata"].as_object_mut().unwrap().remove("name").unwrap();
            let own = name.as_str().unwrap().strip_prefix("netattach-uninstall-").unwrap();
            assert!(own.len() == 10 && own.bytes().all(|it| it.is_ascii_hexdigit()), "{name}");
        }
        jobs.sort_by_key(|job| job["metadata"]["annotations"]["netattach.dev/node"].to_string());
        assert_eq!(jobs, ["worker-1", "worker-2.example.org"].map(|node| on(job, node, words)));
    }
}

/// The keys of the first chart's `values.yaml`.
const FIRST: [&str; 9] = [
    "admissionPolicy",
    "defaultNetwork",
    "image",
    "log",
    "metrics",
    "nodeSelector",
    "resources",
    "settings",
    "tolerations",
];
/// And those that later charts have added.
const LATER: [&str; 15] = [
    "affinity",
    "executedPlugins",
    "extraEnv",
    "hostPaths",
    "imagePullSecrets",
    "initResources",
    "kubernetesBefore122",
    "kubernetesBefore130",
    "minReadySeconds",
    "podAnnotations",
    "podLabels",
    "prometheusRule",
    "serviceMonitor",
    "uninstall",
    "updateStrategy",
];

/// And those that earlier charts had, each with `enabled`.
const GONE: [&str; 1] = ["modprobeConfiguration"];

/// `helm upgrade --reuse-values` uses the `values.yaml` of the previous chart instead of the new one's, with the
/// operator's values: a newer key is in neither, and a removed one is there.
#[test]
fn the_values_of_an_older_chart_do() {
    let Some(renderer) = renderer("the_values_of_an_older_chart_do") else { return };
    let chart = repository().join("deploy/helm");
    let values: Value =
        serde_norway::from_str(&std::fs::read_to_string(chart.join("values.yaml")).unwrap()).unwrap();
    let mut keys: Vec<&str> = values.as_object().unwrap().keys().map(String::as_str).collect();
    keys.sort_unstable();
    let mut known = [&FIRST[..], &LATER[..]].concat();
    known.sort_unstable();
    assert_eq!(keys, known, "a new key is one of LATER, and templates do without it");

    let mine = tempfile::tempdir().unwrap();
    let old = mine.path().join("helm");
    std::fs::create_dir(&old).unwrap();
    for name in ["Chart.yaml", "templates"] {
        std::os::unix::fs::symlink(chart.join(name), old.join(name)).unwrap();
    }
    let alone = LATER.map(|key| vec![key]);
    for without in alone.into_iter().chain([LATER.to_vec()]) {
        let mut values = values.clone();
        let keys = values.as_object_mut().unwrap();
        keys.retain(|key, _| !without.contains(&key.as_str()));
        keys.extend(GONE.map(|key| (key.to_owned(), json!({"enabled": true}))));
        // JSON is YAML.
        std::fs::write(old.join("values.yaml"), values.to_string()).unwrap();
        for set in [&[][..], &["deploy/helm/ci/uninstall.yaml"], &["deploy/helm/ci/components.yaml"]] {
            let made = objects(&render_chart(&renderer, &old, set));
            assert_eq!(made, objects(&render(&renderer, set)), "without {without:?}, with {set:?}");
        }
    }
}

/// The settings of an operator who uses all components: those of `deploy` and of `deploy/helm/ci/components.yaml`.
const SETTINGS: &str = r#"{"kubernetes": {"enabled": true, "startupTaint": "netattach.dev/agent-not-ready"}, "repair": "evict",
    "runtimeSocket": "/run/containerd/containerd.sock",
    "defaultNetwork": "/etc/cni/net.d", "cniConf": {"dir": "/etc/cni/net.d"}}"#;

/// An operator's kustomization of a directory, with components and settings. kustomize takes no absolute paths.
fn kustomization(mine: &Path, base: &str, components: &[&str], settings: &str) {
    std::fs::create_dir(mine).unwrap();
    let up = "../".repeat(mine.canonicalize().unwrap().components().count() - 1);
    let repository = repository().canonicalize().unwrap().display().to_string();
    let deploy = format!("{up}{}", repository.trim_start_matches('/'));
    let components: Vec<String> =
        components.iter().map(|name| format!("{deploy}/deploy/components/{name}")).collect();
    let own = json!({
        "apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization",
        "resources": [format!("{deploy}/{base}")], "components": components,
        "configMapGenerator": [{
            "name": "netattach", "namespace": "kube-system", "behavior": "replace", "files": ["config.yaml"]
        }]
    });
    // JSON is YAML.
    std::fs::write(mine.join("config.yaml"), settings).unwrap();
    std::fs::write(mine.join("kustomization.yaml"), own.to_string()).unwrap();
}

/// helm installs these unchanged, and packs no link.
#[test]
fn the_definitions_of_the_chart_are_those_of_the_base() {
    let files = |directory: &str| -> BTreeMap<_, _> {
        let entries = std::fs::read_dir(repository().join(directory)).unwrap();
        let paths = entries.map(|entry| entry.unwrap().path());
        paths.map(|path| (path.file_name().unwrap().to_owned(), std::fs::read(path).unwrap())).collect()
    };
    let same = files("deploy/helm/crds") == files("deploy/base/crds");
    assert!(same, "cp deploy/base/crds/* deploy/helm/crds/");
}

#[test]
fn values_that_contradict_one_another_are_refused_with_the_remedy() {
    let Some(renderer) = renderer("values_that_contradict_one_another_are_refused_with_the_remedy") else {
        return;
    };
    let table = [
        (
            "settings: {defaultNetwork: builtin}",
            "settings.defaultNetwork contradicts defaultNetwork: set defaultNetwork alone",
        ),
        (
            "settings: {kubernetes: {enabled: false}}",
            "settings.kubernetes.enabled contradicts the chart, whose agents read the cluster: remove it",
        ),
        (
            "settings: {kubernetes: {kubeconfig: /k}}",
            "settings.kubernetes.kubeconfig contradicts the chart, whose agents have a service account: remove it",
        ),
        (
            "settings: {kubernetes: {nodeName: a}}",
            "settings.kubernetes.nodeName contradicts the chart, whose agents are told the name of their node: remove it",
        ),
        (
            "{defaultNetwork: chained, settings: {cniConf: {dir: /etc/cni/net.d}}}",
            "settings.cniConf.dir contradicts defaultNetwork chained, where the runtime's list is another program's: remove it",
        ),
        (
            "kubernetesBefore122: true",
            "kubernetesBefore122 contradicts kubernetesBefore130, as API servers before 1.22 are before 1.30 too: set both to true",
        ),
        (
            "settings: {source: /a}",
            "settings.source contradicts the chart, whose agents read the cluster: remove it",
        ),
        (
            "{metrics: {enabled: true}, settings: {metrics: {listen: '127.0.0.1:10475'}}}",
            "settings.metrics.listen contradicts metrics.enabled, which sets it: remove one of them",
        ),
        (
            "settings: {metrics: {listen: ''}}",
            "settings.metrics.listen contradicts the probes, which ask 127.0.0.1:10475: remove it, or set \
             metrics.enabled for an address that others reach",
        ),
        (
            "kubernetesBefore130: true",
            "admissionPolicy.enabled contradicts kubernetesBefore130, whose API servers know no such policy: set it to false",
        ),
        (
            "settings: {kubernetes: {startupTaint: example.com/agent-not-ready}}",
            "settings.kubernetes.startupTaint contradicts admissionPolicy.enabled, whose policies let agents remove taints with keys \
             that begin with netattach.dev/ only: name such a key, or set admissionPolicy.enabled to false",
        ),
        (
            "settings: {log: {format: json}}",
            "settings.log.format contradicts log.format: set log.format alone",
        ),
        (
            "settings: {delegation: {root: /host}}",
            "settings.delegation.root contradicts executedPlugins.enabled, which mounts the node's root directory and sets it: set \
             executedPlugins.enabled alone",
        ),
        (
            "{executedPlugins: {enabled: true}, settings: {delegation: {root: /}}}",
            "settings.delegation.root contradicts executedPlugins.enabled, which mounts the node's root directory and sets it: set \
             executedPlugins.enabled alone",
        ),
        (
            "settings: {stateDir: /data/netattach}",
            "settings.stateDir: /data/netattach is in no volume of the agent's pod: set a directory in /var/lib/netattach, or \
             remove it",
        ),
        (
            "settings: {stateDir: /var/lib/netattach/../cni}",
            "settings.stateDir: /var/lib/netattach/../cni is in no volume of the agent's pod: set a directory in \
             /var/lib/netattach, or remove it",
        ),
        (
            "settings: {runDir: /run/netattach2}",
            "settings.runDir: /run/netattach2 is in no volume of the agent's pod: set a directory in /run/netattach, or remove it",
        ),
        (
            "settings: {bpffs: /mnt/bpf}",
            "settings.bpffs: /mnt/bpf is in no volume of the agent's pod: set a directory in /sys/fs/bpf, or remove it",
        ),
        (
            "settings: {cniConf: {dir: /opt/cni/net.d}}",
            "settings.cniConf.dir: /opt/cni/net.d is in no volume of the agent's pod: set a directory in /etc/cni, or remove it",
        ),
        (
            "{defaultNetwork: builtin, settings: {builtin: {dataDir: /data/pools}}}",
            "settings.builtin.dataDir: /data/pools is in no volume of the agent's pod: set a directory in /var/lib/cni, or remove it",
        ),
        (
            "settings: {delegation: {cacheDir: /data}}",
            "settings.delegation.cacheDir: /data is in no volume of the agent's pod: set a directory in /var/lib/cni, or remove it",
        ),
        (
            "settings: {podResourcesSocket: /run/kubelet.sock}",
            "settings.podResourcesSocket: /run/kubelet.sock is in no volume of the agent's pod: set a file in \
             /var/lib/kubelet/pod-resources, or remove it",
        ),
        (
            "settings: {cniBinDirs: [/opt/cni/bin, /usr/libexec/cni]}",
            "settings.cniBinDirs: /usr/libexec/cni is in no volume of the agent's pod: set executedPlugins.enabled, or directories in \
             /opt/cni/bin, or remove it",
        ),
        (
            "{kubernetesBefore122: true, kubernetesBefore130: true, admissionPolicy: {enabled: false}, updateStrategy: \
             {rollingUpdate: {maxSurge: 1}}}",
            "updateStrategy.rollingUpdate.maxSurge contradicts kubernetesBefore122, whose DaemonSets have none: remove it",
        ),
        (
            "serviceMonitor: {enabled: true}",
            "serviceMonitor.enabled contradicts metrics.enabled, without which there is no Service that it names: set both to true",
        ),
        (
            "uninstall: {force: true}",
            "uninstall.force and uninstall.dryRun say nothing without uninstall.nodes: set the nodes, or remove them",
        ),
    ];
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("values.yaml");
    for (values, expected) in table {
        std::fs::write(&file, values).unwrap();
        let output = render(&renderer, &[file.to_str().unwrap()]);
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success(), "{values}");
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(said.trim_end().ends_with(expected), "{values}: {said}");
    }
    for served in [
        "settings: {stateDir: /var/lib/netattach/a, runDir: /run/netattach, bpffs: /sys/fs/bpf/a, cniConf: {dir: /etc/cni/a}}",
        "settings: {delegation: {root: /}}",
        "settings: {builtin: {dataDir: /var/lib/cni/pools}}",
        "{executedPlugins: {enabled: true}, settings: {cniBinDirs: [/usr/libexec/cni], deviceInfoDir: /var/run/k8s.cni.cncf.io/a}}",
    ] {
        std::fs::write(&file, served).unwrap();
        objects(&render(&renderer, &[file.to_str().unwrap()]));
    }
}

/// The probes use 127.0.0.1, which reaches an agent that listens on all addresses of both families.
#[test]
fn metrics_are_served_on_the_addresses_that_are_set_if_the_probes_reach_them() {
    let Some(renderer) =
        renderer("metrics_are_served_on_the_addresses_that_are_set_if_the_probes_reach_them")
    else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("values.yaml");
    let listens = |enabled: bool, listen: Option<&str>| {
        let metrics = listen.map(|listen| json!({"metrics": {"listen": listen}}));
        let set = json!({"metrics": {"enabled": enabled}, "settings": metrics.unwrap_or(json!({}))});
        std::fs::write(&file, set.to_string()).unwrap();
        let made = objects(&render(&renderer, &[file.to_str().unwrap()]));
        let map = &made[&("ConfigMap".to_owned(), "netattach".to_owned())];
        map["data"]["config.yaml"]["metrics"]["listen"].as_str().map(str::to_owned)
    };
    let both = Some("[::]:10475".to_owned());
    assert_eq!(listens(false, None), None);
    assert_eq!(listens(true, None), Some("0.0.0.0:10475".to_owned()));
    assert_eq!(listens(true, Some("[::]:10475")), both);
    assert_eq!(listens(false, Some("[::]:10475")), both);
}

/// A registry that asks for a password is asked for the agents and for the Jobs that take them off.
#[test]
fn every_pod_of_the_chart_has_the_secrets_of_the_registry() {
    let Some(renderer) = renderer("every_pod_of_the_chart_has_the_secrets_of_the_registry") else { return };
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("values.yaml");
    std::fs::write(&file, "imagePullSecrets: [{name: registry}]").unwrap();
    let mine = file.to_str().unwrap();
    for (values, kind, number) in
        [(&[mine][..], "DaemonSet", 1), (&["deploy/helm/ci/uninstall.yaml", mine][..], "Job", 2)]
    {
        let made = objects(&render(&renderer, values));
        let pods = made.iter().filter(|((of, _), _)| of == kind);
        let secrets: Vec<&Value> =
            pods.map(|(_, object)| &object["spec"]["template"]["spec"]["imagePullSecrets"]).collect();
        assert_eq!(secrets, vec![&json!([{"name": "registry"}]); number], "{kind}");
    }
}

/// With any default network, and while netattach is being removed, an agent starts with the settings of the chart.
#[test]
fn an_agent_takes_the_settings_of_the_chart() {
    let Some(renderer) = renderer("an_agent_takes_the_settings_of_the_chart") else { return };
    let dir = tempfile::tempdir().unwrap();
    let [values, config] = ["values.yaml", "config.yaml"].map(|name| dir.path().join(name));
    for network in ["/etc/cni/net.d", "builtin", "chained", "kube-system/default"] {
        for settings in [json!({}), json!({"cniConf": {"remove": true}}), json!({"repair": "report"})] {
            let set = json!({"defaultNetwork": network, "settings": settings});
            std::fs::write(&values, set.to_string()).unwrap();
            let made = objects(&render(&renderer, &[values.to_str().unwrap()]));
            let map = &made[&("ConfigMap".to_owned(), "netattach".to_owned())];
            std::fs::write(&config, map["data"]["config.yaml"].to_string()).unwrap();
            let words = ["netattachd", "--node-name", "a", "--config", config.to_str().unwrap()];
            let read = Settings::read(Arguments::try_parse_from(words).unwrap());
            assert!(read.is_ok(), "{set}: {read:?}");
        }
    }
}

/// Agents of before keep the settings that they were started with, and `helm rollback` finds them: helm deletes nothing
/// that a hook has made, and makes it again for each revision.
#[test]
fn settings_that_change_are_another_object_which_an_upgrade_keeps() {
    let Some(renderer) = renderer("settings_that_change_are_another_object_which_an_upgrade_keeps") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let name = |values: &str| {
        let objects = documents(&render(&renderer, &[&values_file(dir.path(), values)]));
        let of_kind = |kind: &str| objects.iter().find(|object| object["kind"] == kind).unwrap();
        let map = &of_kind("ConfigMap")["metadata"];
        let hook = &map["annotations"]["helm.sh/hook"];
        assert_eq!(*hook, "pre-install,pre-upgrade,pre-rollback", "{values}");
        // By which docs/remove.md deletes them.
        assert_eq!(map["labels"]["app.kubernetes.io/part-of"], "netattach", "{values}");
        let mounted = &of_kind("DaemonSet")["spec"]["template"]["spec"]["volumes"][0]["configMap"]["name"];
        assert_eq!(*mounted, map["name"], "{values}");
        map["name"].as_str().unwrap().to_owned()
    };
    let usual = name("{}");
    let hash = usual.strip_prefix("netattach-").unwrap();
    assert!(hash.len() == 10 && hash.bytes().all(|it| it.is_ascii_hexdigit()), "{usual}");
    assert_eq!(name("image: {tag: 0.2.0}"), usual);
    assert_ne!(name("settings: {podWaitSeconds: 6}"), usual);
}

/// `helm uninstall` leaves the nodes with a file by which runtimes call an agent that is gone.
#[test]
fn helm_removes_no_agents_before_the_nodes_are_taken_care_of() {
    let Some(renderer) = renderer("helm_removes_no_agents_before_the_nodes_are_taken_care_of") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let guards = |values: &str| -> Vec<Value> {
        let objects = documents(&render(&renderer, &[&values_file(dir.path(), values)]));
        objects.into_iter().filter(is_guard).collect()
    };
    let made = guards("imagePullSecrets: [{name: registry}]");
    let [guard] = &made[..] else { panic!("{made:#?}") };
    assert_eq!((&guard["kind"], &guard["spec"]["backoffLimit"]), (&json!("Job"), &json!(0)));
    let pod = &guard["spec"]["template"]["spec"];
    assert_eq!(pod["imagePullSecrets"], json!([{"name": "registry"}]));
    // The Jobs for which docs/remove.md waits.
    assert_ne!(guard["metadata"]["labels"]["app.kubernetes.io/name"], "netattach-uninstall");
    let command = pod["containers"][0]["command"].as_array().unwrap().iter();
    let command: Vec<&str> = command.map(|word| word.as_str().unwrap()).collect();
    let [_, "uninstall", refuse] = command[..] else { panic!("{command:?}") };
    assert!(refuse.starts_with("--refuse=helm uninstall leaves"), "{refuse}");
    assert!(refuse.contains("docs/remove.md") && !refuse.contains('\n'), "{refuse}");
    for done in ["uninstall: {nodes: [worker-1]}", "uninstall: {acknowledged: true}"] {
        assert!(guards(done).is_empty(), "{done}");
    }
}

/// helm shows them after an installation; the renderer only parses them, so they are rendered as a manifest here.
#[test]
fn the_notes_name_the_next_step_and_the_page_on_removal() {
    let Some(renderer) = renderer("the_notes_name_the_next_step_and_the_page_on_removal") else { return };
    let chart = repository().join("deploy/helm");
    let mine = tempfile::tempdir().unwrap();
    std::fs::create_dir(mine.path().join("templates")).unwrap();
    for name in ["Chart.yaml", "values.yaml", "templates/_parts.tpl"] {
        std::fs::copy(chart.join(name), mine.path().join(name)).unwrap();
    }
    std::fs::copy(chart.join("templates/NOTES.txt"), mine.path().join("templates/notes.yaml")).unwrap();
    let said = |values: &[&str]| {
        let output = render_into(&renderer, mine.path(), "elsewhere", values);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let usual = said(&[]);
    for words in [
        "kubectl netattach status -A --agents-namespace elsewhere",
        "executedPlugins.enabled=true",
        "Do not remove netattach by helm uninstall alone",
        "docs/remove.md",
    ] {
        assert!(usual.contains(words), "{words}: {usual}");
    }
    let removing = said(&["deploy/helm/ci/uninstall.yaml"]);
    assert!(removing.contains("helm uninstall netattach --namespace elsewhere"), "{removing}");
}

/// What the operator of Prometheus reads is what `deploy/metrics` has.
#[test]
fn the_chart_has_the_monitor_and_the_alerts_of_deploy() {
    let Some(renderer) = renderer("the_chart_has_the_monitor_and_the_alerts_of_deploy") else { return };
    let of_deploy = |name: &str| -> Value {
        let text = std::fs::read_to_string(repository().join("deploy/metrics").join(name)).unwrap();
        serde_norway::from_str(&text).unwrap()
    };
    let dir = tempfile::tempdir().unwrap();
    let values =
        "{metrics: {enabled: true}, serviceMonitor: {enabled: true}, prometheusRule: {enabled: true}}";
    let made = objects(&render(&renderer, &[&values_file(dir.path(), values)]));
    let of_chart = |kind: &str, name: &str| &made[&(kind.to_owned(), name.to_owned())];
    let monitor = of_chart("ServiceMonitor", "netattach");
    assert_eq!(*monitor, of_deploy("service-monitor.yaml"));
    assert_eq!(of_chart("PrometheusRule", "netattach")["spec"], of_deploy("alerts.yaml"));
    // It finds the Service, and the port by its name.
    let service = of_chart("Service", "netattach-metrics");
    let selected = monitor["spec"]["selector"]["matchLabels"].as_object().unwrap();
    for (label, value) in selected {
        assert_eq!(service["metadata"]["labels"][label], *value);
    }
    assert_eq!(monitor["spec"]["endpoints"][0]["port"], service["spec"]["ports"][0]["name"]);

    let labelled = "{metrics: {enabled: true}, serviceMonitor: {enabled: true, labels: {release: a}}, prometheusRule: \
                    {enabled: true, labels: {release: a}}}";
    let made = objects(&render(&renderer, &[&values_file(dir.path(), labelled)]));
    for kind in ["ServiceMonitor", "PrometheusRule"] {
        assert_eq!(made[&(kind.to_owned(), "netattach".to_owned())]["metadata"]["labels"]["release"], "a");
    }
}

/// Values that an operator sets for the agents' pods, and for the Jobs as far as they apply to them.
#[test]
fn pods_are_as_the_values_say() {
    const VALUES: &str = "
        image: {digest: 'sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef', pullPolicy: Always}
        updateStrategy: {type: OnDelete}
        minReadySeconds: 0
        hostPaths:
          {cniBin: /var/lib/cni/bin, cniConf: /etc/kubernetes/cni, podResources: /k/pod-resources, devicePlugins: /k/plugins}
        extraEnv: [{name: HTTPS_PROXY, value: http://proxy}]
        initResources: {requests: {cpu: 5m}}
        podLabels: {team: net, app.kubernetes.io/name: mine}
        podAnnotations: {note: a}
        affinity: {nodeAffinity: {}}
        ";
    let Some(renderer) = renderer("pods_are_as_the_values_say") else { return };
    let dir = tempfile::tempdir().unwrap();
    let mine = values_file(dir.path(), VALUES);
    let image = "localhost/netattach@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
    let path = |pod: &Value, volume: &str| {
        let mut volumes = pod["volumes"].as_array().unwrap().iter();
        volumes.find(|it| it["name"] == volume).unwrap()["hostPath"]["path"].as_str().unwrap().to_owned()
    };

    let made = objects(&render(&renderer, &[&mine]));
    let set = &made[&("DaemonSet".to_owned(), "netattach".to_owned())]["spec"];
    assert_eq!((&set["updateStrategy"], &set["minReadySeconds"]), (&json!({"type": "OnDelete"}), &json!(0)));
    let (about, pod) = (&set["template"]["metadata"], &set["template"]["spec"]);
    // What selects the pods is not an operator's to change.
    let labels = json!({
        "team": "net", "app.kubernetes.io/name": "netattach", "app.kubernetes.io/component": "agent"
    });
    assert_eq!(about["labels"], labels);
    assert_eq!(
        about["annotations"],
        json!({"note": "a", "kubectl.kubernetes.io/default-container": "agent"})
    );
    assert_eq!(pod["affinity"], json!({"nodeAffinity": {}}));
    let containers = ["initContainers", "containers"].map(|kind| pod[kind].as_array().unwrap());
    for container in containers.into_iter().flatten() {
        assert_eq!((&container["image"], &container["imagePullPolicy"]), (&json!(image), &json!("Always")));
    }
    // As helm, the renderer merges mappings: the other sizes stay.
    for container in pod["initContainers"].as_array().unwrap() {
        let resources = json!({"requests": {"cpu": "5m", "memory": "16Mi"}, "limits": {"memory": "64Mi"}});
        assert_eq!(container["resources"], resources);
    }
    let env = pod["containers"][0]["env"].as_array().unwrap();
    assert_eq!(env.last(), Some(&json!({"name": "HTTPS_PROXY", "value": "http://proxy"})));
    for (volume, expected) in [
        ("cni-bin", "/var/lib/cni/bin"),
        ("cni-conf", "/etc/kubernetes/cni"),
        ("pod-resources", "/k/pod-resources"),
        ("device-plugins", "/k/plugins"),
    ] {
        assert_eq!(path(pod, volume), expected);
    }

    let made = objects(&render(&renderer, &["deploy/helm/ci/uninstall.yaml", &mine]));
    let jobs: Vec<&Value> = made.iter().filter(|((kind, _), _)| kind == "Job").map(|(_, job)| job).collect();
    assert_eq!(jobs.len(), 2);
    for job in jobs {
        let pod = &job["spec"]["template"]["spec"];
        let container = &pod["containers"][0];
        assert_eq!((&container["image"], &container["imagePullPolicy"]), (&json!(image), &json!("Always")));
        assert_eq!(path(pod, "cni-bin"), "/var/lib/cni/bin");
        assert_eq!(path(pod, "cni-conf"), "/etc/kubernetes/cni");
    }
}

/// A Job that looks elsewhere succeeds, and leaves the file by which the runtime calls an executable that is gone.
#[test]
fn the_job_that_removes_netattach_looks_where_the_settings_put_things() {
    const VALUES: &str = "
        settings:
          {cniConf: {dir: /etc/cni/mine}, stateDir: /var/lib/netattach/a, bpffs: /sys/fs/bpf/a, runDir: /run/netattach/a}
        ";
    let Some(renderer) = renderer("the_job_that_removes_netattach_looks_where_the_settings_put_things")
    else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let jobs = |values: &str| -> Vec<(String, Value)> {
        let mine = values_file(dir.path(), values);
        let made = objects(&render(&renderer, &["deploy/helm/ci/uninstall.yaml", &mine]));
        made.into_iter().filter(|((kind, _), _)| kind == "Job").map(|((_, name), job)| (name, job)).collect()
    };
    let (usual, own) = (jobs("{}"), jobs(VALUES));
    assert_eq!(own.len(), 2);
    for ((name, job), (usual, _)) in own.iter().zip(&usual) {
        let container = &job["spec"]["template"]["spec"]["containers"][0];
        let command: Vec<&str> =
            container["command"].as_array().unwrap().iter().map(|word| word.as_str().unwrap()).collect();
        let places = [
            "--cni-conf-dir=/etc/cni/mine",
            "--state-dir=/var/lib/netattach/a",
            "--bpffs=/sys/fs/bpf/a",
            "--socket=/run/netattach/a/netattach.sock",
        ];
        assert_eq!(command[2..], [&["--cni-bin-dir=/opt/cni/bin"][..], &places[..]].concat());
        assert!(netattach::cli::Arguments::try_parse_from(command.iter().copied()).is_ok(), "{command:?}");
        let mounts = container["volumeMounts"].as_array().unwrap();
        let mounts: Vec<&str> = mounts.iter().map(|mount| mount["mountPath"].as_str().unwrap()).collect();
        for place in places {
            let path = place.split_once('=').unwrap().1;
            assert!(mounts.iter().any(|mount| Path::new(path).starts_with(mount)), "{path}: {mounts:?}");
        }
        // A Job cannot be changed.
        assert_ne!(name, usual);
    }
}

/// Returns `values.schema.json` in the form for a validator of JSON schemas: it is a valid schema itself.
fn schema() -> (Schemas, SchemaIndex, Value) {
    const NAME: &str = "values.schema.json";
    let schema: Value = serde_json::from_str(&read(NAME)).unwrap();
    let (mut schemas, mut compiler) = (Schemas::new(), Compiler::new());
    compiler.add_resource(NAME, schema.clone()).unwrap();
    let index = compiler.compile(NAME, &mut schemas).unwrap();
    (schemas, index, schema)
}

/// A file of the chart.
fn read(path: &str) -> String {
    std::fs::read_to_string(repository().join("deploy/helm").join(path)).unwrap()
}

#[test]
fn the_page_on_installing_has_every_value() {
    let schema: Value = serde_json::from_str(&read("values.schema.json")).unwrap();
    let mut values = BTreeSet::new();
    for (name, of) in schema["properties"].as_object().unwrap() {
        match of["properties"].as_object() {
            // The page on the configuration has its keys.
            _ if name == "settings" => drop(values.insert(name.clone())),
            Some(inner) => values.extend(inner.keys().map(|key| format!("{name}.{key}"))),
            None => drop(values.insert(name.clone())),
        }
    }
    // A value of helm, which every chart has.
    assert!(values.remove("global"));
    values.retain(|key| !GONE.contains(&key.as_str()));
    let mut written = BTreeSet::new();
    for words in first_cells(INSTALL, "| value | default | |").unwrap() {
        // `uninstall.nodes`, `.dryRun`
        let above = words[0].split_once('.').map_or("", |(above, _)| above).to_owned();
        let whole =
            |word: &String| if word.starts_with('.') { format!("{above}{word}") } else { word.clone() };
        written.extend(words.iter().map(whole));
    }
    assert_eq!(written, values);
}

/// Returns the values of the chart overridden by those of a file, merged like helm: objects by their keys, all else
/// as a whole.
fn with_defaults(values: &str) -> Value {
    fn merge(below: &mut Value, above: Value) {
        match (below, above) {
            (Value::Object(below), Value::Object(above)) => {
                above
                    .into_iter()
                    .for_each(|(key, value)| merge(below.entry(key).or_insert(Value::Null), value));
            }
            (below, above) => *below = above,
        }
    }
    let mut all: Value = serde_norway::from_str(&read("values.yaml")).unwrap();
    merge(&mut all, serde_norway::from_str(values).unwrap());
    all
}

/// Returns the subject of an error: JSON pointers to values, or to keys that are not allowed.
fn named(error: &ValidationError<'_, '_>) -> Vec<String> {
    let place = error.instance_location.to_string();
    match &error.kind {
        ErrorKind::AdditionalProperties { got } => got.iter().map(|key| format!("{place}/{key}")).collect(),
        _ if error.causes.is_empty() => vec![place],
        _ => error.causes.iter().flat_map(named).collect(),
    }
}

#[test]
fn the_schema_takes_the_values_of_the_chart_and_of_each_file_of_ci() {
    let (schemas, index, _) = schema();
    let files = std::fs::read_dir(repository().join("deploy/helm/ci")).unwrap();
    let files: Vec<PathBuf> = files.map(|entry| entry.unwrap().path()).collect();
    assert!(!files.is_empty());
    let files = files.iter().map(|path| std::fs::read_to_string(path).unwrap());
    let older = GONE.map(|key| format!("{key}: {{enabled: false}}"));
    for values in files.chain(["{}".to_owned()]).chain(older) {
        let values = with_defaults(&values);
        if let Err(error) = schemas.validate(&values, index) {
            panic!("{values}: {error}");
        }
    }
}

/// Values of the wrong kind, empty ones, or unknown ones, and the key that the refusal names: at least one for each
/// key of the schema.
const WRONG: [(&str, &str); 49] = [
    ("privileged: true", "/privileged"),
    ("global: []", "/global"),
    ("image: localhost/netattach:0.1.0", "/image"),
    ("image: {repository: 1}", "/image/repository"),
    ("image: {repository: ''}", "/image/repository"),
    ("image: {tag: 0.2}", "/image/tag"),
    ("image: {digest: 'sha256:0'}", "/image/digest"),
    ("image: {pullPolicy: Sometimes}", "/image/pullPolicy"),
    ("imagePullSecrets: registry", "/imagePullSecrets"),
    ("imagePullSecrets: [registry]", "/imagePullSecrets/0"),
    ("defaultNetwork: {file: /a}", "/defaultNetwork"),
    ("defaultNetwork: ''", "/defaultNetwork"),
    ("metrics: true", "/metrics"),
    ("metrics: {enabled: 'yes'}", "/metrics/enabled"),
    ("metrics: {listen: '127.0.0.1:1'}", "/metrics/listen"),
    ("admissionPolicy: {enabled: 1}", "/admissionPolicy/enabled"),
    ("kubernetesBefore122: '1.20'", "/kubernetesBefore122"),
    ("kubernetesBefore130: 1.29", "/kubernetesBefore130"),
    ("executedPlugins: {enabled: [bridge]}", "/executedPlugins/enabled"),
    ("uninstall: {nodes: worker-1}", "/uninstall/nodes"),
    ("uninstall: {nodes: [worker-1, '']}", "/uninstall/nodes/1"),
    ("uninstall: {dryRun: 'true'}", "/uninstall/dryRun"),
    ("uninstall: {force: 1}", "/uninstall/force"),
    ("uninstall: {acknowledged: 'yes'}", "/uninstall/acknowledged"),
    ("log: {format: xml}", "/log/format"),
    ("log: {filter: [debug]}", "/log/filter"),
    ("settings: 'mtu: 1500'", "/settings"),
    ("settings: {stateDirectory: /a}", "/settings/stateDirectory"),
    ("settings: {cniConf: {nmae: a.conflist}}", "/settings/cniConf/nmae"),
    ("updateStrategy: OnDelete", "/updateStrategy"),
    ("minReadySeconds: '10'", "/minReadySeconds"),
    ("minReadySeconds: -1", "/minReadySeconds"),
    ("hostPaths: {cniBin: opt/cni/bin}", "/hostPaths/cniBin"),
    ("hostPaths: {state: /var/lib/netattach}", "/hostPaths/state"),
    ("extraEnv: [A=1]", "/extraEnv/0"),
    ("extraEnv: [{value: '1'}]", "/extraEnv/0"),
    ("initResources: [cpu]", "/initResources"),
    ("podLabels: {team: 1}", "/podLabels/team"),
    ("podAnnotations: {scrape: true}", "/podAnnotations/scrape"),
    ("affinity: [nodeAffinity]", "/affinity"),
    ("serviceMonitor: true", "/serviceMonitor"),
    ("serviceMonitor: {enabled: 'yes'}", "/serviceMonitor/enabled"),
    ("prometheusRule: {enabled: 1}", "/prometheusRule/enabled"),
    ("prometheusRule: {labels: {release: 1}}", "/prometheusRule/labels/release"),
    ("prometheusRule: {rules: []}", "/prometheusRule/rules"),
    ("resources: [cpu]", "/resources"),
    ("nodeSelector: {storage: true}", "/nodeSelector/storage"),
    ("tolerations: {operator: Exists}", "/tolerations"),
    ("tolerations: [Exists]", "/tolerations/0"),
];

#[test]
fn the_schema_refuses_wrong_values_by_their_key() {
    let (schemas, index, schema) = schema();
    for (values, key) in WRONG {
        let all = with_defaults(values);
        let error = schemas.validate(&all, index).unwrap_err();
        assert_eq!(named(&error), [key], "{values}: {error}");
    }
    let top = |pointer: &str| pointer.split('/').nth(1).unwrap().to_owned();
    let mut tried: BTreeSet<String> = WRONG.iter().map(|(_, key)| top(key)).collect();
    tried.extend(GONE.map(str::to_owned));
    let properties = schema["properties"].as_object().unwrap();
    let untried: Vec<&String> = properties.keys().filter(|key| !tried.contains(*key)).collect();
    assert_eq!(untried, [""; 0]);
}
