//! The memory of the BPF maps according to `docs/budgets.md`; a test in `netattach` checks the page itself.

use std::collections::BTreeMap;

/// KiB of a map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kib {
    fixed: u64,
    each: u64,
}

impl Kib {
    /// Returns the memory for that many possible processors.
    pub fn with(self, processors: u64) -> u64 {
        self.fixed + self.each * processors
    }

    /// `64 + 2816 a CPU`, or without the second part.
    fn read(cell: &str) -> Option<Self> {
        let (fixed, each) = cell.split_once('+').unwrap_or((cell, "0 a CPU"));
        let each = each.trim().strip_suffix(" a CPU")?;
        Some(Self { fixed: fixed.trim().parse().ok()?, each: each.parse().ok()? })
    }
}

/// By map, at the start and when it is full; `all` is their sum.
///
/// # Panics
/// The page has no such table.
pub fn documented() -> BTreeMap<String, [Kib; 2]> {
    let page = include_str!("../../docs/budgets.md");
    let section = page.split("\n## ").find(|section| section.starts_with("Memory of the BPF maps"));
    let rows = section.expect("the page has the section").lines();
    let rows = rows.filter(|line| line.starts_with("| `na_") || line.starts_with("| all"));
    let row = |row: &str| {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [name, .., at_start, full] = cells[..] else { panic!("no row of a map: {row}") };
        let read = |cell| Kib::read(cell).unwrap_or_else(|| panic!("no number of KiB: {cell}"));
        (name.trim_matches('`').to_owned(), [read(at_start), read(full)])
    };
    rows.map(row).collect()
}
