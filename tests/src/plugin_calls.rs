//! Recorded calls of scripted plugins.

use serde_json::Value;

/// Verb, plugin type and interface of each call.
pub fn verbs(calls: &[Value]) -> Vec<String> {
    calls
        .iter()
        .map(|call| {
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            format!(
                "{} {} {}",
                text(&call["env"]["CNI_COMMAND"]),
                text(&call["stdin"]["type"]),
                text(&call["env"]["CNI_IFNAME"])
            )
        })
        .collect()
}
