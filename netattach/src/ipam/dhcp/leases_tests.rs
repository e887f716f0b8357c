//! Leases with a disk that hangs, and with files that cannot be read.

use std::fs;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::mpsc;

use rustix::fs::{CWD, Mode, mkfifoat};
use serde_json::json;

use super::super::record::Interface;
use super::super::terms::Server;
use super::*;
use crate::mac::Mac;
use crate::netlink::Handle;
use crate::netns::NetnsId;

/// Time limit for an action that does not wait.
const AT_ONCE: Duration = Duration::from_secs(20);

fn owner(name: &str) -> Owner {
    Owner { container_id: name.to_owned(), ifname: "net1".to_owned() }
}

/// A lease without end, of a pod that is gone.
fn record(name: &str) -> Record {
    record_of(&owner(name))
}

fn record_of(owner: &Owner) -> Record {
    let config = serde_json::from_value(json!({"network": "lan", "wanted": [1]})).unwrap();
    let netns_id = NetnsId { device: 4, inode: 5 };
    let (netns, netns_cookie) = ("/nonexistent".into(), None);
    let interface = Interface { mac: Mac([2; 6]), index: 3, netns, netns_id, netns_cookie };
    let server = Server { address: [10, 1, 0, 1].into(), mac: Mac([2, 0, 0, 0, 0, 1]) };
    let address = [10, 1, 0, 7].into();
    let boot = moment::boot_id().unwrap();
    let mut record = Record::new(owner, &config, &interface, &boot, (address, server));
    let (since, seconds, renew, rebind) = (1000, u32::MAX, 30_000, 50_000);
    record.terms = Some(Terms { address, prefix: 24, server, since, seconds, renew, rebind });
    record
}

fn lose(shared: &Shared, name: &str) {
    let number = locked(&shared.state).held[&owner(name)].number;
    shared.change(&owner(name), number, |held| {
        held.record.lost = Some("refused".to_owned());
        held.record.is_taken = true;
    });
}

