//! The `k8s.v1.cni.cncf.io/networks` annotation, which anyone who may create a pod writes.
//!
//! An error is fine. A panic or a hang is a finding, and so is a selection that changes when it is written in the JSON
//! form and read again.

use netattach::npwg;

// The part of the input that is text.
pub(crate) fn check(data: &[u8]) {
    let annotation = data.utf8_chunks().next().map_or("", |chunk| chunk.valid());
    let Ok(parsed) = npwg::parse_networks(annotation, "shop") else { return };
    for selection in &parsed.selections {
        let _ = npwg::runtime_config(selection);
    }
    let _ = npwg::interface_names(&parsed.selections, &["eth0"]);
    let written = serde_json::to_string(&parsed.selections).expect("selections are plain data");
    let again = npwg::parse_networks(&written, "shop").expect("the JSON form of a valid selection is valid");
    assert_eq!(parsed.selections, again.selections);
}
