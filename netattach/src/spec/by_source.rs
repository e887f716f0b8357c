//! Routing of one interface by source address, as in the plugin `sbr`.

use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::Route;

/// The request of a configuration.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct BySource {
    /// One table for all addresses, which another program fills; absent: a separate table for each address, to which
    /// the interface's routes move.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub table: Option<u32>,
    /// Next hops that replace those of the addresses, at most one of each family.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gateways: Vec<IpAddr>,
    /// Whether the main table keeps the routes without a gateway, with the interface's address as their source.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub hints: bool,
}

/// The changes to the routes of one interface.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct SourceTables {
    /// Index of the interface.
    pub index: u32,
    /// In the order of the addresses.
    pub tables: Vec<SourceTable>,
    /// Routes of the main table that are replaced by these.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hinted: Vec<Route>,
    /// Routes that leave the main table.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub removed: Vec<Route>,
}

/// The table for packets from one source address.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceTable {
    /// The address.
    pub source: IpAddr,
    /// Number of the table.
    pub table: u32,
    /// Its routes, in the order of installation.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub routes: Vec<Route>,
}

impl SourceTables {
    /// Returns the rules: source and table of each.
    pub fn rules(&self) -> Vec<(IpAddr, u32)> {
        self.tables.iter().map(|one| (one.source, one.table)).collect()
    }
}

impl BySource {
    /// Whether a route stays in the main table.
    pub fn stays(&self, route: &Route) -> bool {
        self.table.is_some() || is_link_local(route.destination) || (self.hints && route.gateway.is_none())
    }
}

/// Neighbours and routers of an IPv6 link are reached through its link-local addresses, which have no rule.
fn is_link_local(destination: IpNet) -> bool {
    matches!(destination, IpNet::V6(net) if net.addr().is_unicast_link_local())
}
