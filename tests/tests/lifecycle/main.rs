//! The agent's life cycle: start, end, crash and upgrade under attached pods, and what an operator sees.
//!
//! | module | tests |
//! |---|---|
//! | `readiness` | the file that makes the runtime call netattach |
//! | `primaries` | beside another primary network in the runtime's directory |
//! | `node_check` | the features that an agent finds on a node |
//! | `bad_node` | requirements that a node lacks, in the log, as a condition and by `doctor` |
//! | `operator`, `object_problems` | errors for wrong use; problems of objects, in `status` and in the log |
//! | `inspect` | queries of an operator to a node: lists, pools, flows, pictures, checks, an archive |
//! | `restart`, `restart_many` | attached pods do not notice that the agent restarts |
//! | `stand_by` | the next agent waits beside the one that serves, and replaces it at once |
//! | `crash`, `damaged_records`, `recovery` | an agent killed at every point; damaged records; recovery by the next agent |
//! | `older_state` | leftovers of an older agent, of versions that are read and of one that is not |
//! | `capabilities` | the capabilities of the manifests are needed and sufficient, with and without executed plugins |
//! | `unit` | the unit for systemd, compared with the manifests |
//! | `removal` | netattach is removed from a node, and leftovers are reported |
//! | `upgrade` | from the agent that landed last to this one and back, under traffic |
//! | `named_namespaces` | an agent that sees the pods' namespaces under another path than the runtime |
//! | `drift` | changes by others to attachments on the node are reverted |
//! | `collector` | sandboxes that no runtime asks to detach |
//! | `map_memory` | the memory of the maps is as documented |
#![expect(clippy::unwrap_used, reason = "a test reports by panicking")]

mod bad_node;
mod capabilities;
mod collector;
mod crash;
mod damaged_records;
mod drift;
mod inspect;
mod map_memory;
mod named_namespaces;
mod node_check;
mod object_problems;
mod older_state;
mod operator;
mod primaries;
mod readiness;
mod recovery;
mod removal;
mod restart;
mod restart_many;
mod stand_by;
mod unit;
mod upgrade;
