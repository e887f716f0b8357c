//! JSON as CNI uses it: typed reading that names the offending key, printing as the Go plugins print.

use serde::de::{Deserialize, DeserializeOwned, Deserializer};
use serde::ser::Serialize;
pub use serde_json::Value;

/// A JSON object that keeps the order of its keys.
pub type Map = serde_json::Map<String, Value>;

/// A value was not what its reader expects.
#[derive(Debug, thiserror::Error)]
#[error("key {key}")]
pub struct KeyError {
    /// Where the value stands, such as `ipam.ranges[0][1].subnet`; `.` is the whole object.
    pub key: String,
    /// What is wrong with it.
    #[source]
    pub source: serde_json::Error,
}

/// Reads `T` from an object.
///
/// # Errors
/// [`KeyError`] with the path of the first key that does not fit.
pub fn read_object<T: DeserializeOwned>(object: &Map) -> Result<T, KeyError> {
    serde_path_to_error::deserialize(object).map_err(KeyError::from)
}

/// Reads `T` from any value.
///
/// # Errors
/// [`KeyError`] with the path of the first key that does not fit.
pub fn read_value<T: DeserializeOwned>(value: &Value) -> Result<T, KeyError> {
    serde_path_to_error::deserialize(value).map_err(KeyError::from)
}

impl From<serde_path_to_error::Error<serde_json::Error>> for KeyError {
    fn from(error: serde_path_to_error::Error<serde_json::Error>) -> Self {
        Self { key: error.path().to_string(), source: error.into_inner() }
    }
}

/// Prints with four spaces of indentation and no final newline, as Go's CNI library does.
pub fn pretty(value: &Value) -> String {
    let mut bytes = Vec::new();
    let formatter = serde_json::ser::PrettyFormatter::with_indent(b"    ");
    let mut serializer = serde_json::Serializer::with_formatter(&mut bytes, formatter);
    match value.serialize(&mut serializer) {
        Ok(()) => String::from_utf8_lossy(&bytes).into_owned(),
        // Writing a `Value` to memory has no way to fail; the compact form says the same.
        Err(_) => value.to_string(),
    }
}

/// What a JSON value is, for messages.
pub fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// For `deserialize_with`: `null` reads as the default, because Go prints nil slices and maps that way.
pub(crate) fn null_is_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Chain;

    #[derive(Debug, serde::Deserialize)]
    struct Outer {
        #[expect(dead_code, reason = "only the error matters here")]
        ranges: Vec<Inner>,
    }

    #[derive(Debug, serde::Deserialize)]
    struct Inner {
        #[expect(dead_code, reason = "only the error matters here")]
        mtu: u32,
    }

    #[test]
    fn an_error_names_the_path_of_the_key_once() {
        let value = serde_json::json!({"ranges": [{"mtu": 1}, {"mtu": "big"}]});
        let error = read_value::<Outer>(&value).unwrap_err();
        assert_eq!(
            Chain(&error).to_string(),
            "key ranges[1].mtu: invalid type: string \"big\", expected u32"
        );
    }

    /// Rows: RES-06.
    #[test]
    fn printing_indents_by_four_spaces() {
        let value = serde_json::json!({"a": [1], "b": {}});
        assert_eq!(pretty(&value), "{\n    \"a\": [\n        1\n    ],\n    \"b\": {}\n}");
    }
}
