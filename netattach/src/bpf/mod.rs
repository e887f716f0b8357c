//! The only module that uses BPF: the packet programs, their maps, and the pins of both.
//!
//! ```text
//! <root>/v5/na_link, na_att, ...        maps: the whole state of the packet path
//! <root>/v5/prog/na_from_pod, na_to_pod programs, attached to every host-side device
//!               na_par_from, na_par_to programs, attached to every parent of macvlans by filters
//!               na_par_in_from, ...    attached to every parent by tcx, tail-call these through na_par_prog
//!               na_wire, na_xdp        attached to uplinks of the node
//!               na_pod_from, na_pod_to tail-called by the programs of devices in pods through na_pod
//!               na_routed, na_forwarded run by rules of the node's packet filter
//!               na_fast                tail-called by na_from_pod and na_wire through na_prog
//! <root>/link/7_na_from_pod, ...        links on device 7, where programs are attached by tcx
//! <root>/link/3_na_par_in_from, ...     the same on device 3, which is a parent
//! <root>/link/pod3_na_pod_from, ...     links on attachment 3's device in its pod
//! ```
//!
//! [`Dataplane::open`] loads the programs once and finds them again after a restart; adding an attachment
//! then costs a few map writes. Enforcement does not depend on the agent: pinned maps and attached programs
//! outlive it.
//!
//! The order of writes keeps every moment safe: an attachment's addresses are written before its record, its
//! record before its device, and a policy's entries before the word that names the policy; removal is in the
//! reverse order.
//!
//! | module | task |
//! |---|---|
//! | `object`, [`probe`], `load` | the compiled programs; probes of the kernel's features; loading |
//! | `program_table`, `map_table`, `pin` | the tables of programs and of maps; the pin tree |
//! | `dataplane` | programs and maps, opened; holds the parts below |
//! | `counters` | the counters of attachments |
//! | `caches` | the maps of attachments and of parents behind their locks, with their cached entries |
//! | `attachments`, `parents`, `routed` | the maps of attachments, of macvlans' parents, of traffic that the node routes |
//! | `policy_maps`, `policies`, `policy_rows` | the maps of policies behind their lock; compiled policies as map entries |
//! | `flows`, `shares` | the flow table, and each attachment's places in it |
//! | `fast` | the maps of the fast path |
//! | `programs`, `links` | the programs that run on devices; their tcx and XDP links |
//! | `ring` | the consumer of the ring buffer |
//! | `packet_fields` | offsets of kernel packet fields that programs cannot read by a helper |
//! | `packet_log` | log lines of an object that logs the path of packets |
//! | `map_ops`, `batched_map` | operations on maps: of single entries, of many at once |
//! | [`sys`] | the system calls that aya lacks |
//! | `error` | errors |

mod attachments;
mod batched_map;
mod caches;
mod counters;
mod dataplane;
mod error;
mod fast;
mod flows;
mod links;
mod load;
mod map_ops;
mod map_table;
mod object;
mod packet_fields;
mod packet_log;
mod parents;
mod pin;
mod policies;
mod policy_maps;
mod policy_rows;
pub mod probe;
mod program_table;
mod programs;
mod ring;
mod routed;
mod shares;
pub mod sys;

pub use attachments::{Attachment, Checks, pinned_attachments};
pub use caches::{AttachmentMaps, ParentMap};
pub use dataplane::{Config, Dataplane};
pub use error::{BpfError, MapProperty};
pub use fast::{FastPath, Local, Place, Segment, Uplink, XdpDrops};
pub use flows::{Census, Ended, Ending, FlowEntry, FlowTable, Host};
pub use links::LinkPlace;
pub use netattach_common::{
    AttachmentRecord, Decline, DropReason, FastStats, Gate, Limits, PolicyIds, Rate, Record, Side, Stats,
    Traffic,
};
pub use object::embedded_object;
pub use packet_log::{Detail, Followed, LogObject, PacketLog};
pub use parents::{Device, OnParent, Parent, Trunks};
pub use pin::{are_removable, is_on_bpffs, mount_bpffs, remove_all_pins};
pub use policy_maps::PolicyMaps;
pub use program_table::{Entry, Program};
pub use programs::Programs;
pub use ring::Records;
pub use routed::{Routed, close_gates};
pub use shares::{Owner, Owners, PerFamily, share_out};
pub use sys::XdpMode;
