//! Settings of virtual functions (VFs) and their representors, on the kernel's simulated card (`netdevsim`): it
//! accepts every setting, and has the modes legacy and switchdev; its VFs are no devices and have no packets.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use netattach::mac::Mac;
use netattach::netlink::{Handle, LinkState, devlink, ethtool};
use netattach::spec::{VfLinkState, VfRates, VfSettings, VfVlan, VirtualFunction};
use netattach_tests::tools::report_skipped;

/// `Documentation/networking/devlink/netdevsim.rst`.
const BUS: &str = "netdevsim";
const ROOT: &str = "/sys/bus/netdevsim";

/// A simulated card of the machine, which is removed when this is dropped.
struct Card {
    id: u32,
}

impl Card {
    /// Creates a card with that number, which no other test uses, with one port. `None`: the test is reported as
    /// skipped.
    fn make(test: &str, id: u32) -> Result<Option<Self>> {
        let new_device = PathBuf::from(ROOT).join("new_device");
        if !new_device.exists() {
            report_skipped(test, "the kernel has no netdevsim");
            return Ok(None);
        }
        fs::write(&new_device, format!("{id} 1")).context("make a simulated card")?;
        Ok(Some(Self { id }))
    }

    fn name(&self) -> String {
        format!("{BUS}{}", self.id)
    }

    fn directory(&self) -> PathBuf {
        PathBuf::from(ROOT).join("devices").join(self.name())
    }

    fn set_functions(&self, number: u32) -> Result<()> {
        let path = self.directory().join("sriov_numvfs");
        fs::write(&path, number.to_string()).with_context(|| format!("{number} VFs"))
    }

