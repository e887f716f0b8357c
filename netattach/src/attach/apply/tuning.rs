//! Changes settings and properties of a pod's interface, restores them, and compares them.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use ipnet::IpNet;
use regex_lite::Regex;

use super::IPV6_MIN_MTU;
use super::links::LinkError;
use crate::attach::StepError;
use crate::cni::code;
use crate::error_chain::Chain;
use crate::netlink::{self, Handle};
use crate::netns::{Netns, within};
use crate::spec::{Properties, Sysctl, Tune};
use crate::sysctl;

/// The administrator's list of settings that networks may change, at the reference plugin's path: one regular
/// expression per line, one of which has to match somewhere in the setting's name as written. Without the file, a
/// network's author may change all settings of the pod's network namespace, and a pod none.
const ALLOWED: &str = "/etc/cni/tuning/allowlist.conf";

/// Why an interface cannot be tuned.
#[derive(Debug, thiserror::Error)]
pub enum TuningError {
    /// The list of allowed settings cannot be read.
    #[error("read the list of allowed settings, {path}")]
    List {
        /// Its path.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: std::io::Error,
    },
    /// A line of the list is not a valid regular expression.
    #[error("{path}: {line:?} is not a regular expression: {reason}")]
    Line {
        /// Path of the list.
        path: PathBuf,
        /// The line.
        line: String,
        /// The problem of the line.
        reason: String,
    },
    /// A pod requests the setting, and there is no list.
    #[error(
        "key args.cni.sysctl: {key:?} is asked for by the pod, and there is no {path}, in which the node's administrator lists the settings \
         that may be asked for; the network's author has his own in sysctl"
    )]
    Asked {
        /// The setting as written.
        key: String,
        /// Path of the missing list.
        path: PathBuf,
    },
    /// The list does not have the setting.
    #[error("key sysctl: {key:?} is not allowed by {path}")]
    NotAllowed {
        /// The setting as written.
        key: String,
        /// Path of the list.
        path: PathBuf,
    },
}

impl TuningError {
    /// The CNI code.
    pub(in crate::attach) fn code(&self) -> u32 {
        match self {
            Self::List { .. } => code::IO_FAILURE,
            Self::Line { .. } | Self::Asked { .. } | Self::NotAllowed { .. } => code::INVALID_CONFIG,
        }
    }
}

/// Refuses settings that the administrator does not allow.
///
/// # Errors
/// The first such setting; or the list cannot be used, which allows nothing.
pub(in crate::attach) fn check_allowed(tune: &Tune) -> Result<(), TuningError> {
    if tune.sysctls.is_empty() { Ok(()) } else { allowed_by(Path::new(ALLOWED), &tune.sysctls) }
}

fn allowed_by(path: &Path, sysctls: &[Sysctl]) -> Result<(), TuningError> {
    let text = match std::fs::read_to_string(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return none_asked(path, sysctls),
        other => other.map_err(|source| TuningError::List { path: path.to_owned(), source })?,
    };
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let patterns = lines.map(|line| {
        Regex::new(line).map_err(|error| TuningError::Line {
            path: path.to_owned(),
            line: line.to_owned(),
            reason: error.to_string(),
        })
    });
    let patterns: Vec<Regex> = patterns.collect::<Result<_, _>>()?;
    let is_allowed = |one: &&Sysctl| patterns.iter().any(|pattern| pattern.is_match(&one.key));
    match sysctls.iter().find(|one| !is_allowed(one)) {
        Some(one) => Err(TuningError::NotAllowed { key: one.key.clone(), path: path.to_owned() }),
        None => Ok(()),
    }
}

/// Without a list, refuses settings that a pod requests. The kubelet allows pods safe settings and those in its
/// administrator's `allowedUnsafeSysctls`, but only checks those in a pod's `securityContext`.
fn none_asked(path: &Path, sysctls: &[Sysctl]) -> Result<(), TuningError> {
    match sysctls.iter().find(|one| one.asked) {
        Some(one) => Err(TuningError::Asked { key: one.key.clone(), path: path.to_owned() }),
        None => Ok(()),
    }
}

