//! The networks that were read last, as successive ADDs of a network need the same.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use super::Network;
use crate::objects::Definition;
use crate::sync::{Mutex, locked};

/// Most networks that are kept. A node's pods have a handful in common.
const MOST: usize = 16;
/// Longest configuration that is kept, in bytes of text: most are shorter. A configuration full of small values takes
/// about 256 KiB, so all that are kept take 4 MiB at most.
const LONGEST: usize = 1 << 10;

/// The networks that were read last, by the object that they were read from: a changed definition is another object.
#[derive(Debug, Default)]
pub struct ReadNetworks(Mutex<VecDeque<(Weak<Definition>, Network)>>);

impl ReadNetworks {
    /// Returns the network that was read from this object, if kept.
    pub(in crate::attach) fn of(&self, definition: &Arc<Definition>) -> Option<Network> {
        let networks = locked(&self.0);
        let is_read =
            |(from, _): &&(Weak<Definition>, Network)| std::ptr::eq(from.as_ptr(), Arc::as_ptr(definition));
        networks.iter().find(is_read).map(|(_, network)| network.clone())
    }

    /// Keeps a network that was read entirely from this object, without parts from the node or a disk.
    pub(in crate::attach) fn keep(&self, definition: &Arc<Definition>, network: &Network) {
        if definition.config.as_ref().is_none_or(|config| config.len() > LONGEST) {
            return;
        }
        let mut networks = locked(&self.0);
        // While a weak reference exists, no other object can have this address.
        networks.retain(|(from, _)| from.strong_count() > 0);
        if networks.len() >= MOST {
            networks.pop_front();
        }
        networks.push_back((Arc::downgrade(definition), network.clone()));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::cni::NetworkList;
    use crate::npwg::NetworkRef;

    fn definition(name: &str, bytes: usize) -> Arc<Definition> {
        let config = format!(r#"{{"name": "{name}", "type": "bridge", "note": "{}"}}"#, "x".repeat(bytes));
        Arc::new(Definition {
            namespace: "shop".into(),
            name: name.into(),
            annotations: BTreeMap::new(),
            allowed: None,
            config: Some(config.into()),
        })
    }

    fn read(networks: &ReadNetworks, definition: &Arc<Definition>) {
        let text = definition.config.as_deref().unwrap();
        let list = NetworkList::parse_with_default_name(text.as_bytes(), &definition.name).unwrap();
        let name = NetworkRef::new("shop", &definition.name);
        let network = Network { name: name.into(), ..Network::of_configuration("", Arc::new(list)) };
        networks.keep(definition, &network);
    }

    fn name(networks: &ReadNetworks, of: &Arc<Definition>) -> Option<String> {
        networks.of(of).map(|network| network.list.name.clone())
    }

    #[test]
    fn an_object_has_the_network_that_was_read_from_it() {
        let networks = ReadNetworks::default();
        let (first, second) = (definition("a", 0), definition("b", 0));
        read(&networks, &first);
        assert_eq!((name(&networks, &first), name(&networks, &second)), (Some("a".to_owned()), None));
        read(&networks, &second);
        assert_eq!(name(&networks, &second), Some("b".to_owned()));
        assert_eq!(
            name(&networks, &Arc::new(Definition::clone(&first))),
            None,
            "the same text is another object"
        );
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let (networks, large) = (ReadNetworks::default(), definition("large", LONGEST));
        read(&networks, &large);
        assert_eq!(name(&networks, &large), None);
        let many: Vec<Arc<Definition>> = (0..=MOST).map(|_| definition("n", 0)).collect();
        many.iter().for_each(|one| read(&networks, one));
        assert_eq!((name(&networks, &many[0]), name(&networks, &many[MOST])), (None, Some("n".to_owned())));
        drop(many);
        read(&networks, &definition("small", 0));
        assert_eq!(locked(&networks.0).len(), 1, "those of objects that are gone go");
    }
}
