//! Ethernet addresses.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A 48-bit Ethernet address, in wire order. Printed as Go's `HardwareAddr` prints it: lower case, colons.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Mac(pub [u8; 6]);

/// The text was not six two-digit hexadecimal groups joined by `:` (or by `-`).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not an Ethernet address such as 02:00:00:00:00:01")]
pub struct InvalidMac(pub String);

impl Mac {
    /// Whether the group bit is set: such an address cannot be an interface's own.
    pub fn is_multicast(self) -> bool {
        self.0[0] & 1 == 1
    }
}

impl FromStr for Mac {
    type Err = InvalidMac;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        octets(text).map(Self).ok_or_else(|| InvalidMac(text.to_owned()))
    }
}

/// Parses `N` groups of two hexadecimal digits joined by `:` (or all by `-`).
pub(crate) fn octets<const N: usize>(text: &str) -> Option<[u8; N]> {
    let separator = if text.contains('-') { '-' } else { ':' };
    let mut bytes = [0; N];
    let mut groups = text.split(separator);
    for byte in &mut bytes {
        let group = groups.next()?;
        if group.len() != 2 || !group.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return None;
        }
        *byte = u8::from_str_radix(group, 16).ok()?;
    }
    groups.next().is_none().then_some(bytes)
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl Serialize for Mac {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Mac {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows: RES-13.
    #[test]
    fn prints_lower_case_with_colons() {
        let parsed: Mac = "02-AB-00-00-00-FF".parse().unwrap();
        assert_eq!(parsed.to_string(), "02:ab:00:00:00:ff");
    }

    #[test]
    fn rejects_other_lengths_and_characters() {
        for text in [
            "",
            "02:00:00:00:00",
            "02:00:00:00:00:01:02",
            "zz:00:00:00:00:01",
            "2:0:0:0:0:1",
            "+2:00:00:00:00:01",
        ] {
            assert_eq!(text.parse::<Mac>(), Err(InvalidMac(text.to_owned())));
        }
    }
}
