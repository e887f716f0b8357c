//! The documents of a manifest file, YAML or JSON.

use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use super::plain_yaml;
use crate::source::read::manifest::ManifestError;

/// The documents of a YAML stream, each on its own, so that one that does not parse leaves the others readable.
///
/// A line that begins with `---` starts a document wherever it stands (YAML 1.2 section 9.1.4), which makes the
/// split exact without parsing. Parts with nothing but comments and directives are left out.
pub(in crate::source) fn yaml_documents(text: &str) -> impl Iterator<Item = &str> {
    let text = text.trim_start_matches('\u{feff}');
    let marker = memchr::memmem::find_iter(text.as_bytes(), "\n---").map(|end| end + 1).filter(|start| {
        let rest = &text[start + "---".len()..];
        rest.is_empty() || rest.starts_with(char::is_whitespace)
    });
    let starts: Vec<usize> = std::iter::once(0).chain(marker).collect();
    let ends: Vec<usize> = starts.iter().skip(1).copied().chain([text.len()]).collect();
    let parts = starts.into_iter().zip(ends).map(move |(start, end)| &text[start..end]);
    parts.filter(|part| part.lines().any(holds_content))
}

/// A document of a YAML stream that is JSON: text in braces that is JSON is YAML and means the same.
pub(super) fn json(document: &str) -> Option<&RawValue> {
    let text = document.strip_prefix("---").unwrap_or(document).trim_start();
    if text.starts_with('{') { serde_json::from_str(text).ok() } else { None }
}

/// Reads one document of a YAML stream.
pub(in crate::source) fn yaml(document: &str) -> Result<Value, ManifestError> {
    match plain(document) {
        Some(value) => Ok(value),
        None => serde_norway::from_str(document).map_err(ManifestError::Yaml),
    }
}

/// Reads a document of a YAML stream that is JSON or plain, which takes a fraction of the time; `None`: it is neither, or not
/// what is wanted.
pub(in crate::source) fn plain<'d, T: Deserialize<'d>>(document: &'d str) -> Option<T> {
    let text = document.strip_prefix("---").unwrap_or(document).trim_start();
    // Text in braces that is JSON is YAML and means the same.
    if text.starts_with('{') { serde_json::from_str(text).ok() } else { plain_yaml::read(document) }
}

fn holds_content(line: &str) -> bool {
    let content = line.strip_prefix("---").unwrap_or(line).trim();
    !(content.is_empty() || content == "..." || content.starts_with('#') || line.starts_with('%'))
}

/// The documents of a file with JSON texts one after the other. After one that does not parse there is no next.
pub(in crate::source) fn json_documents(
    text: &str,
) -> impl Iterator<Item = Result<&RawValue, ManifestError>> {
    let stream = serde_json::Deserializer::from_str(text.trim_start_matches('\u{feff}')).into_iter();
    stream.map(|document| document.map_err(ManifestError::Json))
}

#[cfg(test)]
mod tests {
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
}
