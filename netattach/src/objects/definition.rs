//! NetworkAttachmentDefinition as netattach's own model, free of API types.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::access::AllowedNamespaces;
use crate::npwg::NetworkRef;

/// One NetworkAttachmentDefinition (section 3).
///
/// The configuration is kept as written: the parser adds the object's name if the configuration has none (section
/// 3.4.2).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Definition {
    /// Namespace of the object.
    pub namespace: String,
    /// Name of the object.
    pub name: String,
    /// `spec.config`; `None` if absent or empty: the configuration of that name on disk is used (section 3.4.1).
    pub config: Option<Arc<str>>,
    /// Annotations of the object, without that of `allowed`.
    pub annotations: BTreeMap<String, String>,
    /// The namespaces that may use it, read once from its annotation; `None`: every one.
    pub allowed: Option<AllowedNamespaces>,
}

impl Definition {
    /// The reference that selections and policies use for this network.
    pub fn reference(&self) -> NetworkRef {
        NetworkRef::new(&self.namespace, &self.name)
    }
}
