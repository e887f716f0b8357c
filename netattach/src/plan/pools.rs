//! Networks of one name in two namespaces have pools of their own. Pure.
//!
//! host-local keeps a pool in a directory named after the network. A definition whose configuration has no `name`
//! is given its object's name (NPWG 3.4.2), without the namespace: definitions of the same name in two namespaces
//! would share a directory, and with it the place at which the search for a free address goes on, and one's
//! exhaustion. For those the directory lies one level deeper, in one named after the namespace. The content is
//! the same, and since it is the key `dataDir` that says so, the Go plugin finds it as well when it is executed.

use crate::cni::NetworkList;
use crate::ipam;

/// Gives the networks of a list pools of their namespace's own, see [`ipam::separate`].
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
