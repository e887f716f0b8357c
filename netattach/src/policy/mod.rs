//! Compiles policies to lookup tables, and explains them. Pure.
//!
//! | module | task |
//! |---|---|
//! | `changes` | the difference between two snapshots of the objects |
//! | [`index`] | the attachments that a policy selects |
//! | `peers`, `by_kind`, `claims` | the pods that can be peers, of this node and of others; which pods claim an address, and which have it |
//! | [`options`] | the settings that compilation depends on |
//! | [`incremental`] | the compiler: compiles again only what a change affects |
//! | `shares` | the policies that go without their rules because all rules together exceed the node's budget |
//! | `entry`, `touch` | a policy as the compiler keeps it; which policies a change of pods and namespaces affects |
//! | `work` | the work that compiling takes, by namespace |
//! | `resolve` | the rules of one direction, with addresses and port numbers |
//! | `scope` | which pods an address stands for, if a policy is for several networks |
//! | `classes`, `traffic` | their union as lookup tables: arithmetic of prefixes and of ports |
//! | [`lookup`] | the tables of one direction, as the kernel looks them up |
//! | [`desired`], [`conditions`] | the result: tables for every attachment; conditions of the objects, changed by difference |
//! | [`diff`] | the writes that bring the kernel there |
//! | [`evaluate`] | the kernel's lookup, in user space |
//! | [`explain`], [`advice`] | why a flow is allowed or denied; the rule or setting that would allow it |
//! | [`dump`], [`naming`] | the tables that are in force, as data; names for recorded flows |
//! | [`level`] | the enforcement level of an attachment |
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
mod work;
