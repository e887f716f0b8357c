//! Plugins that attach a pod to several networks: netattach, and those that do the same work.
//!
//! None of them can be the default network of another, because each attaches its default network first: netattach
//! would call itself recursively, and two that read the same annotation would attach every network twice.

use super::config::{NetworkList, PluginConf};

/// The plugin type by which runtimes call netattach.
pub const OWN_TYPE: &str = "netattach";

/// Plugin types, and the products that they belong to.
const OTHERS: [(&str, &str); 4] =
    [("multus", "Multus"), ("multus-shim", "Multus"), ("danm", "DANM"), ("genie", "CNI-Genie")];

/// Whether netattach would have to create a network's interface, and so would call itself. As a chained plugin after
/// another one, netattach only adds the dataplane to the interface.
pub fn calls_itself(list: &NetworkList) -> bool {
    list.plugins.first().is_some_and(is_own)
}

/// Whether a runtime would call netattach for the network, at any position of the list.
pub fn is_for_runtimes(list: &NetworkList) -> bool {
    list.plugins.iter().any(is_own)
}

fn is_own(plugin: &PluginConf) -> bool {
    plugin.plugin_type() == OWN_TYPE
}

/// Returns the other multi-network plugin that a network calls.
pub fn other(list: &NetworkList) -> Option<&'static str> {
    let product = |plugin: &PluginConf| {
        OTHERS.iter().find(|(kind, _)| *kind == plugin.plugin_type()).map(|(_, product)| *product)
    };
    list.plugins.iter().find_map(product)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_that_calls_a_multi_network_plugin_is_known_by_the_types_of_its_plugins() {
        let table = [
            (r#"{"name": "a", "type": "bridge"}"#, (false, None)),
            (r#"{"name": "a", "type": "multus"}"#, (false, Some("Multus"))),
            (
                r#"{"name": "a", "plugins": [{"type": "cilium-cni"}, {"type": "multus-shim"}]}"#,
                (false, Some("Multus")),
            ),
            (r#"{"name": "a", "plugins": [{"type": "netattach"}, {"type": "tuning"}]}"#, (true, None)),
            (r#"{"name": "a", "plugins": [{"type": "flannel"}, {"type": "netattach"}]}"#, (false, None)),
        ];
        for (text, expected) in table {
            let list = NetworkList::parse(text.as_bytes()).unwrap();
            assert_eq!((calls_itself(&list), other(&list)), expected, "{text}");
        }
    }
}
