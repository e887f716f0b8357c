//! Failures in the form of the API: an object `Status`.

use serde_json::{Value, json};

use super::kinds::Kind;

/// A failure: a `Status` with its HTTP code, or plain text where real servers use it.
#[derive(Debug, Clone)]
pub(super) struct Failure {
    pub(super) code: u16,
    reason: &'static str,
    message: String,
    details: Box<Value>,
    /// `metadata`: a continue token, if there is one.
    metadata: Box<Value>,
    /// Answered as text, not as a `Status`.
    pub(super) plain: bool,
    pub(super) retry_after: Option<u64>,
}

impl Failure {
    fn new(code: u16, reason: &'static str, message: String) -> Self {
        let (details, metadata) = (Box::new(Value::Null), Box::new(json!({})));
        Self { code, reason, message, details, metadata, plain: false, retry_after: None }
    }

    /// Returns a failure with only a code, as faults create it.
    pub(super) fn of_code(code: u16) -> Self {
        let (reason, message) = match code {
            401 => ("Unauthorized", "Unauthorized"),
            403 => ("Forbidden", "forbidden: the server's test says so"),
            404 => ("NotFound", "not found: the server's test says so"),
            409 => ("Conflict", "conflict: the server's test says so"),
            410 => ("Expired", "too old resource version: the server's test says so"),
            422 => ("Invalid", "invalid: the server's test says so"),
            429 => ("TooManyRequests", "The apiserver is too busy, please try again later"),
            500 => ("InternalError", "Internal error occurred: the server's test says so"),
            503 => ("ServiceUnavailable", "the server is currently unable to handle the request"),
            504 => ("Timeout", "Timeout: request did not complete within the allotted timeout"),
            _ => ("", "the server's test says so"),
        };
        let mut failure = Self::new(code, reason, message.to_owned());
        if code == 429 {
            failure = failure.retried_after(1);
        }
        failure
    }

    /// With `Retry-After`, in seconds.
    pub(super) fn retried_after(mut self, seconds: u64) -> Self {
        self.details = Box::new(json!({"retryAfterSeconds": seconds}));
        self.retry_after = Some(seconds);
        self
    }

    pub(super) fn bad_request(message: String) -> Self {
        Self::new(400, "BadRequest", message)
    }

    /// Returns the answer of a server for a path that it does not serve: text, not a `Status`. Clients turn it into
    /// "the server could not find the requested resource".
    pub(super) fn unserved() -> Self {
        let mut failure = Self::new(404, "NotFound", "404 page not found\n".to_owned());
        failure.plain = true;
        failure
    }

    pub(super) fn not_found(kind: &Kind, name: &str) -> Self {
        let message = format!("{} {name:?} not found", kind.qualified());
        let mut failure = Self::new(404, "NotFound", message);
        failure.details = Box::new(details(kind, kind.resource, name));
        failure
    }

    pub(super) fn exists(kind: &Kind, name: &str) -> Self {
        let message = format!("{} {name:?} already exists", kind.qualified());
        let mut failure = Self::new(409, "AlreadyExists", message);
        failure.details = Box::new(details(kind, kind.resource, name));
        failure
    }

    pub(super) fn conflict(kind: &Kind, name: &str, why: &str) -> Self {
        let message = format!("Operation cannot be fulfilled on {} {name:?}: {why}", kind.qualified());
        let mut failure = Self::new(409, "Conflict", message);
        failure.details = Box::new(details(kind, kind.resource, name));
        failure
    }

    pub(super) fn invalid(kind: &Kind, name: &str, field: &str, why: &str) -> Self {
        let message = format!("{} {name:?} is invalid: {field}: {why}", kind.kind);
        let mut failure = Self::new(422, "Invalid", message);
        failure.details = Box::new(details(kind, kind.kind, name));
        failure.details["causes"] = json!([{"reason": "FieldValueInvalid", "message": why, "field": field}]);
        failure
    }

    /// Returns the failure for parameters that are not allowed, each with the reason.
    pub(super) fn forbidden_options(all: &[(&str, &str)]) -> Self {
        let said: Vec<String> =
            all.iter().map(|(parameter, why)| format!("{parameter}: Forbidden: {why}")).collect();
        let said = match &said[..] {
            [one] => one.clone(),
            several => format!("[{}]", several.join(", ")),
        };
        let message = format!("ListOptions.meta.k8s.io \"\" is invalid: {said}");
        let cause = |(parameter, why): &(&str, &str)| json!({"reason": "FieldValueForbidden", "message": format!("Forbidden: {why}"), "field": parameter});
        let mut failure = Self::new(422, "Invalid", message);
        let causes: Vec<Value> = all.iter().map(cause).collect();
        failure.details = Box::new(json!({"group": "meta.k8s.io", "kind": "ListOptions", "causes": causes}));
        failure
    }

    /// 403, or another code, of an admission policy.
    pub(super) fn not_admitted(kind: &Kind, name: &str, code: u16, why: &str) -> Self {
        let reason = if code == 403 { "Forbidden" } else { "Invalid" };
        let mut failure =
            Self::new(code, reason, format!("{} {name:?} is forbidden: {why}", kind.qualified()));
        failure.details = Box::new(details(kind, kind.resource, name));
        failure
    }

    pub(super) fn method_not_allowed() -> Self {
        let message = "the server does not allow this method on the requested resource";
        Self::new(405, "MethodNotAllowed", message.to_owned())
    }

    pub(super) fn unsupported(media_type: &str) -> Self {
        let message = format!(
            "the body of the request was in an unknown format - accepted media types include: \
             application/merge-patch+json; this was {media_type:?}"
        );
        Self::new(415, "UnsupportedMediaType", message)
    }

    pub(super) fn too_large() -> Self {
        Self::new(413, "RequestEntityTooLarge", "Request entity too large: limit is 3145728".to_owned())
    }

    /// 410 of a watch, or of a list at an exact version.
    pub(super) fn expired(asked: u64, oldest: u64) -> Self {
        Self::new(410, "Expired", format!("too old resource version: {asked} ({oldest})"))
    }

    /// Returns 410 of a list's page, with the token of a list that continues inconsistently.
    pub(super) fn continue_expired(token: &str) -> Self {
        let message = "The provided continue parameter is too old to display a consistent list result.";
        let mut failure = Self::new(410, "Expired", message.to_owned());
        failure.metadata = Box::new(json!({"continue": token}));
        failure
    }

    /// 504 of a version that the server has not reached.
    pub(super) fn version_too_large(asked: u64, current: u64) -> Self {
        let message = format!("Timeout: Too large resource version: {asked}, current: {current}");
        let mut failure = Self::new(504, "Timeout", message);
        failure.details = Box::new(json!({
            "causes": [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}],
            "retryAfterSeconds": 1
        }));
        failure.retry_after = Some(1);
        failure
    }

    /// The body of a plain answer.
    pub(super) fn text(&self) -> &str {
        &self.message
    }

    /// The object `Status`.
    pub(super) fn status(&self) -> Value {
        let mut status = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": self.metadata,
            "status": "Failure", "message": self.message
        });
        if !self.reason.is_empty() {
            status["reason"] = json!(self.reason);
        }
        if !self.details.is_null() {
            status["details"] = (*self.details).clone();
        }
        status["code"] = json!(self.code);
        status
    }
}

fn details(kind: &Kind, word: &str, name: &str) -> Value {
    let mut details = json!({"name": name, "kind": word});
    if !kind.group.is_empty() {
        details["group"] = json!(kind.group);
    }
    details
}