/// Returns the current values of the properties that would be changed.
pub(in crate::attach) fn before(
    pod: &mut Handle,
    ifname: &str,
    tune: &Tune,
) -> Result<Properties, StepError> {
    Ok(tune.properties.before(&pod.properties(ifname)?))
}

/// Makes the changes: settings first, as the reference plugin does.
pub(in crate::attach) fn tune(
    pod: &mut Handle,
    netns: &Netns,
    ifname: &str,
    tune: &Tune,
) -> Result<(), StepError> {
    check_allowed(tune)?;
    check_addresses_stay(pod, ifname, tune)?;
    if !tune.sysctls.is_empty() {
        within(netns, || tune.sysctls.iter().try_for_each(|one| sysctl::ensure(&one.path, &one.value)))??;
        // Checked once all settings are written, as those of all devices may be among them. Not refused: networks
        // request such values although their administrators allow only the device's settings, and the kernel has
        // stored the requested value.
        let overridden: Vec<String> = within(netns, || tune.sysctls.iter().filter_map(overridden).collect())?;
        overridden.iter().for_each(|what| tracing::warn!(ifname, "{what}"));
    }
    let missing = tune.properties.missing(&pod.properties(ifname)?);
    Ok(pod.set_properties(ifname, &missing)?)
}

/// Refuses an MTU at which the kernel removes the interface's IPv6 addresses (`addrconf_notify` in
/// `net/ipv6/addrconf.c`), which have been reported already.
fn check_addresses_stay(pod: &mut Handle, ifname: &str, tune: &Tune) -> Result<(), StepError> {
    let Some(mtu) = tune.properties.mtu.filter(|mtu| *mtu < IPV6_MIN_MTU) else { return Ok(()) };
    let index = pod.link(ifname)?.index;
    let is_given = |net: &IpNet| matches!(net, IpNet::V6(net) if !net.addr().is_unicast_link_local());
    match pod.addresses(index)?.iter().any(is_given) {
        true => Err(LinkError::SmallMtu(mtu).into()),
        false => Ok(()),
    }
}

/// Returns why a setting has no effect, in the namespace of this thread; `None`: it has an effect.
fn overridden(one: &Sysctl) -> Option<String> {
    let Sysctl { key, path, value, asked: _ } = one;
    let by = sysctl::overridden(path, value)?;
    Some(format!("key sysctl: {key:?} has no effect as {value:?}: {by}; set that of all devices too"))
}

/// Restores the properties. An interface that is gone needs no restoring, and an MTU that is no longer possible does
/// not prevent restoring the rest. `made`: its index, if known; otherwise the name identifies it.
pub(in crate::attach) fn give_back(
    pod: &mut Handle,
    (ifname, made): (&str, Option<u32>),
    before: &Properties,
) -> Result<(), StepError> {
    let called = match made.map(|index| pod.link_by_index(index)) {
        Some(Err(netlink::Error::NoSuchLink(_))) => return Ok(()),
        // The kernel cannot report what the pod changed of it, so nothing can be restored; the interface is the
        // pod's.
        Some(Err(error)) if error.is_untold() => return Ok(()),
        Some(found) => found?.name,
        None => ifname.to_owned(),
    };
    let ifname = called.as_str();
    let now = match pod.properties(ifname) {
        Err(error) if error.not_found() || error.is_untold() => return Ok(()),
        other => other?,
    };
    let mut missing = before.missing(&now);
    let mtu = missing.mtu.take();
    pod.set_properties(ifname, &missing)?;
    if mtu.is_some()
        && let Err(error) = pod.set_properties(ifname, &Properties { mtu, ..Properties::default() })
    {
        // The MTU of the device beneath may have been lowered since.
        tracing::warn!(ifname, mtu, error = %Chain(&error), "the interface does not get its MTU back");
    }
    Ok(())
}

/// Describes the first difference.
pub(in crate::attach) fn difference(
    pod: &mut Handle,
    netns: &Netns,
    ifname: &str,
    tune: &Tune,
) -> Result<Option<String>, StepError> {
    let settings = within(netns, || tune.sysctls.iter().find_map(of_setting))?;
    if settings.is_some() {
        return Ok(settings);
    }
    let now = pod.properties(ifname)?;
    let gone = tune.properties.missing(&now).first();
    Ok(gone.map(|what| format!("interface {ifname} has no longer {what}")))
}

