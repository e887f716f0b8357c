//! Versions of the CNI specification.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A supported version of the specification, in the order of publication.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Version {
    /// 0.1.0: one address per family, no VERSION verb. Also the version of a configuration without `cniVersion`.
    V0_1_0,
    /// 0.2.0: adds VERSION.
    V0_2_0,
    /// 0.3.0: lists, interfaces, any number of addresses.
    V0_3_0,
    /// 0.3.1: the same with the text of the specification corrected.
    V0_3_1,
    /// 0.4.0: adds CHECK and the previous result at DEL.
    V0_4_0,
    /// 1.0.0: the family of an address is no longer spelled out.
    V1_0_0,
    /// 1.1.0: adds GC and STATUS, link MTU, device identifiers and route attributes.
    V1_1_0,
}

/// Why a text is not a valid [`Version`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VersionError {
    /// Not one to three decimal numbers joined by dots.
    #[error("{0:?} is not a version such as 1.1.0")]
    Malformed(String),
    /// Well formed, but not a version that netattach supports.
    #[error("version {0:?} is not supported (supported: {supported})", supported = Version::list())]
    Unsupported(String),
}

impl Version {
    /// Every version, oldest first.
    pub const ALL: [Self; 7] =
        [Self::V0_1_0, Self::V0_2_0, Self::V0_3_0, Self::V0_3_1, Self::V0_4_0, Self::V1_0_0, Self::V1_1_0];

    /// The newest version.
    pub const LATEST: Self = Self::V1_1_0;

    /// The version as written in configurations and results.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::V0_1_0 => "0.1.0",
            Self::V0_2_0 => "0.2.0",
            Self::V0_3_0 => "0.3.0",
            Self::V0_3_1 => "0.3.1",
            Self::V0_4_0 => "0.4.0",
            Self::V1_0_0 => "1.0.0",
            Self::V1_1_0 => "1.1.0",
        }
    }

    /// The version whose text is exactly `text`, as a plugin compares it with its supported versions. The empty text
    /// means 0.1.0.
    pub fn exact(text: &str) -> Option<Self> {
        if text.is_empty() {
            return Some(Self::V0_1_0);
        }
        Self::ALL.into_iter().find(|version| version.as_str() == text)
    }

    /// Every version joined by `, `, for messages.
    pub fn list() -> String {
        Self::ALL.map(Self::as_str).join(", ")
    }

    /// Whether the CHECK verb exists (0.4.0).
    pub fn has_check(self) -> bool {
        self >= Self::V0_4_0
    }

    /// Whether a result has the members of the newest version (1.0.0): those of 1.1.0 are written into it too.
    pub fn has_whole_results(self) -> bool {
        self >= Self::V1_0_0
    }

    /// Whether the GC and STATUS verbs exist (1.1.0).
    pub fn has_gc_and_status(self) -> bool {
        self >= Self::V1_1_0
    }

    /// Whether DEL receives the result of the ADD (0.4.0).
    pub fn has_prev_result_at_del(self) -> bool {
        self >= Self::V0_4_0
    }
}

/// Reads a version with missing parts taken as zero, so that `1.1` is 1.1.0; the empty text is 0.1.0.
impl FromStr for Version {
    type Err = VersionError;

