//! Network cards with SR-IOV, for tests that create virtual functions (VFs) on a card and remove them again.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result, ensure};

use crate::node::ip;
use crate::tools::report_skipped;
use crate::traffic::{PATIENCE, eventually};
use crate::{Namespace, Node};

/// Names the driver of cards whose VFs the tests may remove: on a machine in use, this would cut its network.
const VARIABLE: &str = "NETATTACH_SRIOV_DRIVER";
/// Documentation/ABI/testing/sysfs-bus-pci.
const DEVICES: &str = "/sys/bus/pci/devices";

/// One test at a time uses the cards.
static TURN: Mutex<()> = Mutex::new(());

/// A card whose VFs are removed when this is dropped, and another card on the same wire.
#[derive(Debug)]
pub struct Cards {
    /// The PCI address of the physical function (PF).
    pub address: String,
    /// The network device of the PF.
    pub device: String,
    /// The network device of the other card.
    pub other: String,
    _turn: MutexGuard<'static, ()>,
}

/// A VF as it is on the node before a pod has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Vf {
    /// Its PCI address.
    pub address: String,
    /// Its network device.
    pub device: String,
}

impl Cards {
    /// Takes the two cards of the machine, without VFs. `None`: the test is reported as skipped, and its caller has
    /// to end it.
    ///
    /// # Errors
    /// The machine is configured to have the cards but does not have them, or the card keeps its VFs.
    pub fn take(test: &str) -> Result<Option<Self>> {
        let Ok(driver) = std::env::var(VARIABLE) else {
            report_skipped(test, &format!("{VARIABLE} names no cards that tests may change"));
            return Ok(None);
        };
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let mut found = Vec::new();
        for entry in fs::read_dir(DEVICES).context(DEVICES)? {
            let path = entry?.path();
            let is_driven =
                fs::read_link(path.join("driver")).is_ok_and(|to| to.file_name() == Some(driver.as_ref()));
            let most = fs::read_to_string(path.join("sriov_totalvfs")).unwrap_or_default();
            if is_driven && most.trim().parse::<u32>().is_ok_and(|most| most > 1) {
                found.push(path);
            }
        }
        found.sort();
        let [first, second, ..] = &found[..] else {
            anyhow::bail!("{} cards with SR-IOV have the driver {driver}, not two", found.len())
        };
        // Devices return from removed namespaces only after some time.
        let device = |path: &Path| {
            eventually(PATIENCE, || net_device(path).is_some());
            net_device(path).with_context(|| format!("the network device of {} is elsewhere", path.display()))
        };
        let cards =
            Self { address: name_of(first), device: device(first)?, other: device(second)?, _turn: turn };
        cards.set_vfs(0)?;
        Ok(Some(cards))
    }

    /// Creates that many VFs on the card, waits for their drivers' devices, and configures it.
    ///
    /// # Errors
    /// The card already has VFs, or refuses.
    pub fn make_vfs(&self, count: usize) -> Result<Vec<Vf>> {
        self.set_vfs(count)?;
        ip(&Namespace::of_this_process()?, &["link", "set", &self.device, "up"])?;
        let vf = |number: usize| {
            let path = fs::canonicalize(self.path().join(format!("virtfn{number}"))).ok()?;
            Some(Vf { address: name_of(&path), device: net_device(&path)? })
        };
        let mut made = None;
        eventually(PATIENCE, || {
            made = (0..count).map(vf).collect::<Option<Vec<Vf>>>();
            made.is_some()
        });
        let made = made.context("the VFs' driver makes no devices")?;
        // Without a link the card knows no speed, and refuses a rate.
        let carrier = Path::new("/sys/class/net").join(&self.device).join("carrier");
        let has_link = || fs::read_to_string(&carrier).is_ok_and(|carrier| carrier.trim() == "1");
        ensure!(eventually(PATIENCE, has_link), "{} gets no link", self.device);
        Ok(made)
    }

    /// Removes all VFs, in whichever namespace they are.
    ///
    /// # Errors
    /// The card refuses.
    pub fn remove_vfs(&self) -> Result<()> {
        self.set_vfs(0)
    }

    fn set_vfs(&self, count: usize) -> Result<()> {
        let path = self.path().join("sriov_numvfs");
        fs::write(&path, count.to_string())
            .with_context(|| format!("write {count} to {}", path.display()))?;
        ensure!(fs::read_to_string(&path)?.trim() == count.to_string(), "the card has not {count} VFs");
        Ok(())
    }

    fn path(&self) -> PathBuf {
        Path::new(DEVICES).join(&self.address)
    }
}

impl Drop for Cards {
    fn drop(&mut self) {
        // The next test to take the cards tries again and reports the error.
        let _ = self.set_vfs(0);
    }
}

impl Vf {
    /// The network device of the VF, if it is on the node.
    pub fn on_node(&self) -> Option<String> {
        net_device(&Path::new(DEVICES).join(&self.address))
    }

    /// Binds the VF to a driver of the kernel, whichever it had.
    ///
    /// # Errors
    /// The driver does not take it.
    pub fn bind(&self, driver: &str) -> Result<()> {
        let device = Path::new(DEVICES).join(&self.address);
        fs::write(device.join("driver_override"), driver).context("choose the driver")?;
        // It may have none.
        let _ = fs::write(device.join("driver/unbind"), &self.address);
        fs::write("/sys/bus/pci/drivers_probe", &self.address).context("probe the driver")?;
        let is_bound = || fs::read_link(device.join("driver")).is_ok_and(|to| to.ends_with(driver));
        ensure!(eventually(PATIENCE, is_bound), "{driver} does not take {}", self.address);
        Ok(())
    }
}

impl Node {
    /// Returns a node that is this machine: in the namespace of the machine's cards. The test has to remove its
    /// leftovers there.
    ///
    /// # Errors
    /// As [`Node::new`].
    pub fn on_this_machine() -> Result<Self> {
        Self::within(Namespace::of_this_process()?, &[])
    }
}

/// The network device that the driver of a PCI device has made, if it is in the machine's own namespace.
fn net_device(pci: &Path) -> Option<String> {
    let mut entries = fs::read_dir(pci.join("net")).ok()?;
    entries.find_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned()))
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}
