//! Compiles policies to lookup tables, and explains them. Pure.
//!
//! | module | task |
//! |---|---|
//! | `changes` | the difference between two snapshots of the objects |
//! | [`index`] | the attachments that a policy selects |
//! | `peers`, `by_kind`, `claims` | the pods that can be peers, of this node and of others; who claims an address, and who has it |
//! | [`options`] | the settings that compilation depends on |
//! | [`incremental`] | the compiler: what a change concerns is compiled again, and nothing else |
//! | `shares` | the policies whose rules are more than a node takes |
//! | `entry`, `touch` | a policy as the compiler keeps it; which of them a change of pods and namespaces concerns |
//! | `resolve` | the rules of one direction, with addresses and port numbers |
//! | `scope` | whose an address is, where a policy is for several networks |
//! | `classes`, `traffic` | their union as lookup tables: arithmetic of prefixes and of ports |
//! | [`lookup`] | the tables of one direction, as the kernel looks them up |
//! | [`desired`] | the result: tables for every attachment, conditions of the objects |
//! | [`diff`] | the writes that bring the kernel there |
//! | [`evaluate`] | the kernel's lookup, in user space |
//! | [`explain`], [`advice`] | why a flow passes or not; the rule or setting that would let it pass |
//! | [`dump`], [`naming`] | the tables that are in force, as data; names for what was recorded |
//! | [`level`] | how far policies hold for an attachment |
//!
//! Unreadable input never allows anything: an unreadable item of a rule matches nothing, and a policy whose selector is
//! unreadable isolates without allowing.

pub mod advice;
mod by_kind;
mod changes;
mod claims;
mod classes;
pub mod conditions;
pub mod desired;
pub mod diff;
pub mod dump;
mod entry;
pub mod evaluate;
pub mod explain;
pub mod incremental;
pub mod index;
pub mod level;
pub mod lookup;
pub mod naming;
pub mod options;
mod peers;
mod resolve;
#[cfg(test)]
mod scenarios;
mod scope;
mod shares;
mod touch;
mod traffic;