/// Describes how a setting differs, in the namespace of this thread. The kernel separates several values with tabs.
fn of_setting(one: &Sysctl) -> Option<String> {
    let Sysctl { path, value, .. } = one;
    let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    match std::fs::read_to_string(Path::new("/proc/sys/net").join(path)) {
        Ok(found) if words(&found) == words(value) => None,
        Ok(found) => Some(format!("net/{path} is {:?}, not {value:?}", found.trim_end())),
        Err(error) => Some(format!("net/{path} cannot be read: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::spec::{Bridge, Macvlan};

    /// Rows: TUN-home.
    #[test]
    fn an_mtu_that_is_not_possible_any_more_keeps_nothing_else_from_being_given_back() {
        let netns = Netns::private().unwrap();
        let [mut pod, mut same] = [(); 2].map(|()| Handle::open_in(&netns).unwrap());
        let name = "below".to_owned();
        let below = Bridge { name: name.clone(), mtu: Some(1500), promiscuous: false, vlan_filtering: false };
        let below = pod.ensure_bridge(&below).unwrap().link;
        let macvlan = Macvlan { mtu: Some(1400), ..Macvlan::plain("net1", &name) };
        let made = pod.create_macvlan(&macvlan, &below, netns.as_fd(), &mut same).unwrap();
        pod.set_mtu(below.index, 1450).unwrap();
        let before = Properties { mtu: Some(1500), queue: Some(77), ..Properties::default() };
        let mut now = || {
            give_back(&mut pod, ("net1", Some(made.index)), &before).unwrap();
            let found = pod.properties("net1").unwrap();
            (found.mtu, found.queue)
        };
        assert_eq!(now(), (Some(1400), Some(77)));
        same.set_mtu(below.index, 1500).unwrap();
        assert_eq!(now(), (Some(1500), Some(77)));
    }

    /// Rows: TUN-asked-for.
    #[test]
    fn a_list_allows_what_it_matches() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("allowlist.conf");
        let by =
            |key: &str, asked| [Sysctl { key: key.into(), path: String::new(), value: String::new(), asked }];
        let one = |key: &str| by(key, false);
        let judged =
            |sysctls: &[Sysctl]| allowed_by(&path, sysctls).map_err(|error| Chain(&error).to_string());
        let said = |key: &str| judged(&one(key));
        assert_eq!(said("net.core.somaxconn"), Ok(()));
        // Without a list a pod asks for none; with one, for those that it has.
        let why = format!(
            "key args.cni.sysctl: \"net.core.somaxconn\" is asked for by the pod, and there is no {}, in which the node's administrator \
             lists the settings that may be asked for; the network's author has his own in sysctl",
            path.display()
        );
        let [own] = one("net.a");
        let [asked] = by("net.core.somaxconn", true);
        assert_eq!(judged(&[own, asked.clone()]), Err(why));
        std::fs::write(&path, "^net\\.ipv4\\.conf\\.IFNAME\\.[a-z_]*$\n\n  ^net.core.so \n").unwrap();
        assert_eq!(said("net.ipv4.conf.IFNAME.log_martians"), Ok(()));
        assert_eq!(said("net.core.somaxconn"), Ok(()));
        assert_eq!(judged(&[asked]), Ok(()));
        let refused = |key: &str| Err(format!("key sysctl: {key:?} is not allowed by {}", path.display()));
        for key in ["net.ipv4.conf.eth0.log_martians", "net.ipv4.ip_forward", "x.net.core.so"] {
            assert_eq!(said(key), refused(key));
        }
        std::fs::write(&path, "").unwrap();
        assert_eq!(said("net.core.somaxconn"), refused("net.core.somaxconn"));
        std::fs::write(&path, "net(\n").unwrap();
        assert!(said("net.core.somaxconn").unwrap_err().contains("is not a regular expression"));
        assert!(allowed_by(directory.path(), &one("net.a")).is_err());
    }
}
