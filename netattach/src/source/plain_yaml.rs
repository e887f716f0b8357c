//! Plain YAML as JSON: the part of the language in which programs write manifests, block by block, read in a fraction of the
//! time that all of the language takes.
//!
//! What is not surely plain is left to the whole parser: flow collections that hold something, block and folded
//! scalars, anchors, tags, comments behind values, escapes, words such as `true` whose type depends on the reader. What
//! is converted means the same as to the whole parser; the tests hold the two together.

use memchr::memchr;

/// Deepest nesting; a policy has seven levels.
const DEEPEST: usize = 32;
/// Most keys of one mapping: they are compared with each other.
const MOST_KEYS: usize = 64;

/// The document as JSON, if it is plain and a mapping.
pub(super) fn to_json(document: &str) -> Option<String> {
    if !document.as_bytes().chunks(4096).all(is_printable) {
        return None;
    }
    let body = document.strip_prefix("---\n").unwrap_or(document);
    let mut converter = Converter { rest: body, line: None, json: String::with_capacity(document.len()) };
    converter.next_line();
    let first = converter.line?;
    if !is_item(first.text) && split_key(first.text).is_some() {
        converter.mapping(first.indent, 0)?;
        return converter.line.is_none().then_some(converter.json);
    }
    None
}

/// Whether there are only printable ASCII characters and line ends. Without a way out of the loop it is done many bytes at once.
fn is_printable(bytes: &[u8]) -> bool {
    bytes.iter().fold(true, |all, byte| all & (matches!(byte, b' '..=b'~') | (*byte == b'\n')))
}

struct Converter<'a> {
    /// What is behind the line.
    rest: &'a str,
    /// The line to be read next, or what is left of it.
    line: Option<Line<'a>>,
    json: String,
}

/// What stands on a line, from its first character that is no space; never empty.
#[derive(Clone, Copy)]
struct Line<'a> {
    indent: usize,
    text: &'a str,
}

impl<'a> Converter<'a> {
    /// Goes to the next line that holds more than a comment.
    fn next_line(&mut self) {
        while !self.rest.is_empty() {
            let end = memchr(b'\n', self.rest.as_bytes()).unwrap_or(self.rest.len());
            let (line, rest) = self.rest.split_at(end);
            self.rest = rest.get(1..).unwrap_or_default();
            let indent = line.bytes().take_while(|byte| *byte == b' ').count();
            let trailing = line.bytes().rev().take_while(|byte| *byte == b' ').count();
            if indent < line.len() && line.as_bytes()[indent] != b'#' {
                self.line = Some(Line { indent, text: &line[indent..line.len() - trailing] });
                return;
            }
        }
        self.line = None;
    }

    /// What begins on the current line: a sequence, a mapping or a scalar.
    fn node(&mut self, depth: usize) -> Option<()> {
        let line = self.line.filter(|_| depth < DEEPEST)?;
        if is_item(line.text) {
            self.sequence(line.indent, depth)
        } else if split_key(line.text).is_some() {
            self.mapping(line.indent, depth)
        } else {
            self.scalar(line.text)?;
            self.next_line();
            Some(())
        }
    }

    fn sequence(&mut self, indent: usize, depth: usize) -> Option<()> {
        self.json.push('[');
        let mut is_first = true;
        while let Some(line) = self.line.filter(|line| line.indent == indent && is_item(line.text)) {
            if !std::mem::take(&mut is_first) {
                self.json.push(',');
            }
            let content = line.text[1..].trim_start_matches(' ');
            // Without content the item would be what follows, or null.
            let text = (!content.is_empty()).then_some(content)?;
            self.line = Some(Line { indent: indent + line.text.len() - content.len(), text });
            self.node(depth + 1)?;
        }
        self.json.push(']');
        self.ends(indent)
    }

