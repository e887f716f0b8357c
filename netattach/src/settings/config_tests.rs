//! Settings from file and command line, and the page that documents them.

use std::path::{Path, PathBuf};

use clap::Parser;

use super::*;
use crate::error_chain::Chain;

#[test]
fn the_command_line_wins_over_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("netattachd.yaml");
    std::fs::write(
        &file,
        "source: /a\nrunDir: /b\ninvalidAnnotation: ignore\ndelegation: {exec: [bridge]}\n",
    )
    .unwrap();
    let arguments =
        Arguments::parse_from(["netattachd", "--config", file.to_str().unwrap(), "--run-dir", "/c"]);
    let expected = Settings {
        source: "/a".into(),
        run_dir: "/c".into(),
        invalid_annotation: InvalidAnnotation::Ignore,
        delegation: Delegation { exec: vec!["bridge".into()], ..Delegation::default() },
        ..Settings::default()
    };
    assert_eq!(Settings::read(arguments).unwrap(), expected);
}

#[test]
fn mistakes_are_named() {
    let read = |words: &[&str]| {
        let error = Settings::read(Arguments::parse_from(["netattachd"].iter().chain(words))).unwrap_err();
        Chain(&error).to_string()
    };
    let kinds = "Pod, NetworkAttachmentDefinition, Namespace, MultiNetworkPolicy, NetworkPolicy";
    let expected =
        format!("no source: give --source DIR, a directory of manifests: {kinds}; or --kubernetes ");
    assert!(read(&[]).starts_with(&expected), "{}", read(&[]));
    assert_eq!(
        read(&["--source", "/a", "--default-network", "x/"]),
        "defaultNetwork: \"x/\" is neither NAMESPACE/NAME of a definition, nor the name of a network, nor an absolute path, nor builtin or chained"
    );
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("netattachd.yaml");
    let table = [
        ("parallelAdds: 0", "parallelAdds must be between 1 and 128, not 0"),
        (
            "clusterCIDRs: [10.0.0.0/8, '::/0']",
            "clusterCIDRs[1]: ::/0 covers all addresses, so a default route on another interface would lead nowhere; name the ranges of the cluster, such as 10.96.0.0/12",
        ),
        (
            "traces: {endpoint: 'http://127.0.0.1:4318/v1/traces?tenant=a'}",
            "traces.endpoint: \"http://127.0.0.1:4318/v1/traces?tenant=a\" is not the URL of a collector, such as http://127.0.0.1:4318/v1/traces: without TLS and credentials, so on this node, and without a query (?)",
        ),
        ("maxAttachments: 100000", "maxAttachments must be between 2 and 65534, not 100000"),
        ("globalNamespaces: [default, A]", "globalNamespaces[1]: \"A\" is not the name of a namespace"),
        ("cniConf: {dir: net.d}", "cniConf.dir: net.d is not an absolute path"),
        ("cniConf: {name: x.conf}", "cniConf.name: \"x.conf\" is not a file name that ends in .conflist"),
        (
            "cniConf: {name: ../x.conflist}",
            "cniConf.name: \"../x.conflist\" is not a file name that ends in .conflist",
        ),
        (
            "delegation: {exec: [bridge, ovs]}",
            "delegation.exec[1]: \"ovs\" is not built in, so it is executed anyway; the built-in types are bridge, dummy, host-device, ipvlan, loopback, macvlan, macvtap, netkit, ptp, sriov, tap, veth, vlan, tuning, sbr, vrf, portmap, bandwidth, firewall, host-local, static, dhcp",
        ),
        (
            "delegation: {root: host}",
            "delegation.root: host is not where the node's root directory is mounted in the agent's container, such as /host",
        ),
        (
            "defaultNetwork: builtin",
            "defaultNetwork: builtin takes the addresses of pods from the node's podCIDRs, which a directory of manifests \
             does not have: set builtin.podCIDRs, such as [10.244.1.0/24], different on each node",
        ),
        (
            "defaultNetwork: chained\ncniConf: {dir: /etc/cni/net.d}",
            "defaultNetwork chained: the runtime's list is another program's, with netattach behind its plugins, so cniConf.dir has \
             to be empty, not /etc/cni/net.d; the agent's own file would be taken in its place",
        ),
        (
            "builtin: {podCIDRs: [10.1.0.0/24, 10.2.0.0/24]}",
            "builtin.podCIDRs: 10.2.0.0/24 is the second of its family: at most one of IPv4 and one of IPv6",
        ),
        (
            "podSources: [{namespaces: [a], networks: [lan], sourceCheck: mac}]",
            "podSources[0].networks: a network is NAMESPACE/NAME, or * for all",
        ),
        ("repair: evict", "repair: evict needs kubernetes.enabled"),
        (
            "kubernetes: {enabled: true}",
            "source and kubernetes.enabled: objects come from a directory or from the cluster, not from both: leave one of them out",
        ),
        (
            "kubernetes: {kubeconfig: /k}",
            "kubernetes.kubeconfig is set and kubernetes.enabled is not: set it too, or leave kubeconfig out",
        ),
        (
            "kubernetes: {startupTaint: 'netattach.dev/agent-not-ready:NoSchedule'}",
            "kubernetes.startupTaint: \"netattach.dev/agent-not-ready:NoSchedule\" is not the key of a taint; give the key alone, without value and effect, such as netattach.dev/agent-not-ready",
        ),
        ("repairAfterSeconds: 0", "repairAfterSeconds must be between 1 and 86400, not 0"),
        ("kubernetes: {watchSeconds: 0}", "kubernetes.watchSeconds must be between 1 and 600, not 0"),
        ("defaultNetworkNamespace: ''", "defaultNetworkNamespace: \"\" is not the name of a namespace"),
    ];
    for (text, message) in table {
        std::fs::write(&file, format!("source: /a\n{text}\n")).unwrap();
        assert_eq!(read(&["--config", file.to_str().unwrap()]), message);
    }
    std::fs::write(&file, "sauce: /a").unwrap();
    assert_eq!(
        read(&["--config", file.to_str().unwrap()]),
        format!("configuration {}: key sauce is not known; the nearest key is source", file.display())
    );
}

