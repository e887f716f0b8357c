//! The `k8s.v1.cni.cncf.io/networks` annotation, which anyone who may create a pod writes.
//!
//! An error is fine. A panic or a hang is a finding, and so is a selection that changes when it is written in the JSON
//! form and read again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use netattach::npwg;

fuzz_target!(|annotation: &str| {
    let Ok(parsed) = npwg::parse_networks(annotation, "shop") else { return };
    for selection in &parsed.selections {
        let _ = npwg::runtime_config(selection);
    }
    let _ = npwg::interface_names(&parsed.selections, &["eth0"]);
    let written = serde_json::to_string(&parsed.selections).expect("selections are plain data");
    let again = npwg::parse_networks(&written, "shop").expect("the JSON form of a valid selection is valid");
    assert_eq!(parsed.selections, again.selections);
});
