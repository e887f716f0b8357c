//! InfiniBand port GUIDs.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::mac::octets;

/// A 64-bit InfiniBand GUID, in wire order. Printed as eight lower-case groups joined by `:`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Guid(pub [u8; 8]);

/// The text was not eight two-digit hexadecimal groups joined by `:` (or by `-`).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not an InfiniBand GUID such as c2:11:22:33:44:55:66:77")]
pub struct InvalidGuid(pub String);

impl FromStr for Guid {
    type Err = InvalidGuid;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        octets(text).map(Self).ok_or_else(|| InvalidGuid(text.to_owned()))
    }
}

impl fmt::Display for Guid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (position, byte) in self.0.iter().enumerate() {
            let separator = if position == 0 { "" } else { ":" };
            write!(f, "{separator}{byte:02x}")?;
        }
        Ok(())
    }
}

impl Serialize for Guid {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Guid {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prints_what_it_parsed() {
        assert_eq!("C2-11-22-33-44-55-66-77".parse::<Guid>().unwrap().to_string(), "c2:11:22:33:44:55:66:77");
    }

    #[test]
    fn other_lengths_are_refused() {
        for text in ["", "02:00:00:00:00:01", "c2:11:22:33:44:55:66:77:88", "c2:11:22:33:44:55:66:+7"] {
            assert_eq!(text.parse::<Guid>(), Err(InvalidGuid(text.to_owned())));
        }
    }
}
