//! `CNI_ARGS`: `KEY=VALUE` pairs joined by semicolons.

use serde::{Deserialize, Serialize};

use super::error::{CniError, code};
use crate::budget;

/// The key that makes plugins accept keys that they do not know.
const IGNORE_UNKNOWN: &str = "IgnoreUnknown";

/// The pairs of `CNI_ARGS`, in order, with the original text, in which form they are stored and sent.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub struct CniArgs {
    raw: String,
    pairs: Vec<(String, String)>,
}

impl CniArgs {
    /// Parses the variable's value. A final `;` and a `=` inside a value are accepted.
    ///
    /// # Errors
    /// Code 4, naming the pair that has no `=` or no key.
    pub fn parse(raw: &str) -> Result<Self, CniError> {
        budget::CNI_ARGS.check(raw.len()).map_err(|error| invalid(error.to_string()))?;
        let body = raw.strip_suffix(';').unwrap_or(raw);
        let mut pairs = Vec::new();
        if !body.is_empty() {
            for pair in body.split(';') {
                match pair.split_once('=') {
                    Some((key, value)) if !key.is_empty() => pairs.push((key.to_owned(), value.to_owned())),
                    _ => return Err(invalid(format!("ARGS: invalid pair {pair:?}"))),
                }
            }
        }
        Ok(Self { raw: raw.to_owned(), pairs })
    }

    /// A value that could not be parsed: passed on as it is, with no pairs.
    pub(crate) fn unread(raw: &str) -> Self {
        Self { raw: raw.to_owned(), pairs: Vec::new() }
    }

    /// The value of a key; the last one when it is repeated. Keys are case-sensitive.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.pairs.iter().rev().find(|(name, _)| name == key).map(|(_, value)| value.as_str())
    }

    /// A key's value as a boolean: 1, 0, true or false in any letter case.
    ///
    /// # Errors
    /// Code 4, naming key and value.
    pub fn flag(&self, key: &str) -> Result<Option<bool>, CniError> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => truth(value)
                .map(Some)
                .ok_or_else(|| invalid(format!("ARGS: {key} must be 1, 0, true or false, but is {value:?}"))),
        }
    }

    /// Refuses keys that are not among `known`, unless `IgnoreUnknown` is set.
    ///
    /// # Errors
    /// Code 4, naming every unknown pair.
    pub fn refuse_unknown(&self, known: &[&str]) -> Result<(), CniError> {
        if self.flag(IGNORE_UNKNOWN)? == Some(true) {
            return Ok(());
        }
        let unknown: Vec<String> = self
            .pairs
            .iter()
            .filter(|(key, _)| key != IGNORE_UNKNOWN && !known.contains(&key.as_str()))
            .map(|(key, value)| format!("{key}={value}"))
            .collect();
        if unknown.is_empty() { Ok(()) } else { Err(invalid(format!("ARGS: unknown args {unknown:?}"))) }
    }

    /// Returns the pairs that identify the pod, as Kubernetes runtimes set them (`K8S_POD_NAME` and others), and the
    /// one that makes plugins accept unknown keys. Other pairs, such as `IP` and `MAC`, are for one attachment.
    #[must_use]
    pub fn of_pod(&self) -> Self {
        let is_of_pod = |key: &str| key.starts_with("K8S_") || key == IGNORE_UNKNOWN;
        let pairs: Vec<_> = self.pairs.iter().filter(|(key, _)| is_of_pod(key)).cloned().collect();
        let texts: Vec<String> = pairs.iter().map(|(key, value)| format!("{key}={value}")).collect();
        Self { raw: texts.join(";"), pairs }
    }

    /// The pairs, in order.
    pub fn pairs(&self) -> &[(String, String)] {
        &self.pairs
    }

    /// The variable's value as received.
    pub fn raw(&self) -> &str {
        &self.raw
    }
}

impl From<String> for CniArgs {
    /// A value that cannot be parsed has no pairs: DEL accepted it earlier.
    fn from(raw: String) -> Self {
        Self::parse(&raw).unwrap_or_else(|_| Self::unread(&raw))
    }
}

impl From<CniArgs> for String {
    fn from(args: CniArgs) -> Self {
        args.raw
    }
}

