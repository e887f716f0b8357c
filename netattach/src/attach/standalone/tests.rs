//! Requests that are answered without touching the machine.

use std::os::unix::ffi::OsStringExt;

use netattach_shim::shim::MAX_STDIN;
use serde_json::{Value, json};

use super::*;
use crate::ipam::host_local::withheld::Withheld;

/// A stdin that must not be read.
struct Untouchable;

impl Read for Untouchable {
    fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
        panic!("stdin was read")
    }
}

/// A stdin whose reads fail.
struct Broken;

impl Read for Broken {
    fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
        Err(std::io::Error::other("pipe burst"))
    }
}

fn run_with(name: &str, variables: &[(&str, &str)], stdin: impl Read) -> (u8, Value, String) {
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    let variables = variables.iter().map(|(name, value)| (name.into(), value.into()));
    let exit = run(name, variables, stdin, &mut stdout, &mut stderr);
    let printed = if stdout.is_empty() { Value::Null } else { serde_json::from_slice(&stdout).unwrap() };
    (exit, printed, String::from_utf8(stderr).unwrap())
}

fn error(code: u32, msg: &str) -> Value {
    json!({"cniVersion": "1.1.0", "code": code, "msg": msg})
}

#[test]
fn there_is_a_plugin_for_every_driver_and_one_for_addresses() {
    assert_eq!(
        names().collect::<Vec<_>>(),
        [
            "bridge",
            "dummy",
            "host-device",
            "ipvlan",
            "loopback",
            "macvlan",
            "macvtap",
            "netkit",
            "ptp",
            "sriov",
            "tap",
            "veth",
            "vlan",
            "tuning",
            "sbr",
            "vrf",
            "portmap",
            "bandwidth",
            "firewall",
            "host-local",
            "static"
        ]
    );
    assert!(names().all(is_plugin) && !is_plugin("netattach-cni") && !is_plugin("dhcp"));
}

/// An administrator may have linked the name of a plugin that needs an agent by hand.
#[test]
fn every_built_in_type_is_answered_by_its_name() {
    assert!(is_answered("dhcp") && !is_answered("netattach-cni") && !is_answered("netattach"));
    let status = |vlan: u16| {
        let config = json!({
            "cniVersion": "1.1.0", "name": "net", "type": "sriov", "deviceID": "0000:03:02.0", "vlan": vlan
        });
        let variables = [("CNI_COMMAND", "STATUS"), ("CNI_PATH", "/opt/cni/bin")];
        run_with("sriov", &variables, config.to_string().as_bytes())
    };
    assert_eq!(status(5), (0, Value::Null, String::new()));
    let told = "key vlan: 4095 is not between 0 and 4094";
    assert_eq!(status(4095), (1, error(7, told), String::new()));
}

/// Rows: ENV-04, ENV-09.
#[test]
fn questions_about_the_plugin_are_answered_without_stdin() {
    for name in names() {
        let (exit, printed, message) = run_with(name, &[("CNI_COMMAND", "VERSION")], Untouchable);
        let versions = json!({"cniVersion": "1.1.0", "supportedVersions": Version::ALL});
        assert_eq!((exit, printed, message.as_str()), (0, versions, ""));
        for variables in [&[][..], &[("CNI_COMMAND", "")]] {
            let (exit, printed, message) = run_with(name, variables, Untouchable);
            assert_eq!((exit, printed), (0, Value::Null));
            assert!(message.starts_with(&format!("{name} of netattach ")), "{message}");
        }
    }
}

