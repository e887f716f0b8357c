//! Directories that another process changes, replaces or locks, and threads that use one at the same time.

use super::*;
use crate::ipam::Failure;

#[test]
fn a_directory_that_is_replaced_is_looked_at_anew() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), json!([[{"subnet": "10.0.0.0/29"}]]));
    let leases = Leases::default();
    leases.allocate(&config, &owner("a", "eth0")).unwrap();
    fs::remove_dir_all(config.directory()).unwrap();
    let again = leases.allocate(&config, &owner("a", "eth0")).unwrap();
    assert_eq!(addresses(&again), ["10.0.0.2/29"]);
    fs::rename(config.directory(), dir.path().join("old")).unwrap();
    assert_eq!(leases.release(&config, &owner("a", "eth0"), &[]).unwrap(), 0);
    assert!(dir.path().join("old/10.0.0.2").exists());
}

#[test]
fn changes_by_others_are_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), json!([[{"subnet": "10.0.0.0/24"}]]));
    let leases = Leases::default();
    // Without a pause, so within one tick of the clock that stamps directories.
    for round in 0..100 {
        let lease = leases.allocate(&config, &owner("ours", "eth0")).unwrap();
        let next = config.directory().join(format!("10.0.0.{}", 2 + (round * 2 + 1) % 253));
        fs::write(&next, "theirs\r\neth0").unwrap();
        assert_eq!(leases.release(&config, &owner("theirs", "eth0"), &[]).unwrap(), 1, "{round} {lease:?}");
        fs::write(&next, "theirs\r\neth1").unwrap();
        fs::remove_file(&next).unwrap();
        fs::write(&next, "theirs\r\neth2").unwrap();
        assert_eq!(leases.release(&config, &owner("theirs", "eth1"), &[]).unwrap(), 0, "{round}");
        assert_eq!(leases.release(&config, &owner("theirs", "eth2"), &[]).unwrap(), 1, "{round}");
        assert_eq!(leases.release(&config, &owner("ours", "eth0"), &[]).unwrap(), 1, "{round}");
        fs::write(
            config.directory().join("last_reserved_ip.0"),
            format!("10.0.0.{}", 2 + (round * 2 + 1) % 253),
        )
        .unwrap();
    }
}

#[test]
fn a_lock_held_elsewhere_is_waited_for_until_the_deadline() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), json!([[{"subnet": "10.0.0.0/24"}]]));
    allocate(&config, &owner("a", "eth0"));
    let lock = fs::File::open(config.directory().join("lock")).unwrap();
    lock.lock().unwrap();
    let error =
        Leases::with_deadline(Duration::from_millis(20)).allocate(&config, &owner("b", "eth0")).unwrap_err();
    assert_eq!(error.failure(), Failure::TryLater);
    let path = config.directory().join("lock");
    assert_eq!(
        error.to_string(),
        format!("{0} is locked by another process; find it with: fuser {0}", path.display())
    );
    let waiting = std::thread::spawn({
        let config = config.clone();
        move || allocate(&config, &owner("b", "eth0"))
    });
    lock.unlock().unwrap();
    assert_eq!(addresses(&waiting.join().unwrap()), ["10.0.0.3/24"]);
}

#[test]
fn a_look_waits_neither_for_another_process_nor_for_a_thread_that_does() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), json!([[{"subnet": "10.0.0.0/24"}]]));
    let leases = Leases::default();
    leases.allocate(&config, &owner("a", "eth0")).unwrap();
    let lock = fs::File::open(config.directory().join("lock")).unwrap();
    lock.lock().unwrap();
    let look = || {
        let began = Instant::now();
        let looked = [
            leases.lacking(dir.path(), "net", &[]).map(drop),
            leases.usage(&config).map(drop),
            leases.survey(&config).map(drop),
            leases.holders(dir.path(), "net", Patience::Look).map(drop),
            leases.check_room(&config, Patience::Look),
        ];
        let busy = |looked: &Result<(), Error>| matches!(looked, Err(Error::Busy { .. }));
        assert!(looked.iter().all(busy), "{looked:?}");
        assert!(began.elapsed() < LOCK_DEADLINE / 2, "{:?}", began.elapsed());
    };
    look();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| leases.allocate(&config, &owner("b", "eth0")));
        let known = leases.known(&config.directory());
        while known.try_lock().is_ok() {
            std::thread::sleep(Duration::from_millis(1));
        }
        look();
        lock.unlock().unwrap();
        waits.join().unwrap().unwrap();
    });
    assert_eq!(leases.lacking(dir.path(), "net", &[]).unwrap().holders, [0; 0]);
}
