//! CHECK, STATUS, VERSION, and the executable's help.

use std::fs;
use std::process::Command;

use netattach_tests::node::executable;
use netattach_tests::runtime::{config, with_result};
use serde_json::{Value, json};

use super::{PLUGINS, Rig, VERSIONS, bridge, net};

/// Rows: CHK-06.
#[test]
fn check_tells_what_is_missing() {
    type Harm = fn(&Rig);
    let table: [(&str, Harm, &str); 10] = [
        (
            "bridge",
            |rig| rig.inside().ensure_link_absent("eth0").unwrap(),
            "interface eth0 is gone from the pod",
        ),
        (
            "bridge",
            |rig| {
                let index = rig.inside().link("eth0").unwrap().index;
                rig.inside().ensure_address_absent(index, net("10.1.0.2/24")).unwrap();
            },
            "interface eth0 lacks address 10.1.0.2/24",
        ),
        ("bridge", |rig| rig.node().ensure_link_absent("br0").unwrap(), "bridge br0 is gone"),
        (
            "bridge",
            |rig| {
                let index = rig.node().link("br0").unwrap().index;
                rig.node().ensure_address_absent(index, net("10.1.0.1/24")).unwrap();
            },
            "bridge br0 lacks gateway address 10.1.0.1/24",
        ),
        (
            "bridge",
            |rig| fs::remove_file(rig.dir.path().join("net/10.1.0.2")).unwrap(),
            "address 10.1.0.2 is not reserved",
        ),
        (
            "macvlan",
            |rig| rig.inside().ensure_link_absent("eth0").unwrap(),
            "interface eth0 is gone from the pod",
        ),
        (
            "macvlan",
            |rig| {
                rig.inside().ensure_link_absent("eth0").unwrap();
                rig.inside().ensure_bridge(&bridge("eth0")).unwrap();
            },
            "interface eth0 is not the interface that ADD created",
        ),
        (
            "macvlan",
            |rig| {
                let index = rig.inside().link("eth0").unwrap().index;
                rig.inside().ensure_address_absent(index, net("fd00:1::2/64")).unwrap();
            },
            "interface eth0 lacks address fd00:1::2/64",
        ),
        (
            "veth",
            |rig| {
                let index = rig.inside().link("eth0").unwrap().index;
                // The routes go with the last address of their family.
                rig.inside().ensure_address_absent(index, net("10.1.0.2/32")).unwrap();
                rig.inside().ensure_address(index, net("10.1.0.2/32")).unwrap();
            },
            "the route to 0.0.0.0/0 is gone",
        ),
        ("loopback", |rig| rig.runtime.node.run(|| ()), "lo is not up"),
    ];
    for (kind, harm, message) in table {
        let rig = Rig::new();
        let config = rig.config("1.0.0", kind);
        let result = if kind == "loopback" {
            // Never set up.
            json!({"cniVersion": "1.0.0", "interfaces": [{"name": "lo", "sandbox": rig.pod.path()}]})
        } else {
            rig.add(&config)
        };
        harm(&rig);
        let (_, said) = rig.refusal("CHECK", &with_result(&config, &result));
        assert!(said.contains(message), "{kind}: {said:?} instead of {message:?}");
    }
}

/// Rows: CHK-03.
#[test]
fn check_needs_the_result_and_the_interface_in_it() {
    let rig = Rig::new();
    let config = rig.config("1.0.0", "bridge");
    rig.add(&config);
    assert_eq!(rig.refusal("CHECK", &config), (7, "key prevResult: missing, but CHECK needs it".to_owned()));
    let empty = json!({"cniVersion": "1.0.0"});
    assert_eq!(
        rig.refusal("CHECK", &with_result(&config, &empty)),
        (7, "key prevResult.interfaces: has no eth0 with a sandbox".to_owned())
    );
}

