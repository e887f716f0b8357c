//! Converts Kubernetes API objects into the model; shared by all sources.
//!
//! [`manifest`] turns a document into an object: [`pods`] with their [`security_context`], [`policies`], whose
//! specification is read by [`policy`].

pub(in crate::source) mod manifest;
pub(in crate::source) mod pods;
pub(in crate::source) mod policies;
pub mod policy;
pub(in crate::source) mod security_context;
