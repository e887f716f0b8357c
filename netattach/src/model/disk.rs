//! A directory in memory that outlives the agents that have it open. Names and contents are separate, as with inodes:
//! an open file stays the same file even if its name is removed or changed. Every operation is a step of its own,
//! before which any other thread may run.

use std::collections::BTreeMap;
use std::io;

use super::life::Life;
use crate::journal::files::{Appended, Files};
use crate::sync::{Arc, Mutex, locked};

type Content = Arc<Mutex<Vec<u8>>>;

/// A directory; clones share its contents and belong to the same agent.
#[derive(Debug, Clone, Default)]
pub(super) struct Disk {
    names: Arc<Mutex<BTreeMap<String, Content>>>,
    keeps_names: Arc<Mutex<bool>>,
    life: Life,
}

#[derive(Debug)]
struct Open(Content, Life);

impl Disk {
    /// The same directory, opened by an agent with this life.
    pub(super) fn of(&self, life: &Life) -> Self {
        Self { life: life.clone(), ..self.clone() }
    }

    fn opened(&self, content: Content) -> Box<dyn Appended> {
        Box::new(Open(content, self.life.clone()))
    }

    /// Sets whether removing names fails from now on.
    pub(super) fn keep_names(&self, keeps: bool) {
        *locked(&self.keeps_names) = keeps;
    }

    /// Renames a file; an existing target is an error unless it is to be replaced.
    pub(super) fn move_to(&self, from: &str, to: &str, replace: bool) -> io::Result<()> {
        let mut names = locked(&self.names);
        self.life.goes_on()?;
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
        let mut names = locked(&self.names);
        self.life.goes_on()?;
        if names.contains_key(name) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let content = Content::default();
        names.insert(name.to_owned(), Arc::clone(&content));
        Ok(self.opened(content))
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn Appended>> {
        let content = locked(&self.names).get(name).cloned();
        self.life.goes_on()?;
        Ok(self.opened(content.ok_or(io::ErrorKind::NotFound)?))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        if *locked(&self.keeps_names) {
            return Err(io::ErrorKind::ReadOnlyFilesystem.into());
        }
        let mut names = locked(&self.names);
        self.life.goes_on()?;
        names.remove(name);
        Ok(())
    }

    fn give_name(&self, from: &str, name: &str) -> io::Result<()> {
        self.move_to(from, name, false)
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.move_to(from, to, true)
    }

    fn list(&self) -> io::Result<Vec<String>> {
        let names = locked(&self.names);
        self.life.goes_on()?;
        Ok(names.keys().cloned().collect())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}

impl Appended for Open {
    fn read(&mut self) -> io::Result<Vec<u8>> {
        let content = locked(&self.0);
        self.1.goes_on()?;
        Ok(content.clone())
    }

    fn length(&self) -> io::Result<u64> {
        let content = locked(&self.0);
        self.1.goes_on()?;
        Ok(content.len() as u64)
    }

    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut content = locked(&self.0);
        self.1.goes_on()?;
        let offset = offset as usize;
        let end = content.len().max(offset + bytes.len());
        content.resize(end, 0);
        content[offset..offset + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn cut(&mut self, length: u64) -> io::Result<()> {
        let mut content = locked(&self.0);
        self.1.goes_on()?;
        content.truncate(length as usize);
        Ok(())
    }

    fn again(&self) -> io::Result<Box<dyn Appended>> {
        Ok(Box::new(Open(Arc::clone(&self.0), self.1.clone())))
    }

    fn sync(&mut self) -> io::Result<()> {
        Ok(())
    }
}
