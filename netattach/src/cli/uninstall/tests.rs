//! The text of the report, and the files found on disk.

use std::fs;
use std::os::unix::fs::symlink;

use super::super::tests::{is_narrow, is_pinned};
use super::*;
use crate::attach::standalone::copy::MARK;

/// The chart's Job that stops `helm uninstall` needs no rights and finds nothing out.
#[test]
fn a_refusal_says_what_it_was_given_and_looks_at_nothing() {
    let uninstall = Uninstall {
        bpffs: "/none/pins".into(),
        state_dir: "/none/state".into(),
        cni_conf_dir: "/none/net.d".into(),
        cni_bin_dir: None,
        force: true,
        dry_run: false,
        refuse: Some("go by the page".to_owned()),
    };
    let Err(error) = uninstall.run(Path::new("/none/socket")) else { panic!("it ran") };
    assert_eq!(error.to_string(), "go by the page");
}

#[test]
fn what_was_removed_and_what_stays_is_said_in_lines() {
    let outcome = |removed, forced| Removed { bpffs: "/pins".into(), removed, forced, ..Removed::default() };
    let said = |removed, forced| outcome(removed, forced).text(Width::Limited);
    for forced in [false, true] {
        assert_eq!(said(false, forced), "Nothing is pinned at /pins.\n");
    }
    assert_eq!(said(true, false), "Removed the programs and maps pinned at /pins.\n");
    assert_eq!(
        said(true, true),
        "Removed the programs and maps pinned at /pins. Devices of attached pods keep their programs until the pods end, but\n    \
         for parents of macvlans and representors of VFs: those pods are no longer judged.\n"
    );
    let names = |names: &[&str]| names.iter().map(ToString::to_string).collect();
    let everything = Removed {
        dry_run: true,
        configurations: vec!["/net.d/00-netattach.conflist".into()],
        tables: names(&["netattach", "netattach-nat"]),
        routes: names(&["10.244.2.0/24", "fd00:2::/64"]),
        devices: names(&["eth0"]),
        host_links: names(&["nahst3"]),
        bridges: names(&["pods0"]),
        bridges_in_use: names(&["br7"]),
        state: vec!["/state/journal".into()],
        executables: vec!["/bin/netattach".into(), "/bin/.netattach.before".into()],
        stays: vec![
            Stays::new("/leases/a", "others may use it"),
            Stays::new("br7", "something is connected to this bridge"),
            Stays::new("/leases/b", "others may use it"),
        ],
        ..outcome(true, false)
    };
    is_pinned("uninstall", &everything);
    assert_eq!(
        everything.text(Width::Limited),
        "Would remove the programs and maps pinned at /pins.\n\
         Would remove configurations of the container runtime: /net.d/00-netattach.conflist.\n\
         Would remove tables of the packet filter: netattach, netattach-nat.\n\
         Would remove routes to: 10.244.2.0/24, fd00:2::/64.\n\
         Would remove programs on uplinks, parents of macvlans and representors: eth0.\n\
         Would remove the node's links on parents of pods: nahst3.\n\
         Would remove bridges without a port: pods0.\n\
         Would remove state: /state/journal.\n\
         Would remove executables: /bin/netattach, /bin/.netattach.before.\n\
         Stays: /leases/a, /leases/b: others may use it.\n\
         Stays: br7: something is connected to this bridge.\n"
    );
    let wide = Removed { routes: (0..50).map(|it| format!("10.244.{it}.0/24")).collect(), ..everything };
    is_narrow(&wide.text(Width::Limited));
    assert_eq!(wide.text(Width::Unlimited), wide.to_string());
}

fn stays(files: &Files) -> Vec<String> {
    files.stays.iter().map(|it| it.what.rsplit('/').next().unwrap().to_owned()).collect()
}

