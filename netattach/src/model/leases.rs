//! Addresses are taken and released in one directory by an agent's threads and by another process.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::{explore, finds};
use crate::ipam::Owner;
use crate::ipam::host_local::{Config, Leases};
use crate::sync::{Arc, thread};

fn config(directory: &Path) -> Config {
    let value = serde_json::json!({
        "cniVersion": "1.1.0", "name": "net",
        "ipam": {"dataDir": directory, "ranges": [[{"subnet": "10.1.0.0/29"}]]},
    });
    Config::parse(value.as_object().unwrap(), None).unwrap()
}

fn owner(container: &str) -> Owner {
    Owner { container_id: container.to_owned(), ifname: "eth0".to_owned() }
}

/// Takes an address, and releases it unless the container is to keep it.
fn take(leases: &Leases, config: &Config, container: &str, keeps: bool) {
    let lease = leases.allocate(config, &owner(container)).unwrap();
    assert_eq!(lease.addresses.len(), 1);
    leases
        .check(&config.data_dir, &config.network, &owner(container), &[lease.addresses[0].0.addr()])
        .unwrap();
    if !keeps {
        assert_eq!(leases.release(config, &owner(container), &[]).unwrap(), 1);
    }
}

/// Two threads of an agent run beside another process. The fault: that process locks a different file from the
/// agent's, because the agent's lock file was removed.
fn beside_another_process(two_locks: bool) {
    let directory = tempfile::tempdir().unwrap();
    let config = Arc::new(config(directory.path()));
    let agent = Arc::new(Leases::default());
    take(&agent, &config, "before", false);
    take(&agent, &config, "before", true);
    let (thread_of, of) = (Arc::clone(&agent), Arc::clone(&config));
    let first = thread::spawn(move || take(&thread_of, &of, "a", true));
    let of = Arc::clone(&config);
    let lock = directory.path().join("net/lock");
    let process = thread::spawn(move || {
        if two_locks {
            std::fs::remove_file(lock).unwrap();
        }
        take(&Leases::default(), &of, "b", true);
    });
    take(&agent, &config, "c", false);
    first.join().unwrap();
    process.join().unwrap();

    let mut held = BTreeMap::new();
    for entry in std::fs::read_dir(directory.path().join("net")).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        if name.parse::<std::net::IpAddr>().is_ok() {
            held.insert(name, std::fs::read_to_string(entry.path()).unwrap());
        }
    }
    let holders: BTreeSet<&str> = held.values().filter_map(|text| text.split("\r\n").next()).collect();
    assert_eq!((held.len(), holders), (3, BTreeSet::from(["a", "b", "before"])), "{held:?}");
}

#[test]
fn no_container_gets_the_address_of_another() {
    explore(600, || beside_another_process(false));
}

#[test]
fn a_lock_that_two_have_at_once_is_found() {
    assert!(finds(2_000, || beside_another_process(true)));
}
