//! Pods that another plugin attached before netattach replaced it on the node.
//!
//! | module | what it does |
//! |---|---|
//! | `take_over` | gives a live pod its record, so that further networks can be attached |
//! | `multus_del` | DEL of pods that Multus, or another plugin, attached |

pub(super) mod multus_del;
mod take_over;