#[test]
fn network_policies_are_enforced_where_nobody_else_does_it_unless_the_setting_says_otherwise() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("netattachd.yaml");
    let enforced = |text: &str| {
        std::fs::write(&file, format!("source: /a\nbuiltin: {{podCIDRs: [10.1.0.0/24]}}\n{text}")).unwrap();
        let arguments = Arguments::parse_from(["netattachd", "--config", file.to_str().unwrap()]);
        Settings::read(arguments).unwrap().network_policy()
    };
    let table = [
        ("", false),
        ("networkPolicy: true", true),
        ("defaultNetwork: builtin", true),
        ("defaultNetwork: builtin\nnetworkPolicy: false", false),
        ("defaultNetwork: builtin\nnetworkPolicy: true", true),
    ];
    for (text, expected) in table {
        assert_eq!(enforced(text), expected, "{text}");
    }
}

/// A row of the table in `docs/configuration.md`: key, option, default.
type Row = (String, String, String);

fn rows_of_the_page() -> Vec<Row> {
    let page = include_str!("../../../docs/configuration.md");
    let table = page.split("\n## ").find(|section| section.starts_with("The agent")).unwrap();
    let rows = table.lines().filter(|line| line.starts_with("| `"));
    rows.map(|row| {
        let cells: Vec<&str> = row.trim_matches('|').split(" | ").map(str::trim).collect();
        let [key, option, default, meaning] = cells[..] else { panic!("four cells: {row}") };
        assert!(!meaning.is_empty(), "{key} has a meaning");
        let plain = |cell: &str| cell.replace('`', "");
        (plain(key), plain(option), plain(default))
    })
    .collect()
}

fn rows_of_the_code() -> Vec<Row> {
    let defaults = file::defaults();
    let options: Vec<String> = <Arguments as clap::CommandFactory>::command()
        .get_arguments()
        .filter_map(|argument| argument.get_long().map(|long| format!("--{long}")))
        .collect();
    let row = |(key, default): (String, &serde_json::Value)| {
        let option = options.iter().find(|option| is_option_of(option, &key)).cloned().unwrap_or_default();
        (key, option, as_yaml(default))
    };
    file::leaves(&defaults).into_iter().map(row).collect()
}

/// Whether a command line option sets this key: `--cni-bin-dir` sets `cniBinDirs`, `--node-name` sets
/// `kubernetes.nodeName`, `--kubernetes` sets `kubernetes.enabled`, `--plugin-root` sets `delegation.root`, `--stand-by` sets
/// `standBySeconds`.
fn is_option_of(option: &str, key: &str) -> bool {
    let squeezed = option.replace('-', "");
    let key = key.to_ascii_lowercase();
    let key = key.strip_suffix(".enabled").unwrap_or(&key);
    let key = key.strip_prefix("kubernetes.").unwrap_or(key);
    let key = match key {
        "delegation.root" => "pluginroot",
        "standbyseconds" => "standby",
        key => key,
    };
    squeezed == key || format!("{squeezed}s") == key
}

fn as_yaml(default: &serde_json::Value) -> String {
    match default {
        serde_json::Value::Null => "unset".to_owned(),
        serde_json::Value::String(text) if text.is_empty() => "none".to_owned(),
        serde_json::Value::String(text) => text.clone(),
        serde_json::Value::Array(items) => {
            format!("[{}]", items.iter().map(as_yaml).collect::<Vec<_>>().join(", "))
        }
        other => other.to_string(),
    }
}

