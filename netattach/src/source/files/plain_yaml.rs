//! Parser for plain YAML: the subset in which programs write manifests, block by block, parsed in a fraction of the
//! time that the whole language takes.
//!
//! Anything that is not certainly plain is left to the full parser: non-empty flow collections, block and folded
//! scalars, anchors, tags, comments after values, escapes, words such as `true` whose type depends on the parser. The
//! result equals that of the full parser; the tests compare the two.

use std::fmt;
use std::marker::PhantomData;

use memchr::memchr;
use serde::de::value::{BorrowedStrDeserializer, MapDeserializer, SeqDeserializer};
use serde::de::{self, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, forward_to_deserialize_any};

/// Maximum nesting; a policy has seven levels.
const DEEPEST: usize = 32;
/// Maximum number of keys of one mapping: they are compared with each other.
const MOST_KEYS: usize = 64;

/// Parses a document if it is plain, a mapping, and of the expected type.
pub(super) fn read<'de, T: Deserialize<'de>>(document: &'de str) -> Option<T> {
    read_by(document, PhantomData)
}

/// As [`read`], with a seed.
pub(super) fn read_by<'de, S: DeserializeSeed<'de>>(document: &'de str, seed: S) -> Option<S::Value> {
    if !document.as_bytes().chunks(4096).all(is_printable) {
        return None;
    }
    let mut reader = Reader { rest: document.strip_prefix("---\n").unwrap_or(document), line: None };
    reader.next_line();
    let first = reader.line?;
    if is_item(first.text) || split_key(first.text).is_none() {
        return None;
    }
    let value = seed.deserialize(Node { reader: &mut reader, depth: 0 }).ok()?;
    reader.line.is_none().then_some(value)
}

/// Whether there are only printable ASCII characters and line ends. Without early exit from the loop it is vectorized.
fn is_printable(bytes: &[u8]) -> bool {
    bytes.iter().fold(true, |all, byte| all & (matches!(byte, b' '..=b'~') | (*byte == b'\n')))
}

/// The text is not plain, or not of the expected type: the full parser finds out which.
#[derive(Debug, thiserror::Error)]
#[error("not plain")]
struct NotPlain;

impl de::Error for NotPlain {
    fn custom<T: fmt::Display>(_: T) -> Self {
        Self
    }
}

/// Goes through the lines of a document.
struct Reader<'de> {
    /// The text after the line.
    rest: &'de str,
    /// The next line, or the rest of it.
    line: Option<Line<'de>>,
}

/// The content of a line, from its first character that is not a space; never empty.
#[derive(Clone, Copy)]
struct Line<'de> {
    indent: usize,
    text: &'de str,
}

impl Reader<'_> {
    /// Advances to the next line that is neither empty nor a comment.
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

    /// A collection ends at a line with smaller indentation, or where its parent continues.
    fn ends(&self, indent: usize) -> Result<(), NotPlain> {
        match self.line {
            Some(line) if line.indent > indent => Err(NotPlain),
            _ => Ok(()),
        }
    }
}

/// The node that starts on the current line: a sequence, a mapping or a scalar.
struct Node<'r, 'de> {
    reader: &'r mut Reader<'de>,
    depth: usize,
}

