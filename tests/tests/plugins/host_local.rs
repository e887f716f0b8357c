//! Our `host-local` compared with the Go plugin of that name, on one directory, and under `kill -9`.
//!
//! `NETATTACH_REFERENCE_PLUGINS` names the directory of the Go plugin's executable. Without it those tests
//! report themselves skipped, or fail when `CI` is `true`.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use netattach::error_chain::Chain;
use netattach::ipam::Owner;
use netattach::ipam::host_local::{self, Config, Lease, Leases};
use netattach_tests::tools;
use serde_json::{Value, json};
use tempfile::TempDir;

/// A network whose reservations both plugins keep in one directory.
struct Shared {
    go: PathBuf,
    data: TempDir,
    stdin: Value,
}

impl Shared {
    /// `None` when the Go plugin is missing, which has been reported.
    fn new(test: &str, ranges: Value) -> Option<Self> {
        let go = reference_plugin(test)?;
        let data = tempfile::tempdir().unwrap();
        let stdin = json!({
            "cniVersion": "1.0.0", "name": "shared", "type": "bridge",
            "ipam": {"type": "host-local", "dataDir": data.path(), "ranges": ranges}
        });
        Some(Self { go, data, stdin })
    }

    fn config(&self) -> Config {
        Config::parse(self.stdin.as_object().unwrap(), None).unwrap()
    }

    fn directory(&self) -> PathBuf {
        self.data.path().join("shared")
    }

    fn ours(&self, owner: &Owner) -> Lease {
        host_local::allocate(&self.config(), owner).unwrap()
    }

    fn release(&self, owner: &Owner) -> usize {
        host_local::release(self.data.path(), "shared", owner).unwrap()
    }

    fn start_go(&self, verb: &str, owner: &Owner) -> Child {
        let mut child = Command::new(&self.go)
            .env_clear()
            .env("CNI_COMMAND", verb)
            .env("CNI_CONTAINERID", &owner.container_id)
            .env("CNI_IFNAME", &owner.ifname)
            .env("CNI_NETNS", "/proc/self/ns/net")
            // Leasing needs no namespace; otherwise the plugin refuses its own namespace after it has done its work.
            .env("CNI_NETNS_OVERRIDE", "1")
            .env("CNI_PATH", "/nonexistent")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(self.stdin.to_string().as_bytes()).unwrap();
        child
    }

    fn go(&self, verb: &str, owner: &Owner) -> Output {
        self.start_go(verb, owner).wait_with_output().unwrap()
    }

    /// Returns the addresses that the Go plugin leases.
    fn go_add(&self, owner: &Owner) -> Vec<String> {
        go_addresses(&self.go("ADD", owner))
    }

    /// Name and content of every file.
    fn files(&self) -> Vec<(String, Vec<u8>)> {
        let mut files: Vec<_> = fs::read_dir(self.directory())
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .map(|path| (path.file_name().unwrap().to_str().unwrap().to_owned(), fs::read(path).unwrap()))
            .collect();
        files.sort();
        files
    }
}

fn reference_plugin(test: &str) -> Option<PathBuf> {
    let plugins = tools::directory(test, "NETATTACH_REFERENCE_PLUGINS", &["host-local"])?;
    Some(plugins.join("host-local"))
}

fn go_addresses(output: &Output) -> Vec<String> {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
    result["ips"].as_array().unwrap().iter().map(|ip| ip["address"].as_str().unwrap().to_owned()).collect()
}

fn addresses(lease: &Lease) -> Vec<String> {
    lease.addresses.iter().map(|(address, _)| address.to_string()).collect()
}

fn owner(container_id: &str) -> Owner {
    Owner { container_id: container_id.to_owned(), ifname: "eth0".to_owned() }
}

