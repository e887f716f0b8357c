//! A plugin whose attachments have records without an agent too: `sriov`. What a pod changes of a VF is in its card,
//! where nothing shows what it was before.
//!
//! The records are those of the agent (`journal`), in a directory of the executable, and an [`Engine`] without a
//! dataplane carries out plans and rolls them back by them. Each ADD, DEL and GC reads all records first, and holds a
//! lock until it ends, as CHECK does: so claims of devices are in one order, and an unfinished record is of a process
//! that was killed or of a rollback that has failed. The next ADD or GC completes it, whichever container it is for: an
//! ADD only where no other plugin has to be called, since one that hangs would delay every ADD of the node.
//!
//! No process notices when a pod's namespace ends without a DEL. The next ADD, DEL or GC gives its VF back.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use super::PLUGIN_TIMEOUT;
use super::interface::Interface;
use crate::attach::engine::{self, Engine, is_whole};
use crate::attach::{AttachError, Collected, Inheritance, Node, RepeatedAdd};
use crate::cni::outgoing::insert_in_use;
use crate::cni::{self, AttachmentId, CniError, Command, code, json};
use crate::error_chain::Chain;
use crate::flock;
use crate::journal::{JournalError, JournalKey, Loaded, Store};
use crate::link::Driver;
use crate::multus;
use crate::netlink::Handle;
use crate::netns::{Netns, NetnsError};
use crate::plan::resolve::Options;
use crate::step::Step;

/// The directory of the records, with a subdirectory for each node that shares it. In memory: VFs do not outlive the
/// boot either.
const DIRECTORY: &str = "/run/cni/netattach-sriov";

/// How long a call waits for other calls, which take turns: as long as an IPAM plugin may take in one of them.
const PATIENCE: Duration = PLUGIN_TIMEOUT;

/// The time within which a call begins to roll back what others have left, without other plugins. The next one goes on.
const SETTLING: Duration = Duration::from_secs(10);

/// The time within which a GC begins its rollbacks: then the others get their turns, and the next GC goes on.
const COLLECTING: Duration = PLUGIN_TIMEOUT;

/// Without a dataplane, no attachment has a number.
const NO_NUMBERS: u32 = 0;

/// The records cannot be used.
#[derive(Debug, thiserror::Error)]
enum RecordsError {
    /// Other calls take their turns for longer than [`PATIENCE`].
    #[error("{path} is locked by other calls of the plugin for {} s", PATIENCE.as_secs())]
    Busy {
        /// The directory.
        path: PathBuf,
    },
    /// The directory cannot be created or locked.
    #[error("open {path}")]
    Directory {
        /// The directory.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The records cannot be read.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The node's namespace cannot be identified.
    #[error("identify the node's namespace")]
    Namespace(#[from] NetnsError),
}

impl From<RecordsError> for CniError {
    fn from(error: RecordsError) -> Self {
        let code = match &error {
            RecordsError::Busy { .. } => code::TRY_AGAIN_LATER,
            RecordsError::Directory { .. } | RecordsError::Journal(_) | RecordsError::Namespace(_) => {
                code::IO_FAILURE
            }
        };
        Self::from_chain(code, &error)
    }
}

/// A call of a plugin with records.
pub(super) struct Recorded<'a> {
    pub(super) driver: &'static dyn Driver,
    pub(super) request: &'a cni::Request,
}

impl Recorded<'_> {
    pub(super) fn answer(&self, node: Node, stderr: &mut impl Write) -> Result<String, CniError> {
        let (driver, request) = (self.driver, self.request);
        let host = Handle::open().map_err(|error| AttachError::Open(error.into()))?.netns_cookie();
        let directory = Path::new(DIRECTORY).join(host.to_string());
        let needs_records = match request.command {
            Command::Add | Command::Check => true,
            // Without a directory there is no record.
            Command::Del | Command::Gc => directory
                .try_exists()
                .map_err(|source| RecordsError::Directory { path: directory.clone(), source })?,
            // These concern no attachment.
            Command::Status | Command::Version => false,
        };
        if !needs_records {
            return Interface { driver, request, node: &node }.answer(stderr);
        }
        let records = Records::open(&directory, node)?;
        let interface = Interface { driver, request, node: records.engine.node() };
        let mut tell = |problem: &str| {
            // The answer matters more than a message.
            let _ = writeln!(stderr, "{}: {problem}", driver.kind());
        };
        let answered = match request.command {
            Command::Add => {
                let result = records.add(&interface, &mut tell)?;
                return Ok(json::pretty(&result));
            }
            Command::Del => records.del(&interface, &mut tell),
            Command::Gc => records.gc(&interface, &mut tell),
            Command::Check | Command::Status | Command::Version => records.check(&interface),
        };
        answered.map(|()| String::new())
    }
}

