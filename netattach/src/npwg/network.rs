//! Names of networks: of a NetworkAttachmentDefinition, or of a configuration without one.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Refers to one NetworkAttachmentDefinition in the cluster. Printed as `namespace/name`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct NetworkRef {
    /// Namespace of the object, never empty.
    pub namespace: String,
    /// Name of the object, never empty.
    pub name: String,
}

impl NetworkRef {
    /// Joins a namespace and a name, unchecked.
    pub fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }
}

impl fmt::Display for NetworkRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// The network of an attachment. Written as text in records, status and output.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum NetworkName {
    /// The network has a definition. Printed as `namespace/name`.
    Definition(NetworkRef),
    /// The network has no definition, which is possible for the node's default network: `name` of its configuration,
    /// which has no slash.
    Configuration(String),
}

impl NetworkName {
    /// The definition, if the network has one.
    pub fn definition(&self) -> Option<&NetworkRef> {
        match self {
            Self::Definition(reference) => Some(reference),
            Self::Configuration(_) => None,
        }
    }
}

impl From<String> for NetworkName {
    fn from(text: String) -> Self {
        match text.split_once('/') {
            Some((namespace, name)) => Self::Definition(NetworkRef::new(namespace, name)),
            None => Self::Configuration(text),
        }
    }
}

impl From<&str> for NetworkName {
    fn from(text: &str) -> Self {
        text.to_owned().into()
    }
}

impl From<NetworkRef> for NetworkName {
    fn from(reference: NetworkRef) -> Self {
        Self::Definition(reference)
    }
}

impl From<NetworkName> for String {
    fn from(name: NetworkName) -> Self {
        name.to_string()
    }
}

impl fmt::Display for NetworkName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Definition(reference) => reference.fmt(f),
            Self::Configuration(name) => f.write_str(name),
        }
    }
}

/// Whether `text` is a DNS label by RFC 1123, except for its length: for a label that is too long the standard only
/// asks for a warning (section 3.3).
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

    #[test]
    fn a_network_is_written_as_text_and_read_back() {
        for (text, name) in [
            ("shop/storage", NetworkName::Definition(NetworkRef::new("shop", "storage"))),
            ("pods", NetworkName::Configuration("pods".into())),
            ("", NetworkName::Configuration(String::new())),
            ("a/b/c", NetworkName::Definition(NetworkRef::new("a", "b/c"))),
        ] {
            let json = serde_json::Value::from(text);
            assert_eq!(serde_json::from_value::<NetworkName>(json.clone()).unwrap(), name);
            assert_eq!(serde_json::to_value(&name).unwrap(), json);
            assert_eq!(name.to_string(), text);
        }
    }

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
