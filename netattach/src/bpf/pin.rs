//! The pin tree: where everything is, what must be there, and how it goes away.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use aya::maps::{Map, MapData, MapInfo};
use netattach_common as common;
use netattach_common::{AddressKey, FlowKey, FragmentKey, Ip4, Ip6, LAYOUT_VERSION, PolicyAddress, Side};

use super::sys::Direction;
use super::{BpfError, Config, MapProperty};

/// `BPF_FS_MAGIC` of `linux/magic.h`.
const BPF_FS_MAGIC: u64 = 0xcafe_4a11;
const BPF_F_NO_PREALLOC: u32 = 1;
const BPF_F_MMAPABLE: u32 = 1 << 10;

/// Names of the pinned maps; the kernel knows them by the same names (15 bytes at most).
pub(super) mod map_name {
    pub(in super::super) const LINK: &str = "na_link";
    pub(in super::super) const HINT: &str = "na_hint";
    pub(in super::super) const ATTACHMENT: &str = "na_att";
    pub(in super::super) const POLICY: &str = "na_policy";
    pub(in super::super) const ADDRESS4: &str = "na_addr4";
    pub(in super::super) const ADDRESS6: &str = "na_addr6";
    pub(in super::super) const PEER4: &str = "na_peer4";
    pub(in super::super) const PEER6: &str = "na_peer6";
    pub(in super::super) const PREFIX4: &str = "na_cidr4";
    pub(in super::super) const PREFIX6: &str = "na_cidr6";
    pub(in super::super) const PORT: &str = "na_l4";
    pub(in super::super) const RULE: &str = "na_rule";
    pub(in super::super) const FLOW4: &str = "na_ct4";
    pub(in super::super) const FLOW6: &str = "na_ct6";
    pub(in super::super) const OWN4: &str = "na_own4";
    pub(in super::super) const OWN6: &str = "na_own6";
    pub(in super::super) const SHARE: &str = "na_share";
    pub(in super::super) const FRAGMENT4: &str = "na_frag4";
    pub(in super::super) const FRAGMENT6: &str = "na_frag6";
    pub(in super::super) const PARENT: &str = "na_par";
    pub(in super::super) const VLAN: &str = "na_vlan";
    pub(in super::super) const LIMIT: &str = "na_limit";
    pub(in super::super) const RECORD: &str = "na_record";
    pub(in super::super) const STATS: &str = "na_stat";
    pub(in super::super) const CLOCK: &str = "na_clock";
    pub(in super::super) const CONFIG: &str = "na_cfg";
    pub(in super::super) const FAST_PORT: &str = "na_fast_port";
    pub(in super::super) const STATION: &str = "na_fast_mac";
    pub(in super::super) const STATION_HINT: &str = "na_fast_hint";
    pub(in super::super) const FAST_STATS: &str = "na_fast_stat";
    pub(in super::super) const FAST_UNTIL: &str = "na_fast_until";
    pub(in super::super) const PROGRAM: &str = "na_prog";
    pub(in super::super) const UPLINK: &str = "na_uplink";
    pub(in super::super) const LOCAL: &str = "na_local";
    pub(in super::super) const SEEN: &str = "na_seen";
    pub(in super::super) const IN_POD: &str = "na_pod";
    pub(in super::super) const ON_PARENT: &str = "na_par_prog";
    pub(in super::super) const GATE: &str = "na_gate";
    pub(in super::super) const GUARD: &str = "na_guard";

    pub(in super::super) const ALL: &[&str] = &[
        LINK,
        HINT,
        ATTACHMENT,
        POLICY,
        ADDRESS4,
        ADDRESS6,
        PEER4,
        PEER6,
        PREFIX4,
        PREFIX6,
        PORT,
        RULE,
        FLOW4,
        FLOW6,
        OWN4,
        OWN6,
        SHARE,
        FRAGMENT4,
        FRAGMENT6,
        PARENT,
        VLAN,
        LIMIT,
        RECORD,
        STATS,
        CLOCK,
        CONFIG,
        FAST_PORT,
        STATION,
        STATION_HINT,
        FAST_STATS,
        FAST_UNTIL,
        PROGRAM,
        UPLINK,
        LOCAL,
        SEEN,
        IN_POD,
        ON_PARENT,
        GATE,
        GUARD,
    ];
}

