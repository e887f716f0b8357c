//! `netattachctl explain`: why a flow passes or does not.

use std::net::IpAddr;
use std::str::FromStr;

use clap::Args;

use super::output::Format;
use super::{Answer, CliError, ask, other, table, visible};
use crate::npwg::selection::PortProtocol;
use crate::objects::ObjectName;
use crate::objects::policy::Direction;
use crate::plan::ethertypes;
use crate::policy::explain::{Leg, Limit, Missing, Path};
use crate::rpc::message::explain::{Asked, End, Form, Question};
use crate::rpc::message::{self, Request, Response};

/// One flow.
#[derive(Debug, Args)]
pub(super) struct Explain {
    /// The end that opens the flow: a pod or an address
    #[arg(value_name = "NAMESPACE/POD|ADDRESS", value_parser = end)]
    from: End,
    /// The other end: a pod or an address
    #[arg(value_name = "NAMESPACE/POD|ADDRESS", value_parser = end)]
    to: End,
    /// Destination port, TCP if no protocol is given; or a protocol without ports. `/segment` asks about segments of no known
    /// connection, `/fragment` about later fragments; `link` about ARP and neighbour discovery, a number about an ethertype
    #[arg(value_name = "PORT[/PROTOCOL[/segment|/fragment]]|icmp|icmpv6|link|0xETHERTYPE")]
    traffic: Words,
}

/// An argument does not have a valid form.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum InvalidWord {
    #[error("{0:?} is neither NAMESPACE/POD nor an address")]
    End(String),
    #[error(
        "{0:?} is neither PORT, nor PORT/tcp, PORT/udp or PORT/sctp, nor one of these with /segment or /fragment, nor icmp, icmpv6, link or an ethertype as 0x88b5"
    )]
    Traffic(String),
}

#[derive(Debug, Clone, Copy)]
struct Words(Asked);

fn end(text: &str) -> Result<End, InvalidWord> {
    if let Ok(address) = text.parse::<IpAddr>() {
        return Ok(End::Address(address));
    }
    let pod: ObjectName = text.parse().map_err(|_| InvalidWord::End(text.to_owned()))?;
    Ok(End::Pod(pod))
}

impl FromStr for Words {
    type Err = InvalidWord;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || InvalidWord::Traffic(text.to_owned());
        let of = |protocol, form| Ok(Self(Asked { protocol, port: None, form }));
        if let Some(digits) = text.strip_prefix("0x") {
            let number = u16::from_str_radix(digits, 16).ok().filter(|number| ethertypes::is_other(*number));
            return of(0, Form::Ethertype(number.ok_or_else(wrong)?));
        }
        let (text, form) = match text.rsplit_once('/') {
            Some((text, "segment")) => (text, Form::Segment),
            Some((text, "fragment")) => (text, Form::Fragment),
            _ => (text, Form::Opening),
        };
        match (text, form) {
            ("link", Form::Opening) => return of(0, Form::Link),
            ("icmp", Form::Opening | Form::Fragment) => return of(1, form),
            ("icmpv6", Form::Opening | Form::Fragment) => return of(58, form),
            _ => {}
        }
        let (port, protocol) = text.split_once('/').unwrap_or((text, "tcp"));
        let protocol = PortProtocol::from_name(protocol).ok_or_else(wrong)?;
        if form == Form::Segment && protocol == PortProtocol::Udp {
            return Err(wrong());
        }
        // No service listens on port 0.
        let port: u16 = port.parse().ok().filter(|port| *port != 0).ok_or_else(wrong)?;
        Ok(Self(Asked { protocol: protocol.number(), port: Some(port), form }))
    }
}

impl Explain {
    /// Returns the first end that is a pod.
    pub(super) fn pod(&self) -> Option<ObjectName> {
        let pod = |end: &End| match end {
            End::Pod(pod) => Some(pod.clone()),
            End::Address(_) => None,
        };
        pod(&self.from).or_else(|| pod(&self.to))
    }

