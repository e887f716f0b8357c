//! Operations on reservations, by the files that they leave. This file contains the common helpers.

mod concurrent;
mod unread;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};

use serde_json::json;

use super::*;
use crate::error_chain::Chain;

fn config(data_dir: &Path, ranges: serde_json::Value) -> Config {
    let value =
        json!({"cniVersion": "1.1.0", "name": "net", "ipam": {"dataDir": data_dir, "ranges": ranges}});
    Config::parse(value.as_object().unwrap(), None).unwrap()
}

fn owner(container_id: &str, ifname: &str) -> Owner {
    Owner { container_id: container_id.to_owned(), ifname: ifname.to_owned() }
}

const SPARE: &str = ".netattach-reservation.1";
const SECOND: &str = ".netattach-reservation.2";

/// Name and content of every file except the lock.
fn files(config: &Config) -> Vec<(String, String)> {
    let mut files: Vec<_> = fs::read_dir(config.directory())
        .unwrap()
        .map(|entry| entry.unwrap())
        .map(|entry| (entry.file_name().into_string().unwrap(), fs::read_to_string(entry.path()).unwrap()))
        .filter(|(name, _)| name != "lock")
        .collect();
    files.sort();
    files
}

fn named(files: &[(&str, &str)]) -> Vec<(String, String)> {
    files.iter().map(|(name, content)| ((*name).to_owned(), (*content).to_owned())).collect()
}

fn addresses(lease: &Lease) -> Vec<String> {
    lease.addresses.iter().map(|(address, _)| address.to_string()).collect()
}

fn allocate(config: &Config, owner: &Owner) -> Lease {
    Leases::default().allocate(config, owner).unwrap()
}

#[test]
fn files_have_the_content_and_the_mode_of_the_go_plugin() {
    let dir = tempfile::tempdir().unwrap();
    let config =
        config(dir.path(), json!([[{"subnet": "10.0.0.0/29"}], [{"subnet": "2001:db8:0:0:1::/112"}]]));
    let lease = allocate(&config, &owner(" abc ", "eth0"));
    assert_eq!(addresses(&lease), ["10.0.0.2/29", "2001:db8::1:0:0:2/112"]);
    assert_eq!(lease.addresses[0].1, Some("10.0.0.1".parse().unwrap()));
    assert_eq!(
        files(&config),
        named(&[
            ("10.0.0.2", "abc\r\neth0"),
            ("2001:db8::1:0:0:2", "abc\r\neth0"),
            ("last_reserved_ip.0", "10.0.0.2"),
            ("last_reserved_ip.1", "2001:db8::1:0:0:2"),
        ])
    );
    for name in ["10.0.0.2", "last_reserved_ip.0"] {
        let mode = fs::metadata(config.directory().join(name)).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o600, "{name}");
    }
}

#[test]
fn a_lease_file_of_the_largest_size_has_an_owner_and_a_larger_one_blocks_its_address() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), json!([[{"subnet": "10.0.0.0/29"}]]));
    let most = crate::budget::LEASE.most;
    let abc = owner("abc", "eth0");
    for (bytes, released, next) in [(most, 1, "10.0.0.2/29"), (most + 1, 0, "10.0.0.3/29")] {
        fs::create_dir_all(config.directory()).unwrap();
        fs::write(config.directory().join("10.0.0.2"), crate::bounded::padded("abc\r\neth0", bytes)).unwrap();
        let leases = Leases::default();
        assert_eq!(leases.release(&config, &abc, &[]).unwrap(), released, "{bytes}");
        assert_eq!(addresses(&leases.allocate(&config, &owner("b", "eth0")).unwrap()), [next], "{bytes}");
        assert!(config.directory().join("10.0.0.2").exists(), "{bytes}");
        fs::remove_dir_all(config.directory()).unwrap();
    }
}

#[test]
fn interfaces_of_one_container_are_released_one_by_one() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), json!([[{"subnet": "10.0.0.0/29"}]]));
    let leases = Leases::default();
    for ifname in ["eth0", "net1"] {
        leases.allocate(&config, &owner("abc", ifname)).unwrap();
    }
    assert_eq!(leases.release(&config, &owner("abc", "eth0"), &[]).unwrap(), 1);
    assert_eq!(leases.release(&config, &owner("abc", "eth0"), &[]).unwrap(), 0);
    let unknown = Config { network: "unknown".to_owned(), ..config.clone() };
    assert_eq!(leases.release(&unknown, &owner("abc", "eth0"), &[]).unwrap(), 0);
    assert_eq!(
        files(&config),
        named(&[(SPARE, ""), ("10.0.0.3", "abc\r\nnet1"), ("last_reserved_ip.0", "10.0.0.3")])
    );
    leases.check(dir.path(), "net", &owner("abc", "net1"), &["10.0.0.3".parse().unwrap()]).unwrap();
    leases.check(dir.path(), "net", &owner("abc", "net1"), &[]).unwrap();
}

