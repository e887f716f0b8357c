//! Gives networks of the same name in different namespaces separate pools. Pure.
//!
//! host-local keeps a pool in a directory named after the network. A definition whose configuration has no `name` gets
//! the name of its object (NPWG 3.4.2), without the namespace. Definitions of the same name in two namespaces would
//! therefore share a directory, the position from which the search for a free address continues, and exhaustion. For
//! such definitions the directory is one level deeper, below one named after the namespace. The content is the same,
//! and because the key `dataDir` holds the path, the Go plugin finds the directory too when it is executed.

use crate::cni::NetworkList;
use crate::ipam;

/// Gives the networks of a list pools separated by namespace, see [`ipam::separate`].
pub fn separate(list: &mut NetworkList, namespace: &str) {
    for section in list.plugins.iter_mut().filter_map(|plugin| plugin.ipam_mut()) {
        ipam::separate(section, namespace);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn a_pool_is_one_level_deeper_for_each_plugin_that_uses_host_local() {
        for (ipam, data_dir) in [
            (json!({"type": "host-local"}), json!("/var/lib/cni/networks/@shop")),
            (json!({"type": "host-local", "dataDir": ""}), json!("/var/lib/cni/networks/@shop")),
            (json!({"type": "host-local", "dataDir": "/a/b"}), json!("/a/b/@shop")),
            (json!({"type": "host-local", "dataDir": 1}), json!(1)),
            (json!({"type": "static"}), Value::Null),
            (json!({}), Value::Null),
        ] {
            let text = json!({"name": "n", "plugins": [{"type": "a"}, {"type": "b", "ipam": ipam}]});
            let mut list = NetworkList::parse(text.to_string().as_bytes()).unwrap();
            separate(&mut list, "shop");
            let raw = list.plugins[1].raw();
            assert_eq!(raw["ipam"].get("dataDir").cloned().unwrap_or_default(), data_dir, "{ipam}");
            assert_eq!(list.plugins[0].raw().get("ipam"), None);
        }
    }
}
