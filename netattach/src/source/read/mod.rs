//! From an object of the Kubernetes API to the model: what every source shares.
//!
//! A document becomes an object by [`manifest`]: [`pods`] with their [`security_context`], [`policies`], whose specification is
//! read by [`policy`].

pub(in crate::source) mod manifest;
pub(in crate::source) mod pods;
pub(in crate::source) mod policies;
pub mod policy;
pub(in crate::source) mod security_context;