    fn mapping(&mut self, indent: usize, depth: usize) -> Option<()> {
        let mut keys: Vec<&str> = Vec::new();
        self.json.push('{');
        while let Some(line) = self.line.filter(|line| line.indent == indent && !is_item(line.text)) {
            let (key, value) = split_key(line.text)?;
            if keys.contains(&key) || keys.len() == MOST_KEYS {
                return None;
            }
            if !keys.is_empty() {
                self.json.push(',');
            }
            keys.push(key);
            self.json.push('"');
            self.json.push_str(key);
            self.json.push_str("\":");
            if value.is_empty() {
                self.next_line();
                let below =
                    |line: &Line<'_>| line.indent > indent || (line.indent == indent && is_item(line.text));
                match self.line.filter(below) {
                    Some(_) => self.node(depth + 1)?,
                    None => self.json.push_str("null"),
                }
            } else {
                self.scalar(value)?;
                self.next_line();
            }
        }
        self.json.push('}');
        self.ends(indent)
    }

    /// A collection ends where something stands less deep, or what holds it goes on.
    fn ends(&self, indent: usize) -> Option<()> {
        match self.line {
            Some(line) if line.indent > indent => None,
            _ => Some(()),
        }
    }

    fn scalar(&mut self, text: &str) -> Option<()> {
        let inner = |quote: char| text.strip_prefix(quote)?.strip_suffix(quote);
        let quoted = inner('"').or_else(|| inner('\''));
        let string = match quoted {
            Some(inner) if inner.contains(['"', '\'', '\\']) => return None,
            Some(inner) => inner,
            None if matches!(text, "{}" | "[]") || is_number(text) => {
                self.json.push_str(text);
                return Some(());
            }
            None => is_plain_string(text).then_some(text)?,
        };
        self.json.push('"');
        self.json.push_str(string);
        self.json.push('"');
        Some(())
    }
}

fn is_item(text: &str) -> bool {
    text == "-" || text.starts_with("- ")
}

/// A key that is surely a string, and what stands behind it.
fn split_key(text: &str) -> Option<(&str, &str)> {
    let is_part = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'/' | b'-');
    let length = text.bytes().take_while(|byte| is_part(byte)).count();
    let (key, rest) = text.split_at(length);
    let value = rest.strip_prefix(':')?;
    let is_split = value.is_empty() || value.starts_with(' ');
    (is_split && is_word(key)).then(|| (key, value.trim_start_matches(' ')))
}

/// Whether a text that begins with a letter is a string to every reader.
fn is_word(text: &str) -> bool {
    const OTHERS: [&str; 11] = ["true", "false", "null", "yes", "no", "on", "off", "y", "n", "nan", "inf"];
    const LONGEST: usize = 5;
    text.starts_with(|first: char| first.is_ascii_alphabetic())
        && (text.len() > LONGEST || !OTHERS.iter().any(|other| other.eq_ignore_ascii_case(text)))
}

