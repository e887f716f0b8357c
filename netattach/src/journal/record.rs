//! One sandbox's record: lines that are appended, and the state that results from them.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::JournalError;
use super::files::{Appended, Files};
use super::format::{self, Content, Damage, Line, Read, Writer};
use crate::cni::identifier::{check_container_id, check_link_name};
use crate::error_chain::Chain;
use crate::moment::Moment;
use crate::plan::Plan;
use crate::step::{Claim, Home, Output, Outputs, Step, StepRef};
use crate::sync::Arc;
use crate::sync::thread::{self, JoinHandle};
use crate::timing;

/// The sandbox and CNI interface of a record.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct JournalKey {
    /// `CNI_CONTAINERID`.
    pub container_id: String,
    /// `CNI_IFNAME`.
    pub ifname: String,
}

impl JournalKey {
    /// Longest container id that fits into a file name, in bytes.
    pub const MAX_CONTAINER_ID: usize = 220;
    const SUFFIX: &str = ".jsonl";

    pub(super) fn file_name(&self) -> Result<String, JournalError> {
        if self.container_id.len() > Self::MAX_CONTAINER_ID {
            return Err(JournalError::KeyTooLong(self.container_id.clone()));
        }
        // Both become part of a path.
        check_container_id(&self.container_id).map_err(JournalError::Key)?;
        check_link_name(&self.ifname).map_err(JournalError::Key)?;
        // `@` cannot be part of a container id.
        Ok(format!("{}@{}{}", self.container_id, self.ifname, Self::SUFFIX))
    }

    pub(super) fn from_file_name(name: &str) -> Option<Self> {
        let (container_id, ifname) = name.strip_suffix(Self::SUFFIX)?.split_once('@')?;
        Some(Self { container_id: container_id.to_owned(), ifname: ifname.to_owned() })
    }
}

/// Progress of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RecordState {
    /// Steps are being carried out, or were when the agent died.
    Applying,
    /// All steps are done and the runtime has the result.
    Attached,
    /// Inverses are running, or some of them failed.
    Removing,
}

/// The record of one sandbox and interface.
#[derive(Debug)]
pub struct Record {
    /// The sandbox and interface.
    pub key: JournalKey,
    /// The steps to carry out.
    pub plan: std::sync::Arc<Plan>,
    /// Time when the plan was made.
    pub planned: Moment,
    /// Progress.
    pub state: RecordState,
    /// The output of each finished step.
    pub outputs: Outputs,
    /// The result that the runtime received, in the newest version.
    pub result: Option<Value>,
    /// Cookie of the sandbox's namespace, unique during a boot; `None` before the namespace was opened, on kernels
    /// without cookies (before Linux 5.14), and in records of version 1.
    pub netns_cookie: Option<u64>,
    begun: BTreeSet<StepRef>,
    /// Whether the record was written during an earlier boot: nothing of the sandbox is left in the kernel, and
    /// progress may be missing.
    earlier_boot: bool,
    /// The damaged lines: progress may be missing.
    damage: Vec<Damage>,
    path: PathBuf,
    name: String,
    files: Arc<dyn Files>,
    file: Box<dyn Appended>,
    writer: Writer,
    /// Length of the file's complete lines, in bytes.
    length: u64,
    /// A crash left part of a line after `length`.
    cut_off: bool,
    /// `length` and `writer` before the line that marks the sandbox as attached, if there is such a line.
    before_attached: Option<(u64, Writer)>,
    /// The steps whose output was written again after that line.
    amended: BTreeSet<StepRef>,
    /// Whether the record existed when the operation on its sandbox began.
    was_read: bool,
    /// Bytes to be written with the next write.
    unwritten: Vec<u8>,
    sync: Syncing,
}

/// The state of the sync that makes the plan survive a power failure.
#[derive(Debug, Default)]
enum Syncing {
    /// No sync was requested, or a caller has already waited for it.
    #[default]
    NotAsked,
    /// A sync was requested, but no descriptor or no thread was available.
    Owed,
    /// A thread is syncing.
    Begun(JoinHandle<std::io::Result<()>>),
}

