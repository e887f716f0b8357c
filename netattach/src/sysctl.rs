//! Kernel settings below `/proc/sys/net`. They belong to the network namespace of the accessing thread.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::OnceLock;

use crate::timing;

const ROOT: &str = "/proc/sys/net";

/// A setting could not be read or written.
#[derive(Debug, thiserror::Error)]
#[error("set {path} to {value}")]
pub struct SysctlError {
    /// Its file.
    pub path: PathBuf,
    /// The intended value.
    pub value: String,
    /// The kernel's error.
    #[source]
    pub source: io::Error,
}

/// Returns the value of a setting of the calling thread's network namespace; `None`: it cannot be read.
pub fn value(key: &str) -> Option<String> {
    let mut found = std::fs::read_to_string(format!("{ROOT}/{key}")).ok()?;
    found.truncate(found.trim_end().len());
    Some(found)
}

/// Whether a setting of the calling thread's network namespace has that value; `false` if it cannot be read.
pub fn is(key: &str, value: &str) -> bool {
    self::value(key).is_some_and(|found| found == value)
}

/// Whether the calling thread's network namespace is the initial one, to which the kernel moves the cards of
/// namespaces that end (`default_device_exit_net`): only there are the settings that all namespaces share
/// (`net_core_table`).
pub fn is_first_namespace() -> bool {
    std::path::Path::new(ROOT).join("core/dev_weight").exists()
}

/// Returns the names below `key`, such as the devices below `ipv4/conf`.
///
/// # Errors
/// The directory cannot be read.
pub fn names(key: &str) -> io::Result<Vec<String>> {
    let entries = std::fs::read_dir(format!("{ROOT}/{key}"))?;
    entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
}

/// Sets `key` (below `/proc/sys/net`, with slashes) to `value`; writes only if the value differs, because a write may
/// cause an event for every interface.
///
/// # Errors
/// The setting does not exist or cannot be written.
pub fn ensure(key: &str, value: &str) -> Result<(), SysctlError> {
    let path = PathBuf::from(ROOT).join(key);
    let set = || {
        if std::fs::read_to_string(&path)?.trim_end() == value {
            Ok(())
        } else {
            std::fs::write(&path, value)?;
            crate::crash_point!("sysctl", key);
            Ok(())
        }
    };
    timing::part("sysctl", set).map_err(|source| SysctlError {
        path: path.clone(),
        value: value.to_owned(),
        source,
    })
}

/// How the kernel combines a device's setting with that of all devices (`include/linux/inetdevice.h`,
/// `Documentation/networking/ip-sysctl.rst`). Settings that are not listed here belong to the device alone, as do all
/// of IPv6.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Both {
    /// The larger value applies.
    Larger,
    /// On if either is on.
    Either,
    /// On if both are on.
    Each,
    /// Like [`Both::Each`] on a device that forwards, otherwise like [`Both::Either`].
    ByForwarding,
}

impl Both {
    fn of(setting: &str) -> Option<Self> {
        match setting {
            "rp_filter" | "arp_ignore" | "arp_announce" | "arp_accept" | "arp_notify" => Some(Self::Larger),
            "accept_local"
            | "arp_filter"
            | "drop_gratuitous_arp"
            | "drop_unicast_in_l2_multicast"
            | "ignore_routes_with_linkdown"
            | "log_martians"
            | "promote_secondaries"
            | "proxy_arp"
            | "route_localnet"
            | "secure_redirects"
            | "send_redirects"
            | "shared_media"
            | "src_valid_mark" => Some(Self::Either),
            "accept_source_route"
            | "arp_evict_nocarrier"
            | "bc_forwarding"
            | "bootp_relay"
            | "mc_forwarding" => Some(Self::Each),
            "accept_redirects" => Some(Self::ByForwarding),
            _ => None,
        }
    }

    /// Whether the value of all devices overrides the device's.
    fn overrides(self, all: i64, own: i64, forwards: bool) -> bool {
        let is_on = |value: i64| value != 0;
        match self {
            Self::Larger => all > own,
            Self::Either => is_on(all) && !is_on(own),
            Self::Each => !is_on(all) && is_on(own),
            Self::ByForwarding if forwards => Self::Each.overrides(all, own, forwards),
            Self::ByForwarding => Self::Either.overrides(all, own, forwards),
        }
    }

    fn said(self, forwards: bool) -> &'static str {
        match self {
            Self::Larger => "the larger counts",
            Self::Either => "either is enough",
            Self::Each => "both have to be on",
            Self::ByForwarding if forwards => Self::Each.said(forwards),
            Self::ByForwarding => Self::Either.said(forwards),
        }
    }
}

