//! Tests that the JSON on the socket is as it was when the protocol got its number: every request and
//! answer, with every value of an enumeration and every optional field.
//!
//! A field that is renamed, removed or of another type fails the test. A new field fails it too: readers
//! ignore unknown fields, so it only has to be added to the files. Any other change raises [`PROTOCOL`].

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{Hello, PROTOCOL, Request, Response};

/// Checks that the value can be read, and is written unchanged.
fn same<T: DeserializeOwned + Serialize>(golden: &Value) {
    let read: T = serde_json::from_value(golden.clone()).unwrap_or_else(|error| panic!("{error}: {golden}"));
    assert_eq!(serde_json::to_value(&read).unwrap(), *golden);
}

fn golden(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

fn variant(value: &Value) -> Option<&str> {
    match value {
        Value::String(word) => Some(word),
        Value::Object(object) => object.keys().next().map(String::as_str),
        _ => None,
    }
}

/// Returns the names of the variants in the files.
fn variants(values: &[Value]) -> Vec<&str> {
    let mut words: Vec<&str> = values.iter().filter_map(variant).collect();
    words.sort_unstable();
    words.dedup();
    words
}

/// Whether a text is a key or a value anywhere in a message.
fn has(value: &Value, text: &str) -> bool {
    match value {
        Value::String(word) => word == text,
        Value::Array(values) => values.iter().any(|value| has(value, text)),
        Value::Object(object) => object.iter().any(|(key, value)| key == text || has(value, text)),
        _ => false,
    }
}

/// Returns those of `texts` that appear in none of the messages.
fn missing<'t>(messages: &[Value], texts: &[&'t str]) -> Vec<&'t str> {
    let is_missing = |text: &&&str| !messages.iter().any(|message| has(message, text));
    texts.iter().filter(is_missing).copied().collect()
}

#[test]
fn requests_keep_their_json() {
    let golden = golden(include_str!("../golden/requests.json"));
    same::<Hello>(&golden["hello"]);
    assert_eq!(golden["hello"]["protocol"], PROTOCOL);
    let requests = golden["requests"].as_array().unwrap();
    requests.iter().for_each(same::<Request>);
    let all = [
        "attach",
        "attachments",
        "cni",
        "detach",
        "explain",
        "flows",
        "networks",
        "policy",
        "policy_dump",
        "pools",
        "select",
        "stats",
        "status",
    ];
    assert_eq!(variants(requests), all);
    let sandbox_and_end = ["pod", "container", "address", "must_be_attached", "traceparent"];
    let form = ["segment", "fragment", "link", "ethertype"];
    assert_eq!(missing(requests, &[&sandbox_and_end[..], &form].concat()), [""; 0]);
}

#[test]
fn answers_keep_their_json() {
    let golden = golden(include_str!("../golden/responses.json"));
    let responses = golden["responses"].as_array().unwrap();
    responses.iter().for_each(same::<Response>);
    let all = [
        "attached",
        "attachments",
        "cni",
        "detached",
        "explanation",
        "failed",
        "flows",
        "networks",
        "policy",
        "policy_dump",
        "pools",
        "refused",
        "selected",
        "stats",
        "status",
    ];
    assert_eq!(variants(responses), all);
    let level = ["none", "advisory", "full-unless-privileged", "full"];
    let state = ["attaching", "attached", "detaching"];
    let verdict = [
        "not_here",
        "not_isolated",
        "allowed",
        "unenforced",
        "accepted_icmp",
        "keeps_link",
        "named",
        "infrastructure",
        "not_ip",
        "midstream",
        "denied",
        "over_capacity",
        "unknown",
    ];
    let absent_rule = ["peer", "excepted", "port"];
    let may_be_left_out = [
        "not_there",
        "enforcement_detail",
        "programs_wait",
        "fast_path",
        "records_withheld",
        "records_lost",
        "flows_displaced",
        "ended",
        "source_pod",
        "destination_pod",
        "decided_by",
        "left_out",
        "problem",
        "rules",
        "translated",
        "limits",
    ];
    let words = [&level[..], &state, &verdict, &absent_rule, &may_be_left_out].concat();
    assert_eq!(missing(responses, &words), [""; 0]);
}
