//! The error object of the specification and its codes.

use std::error::Error;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::json::{self, Value};
use super::version::Version;
use crate::budget::Exceeded;
use crate::error_chain::Chain;

pub use netattach_shim::cni::code;

/// The error object that a plugin prints on failure.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "ErrorObject")]
pub struct CniError {
    /// One of [`code`], or 100 and above for plugin-specific errors.
    pub code: u32,
    /// A short message.
    pub msg: String,
    /// Details; may be empty.
    pub details: String,
}

impl CniError {
    /// An error without details.
    pub fn new(code: u32, msg: impl Into<String>) -> Self {
        Self { code, msg: msg.into(), details: String::new() }
    }

    /// The same error with details.
    #[must_use]
    pub fn with_details(self, details: impl Into<String>) -> Self {
        Self { details: details.into(), ..self }
    }

    /// An error whose message is `error` followed by its causes.
    pub fn from_chain(code: u32, error: &(dyn Error + 'static)) -> Self {
        Self::new(code, Chain(error).to_string())
    }

    /// Several errors as one: the code of the first, all messages, all details.
    pub fn joined(errors: impl IntoIterator<Item = Self>) -> Self {
        let errors: Vec<Self> = errors.into_iter().collect();
        let texts = |of: fn(&Self) -> &str| {
            let present: Vec<&str> = errors.iter().map(of).filter(|text| !text.is_empty()).collect();
            present.join("; ")
        };
        Self {
            code: errors.first().map_or(code::INTERNAL, |first| first.code),
            msg: texts(|error| &error.msg),
            details: texts(|error| &error.details),
        }
    }

    /// The object to print on stdout, indented by four spaces. `version` is that of the request's configuration, or
    /// [`Version::LATEST`] if that could not be read.
    pub fn to_json(&self, version: Version) -> String {
        let object = ErrorObject {
            cni_version: Some(version.as_str().to_owned()),
            code: Some(self.code),
            msg: Some(self.msg.clone()),
            details: Some(self.details.clone()).filter(|details| !details.is_empty()),
        };
        json::pretty(&serde_json::to_value(object).unwrap_or(Value::Null))
    }

    /// Parses the output of a failed plugin.
    ///
    /// # Errors
    /// Not JSON, or an object without both `code` and `msg`, such as a result.
    pub fn parse(stdout: &[u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(stdout)
    }
}

impl fmt::Display for CniError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.msg)?;
        if self.details.is_empty() { Ok(()) } else { write!(f, "; {}", self.details) }
    }
}

impl Error for CniError {}

/// The JSON form of the error object.
#[derive(Serialize, Deserialize)]
struct ErrorObject {
    #[serde(rename = "cniVersion", default, skip_serializing_if = "Option::is_none", skip_deserializing)]
    cni_version: Option<String>,
    code: Option<u32>,
    msg: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    details: Option<String>,
}

#[derive(Debug, thiserror::Error)]
#[error("`code` and `msg` are both missing, so this is not an error object")]
struct NotAnErrorObject;

impl TryFrom<ErrorObject> for CniError {
    type Error = NotAnErrorObject;

    fn try_from(object: ErrorObject) -> Result<Self, NotAnErrorObject> {
        if object.code.is_none() && object.msg.is_none() {
            return Err(NotAnErrorObject);
        }
        Ok(Self {
            code: object.code.unwrap_or(0),
            msg: object.msg.unwrap_or_default(),
            details: object.details.unwrap_or_default(),
        })
    }
}

impl From<Exceeded> for CniError {
    fn from(error: Exceeded) -> Self {
        Self::new(code::INVALID_CONFIG, error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_are_answered_by_codes_of_the_specification() {
        use crate::budget::{CNI_ARGS, CONFIG, LEASE, RESOLV_CONF, STDIN};
        let codes = [CNI_ARGS, RESOLV_CONF, STDIN, CONFIG, LEASE].map(|budget| budget.code);
        let [environment, io, decoding, config] =
            [code::INVALID_ENVIRONMENT, code::IO_FAILURE, code::DECODING_FAILURE, code::INVALID_CONFIG];
        assert_eq!(codes, [Some(environment), Some(io), Some(decoding), Some(config), None]);
    }

    /// Rows: ENV-23.
    #[test]
    fn prints_the_object_of_the_specification() {
        let error = CniError::new(code::INVALID_CONFIG, "missing network name");
        assert_eq!(
            error.to_json(Version::V1_0_0),
            "{\n    \"cniVersion\": \"1.0.0\",\n    \"code\": 7,\n    \"msg\": \"missing network name\"\n}"
        );
        let error = error.with_details("in a.conflist");
        assert_eq!(CniError::parse(error.to_json(Version::LATEST).as_bytes()).unwrap(), error);
    }

    /// Rows: EXE-10.
    #[test]
    fn a_result_is_not_an_error_object() {
        for text in
            ["{\"cniVersion\":\"1.0.0\",\"ips\":[]}", "{}", "null", "[]", "", "\"x\"", "{\"code\":-1}"]
        {
            assert!(CniError::parse(text.as_bytes()).is_err(), "{text}");
        }
    }

    #[test]
    fn a_missing_code_reads_as_zero() {
        let error = CniError::parse(br#"{"msg":"no","cniVersion":7,"extra":true}"#).unwrap();
        assert_eq!(error, CniError::new(0, "no"));
    }
}
