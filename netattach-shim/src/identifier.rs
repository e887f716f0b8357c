//! Validates container identifiers, network names and interface names.

use crate::cni::code;

/// The longest interface name in bytes: `IFNAMSIZ` less the final zero.
pub const IFNAME_MAX: usize = 15;

/// Why a name is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Invalid {
    /// The code of the CNI specification.
    pub code: u32,
    /// A short message.
    pub msg: &'static str,
    /// Details; may be empty.
    pub details: String,
}

impl Invalid {
    fn new(code: u32, msg: &'static str) -> Self {
        Self { code, msg, details: String::new() }
    }

    fn with_details(self, details: impl Into<String>) -> Self {
        Self { details: details.into(), ..self }
    }
}

/// Refuses a container identifier that the specification does not allow.
///
/// # Errors
/// Code 3 when it is empty, code 4 when it contains characters that the grammar does not allow.
pub fn check_container_id(id: &str) -> Result<(), Invalid> {
    if id.is_empty() {
        return Err(Invalid::new(code::UNKNOWN_CONTAINER, "missing containerID"));
    }
    if !follows_grammar(id) {
        return Err(
            Invalid::new(code::INVALID_ENVIRONMENT, "invalid characters in containerID").with_details(id)
        );
    }
    Ok(())
}

/// Refuses a network name that the specification does not allow.
///
/// # Errors
/// Code 7.
pub fn check_network_name(name: &str) -> Result<(), Invalid> {
    if name.is_empty() {
        return Err(Invalid::new(code::INVALID_CONFIG, "missing network name"));
    }
    if !follows_grammar(name) {
        return Err(
            Invalid::new(code::INVALID_CONFIG, "invalid characters found in network name").with_details(name)
        );
    }
    Ok(())
}

/// Refuses the name of an interface to be created: as [`check_link_name`], and also the characters that
/// represent bytes of names that are not text (`netattach::netlink`), as the interface would get another
/// name than the requested one.
///
/// # Errors
/// Code 4.
pub fn check_ifname(name: &str) -> Result<(), Invalid> {
    check_link_name(name)?;
    if name.chars().any(|c| matches!(c, '\u{f780}'..='\u{f7ff}')) {
        return Err(Invalid::new(
            code::INVALID_ENVIRONMENT,
            "interface name contains characters between U+F780 and U+F7FF",
        )
        .with_details(format!("{name:?}")));
    }
    Ok(())
}

/// Refuses a link name that the kernel would refuse (`dev_valid_name` in `net/core/dev.c`), or that
/// contains Unicode white space or `%`. For links that exist or may have existed.
///
/// # Errors
/// Code 4.
pub fn check_link_name(name: &str) -> Result<(), Invalid> {
    let invalid = |msg| Invalid::new(code::INVALID_ENVIRONMENT, msg);
    if name.is_empty() {
        return Err(invalid("interface name is empty"));
    }
    if name.len() > IFNAME_MAX {
        return Err(invalid("interface name is too long")
            .with_details(format!("{name:?}: interface name should be less than 16 characters")));
    }
    if name == "." || name == ".." {
        return Err(invalid("interface name is . or .."));
    }
    if name.chars().any(|c| matches!(c, '/' | ':' | '\0') || c.is_whitespace()) {
        return Err(
            invalid("interface name contains / or : or white space").with_details(format!("{name:?}"))
        );
    }
    // The kernel would replace `%` with a number (`dev_alloc_name`), so the link would get another name.
    if name.contains('%') {
        return Err(invalid("interface name contains %").with_details(format!("{name:?}")));
    }
    Ok(())
}

/// A letter or digit, then letters, digits, `_`, `.` and `-`; ASCII only (SPEC, "Network configuration").
fn follows_grammar(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-'))
}
