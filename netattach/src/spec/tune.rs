//! Properties of an interface that are changed after its creation, as in the plugin `tuning`.

use serde::{Deserialize, Serialize};

use crate::mac::Mac;

/// The changes.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Tune {
    /// Kernel settings of the pod's namespace, in the order of the configuration.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sysctls: Vec<Sysctl>,
    /// Properties of the interface.
    #[serde(flatten)]
    pub properties: Properties,
}

impl Tune {
    /// Returns the changes with `later` applied as well.
    #[must_use]
    pub fn then(mut self, later: &Self) -> Self {
        self.sysctls.retain(|one| !later.sysctls.iter().any(|it| it.path == one.path));
        self.sysctls.extend(later.sysctls.iter().cloned());
        Self { sysctls: self.sysctls, properties: later.properties.or(&self.properties) }
    }
}

/// A kernel setting.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sysctl {
    /// The setting's name as written, which is compared with an administrator's list of allowed settings.
    pub key: String,
    /// Its file below `/proc/sys/net`.
    pub path: String,
    /// Its value, as written.
    pub value: String,
    /// Whether `args.cni`, for example from a pod's `cni-args`, requests the setting and not the network's author. An
    /// agent that does not know this field can ignore it: it is checked before the setting is written.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub asked: bool,
}

/// Properties of an interface. An absent one is left unchanged. The names are those of the reference plugin, in its
/// configuration and in the file with its former values.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Properties {
    /// Ethernet address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<Mac>,
    /// MTU in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// Whether the interface receives all frames.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub promisc: Option<bool>,
    /// Whether the interface receives all multicast frames.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allmulti: Option<bool>,
    /// Maximum number of frames that wait to be sent.
    #[serde(default, rename = "txQLen", skip_serializing_if = "Option::is_none")]
    pub queue: Option<u32>,
}

impl Properties {
    /// Returns the values in `now` of the properties that these would change, to restore them later.
    pub fn before(&self, now: &Self) -> Self {
        Self {
            mac: self.mac.and(now.mac),
            mtu: self.mtu.and(now.mtu),
            promisc: self.promisc.and(now.promisc),
            allmulti: self.allmulti.and(now.allmulti),
            queue: self.queue.and(now.queue),
        }
    }

    /// Returns these properties, completed by those of `others`.
    #[must_use]
    pub fn or(&self, others: &Self) -> Self {
        Self {
            mac: self.mac.or(others.mac),
            mtu: self.mtu.or(others.mtu),
            promisc: self.promisc.or(others.promisc),
            allmulti: self.allmulti.or(others.allmulti),
            queue: self.queue.or(others.queue),
        }
    }

    /// Returns the properties whose value in `now` differs.
    pub fn missing(&self, now: &Self) -> Self {
        fn missing<T: PartialEq + Copy>(wanted: Option<T>, now: Option<T>) -> Option<T> {
            wanted.filter(|_| wanted != now)
        }
        Self {
            mac: missing(self.mac, now.mac),
            mtu: missing(self.mtu, now.mtu),
            promisc: missing(self.promisc, now.promisc),
            allmulti: missing(self.allmulti, now.allmulti),
            queue: missing(self.queue, now.queue),
        }
    }

    /// Whether nothing is changed.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Describes the first property: `MTU 1500`.
    pub fn first(&self) -> Option<String> {
        let mode = |name: &str, on: bool| format!("{name} {}", if on { "on" } else { "off" });
        let mac = self.mac.map(|mac| format!("Ethernet address {mac}"));
        mac.or_else(|| self.mtu.map(|mtu| format!("MTU {mtu}")))
            .or_else(|| self.promisc.map(|on| mode("promisc", on)))
            .or_else(|| self.allmulti.map(|on| mode("allmulti", on)))
            .or_else(|| self.queue.map(|length| format!("txQLen {length}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn now() -> Properties {
        Properties {
            mac: Some(Mac([2, 0, 0, 0, 0, 1])),
            mtu: Some(1500),
            promisc: Some(false),
            allmulti: Some(true),
            queue: Some(1000),
        }
    }

    #[test]
    fn only_what_is_changed_is_given_back() {
        let wanted = Properties { mtu: Some(1400), promisc: Some(true), ..Properties::default() };
        let before = Properties { mtu: Some(1500), promisc: Some(false), ..Properties::default() };
        assert_eq!(wanted.before(&now()), before);
        assert_eq!(Properties::default().before(&now()), Properties::default());
        assert!(before.missing(&now()).is_empty());
        assert_eq!(wanted.missing(&now()), wanted);
    }

    #[test]
    fn of_what_is_changed_twice_the_last_is_there_and_all_else_of_both() {
        let sysctl = |path: &str, value: &str| Sysctl {
            key: format!("net.{}", path.replace('/', ".")),
            path: path.to_owned(),
            value: value.to_owned(),
            asked: false,
        };
        let first = Tune {
            sysctls: vec![sysctl("core/somaxconn", "500"), sysctl("ipv4/ip_forward", "1")],
            properties: Properties { mtu: Some(1400), promisc: Some(true), ..Properties::default() },
        };
        let later = Tune {
            sysctls: vec![Sysctl { key: "net/core/somaxconn".to_owned(), ..sysctl("core/somaxconn", "600") }],
            properties: Properties { mtu: Some(1300), queue: Some(7), ..Properties::default() },
        };
        let both = Tune {
            sysctls: vec![first.sysctls[1].clone(), later.sysctls[0].clone()],
            properties: Properties {
                mtu: Some(1300),
                promisc: Some(true),
                queue: Some(7),
                ..Properties::default()
            },
        };
        assert_eq!(first.clone().then(&later), both);
        assert_eq!(Tune::default().then(&first), first);
        assert_eq!(first.clone().then(&Tune::default()), first);
    }

    #[test]
    fn a_property_is_named_by_its_value() {
        let all = now();
        let rows = [
            (Properties { mac: all.mac, ..Properties::default() }, "Ethernet address 02:00:00:00:00:01"),
            (Properties { mtu: Some(9000), ..Properties::default() }, "MTU 9000"),
            (Properties { promisc: Some(false), ..Properties::default() }, "promisc off"),
            (Properties { allmulti: Some(true), ..Properties::default() }, "allmulti on"),
            (Properties { queue: Some(0), ..Properties::default() }, "txQLen 0"),
        ];
        for (one, text) in rows {
            assert_eq!(one.first().as_deref(), Some(text));
        }
        assert_eq!(Properties::default().first(), None);
    }

    #[test]
    fn the_file_of_the_reference_plugin_is_read() {
        let text = r#"{"mac":"02:00:00:00:00:01","promisc":false,"mtu":1500,"allmulti":true,"txQLen":1000}"#;
        assert_eq!(serde_json::from_str::<Properties>(text).unwrap(), now());
        assert_eq!(serde_json::to_string(&Properties::default()).unwrap(), "{}");
    }
}
