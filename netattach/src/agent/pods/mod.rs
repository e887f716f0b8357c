//! The pods that are running: their attachments follow their annotation, and stay as they were made.
//!
//! | module | what it does |
//! |---|---|
//! | `live` | makes the attachments of live pods follow their annotation |
//! | `following` | the order of the pods |
//! | `changes` | the changes that are due |
//! | `missed` | the pods that run without their networks |
//! | `repair` | reports, attaches or evicts them |
//! | `drift` | restores links, leases, records and status on the node that other processes have changed |
//! | `in_pods` | reports changes that other processes make in pods |

mod changes;
pub(super) mod drift;
mod following;
pub(super) mod in_pods;
pub(super) mod live;
pub(super) mod missed;
pub(super) mod repair;
