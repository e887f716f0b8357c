//! The pin tree: its paths, the check of existing pins, and its removal.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use aya::maps::{Map, MapData};
use netattach_common::LAYOUT_VERSION;
use rustix::mount::{MountFlags, mount};

use super::BpfError;
use super::map_table::{MapSpec, map_name};
use super::program_table::Program;

/// `BPF_FS_MAGIC` of `linux/magic.h`.
const BPF_FS_MAGIC: u64 = 0xcafe_4a11;

/// Which of the pins exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Found {
    /// The first start on this node, or since the pins were removed.
    Nothing,
    /// An agent was killed while it created them, or some were removed.
    Some,
    /// All maps and programs.
    Everything,
}

/// Paths below one root.
#[derive(Debug, Clone)]
pub(super) struct Pins {
    version: PathBuf,
    programs: PathBuf,
}

impl Pins {
    pub(super) fn new(root: &Path) -> Self {
        let version = root.join(format!("v{LAYOUT_VERSION}"));
        Self { programs: version.join("prog"), version }
    }

    /// The directories of other layout versions, of earlier or later agents.
    pub(super) fn other_layouts(&self) -> Result<Vec<PathBuf>, BpfError> {
        let root = self.version.parent().unwrap_or(&self.version);
        let failed = |source| BpfError::PinTree { action: "list", path: root.to_path_buf(), source };
        let mut others = Vec::new();
        for entry in fs::read_dir(root).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if layout_version(&name).is_some_and(|version| version != LAYOUT_VERSION) {
                others.push(path);
            }
        }
        others.sort();
        Ok(others)
    }

    /// Removes the pins of agents with other layouts. Programs that still run on devices keep running until
    /// they are replaced.
    pub(super) fn remove_other_layouts(&self) -> Result<(), BpfError> {
        for path in self.other_layouts()? {
            fs::remove_dir_all(&path).map_err(|source| BpfError::PinTree {
                action: "remove",
                path: path.clone(),
                source,
            })?;
            crate::crash_point!("layout", "removed");
        }
        Ok(())
    }

    pub(super) fn map(&self, name: &str) -> PathBuf {
        self.version.join(name)
    }

    pub(super) fn program(&self, program: Program) -> PathBuf {
        self.programs.join(program.name())
    }

    /// Every pin of a complete tree.
    pub(super) fn all(&self) -> impl Iterator<Item = PathBuf> {
        let programs = Program::ALL.map(|program| self.program(program));
        programs.into_iter().chain(map_name::ALL.iter().map(|name| self.map(name)))
    }

    /// The pin of a new program before it replaces the pin of its predecessor.
    pub(super) fn next_program(&self, program: Program) -> PathBuf {
        self.programs.join(format!("next_{}", program.name()))
    }

    /// Creates the directories, if the root is on a BPF filesystem.
    pub(super) fn create(&self, root: &Path) -> Result<(), BpfError> {
        check_root(root)?;
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&self.programs)
            .map_err(|source| BpfError::PinTree { action: "create", path: self.programs.clone(), source })
    }

    /// Checks the pinned maps, and returns how many of the pins exist.
    ///
    /// aya accepts any map at a pin path; a map of another size would be read and written beyond its values.
    pub(super) fn verify(&self, specs: &[MapSpec]) -> Result<Found, BpfError> {
        let mut found = 0;
        for spec in specs {
            let path = self.map(spec.name);
            if exists(&path)? {
                spec.verify(&path)?;
                found += 1;
            }
        }
        for program in Program::ALL {
            found += usize::from(exists(&self.program(program))?);
        }
        Ok(match found {
            0 => Found::Nothing,
            all if all == specs.len() + Program::ALL.len() => Found::Everything,
            _ => Found::Some,
        })
    }

    /// Opens a map as one of aya's typed maps.
    pub(super) fn open<M: TryFrom<Map>>(&self, name: &'static str) -> Result<M, BpfError>
    where
        aya::maps::MapError: From<M::Error>,
    {
        let path = self.map(name);
        MapData::from_pin(&path)
            .and_then(Map::from_map_data)
            .and_then(|map| Ok(M::try_from(map)?))
            .map_err(|source| BpfError::OpenMap { path, source })
    }
}

/// Refuses a root that cannot contain pins.
pub(super) fn check_root(root: &Path) -> Result<(), BpfError> {
    refuse_dots(root)?;
    if is_on_bpffs(root)? { Ok(()) } else { Err(BpfError::NotBpffs(root.to_path_buf())) }
}

/// Removes every pin below a root, of any layout version: programs and maps are freed when nothing uses them
/// any more. Programs still attached to devices keep running with their maps. A missing root is not an error;
/// a root that contains anything else is refused.
pub fn remove_all_pins(root: &Path) -> Result<(), BpfError> {
    if !are_removable(root)? {
        return Ok(());
    }
    fs::remove_dir_all(root).map_err(|source| BpfError::PinTree {
        action: "remove",
        path: root.to_path_buf(),
        source,
    })
}