/// A program of the object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Program {
    /// Attached to devices that are one attachment's.
    At(Side),
    /// For parents of macvlans: what their pods send, what they receive. Attached by filters, and where
    /// [`Program::Entry`] goes on by a tail call.
    OnParent(Side),
    /// Attached to parents by tcx links.
    Entry(Entry),
    /// Attached to uplinks of the node: what comes in by them.
    Wire,
    /// Where the programs of devices in pods go on by a tail call; attached there by filters.
    InPod(Side),
    /// Run by the drivers of uplinks (XDP).
    Early,
    /// Run by a rule of the node's packet filter, behind its translation of addresses.
    Routed,
    /// Where [`Side::FromPod`]'s and [`Program::Wire`] go on by a tail call.
    Fast,
}

impl Program {
    /// Those that others go on in come first.
    pub const ALL: [Self; 13] = [
        Self::Fast,
        Self::Wire,
        Self::Early,
        Self::Routed,
        Self::At(Side::FromPod),
        Self::At(Side::ToPod),
        Self::OnParent(Side::FromPod),
        Self::OnParent(Side::ToPod),
        Self::Entry(Entry::InFrom),
        Self::Entry(Entry::InTo),
        Self::Entry(Entry::Out),
        Self::InPod(Side::FromPod),
        Self::InPod(Side::ToPod),
    ];

    /// Its name in the object, in the kernel and as a pin.
    pub const fn name(self) -> &'static str {
        match self {
            Self::At(Side::FromPod) => "na_from_pod",
            Self::At(Side::ToPod) => "na_to_pod",
            Self::OnParent(Side::FromPod) => "na_par_from",
            Self::OnParent(Side::ToPod) => "na_par_to",
            Self::Entry(Entry::InFrom) => "na_par_in_from",
            Self::Entry(Entry::InTo) => "na_par_in_to",
            Self::Entry(Entry::Out) => "na_par_out",
            Self::Wire => "na_wire",
            Self::InPod(Side::FromPod) => "na_pod_from",
            Self::InPod(Side::ToPod) => "na_pod_to",
            Self::Early => "na_xdp",
            Self::Routed => "na_routed",
            Self::Fast => "na_fast",
        }
    }

    /// The hook of its device that its links are on.
    pub(super) const fn direction(self) -> Direction {
        match self {
            // What a pod sends comes in by the node's end, and leaves by its own.
            Self::At(Side::FromPod) | Self::InPod(Side::ToPod) => Direction::Ingress,
            Self::At(Side::ToPod) | Self::InPod(Side::FromPod) => Direction::Egress,
            Self::Entry(Entry::InFrom | Entry::InTo) => Direction::Ingress,
            Self::Entry(Entry::Out) => Direction::Egress,
            Self::OnParent(_) | Self::Wire | Self::Early | Self::Routed | Self::Fast => Direction::Ingress,
        }
    }

    /// Its map of programs and its slot there, if others go on in it.
    pub(super) const fn slot(self) -> Option<(&'static str, u32)> {
        match self {
            Self::Fast => Some((map_name::PROGRAM, 0)),
            Self::InPod(Side::FromPod) => Some((map_name::IN_POD, 0)),
            Self::InPod(Side::ToPod) => Some((map_name::IN_POD, 1)),
            Self::OnParent(Side::FromPod) => Some((map_name::ON_PARENT, 0)),
            Self::OnParent(Side::ToPod) => Some((map_name::ON_PARENT, 1)),
            Self::At(_) | Self::Entry(_) | Self::Wire | Self::Early | Self::Routed => None,
        }
    }
}

/// A place of a parent's link, and the program that it runs: it says where it is, which a link cannot, and goes on in
/// [`Program::OnParent`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry {
    /// Ingress, for the sender.
    InFrom,
    /// Ingress, for the receiver.
    InTo,
    /// Egress, for the sender.
    Out,
}

impl Entry {
    /// In the order in which a packet meets them.
    pub const ALL: [Self; 3] = [Self::InFrom, Self::InTo, Self::Out];
}

/// What a map must be like.
#[derive(Debug, Clone, Copy)]
pub(super) struct MapSpec {
    pub(super) name: &'static str,
    kind: MapKind,
    key_size: usize,
    value_size: usize,
    pub(super) max_entries: u32,
}

/// `enum bpf_map_type`, with the flags each of our maps is created with.
#[derive(Debug, Clone, Copy)]
enum MapKind {
    /// Not preallocated.
    Hash,
    Array,
    /// Memory-mappable.
    SharedArray,
    PerCpuArray,
    LruHash,
    LpmTrie,
    /// Programs to go on in.
    ProgramArray,
    /// No keys; the size in bytes instead of entries.
    RingBuffer,
}