/// Describes what overrides a device's setting if it has that value in the calling thread's network namespace: the
/// setting of all devices.
pub fn overridden(key: &str, value: &str) -> Option<String> {
    let [family @ "ipv4", conf @ "conf", device, setting] = key.split('/').collect::<Vec<_>>()[..] else {
        return None;
    };
    if ["all", "default"].contains(&device) {
        return None;
    }
    let both = Both::of(setting)?;
    let own: i64 = value.trim().parse().ok()?;
    let of_all = format!("{family}/{conf}/all/{setting}");
    let all: i64 = std::fs::read_to_string(format!("{ROOT}/{of_all}")).ok()?.trim().parse().ok()?;
    let forwards = is(&format!("{family}/{conf}/{device}/forwarding"), "1");
    both.overrides(all, own, forwards)
        .then(|| format!("net/{of_all} is {all}, and of both {}", both.said(forwards)))
}

/// A setting whose file is kept open, because opening takes most of the time of a read. It belongs to the network
/// namespace of the thread that reads first.
#[derive(Debug)]
pub struct Kept {
    key: &'static str,
    file: OnceLock<File>,
}

impl Kept {
    /// Makes the setting `key`, as for [`ensure`]. Opens nothing yet.
    pub const fn new(key: &'static str) -> Self {
        Self { key, file: OnceLock::new() }
    }

    /// Like [`ensure`].
    ///
    /// # Errors
    /// The setting does not exist or cannot be written.
    pub fn ensure(&self, value: &str) -> Result<(), SysctlError> {
        match timing::part("sysctl", || self.is(value)) {
            true => Ok(()),
            false => ensure(self.key, value),
        }
    }

    fn is(&self, value: &str) -> bool {
        let file = match self.file.get() {
            Some(file) => file,
            // The writer reports an error.
            None => match File::open(PathBuf::from(ROOT).join(self.key)) {
                Ok(file) => self.file.get_or_init(|| file),
                Err(_) => return false,
            },
        };
        // The kernel returns the whole value in one read; a longer value is a different one.
        let mut found = [0; 64];
        let read = file.read_at(&mut found, 0).unwrap_or_default();
        found[..read].trim_ascii_end() == value.as_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netns::{Netns, within};

    #[test]
    fn a_namespace_that_was_made_is_not_the_machines_first() {
        assert!(!within(&Netns::private().unwrap(), is_first_namespace).unwrap());
    }

    #[test]
    fn the_setting_of_all_devices_overrides_as_the_kernel_has_it() {
        let rows = [
            (Both::Larger, [(0, 0, false), (1, 0, true), (1, 1, false), (1, 2, false), (2, 1, true)]),
            (Both::Either, [(0, 0, false), (1, 0, true), (1, 1, false), (0, 1, false), (2, 0, true)]),
            (Both::Each, [(0, 0, false), (1, 0, false), (1, 1, false), (0, 1, true), (0, 2, true)]),
        ];
        for (both, cases) in rows {
            for (all, own, expected) in cases {
                assert_eq!(both.overrides(all, own, false), expected, "{both:?} {all} {own}");
                let by_forwarding = |forwards| Both::ByForwarding.overrides(all, own, forwards);
                match both {
                    Both::Either => assert_eq!(by_forwarding(false), expected, "{all} {own}"),
                    Both::Each => assert_eq!(by_forwarding(true), expected, "{all} {own}"),
                    _ => {}
                }
            }
        }
        let netns = Netns::private().unwrap();
        within(&netns, || {
            ensure("ipv4/conf/all/rp_filter", "1").unwrap();
            let larger = "net/ipv4/conf/all/rp_filter is 1, and of both the larger counts";
            assert_eq!(overridden("ipv4/conf/lo/rp_filter", "0").as_deref(), Some(larger));
            for (key, value) in [
                ("ipv4/conf/lo/rp_filter", "2"),
                ("ipv4/conf/all/rp_filter", "0"),
                ("ipv4/conf/default/rp_filter", "0"),
                ("ipv4/conf/lo/tag", "0"),
                ("ipv4/conf/lo/rp_filter", "loose"),
                ("ipv6/conf/lo/rp_filter", "0"),
                ("core/somaxconn", "0"),
            ] {
                assert_eq!(overridden(key, value), None, "{key} {value}");
            }
        })
        .unwrap();
    }

    #[test]
    fn a_setting_that_is_kept_is_as_it_is_now_and_of_the_namespace_that_asked_first() {
        let netns = Netns::private().unwrap();
        let (kept, key) = (Kept::new("ipv4/ip_forward"), "ipv4/ip_forward");
        within(&netns, || {
            assert!(!kept.is("1"));
            kept.ensure("1").unwrap();
            assert!(is(key, "1") && kept.is("1"));
            std::fs::write(format!("{ROOT}/{key}"), "0").unwrap();
            assert!(kept.is("0"));
        })
        .unwrap();
        kept.ensure("0").unwrap();
        let missing = Kept::new("ipv4/nothing").ensure("1").unwrap_err();
        assert_eq!(missing.source.kind(), io::ErrorKind::NotFound);
    }
}