/// Rows: ENV-12, ENV-13, ENV-23.
#[test]
fn what_cannot_be_read_is_told_in_json() {
    let add = [
        ("CNI_COMMAND", "ADD"),
        ("CNI_CONTAINERID", "c1"),
        ("CNI_IFNAME", "eth0"),
        ("CNI_NETNS", "/run/netns/c1"),
        ("CNI_PATH", "/opt/cni/bin"),
    ];
    let told = |stdin: &[u8]| run_with("bridge", &add, stdin);
    assert_eq!(told(b"[]"), (1, error(6, "network configuration is an array, not an object"), String::new()));
    let padded = |bytes: usize| crate::bounded::padded("[]", bytes).into_bytes();
    assert_eq!(told(&padded(MAX_STDIN as usize)), told(b"[]"));
    let long = padded(MAX_STDIN as usize + 1);
    assert_eq!(told(&long), (1, error(6, "stdin is longer than 4194304 bytes"), String::new()));
    let (exit, printed, _) = run_with("bridge", &add, Broken);
    assert_eq!((exit, printed), (1, error(5, "read stdin: pipe burst")));
    let mut old = json!({"cniVersion": "0.4.0", "name": "net", "type": "bridge", "mtu": "x"});
    old["name"] = json!("");
    let (exit, printed, _) = told(old.to_string().as_bytes());
    assert_eq!((exit, &printed["cniVersion"], &printed["code"]), (1, &json!("0.4.0"), &json!(7)));

    let mut stdout = Vec::new();
    let variables = [("CNI_ARGS".into(), OsString::from_vec(vec![0xff]))];
    assert_eq!(run("bridge", variables, Untouchable, &mut stdout, &mut Vec::new()), 1);
    let printed: Value = serde_json::from_slice(&stdout).unwrap();
    assert_eq!(printed, error(4, "environment variable CNI_ARGS is not UTF-8"));
}

/// Rows: ENV-06.
#[test]
fn missing_variables_are_named_together() {
    let (exit, printed, _) =
        run_with("macvlan", &[("CNI_COMMAND", "ADD")], &b"{\"cniVersion\":\"1.1.0\"}"[..]);
    let missing = "required env variables [CNI_CONTAINERID,CNI_NETNS,CNI_IFNAME,CNI_PATH] missing";
    assert_eq!((exit, printed), (1, error(4, missing)));
}

/// Otherwise a container that has nothing left does not end while another's file cannot be read.
#[test]
fn a_del_of_host_local_releases_by_the_previous_result() {
    let directory = tempfile::tempdir().unwrap();
    let call = |verb: &str, container: &str, previous: &Value| {
        let ipam = json!({
            "type": "host-local", "dataDir": directory.path(), "ranges": [[{"subnet": "10.0.0.0/24"}]]
        });
        let config = json!({
            "cniVersion": "1.1.0", "name": "net", "type": "bridge", "ipam": ipam, "prevResult": previous
        });
        let variables = [
            ("CNI_COMMAND", verb),
            ("CNI_CONTAINERID", container),
            ("CNI_IFNAME", "eth0"),
            ("CNI_NETNS", "/nonexistent"),
            ("CNI_PATH", "/opt/cni/bin"),
        ];
        let text = config.to_string();
        let (exit, printed, _) = run_with("host-local", &variables, text.as_bytes());
        (exit, printed)
    };
    let [of_a, of_b] = ["a", "b"].map(|container| {
        let (exit, result) = call("ADD", container, &Value::Null);
        assert_eq!(exit, 0, "{result}");
        result
    });
    assert_eq!(call("DEL", "a", &of_a), (0, Value::Null));
    let file = directory.path().join("net/10.0.0.3");
    let withheld = Withheld::new(&file);
    assert_eq!(call("DEL", "a", &of_a), (0, Value::Null));
    for (container, previous) in [("a", &Value::Null), ("b", &of_b)] {
        let (exit, printed) = call("DEL", container, previous);
        assert!(exit == 1 && printed.to_string().contains("net/10.0.0.3"), "{printed}");
    }
    drop(withheld);
    assert_eq!(call("DEL", "b", &of_b), (0, Value::Null));
    assert!(!file.exists());
}

/// The page states that plugins that are not in the table are executed.
#[test]
fn the_page_names_every_plugin_that_is_built_in_and_no_other() {
    const PAGES: [&str; 3] = [
        include_str!("../../../../docs/plugins.md"),
        include_str!("../../../../docs/concepts.md"),
        include_str!("../../../../README.md"),
    ];
    let (_, table) = PAGES[0].split_once("\n|---|---|\n").unwrap();
    let rows = table.lines().map_while(|line| line.strip_prefix("| `")?.split(" | ").next());
    let words = rows.flat_map(|types| types.split('`').step_by(2));
    // The second is not a plugin of its own: runtimes call it after another plugin.
    let named: BTreeSet<&str> = words.filter(|word| !["ipam.type", "netattach"].contains(word)).collect();
    assert_eq!(named, built_in().collect());
    assert_eq!(named.len(), 22);
    for page in PAGES {
        assert!(page.to_lowercase().contains("twenty-two"), "{page}");
    }
}
