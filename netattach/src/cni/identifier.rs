//! Validates container identifiers, network names and interface names, with the errors of the specification.

use netattach_shim::identifier::{self, Invalid};

use super::error::CniError;

pub use netattach_shim::identifier::IFNAME_MAX;

impl From<Invalid> for CniError {
    fn from(Invalid { code, msg, details }: Invalid) -> Self {
        Self::new(code, msg).with_details(details)
    }
}

/// Refuses a container identifier that the specification does not allow.
///
/// # Errors
/// Code 3 when it is empty, code 4 when it contains characters that the grammar does not allow.
pub fn check_container_id(id: &str) -> Result<(), CniError> {
    Ok(identifier::check_container_id(id)?)
}

/// Refuses a network name that the specification does not allow.
///
/// # Errors
/// Code 7.
pub fn check_network_name(name: &str) -> Result<(), CniError> {
    Ok(identifier::check_network_name(name)?)
}

/// Refuses the name of an interface to create: like [`check_link_name`], and also names with characters that stand
/// for bytes of names that are not UTF-8 (`netlink`).
///
/// # Errors
/// Code 4.
pub fn check_ifname(name: &str) -> Result<(), CniError> {
    Ok(identifier::check_ifname(name)?)
}

/// Refuses a name that the kernel would refuse for a link (`dev_valid_name` in `net/core/dev.c`), and names with
/// Unicode white space. For links that exist or have existed.
///
/// # Errors
/// Code 4.
pub fn check_link_name(name: &str) -> Result<(), CniError> {
    Ok(identifier::check_link_name(name)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows: IDN-01.
    #[test]
    fn identifiers_that_the_grammar_allows_pass() {
        // IDN-01
        for text in ["a", "0", "a.b-c_d", "A--", &"x".repeat(500)] {
            assert_eq!(check_container_id(text), Ok(()), "{text}");
            assert_eq!(check_network_name(text), Ok(()), "{text}");
        }
    }

    /// Rows: IDN-02, IDN-03.
    #[test]
    fn a_bad_container_id_has_code_3_or_4() {
        assert_eq!(check_container_id(""), Err(CniError::new(3, "missing containerID"))); // IDN-02
        for text in ["-a", "_a", ".a", "a/b", "ä", "a\n", "a ", "a\0"] {
            // IDN-03
            let expected = CniError::new(4, "invalid characters in containerID").with_details(text);
            assert_eq!(check_container_id(text), Err(expected));
        }
    }

    /// Rows: IDN-04.
    #[test]
    fn a_bad_network_name_has_code_7() {
        // IDN-04
        assert_eq!(check_network_name(""), Err(CniError::new(7, "missing network name")));
        let expected = CniError::new(7, "invalid characters found in network name").with_details("a/b");
        assert_eq!(check_network_name("a/b"), Err(expected));
    }

    /// Rows: IDN-06, IDN-09.
    #[test]
    fn interface_names_are_measured_in_bytes() {
        assert_eq!(check_ifname("123456789012345"), Ok(()));
        assert_eq!(check_ifname("ääääääää").unwrap_err().msg, "interface name is too long"); // IDN-09
        assert_eq!(check_ifname("äääääää"), Ok(()));
        let long = check_ifname("1234567890123456").unwrap_err(); // IDN-06
        assert_eq!((long.code, long.msg.as_str()), (4, "interface name is too long"));
    }

    /// Rows: IDN-05, IDN-07, IDN-08.
    #[test]
    fn interface_names_the_kernel_refuses_are_refused() {
        for (name, msg) in [
            ("", "interface name is empty"),                          // IDN-05
            (".", "interface name is . or .."),                       // IDN-07
            ("..", "interface name is . or .."),                      // IDN-07
            ("a/b", "interface name contains / or : or white space"), // IDN-08
            ("a:b", "interface name contains / or : or white space"),
            ("a b", "interface name contains / or : or white space"),
            ("a\u{2003}b", "interface name contains / or : or white space"),
            ("a\n", "interface name contains / or : or white space"),
            ("a\0", "interface name contains / or : or white space"),
            ("%d", "interface name contains %"),
            ("eth%d", "interface name contains %"),
        ] {
            let error = check_ifname(name).unwrap_err();
            assert_eq!((error.code, error.msg.as_str()), (4, msg), "{name:?}");
        }
        assert_eq!(check_ifname("..."), Ok(()));
    }

    /// A link of that name has a byte in the place of the character.
    #[test]
    fn characters_that_stand_for_bytes_are_in_names_that_there_are_and_not_in_those_that_are_asked_for() {
        for name in ["a\u{f780}", "\u{f7ff}", "ä\u{f7a0}b"] {
            assert_eq!(check_link_name(name), Ok(()));
            let error = check_ifname(name).unwrap_err();
            assert_eq!(
                (error.code, error.msg.as_str()),
                (4, "interface name contains characters between U+F780 and U+F7FF")
            );
        }
        for name in ["ä", "\u{f77f}", "\u{f800}"] {
            assert_eq!(check_ifname(name), Ok(()), "{name:?}");
        }
        assert!(check_link_name("a/\u{f780}").is_err());
    }
}