/// Whether the condition becomes true in time.
fn becomes(is_true: impl Fn() -> bool) -> bool {
    let end = now() + AT_ONCE;
    while now() < end {
        if is_true() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    is_true()
}

/// Rows: DHCP-disk.
#[test]
fn a_disk_that_hangs_keeps_nobody_waiting_but_who_writes() {
    let root = tempfile::tempdir().unwrap();
    let leases = Leases::open(root.path()).unwrap();
    leases.shared.begin(record("a")).unwrap();
    let file = fs::read_dir(root.path()).unwrap().next().unwrap().unwrap().path();
    leases.shared.begin(record("b")).unwrap();
    // The temporary file of a record, here a FIFO: it opens only once it has a reader.
    let fifo = file.with_extension("new");
    mkfifoat(CWD, &fifo, Mode::RUSR | Mode::WUSR).unwrap();
    let (tell, told) = mpsc::channel();
    let shared = Arc::clone(&leases.shared);
    std::thread::spawn(move || {
        // Like the thread that renews, with a request after it.
        lose(&shared, "a");
        lose(&shared, "b");
        let leases = Leases { shared };
        let checked = leases.check(&owner("b"), &[]).map_err(|error| error.to_string());
        tell.send((checked, leases.troubles().len())).unwrap();
        std::mem::forget(leases);
    });
    let lost = "the lease of 10.1.0.7 by dhcp is lost: refused".to_owned();
    assert_eq!(told.recv_timeout(AT_ONCE).unwrap(), (Err(lost), 2));

    let is_written = || {
        let found = Directory::open(root.path()).unwrap().1;
        found.records.iter().any(|record| record.owner() == owner("b") && record.lost.is_some())
    };
    assert!(!is_written(), "one after the other");
    drop(fs::File::open(&fifo).unwrap());
    assert!(becomes(is_written));
}

/// A restart would otherwise take the lease for an expired one.
///
/// Rows: DHCP-disk.
#[test]
fn what_cannot_be_written_is_tried_again_and_told_until_it_is() {
    let root = tempfile::tempdir().unwrap();
    let leases = Leases::open(root.path()).unwrap();
    leases.shared.begin(record("a")).unwrap();
    let file = leases.file(&owner("a"));
    // The directory cannot be written, like a full disk.
    let obstacle = file.with_extension("new");
    fs::create_dir(&obstacle).unwrap();
    let number = locked(&leases.shared.state).held[&owner("a")].number;
    leases.shared.change(&owner("a"), number, |held| held.record.index = 7);
    let told = |leases: &Leases| leases.troubles().into_iter().map(|it| it.problem).collect::<Vec<_>>();
    assert!(becomes(|| !told(&leases).is_empty()));
    let said =
        format!("lease of 10.1.0.7: not written, which is tried again: write lease {}: ", file.display());
    let [problem] = <[String; 1]>::try_from(told(&leases)).unwrap();
    assert!(problem.starts_with(&said), "{problem}");
    let read = || serde_json::from_slice::<Record>(&fs::read(&file).unwrap()).unwrap();
    assert_eq!(read(), record("a"));
    fs::remove_dir(&obstacle).unwrap();
    assert!(becomes(|| told(&leases).is_empty()));
    let mut changed = record("a");
    changed.index = 7;
    assert_eq!(read(), changed);
}

#[test]
fn what_is_given_back_is_not_written_again() {
    let root = tempfile::tempdir().unwrap();
    let leases = Leases::open(root.path()).unwrap();
    leases.shared.begin(record("a")).unwrap();
    let number = locked(&leases.shared.state).held[&owner("a")].number;
    lose(&leases.shared, "a");
    leases.release(&owner("a")).unwrap();
    leases.shared.write(&owner("a"), number).unwrap();
    assert!(becomes(|| locked(&leases.shared.state).jobs.is_empty()));
    assert_eq!(Directory::open(root.path()).unwrap().1, Found::default());
}

#[test]
fn who_wants_to_know_is_told_of_a_lease_that_is_lost() {
    let root = tempfile::tempdir().unwrap();
    let leases = Leases::open(root.path()).unwrap();
    let (tell, told) = mpsc::channel();
    leases.when_lost(move |owner| tell.send(owner.clone()).unwrap());
    leases.shared.begin(record("a")).unwrap();
    assert_eq!(leases.lost(), []);
    let number = locked(&leases.shared.state).held[&owner("a")].number;
    leases.shared.enqueue(owner("a"), number, Job::Lose("refused".to_owned()));
    assert_eq!(told.recv_timeout(AT_ONCE).unwrap(), owner("a"));
    assert_eq!(leases.lost(), [owner("a")]);
    let [trouble] = <[Trouble; 1]>::try_from(leases.troubles()).unwrap();
    assert_eq!(trouble.owner, owner("a"));
}

#[test]
fn a_file_that_cannot_be_read_is_named_as_long_as_it_is_there() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("x.json");
    fs::write(&file, "{").unwrap();
    let leases = Leases::open(root.path()).unwrap();
    assert_eq!(leases.unreadable().map(|(path, _)| path).collect::<Vec<_>>(), [&file]);
    fs::remove_file(&file).unwrap();
    assert_eq!(leases.unreadable().count(), 0);
}

/// The file also does not prevent its pod from being detached, or created again.
#[test]
fn a_file_that_cannot_be_read_gives_way_to_the_next_lease_and_goes_with_a_del() {
    for content in ["", "{", "{\"version\":1"] {
        let root = tempfile::tempdir().unwrap();
        let file = Leases::open(root.path()).unwrap().file(&owner("a"));
        let spoiled = || {
            fs::write(&file, content).unwrap();
            let leases = Leases::open(root.path()).unwrap();
            assert_eq!(leases.unreadable().count(), 1, "{content}");
            assert!(!leases.is_known(&owner("a")));
            leases
        };
        let leases = spoiled();
        leases.release(&owner("a")).unwrap();
        assert!(!file.exists(), "{content}");
        assert_eq!(leases.unreadable().count(), 0, "{content}");
        let leases = spoiled();
        leases.shared.begin(record("a")).unwrap();
        assert!(leases.is_known(&owner("a")));
        assert_eq!(leases.unreadable().count(), 0, "{content}: it can be read now");
    }
}

/// Rows: DHCP-lost.
#[test]
fn an_add_is_not_answered_by_a_lease_that_is_lost_or_over() {
    let root = tempfile::tempdir().unwrap();
    let leases = Leases::open(root.path()).unwrap();
    let checked = |name: &str| leases.check_in_force(&owner(name)).map_err(|error| error.to_string());
    assert_eq!(
        checked("a"),
        Err("interface net1 of container a has no lease of any address by dhcp".to_owned())
    );
    leases.shared.begin(record("a")).unwrap();
    assert_eq!(checked("a"), Ok(()));
    lose(&leases.shared, "a");
    let lost =
        |why: &str| Err(format!("the lease of 10.1.0.7 by dhcp was lost before the pod was attached: {why}"));
    assert_eq!(checked("a"), lost("refused"));
    let mut over = record("b");
    over.terms = over.terms.map(|terms| Terms { seconds: 4, renew: 2000, rebind: 3000, ..terms });
    leases.shared.begin(over).unwrap();
    assert_eq!(checked("b"), lost(OVER));
    let error = leases.check_in_force(&owner("b")).unwrap_err();
    assert_eq!(error.failure(), crate::ipam::Failure::TryLater);
}

