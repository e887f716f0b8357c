//! The names of a namespace's links, read without taking the kernel's lock of links.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read};

use super::{Handle, MOST_BYTES_IN_POD, OpenError};
use crate::netns::{Netns, within};

/// One line for each link, with the name before a colon, after two lines of headings
/// (`net/core/net-procfs.c`).
const FILE: &str = "/proc/thread-self/net/dev";
const HEADINGS: usize = 2;

impl Handle {
    /// Opens a handle in another namespace, as [`Handle::open_in`] does, and reads the names of the links
    /// there: `None` if they cannot be read or there are too many.
    pub fn open_with_names(netns: &Netns) -> Result<(Self, Option<BTreeSet<String>>), OpenError> {
        let opened = || Ok::<_, super::Error>((Self::open()?.bounded(), names().ok().flatten()));
        Ok(within(netns, opened)??)
    }
}

fn names() -> io::Result<Option<BTreeSet<String>>> {
    // Enough for a new pod; a file that reports no length would otherwise be read in steps.
    let mut text = String::with_capacity(4096);
    let most = MOST_BYTES_IN_POD as u64;
    File::open(FILE)?.take(most).read_to_string(&mut text)?;
    Ok((text.len() < MOST_BYTES_IN_POD).then(|| read(&text)))
}

/// A name has no colon and no space in it (`dev_valid_name`).
fn read(text: &str) -> BTreeSet<String> {
    let lines = text.lines().skip(HEADINGS);
    lines.filter_map(|line| Some(line.split_once(':')?.0.trim().to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_are_those_of_the_links() {
        let netns = Netns::private().unwrap();
        let dummy = |name: &str| crate::spec::Bridge {
            name: name.to_owned(),
            mtu: None,
            promiscuous: false,
            vlan_filtering: false,
        };
        let (mut handle, before) = Handle::open_with_names(&netns).unwrap();
        assert_eq!(before, Some(["lo".to_owned()].into()));
        for name in ["br0", "a-name-of-15-cs"] {
            handle.ensure_bridge(&dummy(name)).unwrap();
        }
        let names = handle.links().unwrap().into_iter().map(|link| link.name).collect();
        assert_eq!(Handle::open_with_names(&netns).unwrap().1, Some(names));
    }

    #[test]
    fn a_line_without_a_name_is_passed_over() {
        assert_eq!(
            read("a|b\nc|d\n  lo: 1 2\nnonsense\neth0:3"),
            ["eth0".to_owned(), "lo".to_owned()].into()
        );
    }
}
