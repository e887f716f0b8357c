//! The documents of a manifest file, YAML or JSON, and their objects.

use std::cell::Cell;
use std::fmt;

use serde::de::{self, Deserialize, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;
use serde_json::{Map, Number, Value};

use super::plain_yaml;
use super::yaml_list::cut;
use crate::budget;
use crate::source::read::manifest::{self, ManifestError, Object};
use crate::source::read::policies::yaml_policy;

/// Splits a YAML stream into its documents, so that one that does not parse leaves the others readable.
///
/// A line that starts with `---` starts a document wherever it is (YAML 1.2 section 9.1.4), which makes the split exact
/// without parsing. Parts with only comments and directives are omitted.
pub(in crate::source) fn yaml_documents(text: &str) -> impl Iterator<Item = &str> {
    let text = text.trim_start_matches('\u{feff}');
    let marker = memchr::memmem::find_iter(text.as_bytes(), "\n---").map(|end| end + 1).filter(|start| {
        let rest = &text[start + "---".len()..];
        rest.is_empty() || rest.starts_with(char::is_whitespace)
    });
    // Evaluated lazily: a file may have millions.
    let parts = marker.chain([text.len()]).scan(0, |start, end| {
        let part = &text[*start..end];
        *start = end;
        Some(part)
    });
    parts.filter(|part| part.lines().any(holds_content))
}

/// A document of a YAML stream that is JSON: JSON text in braces is also YAML with the same meaning.
pub(super) fn json(document: &str) -> Option<&RawValue> {
    let text = document.strip_prefix("---").unwrap_or(document).trim_start();
    if text.starts_with('{') { serde_json::from_str(text).ok() } else { None }
}

/// The objects of one document of a YAML stream.
pub(super) fn yaml_objects(document: &str) -> Vec<Result<Object, ManifestError>> {
    list_objects(document).unwrap_or_else(|| single(document)).unwrap_or_else(|error| vec![Err(error)])
}

/// The objects of a document that is parsed as a whole.
///
/// # Errors
/// It does not parse, or is too large to be parsed as a whole.
fn single(document: &str) -> Result<Vec<Result<Object, ManifestError>>, ManifestError> {
    if let Some(policy) = yaml_policy(document) {
        return Ok(vec![Ok(policy)]);
    }
    match json(document) {
        Some(document) => Ok(manifest::objects(document)),
        None => yaml(document).map(|value| manifest::objects(&value)),
    }
}

/// The objects of a document that is a list, item by item; `None`: it must be parsed as a whole.
fn list_objects(document: &str) -> Option<Result<Vec<Result<Object, ManifestError>>, ManifestError>> {
    let list = cut(document)?;
    let mut head = Map::new();
    // Each on its own: an unterminated node at the end of the first would continue into the items.
    for part in [list.before, list.after].into_iter().filter(|part| part.lines().any(holds_content)) {
        let Ok(Value::Object(keys)) = yaml(part) else { return None };
        head.extend(keys);
    }
    let is = |key: &str, value: &str| head.get(key).is_some_and(|found| found == value);
    if !is("apiVersion", "v1") || !is("kind", "List") || head.contains_key("items") {
        return None;
    }
    if let Err(error) = budget::OBJECTS.check(list.count()) {
        return Some(Err(ManifestError::Budget(error)));
    }
    let (mut objects, mut entries) = (Vec::new(), 0);
    for (index, item) in list.items().enumerate() {
        match single(&item) {
            Ok(found) => {
                entries += found.iter().flatten().map(Object::entries).sum::<usize>();
                if let Err(error) = budget::ENTRIES.check(entries) {
                    return Some(Err(ManifestError::Budget(error)));
                }
                objects.extend(found.into_iter().map(|object| object.map_err(|it| it.of_item(index))))
            }
            // It may not be an item: it could be inside an open text, or refer to another item.
            Err(_) if budget::YAML.check(document.len()).is_ok() => return None,
            // Then the start of the next item is unknown as well.
            Err(error) => return Some(Err(error.of_item(index))),
        }
    }
    Some(Ok(objects))
}

/// Parses one document of a YAML stream as a value.
///
/// # Errors
/// It does not parse, or exceeds the limits: the parser takes many times the size of a text, and an alias counts as
/// much as the node it refers to.
pub(in crate::source) fn yaml(document: &str) -> Result<Value, ManifestError> {
    budget::YAML.check(document.len()).map_err(ManifestError::Budget)?;
    let left = Cell::new(budget::YAML_VALUES.most + 1);
    if let Some(value) = plain_yaml::read_by(document, Bounded(&left)) {
        return Ok(value);
    }
    budget::YAML_MARKS.check(marks(document)).map_err(ManifestError::Budget)?;
    left.set(budget::YAML_VALUES.most + 1);
    let read = Bounded(&left).deserialize(serde_norway::Deserializer::from_str(document));
    read.map_err(|error| {
        match budget::YAML_VALUES.check(budget::YAML_VALUES.most + usize::from(left.get() == 0)) {
            Err(exceeded) => ManifestError::Budget(exceeded),
            Ok(()) => ManifestError::Yaml(error),
        }
    })
}

/// The number of characters that may begin a value. A document has at most two nodes for each, keys among them, and
/// one more.
///
/// Not those inside a word, of which an IPv6 address has many: a dash is a mark before a blank alone, and a colon
/// between letters and digits goes on a plain text.
fn marks(document: &str) -> usize {
    let bytes = document.as_bytes();
    let at = |index: usize| bytes.get(index).copied().unwrap_or(b' ');
    let is_inside = |byte: u8| byte.is_ascii_alphanumeric() || byte == b':';
    let is_mark = |(index, byte): &(usize, &u8)| match byte {
        b',' | b'?' | b'[' | b'{' => true,
        b'-' => !at(index + 1).is_ascii_graphic(),
        b':' => {
            let before = index.checked_sub(1).map_or(b' ', at);
            !is_inside(before) || !(is_inside(at(index + 1)) || at(index + 1) == b'/')
        }
        _ => false,
    };
    bytes.iter().enumerate().filter(is_mark).count()
}

/// Deserializes a value with a limited number of values.
#[derive(Clone, Copy)]
struct Bounded<'c>(&'c Cell<usize>);

