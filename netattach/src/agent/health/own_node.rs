//! Identifies this node's object as the last check saw it. Checks do not depend on the objects of other
//! nodes, which change all the time in a large cluster.

use std::sync::{Arc, Weak};

use crate::builtin::ThisNode;
use crate::objects::{Node, Objects};

/// Identifies the object, without keeping it alive.
#[derive(Debug, Clone, Default)]
pub(super) struct OwnNode(Option<Weak<Node>>);

impl OwnNode {
    /// Returns the node's object among these objects.
    pub(in crate::agent) fn of(objects: &Objects, this: &ThisNode) -> Self {
        Self(found(objects, this).map(Arc::downgrade))
    }

    /// Whether these objects contain the same value of it.
    pub(in crate::agent) fn is_of(&self, objects: &Objects, this: &ThisNode) -> bool {
        match (&self.0, found(objects, this)) {
            (None, None) => true,
            (Some(known), Some(node)) => known.as_ptr() == Arc::as_ptr(node),
            _ => false,
        }
    }
}

fn found<'o>(objects: &'o Objects, this: &ThisNode) -> Option<&'o Arc<Node>> {
    objects.nodes.get(this.name.as_ref()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_this_nodes_own_object_counts() {
        let node = |name: &str, range: &str| Node {
            name: name.to_owned(),
            pod_cidrs: vec![range.parse().unwrap()],
            addresses: Vec::new(),
        };
        let this = ThisNode { name: Some("a".to_owned()), ..ThisNode::default() };
        let mut objects = Objects::default();
        let none = OwnNode::of(&objects, &this);
        objects.nodes.insert("b".to_owned(), Arc::new(node("b", "10.2.0.0/24")));
        assert!(none.is_of(&objects, &this));
        objects.nodes.insert("a".to_owned(), Arc::new(node("a", "10.1.0.0/24")));
        assert!(!none.is_of(&objects, &this) && !OwnNode::default().is_of(&objects, &this));
        let known = OwnNode::of(&objects, &this);
        objects.nodes.insert("c".to_owned(), Arc::new(node("c", "10.3.0.0/24")));
        objects.nodes.remove("b");
        assert!(known.is_of(&objects, &this));
        objects.nodes.insert("a".to_owned(), Arc::new(node("a", "10.9.0.0/24")));
        assert!(!known.is_of(&objects, &this));
        let unnamed = ThisNode::default();
        assert!(OwnNode::of(&objects, &unnamed).is_of(&Objects::default(), &unnamed));
    }
}