    pub(super) fn run(&self, socket: &std::path::Path, format: Format) -> Result<Answer, CliError> {
        let request = self.request();
        let Response::Explanation(paths) = ask(socket, &request)? else { return other(&request) };
        let found = found(&paths);
        Ok((format.show(&paths, |width| table::sentences(&render(paths.clone()), width))?, found))
    }

    fn request(&self) -> Request {
        Request::Explain(Question { from: self.from.clone(), to: self.to.clone(), traffic: self.traffic.0 })
    }
}

/// Returns an error if there is no path.
fn found(paths: &[message::Path]) -> Result<(), CliError> {
    if paths.is_empty() {
        let why = "neither end is an enforced attachment of this node, or the ends share no network and address family";
        return Err(CliError::NotFound(why.to_owned()));
    }
    Ok(())
}

/// Formats a paragraph for each path that the flow can take.
fn render(paths: Vec<message::Path>) -> String {
    let lines = paths.into_iter().flat_map(|path| paragraph(&path.into()));
    lines.map(|line| visible::line(&line)).collect()
}

fn paragraph(path: &Path) -> Vec<String> {
    let Path { from, to, traffic, network, .. } = path;
    let on = network.as_ref().map(|network| format!(" on {network}")).unwrap_or_default();
    let verdict = if path.passes() { "passes" } else { "is dropped" };
    let mut lines = vec![format!("{traffic} from {from} to {to}{on} {verdict}")];
    let advice = path.advice();
    for (which, of, leg) in [(Direction::Egress, from, &path.egress), (Direction::Ingress, to, &path.ingress)]
    {
        lines.push(format!("  {which} of {of}: {}", words(leg)));
        let advice = advice.iter().filter(|advice| advice.direction == which);
        lines.extend(advice.map(|advice| format!("    {advice}")));
    }
    if path.translated {
        lines.push(format!(
            "  if the node translates the destination {} (a Service, a hostPort, a NodePort), the result is judged: ask about the pod and the port behind it",
            to.address
        ));
    }
    for Limit { of, enforcement, why } in &path.limits {
        lines.push(format!("  enforcement at {of}: {enforcement} ({why})"));
    }
    lines
}

