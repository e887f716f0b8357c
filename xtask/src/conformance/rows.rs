//! The rows of the standards, as people write them down in `tests/conformance/*.toml`.

use std::fs;

use anyhow::Context;
use serde::Deserialize;

use crate::tree;

const DIRECTORY: &str = "tests/conformance";

/// One file of rows.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Standard {
    pub(super) title: String,
    /// Whether an open row is a mistake.
    pub(super) complete: bool,
    #[serde(rename = "section")]
    pub(super) sections: Vec<Section>,
    /// Path below the top directory.
    #[serde(skip)]
    pub(super) path: String,
    #[serde(skip)]
    text: String,
}

/// Rows under one heading.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Section {
    pub(super) title: String,
    pub(super) rows: Vec<Row>,
}

/// One requirement.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Row {
    pub(super) id: String,
    /// One sentence of our own.
    pub(super) requires: String,
    /// Why the row asks nothing of netattach.
    pub(super) not_applicable: Option<String>,
}

impl Standard {
    pub(super) fn parse(path: &str, text: String) -> anyhow::Result<Self> {
        let standard: Self = toml::from_str(&text).with_context(|| format!("read {path}"))?;
        Ok(Self { path: path.to_owned(), text, ..standard })
    }

    /// Line of a row in the file, from 1.
    pub(super) fn line_of(&self, id: &str) -> usize {
        let quoted = format!("\"{id}\"");
        1 + self.text.lines().position(|line| line.contains(&quoted)).unwrap_or_default()
    }

    pub(super) fn rows(&self) -> impl Iterator<Item = &Row> {
        self.sections.iter().flat_map(|section| &section.rows)
    }
}

/// All files, in the order of their names.
pub(super) fn read_all() -> anyhow::Result<Vec<Standard>> {
    let directory = tree::root().join(DIRECTORY);
    let mut names: Vec<String> = fs::read_dir(&directory)
        .with_context(|| format!("list {DIRECTORY}"))?
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name.ends_with(".toml"))
        .collect();
    names.sort();
    names
        .iter()
        .map(|name| {
            let path = format!("{DIRECTORY}/{name}");
            let text = fs::read_to_string(directory.join(name)).with_context(|| format!("read {path}"))?;
            Standard::parse(&path, text)
        })
        .collect()
}
