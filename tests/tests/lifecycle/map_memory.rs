//! The memory of a started agent's maps as the kernel reports it, compared with `docs/budgets.md`.

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::AsRawFd;

use netattach::bpf::sys;
use netattach_tests::Node;
use netattach_tests::map_memory::documented;
use netattach_tests::tools::report_skipped;
use serde_json::json;

/// Since Linux 6.4 `memlock` is a map's actual memory; before, its maximum was computed in another way.
const RECKONED_SINCE: (u32, u32) = (6, 4);
/// The kernel's memory for a map besides its entries: its own description, locks of a few buckets, pages of a ring.
const EACH: u64 = 20 << 10;

fn possible_cpus() -> u64 {
    let ranges = fs::read_to_string("/sys/devices/system/cpu/possible").unwrap();
    let last = ranges.trim().rsplit([',', '-']).next().unwrap();
    last.parse::<u64>().unwrap() + 1
}

#[test]
fn the_maps_take_the_memory_that_the_documents_say() {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let mut numbers = release.split(['.', '-']).map_while(|part| part.parse().ok());
    let version: (u32, u32) = (numbers.next().unwrap(), numbers.next().unwrap());
    if version < RECKONED_SINCE {
        return report_skipped("the memory of the maps", "this kernel does not reckon it; Linux 6.4 does");
    }
    let mut node = Node::new(&[]).unwrap();
    node.set("maxAttachments", json!(8192));
    node.start().unwrap();
    let layout = fs::read_dir(node.bpffs()).unwrap().next().unwrap().unwrap().path();
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(layout).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            continue;
        }
        let map = sys::open_pin(&path).unwrap();
        let text = fs::read_to_string(format!("/proc/self/fdinfo/{}", map.as_raw_fd())).unwrap();
        let bytes: u64 =
            text.lines().find_map(|line| line.strip_prefix("memlock:")).unwrap().trim().parse().unwrap();
        found.insert(path.file_name().unwrap().to_string_lossy().into_owned(), bytes);
    }
    let cpus = possible_cpus();
    let mut documented: BTreeMap<String, u64> =
        documented().into_iter().map(|(map, [at_start, _])| (map, at_start.with(cpus))).collect();
    let total = documented.remove("all").unwrap();
    assert_eq!(found.keys().collect::<Vec<_>>(), documented.keys().collect::<Vec<_>>());
    for (map, bytes) in &found {
        let said = documented[map] * 1024;
        assert!(*bytes <= said + EACH && said <= bytes + 1024, "{map}: {bytes} bytes, not some {said}");
    }
    let sum: u64 = found.values().sum();
    let said = total * 1024;
    assert!(sum.abs_diff(said) <= EACH * found.len() as u64, "all: {sum} bytes, not some {said}");
    node.stop().unwrap();
}
