//! One sandbox's record: lines that are appended, and what they add up to.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::JournalError;
use super::files::{Appended, Files};
use crate::plan::{Output, Plan, StepRef};
use crate::sync::Arc;
use crate::sync::thread::{self, JoinHandle};

/// Which sandbox and which of its CNI interfaces a record is about.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// `CNI_CONTAINERID`.
    pub container_id: String,
    /// `CNI_IFNAME`.
    pub ifname: String,
}

impl Key {
    /// Longest container id that fits into a file name, in bytes.
    pub const MAX_CONTAINER_ID: usize = 220;
    const SUFFIX: &str = ".jsonl";

    pub(super) fn file_name(&self) -> Result<String, JournalError> {
        if self.container_id.len() > Self::MAX_CONTAINER_ID {
            return Err(JournalError::KeyTooLong(self.container_id.clone()));
        }
        // `@` cannot be part of a container id, and neither part can hold a `/`.
        Ok(format!("{}@{}{}", self.container_id, self.ifname, Self::SUFFIX))
    }

    pub(super) fn from_file_name(name: &str) -> Option<Self> {
        let (container_id, ifname) = name.strip_suffix(Self::SUFFIX)?.split_once('@')?;
        Some(Self { container_id: container_id.to_owned(), ifname: ifname.to_owned() })
    }
}

/// How far a sandbox has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// Steps are being carried out, or were when the agent ended.
    Applying,
    /// All steps are done and the runtime has its answer.
    Attached,
    /// Inverses are being carried out, or some of them failed.
    Removing,
}

/// One line of the file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Line {
    Planned {
        version: u32,
        boot: String,
        /// When it was written, in milliseconds since 1970.
        at: u64,
        plan: Box<Plan>,
    },
    Began(StepRef),
    Done(StepRef, Box<Output>),
    Attached(Value),
    Removing,
}

const VERSION: u32 = 1;

/// The record of one sandbox and interface.
#[derive(Debug)]
pub struct Record {
    /// What it is about.
    pub key: Key,
    /// What was to be done.
    pub plan: Plan,
    /// When that was decided, to the millisecond.
    pub planned: SystemTime,
    /// How far it has come.
    pub state: State,
    /// What each finished step brought.
    pub outputs: BTreeMap<StepRef, Output>,
    /// The result that the runtime was given, in the newest version.
    pub result: Option<Value>,
    begun: BTreeSet<StepRef>,
    /// Written during an earlier boot: nothing in the kernel is left of it, and progress may be missing.
    earlier_boot: bool,
    path: PathBuf,
    files: Arc<dyn Files>,
    file: Box<dyn Appended>,
    /// Of the file, in bytes.
    length: u64,
    /// Lines that go with the next write.
    unwritten: Vec<u8>,
    sync: Option<JoinHandle<std::io::Result<()>>>,
}

impl Record {
    pub(super) fn create(
        path: PathBuf,
        files: Arc<dyn Files>,
        file: Box<dyn Appended>,
        key: Key,
        boot: &str,
        plan: Plan,
    ) -> Result<Self, JournalError> {
        let mut record = Self {
            key,
            plan,
            planned: SystemTime::now(),
            state: State::Applying,
            outputs: BTreeMap::new(),
            result: None,
            begun: BTreeSet::new(),
            earlier_boot: false,
            path,
            files,
            file,
            length: 0,
            unwritten: Vec::new(),
            sync: None,
        };
        let line = Line::Planned {
            version: VERSION,
            boot: boot.to_owned(),
            at: milliseconds(record.planned),
            plan: Box::new(record.plan.clone()),
        };
        record.append(&line)?;
        Ok(record)
    }

    /// Reads what the lines add up to. `None` when the plan was never completely written: then nothing was done.
    ///
    /// # Errors
    /// [`JournalError::Version`] for a record that another version of the agent wrote.
    pub(super) fn replay(
        path: PathBuf,
        files: Arc<dyn Files>,
        file: Box<dyn Appended>,
        key: Key,
        boot: &str,
        text: &[u8],
    ) -> Result<Option<Self>, JournalError> {
        // A line without its newline was cut off by a crash: whatever it announced had not begun or is repeatable.
        let complete = text.iter().rposition(|byte| *byte == b'\n').map_or(&[][..], |end| &text[..end]);
        if let Some(version) = foreign_version(complete) {
            return Err(JournalError::Version { path, version });
        }
        let mut lines =
            complete.split(|byte| *byte == b'\n').map_while(|line| serde_json::from_slice::<Line>(line).ok());
        let Some(Line::Planned { boot: written, at, plan, .. }) = lines.next() else { return Ok(None) };
        let mut record = Self {
            key,
            plan: *plan,
            planned: UNIX_EPOCH + Duration::from_millis(at),
            state: State::Applying,
            outputs: BTreeMap::new(),
            result: None,
            begun: BTreeSet::new(),
            earlier_boot: written != boot,
            path,
            files,
            file,
            length: complete.len() as u64 + 1,
            unwritten: Vec::new(),
            sync: None,
        };
        for line in lines {
            match line {
                Line::Planned { .. } => break,
                Line::Began(step) => {
                    record.begun.insert(step);
                }
                Line::Done(step, output) => {
                    record.outputs.insert(step, *output);
                }
                Line::Attached(result) => {
                    record.state = State::Attached;
                    record.result = Some(result);
                }
                Line::Removing => record.state = State::Removing,
            }
        }
        Ok(Some(record))
    }

