//! Each limit at its value and one above, through the functions that refuse.

use std::os::unix::fs::PermissionsExt;

use serde_json::{Value, json};

use super::*;
use crate::bounded::padded;
use crate::cni::{CniArgs, CniResult, Command, Map, NetworkList, Request, Version, cache};
use crate::delegate::DelegateError;
use crate::ipam::host_local::Config;
use crate::ipam::static_addresses;
use crate::npwg::{parse_networks, parse_selection};
use crate::plan::fixtures;
use crate::plan::resolve::{Intent, Network, Options, resolve};

/// The answers of a limit to its value, and to one more.
fn both(budget: &Budget, of: impl Fn(usize) -> Result<(), String>) {
    assert_eq!(of(budget.most), Ok(()), "{}", budget.what);
    let more = of(budget.most + 1).unwrap_err();
    let message = budget.check(budget.most + 1).unwrap_err().to_string();
    assert!(more.contains(&message), "{}: {more}", budget.what);
}

fn outcome<T, E: std::error::Error + 'static>(result: Result<T, E>) -> Result<(), String> {
    result.map(drop).map_err(|error| crate::error_chain::Chain(&error).to_string())
}

fn many(count: usize, item: impl Fn(usize) -> Value) -> Value {
    (0..count).map(item).collect()
}

