//! A container runtime's input to a CNI plugin: variables and a configuration, and results of other plugins.
//!
//! An error is fine. A panic or a hang is a finding, and so is a network list or a result that changes when it is
//! written and read again.

use std::collections::BTreeMap;

use netattach::cni::{CniResult, NetworkList, Request, Version};
use serde_json::Value;

const VARIABLES: [&str; 5] = ["CNI_COMMAND", "CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_ARGS"];

// Variables, then stdin, all separated by NUL, which no variable can contain.
pub(crate) fn check(data: &[u8]) {
    let mut parts = data.splitn(VARIABLES.len() + 1, |byte| *byte == 0);
    let env: BTreeMap<String, String> = VARIABLES
        .iter()
        .zip(parts.by_ref())
        .map(|(name, value)| ((*name).to_owned(), String::from_utf8_lossy(value).into_owned()))
        .collect();
    let stdin = parts.next().unwrap_or(data);
    if let Err(error) = Request::parse(&env, stdin) {
        assert!(!error.to_string().is_empty());
    }
    if let Ok(list) = NetworkList::parse(stdin) {
        let written = list.to_value();
        let again = NetworkList::parse(written.to_string().as_bytes())
            .expect("a list that was read can be read again");
        assert_eq!(written, again.to_value());
    }
    if let Ok(value) = serde_json::from_slice::<Value>(stdin) {
        result(&value);
    }
}

/// The newest version can express every result.
fn result(value: &Value) {
    let Ok(result) = CniResult::parse(value, Version::LATEST) else { return };
    let written = result.to_value(Version::LATEST).expect("the newest version expresses every result");
    let again =
        CniResult::parse(&written, Version::LATEST).expect("a result that was read can be read again");
    assert_eq!(result, again);
    for version in Version::ALL {
        let _ = result.to_value(version);
    }
}
