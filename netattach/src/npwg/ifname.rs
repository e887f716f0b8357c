//! Interface names of a pod's selections: requested names are kept, the others are `net1`, `net2`, ...

use std::collections::{BTreeMap, BTreeSet};

use super::Selection;

/// Longest interface name, in bytes: the kernel's `IFNAMSIZ` less the closing zero.
const LONGEST: usize = 15;

/// Two interfaces of one pod have the same name (section 4.1.2.1.5).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InterfaceNameError {
    /// Two selections request the same name.
    #[error("networks annotation elements {first} and {second} both ask for interface {name:?}")]
    AskedTwice {
        /// The name.
        name: String,
        /// Position of the earlier selection, from 0.
        first: usize,
        /// Position of the later selection, from 0.
        second: usize,
    },
    /// A selection requests the name of an interface that every pod has.
    #[error("networks annotation element {index} asks for interface {name:?}, which the pod already has")]
    Reserved {
        /// The name.
        name: String,
        /// Position of the selection, from 0.
        index: usize,
    },
}

/// Assigns each selection its interface name, in order.
///
/// A selection without a name gets `netN`, where N is its position from 1, or the next N not used by another interface
/// of the pod. `reserved` are the names in use before the first selection: `lo` and the default network's interface.
///
/// # Errors
/// A name is requested twice, or is reserved.
pub fn interface_names(
    selections: &[Selection],
    reserved: &[&str],
) -> Result<Vec<String>, InterfaceNameError> {
    let mut asked = BTreeMap::new();
    for (index, selection) in selections.iter().enumerate() {
        let Some(name) = selection.interface.as_deref() else { continue };
        if reserved.contains(&name) {
            return Err(InterfaceNameError::Reserved { name: name.to_owned(), index });
        }
        if let Some(first) = asked.insert(name, index) {
            return Err(InterfaceNameError::AskedTwice { name: name.to_owned(), first, second: index });
        }
    }
    let mut taken: BTreeSet<String> =
        asked.into_keys().chain(reserved.iter().copied()).map(str::to_owned).collect();
    let mut names = Vec::with_capacity(selections.len());
    for (index, selection) in selections.iter().enumerate() {
        let name = match &selection.interface {
            Some(name) => name.clone(),
            None => first_free(index + 1, &taken),
        };
        taken.insert(name.clone());
        names.push(name);
    }
    Ok(names)
}

fn first_free(mut number: usize, taken: &BTreeSet<String>) -> String {
    loop {
        let name = format!("net{number}");
        if !taken.contains(&name) {
            return name;
        }
        number += 1;
    }
}

/// Whether the kernel accepts `name` for a link unchanged.
///
/// Stricter than the kernel in one point: only printable ASCII, since such names are typed and logged. `%` is refused
/// because the kernel would read it as a pattern, `all` and `default` because sysctl reserves them.
pub(crate) fn is_interface_name(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= LONGEST
        && !matches!(name, "." | ".." | "all" | "default")
        && name.bytes().all(|b| b.is_ascii_graphic() && !matches!(b, b'/' | b':' | b'%'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::npwg::NetworkRef;

    fn asking(names: &[Option<&str>]) -> Vec<Selection> {
        let network = || NetworkRef::new("default", "net-a");
        names
            .iter()
            .map(|name| Selection { interface: name.map(str::to_owned), ..Selection::of(network()) })
            .collect()
    }

    /// Rows: NPWG-4.2-twice, NPWG-4.2.1-tuple-unique.
    #[test]
    fn names_follow_the_position_and_avoid_every_other_name() {
        let reserved = ["lo", "eth0"];
        type Row<'a> = (&'a str, &'a [Option<&'a str>], &'a [&'a str]);
        let table: &[Row<'_>] = &[
            ("NPWG-4.2-twice", &[None, None], &["net1", "net2"]),
            ("explicit names count as positions", &[Some("if0"), None], &["if0", "net2"]),
            ("NPWG-4.2.1-tuple-unique", &[None, None, Some("net2")], &["net1", "net3", "net2"]),
            ("QK-21", &[Some("net2"), None], &["net2", "net3"]),
            (
                "a generated name is taken too",
                &[Some("net3"), Some("net2"), None, None],
                &["net3", "net2", "net4", "net5"],
            ),
            ("no selection", &[], &[]),
        ];
        for (row, asked, expected) in table {
            assert_eq!(interface_names(&asking(asked), &reserved).unwrap(), *expected, "{row}");
        }
    }

    #[test]
    fn generated_names_avoid_reserved_ones() {
        assert_eq!(interface_names(&asking(&[None]), &["net1"]).unwrap(), ["net2"]);
    }

    /// Rows: NPWG-4.1.2.1.5-ifname-dup.
    #[test]
    fn a_name_twice_or_a_reserved_name_is_refused() {
        assert_eq!(
            interface_names(&asking(&[Some("net7"), None, Some("net7")]), &[]),
            Err(InterfaceNameError::AskedTwice { name: "net7".to_owned(), first: 0, second: 2 })
        );
        assert_eq!(
            interface_names(&asking(&[None, Some("eth0")]), &["lo", "eth0"]),
            Err(InterfaceNameError::Reserved { name: "eth0".to_owned(), index: 1 })
        );
    }

    /// Rows: NPWG-4.1.2.1.5-ifname-invalid, EXT-short-ifname-limits.
    #[test]
    fn interface_names_are_what_the_kernel_takes() {
        for good in ["eth0.100", "my_if", "NET1", "a", "fifteen-bytes-x", "@home"] {
            assert!(is_interface_name(good), "{good}");
        }
        for bad in
            ["", ".", "..", "sixteen-bytes-xx", "a/b", "a b", "a\tb", "a:b", "eth%d", "all", "default", "é"]
        {
            assert!(!is_interface_name(bad), "{bad}");
        }
    }
}