/// The progress of a sandbox whose record is rewritten.
#[derive(Debug)]
pub struct Progress<'a> {
    /// The cookie of the sandbox's namespace; 0: the namespace is gone, or the kernel has no cookies.
    pub netns_cookie: u64,
    /// The outputs of the steps that were carried out.
    pub outputs: &'a Outputs,
    /// The result that the runtime received, in the newest version. `None`: the sandbox is being removed, and its
    /// addresses may have other holders now.
    pub result: Option<Value>,
}

/// A record's file.
pub(super) struct RecordFile {
    pub(super) path: PathBuf,
    pub(super) name: String,
    pub(super) files: Arc<dyn Files>,
    pub(super) file: Box<dyn Appended>,
}

/// The result of reading a record's file.
pub(super) enum Replayed {
    /// The plan was never completely written: nothing was done.
    Torn,
    /// The plan cannot be read.
    Lost(Vec<Damage>),
    /// The record could be read.
    Record(Box<Record>),
}

impl Record {
    pub(super) fn create(
        place: RecordFile,
        key: JournalKey,
        boot: &str,
        plan: Plan,
    ) -> Result<Self, JournalError> {
        let version = format::version_of(&plan);
        let writer = Writer::new(&place.name, version);
        let head = format::head(&place.name, version, None).into_bytes();
        let moment = Moment::now(boot);
        let mut record = Self::new(place, key, plan.into(), moment.clone(), writer);
        record.unwritten = head;
        let line = Line::Planned {
            version,
            boot: moment.boot,
            at: milliseconds(SystemTime::now()),
            since_boot: moment.since_boot,
            plan: std::sync::Arc::clone(&record.plan),
        };
        record.append(&line)?;
        Ok(record)
    }

    fn new(
        place: RecordFile,
        key: JournalKey,
        plan: std::sync::Arc<Plan>,
        planned: Moment,
        writer: Writer,
    ) -> Self {
        let RecordFile { path, name, files, file } = place;
        Self {
            key,
            plan,
            planned,
            state: RecordState::Applying,
            outputs: Outputs::default(),
            result: None,
            netns_cookie: None,
            begun: BTreeSet::new(),
            earlier_boot: false,
            damage: Vec::new(),
            path,
            writer,
            name,
            files,
            file,
            length: 0,
            cut_off: false,
            before_attached: None,
            amended: BTreeSet::new(),
            was_read: false,
            unwritten: Vec::new(),
            sync: Syncing::default(),
        }
    }

    /// Computes the state of a record from its lines.
    ///
    /// # Errors
    /// [`JournalError::Version`] for a record that another version of the agent wrote.
    pub(super) fn replay(
        place: RecordFile,
        key: JournalKey,
        boot: &str,
        text: &[u8],
    ) -> Result<Replayed, JournalError> {
        let read = match format::read(&place.name, text) {
            Content::Torn => return Ok(Replayed::Torn),
            Content::Foreign(version) => return Err(JournalError::Version { path: place.path, version }),
            Content::Lines(read) => read,
        };
        let Read { lines, mut damage, sealed, length, writer, before_attached } = read;
        let mut lines = lines.into_iter();
        let Some(Line::Planned { boot: written, since_boot, plan, .. }) = lines.next() else {
            if damage.is_empty() {
                damage.push(Damage { line: 1, what: "there is no plan".to_owned() });
            }
            return Ok(Replayed::Lost(damage));
        };
        let of = (&plan.sandbox.container_id, &plan.sandbox.ifname);
        if of != (&key.container_id, &key.ifname) {
            let what = format!("it is the plan of interface {} of container {}", of.1, of.0);
            return Ok(Replayed::Lost(vec![Damage { line: 1, what }]));
        }
        let earlier_boot = written != boot;
        let mut record = Self::new(place, key, plan, Moment { boot: written, since_boot }, writer);
        record.earlier_boot = earlier_boot;
        record.was_read = true;
        record.damage = damage;
        record.length = length as u64;
        record.cut_off = text.len() > length;
        record.before_attached = before_attached.map(|(length, writer)| (length as u64, writer));
        if sealed {
            record.state = RecordState::Attached;
        }
        for line in lines {
            match line {
                Line::Planned { .. } => {}
                Line::Namespace(cookie) => record.netns_cookie = Some(cookie),
                Line::Began(step) => {
                    record.begun.insert(step);
                }
                Line::Done(step, output) => {
                    record.outputs.insert(step, *output);
                    if record.result.is_some() {
                        record.amended.insert(step);
                    }
                }
                Line::Attached(result) => {
                    record.state = RecordState::Attached;
                    record.result = Some(result);
                }
                Line::Removing => record.state = RecordState::Removing,
            }
        }
        record.date_claims();
        Ok(Replayed::Record(Box::new(record)))
    }

