//! Checks the functions that templates of the chart call: only those are allowed that the tests' renderer executes as
//! helm does.

use std::collections::BTreeSet;

use super::Violation;
use crate::source::{self, Source};

const RULE: &str = "a template of the chart calls only the functions named in xtask/src/tidy/chart.rs";
const WHY: &str =
    "the chart is rendered in CI by a program of our own, and must not need more of helm than that has";

/// Keywords and functions of Go's text/template, functions of sprig, and of helm those that
/// `xtask/src/setup/helm-renderer.go` has as well.
const ALLOWED: [&str; 44] = [
    "if",
    "else",
    "end",
    "range",
    "with",
    "define",
    "template",
    "block",
    "true",
    "false",
    "nil",
    "and",
    "or",
    "not",
    "eq",
    "ne",
    "lt",
    "gt",
    "len",
    "index",
    "printf",
    "include",
    "required",
    "toYaml",
    "tpl",
    "fail",
    "append",
    "clean",
    "deepCopy",
    "default",
    "dict",
    "dir",
    "get",
    "hasKey",
    "hasPrefix",
    "indent",
    "list",
    "merge",
    "mergeOverwrite",
    "nindent",
    "quote",
    "set",
    "sha256sum",
    "trunc",
];

/// Every template of the chart.
pub(super) fn templates() -> anyhow::Result<Vec<Source>> {
    source::matching("deploy/helm/templates/*")
}

/// Every call of another function.
pub(super) fn violations(template: &Source) -> Vec<Violation> {
    let called = |(line, name)| Violation {
        path: template.path.clone(),
        line,
        found: format!("{name} is called"),
        rule: RULE,
        why: WHY,
    };
    other_functions(&template.text).into_iter().map(called).collect()
}

/// The line, from 1, and the name of each function that is not allowed.
fn other_functions(text: &str) -> BTreeSet<(usize, String)> {
    let mut found = BTreeSet::new();
    let mut rest = text;
    while let Some((_, from)) = rest.split_once("{{") {
        let (action, after) = from.split_once("}}").unwrap_or((from, ""));
        let line = text[..text.len() - from.len()].lines().count();
        let action = action.trim_matches('-').trim();
        if !action.starts_with("/*") {
            let others = words(action).into_iter().filter(|word| !ALLOWED.contains(&word.as_str()));
            found.extend(others.map(|word| (line, word)));
        }
        rest = after;
    }
    found
}

/// The names in an action that are neither in a text, nor fields or variables.
fn words(action: &str) -> Vec<String> {
    let (mut words, mut word) = (Vec::new(), String::new());
    let mut quote = None;
    let mut is_escaped = false;
    for character in action.chars().chain([' ']) {
        match quote {
            Some(end) => {
                let ends = character == end && !is_escaped;
                is_escaped = character == '\\' && end == '"' && !is_escaped;
                quote = Some(end).filter(|_| !ends);
            }
            None if character.is_alphanumeric() || matches!(character, '_' | '.' | '$') => {
                word.push(character);
            }
            None => {
                let done = std::mem::take(&mut word);
                words.extend(Some(done).filter(|it| it.starts_with(|c: char| c.is_alphabetic() || c == '_')));
                quote = matches!(character, '"' | '`' | '\'').then_some(character);
            }
        }
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_that_the_renderer_has_not_is_found_where_it_is_called() {
        let table: [(&str, &[(usize, &str)]); 7] = [
            ("a: {{ .Values.a | quote }}\n", &[]),
            ("a\n{{- lookup \"v1\" \"Pod\" }}", &[(2, "lookup")]),
            (
                "{{ if (and .a (semverCompare \">1\" .b)) }}\n{{ env `HOME` | b64enc }}{{ end }}",
                &[(1, "semverCompare"), (2, "b64enc"), (2, "env")],
            ),
            ("{{/* lookup is not called */}}{{- /* nor here */ -}}", &[]),
            ("{{ fail \"a \\\" lookup\" }}{{ $now := dict \"now\" 1 }}", &[]),
            ("{{ with .a }}{{ .now }}{{ $.now }}{{ end }} now {{", &[]),
            ("{{ now", &[(1, "now")]),
        ];
        for (text, expected) in table {
            let expected = expected.iter().map(|(line, name)| (*line, (*name).to_owned())).collect();
            assert_eq!(other_functions(text), expected, "{text}");
        }
    }
}
