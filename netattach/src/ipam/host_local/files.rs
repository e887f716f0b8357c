//! The files of a directory whose names are addresses, by address and by what is in them.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

/// State of a file whose name is an address.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum File {
    /// Its content, trimmed.
    Held(Arc<[u8]>),
    /// No content: the writer died.
    Abandoned,
    /// Not a regular file, too long, or not to be read, by anybody or for the moment: the address is not handed out.
    Unreadable,
}

/// The files of a directory.
#[derive(Debug, Default)]
pub(super) struct Files {
    by_address: HashMap<IpAddr, File>,
    /// The addresses with each content, in no order, so that a lookup does not search all files.
    by_content: HashMap<Arc<[u8]>, Vec<IpAddr>>,
}

impl Files {
    pub(super) fn get(&self, address: IpAddr) -> Option<&File> {
        self.by_address.get(&address)
    }

    /// All of them, in no order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&IpAddr, &File)> {
        self.by_address.iter()
    }

    /// The addresses whose files have that content, in order.
    pub(super) fn with_content(&self, content: &[u8]) -> Vec<IpAddr> {
        let mut addresses = self.by_content.get(content).cloned().unwrap_or_default();
        addresses.sort_unstable();
        addresses
    }

    pub(super) fn insert(&mut self, address: IpAddr, file: File) {
        self.remove(address);
        if let File::Held(content) = &file {
            self.by_content.entry(Arc::clone(content)).or_default().push(address);
        }
        self.by_address.insert(address, file);
    }

    pub(super) fn remove(&mut self, address: IpAddr) {
        let Some(File::Held(content)) = self.by_address.remove(&address) else { return };
        if let Some(addresses) = self.by_content.get_mut(&content) {
            addresses.retain(|other| *other != address);
            if addresses.is_empty() {
                self.by_content.remove(&content);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(text: &str) -> File {
        File::Held(text.as_bytes().into())
    }

    #[test]
    fn addresses_are_found_by_content_as_long_as_they_have_it() {
        let [first, second, third] = [1, 2, 3].map(|last| IpAddr::from([10, 0, 0, last]));
        let mut files = Files::default();
        files.insert(second, held("a"));
        files.insert(first, held("a"));
        files.insert(third, File::Abandoned);
        assert_eq!(files.with_content(b"a"), [first, second]);
        files.insert(second, held("b"));
        files.insert(third, held("b"));
        assert_eq!((files.with_content(b"a"), files.with_content(b"b")), (vec![first], vec![second, third]));
        files.remove(first);
        files.remove(first);
        assert_eq!((files.with_content(b"a"), files.get(first)), (vec![], None));
        assert_eq!((files.by_content.len(), files.iter().count()), (1, 2));
    }
}