impl MapKind {
    const fn number_and_flags(self) -> (u32, u32) {
        match self {
            Self::Hash => (1, BPF_F_NO_PREALLOC),
            Self::Array => (2, 0),
            Self::SharedArray => (2, BPF_F_MMAPABLE),
            Self::PerCpuArray => (6, 0),
            Self::ProgramArray => (3, 0),
            Self::LruHash => (9, 0),
            Self::LpmTrie => (11, BPF_F_NO_PREALLOC),
            Self::RingBuffer => (27, 0),
        }
    }
}

/// All maps, with the capacities of `config`.
pub(super) fn specs(config: &Config) -> Vec<MapSpec> {
    use map_name as name;

    fn spec<K, V>(name: &'static str, kind: MapKind, max_entries: u32) -> MapSpec {
        MapSpec { name, kind, key_size: size_of::<K>(), value_size: size_of::<V>(), max_entries }
    }
    /// A prefix: its length in bits, then the data.
    type Prefix<K> = (u32, K);
    vec![
        spec::<u32, u32>(name::LINK, MapKind::Hash, config.max_attachments),
        spec::<u32, u32>(name::HINT, MapKind::Array, common::capacity::HINTS as u32),
        spec::<u32, common::AttachmentRecord>(name::ATTACHMENT, MapKind::Array, config.max_attachments),
        spec::<u32, common::PolicyIds>(name::POLICY, MapKind::SharedArray, config.max_attachments),
        spec::<AddressKey<Ip4>, u32>(name::ADDRESS4, MapKind::Hash, config.max_addresses),
        spec::<AddressKey<Ip6>, u32>(name::ADDRESS6, MapKind::Hash, config.max_addresses),
        spec::<PolicyAddress<Ip4>, u32>(name::PEER4, MapKind::Hash, config.max_peers_v4),
        spec::<PolicyAddress<Ip6>, u32>(name::PEER6, MapKind::Hash, config.max_peers_v6),
        spec::<Prefix<PolicyAddress<Ip4>>, u32>(name::PREFIX4, MapKind::LpmTrie, config.max_peers_v4),
        spec::<Prefix<PolicyAddress<Ip6>>, u32>(name::PREFIX6, MapKind::LpmTrie, config.max_peers_v6),
        spec::<Prefix<common::PortKey>, common::PortRule>(name::PORT, MapKind::LpmTrie, config.max_ports),
        spec::<common::RuleKey, u64>(name::RULE, MapKind::Hash, config.max_rules),
        spec::<FlowKey<Ip4>, common::Flow>(name::FLOW4, MapKind::Hash, config.max_flows_v4),
        spec::<FlowKey<Ip6>, common::Flow>(name::FLOW6, MapKind::Hash, config.max_flows_v6),
        spec::<common::PlaceKey, FlowKey<Ip4>>(name::OWN4, MapKind::Hash, config.max_flows_v4),
        spec::<common::PlaceKey, FlowKey<Ip6>>(name::OWN6, MapKind::Hash, config.max_flows_v6),
        spec::<u32, common::Share>(name::SHARE, MapKind::Array, config.max_attachments),
        spec::<FragmentKey<Ip4>, common::Fragmented>(name::FRAGMENT4, MapKind::LruHash, config.max_fragments),
        spec::<FragmentKey<Ip6>, common::Fragmented>(name::FRAGMENT6, MapKind::LruHash, config.max_fragments),
        spec::<common::ParentKey, common::ParentEntry>(
            name::PARENT,
            MapKind::Hash,
            config.max_attachments.saturating_mul(2),
        ),
        spec::<common::VlanKey, u32>(name::VLAN, MapKind::Hash, config.max_vlans),
        spec::<u32, common::Limits>(name::LIMIT, MapKind::Array, config.max_attachments),
        spec::<(), ()>(name::RECORD, MapKind::RingBuffer, config.record_bytes),
        spec::<u32, common::Stats>(name::STATS, MapKind::PerCpuArray, config.max_attachments),
        spec::<u32, common::Reading>(name::CLOCK, MapKind::Array, 1),
        spec::<u32, common::Config>(name::CONFIG, MapKind::Array, 1),
        spec::<u32, common::FastPort>(name::FAST_PORT, MapKind::Array, config.max_attachments),
        spec::<common::StationKey, u32>(name::STATION, MapKind::Hash, config.max_attachments),
        spec::<u32, u32>(name::STATION_HINT, MapKind::Array, common::capacity::HINTS as u32),
        spec::<u32, common::FastStats>(name::FAST_STATS, MapKind::PerCpuArray, config.max_attachments),
        spec::<u32, u64>(name::FAST_UNTIL, MapKind::Array, 1),
        spec::<u32, u32>(name::PROGRAM, MapKind::ProgramArray, 1),
        spec::<u32, common::Uplink>(name::UPLINK, MapKind::Hash, common::capacity::UPLINKS as u32),
        spec::<common::LocalKey, u32>(name::LOCAL, MapKind::Hash, config.max_addresses),
        spec::<common::StationKey, common::Seen>(
            name::SEEN,
            MapKind::LruHash,
            common::capacity::STATIONS as u32,
        ),
        spec::<u32, u32>(name::IN_POD, MapKind::ProgramArray, 2),
        spec::<u32, u32>(name::ON_PARENT, MapKind::ProgramArray, 2),
        spec::<u32, u64>(name::GATE, MapKind::Array, config.max_attachments),
        spec::<Ip6, u32>(name::GUARD, MapKind::Hash, config.max_addresses),
    ]
}