/// Rows: HLC-dataDir.
#[test]
fn files_are_identical_to_those_of_the_go_plugin() {
    let ranges = json!([[{"subnet": "10.7.0.0/29"}], [{"subnet": "2001:db8:0:0:1::/112"}], [{"subnet": "fd00:0:0:1::/64"}]]);
    let Some(ours) = Shared::new("files_are_identical", ranges.clone()) else { return };
    let Some(theirs) = Shared::new("files_are_identical", ranges) else { return };
    for id in ["first", "second"] {
        assert_eq!(addresses(&ours.ours(&owner(id))), theirs.go_add(&owner(id)));
    }
    assert_eq!(ours.files(), theirs.files());
    assert_eq!(ours.release(&owner("first")), 3);
    assert!(theirs.go("DEL", &owner("first")).status.success());
    assert_eq!(ours.files(), theirs.files());
}

/// Rows: HLC-dataDir.
#[test]
fn each_releases_and_checks_what_the_other_reserved() {
    let ranges = json!([[{"subnet": "10.7.0.0/29"}], [{"subnet": "2001:db8::/64"}]]);
    let Some(shared) = Shared::new("each_releases_and_checks", ranges) else { return };
    shared.go_add(&owner("theirs"));
    shared.ours(&owner("ours"));
    let held = ["10.7.0.2".parse().unwrap(), "2001:db8::2".parse().unwrap()];
    host_local::check(shared.data.path(), "shared", &owner("theirs"), &held).unwrap();
    assert!(shared.go("CHECK", &owner("ours")).status.success());

    assert_eq!(shared.release(&owner("theirs")), 2);
    assert!(!shared.go("CHECK", &owner("theirs")).status.success());
    assert!(shared.go("DEL", &owner("ours")).status.success());
    let refused = host_local::check(shared.data.path(), "shared", &owner("ours"), &[]).unwrap_err();
    let expected =
        format!("no address is reserved for {} in {}", owner("ours"), shared.directory().display());
    assert_eq!(refused.to_string(), expected);
    let left: Vec<_> = shared.files().into_iter().map(|(name, _)| name).collect();
    assert_eq!(left, ["last_reserved_ip.0", "last_reserved_ip.1", "lock"]);
}

#[test]
fn each_refuses_a_second_address_to_an_attachment_of_the_other() {
    let Some(shared) = Shared::new("each_refuses_a_second", json!([[{"subnet": "10.7.0.0/29"}]])) else {
        return;
    };
    assert_eq!(shared.go_add(&owner("theirs")), ["10.7.0.2/29"]);
    shared.ours(&owner("ours"));
    let refused = host_local::allocate(&shared.config(), &owner("theirs")).unwrap_err();
    let expected = format!(
        "allocate an address from {}: 10.7.0.2 is already reserved for {}; a second address from the same range set is not given",
        shared.directory().display(),
        owner("theirs"),
    );
    assert_eq!(Chain(&refused).to_string(), expected);
    assert!(!shared.go("ADD", &owner("ours")).status.success());
}

/// Rows: HLC-ranges.
#[test]
fn the_round_goes_on_from_the_other_in_both_directions() {
    let ranges = json!([[{"subnet": "10.7.0.0/29"}, {"subnet": "10.7.1.0/30"}]]);
    let Some(shared) = Shared::new("the_round_goes_on", ranges) else { return };
    let mut given = Vec::new();
    for turn in 0..14 {
        let who = owner(&format!("c{turn}"));
        given.extend(if turn % 2 == 0 { shared.go_add(&who) } else { addresses(&shared.ours(&who)) });
        assert_eq!(shared.release(&who), 1);
    }
    let round = ["10.7.0.2/29", "10.7.0.3/29", "10.7.0.4/29", "10.7.0.5/29", "10.7.0.6/29", "10.7.1.2/30"];
    assert_eq!(given, round.into_iter().cycle().take(14).collect::<Vec<_>>());
}

