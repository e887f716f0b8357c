//! The files of a pool, which the Go plugin and people write too.
//!
//! An error is fine. A panic or a hang is a finding; so is an address that is given out while a file assigns it to
//! another container, an address that its holder cannot release, and one that is taken from another holder.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use netattach::ipam::Owner;
use netattach::ipam::host_local::{self, Config};
use serde_json::json;

/// Names that files of a pool have; others are made of the input.
const NAMES: [&str; 11] = [
    "10.1.0.1",
    "10.1.0.2",
    "10.1.0.3",
    "10.1.0.6",
    "fd00::1",
    "fd00::2",
    "last_reserved_ip.0",
    "last_reserved_ip.1",
    "lock",
    ".netattach-reservation",
    ".netattach-reservation.1",
];

// Lines: a byte that chooses a name, then the content up to the next zero.
pub(crate) fn check(data: &[u8]) {
    let Directory(data_dir) = &Directory(directory());
    let pool = data_dir.join("net");
    let _ = fs::remove_dir_all(&pool);
    fs::create_dir_all(&pool).expect("a directory can be made");
    for file in data.split(|byte| *byte == 0).take(16) {
        let Some((name, content)) = file.split_first() else { continue };
        let _ = fs::write(pool.join(NAMES[usize::from(*name) % NAMES.len()]), content);
    }
    let before = held(&pool);
    let value = json!({"cniVersion": "1.1.0", "name": "net", "ipam": {"dataDir": data_dir,
        "ranges": [[{"subnet": "10.1.0.0/29"}], [{"subnet": "fd00::/126"}]]}});
    let config = Config::parse(value.as_object().expect("an object"), None).expect("a configuration");
    let owner = Owner { container_id: "cart".to_owned(), ifname: "eth0".to_owned() };
    let Ok(lease) = host_local::allocate(&config, &owner) else { return };
    // Without content: its writer died, and the address is free.
    let blank = |content: &Vec<u8>| content.iter().all(|byte| byte.is_ascii_whitespace() || *byte == 0);
    for (address, _) in &lease.addresses {
        let taken = before.get(&address.addr().to_string());
        assert!(taken.is_none_or(blank), "{address} was {taken:?}'s");
    }
    let expected: Vec<_> = lease.addresses.iter().map(|(address, _)| address.addr()).collect();
    host_local::check(data_dir, "net", &owner, &expected).expect("what was given is held");
    assert!(host_local::release(data_dir, "net", &owner).expect("it can be released") >= expected.len());
    let after = held(&pool);
    for (name, content) in &before {
        let ours = content.trim_ascii() == b"cart" || content.trim_ascii() == b"cart\r\neth0";
        assert!(ours || blank(content) || after.get(name) == Some(content), "{name}");
    }
}

/// Removed when dropped.
struct Directory(PathBuf);

impl Drop for Directory {
    fn drop(&mut self) {
        // A directory that stays does no harm.
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn directory() -> PathBuf {
    let memory = Path::new("/dev/shm");
    let base = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
    base.join(format!("netattach-fuzz-{}", std::process::id()))
}

/// Files whose names are addresses.
fn held(pool: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(pool).expect("the pool is there").filter_map(Result::ok);
    let named =
        entries.filter_map(|entry| entry.file_name().into_string().ok().map(|name| (name, entry.path())));
    named
        .filter(|(name, _)| name.parse::<std::net::IpAddr>().is_ok())
        .filter_map(|(name, path)| Some((name, fs::read(path).ok()?)))
        .collect()
}