/// The records of a node, while no other process uses them.
#[derive(Debug)]
struct Records {
    engine: Engine,
    /// The time when this process began to wait for its turn.
    since: SystemTime,
    /// The directory, locked.
    _turn: File,
}

impl Records {
    /// # Errors
    /// [`RecordsError::Busy`], or the directory cannot be used.
    fn open(directory: &Path, node: Node) -> Result<Self, RecordsError> {
        Self::within(PATIENCE, directory, node)
    }

    fn within(patience: Duration, directory: &Path, node: Node) -> Result<Self, RecordsError> {
        let since = SystemTime::now();
        let turn = take_turn(patience, directory)?;
        let journal = Store::open(directory)?;
        // Only an agent replaces another meta plugin.
        let inheritance = Inheritance::new(multus::STATE_DIRECTORY);
        let (options, repeated) = (Options::default(), RepeatedAdd::Refuse);
        let engine = Engine::new(node, journal, NO_NUMBERS, options, inheritance, repeated)?;
        Ok(Self { engine, since, _turn: turn })
    }

    /// Reads all records, and gives back the devices of those pods whose namespaces are gone. Returns the records that
    /// are to be rolled back.
    fn take_over(&self, tell: &mut dyn FnMut(&str)) -> Result<Vec<JournalKey>, AttachError> {
        let recovery = self.engine.adopt()?;
        for (key, problem) in &recovery.left_alone {
            tell(&format!("container {}, interface {}: {problem}", key.container_id, key.ifname));
        }
        self.engine.settle_orphans();
        self.write_returns();
        Ok(recovery.unfinished)
    }

    /// Like [`Records::take_over`], and rolls back what other calls have left, except for the record of `own`. Returns
    /// the records whose rollback calls other plugins, and leaves them to their DELs and to GC.
    fn settle(
        &self,
        own: Option<&JournalKey>,
        tell: &mut dyn FnMut(&str),
    ) -> Result<Vec<JournalKey>, AttachError> {
        let mut left = self.take_over(tell)?;
        left.retain(|key| own != Some(key));
        let (calling, others) = left.into_iter().partition(|key| self.calls_plugins(key));
        self.finish(others, Instant::now() + SETTLING, tell);
        Ok(calling)
    }

    /// Rolls back records that other calls have left, until that time. What fails is tried again by the next call.
    fn finish(&self, left: Vec<JournalKey>, until: Instant, tell: &mut dyn FnMut(&str)) {
        for key in left {
            let JournalKey { container_id, ifname } = &key;
            let mut not_yet = |why: &str| {
                tell(&format!("container {container_id}, interface {ifname}: not rolled back: {why}"))
            };
            if Instant::now() >= until {
                not_yet("no time was left");
            } else if let Err(error) = self.engine.finish(&key) {
                not_yet(&Chain(&error).to_string());
            }
        }
    }

    /// Whether the rollback of a record calls other plugins.
    fn calls_plugins(&self, key: &JournalKey) -> bool {
        let Ok(Loaded::Whole(record)) = self.engine.journal.load(key) else { return false };
        record.plan.steps().any(|(at, _, step)| matches!(step, Step::Delegate(_)) && record.has_begun(at))
    }

