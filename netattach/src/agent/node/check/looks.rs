//! The checks. Each tries what the agent will do, if the trial leaves no traces.

use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use super::{Found, Lack, Row};
use crate::agent::node::{kernel_settings, privileges};
use crate::attach::DefaultNetwork;
use crate::bpf::probe::{self, Requirement};
use crate::bpf::{self, BpfError, Dataplane};
use crate::error_chain::Chain;
use crate::hooks::AttachBy;
use crate::netlink::{self, Handle, LOOPBACK, nat};
use crate::netns::{Netns, within};
use crate::settings::Settings;
use crate::spec::{Bridge, Ipvlan, IpvlanMode, Macvlan, MacvlanMode, Veth};

const EVERYTHING: &str = "every attachment";

/// Returns all rows, in the order in which a start needs them.
pub(super) fn all(settings: &Settings) -> Vec<Row> {
    let mut rows = vec![privileges(), kernel_settings(), bpffs(&settings.bpffs)];
    rows.extend(probe::requirements().into_iter().map(of_bpf));
    rows.extend(hooks(settings));
    let trial = Trial::new(&settings.bpffs);
    rows.push(programs(&trial));
    rows.extend(links());
    rows.extend(packet_filter(settings, &trial));
    rows.push(control_groups());
    rows
}

