//! Policies between three pods on one parent and a host beyond it, and which connections they allow.

use std::net::SocketAddr;

use netattach_tests::manifest::policy;
use serde_json::{Value, json};

/// Host numbers on the network 10.52.0.0/24, in the order of the ADDs; [`OUTSIDE`] is beyond the parent.
pub(super) const SERVER: u8 = 2;
pub(super) const CLIENT: u8 = 3;
pub(super) const OTHER: u8 = 4;
pub(super) const OUTSIDE: u8 = 9;

pub(super) fn at(host: u8, port: u16) -> SocketAddr {
    format!("10.52.0.{host}:{port}").parse().unwrap()
}

/// Manifests by name: the server accepts connections from client and outside to TCP port 80 only; the other pod may
/// reach only the client.
pub(super) fn policies() -> [(&'static str, Value); 2] {
    let ingress = json!({
        "podSelector": {"matchLabels": {"app": "server"}},
        "policyTypes": ["Ingress"],
        "ingress": [{
            "from": [
                {"podSelector": {"matchLabels": {"app": "client"}}},
                {"ipBlock": {"cidr": format!("10.52.0.{OUTSIDE}/32")}}
            ],
            "ports": [{"protocol": "TCP", "port": 80}]
        }]
    });
    let egress = json!({
        "podSelector": {"matchLabels": {"app": "other"}},
        "policyTypes": ["Egress"],
        "egress": [{"to": [{"podSelector": {"matchLabels": {"app": "client"}}}]}]
    });
    [("policy-server", policy("server", "lan", &ingress)), ("policy-other", policy("other", "lan", &egress))]
}

/// Whether [`policies`] allow a connection to that port, by TCP or UDP.
pub(super) fn is_allowed(from: u8, to: u8, port: u16, tcp: bool) -> bool {
    let accepted = to != SERVER || (tcp && port == 80 && (from == CLIENT || from == OUTSIDE));
    accepted && (from != OTHER || to == CLIENT)
}
