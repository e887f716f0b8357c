//! The files in which sriov-cni records the holder of each VF, so that neither plugin takes a VF that the other has
//! given to a pod (`pkg/utils/pci_allocator.go` there). For each VF, `pci/ADDRESS` contains the path of its pod's
//! namespace, and a process that attaches or detaches the VF holds the lock `pci/vf_lock/ADDRESS.lock`. If the
//! namespace is gone, the VF has no holder.
//!
//! On a node without sriov-cni's directory, nothing is read and nothing is created, with two exceptions. The executable
//! `sriov` creates the directory, and so does an agent for a VF that a process drives: such a VF shows no holder. By
//! these files an agent and the executable on one node learn of each other's VFs as well.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::attach::StepError;
use crate::cni::code;
use crate::error_chain::Chain;
use crate::netns::Netns;
use crate::spec::{Device, DeviceId};
use crate::waits::{self, Resource};
use crate::{bounded, durable, flock};

/// The directory of sriov-cni's state.
const ROOT: &str = "/var/lib/cni/sriov";

/// How long an operation waits for sriov-cni to release the lock of a VF, which it holds during a whole ADD.
const PATIENCE: Duration = Duration::from_secs(5);

/// The longest path of a namespace, in bytes (`PATH_MAX`).
const LONGEST: usize = 4096;

/// sriov-cni's directory, if the node has one.
#[derive(Debug)]
pub(in crate::attach) struct SriovCni {
    root: PathBuf,
    /// Whether no VF is taken or given back without the directory.
    is_needed: bool,
}

impl Default for SriovCni {
    fn default() -> Self {
        Self { root: ROOT.into(), is_needed: false }
    }
}

/// A VF whose lock this process holds, so that sriov-cni neither attaches nor detaches it.
#[derive(Debug)]
pub(super) struct LockedVf {
    address: String,
    /// The file that names the holder's namespace.
    mark: PathBuf,
    /// `None`: the lock file is unusable, for sriov-cni too.
    _lock: Option<File>,
}

impl SriovCni {
    /// The directory is created before it is used: for a process beside which an agent may take VFs.
    pub(super) fn needed() -> Self {
        Self { is_needed: true, ..Self::default() }
    }

    /// The files in another directory, if that exists.
    #[cfg(test)]
    pub(super) fn at(root: PathBuf) -> Self {
        Self { root, is_needed: false }
    }

    /// Locks a device. `None`: sriov-cni is not on the node, or the device is not a VF. `waits_at`: the resource that
    /// the operation waits at while sriov-cni holds the lock; without it, this function does not wait.
    ///
    /// # Errors
    /// sriov-cni holds the lock (for all of [`PATIENCE`], if this waits), or its files cannot be used.
    pub(super) fn lock(
        &self,
        device: &Device,
        waits_at: Option<&Resource>,
    ) -> Result<Option<LockedVf>, StepError> {
        self.make_if_needed(device)?;
        let Some(vf) = self.unlocked(device) else { return Ok(None) };
        let pci = self.pci();
        let locks = pci.join("vf_lock");
        for directory in [&self.root, &pci, &locks] {
            make_usable(directory).map_err(failed(directory))?;
        }
        let path = locks.join(format!("{}.lock", vf.address));
        let mut options = OpenOptions::new();
        options
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
        let lock = options.open(&path).and_then(regular).map_err(failed(&path))?;
        let try_for = |patience| flock::lock(&lock, patience).map_err(failed(&path));
        let is_locked = match waits_at {
            // Usually the lock is free, and the operation need not give up its slot.
            Some(resource) => try_for(Duration::ZERO)? || waits::at(resource, || try_for(PATIENCE))?,
            None => try_for(Duration::ZERO)?,
        };
        match is_locked {
            true => Ok(Some(LockedVf { _lock: Some(lock), ..vf })),
            false => Err(SriovCniError::Locked(vf.address).into()),
        }
    }