/// Reads 1, 0, true or false in any letter case.
pub(super) fn truth(text: &str) -> Option<bool> {
    match text.to_ascii_lowercase().as_str() {
        "1" | "true" => Some(true),
        "0" | "false" => Some(false),
        _ => None,
    }
}

fn invalid(msg: String) -> CniError {
    CniError::new(code::INVALID_ENVIRONMENT, msg)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pairs(raw: &str) -> Vec<(String, String)> {
        CniArgs::parse(raw).unwrap().pairs().to_vec()
    }

    fn pair(key: &str, value: &str) -> (String, String) {
        (key.to_owned(), value.to_owned())
    }

    /// Rows: ENV-32, ENV-36.
    #[test]
    fn reads_what_a_kubelet_runtime_sends() {
        // ENV-36
        let args = CniArgs::parse(
            "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=cart-0;K8S_POD_INFRA_CONTAINER_ID=c1;K8S_POD_UID=u1",
        )
        .unwrap();
        assert_eq!(args.get("K8S_POD_UID"), Some("u1"));
        assert_eq!(args.get("k8s_pod_uid"), None); // ENV-32: case-sensitive
        assert_eq!(args.flag("IgnoreUnknown"), Ok(Some(true)));
        assert_eq!(args.refuse_unknown(&[]), Ok(()));
    }

    /// Rows: ENV-35.
    #[test]
    fn accepts_every_unambiguous_form() {
        assert_eq!(pairs(""), []);
        assert_eq!(pairs(";"), []);
        assert_eq!(pairs("A=;B=x"), [pair("A", ""), pair("B", "x")]);
        // ENV-35
        assert_eq!(pairs("A=1;"), [pair("A", "1")]);
        assert_eq!(pairs("A=b=c"), [pair("A", "b=c")]);
        assert_eq!(CniArgs::parse("A=1;A=2").unwrap().get("A"), Some("2"));
    }

    /// Rows: ENV-31.
    #[test]
    fn a_pair_without_key_or_equals_sign_is_named() {
        for (raw, pair) in [("A", "A"), ("A=1;;B=2", ""), ("A=1;B", "B"), ("=x", "=x"), (";;", "")] {
            let expected = CniError::new(4, format!("ARGS: invalid pair {pair:?}"));
            assert_eq!(CniArgs::parse(raw), Err(expected), "{raw}");
        }
    }

    /// Rows: ENV-32.
    #[test]
    fn unknown_keys_are_refused_unless_ignored() {
        let args = CniArgs::parse("MAC=x;FOO=y").unwrap();
        assert_eq!(args.refuse_unknown(&["MAC"]), Err(CniError::new(4, "ARGS: unknown args [\"FOO=y\"]")));
        assert_eq!(args.refuse_unknown(&["MAC", "FOO"]), Ok(()));
        assert_eq!(CniArgs::parse("FOO=y;IgnoreUnknown=TRUE").unwrap().refuse_unknown(&[]), Ok(()));
    }

    /// Rows: ENV-33.
    #[test]
    fn flags_are_words_or_digits() {
        for (text, value) in [("1", true), ("tRuE", true), ("0", false), ("FALSE", false)] {
            assert_eq!(CniArgs::parse(&format!("F={text}")).unwrap().flag("F"), Ok(Some(value)));
        }
        assert_eq!(
            CniArgs::parse("F=yes").unwrap().flag("F"),
            Err(CniError::new(4, "ARGS: F must be 1, 0, true or false, but is \"yes\""))
        );
    }

    #[test]
    fn is_stored_as_its_text() {
        for raw in ["A=1;B=c=d;", "", "unreadable"] {
            let args = CniArgs::from(raw.to_owned());
            let json = serde_json::to_string(&args).unwrap();
            assert_eq!(json, format!("{raw:?}"));
            assert_eq!(serde_json::from_str::<CniArgs>(&json).unwrap(), args);
        }
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(raw in ".{0,40}") {
            let _ = CniArgs::parse(&raw);
        }

        #[test]
        fn what_is_joined_is_read_back(expected in prop::collection::vec(("[A-Z_]{1,6}", "[^;]{0,8}"), 0..6)) {
            let joined: Vec<String> = expected.iter().map(|(key, value)| format!("{key}={value}")).collect();
            prop_assert_eq!(pairs(&joined.join(";")), expected);
        }
    }
}
