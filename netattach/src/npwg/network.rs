//! The name of a network: which NetworkAttachmentDefinition is meant.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Names one NetworkAttachmentDefinition in the cluster. Printed as `namespace/name`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct NetworkRef {
    /// Namespace of the object, never empty.
    pub namespace: String,
    /// Name of the object, never empty.
    pub name: String,
}

impl NetworkRef {
    /// Puts a namespace and a name together, unchecked.
    pub fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }
}

impl fmt::Display for NetworkRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// Whether `text` is a DNS label by RFC 1123, leaving its length aside: the standard only wants a warning for a
/// label that is too long (section 3.3).
pub(crate) fn is_label(text: &str) -> bool {
    let alphanumeric = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    match text.as_bytes() {
        [] => false,
        [only] => alphanumeric(*only),
        [first, middle @ .., last] => {
            alphanumeric(*first)
                && alphanumeric(*last)
                && middle.iter().all(|&b| alphanumeric(b) || b == b'-')
        }
    }
}

/// Whether `text` is labels joined by dots, as Kubernetes object names are.
pub(crate) fn is_subdomain(text: &str) -> bool {
    text.split('.').all(is_label)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows: NPWG-3.3-name-valid, NPWG-3.3-name-invalid.
    #[test]
    fn labels_are_lower_case_letters_digits_and_inner_hyphens() {
        for good in ["a", "a1", "a-b", "0", &"a".repeat(63), &"a".repeat(64)] {
            assert!(is_label(good), "{good}");
        }
        for bad in ["", "-", "-a", "a-", "A", "a_b", "a b", "a.b", "ä"] {
            assert!(!is_label(bad), "{bad}");
        }
    }

    #[test]
    fn object_names_may_have_dots_between_labels() {
        assert!(is_subdomain("storage.v1"));
        for bad in [".", "a.", ".a", "a..b", ""] {
            assert!(!is_subdomain(bad), "{bad}");
        }
    }
}
