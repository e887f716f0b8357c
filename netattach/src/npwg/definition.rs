//! NetworkAttachmentDefinition as our own model, free of API types.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::NetworkRef;

/// What one NetworkAttachmentDefinition says (section 3).
///
/// The configuration is kept as the text that was written: giving it the object's name where it has none
/// (section 3.4.2) belongs to whoever parses it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Definition {
    /// Namespace of the object.
    pub namespace: String,
    /// Name of the object.
    pub name: String,
    /// `spec.config`; `None` when absent or empty: the configuration of that name on disk is meant
    /// (section 3.4.1).
    pub config: Option<Arc<str>>,
    /// Annotations of the object.
    pub annotations: BTreeMap<String, String>,
}

impl Definition {
    /// How selections and policies name this network.
    pub fn reference(&self) -> NetworkRef {
        NetworkRef::new(&self.namespace, &self.name)
    }
}