    fn set_mode(&self, mode: &str) -> Result<()> {
        let card = format!("{BUS}/{}", self.name());
        let output = Command::new("devlink").args(["dev", "eswitch", "set", &card, "mode", mode]).output()?;
        ensure!(output.status.success(), "{mode}: {}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    }

    /// The card's own interface, which is made first.
    fn physical(&self, host: &mut Handle) -> Result<LinkState> {
        let mut found = Vec::new();
        for entry in fs::read_dir(self.directory().join("net"))? {
            let name = entry?.file_name();
            found.push(host.link(&name.to_string_lossy())?);
        }
        found.into_iter().min_by_key(|link| link.index).context("a card without an interface")
    }

    fn representors(&self, host: &mut Handle, number: u32) -> Result<Vec<LinkState>> {
        Ok(host.representors(&VirtualFunction { physical: self.name(), number })?)
    }

    fn is_switchdev(&self) -> Result<bool> {
        Ok(devlink::is_switchdev(BUS, &self.name())?)
    }
}

impl Drop for Card {
    fn drop(&mut self) {
        if let Err(error) = fs::write(PathBuf::from(ROOT).join("del_device"), self.id.to_string()) {
            eprintln!("the simulated card stays: {error}");
        }
    }
}

/// Returns the settings of a VF before any change.
fn untouched() -> VfSettings {
    VfSettings {
        mac: Some(Mac([0; 6])),
        vlan: Some(VfVlan::default()),
        rates: Some(VfRates::default()),
        spoof_check: Some(false),
        trust: Some(false),
        link_state: Some(VfLinkState::Auto),
    }
}

/// Rows: SRV-settings.
#[test]
fn every_setting_of_a_vf_is_read_as_it_was_set_and_of_no_other_vf() -> Result<()> {
    let Some(card) = Card::make("every_setting_of_a_vf_is_read_as_it_was_set_and_of_no_other_vf", 10)? else {
        return Ok(());
    };
    card.set_functions(3)?;
    let mut host = Handle::open()?;
    let physical = card.physical(&mut host)?.index;
    assert_eq!(host.vf_settings(physical, 1)?, Some(untouched()));
    assert_eq!(host.vf_settings(physical, 3)?, None, "there are three");
    assert_eq!(host.all_vf_settings(physical)?, [0, 1, 2].map(|number| (number, untouched())));
    let wanted = VfSettings {
        mac: Some(Mac([2, 0, 0, 0, 0, 7])),
        vlan: Some(VfVlan { id: 100, priority: 5, service: true }),
        rates: Some(VfRates { min: 10, max: 100 }),
        spoof_check: Some(true),
        trust: Some(true),
        link_state: Some(VfLinkState::Enable),
    };
    // One by one, each read back with those before it.
    let mut so_far = untouched();
    for (key, one) in wanted.each() {
        host.set_vf(physical, 1, &one)?;
        so_far = VfSettings {
            mac: one.mac.or(so_far.mac),
            vlan: one.vlan.or(so_far.vlan),
            rates: one.rates.or(so_far.rates),
            spoof_check: one.spoof_check.or(so_far.spoof_check),
            trust: one.trust.or(so_far.trust),
            link_state: one.link_state.or(so_far.link_state),
        };
        assert_eq!(host.vf_settings(physical, 1)?, Some(so_far.clone()), "{key}");
    }
    assert_eq!(so_far, wanted);
    let all = [(0, untouched()), (1, wanted.clone()), (2, untouched())];
    assert_eq!(host.all_vf_settings(physical)?, all);
    // All at once, with another tag and the remaining states.
    let other = VfSettings {
        mac: Some(Mac([2, 0, 0, 0, 0, 8])),
        vlan: Some(VfVlan { id: 4094, priority: 0, service: false }),
        rates: Some(VfRates { min: 0, max: 5 }),
        spoof_check: Some(false),
        trust: Some(true),
        link_state: Some(VfLinkState::Disable),
    };
    host.set_vf(physical, 1, &other)?;
    assert_eq!(host.vf_settings(physical, 1)?, Some(other));
    for untouched_one in [0, 2] {
        assert_eq!(host.vf_settings(physical, untouched_one)?, Some(untouched()), "VF {untouched_one}");
    }
    // As restored by DEL.
    host.set_vf(physical, 1, &untouched())?;
    assert_eq!(host.vf_settings(physical, 1)?, Some(untouched()));
    let too_many = host.set_vf(physical, 3, &wanted).unwrap_err();
    assert_eq!(too_many.errno(), Some(rustix::io::Errno::INVAL), "{too_many}");
    // As set by ADD: several in one datagram, each with its own answer, and the address with a check of both ends. A
    // simulated VF has no interface: the card's stands for it.
    let each: Vec<VfSettings> = wanted.each().map(|(_, one)| one).collect();
    let taken = host.set_vf_each(physical, 1, &each)?;
    assert_eq!((taken.len(), taken.iter().all(Result::is_ok)), (each.len(), true));
    assert_eq!(host.vf_settings(physical, 1)?, Some(wanted.clone()));
    let taken = host.set_vf_each(physical, 3, &each)?;
    assert!(taken.len() == each.len() && taken.iter().all(Result::is_err), "{taken:?}");
    let mac = Some(Mac([2, 0, 0, 0, 0, 9]));
    let address = VfSettings { mac, ..VfSettings::default() };
    let (own, shown) = host.set_vf_and_show((physical, 1), &address, physical)?;
    assert_eq!(own.map(|own| own.link.index), Some(physical));
    assert_eq!(shown, Some(VfSettings { mac, ..wanted }));
    let (own, _) = host.set_vf_and_show((physical, 1), &address, i32::MAX as u32)?;
    assert_eq!(own, None, "no such device");
    assert!(host.set_vf_and_show((physical, 3), &address, physical).is_err());
    Ok(())
}

/// Rows: SRV-switchdev.
#[test]
fn representors_come_and_go_with_the_cards_mode() -> Result<()> {
    let Some(card) = Card::make("representors_come_and_go_with_the_cards_mode", 11)? else { return Ok(()) };
    card.set_functions(2)?;
    let mut host = Handle::open()?;
    // It shows its switch in mode legacy too.
    assert!(!card.is_switchdev()?);
    let none = |host: &mut Handle| -> Result<bool> {
        Ok([0, 1, 2].into_iter().map(|number| card.representors(host, number)).collect::<Result<Vec<_>>>()?
            == [const { Vec::new() }; 3])
    };
    assert!(none(&mut host)?);

    card.set_mode("switchdev")?;
    assert!(card.is_switchdev()?);
    let physical = card.physical(&mut host)?;
    let [first, second] = [0, 1].map(|number| card.representors(&mut host, number));
    let (first, second) = (first?, second?);
    assert_eq!((first.len(), second.len(), card.representors(&mut host, 2)?), (1, 1, Vec::new()));
    assert!(first != second && first[0].index != physical.index && second[0].index != physical.index);
    for (number, end) in [(0, &first[0]), (1, &second[0])] {
        let shown = fs::read_to_string(format!("/sys/class/net/{}/phys_port_name", end.name))?;
        assert_eq!(shown.trim(), format!("pf0vf{number}"));
        assert!(
            ethtool::is_on(end.index, ethtool::TC_OFFLOAD)?.is_some(),
            "it may be on, and the kernel tells"
        );
    }
    // The VFs of another card have the same numbers.
    let other = Card::make("representors_come_and_go_with_the_cards_mode", 12)?.context("a second card")?;
    other.set_functions(1)?;
    other.set_mode("switchdev")?;
    let others = other.representors(&mut host, 0)?;
    assert_eq!(card.representors(&mut host, 0)?, first);
    assert!(others.len() == 1 && others != first);
    // A representor is a different one after its VF was created again, whatever its name.
    card.set_functions(0)?;
    assert!(none(&mut host)?);
    card.set_functions(2)?;
    card.set_mode("switchdev")?;
    let again = card.representors(&mut host, 0)?;
    assert!(again.len() == 1 && again[0].index != first[0].index);

    card.set_mode("legacy")?;
    assert!(!card.is_switchdev()?);
    assert!(none(&mut host)?);
    assert_eq!(other.representors(&mut host, 0)?, others);
    drop(other);
    Ok(())
}

/// Rows: SRV-switchdev.
#[test]
fn a_card_in_mode_switchdev_takes_settings_and_refuses_rates() -> Result<()> {
    let Some(card) = Card::make("a_card_in_mode_switchdev_takes_settings_and_refuses_rates", 13)? else {
        return Ok(());
    };
    card.set_functions(1)?;
    card.set_mode("switchdev")?;
    let mut host = Handle::open()?;
    let physical = card.physical(&mut host)?.index;
    let wanted = VfSettings {
        mac: Some(Mac([2, 0, 0, 0, 0, 7])),
        vlan: Some(VfVlan { id: 5, priority: 0, service: false }),
        rates: None,
        spoof_check: Some(true),
        trust: Some(false),
        link_state: Some(VfLinkState::Enable),
    };
    host.set_vf(physical, 0, &wanted)?;
    let present = VfSettings { rates: Some(VfRates::default()), ..wanted };
    assert_eq!(host.vf_settings(physical, 0)?, Some(present.clone()));
    let rates = VfSettings { rates: Some(VfRates { min: 0, max: 5 }), ..VfSettings::default() };
    let refused = host.set_vf(physical, 0, &rates).unwrap_err();
    assert_eq!(refused.errno(), Some(rustix::io::Errno::OPNOTSUPP), "{refused}");
    assert_eq!(host.vf_settings(physical, 0)?, Some(present));
    // Its representor is no physical function.
    let end = card.representors(&mut host, 0)?.remove(0);
    assert_eq!(host.vf_settings(end.index, 0)?, None);
    Ok(())
}
