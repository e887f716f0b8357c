//! A runtime's call, from the request to traffic: ADD, refusals and their errors, and the other verbs.
//!
//! | module | tests |
//! |---|---|
//! | `attach` | ADD, CHECK and DEL of whole pods: results, kernel, files, traffic |
//! | `selection`, `default_network`, `default_route` | the network selection of a pod |
//! | `repeated_add`, `journal_add`, `dynamic` | a second ADD; the record of an ADD; networks added to a live pod |
//! | `gc`, `status` | the other verbs |
//! | `holders` | the holders of resources that an ADD lacks |
//! | `bad_input`, `budgets`, `fairness` | requests that cannot be served, that are large, or that hang |
//! | `translation` | masquerade, and ports of the node that lead to pods |
//! | `shim` | the CNI executable without an agent, and with a bad one |
#![expect(clippy::unwrap_used, reason = "a test reports by panicking")]

mod attach;
mod bad_input;
mod budgets;
mod default_network;
mod default_route;
mod dynamic;
mod fairness;
mod gc;
mod holders;
mod journal_add;
mod repeated_add;
mod selection;
mod shim;
mod status;
mod translation;
