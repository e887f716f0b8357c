//! Compares the table of map memory in `docs/budgets.md` with the maps that the agent creates.
//!
//! The sizes are computed as the kernel does (`map_mem_usage` since Linux 6.4, `memlock` in
//! `/proc/PID/fdinfo/FD`), without the few hundred bytes of each map itself.

use super::*;

/// Bytes of a hash map's bucket, and bytes that the kernel adds to key and value of an element (`struct
/// bucket`, `struct htab_elem`).
const BUCKET: usize = 16;
const ELEMENT: usize = 48;
/// Bytes that the kernel adds to prefix and value of a trie's node (`struct lpm_trie_node`).
const NODE: usize = 24;
/// Bytes of a pointer in a per-CPU array.
const POINTER: usize = 8;

/// Memory of a map, in bytes.
struct Memory {
    /// Per entry.
    entry: usize,
    /// Per entry and CPU, in addition.
    entry_per_cpu: usize,
    /// Allocated at creation.
    at_start: usize,
    at_start_per_cpu: usize,
    /// When the map is full, with one CPU.
    full: usize,
}

fn memory(spec: &MapSpec) -> Memory {
    let words = |bytes: usize| bytes.next_multiple_of(8);
    let (key, value, most) = (words(spec.key_size), words(spec.value_size), spec.max_entries as usize);
    let buckets = most.next_power_of_two() * BUCKET;
    let (entry, entry_per_cpu, at_start, at_start_per_cpu, full) = match spec.kind {
        MapKind::Hash => (ELEMENT + key + value, 0, buckets, 0, buckets + most * (ELEMENT + key + value)),
        MapKind::LruHash => {
            let all = buckets + most * (ELEMENT + key + value);
            (ELEMENT + key + value, 0, all, 0, all)
        }
        MapKind::Array | MapKind::SharedArray | MapKind::ProgramArray => {
            (value, 0, most * value, 0, most * value)
        }
        MapKind::PerCpuArray => (POINTER, value, most * POINTER, most * value, most * (POINTER + value)),
        MapKind::LpmTrie => {
            // The key begins with the length of the prefix, which is a field of the node.
            let entry = NODE + spec.key_size - size_of::<u32>() + spec.value_size;
            (entry, 0, 0, 0, most * entry)
        }
        MapKind::RingBuffer => (1, 0, most, 0, most),
    };
    Memory { entry, entry_per_cpu, at_start, at_start_per_cpu, full }
}

/// The setting that determines the number of entries: `maxAttachments` if the number grows with it.
fn follows(name: &str) -> String {
    let entries = |attachments: u32| {
        let config = Config { max_attachments: attachments, ..Config::new("/") };
        specs(&config).into_iter().find(|spec| spec.name == name).map_or(0, |spec| spec.max_entries)
    };
    match (entries(1000), entries(2000)) {
        (one, two) if one == two => "fixed".to_owned(),
        (1000, 2000) => "`maxAttachments`".to_owned(),
        (one, _) => format!("`maxAttachments` x {}", one / 1000),
    }
}

fn kib(bytes: usize, per_cpu: usize) -> String {
    let kib = |bytes: usize| bytes.div_ceil(1024);
    if per_cpu == 0 { kib(bytes).to_string() } else { format!("{} + {} a CPU", kib(bytes), kib(per_cpu)) }
}

fn rows() -> Vec<String> {
    let mut rows = Vec::new();
    let mut total = [0; 4];
    for spec in specs(&Config::new("/")) {
        let of = memory(&spec);
        let entry = match of.entry_per_cpu {
            0 => of.entry.to_string(),
            more => format!("{} + {more} a CPU", of.entry),
        };
        rows.push(format!(
            "| `{}` | {} | {} | {} | {} | {} |",
            spec.name,
            spec.max_entries,
            follows(spec.name),
            entry,
            kib(of.at_start, of.at_start_per_cpu),
            kib(of.full - of.at_start_per_cpu, of.at_start_per_cpu),
        ));
        let parts = [of.at_start, of.at_start_per_cpu, of.full - of.at_start_per_cpu, of.at_start_per_cpu];
        total.iter_mut().zip(parts).for_each(|(total, part)| *total += part);
    }
    let [start, per_cpu, full, _] = total;
    rows.push(format!("| all | | | | {} | {} |", kib(start, per_cpu), kib(full, per_cpu)));
    rows
}

#[test]
fn the_page_has_the_memory_of_every_map() {
    let page = include_str!("../../../docs/budgets.md");
    let section = page.split("\n## ").find(|section| section.starts_with("Memory of the BPF maps")).unwrap();
    let found: Vec<&str> =
        section.lines().filter(|line| line.starts_with("| `na_") || line.starts_with("| all")).collect();
    let expected = rows();
    assert_eq!(found, expected, "docs/budgets.md, left, and the maps, right:\n{}", expected.join("\n"));
}