    /// For claims that do not contain the programs on their devices, stores the time of planning instead, if no
    /// process of the pod could have attached a program to a device before that time: not in a live pod.
    fn date_claims(&mut self) {
        let is_first = self.plan.dynamic.is_none() && !self.was_written_anew();
        let is_sure = is_first && !self.earlier_boot && self.damage.is_empty();
        let Some(planned) = self.planned.since_boot.filter(|_| is_sure) else { return };
        let plan = std::sync::Arc::clone(&self.plan);
        for (at, _, _) in plan.steps() {
            let Some(Output::Claimed(claim)) = self.outputs.get(&at) else { continue };
            let Some(home) = &claim.home else { continue };
            if home.programs.is_none() && home.planned.is_none() {
                let home = Some(Home { planned: Some(planned), ..home.clone() });
                let claim = Claim { home, ..(**claim).clone() };
                self.outputs.insert(at, Output::Claimed(Box::new(claim)));
            }
        }
    }

    /// Whether the record may be newer than its plan because of [`Record::continue_from`]: only that function writes
    /// a "began" line for steps without an inverse.
    fn was_written_anew(&self) -> bool {
        self.is_complete() && self.plan.steps().all(|(at, _, _)| self.begun.contains(&at))
    }

    /// Refuses a record that is damaged.
    ///
    /// # Errors
    /// [`JournalError::Damaged`], with the problems.
    pub fn check_whole(&self) -> Result<(), JournalError> {
        match self.damage.is_empty() {
            true => Ok(()),
            false => Err(JournalError::damaged(&self.path, &self.damage)),
        }
    }

    /// Refuses a record that has lost data needed for undoing it: another plugin's result. Every other inverse is
    /// known from the plan alone, and has no effect if nothing of this sandbox exists.
    ///
    /// # Errors
    /// [`JournalError::Damaged`], with the problems.
    pub fn check_undoable(&self) -> Result<(), JournalError> {
        let mut delegates = self.plan.steps().filter(|(_, _, step)| matches!(step, Step::Delegate(_)));
        match delegates.all(|(at, _, _)| self.outputs.contains_key(&at)) {
            true => Ok(()),
            false => self.check_whole(),
        }
    }

    /// Whether every step of the plan has its output: the attachment is then known, even if other lines are lost.
    pub fn is_complete(&self) -> bool {
        self.plan.steps().all(|(at, _, _)| self.outputs.contains_key(&at))
    }

    /// Whether the sandbox may have been attached: the record says so, or said so before [`Record::removing`] found
    /// no space. The outputs of all steps are written only together with that line, so an agent that ended earlier
    /// leaves no such record.
    pub fn may_have_been_attached(&self) -> bool {
        self.state != RecordState::Applying || (self.was_read && self.is_complete())
    }

    /// Whether the step may have had an effect.
    pub fn has_begun(&self, step: StepRef) -> bool {
        self.earlier_boot || !self.damage.is_empty() || self.begun.contains(&step)
    }

    /// Whether the machine was rebooted since: the kernel objects of the sandbox are gone.
    pub fn is_of_earlier_boot(&self) -> bool {
        self.earlier_boot
    }

