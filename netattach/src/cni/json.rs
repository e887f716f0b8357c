//! JSON helpers for CNI: typed reading that names the offending key, and printing in the format of the Go plugins.

use serde::de::{Deserialize, DeserializeOwned, Deserializer};
use serde::ser::{Serialize, Serializer};
pub use serde_json::Value;
use serde_json::value::RawValue;

/// A JSON object that keeps the order of its keys.
pub type Map = serde_json::Map<String, Value>;

/// A value kept as its JSON text, which takes a fraction of the memory. Serialized as the value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Text(Box<str>);

impl Text {
    /// The JSON text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The value.
    pub fn read(&self) -> Value {
        // The text was written from a value.
        serde_json::from_str(&self.0).unwrap_or_default()
    }
}

impl From<&Value> for Text {
    fn from(value: &Value) -> Self {
        Self(value.to_string().into())
    }
}

impl Default for Text {
    fn default() -> Self {
        Self("null".into())
    }
}

impl Serialize for Text {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let written: &RawValue = serde_json::from_str(&self.0).map_err(serde::ser::Error::custom)?;
        written.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Self::from(&Value::deserialize(deserializer)?))
    }
}

/// A value does not fit the expected type.
#[derive(Debug, thiserror::Error)]
#[error("key {key}")]
pub struct KeyError {
    /// Path of the value, such as `ipam.ranges[0][1].subnet`; `.` is the whole object.
    pub key: String,
    /// The cause.
    #[source]
    pub source: serde_json::Error,
}

/// Reads `T` from an object.
///
/// # Errors
/// [`KeyError`] with the path of the first invalid key.
pub fn read_object<T: DeserializeOwned>(object: &Map) -> Result<T, KeyError> {
    serde_path_to_error::deserialize(object).map_err(KeyError::from)
}

/// Reads `T` from any value.
///
/// # Errors
/// [`KeyError`] with the path of the first invalid key.
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
        // Serializing a `Value` to memory cannot fail; the compact form is equivalent.
        Err(_) => value.to_string(),
    }
}

/// Counts the values in a JSON text, with members and elements at every depth; parsed, each takes many times its bytes.
/// The count is arbitrary if the text is not JSON.
pub(crate) fn count_values(text: &[u8]) -> usize {
    let mut count = 1;
    // After the opening bracket of an array or object, before it is known whether it is empty.
    let mut begun = false;
    let mut rest = text.iter();
    while let Some(byte) = rest.next() {
        match byte {
            b' ' | b'\n' | b'\r' | b'\t' => continue,
            b',' => count += 1,
            b']' | b'}' => {}
            _ => count += usize::from(begun),
        }
        begun = matches!(byte, b'[' | b'{');
        if *byte == b'"' {
            while let Some(byte) = rest.next() {
                match byte {
                    b'"' => break,
                    b'\\' => drop(rest.next()),
                    _ => {}
                }
            }
        }
    }
    count
}

/// The size of a value: number of values, including itself, and bytes of text.
pub(crate) fn extent(value: &Value) -> (usize, usize) {
    let all = |(values, bytes): (usize, usize), (more, more_bytes): (usize, usize)| {
        (values + more, bytes + more_bytes)
    };
    match value {
        Value::Array(items) => items.iter().map(extent).fold((1, 0), all),
        Value::Object(map) => {
            map.iter().map(|(key, value)| all((0, key.len()), extent(value))).fold((1, 0), all)
        }
        Value::String(text) => (1, text.len()),
        Value::Null | Value::Bool(_) | Value::Number(_) => (1, 0),
    }
}

/// The JSON type of a value, for messages.
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

/// For `deserialize_with`: `null` reads as the default, because Go prints nil slices and maps as `null`.
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
    use crate::error_chain::Chain;

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

    #[test]
    fn a_value_kept_as_text_is_written_and_read_as_itself_within_what_is_tagged() {
        #[derive(Debug, PartialEq, serde::Serialize, serde::Deserialize)]
        #[serde(tag = "step")]
        enum Step {
            Keep(Kept),
        }
        #[derive(Debug, PartialEq, serde::Serialize, serde::Deserialize)]
        struct Kept {
            config: Text,
        }
        let value = serde_json::json!({"b": [1, {"a": "\u{e9}\""}], "a": 9_007_199_254_740_993_u64});
        let kept = Step::Keep(Kept { config: Text::from(&value) });
        let expected = format!(r#"{{"step":"Keep","config":{value}}}"#);
        assert_eq!(serde_json::to_string(&kept).unwrap(), expected);
        assert_eq!(serde_json::from_str::<Step>(&expected).unwrap(), kept);
        assert_eq!(serde_json::to_string(&Text::default()).unwrap(), "null");
    }

    #[test]
    fn values_are_counted_at_every_depth_and_not_in_texts() {
        let table = [
            (r#""[1,2]\",3\\""#, 1),
            ("[ ]", 1),
            ("[[], {}]", 3),
            (r#"{"a,b": [1, "x,[{", null], "c": {"d": -1.5e3}}"#, 7),
            (" [\n1 , 2\t]\r", 3),
        ];
        for (text, expected) in table {
            assert_eq!(count_values(text.as_bytes()), expected, "{text}");
            assert_eq!(extent(&serde_json::from_str(text).unwrap()).0, expected, "{text}");
        }
    }

    #[test]
    fn texts_and_keys_are_measured() {
        assert_eq!(extent(&serde_json::json!({"ab": ["cd", 7, {"e": null}], "f": true})), (7, 6));
    }

    proptest::proptest! {
        #[test]
        fn what_is_counted_is_what_is_read(
            value in crate::cni::result::arbitrary::document(&["cniVersion", "a,[", "\"\\"]),
        ) {
            let value = Value::Object(value.as_object().cloned().unwrap_or_default());
            proptest::prop_assert_eq!(count_values(value.to_string().as_bytes()), extent(&value).0);
            proptest::prop_assert_eq!(count_values(pretty(&value).as_bytes()), extent(&value).0);
        }
    }

    /// Rows: RES-06.
    #[test]
    fn printing_indents_by_four_spaces() {
        let value = serde_json::json!({"a": [1], "b": {}});
        assert_eq!(pretty(&value), "{\n    \"a\": [\n        1\n    ],\n    \"b\": {}\n}");
    }
}
