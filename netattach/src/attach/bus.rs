//! Devices on the node's buses, as sysfs shows them (`Documentation/ABI/testing/sysfs-bus-pci`).

use std::fs;
use std::path::{Path, PathBuf};

use crate::link::facts::OnBus;
use crate::spec::VirtualFunction;

/// Where the kernel shows the buses whose devices may have interfaces.
const BUSES: [&str; 2] = ["/sys/bus/pci/devices", "/sys/bus/auxiliary/devices"];

/// The devices of virtio, each below the device that carries it.
const VIRTIO: &str = "/sys/bus/virtio/devices";

/// Below it is every device of the node.
const DEVICES: &str = "/sys/devices";

/// The device of that name on one of the buses, if there is one. Its card's mode is not in sysfs: see
/// [`super::representor::is_switchdev`].
pub(super) fn find(name: &str) -> Option<OnBus> {
    let directory = directory_of(name)?;
    let target = |link: &str| fs::read_link(directory.join(link)).ok().and_then(|to| last_of(&to));
    let function = target("physfn").and_then(|physical| {
        let number = number_of(&directory.join("physfn"), name)?;
        Some(VirtualFunction { physical, number })
    });
    let rdma = first_in(&directory.join("infiniband"));
    Some(OnBus { driver: target("driver"), function, rdma, switchdev: false })
}

/// The names that the parent of a device's interface may have: its own, and those of the virtio device that it carries.
pub(super) fn parents_of(name: &str) -> Vec<String> {
    let beneath = directory_of(name).and_then(|directory| fs::read_dir(directory).ok());
    let names = beneath.into_iter().flatten().filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    std::iter::once(name.to_owned()).chain(names.filter(|name| name.starts_with("virtio"))).collect()
}

/// The device on one of the buses that carries the device of that name, which has an interface: itself, or for a virtio
/// device the one that it is a part of.
pub(super) fn carrier_of(parent: &str) -> String {
    let carrier = || {
        let path = fs::canonicalize(Path::new(VIRTIO).join(parent)).ok()?;
        last_of(path.parent()?).filter(|name| directory_of(name).is_some())
    };
    carrier().unwrap_or_else(|| parent.to_owned())
}

/// The name of the device whose directory that is.
pub(super) fn name_at(path: &str) -> Option<String> {
    let path = fs::canonicalize(path).ok()?;
    path.starts_with(DEVICES).then(|| last_of(&path)).flatten()
}

fn directory_of(name: &str) -> Option<PathBuf> {
    // A name is a component of a path, see `link::device`.
    BUSES.iter().map(|bus| Path::new(bus).join(name)).find(|path| path.exists())
}

/// The number of the VF of that name at its PF: the one of the links `virtfnN` that leads to it.
fn number_of(physical: &Path, name: &str) -> Option<u32> {
    fs::read_dir(physical).ok()?.find_map(|entry| {
        let entry = entry.ok()?;
        let number = entry.file_name().to_str()?.strip_prefix("virtfn")?.parse().ok()?;
        let to = fs::read_link(entry.path()).ok()?;
        (last_of(&to).as_deref() == Some(name)).then_some(number)
    })
}

fn first_in(directory: &Path) -> Option<String> {
    fs::read_dir(directory).ok()?.find_map(|entry| entry.ok()?.file_name().into_string().ok())
}

fn last_of(path: &Path) -> Option<String> {
    path.file_name()?.to_str().map(str::to_owned)
}