/// Which of the pins are there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Found {
    /// The first start on this node, or since the pins were removed.
    Nothing,
    /// An agent was killed while it created them, or someone removed pins.
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

    /// The directories of other versions of the layout: of agents before this one, earlier or later.
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

    /// Removes what an agent of another layout pinned. What still runs on a device goes on until it is replaced there.
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

    /// Every pin that there is while nothing is amiss.
    pub(super) fn all(&self) -> impl Iterator<Item = PathBuf> {
        let programs = Program::ALL.map(|program| self.program(program));
        programs.into_iter().chain(map_name::ALL.iter().map(|name| self.map(name)))
    }

    /// Where a program waits before it takes the place of its predecessor.
    pub(super) fn next_program(&self, program: Program) -> PathBuf {
        self.programs.join(format!("next_{}", program.name()))
    }

    /// Makes the directories, if the root is on a BPF filesystem.
    pub(super) fn create(&self, root: &Path) -> Result<(), BpfError> {
        refuse_dots(root)?;
        if !is_on_bpffs(root)? {
            return Err(BpfError::NotBpffs(root.to_path_buf()));
        }
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&self.programs)
            .map_err(|source| BpfError::PinTree { action: "create", path: self.programs.clone(), source })
    }

    /// Checks the maps that are pinned already, and tells how many of the pins there are.
    ///
    /// aya takes whatever map sits at a pin path; a map of another size would be read and written beyond its
    /// values.
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

impl MapSpec {
    fn verify(&self, path: &Path) -> Result<(), BpfError> {
        let info = MapInfo::from_pin(path)
            .map_err(|source| BpfError::OpenMap { path: path.to_path_buf(), source })?;
        let found_type =
            info.map_type().map_err(|source| BpfError::OpenMap { path: path.to_path_buf(), source })?;
        let (kind, flags) = self.kind.number_and_flags();
        let compared = [
            (MapProperty::Type, kind, found_type as u32),
            (MapProperty::KeySize, self.key_size as u32, info.key_size()),
            (MapProperty::ValueSize, self.value_size as u32, info.value_size()),
            (MapProperty::MaxEntries, self.max_entries, info.max_entries()),
            (MapProperty::Flags, flags, info.map_flags()),
        ];
        match compared.into_iter().find(|(_, expected, found)| expected != found) {
            None => Ok(()),
            Some((property, expected, found)) => {
                Err(BpfError::ForeignMap { path: path.to_path_buf(), property, expected, found })
            }
        }
    }
}

/// Removes every pin below a root, of any layout version: programs and maps go when nothing uses them any
/// more. Programs still attached to devices keep running on their maps. A root that is not there is fine; one that has
/// something else in it is refused.
pub fn remove_all_pins(root: &Path) -> Result<(), BpfError> {
    refuse_dots(root)?;
    match fs::symlink_metadata(root) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        _ if is_on_bpffs(root)? => {}
        _ => return Err(BpfError::NotBpffs(root.to_path_buf())),
    }
    refuse_foreign(root)?;
    fs::remove_dir_all(root).map_err(|source| BpfError::PinTree {
        action: "remove",
        path: root.to_path_buf(),
        source,
    })
}

/// Whoever names the directory above ours would remove what others have pinned.
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

/// The layout that a directory below the root is of.
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

/// Looking up a name with a dot on a BPF filesystem is an `EPERM` (`bpf_lookup` of `kernel/bpf/inode.c`), which says nothing.
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

/// Whether a path, or the nearest directory above it that exists, is on a BPF filesystem.
fn is_on_bpffs(path: &Path) -> Result<bool, BpfError> {
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
#[path = "pin_memory.rs"]
mod memory;

#[cfg(test)]
mod tests {
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