#[test]
fn an_annotation_is_refused_beyond_each_of_its_bounds() {
    let networks = |text: String| outcome(parse_networks(&text, "shop"));
    both(&ANNOTATION, |bytes| networks(padded("[]", bytes)));
    both(&SELECTIONS, |count| networks(many(count, |_| json!({"name": "a"})).to_string()));
    both(&SELECTIONS, |count| networks(vec!["a"; count].join(",")));
    let element = |mut element: Value| {
        element["name"] = "a".into();
        outcome(parse_selection(&element, "shop"))
    };
    both(&NAME, |bytes| outcome(parse_selection(&json!({"name": long_name(bytes)}), "shop")));
    both(&NAME, |bytes| networks("a".repeat(bytes)));
    both(&IPS, |count| element(json!({"ips": many(count, |number| format!("10.0.0.{number}").into())})));
    both(&GATEWAYS, |count| {
        element(json!({"default-route": many(count, |number| format!("10.0.0.{}", number + 1).into())}))
    });
    both(&PORT_MAPPINGS, |count| {
        element(
            json!({"portMappings": many(count, |number| json!({"hostPort": number + 1, "containerPort": 80}))}),
        )
    });
    both(&ARGUMENTS, |bytes| element(json!({"cni-args": {"a": "x".repeat(bytes - r#"{"a":""}"#.len())}})));
}

/// A name of labels that are short enough.
fn long_name(bytes: usize) -> String {
    let mut name: String = "a".repeat(bytes);
    for dot in (50..bytes - 1).step_by(50) {
        name.replace_range(dot..=dot, ".");
    }
    name
}

#[test]
fn a_configuration_is_refused_beyond_each_of_its_bounds() {
    let list = |text: String| outcome(NetworkList::parse(text.as_bytes()));
    both(&CONFIG, |bytes| list(padded(r#"{"name": "a", "type": "bridge"}"#, bytes)));
    // The object, three members, and the values in the last of them.
    both(&CONFIG_VALUES, |count| {
        list(json!({"name": "a", "type": "bridge", "b": vec![0; count - 4]}).to_string())
    });
    both(&PLUGINS, |count| {
        list(json!({"name": "a", "plugins": many(count, |_| json!({"type": "x"}))}).to_string())
    });
    let pool = |name: &str, ipam: Value, args: Value| {
        let mut config = json!({
            "cniVersion": "1.0.0", "name": name, "args": {"cni": args},
            "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.0.0.0/24"}]]}
        });
        config["ipam"].as_object_mut().unwrap().extend(ipam.as_object().unwrap().clone());
        outcome(Config::parse(config.as_object().unwrap(), None))
    };
    let ipam = |ipam: Value| pool("a", ipam, json!({}));
    let subnet = |number: usize| json!({"subnet": format!("10.{}.{}.0/24", number / 256, number % 256)});
    both(&RANGES, |count| ipam(json!({"ranges": many(count, |number| json!([subnet(number)]))})));
    both(&RANGES, |count| ipam(json!({"ranges": [many(count, subnet)]})));
    both(&ADDRESSES, |count| {
        let addresses =
            many(count, |number| json!({"address": format!("10.0.{}.{}/8", number / 256, number % 256)}));
        let config = json!({"cniVersion": "1.0.0", "ipam": {"addresses": addresses}});
        outcome(static_addresses::Config::parse(config.as_object().unwrap(), &CniArgs::default()))
    });
    both(&EXCLUDED, |count| ipam(json!({"exclude": many(count, |_| "10.0.0.7".into())})));
    both(&ROUTES, |count| ipam(json!({"routes": many(count, |_| json!({"dst": "10.9.0.0/24"}))})));
    let address = |number: usize| format!("10.0.0.{}", number + 1).into();
    both(&IPS, |count| pool("a", json!({}), json!({"ips": many(count, address)})));
    both(&FILE_NAME, |bytes| pool(&"a".repeat(bytes), json!({}), json!({})));
    both(&FILE_NAME, |bytes| ipam(json!({"dataDir": format!("/{}", "a".repeat(bytes))})));
    both(&PATH, |bytes| ipam(json!({"dataDir": format!("/{}", "a/".repeat(bytes).split_at(bytes - 1).0)})));
}

/// A network with this number of values and bytes of text.
fn network(values: usize, bytes: usize) -> Network {
    let written =
        json!({"name": "a", "type": "macvlan", "cniVersion": "1.0.0", "b": vec![0; values - 5], "c": ""});
    let mut list = NetworkList::from_map(written.as_object().unwrap().clone()).unwrap();
    let (found, text) = list.extent();
    assert_eq!(found, values);
    let mut written = written;
    written["c"] = "x".repeat(bytes - text).into();
    list = NetworkList::from_map(written.as_object().unwrap().clone()).unwrap();
    Network {
        name: "shop/a".into(),
        list: list.into(),
        resource: None,
        enforce: None,
        ethertypes: Vec::new(),
        device: None,
    }
}

/// Plans a pod whose default network and selections are these.
fn planned(networks: &[Network]) -> Result<(), String> {
    let request = Request {
        command: Command::Add,
        container_id: "c1".into(),
        netns: Some("/run/netns/c1".into()),
        ifname: "eth0".into(),
        args: CniArgs::default(),
        path: Vec::new(),
        netns_override: false,
        config: Map::new(),
        version: Version::LATEST,
        name: "net".into(),
        valid_attachments: None,
        tolerated: None,
    };
    let sandbox = fixtures::sandbox("c1");
    let (selection, _) = parse_selection(&json!({"name": "a"}), "shop").unwrap();
    let (default, others) = networks.split_first().unwrap();
    let intent = Intent {
        default: default.clone(),
        default_selection: None,
        selections: others.iter().map(|network| (selection.clone(), network.clone())).collect(),
        warnings: Vec::new(),
        cluster: None,
    };
    outcome(resolve(sandbox, &request, &intent, (&Options::default(), &crate::link::Facts::default()), None))
}

#[test]
fn what_a_pods_networks_say_is_bounded_in_sum() {
    let small = network(10, 100);
    let (values, bytes) = small.list.extent();
    both(&POD_VALUES, |most| planned(&[small.clone(), small.clone(), network(most - 2 * values, 100)]));
    both(&POD_TEXT, |most| planned(&[small.clone(), network(10, most - 2 * bytes), small.clone()]));
}

#[test]
fn what_a_runtime_and_plugins_say_is_refused_beyond_each_of_its_bounds() {
    both(&CNI_ARGS, |bytes| outcome(CniArgs::parse(&format!("A={}", "x".repeat(bytes - 2)))));
    let stdin = |text: String| {
        let variables = [
            ("CNI_COMMAND", "ADD"),
            ("CNI_CONTAINERID", "c1"),
            ("CNI_NETNS", "/run/netns/c1"),
            ("CNI_IFNAME", "eth0"),
            ("CNI_PATH", "/opt/cni/bin"),
        ];
        let variables = variables.map(|(name, value)| (name.to_owned(), value.to_owned()));
        Request::parse(&variables.into(), text.as_bytes())
    };
    both(&STDIN_VALUES, |count| {
        let text = json!({"cniVersion": "0.4.0", "name": "a", "b": vec![0; count - 4]}).to_string();
        let version = if count > STDIN_VALUES.most { Version::LATEST } else { Version::V0_4_0 };
        assert_eq!(crate::cni::request::error_version(text.as_bytes()), version);
        stdin(text).map(drop).map_err(|error| {
            assert_eq!(error.code, code::DECODING_FAILURE);
            error.msg
        })
    });
    let directory = tempfile::tempdir().unwrap();
    let plugin = crate::delegate::Delegate {
        search: vec![directory.path().to_owned()],
        timeout: std::time::Duration::from_secs(60),
        caller: crate::delegate::Caller::OneCall,
        root: None,
        watcher: None,
    };
    both(&RESULT_VALUES, |count| {
        let text = json!({"cniVersion": "1.0.0", "b": vec![0; count - 3]}).to_string();
        let name = format!("prints-{count}");
        let program = directory.path().join(&name);
        std::fs::write(&program, format!("#!/bin/sh\ncat <<'END'\n{text}\nEND\n")).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let call = crate::delegate::Call::without_container(Command::Add, &name, b"{}");
        let added = plugin.add(&call, Version::LATEST);
        assert_eq!(
            added.as_ref().map_or_else(DelegateError::code, |_| 0),
            if count > RESULT_VALUES.most { 6 } else { 0 }
        );
        outcome(added)
    });
    let result = |key: &str, items: Value| {
        outcome(CniResult::parse(&json!({"cniVersion": "1.0.0", key: items}), Version::LATEST))
    };
    both(&RESULT_INTERFACES, |count| result("interfaces", many(count, |_| json!({"name": "a"}))));
    both(&RESULT_IPS, |count| result("ips", many(count, |_| json!({"address": "10.0.0.7/24"}))));
    both(&RESULT_ROUTES, |count| result("routes", many(count, |_| json!({"dst": "10.0.0.0/24"}))));
}

#[test]
fn an_entry_of_the_cache_is_refused_beyond_its_bound() {
    let result = |count: usize| json!({"cniVersion": "1.0.0", "b": vec![0; count]});
    both(&CACHED_VALUES, |count| outcome(cache::result(result(count - 3).to_string().as_bytes())));
    let entry = |count: usize| json!({"kind": "cniCacheV1", "containerId": "c1", "ifName": "eth0", "networkName": "n", "result": result(count)});
    both(&CACHED_VALUES, |count| outcome(cache::Entry::decode(entry(count - 8).to_string().as_bytes())));
}

#[test]
fn deep_json_is_refused_wherever_it_stands() {
    let deep = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
    let annotation = |depth| format!(r#"[{{"name": "a", "cni-args": {{"a": {}}}}}]"#, deep(depth));
    assert!(parse_networks(&annotation(100), "shop").is_ok());
    assert!(parse_networks(&annotation(200), "shop").is_err());
    let config = |depth| format!(r#"{{"name": "a", "type": "b", "c": {}}}"#, deep(depth));
    assert!(NetworkList::parse(config(100).as_bytes()).is_ok());
    assert!(NetworkList::parse(config(200).as_bytes()).is_err());
}

/// The documentation has exactly this table.
#[test]
fn the_documents_have_the_table() {
    let page = include_str!("../../docs/budgets.md");
    let amount = |budget: &Budget| match (budget.unit, budget.most) {
        ("bytes", most) if most % (1 << 20) == 0 => format!("{} MiB", most >> 20),
        ("bytes", most) if most % (1 << 10) == 0 => format!("{} KiB", most >> 10),
        (unit, most) => format!("{most} {unit}"),
    };
    let row = |budget: &&Budget| {
        let code = budget.code.map_or("".to_owned(), |code| code.to_string());
        format!(
            "| {} | {} | {} | {} | {} |\n",
            budget.what,
            amount(budget),
            budget.origin,
            budget.refused,
            code
        )
    };
    let table: String = TABLE.iter().map(row).collect();
    assert!(page.contains(&table), "docs/budgets.md lacks:\n{table}");
}
