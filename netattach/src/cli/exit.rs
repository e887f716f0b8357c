//! Exit codes of `netattachctl`, so that scripts can tell failures apart without parsing messages.

/// The reason why a command failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// The command failed; `status` of an agent that is not ready, `import` of a key that has no equivalent, a problem that
    /// `validate` or `doctor` found.
    Failed = 1,
    /// The command line is invalid, or what it names is not exactly one object; nothing was done.
    Usage = 2,
    /// An object that the command line names does not exist.
    NotFound = 3,
    /// The agent could not be reached.
    NoAgent = 4,
    /// Something is still in use and has to end first.
    InUse = 5,
}

impl Exit {
    /// All codes except 0.
    pub const ALL: [Self; 5] = [Self::Failed, Self::Usage, Self::NotFound, Self::NoAgent, Self::InUse];

    /// The number.
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// The meaning, for help and documents.
    pub const fn meaning(self) -> &'static str {
        match self {
            Self::Failed => {
                "the command failed; the agent is not ready (status); a key has no equivalent (import); there is a problem (validate, doctor, test)"
            }
            Self::Usage => {
                "the command line is invalid, or what it names is not exactly one object; nothing was done"
            }
            Self::NotFound => "an object that the command line names does not exist",
            Self::NoAgent => {
                "the agent cannot be reached: it does not run, does not answer, or permission is missing"
            }
            Self::InUse => "an agent runs, or pods are attached (uninstall)",
        }
    }
}

/// The end of `netattachctl --help`.
pub(super) fn help() -> String {
    let line = |exit: Exit| format!("  {}  {}\n", exit.code(), exit.meaning());
    let codes: String = Exit::ALL.into_iter().map(line).collect();
    format!("Exit codes:\n  0  the command succeeded\n{}", codes.trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_is_in_the_documents_with_the_same_words() {
        let documents = include_str!("../../../docs/troubleshooting.md");
        for exit in Exit::ALL {
            let row = format!("| {} | {} |", exit.code(), exit.meaning());
            assert!(documents.lines().any(|line| line == row), "docs/troubleshooting.md lacks\n{row}");
        }
    }
}
