//! How far policies and source checks are enforced on an attachment.

use std::fmt;

/// How far policies and source checks are enforced on an attachment. A greater level is stronger.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Not at all: policies have no effect.
    None,
    /// Until the pod or another process detaches the programs, which are filters in the pod; or except for
    /// packets that other programs, or a card that switches by itself, keep from our programs.
    Advisory,
    /// The pod has, or may have, privileges over its network that let it evade the programs; without them it could not.
    FullUnlessPrivileged,
    /// The pod cannot evade them.
    Full,
}

/// A level, and the reason why it is not higher.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Enforcement {
    /// The level.
    pub level: Level,
    /// The reason, as text; empty at the highest level.
    pub why: String,
}

impl Level {
    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::FullUnlessPrivileged => "full-unless-privileged",
            Self::Advisory => "advisory",
            Self::None => "none",
        }
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for Enforcement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.level)?;
        if self.why.is_empty() { Ok(()) } else { write!(f, " ({})", self.why) }
    }
}