#[test]
fn what_a_container_has_is_found_and_given_back_but_for_the_interfaces_that_are_kept() {
    let root = tempfile::tempdir().unwrap();
    let leases = Leases::open(root.path()).unwrap();
    let second = Owner { ifname: "net2".to_owned(), ..owner("a") };
    for of in [owner("a"), second.clone(), owner("aa"), owner("b")] {
        leases.shared.begin(record_of(&of)).unwrap();
    }
    let held = || locked(&leases.shared.state).held.keys().cloned().collect::<Vec<_>>();
    let kept = ["net1".to_owned()];
    let address = Some(Ipv4Addr::new(10, 1, 0, 7));
    assert_eq!([leases.held_by("a", &kept), leases.held_by("aa", &kept)], [address, None]);
    leases.release_container("a", &kept).unwrap();
    assert_eq!(held(), [owner("a"), owner("aa"), owner("b")]);
    assert_eq!(leases.held_by("a", &kept), None);
    leases.release_container("a", &[]).unwrap();
    assert_eq!(held(), [owner("aa"), owner("b")]);
    assert!(!leases.file(&second).exists());
}

/// A pod's namespace, whose loopback has the address of the lease, and the lease.
fn of_live_pod() -> (Netns, Record) {
    let netns = Netns::private().unwrap();
    let mut record = record("a");
    record.netns = format!("/proc/self/fd/{}", netns.as_fd().as_raw_fd()).into();
    record.netns_id = netns.id();
    record.netns_cookie = netns.cookie().unwrap();
    record.index = 1;
    Handle::open_in(&netns).unwrap().ensure_address(1, "10.1.0.7/24".parse().unwrap()).unwrap();
    (netns, record)
}

/// The kernel gives the next namespace the lowest free number. Needs root, like the agent.
#[test]
fn another_namespace_at_the_pods_path_is_not_the_pods_though_it_has_its_number() {
    let (_netns, mut record) = of_live_pod();
    assert!(open_namespace(&record).is_ok());
    // Before Linux 5.14 a namespace has none, nor has a record of earlier versions.
    let cookie = record.netns_cookie.take();
    assert!(open_namespace(&record).is_ok());
    let Some(cookie) = cookie else { return };
    record.netns_cookie = Some(cookie + 1);
    assert!(matches!(open_namespace(&record), Err(Error::NoNamespace)));
}

/// What has the path, the number and the index now is another pod's. Needs root, like the agent.
#[test]
fn a_lease_of_an_earlier_boot_is_forgotten_and_nothing_is_done_in_any_pod() {
    for (boot, left) in [(moment::boot_id().unwrap(), 0), ("earlier".to_owned(), 1)] {
        let (netns, mut record) = of_live_pod();
        record.boot = boot;
        let root = tempfile::tempdir().unwrap();
        let leases = Leases::open(root.path()).unwrap();
        leases.shared.begin(record).unwrap();
        leases.release(&owner("a")).unwrap();
        let addresses = Handle::open_in(&netns).unwrap().addresses(1).unwrap();
        assert_eq!(addresses.len(), left, "{addresses:?}");
        assert!(!leases.is_known(&owner("a")));
    }
}

/// The next agent continues with that server, and a DEL releases the lease there.
///
/// Rows: DHCP-renew.
#[test]
fn another_server_that_has_extended_a_lease_is_kept_with_it() {
    let root = tempfile::tempdir().unwrap();
    let leases = Leases::open(root.path()).unwrap();
    leases.shared.begin(record("a")).unwrap();
    let another = Server { address: [10, 1, 0, 2].into(), mac: Mac([2, 0, 0, 0, 0, 2]) };
    let extended = record("a").terms.map(|terms| Terms { server: another, ..terms }).unwrap();
    let number = locked(&leases.shared.state).held[&owner("a")].number;
    leases.shared.change(&owner("a"), number, |held| held.give(&extended));
    let is_written = || {
        let found = Directory::open(root.path()).unwrap().1.records;
        let servers = |record: &Record| (record.server, record.terms.map(|terms| terms.server));
        found.iter().map(servers).eq([(another, Some(another))])
    };
    assert!(becomes(is_written));
}