#[test]
fn a_released_reservation_is_written_over_by_the_next_one() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), json!([[{"subnet": "10.0.0.0/29"}]]));
    let inode = |name: &str| fs::metadata(config.directory().join(name)).unwrap().ino();
    let leases = Leases::default();
    for ifname in ["net1", "net2"] {
        leases.allocate(&config, &owner("a-long-name", ifname)).unwrap();
    }
    let (first, second) = (inode("10.0.0.2"), inode("10.0.0.3"));
    for ifname in ["net1", "net2"] {
        leases.release(&config, &owner("a-long-name", ifname), &[]).unwrap();
    }
    assert_eq!(files(&config), named(&[(SPARE, ""), (SECOND, ""), ("last_reserved_ip.0", "10.0.0.3")]));
    leases.allocate(&config, &owner("b", "eth0")).unwrap();
    assert_eq!((inode("10.0.0.4") == second, first == second), (true, false));
    let after = [(SPARE, ""), ("10.0.0.4", "b\r\neth0"), ("last_reserved_ip.0", "10.0.0.4")];
    assert_eq!(files(&config), named(&after));
    // Another process knows of no spare file that is not its own.
    Leases::default().allocate(&config, &owner("c", "eth0")).unwrap();
    assert_eq!(files(&config).len(), 3);
    Leases::default().release(&config, &owner("c", "eth0"), &[]).unwrap();
    leases.check(dir.path(), "net", &owner("b", "eth0"), &[]).unwrap();
    // A file that has another hard link keeps its content.
    fs::hard_link(config.directory().join("10.0.0.4"), dir.path().join("kept")).unwrap();
    leases.release(&config, &owner("b", "eth0"), &[]).unwrap();
    assert_eq!(files(&config), named(&[("last_reserved_ip.0", "10.0.0.5")]));
    assert_eq!(fs::read_to_string(dir.path().join("kept")).unwrap(), "b\r\neth0");
}

#[test]
fn as_many_files_are_kept_as_a_node_attaches_pods_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), json!([[{"subnet": "10.0.0.0/22"}]]));
    let leases = Leases::default();
    let containers: Vec<String> = (0..300).map(|number| format!("c{number}")).collect();
    for _ in 0..2 {
        for container in &containers {
            leases.allocate(&config, &owner(container, "eth0")).unwrap();
        }
        for container in &containers {
            leases.release(&config, &owner(container, "eth0"), &[]).unwrap();
        }
        let files = files(&config);
        let empty =
            files.iter().filter(|(name, content)| name.starts_with(".netattach-") && content.is_empty());
        assert_eq!((empty.count(), files.len()), (256, 257));
    }
}

#[test]
fn a_reservation_without_interface_counts_until_it_is_released() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), json!([[{"subnet": "10.0.0.0/29"}]]));
    fs::create_dir_all(config.directory()).unwrap();
    fs::write(config.directory().join("10.0.0.4"), " abc\n").unwrap();
    let leases = Leases::default();
    leases.check(dir.path(), "net", &owner("abc", "eth0"), &[]).unwrap();
    assert_eq!(
        Chain(&leases.allocate(&config, &owner("abc", "eth0")).unwrap_err()).to_string(),
        format!(
            "allocate an address from {}: 10.0.0.4 is already reserved for interface eth0 of container abc; \
             a second address from the same range set is not given",
            config.directory().display()
        )
    );
    assert_eq!(leases.release(&config, &owner("abc", "eth0"), &[]).unwrap(), 1);
    assert_eq!(files(&config), []);
    assert_eq!(
        leases.check(dir.path(), "net", &owner("abc", "eth0"), &[]).unwrap_err().to_string(),
        format!(
            "no address is reserved for interface eth0 of container abc in {}",
            config.directory().display()
        )
    );
}

