//! The forms of a command's output.

use clap::ValueEnum;
use serde::Serialize;

use super::table::Width;
use super::{CliError, visible};

/// A form of output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Format {
    /// Aligned columns, at most 120 characters wide
    Table,
    /// Aligned columns, more of them, nothing shortened
    Wide,
    /// For programs: the field names are stable
    Json,
    /// The same as YAML
    Yaml,
    /// The names of what a list would show, one in a line
    Name,
}

impl Format {
    /// The width of tables.
    pub(super) fn width(self) -> Width {
        if self == Self::Wide { Width::Unlimited } else { Width::Limited }
    }

    /// Whether the output is the value itself, for programs.
    pub(super) fn is_data(self) -> bool {
        matches!(self, Self::Json | Self::Yaml)
    }

    /// The value in a form for programs; `None` if a person asked.
    pub(super) fn data(self, value: &impl Serialize) -> Result<Option<String>, CliError> {
        Ok(match self {
            Self::Json => Some(serde_json::to_string_pretty(value)? + "\n"),
            Self::Yaml => Some(yaml(value)?),
            Self::Table | Self::Wide | Self::Name => None,
        })
    }

    /// The value in this form: data, or the text for a person.
    pub(super) fn show(
        self,
        value: &impl Serialize,
        text: impl FnOnce(Width) -> String,
    ) -> Result<String, CliError> {
        Ok(self.data(value)?.unwrap_or_else(|| visible::lines(&text(self.width()))))
    }

    /// The rows in this form: data, their names, or the text for a person.
    pub(super) fn list(
        self,
        value: &impl Serialize,
        names: impl IntoIterator<Item = String>,
        text: impl FnOnce(Width) -> String,
    ) -> Result<String, CliError> {
        match self {
            Self::Name => Ok(names.into_iter().map(|name| visible::line(&name)).collect()),
            _ => self.show(value, text),
        }
    }

    /// Formats one of an endless sequence of values: a line of JSON, or a document of YAML.
    pub(super) fn element(self, value: &impl Serialize) -> Result<Option<String>, CliError> {
        Ok(match self {
            Self::Json => Some(serde_json::to_string(value)?),
            Self::Yaml => {
                let text = yaml(value)?;
                Some(format!("---\n{}", text.trim_end()))
            }
            Self::Table | Self::Wide | Self::Name => None,
        })
    }
}

/// Encodes the value as YAML with the structure of the JSON: direct YAML has tags for variants.
fn yaml(value: &impl Serialize) -> Result<String, CliError> {
    serde_norway::to_string(&serde_json::to_value(value)?).map_err(CliError::Yaml)
}
