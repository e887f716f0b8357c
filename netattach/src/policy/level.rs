//! How far policies and source checks hold for an attachment.

use std::fmt;

use serde::{Deserialize, Serialize};

/// How far policies and source checks hold for an attachment. A greater one holds further.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Level {
    /// Not at all: policies have no effect.
    None,
    /// Until the pod, or anybody else, takes the programs off: they are filters in the pod.
    Advisory,
    /// The pod has, or may have, privileges over its network by which it can get past them; without those it could not.
    FullUnlessPrivileged,
    /// Whatever the pod does.
    Full,
}

/// A level, and what keeps it from being a higher one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Enforcement {
    /// How far.
    pub level: Level,
    /// Why not further, in words; empty when it is as far as can be.
    pub why: String,
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Full => "full",
            Self::FullUnlessPrivileged => "full-unless-privileged",
            Self::Advisory => "advisory",
            Self::None => "none",
        })
    }
}

impl fmt::Display for Enforcement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.level)?;
        if self.why.is_empty() { Ok(()) } else { write!(f, " ({})", self.why) }
    }
}
