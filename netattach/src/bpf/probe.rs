//! Probes of the kernel's BPF features. Version numbers are not reliable: distributions backport features and leave
//! others out. Nothing is attached, and each probe removes what it creates; it takes some 50 us.

use std::cell::UnsafeCell;
use std::error::Error;
use std::io;
use std::sync::OnceLock;

use aya::maps::MapType;
use aya::programs::ProgramType;
use aya::sys::{BpfHelper, is_helper_supported, is_map_supported, is_program_supported};

use super::packet_fields;
use super::sys::{self, BatchAttributes, Command, Query};

/// The oldest kernel on which tests run. An older one may work, because required features are probed.
/// docs/supported.md lists what is lost there.
pub const OLDEST_TESTED: (u32, u32) = (6, 1);

/// A feature that a kernel may lack.
#[derive(Debug)]
pub struct Feature {
    /// Short name.
    pub name: &'static str,
    /// Consequence of its absence, and the kernel that introduced it.
    pub absence: &'static str,
    /// Whether the kernel has it, or why this is unknown.
    pub present: io::Result<bool>,
}

/// A kernel facility that the programs or the agent use.
#[derive(Debug)]
pub struct Requirement {
    /// Its name and kind.
    pub name: &'static str,
    /// Whether the programs cannot be loaded without it.
    pub needed: bool,
    /// Its purpose.
    pub purpose: &'static str,
    /// The kernel that introduced it.
    pub since: &'static str,
    /// Whether the kernel has it, or why this is unknown.
    pub present: io::Result<bool>,
}

/// The facilities that the programs use, each probed separately: program types, helpers, map types.
pub fn requirements() -> Vec<Requirement> {
    const ALL: &str = "every attachment";
    let row = |name, needed, purpose, since, present| Requirement { name, needed, purpose, since, present };
    let program = |kind| found(is_program_supported(kind));
    let helper = |helper| found(is_helper_supported(ProgramType::SchedClassifier, helper));
    let map = |kind| found(is_map_supported(kind));
    vec![
        row("program type sched_cls", true, ALL, "4.1", program(ProgramType::SchedClassifier)),
        row(
            "program type socket_filter",
            true,
            "networkPolicy: true",
            "3.19",
            program(ProgramType::SocketFilter),
        ),
        row("program type xdp", true, "the fast path of uplinks", "4.8", program(ProgramType::Xdp)),
        row("helper fib_lookup", true, "the fast path", "4.18", helper(BpfHelper::BPF_FUNC_fib_lookup)),
        row(
            "helper redirect_neigh",
            true,
            "the fast path",
            "5.10",
            helper(BpfHelper::BPF_FUNC_redirect_neigh),
        ),
        row("helper redirect_peer", true, "the fast path", "5.10", helper(BpfHelper::BPF_FUNC_redirect_peer)),
        row(
            "helper skb_change_type",
            true,
            "the fast path",
            "4.8",
            helper(BpfHelper::BPF_FUNC_skb_change_type),
        ),
        row("helper jiffies64", true, "flows", "5.6", helper(BpfHelper::BPF_FUNC_jiffies64)),
        row(
            "helper ktime_get_coarse_ns",
            true,
            "flows",
            "5.11",
            helper(BpfHelper::BPF_FUNC_ktime_get_coarse_ns),
        ),
        row(
            "helper get_netns_cookie",
            false,
            "tell pods with CAP_NET_RAW on one macvlan parent apart",
            "6.15",
            helper(BpfHelper::BPF_FUNC_get_netns_cookie),
        ),
        row(
            "helper probe_read_kernel",
            false,
            "detect checksum offload that rewrites judged bytes",
            "5.5",
            helper(BpfHelper::BPF_FUNC_probe_read_kernel),
        ),
        row("map lru_hash", true, "fragments", "4.10", map(MapType::LruHash)),
        row("map lpm_trie", true, "policies", "4.11", map(MapType::LpmTrie)),
        row("map ringbuf", true, "records of flows and drops", "5.8", map(MapType::RingBuf)),
        row("BTF", false, "maps that bpftool shows field by field", "4.18", has_btf()),
        row("batches of map entries", false, "maps that are read at once", "5.6", has_batch()),
    ]
}

/// The names of the facilities without which no program can be loaded and which are certainly missing.
pub fn lacking(requirements: &[Requirement]) -> Vec<&'static str> {
    let lacks = requirements.iter().filter(|it| it.needed && matches!(it.present, Ok(false)));
    lacks.map(|it| it.name).collect()
}