impl<'de> DeserializeSeed<'de> for Bounded<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        // At 0 the limit is exceeded by one.
        self.0.set(self.0.get().saturating_sub(1));
        if self.0.get() == 0 {
            return Err(de::Error::custom("too many values"));
        }
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Bounded<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any valid JSON value")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_none<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut found = Vec::new();
        while let Some(item) = items.next_element_seed(self)? {
            found.push(item);
        }
        Ok(found.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut found = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            let value = entries.next_value_seed(self)?;
            found.insert(key, value);
        }
        Ok(found.into())
    }
}

/// Reads a document of a YAML stream that is JSON or plain YAML, which takes a fraction of the time; `None`: it is
/// neither, or does not have the expected type.
pub(in crate::source) fn plain<'d, T: Deserialize<'d>>(document: &'d str) -> Option<T> {
    let text = document.strip_prefix("---").unwrap_or(document).trim_start();
    // JSON text in braces is also YAML with the same meaning.
    if text.starts_with('{') { serde_json::from_str(text).ok() } else { plain_yaml::read(document) }
}

fn holds_content(line: &str) -> bool {
    let content = line.strip_prefix("---").unwrap_or(line).trim();
    !(content.is_empty() || content == "..." || content.starts_with('#') || line.starts_with('%'))
}