#[test]
fn abandoned_and_stray_files_are_reused_and_removed() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), json!([[{"subnet": "10.0.0.0/29"}]]));
    fs::create_dir_all(config.directory()).unwrap();
    fs::write(config.directory().join("10.0.0.2"), "").unwrap();
    fs::write(config.directory().join("10.0.0.3"), [0; 5]).unwrap();
    fs::write(config.directory().join("10.0.0.4"), "other\r\neth0").unwrap();
    // As if the writer was killed between link and unlink.
    fs::hard_link(config.directory().join("10.0.0.4"), config.directory().join(".netattach-reservation"))
        .unwrap();
    fs::create_dir(config.directory().join("10.0.0.5")).unwrap();
    let leases = Leases::default();
    let got: Vec<_> =
        ["a", "b", "c"].map(|id| addresses(&leases.allocate(&config, &owner(id, "eth0")).unwrap())).concat();
    assert_eq!(got, ["10.0.0.2/29", "10.0.0.3/29", "10.0.0.6/29"]);
    fs::remove_dir(config.directory().join("10.0.0.5")).unwrap();
    assert_eq!(
        files(&config),
        named(&[
            ("10.0.0.2", "a\r\neth0"),
            ("10.0.0.3", "b\r\neth0"),
            ("10.0.0.4", "other\r\neth0"),
            ("10.0.0.6", "c\r\neth0"),
            ("last_reserved_ip.0", "10.0.0.6"),
        ])
    );
}

#[test]
fn a_lease_that_was_removed_is_taken_again_unless_another_has_its_address() {
    let directory = tempfile::tempdir().unwrap();
    let config = config(directory.path(), json!([[{"subnet": "10.1.0.0/24"}]]));
    let leases = Leases::default();
    let (a, b) = (owner("a", "eth0"), owner("b", "eth0"));
    let lease = leases.allocate(&config, &a).unwrap();
    let held: Vec<IpAddr> = lease.addresses.iter().map(|(address, _)| address.addr()).collect();
    let before = files(&config);
    let restore = |owner: &Owner| {
        leases.restore(&config.data_dir, &config.network, owner, &held).map_err(|it| it.failure())
    };
    assert_eq!(restore(&a), Ok(vec![]));
    fs::remove_file(config.directory().join(held[0].to_string())).unwrap();
    assert_eq!(restore(&a), Ok(held.clone()));
    assert_eq!(files(&config), before, "as it was, the cursor too");
    fs::remove_dir_all(config.directory()).unwrap();
    assert_eq!(restore(&b), Ok(held.clone()));
    assert_eq!(restore(&a), Err(crate::ipam::Failure::Other));
}

#[test]
fn holders_that_lack_an_address_are_found_in_one_look() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), json!([[{"subnet": "10.0.0.0/24"}], [{"subnet": "fd00::/112"}]]));
    let leases = Leases::default();
    let holders = ["a", "b", "c"].map(|id| {
        let owner = owner(id, "eth0");
        let lease = leases.allocate(&config, &owner).unwrap();
        (owner, lease.addresses.iter().map(|(address, _)| address.addr()).collect::<Vec<IpAddr>>())
    });
    let lacking =
        |holders: &[(Owner, Vec<IpAddr>)]| leases.lacking(dir.path(), "net", holders).unwrap().holders;
    assert_eq!(lacking(&holders), [0; 0]);
    fs::remove_file(config.directory().join(holders[1].1[1].to_string())).unwrap();
    let stranger = (owner("d", "eth0"), Vec::new());
    let unnamed = (owner("b", "eth0"), Vec::new());
    assert_eq!(lacking(&holders), [1]);
    assert_eq!(lacking(&[stranger, unnamed, holders[2].clone()]), [0], "what is left to it counts");
    fs::remove_dir_all(config.directory()).unwrap();
    assert_eq!(lacking(&holders), [0, 1, 2]);
}

#[test]
fn a_failure_in_a_later_set_reserves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), json!([[{"subnet": "10.0.0.0/29"}], [{"subnet": "10.0.1.0/30"}]]));
    fs::create_dir_all(config.directory().join("last_reserved_ip.1")).unwrap();
    let error = Leases::default().allocate(&config, &owner("a", "eth0")).unwrap_err();
    assert_eq!(
        Chain(&error).to_string(),
        format!(
            "write {}: Is a directory (os error 21)",
            config.directory().join("last_reserved_ip.1").display()
        )
    );
    fs::remove_dir(config.directory().join("last_reserved_ip.1")).unwrap();
    assert_eq!(files(&config), named(&[("last_reserved_ip.0", "10.0.0.2")]));
}

#[test]
fn names_that_leave_the_data_directory_are_refused() {
    for name in ["..", "", "a/b", ".hidden", "a\nb"] {
        let config = Config::without_ranges("/nonexistent".into(), name);
        let error = Leases::default().release(&config, &owner("a", "b"), &[]).unwrap_err();
        assert_eq!(error.to_string(), format!("{name:?} is not a network name"));
    }
}