/// All probed features, in order of importance. `loopback` is the index of a device in the calling thread's
/// network namespace that is not a netkit device.
pub fn features(loopback: u32) -> Vec<Feature> {
    let feature = |name, absence, present| Feature { name, absence, present };
    let helper = |helper| found(is_helper_supported(ProgramType::SchedClassifier, helper));
    vec![
        feature(
            "bpf",
            "no program can be loaded, nothing is enforced",
            found(is_program_supported(ProgramType::SchedClassifier)),
        ),
        feature("btf", "maps cannot be shown field by field; since 4.18", has_btf()),
        feature("tcx", "`attach: tcx` is refused; since 6.6", has_tcx(loopback)),
        feature(
            "netkit",
            "networks of type netkit are refused; since 6.7",
            has_hook(loopback, NETKIT_PRIMARY),
        ),
        feature(
            "redirect_peer",
            "the programs cannot be loaded; since 5.10",
            helper(BpfHelper::BPF_FUNC_redirect_peer),
        ),
        feature("ringbuf", "not used yet; since 5.8", found(is_map_supported(MapType::RingBuf))),
        feature(
            "netns_cookie",
            "a pod with CAP_NET_RAW can send by the MAC address of another pod on the same macvlan parent; since 6.15",
            helper(BpfHelper::BPF_FUNC_get_netns_cookie),
        ),
        feature(
            "packet_fields",
            "a pod with CAP_NET_RAW or CAP_NET_ADMIN can change what it sends once that was judged; CONFIG_DEBUG_INFO_BTF",
            Ok(sees_unfinished()),
        ),
        feature("batch", "maps are read entry by entry in any case; since 5.6", has_batch()),
    ]
}

/// Whether classifiers can determine from which namespace's socket a packet came. A failed probe counts as
/// no.
pub fn has_netns_cookie() -> bool {
    // Determined once: programs are loaded according to this answer, and levels depend on it.
    static HAS: OnceLock<bool> = OnceLock::new();
    let helper = BpfHelper::BPF_FUNC_get_netns_cookie;
    *HAS.get_or_init(|| is_helper_supported(ProgramType::SchedClassifier, helper).unwrap_or(false))
}

/// Whether classifiers can detect that the kernel will still write into a packet after they have judged it.
/// This is not possible if the kernel has no type information, or does not let programs read its memory
/// (lockdown).
pub fn sees_unfinished() -> bool {
    packet_fields::of_kernel().is_some()
}

/// Whether programs can be attached by tcx links. `loopback` as in [`features`].
///
/// # Errors
/// The probe failed.
pub fn has_tcx(loopback: u32) -> io::Result<bool> {
    has_hook(loopback, TCX_INGRESS)
}

/// `enum bpf_attach_type`.
const TCX_INGRESS: u32 = 46;
const NETKIT_PRIMARY: u32 = 54;

fn found<E: Error + Send + Sync + 'static>(answer: Result<bool, E>) -> io::Result<bool> {
    match answer {
        Err(error) if is_without_bpf(&error) => Ok(false),
        answer => answer.map_err(io::Error::other),
    }
}

/// Whether the kernel was built without `CONFIG_BPF_SYSCALL`, and so without BPF.
fn is_without_bpf(error: &(dyn Error + 'static)) -> bool {
    let code = error.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error);
    code == Some(libc::ENOSYS) || error.source().is_some_and(is_without_bpf)
}

/// Whether programs of a device can be queried by this attach type: a kernel without it returns `EINVAL`; a
/// kernel with it lists the programs, or reports that there are none (`ENOENT`) or that the device is of
/// another kind (`ENXIO`).
fn has_hook(device: u32, attach_type: u32) -> io::Result<bool> {
    let query = UnsafeCell::new(Query::of(device, attach_type));
    // SAFETY: the member that the command reads, without pointers; the kernel writes into it and not beyond, and the
    // cell allows that.
    match unsafe { sys::bpf(Command::ProgQuery, &query) } {
        Ok(_) => Ok(true),
        Err(error) => match error.raw_os_error() {
            Some(libc::ENOENT | libc::ENXIO) => Ok(true),
            Some(libc::EINVAL | libc::EOPNOTSUPP) => Ok(false),
            _ => Err(error),
        },
    }
}

