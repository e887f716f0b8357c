//! Size limits of input from others that the CNI executable checks. The agent has the table of all
//! limits.

// Codes of the CNI specification (section 5).
const DECODING_FAILURE: u32 = 6;
const TRY_AGAIN_LATER: u32 = 11;

const RUNTIME: &str = "container runtime";

/// One limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    /// The limited item, as messages name it.
    pub what: &'static str,
    /// The limit.
    pub most: usize,
    /// The unit of the limit.
    pub unit: &'static str,
    /// The author who can make it large.
    pub origin: &'static str,
    /// The object or operation refused when the limit is exceeded.
    pub refused: &'static str,
    /// The CNI code of the refusal; `None` if there is no CNI caller.
    pub code: Option<u32>,
}

/// A limit is exceeded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}: {found} {unit}, and at most {most} are allowed")]
pub struct Exceeded {
    /// The limited item.
    pub what: &'static str,
    /// The amount found.
    pub found: usize,
    /// The limit.
    pub most: usize,
    /// The unit of the limit.
    pub unit: &'static str,
}

impl Budget {
    /// Refuses an excess.
    ///
    /// # Errors
    /// [`Exceeded`].
    pub fn check(&self, found: usize) -> Result<(), Exceeded> {
        let Self { what, most, unit, .. } = *self;
        if found > most { Err(Exceeded { what, found, most, unit }) } else { Ok(()) }
    }
}

/// Standard input of a CNI call.
pub const STDIN: Budget = Budget {
    what: "standard input",
    most: 4 << 20,
    unit: "bytes",
    origin: RUNTIME,
    refused: "every verb",
    code: Some(DECODING_FAILURE),
};

/// DELs that are recorded until an agent carries them out.
pub const WAITING_DELS: Budget = Budget {
    what: "DELs that wait for an agent",
    most: 4096,
    unit: "requests",
    origin: RUNTIME,
    refused: "DEL, while no agent answers",
    code: Some(TRY_AGAIN_LATER),
};

/// One of [`WAITING_DELS`], with its variables, as JSON: escapes lengthen the text.
pub const WAITING_DEL: Budget =
    Budget { what: "a DEL that waits for an agent", most: 8 << 20, unit: "bytes", ..WAITING_DELS };
