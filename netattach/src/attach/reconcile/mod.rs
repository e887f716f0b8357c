//! Compares attached sandboxes with the node again and again, and restores what other programs have changed.
//!
//! | module | what it does |
//! |---|---|
//! | `enforcement` | registers sandboxes with the dataplane, and verifies that their programs are still attached |
//! | `parents` | has attachments follow parents that get another Ethernet address |
//! | `drift` | restores an attachment's links on the node, and its leases |
//! | `edited`, `lost_records` | records that other programs have edited or removed |
//! | `departed` | sandboxes that no runtime will detach |

pub(super) mod departed;
pub(super) mod drift;
pub(super) mod edited;
pub(super) mod enforcement;
mod lost_records;
pub(super) mod parents;