    /// Returns a device without locking it. `None`: as for [`SriovCni::lock`].
    fn unlocked(&self, device: &Device) -> Option<LockedVf> {
        let (Some(_), DeviceId::Bus(address)) = (&device.function, &device.id) else { return None };
        let is_there = self.root.is_dir();
        is_there.then(|| LockedVf { address: address.clone(), mark: self.pci().join(address), _lock: None })
    }

    /// Creates the directory where the holder of the device has to be found in it: for each VF if it is needed,
    /// otherwise for one that a process drives. Its parent directory, which the node's state may be mounted at, is
    /// created only in the former case. In the latter an error is logged: a single plugin has no need of the files.
    ///
    /// # Errors
    /// The directory is needed and cannot be created.
    fn make_if_needed(&self, device: &Device) -> Result<(), StepError> {
        if device.function.is_none() || self.root.is_dir() {
            return Ok(());
        }
        let around = self.root.parent().unwrap_or(Path::new("/"));
        if self.is_needed {
            let made = fs::create_dir_all(around).and_then(|()| make_usable(&self.root));
            return made.map_err(failed(&self.root));
        }
        if device.userspace.is_some()
            && around.is_dir()
            && let Err(error) = make_usable(&self.root)
        {
            let path = self.root.display();
            tracing::warn!(%path, error = %Chain(&error), "the executable sriov would not learn that a pod has the VF");
        }
        Ok(())
    }

    fn pci(&self) -> PathBuf {
        self.root.join("pci")
    }

    /// Calls `act`, unless sriov-cni has given the device to a pod other than the previous holder, whose namespace is
    /// or was at `netns`. If sriov-cni's lock file is unusable, for example because another kind of file has its
    /// name, no process holds the lock, and `act` is called nevertheless: a device must go back to the node
    /// eventually.
    ///
    /// # Errors
    /// [`SriovCni::lock`] fails, sriov-cni's file of the device cannot be read, or `act` fails.
    pub(super) fn unless_anothers(
        &self,
        (device, netns): (&Device, &str),
        waits_at: Option<&Resource>,
        act: impl FnOnce(Option<&LockedVf>) -> Result<(), StepError>,
    ) -> Result<(), StepError> {
        let locked = match self.lock(device, waits_at) {
            Err(error @ StepError::SriovCni(SriovCniError::File { .. })) => {
                tracing::warn!(
                    device = %device.id, error = %Chain(&error),
                    "the device goes back without sriov-cni's lock"
                );
                self.unlocked(device)
            }
            locked => locked?,
        };
        if let Some(vf) = &locked
            && let Some(other) = vf.holder_beside(netns)?
        {
            tracing::debug!(
                device = vf.address,
                netns = other,
                "sriov-cni has given the device to another pod"
            );
            return Ok(());
        }
        act(locked.as_ref())
    }

    /// Calls `act` to give a device back and unmarks it, unless another pod holds the device: see
    /// [`SriovCni::unless_anothers`].
    ///
    /// # Errors
    /// Those of [`SriovCni::unless_anothers`].
    pub(in crate::attach) fn give_back(
        &self,
        (device, netns): (&Device, &str),
        waits_at: Option<&Resource>,
        act: impl FnOnce() -> Result<(), StepError>,
    ) -> Result<(), StepError> {
        self.unless_anothers((device, netns), waits_at, |vf| {
            act()?;
            vf.map_or(Ok(()), |vf| vf.unmark(netns))
        })
    }

    /// Marks a device as held by the pod whose namespace is at `netns`, if the mark is missing: sriov-cni was
    /// installed later, or has lost the mark.
    pub(super) fn mark_again(&self, device: &Device, netns: &str) {
        let mark = || match self.lock(device, None)? {
            Some(vf)
                if vf.marked()?.is_none_or(|marked| marked != netns)
                    && vf.holder_beside(netns)?.is_none() =>
            {
                vf.mark(netns)
            }
            _ => Ok(()),
        };
        if let Err(error) = mark() {
            tracing::warn!(device = %device.id, error = %Chain(&error), "cannot record for sriov-cni that a pod has the device");
        }
    }
}