    /// Notes in the records which of their devices have gone back, or are another attachment's by now.
    fn write_returns(&self) {
        for key in self.engine.unwritten_returns() {
            self.engine.write_returned(&key);
        }
    }

    fn add(&self, interface: &Interface<'_>, tell: &mut dyn FnMut(&str)) -> Result<cni::Value, CniError> {
        let request = interface.request;
        let key = engine::key(request);
        self.settle(Some(&key), tell)?;
        // Planned in its turn: until then, another call may have given a device back.
        let (plan, netns, _) = interface.plan()?;
        self.make_way(&key, &netns)?;
        let numbers = self.engine.registry().reserve();
        let of = (&netns, request.version);
        let added = self.engine.carry_out_settled(key, plan, numbers, of);
        // The device may have been that of a record whose namespace is gone.
        self.write_returns();
        let (result, _) = added?;
        Ok(result)
    }

    /// Rolls back what an earlier ADD or DEL of the same attachment has left, and an attachment whose namespace is
    /// gone.
    ///
    /// # Errors
    /// [`AttachError::AlreadyAttached`], or the rollback fails.
    fn make_way(&self, key: &JournalKey, netns: &Netns) -> Result<(), AttachError> {
        match self.engine.journal.load(key)? {
            Loaded::Absent => Ok(()),
            Loaded::Torn { earlier_boot } => self.engine.clear_torn(key, earlier_boot, Some(netns)),
            Loaded::Whole(record) if is_whole(&record) && self.engine.netns_of(&record)?.is_some() => {
                Err(AttachError::AlreadyAttached(key.clone()))
            }
            Loaded::Whole(record) => self.engine.roll_back_left(*record),
        }
    }

    /// Without a record, the attachment was rolled back, or another plugin or an agent has made it.
    fn del(&self, interface: &Interface<'_>, tell: &mut dyn FnMut(&str)) -> Result<(), CniError> {
        let key = engine::key(interface.request);
        self.take_over(tell)?;
        match self.engine.journal.load(&key).map_err(AttachError::from)? {
            Loaded::Absent => interface.del(),
            Loaded::Torn { earlier_boot } => {
                let path = interface.request.netns.as_deref();
                let netns = path.map(Netns::if_there).transpose().map_err(AttachError::from)?.flatten();
                self.engine.clear_torn(&key, earlier_boot, netns.as_ref())?;
                interface.del()
            }
            Loaded::Whole(record) => Ok(self.engine.roll_back_left(*record)?),
        }
    }

    fn check(&self, interface: &Interface<'_>) -> Result<(), CniError> {
        let (record, netns) = self.engine.attached(&engine::key(interface.request))?;
        interface.check_recorded(&record, &netns)
    }

    fn gc(&self, interface: &Interface<'_>, tell: &mut dyn FnMut(&str)) -> Result<(), CniError> {
        let until = Instant::now() + COLLECTING;
        // Before anything is settled, which changes records too.
        let changed = self.changed_meanwhile()?;
        let calling = self.settle(None, tell)?;
        let mut collected = Collected::default();
        let mut in_time = Ok(());
        if let Some(mut census) = self.engine.census(interface.request, &mut collected) {
            changed.iter().for_each(|container| census.keep(container));
            for stale in census.stale.values() {
                if Instant::now() >= until {
                    let msg = format!("GC has taken {} s; the next GC goes on", COLLECTING.as_secs());
                    in_time = Err(CniError::new(code::TRY_AGAIN_LATER, msg));
                    break;
                }
                collected.add(self.engine.collect(stale));
            }
        }
        self.finish(calling, until, tell);
        // Releases addresses that have no record either, such as those of an earlier boot.
        let request =
            with_recorded(interface.request, self.engine.journal.keys().map_err(AttachError::from)?);
        let others = Interface { driver: interface.driver, request: &request, node: interface.node }.gc();
        collected.outcome().and(in_time).and(others)
    }

