//! Removes secrets from data of other authors: values of keys that name a secret, objects of kind Secret, private
//! keys and bearer tokens in any text.

use std::sync::LazyLock;

use serde::de::Deserialize;
use serde_json::Value;

/// The replacement for a secret.
const REDACTED: &str = "REDACTED";

/// A key that contains one of these words has a secret as its value.
const SECRET_KEYS: [&str; 10] = [
    "token",
    "secret",
    "password",
    "passwd",
    "credential",
    "privatekey",
    "private-key",
    "private_key",
    "key-data",
    "authorization",
];

/// Keys of settings that name the file of a secret, or configure one, and contain no secret.
const NO_SECRETS: [&str; 3] = ["tokenfile", "token-file", "tokenaudience"];

/// Removes the secrets from a value.
pub(super) fn redact(value: &mut Value) {
    match value {
        Value::Object(object) => {
            let is_secret = object.get("kind").and_then(Value::as_str) == Some("Secret");
            for (key, value) in object {
                let is_data = is_secret && ["data", "stringData"].contains(&key.as_str());
                if is_data || names_secret(key) {
                    *value = REDACTED.into();
                } else {
                    redact(value);
                }
            }
        }
        Value::Array(values) => values.iter_mut().for_each(redact),
        Value::String(text) => {
            // A configuration inside a configuration, or a manifest inside an annotation.
            if text.starts_with(['{', '['])
                && let Ok(mut inner) = serde_json::from_str::<Value>(text)
            {
                redact(&mut inner);
                *text = inner.to_string();
            } else {
                *text = redact_text(text);
            }
        }
        _ => {}
    }
}

fn names_secret(key: &str) -> bool {
    let key = key.to_ascii_lowercase();
    SECRET_KEYS.iter().any(|secret| key.contains(secret)) && !NO_SECRETS.contains(&key.as_str())
}

/// Returns documents of YAML or JSON without secrets; any other text is redacted as text.
pub(super) fn redact_yaml(text: &str) -> String {
    let values: Result<Vec<Value>, _> =
        serde_norway::Deserializer::from_str(text).map(Value::deserialize).collect();
    let Ok(mut values) = values else { return redact_text(text) };
    values.iter_mut().for_each(redact);
    let shown = values.iter().map(|value| serde_json::to_string_pretty(value).unwrap_or_default());
    shown.collect::<Vec<_>>().join("\n---\n") + "\n"
}

/// Returns a text without private keys, and without the rest of each line after a word that names a secret.
pub(super) fn redact_text(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    let mut is_key = false;
    for line in text.split_inclusive('\n') {
        if is_key {
            is_key = !line.contains("-----END");
            continue;
        }
        if line.contains("-----BEGIN") && line.contains("PRIVATE KEY") {
            is_key = !line.contains("-----END");
            shown.push_str(REDACTED);
            shown.push('\n');
            continue;
        }
        shown.push_str(&redact_line(line));
    }
    shown
}

/// Words before a secret in text without structure, in lower case: the [`SECRET_KEYS`], and how an authorization goes on.
static SECRET_WORDS: LazyLock<Vec<String>> = LazyLock::new(|| {
    let keys = SECRET_KEYS.iter().filter(|key| **key != "authorization");
    let words = keys.flat_map(|key| [format!("{key}="), format!("{key}: ")]);
    words.chain(["bearer ", "authorization: basic "].map(str::to_owned)).collect()
});

/// A line up to a word that names a secret; the rest of it is left out where something follows.
fn redact_line(line: &str) -> String {
    // A line of JSON, as in the journal.
    if line.trim_start().starts_with(['{', '['])
        && let Ok(mut value) = serde_json::from_str::<Value>(line)
    {
        redact_parts(&mut value);
        return value.to_string() + "\n";
    }
    let lower = line.to_ascii_lowercase();
    let found = SECRET_WORDS.iter().filter_map(|word| lower.find(word).map(|at| at + word.len())).min();
    match found {
        Some(at) if line.is_char_boundary(at) => format!("{}{REDACTED}\n", &line[..at]),
        Some(_) => format!("{REDACTED}\n"),
        None => line.to_owned(),
    }
}

/// As [`redact`], for the value of a line; strings that are elements of an array are values of their own.
fn redact_parts(value: &mut Value) {
    match value {
        Value::Array(values) => values.iter_mut().for_each(redact_parts),
        other => redact(other),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn secrets_go_and_the_rest_stays() {
        let mut value = json!({
            "name": "lan", "Password": "x", "apiToken": {"a": 1}, "client-key-data": "x", "tokenFile": "/run/token",
            "list": [{"authorization": "Basic x"}],
            "annotation": "{\"secret\": \"x\", \"type\": \"bridge\"}",
            "env": "Authorization: Bearer abc.def",
        });
        redact(&mut value);
        assert_eq!(
            value,
            json!({
                "name": "lan", "Password": REDACTED, "apiToken": REDACTED, "client-key-data": REDACTED,
                "tokenFile": "/run/token",
                "list": [{"authorization": REDACTED}],
                "annotation": format!("{{\"secret\":\"{REDACTED}\",\"type\":\"bridge\"}}"),
                "env": format!("Authorization: Bearer {REDACTED}\n"),
            })
        );
    }

    #[test]
    fn a_secret_object_has_no_data() {
        let text = redact_yaml(
            "kind: Secret\nmetadata: {name: s}\ndata: {a: eA==}\n---\nkind: ConfigMap\ndata: {a: x}\n",
        );
        assert!(
            !text.contains("eA==") && text.contains("\"name\": \"s\"") && text.contains("\"a\": \"x\""),
            "{text}"
        );
    }

    #[test]
    fn a_private_key_and_what_follows_a_word_go() {
        let text =
            "a\n-----BEGIN RSA PRIVATE KEY-----\nMII\n-----END RSA PRIVATE KEY-----\nb\nuser token=abc d\n";
        assert_eq!(redact_text(text), format!("a\n{REDACTED}\nb\nuser token={REDACTED}\n"));
        let broken = "kind: [\npassword: hunter2\n";
        assert_eq!(redact_yaml(broken), format!("kind: [\npassword: {REDACTED}\n"));
        for (line, kept) in [
            ("Authorization: Basic aHVudGVyMg==", "Authorization: Basic "),
            ("  client-key-data: LS0tLS1C", "  client-key-data: "),
            ("passwd=hunter2 retry", "passwd="),
            ("privateKey: MIIE", "privateKey: "),
        ] {
            assert_eq!(redact_text(&format!("{line}\n")), format!("{kept}{REDACTED}\n"));
        }
        assert_eq!(
            redact_text("[\"crc\",{\"password\":\"x\"}]\n"),
            format!("[\"crc\",{{\"password\":\"{REDACTED}\"}}]\n")
        );
    }
}