impl LockedVf {
    /// Refuses a VF that sriov-cni has given to a pod other than the one whose namespace is at `netns`.
    ///
    /// # Errors
    /// sriov-cni has given the VF to another pod.
    pub(super) fn check_is_free_for(&self, netns: &str) -> Result<(), StepError> {
        match self.holder_beside(netns)? {
            Some(netns) => Err(SriovCniError::HasIt { device: self.address.clone(), netns }.into()),
            None => Ok(()),
        }
    }

    /// Marks the VF, so that sriov-cni refuses it while the namespace at `netns` exists.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(super) fn mark(&self, netns: &str) -> Result<(), StepError> {
        let temporary = format!(".{}.netattach", self.address);
        durable::replace(&self.mark, &temporary, netns.as_bytes(), 0o600).map_err(failed(&self.mark))
    }

    fn unmark(&self, netns: &str) -> Result<(), StepError> {
        match self.marked()?.is_some_and(|marked| marked == netns) {
            true => match fs::remove_file(&self.mark) {
                // sriov-cni removes the marks of namespaces that are gone.
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                removed => removed.map_err(failed(&self.mark)),
            },
            false => Ok(()),
        }
    }

    /// Returns the path of the namespace that holds the VF, if that namespace exists and its path is not `netns`.
    fn holder_beside(&self, netns: &str) -> Result<Option<String>, StepError> {
        let Some(marked) = self.marked()?.filter(|marked| marked != netns) else { return Ok(None) };
        // A namespace that cannot be opened for another reason may exist.
        let is_there = Netns::open(&marked).map_or_else(|error| !error.is_gone(), |_| true);
        Ok(is_there.then_some(marked))
    }

    /// Returns the path in the mark. Content that is not a path, as after a power failure, names no namespace; nor
    /// does a mark that is not a regular file.
    fn marked(&self) -> Result<Option<String>, StepError> {
        use io::ErrorKind::{FileTooLarge, InvalidData, InvalidInput, IsADirectory};
        match bounded::read_text(&self.mark, LONGEST) {
            Ok(marked) => Ok(Some(marked).filter(|path| !path.contains('\0'))),
            Err(error) if bounded::is_absent(&error) => Ok(None),
            Err(error)
                if matches!(error.kind(), FileTooLarge | InvalidData | InvalidInput | IsADirectory) =>
            {
                let path = self.mark.display();
                tracing::warn!(%path, error = %Chain(&error), "sriov-cni's file names no namespace");
                Ok(None)
            }
            Err(error) => Err(failed(&self.mark)(error)),
        }
    }
}

/// Creates a directory, or makes an existing one searchable: sriov-cni creates its directories with mode 0600, which
/// root can search only with a capability that the agent's container does not have.
fn make_usable(directory: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let mut permissions = fs::metadata(directory)?.permissions();
    if permissions.mode() & 0o100 == 0 {
        permissions.set_mode(permissions.mode() | 0o100);
        fs::set_permissions(directory, permissions)?;
    }
    Ok(())
}

/// Accepts a lock only if it is a regular file, as sriov-cni creates it.
fn regular(lock: File) -> io::Result<File> {
    match lock.metadata()?.is_file() {
        true => Ok(lock),
        false => Err(io::Error::new(io::ErrorKind::InvalidInput, "is no regular file")),
    }
}

fn failed(path: &Path) -> impl FnOnce(io::Error) -> StepError {
    let path = path.to_owned();
    move |source| StepError::SriovCni(SriovCniError::File { path, source })
}