#[test]
fn two_hundred_at_once_from_both_get_different_addresses() {
    let Some(shared) = Shared::new("two_hundred_at_once", json!([[{"subnet": "10.7.0.0/24"}]])) else {
        return;
    };
    let leases = Leases::default();
    let config = shared.config();
    let given: Vec<String> = std::thread::scope(|scope| {
        let ours: Vec<_> = (0..100)
            .map(|i| {
                let (leases, config) = (&leases, &config);
                scope.spawn(move || addresses(&leases.allocate(config, &owner(&format!("ours{i}"))).unwrap()))
            })
            .collect();
        let children: Vec<_> =
            (0..100).map(|i| shared.start_go("ADD", &owner(&format!("theirs{i}")))).collect();
        let theirs = children.into_iter().flat_map(|child| go_addresses(&child.wait_with_output().unwrap()));
        let theirs: Vec<_> = theirs.collect();
        ours.into_iter().flat_map(|thread| thread.join().unwrap()).chain(theirs).collect()
    });
    assert_eq!(given.len(), 200);
    assert_eq!(given.iter().collect::<BTreeSet<_>>().len(), 200);
    let reservations = shared.files().iter().filter(|(name, _)| name.starts_with("10.7.0.")).count();
    assert_eq!(reservations, 200);
}

#[test]
fn a_file_that_the_go_plugin_left_without_content_is_given_once() {
    let Some(shared) = Shared::new("a_file_without_content", json!([[{"subnet": "10.7.0.0/29"}]])) else {
        return;
    };
    fs::create_dir_all(shared.directory()).unwrap();
    // The state of the Go plugin when it is killed between creating a reservation and writing it.
    fs::write(shared.directory().join("10.7.0.2"), "").unwrap();
    assert_eq!(addresses(&shared.ours(&owner("a"))), ["10.7.0.2/29"]);
    assert_eq!(shared.go_add(&owner("b")), ["10.7.0.3/29"]);
    assert_eq!(fs::read(shared.directory().join("10.7.0.2")).unwrap(), b"a\r\neth0");
}

const KILLED_WRITER: &str = "NETATTACH_TEST_KILLED_WRITER";

fn many_addresses(data_dir: &Path) -> Config {
    let stdin = json!({"name": "killed", "ipam": {"dataDir": data_dir, "subnet": "10.8.0.0/16"}});
    Config::parse(stdin.as_object().unwrap(), None).unwrap()
}

/// Not a test of its own: the process that the next test kills.
#[test]
#[ignore = "run by a_writer_killed_at_any_instant_leaves_whole_files_only"]
fn killed_writer() {
    let config = many_addresses(Path::new(&std::env::var_os(KILLED_WRITER).expect("set by the parent")));
    let leases = Leases::default();
    for i in 0.. {
        leases.allocate(&config, &owner(&format!("container{i:06}"))).unwrap();
    }
}

#[test]
fn a_writer_killed_at_any_instant_leaves_whole_files_only() {
    let data = tempfile::tempdir().unwrap();
    let config = many_addresses(data.path());
    let directory = config.directory();
    let entries = || fs::read_dir(&directory).map_or(0, Iterator::count);
    for round in 0..40 {
        let _ = fs::remove_dir_all(&directory);
        let mut writer = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "host_local::killed_writer", "--ignored"])
            .env(KILLED_WRITER, data.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        while entries() < 4 + round {
            assert!(writer.try_wait().unwrap().is_none(), "the writer ended by itself");
        }
        writer.kill().unwrap();
        writer.wait().unwrap();

        let survivor = host_local::allocate(&config, &owner("survivor")).unwrap();
        let survivor = survivor.addresses[0].0.addr().to_string();
        for entry in fs::read_dir(&directory).unwrap().map(Result::unwrap) {
            let name = entry.file_name().into_string().unwrap();
            let content = fs::read_to_string(entry.path()).unwrap();
            match name.as_str() {
                "lock" | "last_reserved_ip.0" => {}
                name if name == survivor => assert_eq!(content, "survivor\r\neth0"),
                name => {
                    assert!(name.starts_with("10.8."), "{name} is not a reservation");
                    assert_eq!((content.len(), &content[..9], &content[15..]), (21, "container", "\r\neth0"));
                }
            }
        }
    }
}