    fn from_str(text: &str) -> Result<Self, VersionError> {
        let number = if text.is_empty() { Number([0, 1, 0]) } else { text.parse()? };
        Self::ALL
            .into_iter()
            .find(|version| version.as_str().parse() == Ok(number))
            .ok_or_else(|| VersionError::Unsupported(text.to_owned()))
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Serialize for Version {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

impl<'de> Deserialize<'de> for Version {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// Any version number, known or not, compared part by part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Number(pub [u32; 3]);

impl FromStr for Number {
    type Err = VersionError;

    fn from_str(text: &str) -> Result<Self, VersionError> {
        let malformed = || VersionError::Malformed(text.to_owned());
        let mut parts = [0; 3];
        let mut slots = parts.iter_mut();
        for part in text.split('.') {
            let slot = slots.next().ok_or_else(malformed)?;
            if part.is_empty() || !part.bytes().all(|byte| byte.is_ascii_digit()) {
                return Err(malformed());
            }
            *slot = part.parse().map_err(|_| malformed())?;
        }
        Ok(Self(parts))
    }
}

#[cfg(test)]
mod tests {
    use netattach_shim::cni::{NEWEST, VERSIONS};
    use proptest::prelude::*;

    use super::*;

    /// Rows: VER-01.
    #[test]
    fn all_lists_the_seven_versions_in_order_and_ends_with_the_latest() {
        assert_eq!(Version::list(), "0.1.0, 0.2.0, 0.3.0, 0.3.1, 0.4.0, 1.0.0, 1.1.0");
        assert!(Version::ALL.is_sorted());
        // The executable answers VERSION without the agent.
        assert_eq!(Version::ALL.map(Version::as_str), VERSIONS);
        assert_eq!(Version::LATEST.as_str(), NEWEST);
        assert_eq!(Version::ALL.last(), Some(&Version::LATEST));
        for version in Version::ALL {
            assert_eq!(version.to_string().parse(), Ok(version));
            assert_eq!(Version::exact(version.as_str()), Some(version));
        }
    }

    /// Rows: VER-03, VER-04, CNV-09.
    #[test]
    fn missing_parts_are_zero_and_the_empty_text_is_the_first_version() {
        for (text, version) in [
            ("", Version::V0_1_0),
            ("1", Version::V1_0_0),
            ("1.1", Version::V1_1_0),
            ("1.1.0", Version::V1_1_0),
        ] {
            assert_eq!(text.parse(), Ok(version), "{text:?}");
        }
    }

    /// Rows: VER-05, CNV-08.
    #[test]
    fn text_that_is_not_a_version_number_is_refused() {
        for text in
            ["asdfasdf", "asdf.", "0.", "..", "1.2.3.4.5", "1.0.0-rc1", "+1", " 1", "99999999999", "1..0"]
        {
            assert_eq!(text.parse::<Version>(), Err(VersionError::Malformed(text.to_owned())));
        }
        // Versions outside of the enumeration are refused.
        assert_eq!("1.2.3".parse::<Version>(), Err(VersionError::Unsupported("1.2.3".to_owned())));
    }

    /// Rows: VER-06.
    #[test]
    fn numbers_are_compared_part_by_part() {
        let number = |text: &str| text.parse::<Number>().unwrap();
        assert!(number("0.3.10") > number("0.3.9"));
        assert!(number("1") > number("0.9.9"));
        assert_eq!(number("1.0"), number("1.0.0"));
    }

    /// Rows: VER-07.
    #[test]
    fn membership_is_exact_text() {
        assert_eq!(Version::exact("1.1"), None);
        assert_eq!(Version::exact("1.2.0"), None);
        assert_eq!(Version::exact(""), Some(Version::V0_1_0));
    }

    /// Rows: VER-29, VER-31.
    #[test]
    fn verbs_appear_with_their_version() {
        let since = |has: fn(Version) -> bool| Version::ALL.into_iter().find(|version| has(*version));
        assert_eq!(since(Version::has_check), Some(Version::V0_4_0));
        assert_eq!(since(Version::has_prev_result_at_del), Some(Version::V0_4_0));
        assert_eq!(since(Version::has_gc_and_status), Some(Version::V1_1_0));
    }

    #[test]
    fn serde_uses_the_text() {
        assert_eq!(serde_json::to_string(&Version::V0_3_1).unwrap(), "\"0.3.1\"");
        assert_eq!(serde_json::from_str::<Version>("\"\"").unwrap(), Version::V0_1_0);
        assert!(serde_json::from_str::<Version>("\"2.0.0\"").is_err());
        assert!(serde_json::from_str::<Version>("1").is_err());
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in "[0-9.]{0,12}|.{0,8}") {
            if let Ok(version) = text.parse::<Version>() {
                prop_assert!(Version::ALL.contains(&version));
            }
        }
    }
}