/// Why a VF cannot be taken or given back beside sriov-cni.
#[derive(Debug, thiserror::Error)]
pub enum SriovCniError {
    /// sriov-cni attaches or detaches a VF.
    #[error("device {0}: sriov-cni holds its lock")]
    Locked(String),
    /// sriov-cni has moved a VF to a pod's namespace.
    #[error("device {device} is taken: sriov-cni has given it to {netns}")]
    HasIt {
        /// The device.
        device: String,
        /// The path of the pod's namespace.
        netns: String,
    },
    /// sriov-cni's files cannot be used.
    #[error("sriov-cni's file {path}{}", durable::remedy(source))]
    File {
        /// Its path.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: std::io::Error,
    },
}

impl SriovCniError {
    /// The CNI code.
    pub(in crate::attach) fn code(&self) -> u32 {
        match self {
            Self::Locked(_) | Self::HasIt { .. } => code::TRY_AGAIN_LATER,
            Self::File { .. } => code::IO_FAILURE,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::attach::device::DeviceError;
    use crate::spec::VirtualFunction;
    use crate::waits::tests::Visits;

    const VF: &str = "0000:03:02.1";
    const GONE: &str = "/run/netns/netattach-test-gone";
    /// Another pod's, which is there as long as this test.
    const OTHER: &str = "/proc/self/ns/net";

    fn vf(function: bool) -> Device {
        let function = function.then(|| VirtualFunction { physical: "0000:03:00.0".to_owned(), number: 1 });
        let id = DeviceId::Bus(VF.to_owned());
        Device { pod_name: "net1".to_owned(), id, userspace: None, function, rdma: None, switchdev: false }
    }

    fn lock(of: &SriovCni) -> LockedVf {
        of.lock(&vf(true), None).unwrap().unwrap()
    }

    /// A node with sriov-cni, whose directories have the mode that it gives them, and the file of the VF.
    fn node() -> (tempfile::TempDir, SriovCni, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().join("sriov");
        let pci = root.join("pci");
        fs::create_dir_all(&pci).unwrap();
        for made in [&pci, &root] {
            fs::set_permissions(made, PermissionsExt::from_mode(0o600)).unwrap();
        }
        let mark = pci.join(VF);
        (directory, SriovCni { root, is_needed: false }, mark)
    }

    /// Rows: SRV-beside.
    #[test]
    fn without_sriov_cni_nothing_is_made() {
        let directory = tempfile::tempdir().unwrap();
        let absent = SriovCni { root: directory.path().join("sriov"), is_needed: false };
        assert!(absent.lock(&vf(true), None).unwrap().is_none());
        absent.mark_again(&vf(true), OTHER);
        let mut given = false;
        let give = || {
            given = true;
            Ok(())
        };
        absent.give_back((&vf(true), GONE), None, give).unwrap();
        assert!(given);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
        let (_directory, present, _) = node();
        assert!(present.lock(&vf(false), None).unwrap().is_none(), "not a VF");
    }

    /// Rows: SRV-beside.
    #[test]
    fn whoever_may_not_be_alone_makes_the_directory_and_an_agent_for_what_shows_no_holder() {
        let directory = tempfile::tempdir().unwrap();
        let of =
            |name: &str, is_needed| SriovCni { root: directory.path().join(name).join("sriov"), is_needed };
        let driven = Device { userspace: Some("vfio-pci".to_owned()), ..vf(true) };
        // The executable, on a node where no plugin has kept anything yet.
        let executable = of("var", true);
        assert!(executable.lock(&vf(false), None).unwrap().is_none() && !executable.root.exists());
        lock(&executable).mark(OTHER).unwrap();
        // The agent finds it there.
        let agent = of("var", false);
        let refused = lock(&agent).check_is_free_for(GONE).unwrap_err().to_string();
        assert_eq!(refused, format!("device {VF} is taken: sriov-cni has given it to {OTHER}"));
        // Without it, the agent makes it for a VF that a process drives, if the node's directory is mounted.
        let agent = of("mounted", false);
        assert!(agent.lock(&driven, None).unwrap().is_none() && !agent.root.exists());
        fs::create_dir(directory.path().join("mounted")).unwrap();
        assert!(agent.lock(&vf(true), None).unwrap().is_none() && !agent.root.exists());
        assert!(agent.lock(&driven, None).unwrap().is_some() && agent.root.is_dir());
        // Something else has the name.
        fs::write(directory.path().join("file"), "").unwrap();
        let failed = of("file", true).lock(&vf(true), None).unwrap_err();
        assert!(matches!(failed, StepError::SriovCni(SriovCniError::File { .. })), "{failed:?}");
    }

    /// Rows: SRV-beside.
    #[test]
    fn a_vf_is_either_sriov_cnis_or_ours() {
        let (_directory, sriov_cni, mark) = node();
        let refused = |netns: &str| lock(&sriov_cni).check_is_free_for(netns).err().map(|it| it.to_string());
        let marked = || fs::read_to_string(&mark).ok();
        assert_eq!(refused(GONE), None);
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(
            [sriov_cni.root.as_path(), mark.parent().unwrap()].map(mode),
            [0o700, 0o700],
            "searchable"
        );
        assert_eq!(mode(&sriov_cni.root.join(format!("pci/vf_lock/{VF}.lock"))), 0o600);

        fs::write(&mark, OTHER).unwrap();
        let expected = format!("device {VF} is taken: sriov-cni has given it to {OTHER}");
        assert_eq!(refused(GONE), Some(expected));
        assert_eq!(refused(OTHER), None, "a repeated ADD");
        fs::write(&mark, GONE).unwrap();
        assert_eq!(refused(OTHER), None, "its pod is gone");

        lock(&sriov_cni).mark(OTHER).unwrap();
        assert_eq!((marked().as_deref(), mode(&mark)), (Some(OTHER), 0o600));
        // A device that cannot be given back stays marked.
        let lost = || Err(StepError::Device(DeviceError::NotThere(VF.to_owned())));
        assert!(sriov_cni.give_back((&vf(true), OTHER), None, lost).is_err());
        assert_eq!(marked().as_deref(), Some(OTHER));
        sriov_cni.give_back((&vf(true), OTHER), None, || Ok(())).unwrap();
        assert_eq!(marked(), None);

        // Another namespace holds the device now; a mark of a namespace that is gone counts as absent.
        fs::write(&mark, OTHER).unwrap();
        sriov_cni.give_back((&vf(true), GONE), None, || unreachable!()).unwrap();
        assert_eq!(marked().as_deref(), Some(OTHER));
        fs::write(&mark, "").unwrap();
        let mut given = false;
        let give = || {
            given = true;
            Ok(())
        };
        sriov_cni.give_back((&vf(true), OTHER), None, give).unwrap();
        assert_eq!((given, marked().as_deref()), (true, Some("")));

        sriov_cni.mark_again(&vf(true), GONE);
        assert_eq!(marked().as_deref(), Some(GONE), "the file named no pod that is there");
        fs::write(&mark, "\0\0").unwrap();
        assert_eq!(refused(GONE), None, "it is no path");
        sriov_cni.mark_again(&vf(true), OTHER);
        assert_eq!(marked().as_deref(), Some(OTHER));
        sriov_cni.mark_again(&vf(true), GONE);
        assert_eq!(marked().as_deref(), Some(OTHER), "the file of a pod that is there stays as it is");
        let names = |directory: &Path| fs::read_dir(directory).unwrap().count();
        assert_eq!(names(mark.parent().unwrap()), 2, "the file and the locks");
    }

    /// Rows: SRV-beside.
    #[test]
    fn while_sriov_cni_is_at_a_vf_nobody_else_is() {
        let (_directory, sriov_cni, mark) = node();
        let held = lock(&sriov_cni);
        let expected = format!("device {VF}: sriov-cni holds its lock");
        let refused = sriov_cni.lock(&vf(true), None).unwrap_err();
        assert_eq!(refused.to_string(), expected);
        let refused = sriov_cni.give_back((&vf(true), GONE), None, || unreachable!()).unwrap_err();
        assert_eq!(refused.to_string(), expected);
        sriov_cni.mark_again(&vf(true), OTHER);
        assert!(!mark.exists());
        drop(held);
        lock(&sriov_cni);
    }

    /// An operation that occupies a slot keeps others from using it.
    #[test]
    fn who_waits_for_sriov_cni_stands_where_no_other_network_needs_a_place() {
        let (_directory, sriov_cni, _) = node();
        let resource = Resource::VfLocks { network: "lan".to_owned() };
        let visits = Arc::<Visits>::default();
        let locked = |at: Option<&Resource>| {
            let place = Arc::clone(&visits);
            waits::within(place, || sriov_cni.lock(&vf(true), at)).map(|vf| vf.is_some())
        };
        assert!(locked(Some(&resource)).unwrap());
        assert_eq!(visits.all(), [], "nobody has it");
        let held = lock(&sriov_cni);
        let ends = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            drop(held);
        });
        assert!(locked(Some(&resource)).unwrap(), "in time");
        ends.join().unwrap();
        assert_eq!(visits.all(), [resource]);
        let _held = lock(&sriov_cni);
        assert!(locked(None).is_err());
        assert_eq!(visits.all().len(), 1);
    }