/// Whether the kernel accepts BTF, probed with the description of one type, `int`.
fn has_btf() -> io::Result<bool> {
    /// Header (24 bytes), one type, strings; numbers in the byte order of the machine.
    #[repr(C)]
    struct Blob {
        magic: u16,
        version: u8,
        flags: u8,
        lengths: [u32; 5],
        int: [u32; 4],
        strings: [u8; 8],
    }
    #[repr(C)]
    #[derive(Default)]
    struct Load {
        btf: u64,
        log: u64,
        size: u32,
        log_size: u32,
        log_level: u32,
        pad: u32,
    }
    let blob = Blob {
        magic: 0xeb9f,
        version: 1,
        flags: 0,
        // Length of the header; offset and length of the types, then of the strings, counted from its end.
        lengths: [24, 0, 16, 16, 5],
        // Name at offset 1, kind 1 (integer), 4 bytes, signed with 32 bits.
        int: [1, 1 << 24, 4, 1 << 24 | 32],
        strings: *b"\0int\0\0\0\0",
    };
    let load = Load { btf: (&raw const blob) as u64, size: 24 + 16 + 5, ..Load::default() };
    // SAFETY: the `btf_load` member of `union bpf_attr`; `btf` is valid for `size` bytes during the call.
    absent_if_invalid(unsafe { sys::bpf_fd(Command::BtfLoad, &load) }.map(drop))
}

/// Whether the kernel supports batch operations, probed on an empty hash map.
fn has_batch() -> io::Result<bool> {
    #[repr(C)]
    #[derive(Default)]
    struct Create {
        map_type: u32,
        key_size: u32,
        value_size: u32,
        max_entries: u32,
        flags: u32,
    }
    /// `BPF_MAP_TYPE_HASH`.
    const HASH: u32 = 1;
    let create = Create { map_type: HASH, key_size: 4, value_size: 4, max_entries: 1, flags: 0 };
    // SAFETY: the beginning of the `map_create` member of `union bpf_attr`, which holds no pointers.
    let map = unsafe { sys::bpf_fd(Command::MapCreate, &create) }?;
    let (mut next, mut key, mut value) = (0_u32, 0_u32, 0_u32);
    let batch = UnsafeCell::new(BatchAttributes {
        out_batch: (&raw mut next) as u64,
        keys: (&raw mut key) as u64,
        values: (&raw mut value) as u64,
        count: 1,
        map_fd: sys::raw(std::os::fd::AsFd::as_fd(&map)),
        ..BatchAttributes::default()
    });
    // SAFETY: the `batch` member of `union bpf_attr`; the pointers are valid for one key and one value of four bytes,
    // the kernel writes into the member and not beyond, and the cell allows that.
    match unsafe { sys::bpf(Command::MapLookupBatch, &batch) } {
        // The map is empty.
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(true),
        answer => absent_if_invalid(answer.map(drop)),
    }
}

fn absent_if_invalid(answer: io::Result<()>) -> io::Result<bool> {
    /// `ENOTSUPP`, an errno internal to the kernel without a name in libc.
    const NOT_SUPPORTED: i32 = 524;
    match answer {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | NOT_SUPPORTED)) => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The result depends on the kernel; this test only checks that each feature can be determined. Needs
    /// root, as the agent does.
    #[test]
    fn every_feature_is_either_there_or_not() {
        for feature in features(1) {
            assert!(feature.present.is_ok(), "{feature:?}");
        }
        for requirement in requirements() {
            assert!(requirement.present.is_ok(), "{requirement:?}");
        }
    }

    /// The first column of the first table of docs/supported.md lists the kernels on which tests run.
    #[test]
    fn the_oldest_kernel_is_that_of_the_documents() {
        const SUPPORTED: &str = include_str!("../../../docs/supported.md");
        let (_, kernels) = SUPPORTED.split_once("\n## Kernels\n").unwrap();
        let version = |text: &str| -> (u32, u32) {
            let (major, minor) = text.split_once('.').unwrap();
            (major.parse().unwrap(), minor.parse().unwrap())
        };
        let rows = kernels.lines().skip_while(|line| !line.starts_with("|---")).skip(1);
        let tested = rows.take_while(|line| line.starts_with('|'));
        let oldest = tested.map(|row| version(row.split('|').nth(1).unwrap().trim())).min();
        assert_eq!(oldest, Some(OLDEST_TESTED));
        let (major, minor) = OLDEST_TESTED;
        let needed =
            format!("| attachments, policies, source checks, counters | {major}.{minor} has all of it; ");
        assert!(SUPPORTED.contains(&needed), "{needed}");
        let guide = format!("Linux {major}.{minor} or newer");
        assert!(include_str!("../../../docs/quick-start.md").contains(&guide), "{guide}");
    }
}