/// The documents of a file of consecutive JSON texts. A parse error ends the sequence.
pub(in crate::source) fn json_documents(
    text: &str,
) -> impl Iterator<Item = Result<&RawValue, ManifestError>> {
    let stream = serde_json::Deserializer::from_str(text.trim_start_matches('\u{feff}')).into_iter();
    stream.map(|document| document.map_err(ManifestError::Json))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::budget::Budget;
    use crate::error_chain::Chain;
    use crate::source::files::documents::*;

    #[test]
    fn documents_are_told_apart_without_parsing_them() {
        let yaml = "%YAML 1.2\n---\n# only a comment\n---\nkind: [unclosed\n--- {a: 1}\n---\ntext: |\n  --- not a marker\n---x: 1\n...\n";
        let documents: Vec<Result<Value, String>> = yaml_documents(yaml)
            .map(|document| {
                crate::source::files::documents::tests::yaml(document).map_err(|error| error.to_string())
            })
            .collect();
        assert_eq!(
            documents,
            [
                Err("parse yaml".to_owned()),
                Ok(serde_json::json!({"a": 1})),
                Ok(serde_json::json!({"text": "--- not a marker\n", "---x": 1})),
            ]
        );
        assert_eq!(yaml_documents("").count(), 0);
    }

    #[test]
    fn json_texts_follow_each_other_until_one_is_broken() {
        let documents: Vec<Result<&str, String>> = json_documents("{\"a\":1}\n[2] {")
            .map(|document| document.map(RawValue::get).map_err(|error| error.to_string()))
            .collect();
        assert_eq!(documents, [Ok("{\"a\":1}"), Ok("[2]"), Err("parse json".to_owned())]);
    }

    fn said(objects: Vec<Result<Object, ManifestError>>) -> Vec<Result<Object, String>> {
        objects.into_iter().map(|object| object.map_err(|error| Chain(&error).to_string())).collect()
    }

    /// The objects of a document that is parsed as one value.
    fn at_once(document: &str) -> Vec<Result<Object, String>> {
        said(single(document).unwrap_or_else(|error| vec![Err(error)]))
    }

    fn namespace(name: &str) -> Object {
        Object::Namespace { name: name.to_owned(), labels: Default::default() }
    }

    fn budget_error(budget: &Budget, found: usize) -> String {
        budget.check(found).unwrap_err().to_string()
    }

    #[test]
    fn a_list_is_read_item_by_item_and_one_that_cannot_be_cut_at_once() {
        let item =
            |name: &str| format!("- apiVersion: v1\n  kind: Namespace\n  metadata: {{name: {name}}}\n");
        let list = |items: &str| format!("apiVersion: v1\nitems:\n{items}kind: List\n");
        let whole = list(&[item("a"), "# b is next\n".to_owned(), item("b")].concat());
        assert!(list_objects(&whole).is_some());
        assert_eq!(said(yaml_objects(&whole)), [Ok(namespace("a")), Ok(namespace("b"))]);
        // The second item refers to the first.
        let anchored = list("- &a {apiVersion: v1, kind: Namespace, metadata: {name: a}}\n- *a\n");
        assert!(list_objects(&anchored).is_none());
        assert_eq!(said(yaml_objects(&anchored)), [Ok(namespace("a")), Ok(namespace("a"))]);
        // The apparent item is part of a text.
        let quoted = list(&format!(
            "- {{apiVersion: v1, kind: Namespace, metadata: {{name: \"x\n{}\"}}}}\n",
            item("b")
        ));
        assert_eq!(said(yaml_objects(&quoted)), at_once(&quoted));
        for other in [whole.replace("kind: List", "kind: Else"), whole.replace("items:", "a: \"\nitems:")] {
            assert!(list_objects(&other).is_none(), "{other}");
        }
        // After a parse error the start of the next item is unknown.
        let large =
            list(&[item("a"), format!("- \"{}\n", "x".repeat(budget::YAML.most)), item("b")].concat());
        let objects = said(yaml_objects(&large));
        assert_eq!(objects.len(), 1, "{objects:?}");
        assert!(objects[0].as_ref().unwrap_err().starts_with("items[1]: document in YAML: "), "{objects:?}");
    }

    #[test]
    fn what_is_read_as_a_value_has_its_bounds_and_a_list_of_large_size_is_within_them() {
        let of = |bytes: usize| {
            let head = "{apiVersion: v1, kind: Namespace, metadata: {name: a, annotations: {a: '";
            format!("{head}{}'}}}}}}", "x".repeat(bytes - head.len() - 4))
        };
        let most = budget::YAML.most;
        assert_eq!(said(yaml_objects(&of(most))), [Ok(namespace("a"))]);
        assert_eq!(said(yaml_objects(&of(most + 1))), [Err(budget_error(&budget::YAML, most + 1))]);
        let list =
            |items: &[String]| format!("apiVersion: v1\nkind: List\nitems:\n- {}\n", items.join("\n- "));
        assert_eq!(
            said(yaml_objects(&list(&[of(most - 3), of(most - 3)]))),
            [Ok(namespace("a")), Ok(namespace("a"))]
        );
        let most = budget::YAML_MARKS.most;
        let of = |count: usize| {
            let head = "{apiVersion: v1, kind: Namespace, metadata: {name: a, annotations: {a: '";
            format!("{head}{}'}}}}}}", ",".repeat(count - marks(head)))
        };
        assert_eq!(said(yaml_objects(&of(most))), [Ok(namespace("a"))]);
        assert_eq!(said(yaml_objects(&of(most + 1))), [Err(budget_error(&budget::YAML_MARKS, most + 1))]);
        assert_eq!(marks("{cidr: 2001:db8:1:2::/64, name: a-b}\n- {a: \"b\":c}\n-\tx"), 9);
        let most = budget::YAML_VALUES.most;
        // Six values around them.
        let of = |count: usize| {
            let head = "{apiVersion: v1, kind: Namespace, metadata: {name: a}, a: [";
            format!("{head}{}]}}", "~,".repeat(count - 6))
        };
        assert_eq!(said(yaml_objects(&of(most))), [Ok(namespace("a"))]);
        assert_eq!(said(yaml_objects(&of(most + 1))), [Err(budget_error(&budget::YAML_VALUES, most + 1))]);
        // A mapping of as many, whose keys are no values.
        let mapping = |count: usize| {
            let entries: String = (0..count).map(|number| format!("{number}: ~,")).collect();
            format!("{{{entries}}}")
        };
        assert!(yaml(&mapping(most - 1)).is_ok());
        // A list of a thousand items, aliased a thousand times.
        let aliases = format!("{{a: &a [{}], b: [{}]}}", "1,".repeat(1000), "*a,".repeat(1000));
        assert_eq!(said(yaml_objects(&aliases)), [Err(budget_error(&budget::YAML_VALUES, most + 1))]);
        let most = budget::OBJECTS.most;
        let items = |count: usize| {
            said(yaml_objects(&list(&vec!["{apiVersion: v1, kind: Other}".to_owned(); count])))
        };
        assert_eq!(items(most), []);
        assert_eq!(items(most + 1), [Err(budget_error(&budget::OBJECTS, most + 1))]);
    }

    fn any_list() -> impl Strategy<Value = String> {
        let line = prop::sample::select(vec![
            "apiVersion: v1",
            "kind: List",
            "kind: Namespace",
            "metadata: {name: a}",
            "metadata:",
            "name: b",
            "items:",
            "- apiVersion: v1",
            "- {apiVersion: v1, kind: Namespace, metadata: {name: c}}",
            "-",
            "# note",
            "",
            "text: |",
            "text: \"",
            "\"",
            "a: [",
            "]",
            "&a b: c",
            "- *a",
        ]);
        let line = (0_usize..4, line).prop_map(|(indent, text)| format!("{}{text}\n", " ".repeat(indent)));
        prop::collection::vec(line, 0..10)
            .prop_map(|lines| format!("apiVersion: v1\nkind: List\nitems:\n{}", lines.concat()))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        #[test]
        fn item_by_item_a_list_gives_the_same_as_at_once(document in any_list()) {
            if let Some(Ok(objects)) = list_objects(&document) {
                prop_assert_eq!(said(objects), at_once(&document), "{}", document);
            }
        }
    }
}