    /// Creates another kind of file under the name of a lock or of a VF's file.
    fn make_strange(path: &Path, kind: &str, elsewhere: &Path) {
        match kind {
            "link" => std::os::unix::fs::symlink(elsewhere, path).unwrap(),
            "directory" => fs::create_dir(path).unwrap(),
            "fifo" => {
                rustix::fs::mkfifoat(rustix::fs::CWD, path, rustix::fs::Mode::RWXU).unwrap();
            }
            "text" => fs::write(path, b"/run/netns/\xff").unwrap(),
            other => unreachable!("{other}"),
        }
    }

    /// Rows: SRV-beside.
    #[test]
    fn what_is_no_lock_fails_an_add_by_its_name_and_no_del() {
        for kind in ["link", "directory", "fifo"] {
            let (directory, sriov_cni, mark) = node();
            lock(&sriov_cni).mark(OTHER).unwrap();
            let path = sriov_cni.root.join(format!("pci/vf_lock/{VF}.lock"));
            fs::remove_file(&path).unwrap();
            let elsewhere = directory.path().join("elsewhere");
            make_strange(&path, kind, &elsewhere);
            // A FIFO with a reader can be opened.
            let _reader = (kind == "fifo").then(|| {
                let options = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&path);
                options.unwrap()
            });
            assert!(
                matches!(
                    sriov_cni.lock(&vf(true), None),
                    Err(StepError::SriovCni(SriovCniError::File { path: named, .. })) if named == path
                ),
                "{kind}"
            );
            assert!(!elsewhere.exists(), "it is not followed");
            // The recorded owner counts all the same.
            sriov_cni.give_back((&vf(true), GONE), None, || unreachable!()).unwrap();
            let mut given = false;
            let give = || {
                given = true;
                Ok(())
            };
            sriov_cni.give_back((&vf(true), OTHER), None, give).unwrap();
            assert!(given && !mark.exists(), "{kind}");
        }
    }

    /// Rows: SRV-beside.
    #[test]
    fn what_is_no_file_of_a_vf_keeps_it_from_nobody() {
        for kind in ["directory", "fifo", "text"] {
            let (directory, sriov_cni, mark) = node();
            make_strange(&mark, kind, directory.path());
            lock(&sriov_cni).check_is_free_for(GONE).unwrap();
            let mut given = false;
            let give = || {
                given = true;
                Ok(())
            };
            sriov_cni.give_back((&vf(true), OTHER), None, give).unwrap();
            assert!(given && mark.symlink_metadata().is_ok(), "{kind}");
        }
    }
}