    /// Whether the step may have had an effect.
    pub fn has_begun(&self, step: StepRef) -> bool {
        self.earlier_boot || self.begun.contains(&step)
    }

    /// Whether the machine was rebooted since: the kernel's part of the sandbox is gone.
    pub fn is_of_earlier_boot(&self) -> bool {
        self.earlier_boot
    }

    /// Where the record is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// To be called before the effect of a step that has an inverse.
    pub fn begin(&mut self, step: StepRef) -> Result<(), JournalError> {
        self.begun.insert(step);
        self.append(&Line::Began(step))
    }

    /// To be called after a step's effect. The line is written together with the next one: between the two nothing
    /// happens that is taken back, and a step that is only known to have begun is taken back all the same.
    pub fn done(&mut self, step: StepRef, output: Output) -> Result<(), JournalError> {
        let line = Line::Done(step, Box::new(output.clone()));
        self.outputs.insert(step, output);
        self.encode(&line)
    }

    /// All steps are done.
    pub fn attached(&mut self, result: Value) -> Result<(), JournalError> {
        self.state = State::Attached;
        self.result = Some(result.clone());
        self.append(&Line::Attached(result))
    }

    /// Inverses are about to run.
    pub fn removing(&mut self) -> Result<(), JournalError> {
        self.state = State::Removing;
        self.append(&Line::Removing)
    }

    /// Starts writing the plan out to the disk, on a thread of its own.
    pub fn start_sync(&mut self) {
        let Ok(mut file) = self.file.again() else { return };
        let files = Arc::clone(&self.files);
        self.sync = thread::Builder::new()
            .name("journal-sync".into())
            .spawn(move || {
                file.sync()?;
                files.sync()
            })
            .ok();
    }

    /// Waits until the plan is on the disk.
    pub fn wait_durable(&mut self) -> Result<(), JournalError> {
        let failed = |source| JournalError::Sync { path: self.path.clone(), source };
        match self.sync.take() {
            Some(thread) => match thread.join() {
                Ok(synced) => synced.map_err(failed),
                Err(_) => Err(failed(std::io::Error::other("the syncing thread panicked"))),
            },
            None => Ok(()),
        }
    }

    /// Removes the record: nothing of the sandbox is left.
    pub fn remove(mut self) -> Result<(), JournalError> {
        // The thread holds only a descriptor; it must not outlive the record and report on nothing.
        let _ = self.wait_durable();
        self.files
            .remove(&self.key.file_name()?)
            .map_err(|source| JournalError::Write { path: self.path.clone(), source })?;
        crate::crash_point!("journal", "removed");
        Ok(())
    }

    fn append(&mut self, line: &Line) -> Result<(), JournalError> {
        self.encode(line)?;
        // One write: after a crash a line is whole, cut off at the end, or absent.
        if let Err(source) = self.file.append(&self.unwritten) {
            // A full disk may have taken part of a line. Without it the next line starts where it should.
            let _ = self.file.cut(self.length);
            return Err(JournalError::Write { path: self.path.clone(), source });
        }
        self.length += self.unwritten.len() as u64;
        self.unwritten.clear();
        crate::crash_point!("journal", self.length);
        Ok(())
    }

    fn encode(&mut self, line: &Line) -> Result<(), JournalError> {
        serde_json::to_writer(&mut self.unwritten, line)
            .map_err(|error| JournalError::Write { path: self.path.clone(), source: error.into() })?;
        self.unwritten.push(b'\n');
        Ok(())
    }
}

/// The version that a whole first line names, if it is not ours.
fn foreign_version(text: &[u8]) -> Option<u64> {
    let first = text.split(|byte| *byte == b'\n').next()?;
    let line: Value = serde_json::from_slice(first).ok()?;
    line.get("planned")?.get("version")?.as_u64().filter(|version| *version != u64::from(VERSION))
}

/// Since 1970; a clock before that counts as 1970.
fn milliseconds(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