/// Whether there is a root of pins that contains nothing else: the precondition of [`remove_all_pins`].
///
/// # Errors
/// The path is not such a root.
pub fn are_removable(root: &Path) -> Result<bool, BpfError> {
    refuse_dots(root)?;
    match fs::symlink_metadata(root) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        _ if is_on_bpffs(root)? => {}
        _ => return Err(BpfError::NotBpffs(root.to_path_buf())),
    }
    refuse_foreign(root)?;
    Ok(true)
}

/// Refuses a root with other pins: with a wrong root, for instance the directory above, other programs' pins
/// would be removed.
fn refuse_foreign(root: &Path) -> Result<(), BpfError> {
    let failed = |source| BpfError::PinTree { action: "list", path: root.to_path_buf(), source };
    for entry in fs::read_dir(root).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name().to_string_lossy().into_owned();
        if layout_version(&name).is_none() && name != LINKS {
            return Err(BpfError::ForeignPin { path: root.to_path_buf(), name });
        }
    }
    Ok(())
}

/// The directory of links below the root, which agents of all layouts share.
pub(super) const LINKS: &str = "link";

/// The layout version of a directory below the root.
fn layout_version(name: &str) -> Option<u32> {
    name.strip_prefix('v').and_then(|version| version.parse().ok())
}

pub(super) fn exists(path: &Path) -> Result<bool, BpfError> {
    path.try_exists().map_err(|source| BpfError::PinTree {
        action: "look for",
        path: path.to_path_buf(),
        source,
    })
}

/// Refuses names with dots. Looking up such a name on a BPF filesystem fails with `EPERM` (`bpf_lookup` of
/// `kernel/bpf/inode.c`), which does not identify the cause.
fn refuse_dots(root: &Path) -> Result<(), BpfError> {
    let opened = root.ancestors().find_map(|path| Some((path, fs::File::open(path).ok()?)));
    let Some((base, directory)) = opened else { return Ok(()) };
    if !is_bpffs(&directory).unwrap_or(false) {
        return Ok(());
    }
    let below = root.strip_prefix(base).unwrap_or(root);
    let mut names = below.components().map(|name| name.as_os_str().to_string_lossy());
    match names.find(|name| name.contains('.')) {
        Some(name) => Err(BpfError::DottedName { path: root.to_path_buf(), name: name.into_owned() }),
        None => Ok(()),
    }
}

fn is_bpffs(directory: &fs::File) -> io::Result<bool> {
    let stat = rustix::fs::fstatfs(directory.as_fd())?;
    Ok(u64::try_from(stat.f_type).is_ok_and(|magic| magic == BPF_FS_MAGIC))
}

/// Mounts a BPF filesystem (Linux 4.4) on a directory, for root alone, unless the directory is on one already. Returns
/// whether a filesystem was mounted.
///
/// # Errors
/// The directory does not exist, or the kernel refuses: `CAP_SYS_ADMIN` is needed.
pub fn mount_bpffs(directory: &Path) -> Result<bool, BpfError> {
    let failed =
        |source: io::Error| BpfError::PinTree { action: "mount on", path: directory.to_path_buf(), source };
    let is_one = fs::File::open(directory).and_then(|opened| is_bpffs(&opened)).map_err(failed)?;
    if !is_one {
        let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        mount("bpf", directory, "bpf", flags, c"mode=700").map_err(|error| failed(error.into()))?;
    }
    Ok(!is_one)
}

/// Whether a path is on a BPF file system, or would be if it was there.
///
/// # Errors
/// A directory above the path cannot be opened.
pub fn is_on_bpffs(path: &Path) -> Result<bool, BpfError> {
    for candidate in path.ancestors() {
        let failed = |source: io::Error| BpfError::PinTree {
            action: "look at the filesystem of",
            path: candidate.to_path_buf(),
            source,
        };
        match fs::File::open(candidate) {
            Ok(directory) => return is_bpffs(&directory).map_err(failed),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(failed(error)),
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::super::Config;
    use super::super::map_table::specs;
    use super::*;

    #[test]
    fn names_fit_the_kernel() {
        let config = Config::new("/sys/fs/bpf/x");
        let programs = Program::ALL.map(Program::name);
        for name in specs(&config).iter().map(|spec| spec.name).chain(programs) {
            assert!(name.len() <= 15, "{name}");
        }
    }

    #[test]
    fn a_root_elsewhere_is_refused_with_the_mount_command() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().join("deep/er");
        let error = Pins::new(&root).create(&root).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("{} is not on a BPF filesystem: run `mount -t bpf bpf /sys/fs/bpf`", root.display())
        );
        assert!(!root.exists());
    }

    #[test]
    fn removing_pins_never_removes_ordinary_files() {
        let directory = tempfile::tempdir().unwrap();
        assert!(matches!(remove_all_pins(directory.path()), Err(BpfError::NotBpffs(_))));
        assert!(directory.path().exists());
        remove_all_pins(&directory.path().join("absent")).unwrap();
    }
}