    /// Returns the containers whose records other calls have changed since this one began to wait for its turn: the
    /// runtime's list of valid attachments may be older than their ADDs.
    fn changed_meanwhile(&self) -> Result<BTreeSet<String>, AttachError> {
        let mut changed = BTreeSet::new();
        for key in self.engine.journal.keys()? {
            let modified = fs::metadata(self.engine.journal.path(&key)?).and_then(|file| file.modified());
            // A record that cannot be examined may be one of them.
            if modified.map_or(true, |modified| modified > self.since) {
                changed.insert(key.container_id);
            }
        }
        Ok(changed)
    }
}

/// Returns a GC request whose valid attachments include those that have records: one that could not be rolled back may
/// still use its address.
fn with_recorded(request: &cni::Request, recorded: Vec<JournalKey>) -> cni::Request {
    let mut request = request.clone();
    if let Some(valid) = &mut request.valid_attachments {
        let id = |JournalKey { container_id, ifname }| AttachmentId { container_id, ifname };
        valid.extend(recorded.into_iter().map(id));
        valid.sort();
        valid.dedup();
        insert_in_use(&mut request.config, valid);
    }
    request
}

/// Waits for this call's turn: locks the directory until the returned file is closed. Creates it if it is missing.
///
/// # Errors
/// [`RecordsError::Busy`], or the directory cannot be used.
fn take_turn(patience: Duration, directory: &Path) -> Result<File, RecordsError> {
    let failed = |source| RecordsError::Directory { path: directory.to_owned(), source };
    let deadline = Instant::now() + patience;
    loop {
        // The directories above are shared with others.
        fs::create_dir_all(directory.parent().unwrap_or(Path::new("/"))).map_err(failed)?;
        DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(failed)?;
        let turn = match File::open(directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            opened => opened.map_err(failed)?,
        };
        if !flock::lock_until(&turn, deadline).map_err(failed)? {
            return Err(RecordsError::Busy { path: directory.to_owned() });
        }
        // Somebody may have removed the directory meanwhile, and another call may have locked the one made since.
        let locked = turn.metadata().map_err(failed)?;
        match fs::metadata(directory) {
            Ok(found) if (found.dev(), found.ino()) == (locked.dev(), locked.ino()) => return Ok(turn),
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
            Ok(_) | Err(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, AsRawFd};

    use serde_json::json;

    use super::*;
    use crate::attach::rig;
    use crate::link;
    use crate::step::{Delegate, Output, Role, StepRef};

    fn open(directory: &Path) -> Result<Records, RecordsError> {
        let node = super::super::node(&rig::request("ADD", "a"), link::driver("sriov"));
        Records::within(Duration::ZERO, &directory.join("records"), node)
    }

    /// Records an attachment with an address: until its ADD has ended, or until that was killed. Its namespace is gone
    /// unless it is given.
    fn record(
        records: &Records,
        (directory, container): (&Path, &str),
        netns: Option<&Netns>,
        has_ended: bool,
    ) {
        let mut plan = rig::plan(directory, container, 1);
        if let Some(netns) = netns {
            plan.sandbox.netns = format!("/proc/self/fd/{}", netns.as_fd().as_raw_fd());
            plan.sandbox.netns_id = netns.id();
        }
        let lease = rig::lease(&records.engine, &plan);
        let mut record = records.engine.journal.create(rig::key(container), plan).unwrap();
        record.begin(&[StepRef(0, 0), StepRef(0, 1)]).unwrap();
        record.done(StepRef(0, 0), lease).unwrap();
        if has_ended {
            record.done(StepRef(0, 1), Output::Nothing).unwrap();
            record.attached(json!({"cniVersion": "1.1.0"})).unwrap();
        }
    }

    fn containers(directory: &Path) -> Vec<String> {
        rig::leased(directory).into_values().collect()
    }

    #[test]
    fn one_call_at_a_time_has_the_records() {
        let directory = tempfile::tempdir().unwrap();
        let first = open(directory.path()).unwrap();
        let refused = CniError::from(open(directory.path()).unwrap_err());
        let path = directory.path().join("records");
        let told = format!("{} is locked by other calls of the plugin for 60 s", path.display());
        assert_eq!((refused.code, refused.msg), (code::TRY_AGAIN_LATER, told));
        drop(first);
        open(directory.path()).unwrap();
        fs::write(directory.path().join("file"), "").unwrap();
        let node = super::super::node(&rig::request("ADD", "a"), link::driver("sriov"));
        let unusable = Records::within(Duration::ZERO, &directory.path().join("file"), node).unwrap_err();
        assert_eq!(CniError::from(unusable).code, code::IO_FAILURE);
    }

    #[test]
    fn a_turn_is_that_of_the_directory_which_has_the_name() {
        let directory = tempfile::tempdir().unwrap();
        let records = directory.path().join("records");
        let first = take_turn(Duration::ZERO, &records).unwrap();
        let waiting = std::thread::spawn({
            let records = records.clone();
            move || take_turn(Duration::from_secs(60), &records).unwrap()
        });
        // Long enough for it to wait, usually.
        std::thread::sleep(Duration::from_millis(50));
        fs::remove_dir(&records).unwrap();
        drop(first);
        let second = waiting.join().unwrap();
        assert_eq!(second.metadata().unwrap().ino(), fs::metadata(&records).unwrap().ino());
        let refused = take_turn(Duration::ZERO, &records).unwrap_err();
        assert!(matches!(refused, RecordsError::Busy { .. }), "{refused:?}");
    }

    /// Needs root, like the plugin.
    #[test]
    fn an_add_leaves_a_rollback_that_calls_another_plugin() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path();
        let netns = Netns::private().unwrap();
        let records = open(directory).unwrap();
        record(&records, (directory, "killed"), Some(&netns), false);
        for (container, has_begun) in [("begun", true), ("before", false)] {
            let mut plan = rig::plan(directory, container, 1);
            let plugin = Delegate { plugin: "hangs".to_owned(), config: cni::Map::new(), role: Role::Ipam };
            plan.attachments[0].steps = vec![Step::Delegate(plugin)];
            let mut record = records.engine.journal.create(rig::key(container), plan).unwrap();
            if has_begun {
                record.begin(&[StepRef(0, 0)]).unwrap();
            }
        }
        drop(records);
        let records = open(directory).unwrap();
        let calling = records.settle(Some(&rig::key("new")), &mut |problem| panic!("{problem}")).unwrap();
        assert_eq!(calling, [rig::key("begun")]);
        assert_eq!(records.engine.journal.keys().unwrap(), [rig::key("begun")]);
        // GC calls the plugin, unless it has no time left.
        for (until, expected) in
            [(Instant::now(), "no time was left"), (Instant::now() + Duration::from_secs(60), "hangs")]
        {
            let mut told: Vec<String> = Vec::new();
            records
                .finish(vec![rig::key("begun")], until, &mut |problem: &str| told.push(problem.to_owned()));
            assert_eq!(told.len(), 1, "{told:?}");
            let start = "container begun, interface eth0: not rolled back: ";
            assert!(told[0].starts_with(start) && told[0].contains(expected), "{told:?}");
        }
    }

    #[test]
    fn gc_keeps_what_has_a_record() {
        let id = |container: &str, ifname: &str| AttachmentId {
            container_id: container.to_owned(),
            ifname: ifname.to_owned(),
        };
        let valid = id("valid", "net1");
        let request = cni::Request { valid_attachments: Some(vec![valid.clone()]), ..rig::request("GC", "") };
        let kept = with_recorded(&request, vec![rig::key("b"), rig::key("a"), rig::key("b")]);
        let ids = vec![id("a", "eth0"), id("b", "eth0"), valid];
        let shown = json!([
            {"containerID": "a", "ifname": "eth0"},
            {"containerID": "b", "ifname": "eth0"},
            {"containerID": "valid", "ifname": "net1"},
        ]);
        assert_eq!(kept.valid_attachments, Some(ids));
        assert_eq!(kept.config["cni.dev/valid-attachments"], shown);
        let unknown = cni::Request { valid_attachments: None, ..request };
        let kept = with_recorded(&unknown, vec![rig::key("a")]);
        assert_eq!((kept.valid_attachments, kept.config), (None, unknown.config));
    }

    /// Needs root, like the plugin.
    #[test]
    fn what_a_killed_call_has_left_goes_with_the_next_one_but_for_what_that_is_about() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path();
        let netns = Netns::private().unwrap();
        let records = open(directory).unwrap();
        for (container, has_ended) in [("killed", false), ("other", false), ("whole", true)] {
            record(&records, (directory, container), Some(&netns), has_ended);
        }
        drop(records);
        assert_eq!(containers(directory), ["killed", "other", "whole"]);
        let mut told = Vec::new();
        let mut tell = |problem: &str| told.push(problem.to_owned());
        let records = open(directory).unwrap();
        assert_eq!(records.take_over(&mut tell).unwrap(), [rig::key("killed"), rig::key("other")]);
        assert_eq!(containers(directory), ["killed", "other", "whole"], "a DEL leaves them");
        drop(records);
        let records = open(directory).unwrap();
        records.settle(Some(&rig::key("killed")), &mut tell).unwrap();
        assert_eq!(containers(directory), ["killed", "whole"]);
        // The ADD that it is about rolls it back itself.
        records.make_way(&rig::key("killed"), &netns).unwrap();
        assert_eq!(containers(directory), ["whole"]);
        assert_eq!(records.engine.journal.keys().unwrap(), [rig::key("whole")]);
        assert_eq!(told, [""; 0]);
    }

    /// Needs root, like the plugin.
    #[test]
    fn an_attachment_is_not_made_twice_and_its_address_is_free_when_its_namespace_is_gone() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path();
        let netns = Netns::private().unwrap();
        let records = open(directory).unwrap();
        record(&records, (directory, "a"), Some(&netns), true);
        record(&records, (directory, "gone"), None, true);
        let refused = records.make_way(&rig::key("a"), &netns).unwrap_err();
        assert!(matches!(&refused, AttachError::AlreadyAttached(key) if *key == rig::key("a")), "{refused}");
        records.make_way(&rig::key("b"), &netns).unwrap();
        assert_eq!(containers(directory), ["a", "gone"]);
        records.make_way(&rig::key("gone"), &netns).unwrap();
        assert_eq!(containers(directory), ["a"]);
        assert_eq!(records.engine.journal.keys().unwrap(), [rig::key("a")]);
    }

    /// Needs root, like the plugin.
    #[test]
    fn gc_takes_the_attachments_of_its_network_that_are_not_valid_and_no_others() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path();
        let netns = Netns::private().unwrap();
        let records = open(directory).unwrap();
        for container in ["valid", "stale"] {
            record(&records, (directory, container), Some(&netns), true);
        }
        drop(records);
        let valid = AttachmentId { container_id: "valid".to_owned(), ifname: "eth0".to_owned() };
        let of = |name: &str| cni::Request {
            valid_attachments: Some(vec![valid.clone()]),
            name: name.to_owned(),
            ..rig::request("GC", "")
        };
        for (network, left) in
            [("others", &["meanwhile", "stale", "valid"][..]), ("pods", &["meanwhile", "valid"])]
        {
            let records = open(directory).unwrap();
            // The kernel's time of files is some milliseconds late.
            std::thread::sleep(Duration::from_millis(50));
            // An ADD that ended while GC waited: the runtime's list does not have it yet.
            let earlier = records.engine.journal.load(&rig::key("meanwhile")).unwrap();
            if let Loaded::Whole(earlier) = earlier {
                records.engine.roll_back_left(*earlier).unwrap();
            }
            record(&records, (directory, "meanwhile"), Some(&netns), true);
            let request = of(network);
            let driver = link::driver("sriov").unwrap();
            let interface = Interface { driver, request: &request, node: records.engine.node() };
            records.gc(&interface, &mut |problem| panic!("{problem}")).unwrap();
            let mut found = containers(directory);
            found.sort();
            assert_eq!(found, left, "{network}");
        }
    }
}