/// A decimal number without sign that fits into 64 bits.
fn is_number(text: &str) -> bool {
    text == "0"
        || (text.len() < 19 && !text.starts_with('0') && text.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Whether a text without quotes is a string to every reader: a word, or what begins like a number and is an address.
fn is_plain_string(text: &str) -> bool {
    let is_part = |byte: u8| {
        byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'/' | b',' | b':' | b' ' | b'-')
    };
    let plain = text.bytes().all(is_part);
    let is_address = || {
        text.starts_with(|first: char| first.is_ascii_hexdigit())
            && !text.contains(' ')
            && (text.contains(['/', ':']) || text.matches('.').count() > 1)
    };
    plain && !text.contains(": ") && !text.ends_with(':') && (is_word(text) || is_address())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn read(document: &str) -> Option<Value> {
        to_json(document).map(|json| serde_json::from_str(&json).unwrap())
    }

    fn whole(document: &str) -> Option<Value> {
        serde_norway::from_str(document).ok()
    }

    #[test]
    fn what_programs_write_is_plain() {
        let policy = json!({
            "apiVersion": "k8s.cni.cncf.io/v1beta1", "kind": "MultiNetworkPolicy",
            "metadata": {"name": "a", "annotations": {"k8s.v1.cni.cncf.io/policy-for": "shop/data, lan"}},
            "spec": {
                "podSelector": {"matchExpressions": [{"key": "app", "operator": "In", "values": ["a b", "c"]}]},
                "policyTypes": ["Ingress"],
                "ingress": [
                    {"from": [
                        {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16", "fd00::/64"]}},
                        {"podSelector": {}, "namespaceSelector": {}},
                    ], "ports": [{"protocol": "TCP", "port": 80, "endPort": 90}, {"port": "http"}]},
                    {},
                ],
                "egress": null,
            },
        });
        let text = serde_norway::to_string(&policy).unwrap();
        assert_eq!(read(&text), None, "null is a word of which readers have ideas");
        let text = text.replace("egress: null", "egress:");
        assert_eq!(read(&text), Some(policy.clone()));
        assert_eq!(read(&format!("---\n# first\n{text}\n")), Some(policy));
    }

    #[test]
    fn what_is_not_plain_is_left_alone() {
        let left = [
            "",
            "# nothing\n",
            "a",
            "- a",
            "a: &x b\n",
            "a: *x\n",
            "a: !t b\n",
            "a: |\n  b\n",
            "a: >\n  b\n",
            "a: {b: c}\n",
            "a: [b]\n",
            "a: b # c\n",
            "a: \"b\\n\"\n",
            "a: 'it''s'\n",
            "? a\n: b\n",
            "<<: {}\n",
            "a: true\n",
            "a: No\n",
            "a: 0x10\n",
            "a: 1.5\n",
            "a: -1\n",
            "a: 007\n",
            "a: .inf\n",
            "a: ~\n",
            "a: 1e3\n",
            "a: b\n  c\n",
            "a: b\n c: d\n",
            "a:\n    b: c\n  d: e\n",
            "a: b\na: c\n",
            "1: a\n",
            "true: a\n",
            "a:\tb\n",
            "a: b\r\n",
            "a: \u{e4}\n",
            "--- a: b\n",
            "a: b\n...\n",
            "a: b: c\n",
            "a: \"b\" c\n",
            "a:\n-\n",
            "a: 99999999999999999999\n",
            "a: fd00::\n  b\n",
        ];
        for text in left {
            assert_eq!(to_json(text), None, "{text:?}");
        }
    }

    fn any_text() -> impl Strategy<Value = String> {
        let word = prop::sample::select(vec![
            "a",
            "key:",
            "key: ",
            "b: c",
            "- ",
            "-",
            "- - x",
            "10.0.0.0/8",
            "fd00::1/64",
            "1",
            "80",
            "\"q\"",
            "'s'",
            "{}",
            "[]",
            ":",
            "#",
            "null",
            "true",
            "x y",
            "c:d",
            "e:",
            "1.2.3.4",
            "0",
            "a.b/c: d",
            "f,g",
            "...",
            "---",
        ]);
        let line = (0_usize..6, prop::collection::vec(word, 1..3))
            .prop_map(|(indent, words)| format!("{}{}\n", " ".repeat(indent), words.concat()));
        prop::collection::vec(line, 1..8).prop_map(|lines| lines.concat())
    }

    fn any_value() -> impl Strategy<Value = Value> {
        let scalar = prop_oneof![
            "[a-m][a-m0-9 /.-]{0,6}[a-m0-9]".prop_map(Value::from),
            "[1-9]{1,3}\\.[0-9]\\.[0-9]\\.0/[1-9]".prop_map(Value::from),
            any::<u16>().prop_map(Value::from),
        ];
        let key = "[a-m][a-zA-Z0-9./-]{0,8}";
        let inner = scalar.prop_recursive(5, 40, 4, move |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::btree_map(key, inner, 0..4)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        });
        prop::collection::btree_map(key, inner, 1..4).prop_map(|map| Value::Object(map.into_iter().collect()))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn what_is_converted_means_the_same(text in any_text()) {
            if let Some(value) = read(&text) {
                prop_assert_eq!(Some(value), whole(&text), "{:?}", text);
            }
        }

        #[test]
        fn written_values_come_back(value in any_value()) {
            let text = serde_norway::to_string(&value).unwrap();
            if let Some(read) = read(&text) {
                prop_assert_eq!(read, value);
            }
        }
    }
}
