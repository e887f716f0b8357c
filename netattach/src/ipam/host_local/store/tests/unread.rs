//! Reservations that cannot be read: their owners are unknown, and their addresses are neither given away nor left
//! taken.

use rustix::io::Errno;

use super::*;
use crate::ipam::Failure;
use crate::ipam::host_local::withheld::Withheld;

/// Otherwise a DEL would succeed and leave the address taken for ever, and so would the next ones: the directory was
/// remembered as one of files that nobody can read.
#[test]
fn a_reservation_that_cannot_be_opened_for_the_moment_is_not_nobodys() {
    const ALONE: &str = "NETATTACH_TEST_ALONE";
    if std::env::var_os(ALONE).is_none() {
        // The limit of open files is that of the process.
        let (_, module) = module_path!().split_once("::").unwrap();
        let name = format!("{module}::a_reservation_that_cannot_be_opened_for_the_moment_is_not_nobodys");
        let mut alone = std::process::Command::new(std::env::current_exe().unwrap());
        let output = alone.args(["--exact", &name, "--nocapture"]).env(ALONE, "1").output().unwrap();
        let [out, err] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
        assert!(out.contains("1 passed"), "{out}{err}");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), json!([[{"subnet": "10.0.0.0/29"}]]));
    let a = owner("a", "eth0");
    allocate(&config, &a);
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let few = rustix::process::Rlimit { current: Some(64), ..limit };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, few).unwrap();
    let mut taken: Vec<fs::File> = std::iter::from_fn(|| fs::File::open("/dev/null").ok()).collect();
    // There is none for the directory, then none for its lock, to list it, and for the reservation.
    for unread in ["net", "lock", "net", "10.0.0.2"] {
        let leases = Leases::default();
        let release = || leases.release(&config, &a, &[]);
        let error = release().unwrap_err();
        assert!(error.failure() == Failure::Io && error.to_string().ends_with(unread), "{error}");
        if unread == "10.0.0.2" {
            // As many as the directory, its lock and its list take. The other addresses are given meanwhile.
            taken.truncate(taken.len() - 2);
            assert_eq!(addresses(&allocate(&config, &owner("b", "eth0"))), ["10.0.0.3/29"]);
            taken.clear();
            assert_eq!(release().unwrap(), 1);
        }
        taken.pop();
    }
}

/// A pool with an IPv4 and an IPv6 range, and two owners with their addresses.
fn of_two(data_dir: &Path) -> (Config, [(Owner, Vec<IpAddr>); 2]) {
    let config = config(data_dir, json!([[{"subnet": "10.0.0.0/24"}], [{"subnet": "fd00::/112"}]]));
    let holders = ["a", "b"].map(|id| {
        let owner = owner(id, "eth0");
        let lease = allocate(&config, &owner);
        (owner, lease.addresses.iter().map(|(address, _)| address.addr()).collect())
    });
    (config, holders)
}

/// Otherwise it stays taken for ever: the DEL succeeds, and is not repeated.
#[test]
fn a_release_fails_as_long_as_an_address_of_its_record_cannot_be_read_and_for_no_other() {
    let dir = tempfile::tempdir().unwrap();
    let (config, [(a, of_a), (b, of_b)]) = of_two(dir.path());
    let file = |address: &IpAddr| config.directory().join(address.to_string());
    let withheld = Withheld::new(&file(&of_a[1]));
    let leases = Leases::default();
    let release = |owner: &Owner, recorded: &[IpAddr]| leases.release(&config, owner, recorded);
    for _ in 0..2 {
        let error = release(&a, &of_a).unwrap_err();
        let unread = file(&of_a[1]);
        assert!(matches!(&error, Error::Read { path, .. } if *path == unread), "{error}");
        assert!(!file(&of_a[0]).exists(), "the other one is released");
    }
    leases.check(dir.path(), "net", &b, &of_b).unwrap();
    let error = leases.check(dir.path(), "net", &a, &of_a[1..]).unwrap_err();
    assert!(matches!(error, Error::Read { .. }), "{error}");
    let error = leases.check(dir.path(), "net", &b, &of_a[..1]).unwrap_err();
    assert!(matches!(error, Error::NotReserved { .. }), "{error}");
    assert_eq!(release(&b, &of_b).unwrap(), 2);
    assert_eq!(release(&b, &of_b).unwrap(), 0, "none of its own is unread");
    let error = release(&b, &[]).unwrap_err();
    assert!(matches!(error, Error::Read { .. }), "without a record it may be its own: {error}");
    drop(withheld);
    assert_eq!(release(&a, &of_a).unwrap(), 1);
    assert!(!file(&of_a[1]).exists());
}

/// As after a kill between the files and the record, whose agent finds one of them unread when it starts again.
#[test]
fn a_release_without_a_record_fails_until_an_address_of_each_set_was_looked_for() {
    let dir = tempfile::tempdir().unwrap();
    let (config, [(a, of_a), (b, of_b)]) = of_two(dir.path());
    let file = |address: &IpAddr| config.directory().join(address.to_string());
    let withheld = Withheld::new(&file(&of_a[1]));
    let leases = Leases::default();
    for _ in 0..2 {
        let error = leases.release(&config, &a, &[]).unwrap_err();
        let unread = file(&of_a[1]);
        assert!(matches!(&error, Error::Read { path, .. } if *path == unread), "{error}");
        assert!(!file(&of_a[0]).exists(), "the other one is released");
    }
    assert_eq!(leases.release(&config, &b, &[]).unwrap(), of_b.len(), "it has one of each");
    drop(withheld);
    assert_eq!(leases.release(&config, &a, &[]).unwrap(), 1);
    assert!(!file(&of_a[1]).exists());
}

#[test]
fn of_a_pool_with_a_reservation_that_cannot_be_read_all_others_are_taken_again() {
    let dir = tempfile::tempdir().unwrap();
    let (config, holders) = of_two(dir.path());
    let [(a, of_a), (b, of_b)] = &holders;
    let file = |address: &IpAddr| config.directory().join(address.to_string());
    let withheld = Withheld::new(&file(&of_a[0]));
    let leases = Leases::default();
    let look = || {
        let Lacking { holders, unread } = leases.lacking(dir.path(), "net", &holders).unwrap();
        (holders, unread.iter().map(|error| Chain(error).to_string()).collect::<Vec<_>>())
    };
    let unread = format!("read {}: {}", file(&of_a[0]).display(), io::Error::from(Errno::AGAIN));
    assert_eq!(look(), (vec![], vec![unread.clone()]));
    for address in [&of_a[1], &of_b[0]] {
        fs::remove_file(file(address)).unwrap();
    }
    assert_eq!(look(), (vec![0, 1], vec![unread.clone()]));
    let restore =
        |owner: &Owner, addresses: &[IpAddr]| leases.restore(dir.path(), "net", owner, addresses).unwrap();
    assert_eq!(restore(a, of_a), of_a[1..]);
    assert_eq!(restore(b, of_b), of_b[..1]);
    assert_eq!(look(), (vec![], vec![unread]));
    drop(withheld);
    assert_eq!(look(), (vec![], vec![]));
    leases.check(dir.path(), "net", a, of_a).unwrap();
}