    /// Path of the record's file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Sets the namespace in which the steps are carried out. Written with the next line.
    pub fn note_namespace(&mut self, netns_cookie: u64) -> Result<(), JournalError> {
        if netns_cookie == 0 {
            return Ok(());
        }
        self.netns_cookie = Some(netns_cookie);
        self.encode(&Line::Namespace(netns_cookie))
    }

    /// Called before the effects of steps that have an inverse. Written at once.
    pub fn begin(&mut self, steps: &[StepRef]) -> Result<(), JournalError> {
        self.begun.extend(steps);
        let Some((last, others)) = steps.split_last() else { return Ok(()) };
        others.iter().try_for_each(|step| self.encode(&Line::Began(*step)))?;
        self.append(&Line::Began(*last))
    }

    /// Called after a step's effect. The line is written together with the next one: no effect in between needs
    /// undoing, and a step that is only known to have begun is undone too.
    pub fn done(&mut self, step: StepRef, output: Output) -> Result<(), JournalError> {
        let line = Line::Done(step, Box::new(output.clone()));
        self.outputs.insert(step, output);
        self.encode(&line)
    }

    /// Replaces the output of a finished step. Written at once.
    ///
    /// # Errors
    /// The record still has the previous output.
    pub fn amend(&mut self, step: StepRef, output: Output) -> Result<(), JournalError> {
        if self.before_attached.is_some() {
            self.amended.insert(step);
        }
        self.done(step, output)?;
        timing::part("journal", || self.flush())
    }

    /// Writes the progress of a sandbox whose record was lost. Until the last line, the record says that no step was
    /// carried out, so it must be renamed only afterwards ([`Store::create_whole`](super::Store::create_whole)).
    ///
    /// # Errors
    /// The progress could not be written.
    pub(super) fn continue_from(&mut self, progress: Progress<'_>) -> Result<(), JournalError> {
        let Progress { netns_cookie, outputs, result } = progress;
        self.note_namespace(netns_cookie)?;
        let plan = std::sync::Arc::clone(&self.plan);
        for (at, _, _) in plan.steps() {
            let Some(output) = outputs.get(&at) else { continue };
            self.begun.insert(at);
            self.encode(&Line::Began(at))?;
            self.done(at, output.clone())?;
        }
        match result {
            Some(result) => self.attached(result),
            None => self.removing(),
        }
    }

    /// Marks all steps as done.
    pub fn attached(&mut self, result: Value) -> Result<(), JournalError> {
        let before = (self.length + self.unwritten.len() as u64, self.writer);
        self.append(&Line::Attached(result.clone()))?;
        self.state = RecordState::Attached;
        self.result = Some(result);
        self.before_attached = Some(before);
        if self.writer.has_head() {
            let head = format::head(&self.name, self.writer.version(), Some(self.length));
            self.file.write_at(0, head.as_bytes()).map_err(|source| self.not_written(source))?;
        }
        Ok(())
    }

    /// Marks the start of the inverses. If no line can be appended, as on a full disk, removes the line that marks
    /// the sandbox as attached instead, which needs no space: in either case a restarted agent rolls the record back.
    ///
    /// # Errors
    /// The record is unchanged.
    pub fn removing(&mut self) -> Result<(), JournalError> {
        self.state = RecordState::Removing;
        let Err(error) = self.append(&Line::Removing) else { return Ok(()) };
        let Some(before) = self.before_attached.filter(|_| self.damage.is_empty()) else { return Err(error) };
        if let Err(unchanged) = self.go_back_to(before) {
            tracing::debug!(
                record = %self.path.display(), error = %Chain(&unchanged),
                "not marked as unfinished either"
            );
            return Err(error);
        }
        // The removed line may have freed space, which the outputs written after it need too. Without them the record
        // is still an unfinished one.
        let amended = std::mem::take(&mut self.amended);
        for (step, output) in amended.iter().filter_map(|step| Some((*step, self.outputs.get(step)?.clone())))
        {
            let _ = self.writer.encode(&Line::Done(step, Box::new(output)), &mut self.unwritten);
        }
        let _ = self.append(&Line::Removing);
        Ok(())
    }