#[test]
fn a_configuration_of_the_agent_goes_and_one_by_hand_that_calls_netattach_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| fs::write(directory.path().join(name), text).unwrap();
    write("00-netattach.conflist", r#"{"netattach.dev/managed": true, "plugins": [{"type": "netattach"}]}"#);
    write("01-by-hand.conflist", r#"{"plugins": [{"type": "netattach"}]}"#);
    write("02-by-hand.conf", r#"{"type": "netattach"}"#);
    write(
        "03-chained.conflist",
        r#"{"plugins": [{"type": "flannel"}, {"type": "portmap"}, {"type": "netattach"}]}"#,
    );
    write("10-flannel.conflist", r#"{"plugins": [{"type": "flannel"}]}"#);
    write("11-broken.conf", "{");
    write("README", r#"{"type": "netattach"}"#);
    let mut files = Files::default();
    files.look_for_configurations(directory.path()).unwrap();
    assert_eq!(files.configurations, [directory.path().join("00-netattach.conflist")]);
    // Removing the other network's configuration would leave the node without one.
    let alone = "no agent has written it, and it calls netattach: remove it, or new pods fail";
    let behind = "it is of another network, and calls netattach behind its plugins: take that entry out of it, and leave the \
                  rest, or new pods fail";
    let expected =
        [("01-by-hand.conflist", alone), ("02-by-hand.conf", alone), ("03-chained.conflist", behind)];
    assert_eq!(
        files.stays,
        expected.map(|(name, why)| Stays::new(directory.path().join(name).display(), why))
    );
    files.remove_configurations().unwrap();
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 6);
    Files::default().look_for_configurations(&directory.path().join("absent")).unwrap();
}

#[test]
fn executables_go_and_plugins_under_names_of_others_stay_with_what_they_lead_to() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let copies = [".loopback.before", ".netattach.before", ".netattach-cni.new"];
    for name in ["netattach", "netattach-cni", "loopback"].iter().chain(&copies) {
        fs::write(path(name), [b"ELF", MARK].concat()).unwrap();
    }
    fs::write(path(".bridge.before"), "the reference plugin").unwrap();
    fs::write(path("bridge"), "the reference plugin").unwrap();
    let found = || {
        let mut files = Files::default();
        files.look_for_executables(directory.path()).unwrap();
        files
    };
    let all = [".loopback.before", "netattach", ".netattach.before", "netattach-cni", ".netattach-cni.new"];
    let files = found();
    assert_eq!(files.executables, all.map(path));
    assert_eq!(stays(&files), [".bridge.before", "loopback"]);
    symlink("netattach-cni", path("host-local")).unwrap();
    let files = found();
    let gone = [".loopback.before", "netattach", ".netattach.before", ".netattach-cni.new"];
    assert_eq!(files.executables, gone.map(path));
    assert_eq!(stays(&files), [".bridge.before", "loopback", "host-local", "netattach-cni"]);
    files.remove_rest().unwrap();
    let mut left: Vec<String> = fs::read_dir(directory.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    left.sort();
    assert_eq!(left, [".bridge.before", "bridge", "host-local", "loopback", "netattach-cni"]);
    // Files of other programs stay, whatever their names.
    fs::write(path("netattach"), "somebody else's").unwrap();
    assert_eq!(found().executables, Vec::<PathBuf>::new());
}

#[test]
fn state_that_is_needed_stays_and_the_directories_go_with_the_rest() {
    let directory = tempfile::tempdir().unwrap();
    let (state, run) = (directory.path().join("state"), directory.path().join("run"));
    let make = || {
        fs::create_dir_all(state.join("journal")).unwrap();
        fs::create_dir_all(run.join("network-status/shop")).unwrap();
        fs::write(state.join("journal/boot"), "x").unwrap();
        fs::write(run.join("netattach.sock.lock"), "").unwrap();
    };
    make();
    let mut files = Files::default();
    files.look_for_state(&state, Some(&run), Some("3 pods".to_owned()));
    assert_eq!(files.stays, [Stays::new(state.display(), "3 pods")]);
    files.remove_rest().unwrap();
    assert!(state.join("journal/boot").exists() && !run.exists());
    make();
    let mut files = Files::default();
    files.look_for_state(&state, Some(&run), None);
    files.remove_rest().unwrap();
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    // A file of another author in the directory is not removed.
    make();
    fs::write(state.join("notes"), "mine").unwrap();
    let mut files = Files::default();
    files.look_for_state(&state, None, None);
    files.remove_rest().unwrap();
    assert_eq!(fs::read_dir(&state).unwrap().count(), 1);
}
