//! The agent's life cycle: start, end, crash and upgrade under attached pods, and what an operator sees.
//!
//! | module | tests |
//! |---|---|
//! | `readiness` | the file that tells the runtime to call netattach |
//! | `primaries` | beside another primary network in the runtime's directory |
//! | `node_check` | what a node offers an agent |
//! | `bad_node` | what a node lacks, in the log, as a condition and by `doctor` |
//! | `operator`, `object_problems` | errors for wrong use; problems of objects, in `status` and in the log |
//! | `inspect` | what an operator asks a node: lists, pools, flows, pictures, checks, an archive |
//! | `restart`, `restart_many` | attached pods do not notice that the agent restarts |
//! | `stand_by` | the next agent waits beside the one that serves, and takes its place at once |
//! | `crash`, `damaged_records`, `recovery` | an agent killed at every point; damaged records; the next agent's
//! recovery |
//! | `older_state` | what an older agent has left, of versions that are read and of one that is not |
//! | `capabilities` | what the manifests give an agent is needed and enough, with and without executed plugins |
//! | `unit` | the unit for systemd, beside what the manifests give |
//! | `removal` | netattach is taken off a node, and what stays is said |
//! | `upgrade` | from the agent that landed last to this one and back, under traffic |
//! | `named_namespaces` | an agent that sees the pods' namespaces under another path than the runtime |
//! | `drift` | what others change of attachments on the node is put back |
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
