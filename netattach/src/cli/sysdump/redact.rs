//! Removes secrets from data of other authors: values of keys that name a secret, objects of kind Secret, private
//! keys and bearer tokens in any text.

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
            if text.trim_start().starts_with(['{', '['])
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

/// Returns a text without private keys, and without what follows a key that names a secret.
pub(super) fn redact_text(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    let mut is_key = false;
    // How far a line is indented whose secret goes on in the lines below it, which are indented more, and its key.
    let mut above: Option<(usize, usize)> = None;
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
        if above.is_some_and(|(above, key)| is_below(line, above, key)) {
            continue;
        }
        let Line { text, goes_on } = redact_line(line);
        above = goes_on.then(|| (indentation(line), key_at(line)));
        shown.push_str(&text);
    }
    shown
}

fn indentation(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

/// Where the first key of a line begins, which can be in an entry of a list.
fn key_at(line: &str) -> usize {
    line.len() - line.trim_start_matches([' ', '\t', '-']).len()
}

/// Whether a line belongs to the value of a key in a line before it. YAML need not indent the entries of a list more
/// than the list's key.
fn is_below(line: &str, above: usize, key: usize) -> bool {
    let text = line.trim();
    let is_entry = text == "-" || text.starts_with("- ");
    text.is_empty() || indentation(line) > above || (is_entry && indentation(line) == key)
}

/// A line without its secrets.
struct Line {
    text: String,
    /// Whether the last secret does not end in this line.
    goes_on: bool,
}

/// How an authorization begins before its secret, in lower case.
const SCHEMES: [&str; 4] = ["basic ", "bearer ", "digest ", "negotiate "];

/// A secret in a line of text.
struct Secret {
    start: usize,
    /// Its closing quote. `None`: the rest of the line is left out.
    end: Option<usize>,
    /// Whether it does not end in this line.
    goes_on: bool,
}

/// A line without its secrets: of those in quotes what is between them is left out, of others the rest of the line.
fn redact_line(line: &str) -> Line {
    // A line of JSON, as in the journal.
    if line.trim_start().starts_with(['{', '['])
        && let Ok(mut value) = serde_json::from_str::<Value>(line)
    {
        redact_parts(&mut value);
        return Line { text: value.to_string() + "\n", goes_on: false };
    }
    let mut text = String::with_capacity(line.len());
    let mut rest = line;
    while let Some(secret) = first_secret(rest) {
        text.push_str(&rest[..secret.start]);
        text.push_str(REDACTED);
        let Some(end) = secret.end else {
            text.push('\n');
            return Line { text, goes_on: secret.goes_on };
        };
        rest = &rest[end..];
    }
    text.push_str(rest);
    Line { text, goes_on: false }
}

/// The first secret: the value of a key, in YAML or JSON that may be torn and may be inside a string, or a bearer
/// token.
fn first_secret(line: &str) -> Option<Secret> {
    let is_between = |it: char| !(it.is_ascii_alphanumeric() || matches!(it, '_' | '-'));
    let mut end = 0;
    let of_key = line.split_inclusive(is_between).find_map(|piece| {
        let word = piece.trim_end_matches(is_between);
        let after = end + word.len();
        end += piece.len();
        if names_secret(word) { value_after(line, after, word) } else { None }
    });
    // ASCII letters alone change, so that places stay the same.
    let bearer = line.to_ascii_lowercase().find("bearer ").map(|at| at + "bearer ".len());
    let bearer = bearer.map(|start| Secret { start, end: None, goes_on: false });
    of_key.into_iter().chain(bearer).min_by_key(|secret| secret.start)
}

/// The value of the key that ends at this place, if `:` or `=` follows it.
fn value_after(line: &str, key_end: usize, key: &str) -> Option<Secret> {
    let place = |rest: &str| line.len() - rest.len();
    // The key's own closing quote, with backslashes if all of this is inside a string.
    let after = line[key_end..].trim_start_matches(['\\', '"', '\'']).trim_start();
    let value = after.strip_prefix([':', '='])?.trim_start_matches([' ', '\t']);
    let opened = value.trim_start_matches('\\');
    let Some(quote) = opened.chars().next().filter(|it| matches!(it, '"' | '\'')) else {
        let is_authorization = key.to_ascii_lowercase().ends_with("authorization");
        let lower = value.to_ascii_lowercase();
        let scheme = SCHEMES.iter().find(|scheme| is_authorization && lower.starts_with(**scheme));
        // A value below the key, a block of YAML, or an object or a list over several lines.
        let goes_on = value.trim().is_empty() || value.starts_with(['|', '>', '{', '[']);
        return Some(Secret { start: place(value) + scheme.map_or(0, |it| it.len()), end: None, goes_on });
    };
    let (escapes, inside) = (value.len() - opened.len(), &opened[quote.len_utf8()..]);
    let end = closing(inside, quote, escapes).map(|at| place(inside) + at);
    Some(Secret { start: place(inside), end, goes_on: end.is_none() })
}

/// The place of the closing quote, or of the backslashes before it. A quote of the value itself has more of them than
/// the opening one has.
fn closing(inside: &str, quote: char, escapes: usize) -> Option<usize> {
    inside.match_indices(quote).find_map(|(at, _)| {
        let before = inside[..at].len() - inside[..at].trim_end_matches('\\').len();
        (before <= escapes).then_some(at - before)
    })
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

    /// What does not parse is what an operator sends in: a file that was cut off, a record that was torn.
    #[test]
    fn secrets_go_from_json_that_is_cut_off_and_the_rest_stays() {
        let table = [
            // A file of CNI, cut off behind, at and inside the secret.
            (
                "{\"type\": \"lan\", \"password\": \"hunter2\", \"mtu\": 15",
                format!("{{\"type\": \"lan\", \"password\": \"{REDACTED}\", \"mtu\": 15"),
            ),
            ("{\"a\": 1, \"apiToken\" : \"x\"", format!("{{\"a\": 1, \"apiToken\" : \"{REDACTED}\"")),
            ("{\"token\":\"hunt", format!("{{\"token\":\"{REDACTED}\n")),
            ("{\"secret\": 5, \"mtu\": 1", format!("{{\"secret\": {REDACTED}\n")),
            ("{\"password\": \"a\\\"b\", \"x\": 1", format!("{{\"password\": \"{REDACTED}\", \"x\": 1")),
            ("{\"password\": \"\", \"x\": 1", format!("{{\"password\": \"{REDACTED}\", \"x\": 1")),
            // A torn record of the journal, and a configuration inside one.
            ("[\"crc\",{\"passwd\":\"x\",\"a\":", format!("[\"crc\",{{\"passwd\":\"{REDACTED}\",\"a\":")),
            (
                "[\"crc\",{\"conf\":\"{\\\"password\\\":\\\"x\\\",\\\"a\\\":1}\",\"b\":",
                format!("[\"crc\",{{\"conf\":\"{{\\\"password\\\":\\\"{REDACTED}\\\",\\\"a\\\":1}}\",\"b\":"),
            ),
            // Two in one line, and an authorization in quotes.
            (
                "{\"token\":\"x\",\"authorization\":\"Basic y\",\"a\":",
                format!("{{\"token\":\"{REDACTED}\",\"authorization\":\"{REDACTED}\",\"a\":"),
            ),
            ("password = 'a b', c", format!("password = '{REDACTED}', c")),
            // Neither names a secret.
            ("{\"tokenFile\": \"/run/token\", ", "{\"tokenFile\": \"/run/token\", ".to_owned()),
            ("no token came, so 5: retry", "no token came, so 5: retry".to_owned()),
        ];
        for (text, expected) in table {
            assert_eq!(redact_text(text), expected, "{text}");
            assert!(!redact_yaml(&format!("{text}\n]")).contains("hunt"), "{text}");
        }
    }

    #[test]
    fn a_secret_over_several_lines_goes_to_its_last() {
        let block = "a: [\nb:\n  password: |\n    hunter2\n\n    hunter3\n  c: 1\n";
        assert_eq!(redact_text(block), format!("a: [\nb:\n  password: {REDACTED}\n  c: 1\n"));
        let list = "a: [\ntokens:\n- hunter2\n- hunter3\nb: 1\n- token:\n    hunter4\n- c: 1\n";
        assert_eq!(redact_text(list), format!("a: [\ntokens:{REDACTED}\nb: 1\n- token:{REDACTED}\n- c: 1\n"));
        let object = "{\n  \"credentials\": {\n    \"user\": \"x\"\n  },\n  \"a\": 1\n";
        assert_eq!(redact_text(object), format!("{{\n  \"credentials\": {REDACTED}\n  }},\n  \"a\": 1\n"));
        // Lines of a log are not indented.
        assert_eq!(redact_text("token=\"x\nb\n"), format!("token=\"{REDACTED}\nb\n"));
    }

    #[test]
    fn json_in_a_string_is_read_behind_spaces_too() {
        let mut value = json!({"annotation": " \n{\"password\": \"x\"}"});
        redact(&mut value);
        assert_eq!(value, json!({"annotation": format!("{{\"password\":\"{REDACTED}\"}}")}));
    }
}