#[test]
fn the_page_has_every_setting_with_its_option_and_default_and_no_other() {
    assert_eq!(rows_of_the_page(), rows_of_the_code(), "docs/configuration.md, left, and the code, right");
}

/// The README and the pages of `docs`, by name. In docs/conformance.md, definitions have keys with the names of settings.
fn pages() -> Vec<(String, String)> {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let pages = std::fs::read_dir(top.join("docs")).unwrap().map(|entry| entry.unwrap().path());
    let is_page = |page: &PathBuf| page.extension().is_some_and(|end| end == "md");
    let named = pages.chain([top.join("README.md")]).filter(is_page).map(|page| {
        let text = std::fs::read_to_string(&page).unwrap();
        (page.file_name().unwrap().to_str().unwrap().to_owned(), text)
    });
    named.filter(|(name, _)| name != "conformance.md").collect()
}

/// The words in backticks, each on one line. Examples are left out.
fn in_backticks(page: &str) -> Vec<String> {
    let mut is_example = false;
    let prose = page.lines().filter(|line| {
        let fence = line.trim_start().starts_with("```");
        is_example ^= fence;
        !fence && !is_example
    });
    let prose = prose.collect::<Vec<_>>().join("\n");
    let words = prose.split('`').skip(1).step_by(2);
    words.map(|words| words.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
}

/// `cniConf.repair: report` as a file has it: `{cniConf: {repair: report}}`.
fn as_file(path: &str, value: &str) -> String {
    path.rsplit('.').fold(value.to_owned(), |inner, key| format!("{{{key}: {inner}}}"))
}

/// An agent refuses to start with a value that a page gives to a setting and the setting does not have.
#[test]
fn every_setting_takes_the_values_that_the_pages_give_it() {
    assert!(file::parse(&as_file("cniConf.repair", "report")).is_ok());
    assert!(file::parse(&as_file("cniConf.repair", "evict")).is_err());
    let known = file::defaults();
    let keys: Vec<String> = file::leaves(&known).into_iter().map(|(key, _)| key).collect();
    let mut given = 0;
    let mut refused = Vec::new();
    for (page, text) in pages() {
        for words in in_backticks(&text) {
            let pair = words.split_once(": ").filter(|(key, _)| keys.iter().any(|it| it == key));
            let Some((key, value)) = pair else { continue };
            given += 1;
            if let Err(error) = file::parse(&as_file(key, value)) {
                refused.push(format!("{page}: {words}: {}", Chain(&error)));
            }
        }
    }
    assert!(given > 50, "{given}");
    assert_eq!(refused, [""; 0]);
}

/// The paths of the keys of a schema. A key that it does not name is refused.
fn keys_of_the_schema(schema: &serde_json::Value, path: &str, keys: &mut Vec<String>) {
    let Some(properties) = schema["properties"].as_object() else {
        keys.push(path.to_owned());
        return;
    };
    assert_eq!(schema["additionalProperties"], false, "{path}");
    for (key, of) in properties {
        let below = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
        keys_of_the_schema(of, &below, keys);
    }
}

/// helm refuses a misspelt key before any agent reads it.
#[test]
fn the_chart_takes_every_setting_and_no_other() {
    let schema = include_str!("../../../deploy/helm/values.schema.json");
    let schema: serde_json::Value = serde_json::from_str(schema).unwrap();
    let mut of_chart = Vec::new();
    keys_of_the_schema(&schema["properties"]["settings"], "", &mut of_chart);
    let mut of_code: Vec<String> = rows_of_the_code().into_iter().map(|(key, ..)| key).collect();
    of_chart.sort();
    of_code.sort();
    assert_eq!(of_chart, of_code, "settings of values.schema.json, left, and the code, right");
}

/// Rows: CFG-19.
#[test]
fn the_usual_directories_are_the_defaults() {
    let defaults = Settings::default();
    assert_eq!(defaults.cni_bin_dirs, [PathBuf::from("/opt/cni/bin")]);
    assert_eq!(defaults.delegation.cache_dir, PathBuf::from("/var/lib/cni"));
    // Not /etc/cni/net.d: runtimes take any configuration there for a default network.
    assert_eq!(defaults.cni_conf_dir, PathBuf::from("/etc/cni/netattach.d"));
}

/// An administrator may set the agent's own root directory explicitly, which differs from leaving the
/// setting out.
#[test]
fn plugins_are_started_in_another_root_directory_only_if_one_is_named() {
    let of = |root: &str| {
        let delegation = Delegation { root: root.into(), ..Delegation::default() };
        (delegation.names_root(), delegation.plugin_root().map(Path::to_owned))
    };
    assert_eq!(of(""), (false, None));
    assert_eq!(of("/"), (true, None));
    assert_eq!(of("/host"), (true, Some("/host".into())));
}