fn missing(error: &(dyn std::error::Error + 'static)) -> Lack {
    Lack::Missing(Chain(error).to_string())
}

fn present(answer: io::Result<bool>) -> Found {
    match answer {
        Ok(true) => Ok(String::new()),
        Ok(false) => Err(Lack::Missing(String::new())),
        Err(error) => Err(Lack::Unknown(error.to_string())),
    }
}

fn privileges() -> Row {
    let found = privileges::check().map(|()| String::new()).map_err(|error| missing(&error));
    let remedy = "run as root, or in a container with capabilities NET_ADMIN and SYS_ADMIN and without hostUsers: false";
    Row::new("privileges", true, EVERYTHING, remedy, found)
}

/// Checks `/proc/sys`, which is read-only in a container until the agent changes that.
fn kernel_settings() -> Row {
    let found = kernel_settings::make_writable().map(|_| String::new()).map_err(|error| missing(&error));
    let remedy = "run as root, or in a container with CAP_SYS_ADMIN and appArmorProfile: Unconfined";
    Row::new("writable /proc/sys", true, EVERYTHING, remedy, found)
}

fn bpffs(root: &Path) -> Row {
    let found = match bpf::is_on_bpffs(root) {
        Ok(true) => Ok(root.display().to_string()),
        Ok(false) => Err(Lack::Missing(format!("{} is on another file system", root.display()))),
        Err(error) => Err(Lack::Unknown(Chain(&error).to_string())),
    };
    let remedy =
        "mount -t bpf bpf /sys/fs/bpf; into a container as a volume with mountPropagation: HostToContainer";
    Row::new("BPF file system", true, EVERYTHING, remedy, found)
}

fn of_bpf(requirement: Requirement) -> Row {
    let Requirement { name, needed, purpose, since, present: answer } = requirement;
    let (major, minor) = probe::OLDEST_TESTED;
    let remedy = match needed {
        true => format!(
            "run a kernel with it: Linux {major}.{minor} or newer, with CONFIG_BPF_SYSCALL (docs/supported.md)"
        ),
        false => format!("Linux {since} or newer has it"),
    };
    Row::new(name, needed, purpose, &remedy, present(answer))
}

/// Checks the two ways of attaching programs: one of them is needed, or the one that is set.
fn hooks(settings: &Settings) -> Vec<Row> {
    let opened = || Handle::open().map_err(|error| Lack::Unknown(Chain(&error).to_string()));
    let asked = |answer: Result<bool, netlink::Error>| {
        let answer = answer.map_err(|error| Lack::Unknown(Chain(&error).to_string()))?;
        if answer { Ok(String::new()) } else { Err(Lack::Missing(String::new())) }
    };
    let clsact = opened().and_then(|mut node| asked(node.has_clsact()));
    let tcx = present(probe::has_tcx(LOOPBACK));
    let pacing = opened().and_then(|mut node| asked(node.has_pacing()));
    let wanted = settings.attach;
    let clsact_needed = wanted == AttachBy::Clsact || wanted == AttachBy::Auto && tcx.is_err();
    let tcx_needed = wanted == AttachBy::Tcx || wanted == AttachBy::Auto && clsact.is_err();
    vec![
        Row::new(
            "clsact",
            clsact_needed,
            "programs on the node's devices",
            "load sch_ingress and cls_bpf (CONFIG_NET_SCH_INGRESS, CONFIG_NET_CLS_BPF), or set attach: tcx",
            clsact,
        ),
        Row::new(
            "tcx",
            tcx_needed,
            "programs on uplinks and in pods that other programs cannot remove",
            "Linux 6.6 or newer has it; without it, clsact filters are used",
            tcx,
        ),
        Row::new(
            "tbf",
            false,
            "bandwidth limits that delay what is above them",
            "load sch_tbf (CONFIG_NET_SCH_TBF); without it, what is above a limit is dropped",
            pacing,
        ),
    ]
}

/// The programs, loaded and pinned beside the agent's; removed when this is dropped.
struct Trial {
    root: PathBuf,
    dataplane: Result<Dataplane, BpfError>,
}

impl Trial {
    fn new(root: &Path) -> Self {
        let root = root.with_file_name(format!("netattach-check-{}", std::process::id()));
        // Few entries: only the programs are tried, and the kernel's verifier does not depend
        // on the number.
        let small = bpf::Config { max_attachments: 16, ..bpf::Config::new(&root) };
        Self { dataplane: Dataplane::open(&small), root }
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        if let Err(error) = bpf::remove_all_pins(&self.root) {
            tracing::warn!(path = %self.root.display(), "pins of this check could not be removed: {}", Chain(&error));
        }
    }
}

fn programs(trial: &Trial) -> Row {
    let found = match &trial.dataplane {
        Ok(_) => Ok(format!("loaded: object {}", bpf::embedded_object())),
        Err(error) => Err(missing(error)),
    };
    let remedy =
        "the rows above say what they need; with all of it there, report the verifier's words as a bug";
    Row::new("netattach's programs", true, EVERYTHING, remedy, found)
}

/// Checks links of each kind, in a netns that is deleted afterwards.
fn links() -> Vec<Row> {
    let made = Netns::private().and_then(|node| Ok((node, Netns::private()?)));
    let (node, pod) = match made {
        Ok(made) => made,
        Err(error) => {
            let found = Err(missing(&error));
            let remedy = "run with CAP_SYS_ADMIN, on a kernel with CONFIG_NET_NS";
            return vec![Row::new("network namespaces", true, EVERYTHING, remedy, found)];
        }
    };
    let tried = within(&node, || kinds(&pod));
    tried.unwrap_or_else(|error| {
        vec![Row::new("network namespaces", true, EVERYTHING, "run with CAP_SYS_ADMIN", Err(missing(&error)))]
    })
}

fn kinds(pod: &Netns) -> Vec<Row> {
    const GROUP: u32 = 1;
    let bridge = Bridge { name: "check0".into(), ..Bridge::default() };
    let veth = Veth {
        host_name: "check1".into(),
        pod_name: "check2".into(),
        mtu: None,
        mac: None,
        group: GROUP,
        port: None,
    };
    let macvlan = Macvlan {
        pod_name: "check3".into(),
        parent: None,
        mode: MacvlanMode::Bridge,
        mtu: None,
        mac: None,
        group: GROUP,
        broadcast_queue: None,
        tap: false,
        in_pod: false,
    };
    let ipvlan = Ipvlan {
        pod_name: "check4".into(),
        parent: None,
        mode: IpvlanMode::L2,
        mtu: None,
        group: GROUP,
        in_pod: false,
    };
    let handles = || -> Result<(Handle, Handle), Lack> {
        let pod = Handle::open_in(pod).map_err(|error| Lack::Unknown(Chain(&error).to_string()))?;
        Ok((Handle::open().map_err(|error| Lack::Unknown(Chain(&error).to_string()))?, pod))
    };
    let refused = |error: netlink::Error| missing(&error);
    let tried_veth = handles().and_then(|(mut node, mut inside)| {
        node.create_veth(&veth, None, pod.as_fd(), &mut inside).map_err(refused)
    });
    let tried_bridge =
        handles().and_then(|(mut node, _)| node.ensure_bridge(&bridge).map(drop).map_err(refused));
    // The parent of the others is an end of the veth: an ipvlan and a macvlan cannot share one.
    let on_parent =
        |work: &dyn Fn(&mut Handle, &mut Handle, &netlink::LinkState) -> Result<(), netlink::Error>| {
            let (near, _) = tried_veth.as_ref().map_err(|_| Lack::Unknown("needs a veth to try".into()))?;
            let (mut node, mut inside) = handles()?;
            work(&mut node, &mut inside, near).map(|()| String::new()).map_err(refused)
        };
    let tried_macvlan = on_parent(&|node, inside, near| {
        node.create_macvlan(&macvlan, near, pod.as_fd(), inside)?;
        inside.ensure_link_absent(&macvlan.pod_name)
    });
    let tried_ipvlan =
        on_parent(&|node, inside, near| node.create_ipvlan(&ipvlan, near, pod.as_fd(), inside).map(drop));
    let found = |tried: Result<(), Lack>| tried.map(|()| String::new());
    vec![
        Row::new(
            "veth",
            true,
            "networks of the types veth and bridge",
            "load the module veth",
            found(tried_veth.as_ref().map(drop).map_err(Lack::clone)),
        ),
        Row::new(
            "bridge",
            false,
            "networks of the type bridge",
            "load the module bridge",
            found(tried_bridge),
        ),
        Row::new("macvlan", false, "networks of the type macvlan", "load the module macvlan", tried_macvlan),
        Row::new("ipvlan", false, "networks of the type ipvlan", "load the module ipvlan", tried_ipvlan),
    ]
}

/// Checks the tables of the packet filter, in a netns that is deleted afterwards.
fn packet_filter(settings: &Settings, trial: &Trial) -> Vec<Row> {
    let in_namespace = |work: &dyn Fn() -> Result<(), netlink::Error>| -> Found {
        let netns = Netns::private().map_err(|error| Lack::Unknown(Chain(&error).to_string()))?;
        let tried = within(&netns, work).map_err(|error| Lack::Unknown(Chain(&error).to_string()))?;
        tried.map(|()| String::new()).map_err(|error| missing(&error))
    };
    let guard = match trial.dataplane.as_ref().map(Dataplane::routed) {
        Ok(Ok(routed)) => in_namespace(&|| netlink::install_guard("check", routed.programs())),
        _ => Err(Lack::Unknown("needs the programs to try".into())),
    };
    let builtin = settings.default_network() == Ok(DefaultNetwork::Builtin);
    vec![
        Row::new(
            "nftables with xt_bpf",
            settings.network_policy(),
            "networkPolicy: true",
            "load nf_tables, nft_compat and xt_bpf (CONFIG_NFT_COMPAT, CONFIG_NETFILTER_XT_MATCH_BPF)",
            guard,
        ),
        Row::new(
            "nftables with nat",
            builtin,
            "defaultNetwork: builtin, ports of the node for pods",
            "load nf_tables, nft_nat, nft_masq, nft_ct and nft_fib_inet",
            in_namespace(&|| nat::install("check", [])),
        ),
    ]
}

/// Checks which version of control groups there is, see cgroups(7).
fn control_groups() -> Row {
    let root = Path::new("/sys/fs/cgroup");
    let found = match (root.join("cgroup.controllers").exists(), root.is_dir()) {
        (true, _) => Ok("version 2".to_owned()),
        (false, true) => Ok("version 1".to_owned()),
        (false, false) => Err(Lack::Missing(String::new())),
    };
    Row::new(
        "control groups",
        false,
        "limits of memory by the kubelet",
        "mount cgroup2 on /sys/fs/cgroup",
        found,
    )
}
