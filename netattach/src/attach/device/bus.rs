//! Devices on the node's buses, as sysfs shows them (`Documentation/ABI/testing/sysfs-bus-pci`).

use std::fs;
use std::path::{Path, PathBuf};

use crate::link::facts::OnBus;
use crate::spec::VirtualFunction;

/// The mount point of sysfs.
const SYSFS: &str = "/sys";

/// The buses whose devices may have interfaces.
const BUSES: [&str; 2] = ["bus/pci/devices", "bus/auxiliary/devices"];

/// Whether all namespaces share the node's RDMA devices, or each has its own (`drivers/infiniband/core/device.c`).
const SHARES_RDMA: &str = "module/ib_core/parameters/netns_mode";

/// The directory of virtio devices, each of which is below the device that carries it.
const VIRTIO: &str = "/sys/bus/virtio/devices";

/// The directory that contains every device of the node.
const DEVICES: &str = "/sys/devices";

/// Finds the device with that name on one of the buses. Its card's mode is not in sysfs: see
/// [`super::representor::is_switchdev`].
pub(in crate::attach) fn find(name: &str) -> Option<OnBus> {
    find_below(Path::new(SYSFS), name)
}

fn find_below(sysfs: &Path, name: &str) -> Option<OnBus> {
    let directory = directory_below(sysfs, name)?;
    let driver = fs::read_link(directory.join("driver")).ok().and_then(|to| last_of(&to));
    let function = function_in(&directory, name);
    let rdma = rdma_in(&directory);
    let rdma_stays = rdma.is_some() && !shares_rdma(sysfs);
    Some(OnBus { driver, function, rdma, rdma_stays, switchdev: false })
}

/// Whether an interface's parent of that name has no interface any more: it is gone, or no network driver has it.
/// `false` where this cannot be told.
pub(super) fn has_no_interface(parent: &str) -> bool {
    has_no_interface_below(Path::new(SYSFS), parent)
}

fn has_no_interface_below(sysfs: &Path, parent: &str) -> bool {
    if let Some(on_bus) = find_below(sysfs, parent) {
        return on_bus.network_driver().is_none();
    }
    // The parent may be on another bus: virtio, USB, that of a hypervisor.
    let Ok(buses) = fs::read_dir(sysfs.join("bus")) else { return false };
    !buses.flatten().any(|bus| bus.path().join("devices").join(parent).exists())
}

/// Returns the virtual function that the device with that name is, if it is one. Reads nothing else.
pub(super) fn function_of(name: &str) -> Option<VirtualFunction> {
    function_in(&directory_of(name)?, name)
}

fn function_in(directory: &Path, name: &str) -> Option<VirtualFunction> {
    let physical = physical_in(directory)?;
    let number = number_of(&directory.join("physfn"), name)?;
    Some(VirtualFunction { physical, number })
}

fn physical_in(directory: &Path) -> Option<String> {
    last_of(&fs::read_link(directory.join("physfn")).ok()?)
}

/// Returns the RDMA device of the device with that name, if it has one. Reads nothing else.
pub(super) fn rdma_of(name: &str) -> Option<String> {
    rdma_below(Path::new(SYSFS), name)
}

fn rdma_below(sysfs: &Path, name: &str) -> Option<String> {
    rdma_in(&directory_below(sysfs, name)?)
}

fn rdma_in(directory: &Path) -> Option<String> {
    first_in(&directory.join("infiniband"))
}

fn shares_rdma(sysfs: &Path) -> bool {
    match fs::read_to_string(sysfs.join(SHARES_RDMA)) {
        Ok(shown) => shown.trim() == "Y",
        // A kernel without this setting always shares them.
        Err(error) => error.kind() == std::io::ErrorKind::NotFound,
    }
}

/// Returns the possible names of the parent of a device's interface: the device's own, and those of the virtio device
/// that it carries.
pub(super) fn parents_of(name: &str) -> Vec<String> {
    let beneath = directory_of(name).and_then(|directory| fs::read_dir(directory).ok());
    let names = beneath.into_iter().flatten().filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    std::iter::once(name.to_owned()).chain(names.filter(|name| name.starts_with("virtio"))).collect()
}

/// Returns the device on one of the buses that carries the interface's parent: the parent itself, or for a virtio
/// device the device that it is a part of.
pub(super) fn carrier_of(parent: &str) -> String {
    let carrier = || {
        let path = fs::canonicalize(Path::new(VIRTIO).join(parent)).ok()?;
        last_of(path.parent()?).filter(|name| directory_of(name).is_some())
    };
    carrier().unwrap_or_else(|| parent.to_owned())
}

/// Returns the name of the device with that directory.
pub(super) fn name_at(path: &str) -> Option<String> {
    let path = fs::canonicalize(path).ok()?;
    path.starts_with(DEVICES).then(|| last_of(&path)).flatten()
}