    /// Makes the record one of a sandbox that is not attached yet. No part of the file grows. If the agent ends
    /// between the two writes, the record still counts as attached, because of the line that is still there.
    fn go_back_to(&mut self, (length, writer): (u64, Writer)) -> std::io::Result<()> {
        if writer.has_head() {
            let head = format::head(&self.name, writer.version(), None);
            self.file.write_at(0, head.as_bytes())?;
            crate::crash_point!("journal", "unsealed");
        }
        self.file.cut(length)?;
        (self.length, self.writer, self.before_attached) = (length, writer, None);
        self.cut_off = false;
        self.unwritten.clear();
        crate::crash_point!("journal", self.length);
        Ok(())
    }

    /// Starts syncing the plan on a thread of its own. Without a thread or a second descriptor,
    /// [`Record::wait_durable`] syncs the plan.
    pub fn start_sync(&mut self) {
        self.sync = Syncing::Owed;
        let Ok(mut file) = self.file.again() else { return };
        let files = Arc::clone(&self.files);
        let begun = thread::Builder::new().name("journal-sync".into()).spawn(move || {
            file.sync()?;
            files.sync()
        });
        if let Ok(thread) = begun {
            self.sync = Syncing::Begun(thread);
        }
    }

    /// Whether [`Record::start_sync`] was called and no caller has waited for the sync since.
    pub fn is_being_synced(&self) -> bool {
        !matches!(self.sync, Syncing::NotAsked)
    }

    /// Waits until the plan is on disk, if [`Record::start_sync`] was called.
    ///
    /// # Errors
    /// The plan may not be on disk.
    pub fn wait_durable(&mut self) -> Result<(), JournalError> {
        const PART: &str = "journal on disk";
        let synced = match std::mem::take(&mut self.sync) {
            Syncing::NotAsked => return Ok(()),
            Syncing::Owed => timing::part(PART, || self.file.sync().and_then(|()| self.files.sync())),
            Syncing::Begun(thread) => {
                timing::part(PART, || thread.join()).unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            }
        };
        synced.map_err(|source| JournalError::Sync { path: self.path.clone(), source })
    }

    /// Removes the record: nothing of the sandbox is left.
    pub fn remove(mut self) -> Result<(), JournalError> {
        // The thread holds only a descriptor; it must not outlive the record.
        if let Syncing::Begun(thread) = std::mem::take(&mut self.sync) {
            let _ = thread.join();
        }
        self.files
            .remove(&self.name)
            .map_err(|source| JournalError::Remove { path: self.path.clone(), source })?;
        crate::crash_point!("journal", "removed");
        Ok(())
    }

    fn append(&mut self, line: &Line) -> Result<(), JournalError> {
        timing::part("journal", || self.write(line))
    }

    fn write(&mut self, line: &Line) -> Result<(), JournalError> {
        self.encode(line)?;
        self.flush()
    }

    /// Writes the buffered lines.
    fn flush(&mut self) -> Result<(), JournalError> {
        if std::mem::take(&mut self.cut_off) {
            self.file.cut(self.length).map_err(|source| self.not_written(source))?;
        }
        // A single write: after a crash a line is complete, cut off at the end, or absent.
        if let Err(source) = self.file.write_at(self.length, &self.unwritten) {
            // A full disk may have accepted part of a line. That part is cut off, so that the next line starts at the
            // right offset.
            let _ = self.file.cut(self.length);
            return Err(self.not_written(source));
        }
        self.length += self.unwritten.len() as u64;
        self.unwritten.clear();
        crate::crash_point!("journal", self.length);
        Ok(())
    }

    fn encode(&mut self, line: &Line) -> Result<(), JournalError> {
        let encoded = self.writer.encode(line, &mut self.unwritten);
        encoded.map_err(|error| self.not_written(error.into()))
    }

    fn not_written(&self, source: std::io::Error) -> JournalError {
        JournalError::Write { path: self.path.clone(), source }
    }
}

/// Milliseconds since 1970; an earlier time counts as 1970.
fn milliseconds(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