fn words(leg: &Leg) -> String {
    match leg {
        Leg::NotHere => "not judged on this node".to_owned(),
        Leg::NotIsolated => "allowed: no policy isolates it".to_owned(),
        Leg::Unenforced { selected_by, why } => {
            format!("passes: nothing enforces {} ({why})", selected_by.join(", "))
        }
        Leg::AcceptedIcmp => "allowed: the agent's settings accept ICMP".to_owned(),
        Leg::KeepsLink => "passes: the link needs it, and no policy denies it".to_owned(),
        Leg::Named => "passes: the network's definition names the ethertype".to_owned(),
        Leg::Infrastructure => "dropped: pods may not send what bridges and switches send".to_owned(),
        Leg::NotIp { selected_by } => {
            format!("denied by {}: rules apply to IP only, so none can allow it", selected_by.join(", "))
        }
        Leg::Midstream => "dropped: it belongs to no known connection, and midstream is drop".to_owned(),
        Leg::Allowed { policy, peer, class, rule, by } => {
            format!("allowed by {by} (policy {policy}, {peer} is class {class}, rule {rule})")
        }
        Leg::Denied { policy, selected_by, missing } => {
            let why = match missing {
                Missing::Peer => "no rule names the peer".to_owned(),
                Missing::Excepted(net) => format!("an exception excludes {net}"),
                Missing::Port(rules) => {
                    format!("the rules that name the peer are for other traffic: {}", rules.join("; "))
                }
            };
            format!("denied by {} (policy {policy}): {why}", selected_by.join(", "))
        }
        Leg::OverCapacity { selected_by } => {
            format!("denied: {} does not fit into the kernel's tables", selected_by.join(", "))
        }
        Leg::Unknown { policy } => {
            format!("not known: policy {policy} is an earlier agent's, and the pod has no manifest")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::message::Level;
    use crate::rpc::message::explain::{Leg, Limit, Missing, Named, Path};

    #[test]
    fn a_flow_is_explained_end_by_end() {
        let named = |pod: &str, address: &str| Named {
            pod: Some(ObjectName::new("shop", pod)),
            address: address.parse().unwrap(),
        };
        let path = Path {
            network: Some("shop/storage".to_owned()),
            from: named("cart", "10.89.0.2"),
            to: named("db", "10.89.0.3"),
            traffic: Asked { protocol: 6, port: Some(81), form: Form::Opening },
            egress: Leg::Allowed {
                policy: 3,
                peer: "10.89.0.0/24".parse().unwrap(),
                class: 2,
                rule: 1,
                by: "shop/out egress[0]".to_owned(),
            },
            ingress: Leg::Denied {
                policy: 2,
                selected_by: vec!["shop/db".to_owned(), "shop/deny".to_owned()],
                missing: Missing::Port(vec!["shop/db ingress[0] (tcp/80)".to_owned()]),
            },
            translated: true,
            limits: vec![Limit {
                of: named("cart", "10.89.0.2"),
                enforcement: Level::FullUnlessPrivileged,
                why: "programs run in the pod, and its container app has CAP_NET_RAW".to_owned(),
            }],
        };
        assert_eq!(
            render(vec![path]),
            "\
tcp/81 from shop/cart (10.89.0.2) to shop/db (10.89.0.3) on shop/storage is dropped
  egress of shop/cart (10.89.0.2): allowed by shop/out egress[0] (policy 3, 10.89.0.0/24 is class 2, rule 1)
  ingress of shop/db (10.89.0.3): denied by shop/db, shop/deny (policy 2): the rules that name the peer are for other traffic: shop/db ingress[0] (tcp/80)
    tcp/81 in `ports` of such a rule would allow it, in shop/db or shop/deny or in another policy on shop/db (10.89.0.3)
  if the node translates the destination 10.89.0.3 (a Service, a hostPort, a NodePort), the result is judged: ask about the pod and the port behind it
  enforcement at shop/cart (10.89.0.2): full-unless-privileged (programs run in the pod, and its container app has CAP_NET_RAW)
"
        );
    }

    #[test]
    fn traffic_is_a_port_or_a_protocol_without_ports() {
        let read = |text: &str| text.parse::<Words>().map(|words| (words.0.protocol, words.0.port));
        assert_eq!(read("80"), Ok((6, Some(80))));
        assert_eq!(read("53/UDP"), Ok((17, Some(53))));
        assert_eq!(read("icmpv6"), Ok((58, None)));
        let form =
            |text: &str| text.parse::<Words>().map(|words| (words.0.protocol, words.0.port, words.0.form));
        assert_eq!(form("80/segment"), Ok((6, Some(80), Form::Segment)));
        assert_eq!(form("80/sctp/segment"), Ok((132, Some(80), Form::Segment)));
        assert_eq!(form("53/udp/fragment"), Ok((17, Some(53), Form::Fragment)));
        assert_eq!(form("icmp/fragment"), Ok((1, None, Form::Fragment)));
        assert_eq!(form("link"), Ok((0, None, Form::Link)));
        assert_eq!(form("0x88b5"), Ok((0, None, Form::Ethertype(0x88b5))));
        let wrong = [
            "",
            "tcp",
            "80/gre",
            "0",
            "0/udp",
            "65536",
            "icmp/8",
            "0x0800",
            "0x26",
            "0xq",
            "80/udp/segment",
            "icmp/segment",
        ];
        for wrong in wrong {
            assert_eq!(read(wrong), Err(InvalidWord::Traffic(wrong.to_owned())));
        }
        assert_eq!(end("shop"), Err(InvalidWord::End("shop".to_owned())));
    }
}