fn directory_of(name: &str) -> Option<PathBuf> {
    directory_below(Path::new(SYSFS), name)
}

fn directory_below(sysfs: &Path, name: &str) -> Option<PathBuf> {
    // The name is a single path component, see `link::device`.
    BUSES.iter().map(|bus| sysfs.join(bus).join(name)).find(|path| path.exists())
}

/// Returns the number of the VF with that name at its PF: the N of the link `virtfnN` that leads to it. The links are
/// tried from 0 on; the directory, which has many other files, is listed only if a number is missing.
fn number_of(physical: &Path, name: &str) -> Option<u32> {
    let target = |number: u32| fs::read_link(physical.join(format!("virtfn{number}"))).ok();
    let mut in_order = (0_u32..).map_while(|number| Some((number, target(number)?)));
    let found = in_order.find(|(_, to)| last_of(to).as_deref() == Some(name));
    found.map(|(number, _)| number).or_else(|| number_listed(physical, name))
}

fn number_listed(physical: &Path, name: &str) -> Option<u32> {
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

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    const CARD: &str = "0000:03:00.0";
    const VF: &str = "0000:03:02.1";

    /// A card with a VF, as sysfs shows them; `rdma`: the VF's RDMA device; `mode`: what the module shows.
    fn sysfs(rdma: Option<&str>, mode: Option<&str>) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let devices = root.path().join(BUSES[0]);
        let make = |path: &Path| fs::create_dir_all(path).unwrap();
        make(&devices.join(CARD));
        make(&devices.join(VF));
        symlink(format!("../{VF}"), devices.join(CARD).join("virtfn1")).unwrap();
        symlink(format!("../{CARD}"), devices.join(VF).join("physfn")).unwrap();
        symlink("../../../../bus/pci/drivers/mlx5_core", devices.join(VF).join("driver")).unwrap();
        if let Some(rdma) = rdma {
            make(&devices.join(VF).join("infiniband").join(rdma));
        }
        if let Some(mode) = mode {
            let path = root.path().join(SHARES_RDMA);
            make(path.parent().unwrap());
            fs::write(path, mode).unwrap();
        }
        root
    }

    /// Rows: SRV-rdma-exclusive.
    #[test]
    fn an_rdma_device_stays_where_each_namespace_has_its_own() {
        for (rdma, mode, stays) in [
            (None, None, false),
            (None, Some("N\n"), false),
            (Some("mlx5_3"), None, false),
            (Some("mlx5_3"), Some("Y\n"), false),
            (Some("mlx5_3"), Some("N\n"), true),
        ] {
            let root = sysfs(rdma, mode);
            let expected = OnBus {
                driver: Some("mlx5_core".to_owned()),
                function: Some(VirtualFunction { physical: CARD.to_owned(), number: 1 }),
                rdma: rdma.map(str::to_owned),
                rdma_stays: stays,
                switchdev: false,
            };
            assert_eq!(find_below(root.path(), VF), Some(expected), "{mode:?}");
            assert_eq!(rdma_below(root.path(), VF).as_deref(), rdma);
        }
        assert_eq!(find_below(sysfs(None, None).path(), "0000:03:02.2"), None);
    }

    #[test]
    fn a_device_has_no_interface_where_it_is_gone_or_has_no_network_driver() {
        let root = sysfs(None, None);
        let none = |name: &str| has_no_interface_below(root.path(), name);
        fs::create_dir_all(root.path().join("bus/virtio/devices/virtio3")).unwrap();
        // The card has no driver here.
        assert_eq!(
            [VF, CARD, "0000:03:02.2", "virtio3", "virtio4"].map(none),
            [false, true, true, false, true]
        );
        let driver = root.path().join(BUSES[0]).join(VF).join("driver");
        fs::remove_file(&driver).unwrap();
        symlink("../../../../bus/pci/drivers/vfio-pci", &driver).unwrap();
        assert!(none(VF));
        // Without sysfs nothing tells.
        assert!(!has_no_interface_below(&root.path().join("nothing"), VF));
    }

    #[test]
    fn a_vf_has_the_number_of_the_link_that_leads_to_it() {
        let root = sysfs(None, None);
        let card = root.path().join(BUSES[0]).join(CARD);
        assert_eq!(number_of(&card, VF), Some(1), "there is no VF 0");
        assert_eq!(number_of(&card, "0000:03:02.0"), None);
        symlink("../0000:03:02.0", card.join("virtfn0")).unwrap();
        symlink("../0000:03:02.3", card.join("virtfn3")).unwrap();
        let numbers = ["0000:03:02.0", VF, "0000:03:02.2", "0000:03:02.3"].map(|it| number_of(&card, it));
        assert_eq!(numbers, [Some(0), Some(1), None, Some(3)]);
    }
}
