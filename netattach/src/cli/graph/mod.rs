//! `netattachctl graph`: pods, networks, links and policies as a picture: text, or SVG that a browser opens.
//!
//! `svg` draws. A graph has at most [`MOST_PODS`] pods; of the others only the number is shown.

mod svg;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use clap::{Args, ValueEnum};
use serde::Serialize;

use super::filter::{Chosen, Filter, attachments};
use super::output::Format;
use super::table::{self, Width};
use super::{Answer, CliError, ask, or_dash, other, visible};
use crate::rpc::message::{Attachment, AttachmentPolicy, PolicyReport, Request, Response};

/// Most pods of a graph.
const MOST_PODS: usize = 200;

/// Most characters of a name in the text if its width is limited: half a line.
const NAME: usize = table::MOST_COLUMNS / 2;

/// What to draw.
#[derive(Debug, Args)]
pub(super) struct Graph {
    #[command(flatten)]
    filter: Filter,
    /// The picture
    #[arg(long, value_enum, default_value_t = Picture::Text)]
    picture: Picture,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Picture {
    /// Networks, and below each its pods
    Text,
    /// For a browser: netattachctl graph --picture svg > node.svg
    Svg,
}

/// The graph.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
struct Drawn {
    networks: Vec<NetworkNode>,
    pods: Vec<PodNode>,
    links: Vec<Link>,
    /// How many more pods there are.
    #[serde(skip_serializing_if = "is_zero")]
    left_out: usize,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde asks for it")]
fn is_zero(number: &usize) -> bool {
    *number == 0
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct NetworkNode {
    network: String,
    /// The kinds of its links.
    kinds: BTreeSet<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct PodNode {
    /// Name of the pod, or the container if there is no pod.
    pod: String,
    container_id: String,
}

/// An attachment; pod and network are positions in the lists.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Link {
    pod: usize,
    network: usize,
    ifname: String,
    addresses: Vec<String>,
    /// The policies that isolate it; the directions follow.
    policies: Vec<String>,
    ingress: bool,
    egress: bool,
    enforcement: String,
}

impl Graph {
    pub(super) fn filter(&self) -> &Filter {
        &self.filter
    }

    pub(super) fn run(&self, socket: &Path, format: Format) -> Result<Answer, CliError> {
        let chosen = self.filter.choose(socket)?;
        let rows = attachments(socket)?;
        let found = chosen.found(rows.iter().map(|row| &row.name));
        let Response::Policy(policies) = ask(socket, &Request::Policy)? else {
            return other(&Request::Policy);
        };
        let drawn = draw(&rows, &policies, &chosen);
        let names = drawn.pods.iter().map(|pod| pod.pod.clone());
        let text = |width| match self.picture {
            Picture::Text => text(&drawn, width),
            Picture::Svg => svg::render(&drawn),
        };
        Ok((format.list(&drawn, names, text)?, found))
    }
}

fn draw(rows: &[Attachment], policies: &PolicyReport, chosen: &Chosen) -> Drawn {
    let mut drawn = Drawn::default();
    let mut networks: BTreeMap<String, usize> = BTreeMap::new();
    let mut pods: BTreeMap<String, usize> = BTreeMap::new();
    let mut left_out = BTreeSet::new();
    for row in rows.iter().filter(|row| chosen.matches(&row.name)) {
        if !pods.contains_key(&row.container_id) && pods.len() == MOST_PODS {
            left_out.insert(&row.container_id);
            continue;
        }
        let pod = *pods.entry(row.container_id.clone()).or_insert_with(|| {
            let name = row.name.pod.as_ref().map_or_else(|| row.container_id.clone(), ToString::to_string);
            drawn.pods.push(PodNode { pod: name, container_id: row.container_id.clone() });
            drawn.pods.len() - 1
        });
        let network = *networks.entry(row.name.network.clone()).or_insert_with(|| {
            drawn.networks.push(NetworkNode { network: row.name.network.clone(), kinds: BTreeSet::new() });
            drawn.networks.len() - 1
        });
        drawn.networks[network].kinds.insert(row.kind.to_string());
        let policy: Option<&AttachmentPolicy> =
            policies.attachments.iter().find(|policy| policy.name == row.name);
        drawn.links.push(Link {
            pod,
            network,
            ifname: row.name.ifname.clone(),
            addresses: row.addresses.iter().map(ToString::to_string).collect(),
            policies: policy.map(|policy| policy.selected_by.clone()).unwrap_or_default(),
            ingress: policy.is_some_and(|policy| policy.ingress.is_some()),
            egress: policy.is_some_and(|policy| policy.egress.is_some()),
            enforcement: row.enforcement.to_string(),
        });
    }
    drawn.left_out = left_out.len();
    drawn
}

/// Renders the networks, and below each its pods.
fn text(drawn: &Drawn, width: Width) -> String {
    let name = |name: &str| match width {
        Width::Limited => table::cut(&visible::inline(name), NAME),
        Width::Unlimited => visible::inline(name),
    };
    let mut text = String::new();
    for (at, network) in drawn.networks.iter().enumerate() {
        let kinds = network.kinds.iter().cloned().collect::<Vec<_>>().join(", ");
        text.push_str(&visible::line(&format!("{} ({kinds})", name(&network.network))));
        let links: Vec<&Link> = drawn.links.iter().filter(|link| link.network == at).collect();
        for (position, link) in links.iter().enumerate() {
            let branch = if position + 1 == links.len() { "└─" } else { "├─" };
            let pod = name(&drawn.pods[link.pod].pod);
            let addresses = or_dash(Some(link.addresses.join(",")).filter(|text| !text.is_empty()));
            let link = format!("{branch} {pod} {} {addresses}{}", link.ifname, isolation(link));
            text.push_str(&visible::line(&link));
        }
        text.push('\n');
    }
    if drawn.left_out > 0 {
        text.push_str(&format!("{} more pods\n", drawn.left_out));
    }
    if drawn.networks.is_empty() {
        text.push_str("No attachments on this node.\n");
    }
    table::sentences(&text, width)
}

/// Returns the policies that isolate a link, as text: empty if there are none.
fn isolation(link: &Link) -> String {
    let directions = match (link.ingress, link.egress) {
        (false, false) => return String::new(),
        (true, false) => "ingress",
        (false, true) => "egress",
        (true, true) => "ingress and egress",
    };
    format!(", {directions} by {}", or_dash(Some(link.policies.join(", ")).filter(|it| !it.is_empty())))
}

#[cfg(test)]
mod tests {
    use super::super::tests::{attachment, is_pinned, name};
    use super::*;
    use crate::rpc::message::Level;

    pub(super) fn scene(pods: usize) -> Drawn {
        let rows: Vec<Attachment> = (0..pods)
            .map(|at| {
                let pod = format!("shop/p{at}");
                let mut row = attachment(name(at as u32 + 1, &pod, "shop/lan", "net1"), &format!("c{at}"));
                row.addresses = vec![format!("10.0.0.{}/24", at % 250).parse().unwrap()];
                row
            })
            .collect();
        let policies = PolicyReport {
            attachments: vec![AttachmentPolicy {
                name: rows[0].name.clone(),
                ingress: Some(3),
                egress: None,
                enforcement: Level::Full,
                selected_by: vec!["shop/web".into()],
            }],
            ..PolicyReport::default()
        };
        draw(&rows, &policies, &Chosen::default())
    }

    #[test]
    fn its_form_for_programs_is_pinned() {
        is_pinned("graph", &Drawn { left_out: 7, ..scene(2) });
    }

    #[test]
    fn text_has_networks_with_their_pods_and_what_isolates_them() {
        assert_eq!(
            text(&scene(2), Width::Limited),
            "shop/lan (veth)\n├─ shop/p0 net1 10.0.0.0/24, ingress by shop/web\n└─ shop/p1 net1 10.0.0.1/24\n\n"
        );
    }

    #[test]
    fn long_names_lose_their_middle_and_policies_go_on_in_the_next_line_unless_the_wide_form_is_asked_for() {
        let mut drawn = scene(1);
        let long = format!("shop/{}", "x".repeat(200));
        drawn.networks[0].network.clone_from(&long);
        drawn.pods[0].pod.clone_from(&long);
        drawn.links[0].policies = vec![format!("shop/{}", "y".repeat(60)); 2];
        let (cut, policy) = (table::cut(&long, NAME), &drawn.links[0].policies[0]);
        assert_eq!(
            text(&drawn, Width::Limited),
            format!("{cut} (veth)\n└─ {cut} net1 10.0.0.0/24, ingress by\n    {policy},\n    {policy}\n\n")
        );
        assert_eq!(
            text(&drawn, Width::Unlimited),
            format!("{long} (veth)\n└─ {long} net1 10.0.0.0/24, ingress by {policy}, {policy}\n\n")
        );
    }

    #[test]
    fn a_graph_ends_somewhere_and_says_so() {
        let drawn = scene(MOST_PODS + 7);
        assert_eq!((drawn.pods.len(), drawn.links.len(), drawn.left_out), (MOST_PODS, MOST_PODS, 7));
        assert!(text(&drawn, Width::Limited).ends_with("7 more pods\n"));
    }
}
