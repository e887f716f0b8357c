//! A directory in memory. Names and contents are apart, as inodes are: a file that is open stays the same file
//! whatever becomes of its name. Every operation is a step of its own, before which any other thread may run.

use std::collections::BTreeMap;
use std::io;

use crate::journal::files::{Appended, Files};
use crate::sync::{Arc, Mutex, locked};

type Content = Arc<Mutex<Vec<u8>>>;

/// A directory; clones are the same one.
#[derive(Debug, Clone, Default)]
pub(super) struct Disk(Arc<Mutex<BTreeMap<String, Content>>>, Arc<Mutex<bool>>);

#[derive(Debug)]
struct Open(Content);

impl Disk {
    /// From now on names cannot be removed, or can again.
    pub(super) fn keep_names(&self, keeps: bool) {
        *locked(&self.1) = keeps;
    }

    /// Gives a file another name, which may be taken only if it is to be replaced.
    pub(super) fn rename(&self, from: &str, to: &str, replace: bool) -> io::Result<()> {
        let mut names = locked(&self.0);
        if !replace && names.contains_key(to) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let content = names.remove(from).ok_or(io::ErrorKind::NotFound)?;
        names.insert(to.to_owned(), content);
        Ok(())
    }
}

impl Files for Disk {
    fn create(&self, name: &str) -> io::Result<Box<dyn Appended>> {
        let mut names = locked(&self.0);
        if names.contains_key(name) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let content = Content::default();
        names.insert(name.to_owned(), Arc::clone(&content));
        Ok(Box::new(Open(content)))
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn Appended>> {
        let content = locked(&self.0).get(name).cloned();
        Ok(Box::new(Open(content.ok_or(io::ErrorKind::NotFound)?)))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        if *locked(&self.1) {
            return Err(io::ErrorKind::ReadOnlyFilesystem.into());
        }
        locked(&self.0).remove(name);
        Ok(())
    }

    fn list(&self) -> io::Result<Vec<String>> {
        Ok(locked(&self.0).keys().cloned().collect())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}

impl Appended for Open {
    fn read(&mut self) -> io::Result<Vec<u8>> {
        Ok(locked(&self.0).clone())
    }

    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut content = locked(&self.0);
        let offset = offset as usize;
        let end = content.len().max(offset + bytes.len());
        content.resize(end, 0);
        content[offset..offset + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn cut(&mut self, length: u64) -> io::Result<()> {
        locked(&self.0).truncate(length as usize);
        Ok(())
    }

    fn again(&self) -> io::Result<Box<dyn Appended>> {
        Ok(Box::new(Open(Arc::clone(&self.0))))
    }

    fn sync(&mut self) -> io::Result<()> {
        Ok(())
    }
}
