//! What goes over the socket, as it was when its protocol got its number: the JSON of every request and every answer.
//!
//! A field that is renamed, lost or of another type differs here, and so does one that is new: a reader passes over fields that
//! it does not know, so a new one is written into the files and needs nothing else. Anything else raises [`PROTOCOL`].

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{Hello, PROTOCOL, Request, Response};

/// The value is read, and written as it stood.
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

/// The words of the variants that the files have.
fn variants(values: &[Value]) -> Vec<&str> {
    let mut words: Vec<&str> = values.iter().filter_map(variant).collect();
    words.sort_unstable();
    words.dedup();
    words
}

#[test]
fn requests_are_what_they_were() {
    let golden = golden(include_str!("golden/requests.json"));
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
        "policy",
        "policy_dump",
        "stats",
        "status",
    ];
    assert_eq!(variants(requests), all);
}

#[test]
fn answers_are_what_they_were() {
    let golden = golden(include_str!("golden/responses.json"));
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
        "policy",
        "policy_dump",
        "refused",
        "stats",
        "status",
    ];
    assert_eq!(variants(responses), all);
}