impl<'de> Deserializer<'de> for Node<'_, 'de> {
    type Error = NotPlain;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, NotPlain> {
        let Self { reader, depth } = self;
        let line = reader.line.filter(|_| depth < DEEPEST).ok_or(NotPlain)?;
        if is_item(line.text) {
            let mut items = Sequence { reader, depth, indent: line.indent, is_over: false };
            let value = visitor.visit_seq(&mut items)?;
            return if items.is_over { Ok(value) } else { Err(NotPlain) };
        }
        if split_key(line.text).is_some() {
            let (keys, value) = (Vec::new(), "");
            let mut entries = Mapping { reader, depth, indent: line.indent, keys, value, is_over: false };
            let value = visitor.visit_map(&mut entries)?;
            return if entries.is_over { Ok(value) } else { Err(NotPlain) };
        }
        reader.next_line();
        Scalar(line.text).deserialize_any(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, NotPlain> {
        visitor.visit_some(self)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct newtype_struct
        seq tuple tuple_struct map struct enum identifier ignored_any
    }
}

struct Sequence<'r, 'de> {
    reader: &'r mut Reader<'de>,
    depth: usize,
    indent: usize,
    is_over: bool,
}

impl<'de> SeqAccess<'de> for &mut Sequence<'_, 'de> {
    type Error = NotPlain;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, NotPlain> {
        let item = self.reader.line.filter(|line| line.indent == self.indent && is_item(line.text));
        let Some(line) = item else {
            self.is_over = true;
            return self.reader.ends(self.indent).map(|()| None);
        };
        let text = line.text[1..].trim_start_matches(' ');
        if text.is_empty() {
            // The item would be on the following lines, or null.
            return Err(NotPlain);
        }
        self.reader.line = Some(Line { indent: self.indent + line.text.len() - text.len(), text });
        seed.deserialize(Node { reader: &mut *self.reader, depth: self.depth + 1 }).map(Some)
    }
}

struct Mapping<'r, 'de> {
    reader: &'r mut Reader<'de>,
    depth: usize,
    indent: usize,
    keys: Vec<&'de str>,
    /// The text after the last key.
    value: &'de str,
    is_over: bool,
}

impl<'de> MapAccess<'de> for &mut Mapping<'_, 'de> {
    type Error = NotPlain;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, NotPlain> {
        let entry = self.reader.line.filter(|line| line.indent == self.indent && !is_item(line.text));
        let Some(line) = entry else {
            self.is_over = true;
            return self.reader.ends(self.indent).map(|()| None);
        };
        let (key, value) = split_key(line.text).ok_or(NotPlain)?;
        if self.keys.contains(&key) || self.keys.len() == MOST_KEYS {
            return Err(NotPlain);
        }
        self.keys.push(key);
        self.value = value;
        seed.deserialize(BorrowedStrDeserializer::new(key)).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, NotPlain> {
        self.reader.next_line();
        if !self.value.is_empty() {
            return seed.deserialize(Scalar(self.value));
        }
        let indent = self.indent;
        let below = |line: &Line<'_>| line.indent > indent || (line.indent == indent && is_item(line.text));
        match self.reader.line.filter(below) {
            Some(_) => seed.deserialize(Node { reader: &mut *self.reader, depth: self.depth + 1 }),
            None => seed.deserialize(Null),
        }
    }
}

/// The value of a key without one.
struct Null;

impl<'de> Deserializer<'de> for Null {
    type Error = NotPlain;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, NotPlain> {
        visitor.visit_unit()
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, NotPlain> {
        visitor.visit_none()
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct newtype_struct
        seq tuple tuple_struct map struct enum identifier ignored_any
    }
}

/// A string, a number or an empty collection.
struct Scalar<'de>(&'de str);

impl<'de> Deserializer<'de> for Scalar<'de> {
    type Error = NotPlain;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, NotPlain> {
        let Self(text) = self;
        match quoted(text) {
            Some(inner) if inner.contains(['"', '\'', '\\']) => Err(NotPlain),
            Some(inner) => visitor.visit_borrowed_str(inner),
            None if text == "{}" => {
                visitor.visit_map(MapDeserializer::new(std::iter::empty::<(&'de str, &'de str)>()))
            }
            None if text == "[]" => visitor.visit_seq(SeqDeserializer::new(std::iter::empty::<&'de str>())),
            None if is_number(text) => visitor.visit_u64(text.parse().map_err(|_| NotPlain)?),
            None if is_plain_string(text) => visitor.visit_borrowed_str(text),
            None => Err(NotPlain),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, NotPlain> {
        visitor.visit_some(self)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct newtype_struct
        seq tuple tuple_struct map struct enum identifier ignored_any
    }
}

fn is_item(text: &str) -> bool {
    matches!(text.as_bytes(), [b'-'] | [b'-', b' ', ..])
}

/// The text between quotes.
fn quoted(text: &str) -> Option<&str> {
    match text.as_bytes() {
        [b'"', .., b'"'] | [b'\'', .., b'\''] => text.get(1..text.len() - 1),
        _ => None,
    }
}

/// A key that is certainly a string, and the text after it.
fn split_key(text: &str) -> Option<(&str, &str)> {
    let is_part = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'/' | b'-');
    let length = text.bytes().take_while(|byte| is_part(byte)).count();
    let (key, rest) = text.split_at(length);
    let is_split = matches!(rest.as_bytes(), [b':'] | [b':', b' ', ..]);
    let value = rest.get(1..).filter(|_| is_split)?;
    is_word(key).then(|| (key, value.trim_start_matches(' ')))
}

/// Whether a text that begins with a letter is a string to every parser.
fn is_word(text: &str) -> bool {
    const OTHERS: [&str; 11] = ["true", "false", "null", "yes", "no", "on", "off", "y", "n", "nan", "inf"];
    const LONGEST: usize = 5;
    text.starts_with(|first: char| first.is_ascii_alphabetic())
        && (text.len() > LONGEST || !OTHERS.iter().any(|other| other.eq_ignore_ascii_case(text)))
}

/// An unsigned decimal number that fits into 64 bits.
fn is_number(text: &str) -> bool {
    text == "0"
        || (text.len() < 19 && !text.starts_with('0') && text.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Whether an unquoted text is a string to every parser: a word, or an address that starts like a number.
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

    fn read(document: &str) -> Option<Value> {
        crate::source::files::plain_yaml::read(document)
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
            assert_eq!(read(text), None, "{text:?}");
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
        fn what_is_read_means_the_same(text in any_text()) {
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
