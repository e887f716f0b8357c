//! The addresses of attachments: holders, pools and leases, and what neighbours know of them.
//!
//! | module | what it does |
//! |---|---|
//! | `holder` | who has an address, and how a refusal says so |
//! | `occupied` | keeps track of address holders: no address is used twice on a segment |
//! | `in_use` | whether the kernel knows a holder of an address |
//! | `pool_use` | the pools that attachments use, by network |
//! | `map_room` | the entries of attachments in the maps of allowed addresses |
//! | `announce_late` | announces addresses to neighbours after an ADD has been answered |
//! | `advertise` | announces addresses where the kernel does not |
//! | `leases` | DHCP leases, taken and released |
//! | `of_node` | whether the node has an address |
//! | `own` | the addresses that an attachment still has, if its record does not tell |
//! | `survey` | the use of address pools, for operators |

pub(super) mod advertise;
pub(super) mod announce_late;
pub(super) mod holder;
pub(super) mod in_use;
mod leases;
pub(super) mod map_room;
pub(super) mod occupied;
pub(super) mod of_node;
pub(super) mod own;
pub(super) mod pool_use;
pub(super) mod survey;