#[test]
fn check_of_loopback_needs_no_result() {
    let rig = Rig::new();
    let config = rig.config("1.0.0", "loopback");
    assert!(rig.refusal("CHECK", &config).1.contains("lo is not up"));
    rig.add(&config);
    rig.alone("CHECK", &config);
}

/// Rows: STA-06, ENV-21.
#[test]
fn status_tells_whether_an_add_could_be_served() {
    let rig = Rig::new();
    for kind in PLUGINS {
        rig.alone("STATUS", &rig.config("1.1.0", kind));
    }
    let (code, said) = rig.refusal("STATUS", &config("1.1.0", "macvlan", &json!({"master": "nosuchlink"})));
    assert_eq!((code, said.as_str()), (50, "no link named nosuchlink"));
    assert_eq!(rig.refusal("STATUS", &config("1.1.0", "macvlan", &json!({"mode": "x"}))).0, 7);
    let mut full = rig.config("1.1.0", "host-local");
    full["ipam"]["ranges"] = json!([[{"subnet": "10.1.0.0/30"}]]);
    rig.add(&full);
    for kind in ["host-local", "macvlan"] {
        full["type"] = json!(kind);
        let (code, said) = rig.refusal("STATUS", &full);
        assert_eq!(code, 50);
        let problem = "no address is available in range set 0 (10.1.0.1-10.1.0.2); where an agent runs, \
                       netattachctl pools --holders shows who has them";
        assert!(said.ends_with(problem), "{said}");
    }
    let by_runtime = json!({"capabilities": {"ipRanges": true}, "ipam": {"type": "host-local"}});
    rig.alone("STATUS", &config("1.1.0", "host-local", &by_runtime));
    assert_eq!(rig.refusal("STATUS", &rig.config("1.0.0", "bridge")).0, 1);
}

/// Rows: VER-13.
#[test]
fn each_name_says_what_it_is_and_which_versions_it_speaks() {
    let rig = Rig::new();
    for kind in PLUGINS {
        let answer = rig.runtime.run("VERSION", rig.call(), &config("1.0.0", kind, &json!({}))).unwrap();
        let expected = json!({"cniVersion": "1.1.0", "supportedVersions": VERSIONS});
        assert_eq!((answer.exit, answer.stdout), (Some(0), expected));
        let about = rig.runtime.run("", rig.call(), &config("1.0.0", kind, &json!({}))).unwrap();
        let expected = format!(
            "{kind} of netattach {}\nCNI protocol versions supported: {}\n",
            env!("CARGO_PKG_VERSION"),
            VERSIONS.join(", ")
        );
        assert_eq!((about.exit, about.stdout, about.stderr), (Some(0), Value::Null, expected));
        let unknown = rig.refusal("FOO", &config("1.0.0", kind, &json!({})));
        assert_eq!(unknown, (4, "unknown CNI_COMMAND: FOO".to_owned()));
    }
}

#[test]
fn the_executable_explains_itself_and_installs_its_names() {
    let executable = executable("netattach-cni").unwrap();
    let help = Command::new(&executable).output().unwrap();
    let text = String::from_utf8(help.stdout).unwrap();
    assert!(help.status.success() && PLUGINS.iter().all(|name| text.contains(name)), "{text}");
    assert!(!Command::new(&executable).arg("remove").output().unwrap().status.success());

    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("bridge"), "theirs").unwrap();
    let install =
        |more: &[&str]| Command::new(&executable).arg("install").arg(dir.path()).args(more).output().unwrap();
    let refused = install(&[]);
    assert!(!refused.status.success());
    let message = format!(
        "netattach-cni: {} would be overwritten; --force replaces it\n",
        dir.path().join("bridge").display()
    );
    assert_eq!(String::from_utf8(refused.stderr).unwrap(), message);
    assert!(install(&["--force"]).status.success());
    for name in PLUGINS {
        let started = Command::new(dir.path().join(name)).env_clear().output().unwrap();
        let about = String::from_utf8(started.stderr).unwrap();
        assert!(about.starts_with(&format!("{name} of netattach")), "{about}");
    }
}
