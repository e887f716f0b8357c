//! Draws the graph as SVG: pods on the left, each with a row for each of its attachments; networks on the right; a
//! line from the row to the network. Plain shapes and text; nothing is loaded from elsewhere. All letters have the
//! same width, so that the room in a box is known; wider text (other scripts) is cut off at the edge of its box.

use super::{Drawn, Link, isolation};
use crate::cli::table::cut;

const MARGIN: usize = 20;
/// Space between boxes.
const GAP: usize = 12;
/// Height of a pod's name, and of a row below it.
const HEAD: usize = 26;
const ROW: usize = 18;
/// Height of a network.
const NETWORK: usize = 44;
/// Width of a pod and of a network, and the horizontal position of networks.
const POD_WIDTH: usize = 480;
const NETWORK_WIDTH: usize = 300;
const RIGHT: usize = 780;
/// Number of characters that fit into the boxes, in the two sizes of text.
const POD_NAME: usize = 62;
const POD_ROW: usize = 68;
const NETWORK_NAME: usize = 38;
const NETWORK_KINDS: usize = 41;

const INK: &str = "#263238";
const GREY: &str = "#607d8b";
const RED: &str = "#b71c1c";

/// Positions: tops of pods and networks, the middle of each link's row, and the height of the whole.
struct Layout {
    pods: Vec<usize>,
    networks: Vec<usize>,
    rows: Vec<usize>,
    height: usize,
}

impl Layout {
    fn of(drawn: &Drawn) -> Self {
        let mut links = vec![0; drawn.pods.len()];
        let places: Vec<usize> = drawn
            .links
            .iter()
            .map(|link| {
                links[link.pod] += 1;
                links[link.pod] - 1
            })
            .collect();
        let mut pods = Vec::with_capacity(links.len());
        let mut bottom = MARGIN;
        for count in &links {
            pods.push(bottom);
            bottom += pod_height(*count) + GAP;
        }
        let rows: Vec<usize> = drawn
            .links
            .iter()
            .zip(&places)
            .map(|(link, place)| pods[link.pod] + HEAD + place * ROW + ROW / 2 - 3)
            .collect();
        let height = bottom.max(MARGIN + drawn.networks.len() * (NETWORK + GAP));
        Self { networks: networks(drawn, &rows, height), pods, rows, height }
    }
}

fn pod_height(links: usize) -> usize {
    HEAD + links * ROW + 4
}

/// Returns the tops of networks, distributed over the whole height: a network whose pods are further up is above
/// others, so that fewer lines cross.
fn networks(drawn: &Drawn, rows: &[usize], height: usize) -> Vec<usize> {
    let count = drawn.networks.len();
    let mut sums = vec![(0, 0); count];
    for (link, row) in drawn.links.iter().zip(rows) {
        let (sum, links) = &mut sums[link.network];
        (*sum, *links) = (*sum + row, *links + 1);
    }
    let mut order: Vec<usize> = (0..count).collect();
    order.sort_by_key(|at| sums[*at].0 / sums[*at].1.max(1));
    let each = (height - MARGIN) / count.max(1);
    let mut tops = vec![0; count];
    for (place, at) in order.into_iter().enumerate() {
        tops[at] = MARGIN + place * each + (each - NETWORK - GAP) / 2;
    }
    tops
}

pub(super) fn render(drawn: &Drawn) -> String {
    let layout = Layout::of(drawn);
    let (width, height) = (RIGHT + NETWORK_WIDTH + MARGIN, layout.height + 2 * MARGIN);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" \
         font-family=\"DejaVu Sans Mono, Consolas, Menlo, monospace\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n"
    );
    for (link, row) in drawn.links.iter().zip(&layout.rows) {
        svg.push_str(&line(drawn, link, *row, layout.networks[link.network] + NETWORK / 2));
    }
    for (at, (pod, top)) in drawn.pods.iter().zip(&layout.pods).enumerate() {
        let links: Vec<&Link> = drawn.links.iter().filter(|link| link.pod == at).collect();
        let mut inside = text(10, 18, INK, 12, &cut(&pod.pod, POD_NAME), true);
        for (place, link) in links.iter().enumerate() {
            let (said, y) = (cut(&row(link), POD_ROW), HEAD + place * ROW + 11);
            inside.push_str(&text(10, y, colour(link), 11, &said, false));
        }
        let whole = format!("{} ({})", pod.pod, pod.container_id);
        let place = Place { x: MARGIN, y: *top, width: POD_WIDTH, height: pod_height(links.len()) };
        svg.push_str(&place.card("#e3f2fd", &whole, &inside));
    }
    for (network, top) in drawn.networks.iter().zip(&layout.networks) {
        let kinds = network.kinds.iter().cloned().collect::<Vec<_>>().join(", ");
        let inside = text(10, 18, INK, 12, &cut(&network.network, NETWORK_NAME), true)
            + &text(10, 34, GREY, 11, &cut(&kinds, NETWORK_KINDS), false);
        let place = Place { x: RIGHT, y: *top, width: NETWORK_WIDTH, height: NETWORK };
        svg.push_str(&place.card("#e8f5e9", &format!("{} ({kinds})", network.network), &inside));
    }
    let legend =
        "red: isolated by a policy; dashed: not enforced; point at a line for all addresses and policies";
    let legend = match drawn.left_out {
        0 => legend.to_owned(),
        more => format!("{more} more pods are not shown; {legend}"),
    };
    svg.push_str(&text(MARGIN, height - MARGIN, GREY, 11, &legend, false));
    svg + "</svg>\n"
}

/// Returns the text of a row: interface, first address, and the policies that isolate the link.
fn row(link: &Link) -> String {
    let addresses = match link.addresses.as_slice() {
        [] => String::new(),
        [one] => format!(" {one}"),
        [one, more @ ..] => format!(" {one} +{}", more.len()),
    };
    format!("{}{addresses}{}", link.ifname, isolation(link))
}

fn colour(link: &Link) -> &'static str {
    if link.ingress || link.egress { RED } else { GREY }
}

/// Draws the line from a pod's row to the network.
fn line(drawn: &Drawn, link: &Link, from: usize, to: usize) -> String {
    let dash = if link.enforcement == "none" { " stroke-dasharray=\"3 4\"" } else { "" };
    let (left, right) = (MARGIN + POD_WIDTH, RIGHT);
    let half = (right - left) / 2;
    let whole = format!(
        "{} {}: {}{}; enforced: {}",
        drawn.pods[link.pod].pod,
        link.ifname,
        link.addresses.join(", "),
        isolation(link),
        link.enforcement
    );
    format!(
        "<path d=\"M{left} {from} C{} {from} {} {to} {right} {to}\" fill=\"none\" stroke=\"{}\" stroke-width=\"1.5\"{dash}>\
         <title>{}</title></path>\n",
        left + half,
        right - half,
        colour(link),
        escaped(&whole)
    )
}

fn text(x: usize, y: usize, colour: &str, size: usize, text: &str, is_bold: bool) -> String {
    let weight = if is_bold { " font-weight=\"bold\"" } else { "" };
    let text = escaped(text);
    format!("<text x=\"{x}\" y=\"{y}\" fill=\"{colour}\" font-size=\"{size}\"{weight}>{text}</text>\n")
}

struct Place {
    x: usize,
    y: usize,
    width: usize,
    height: usize,
}

impl Place {
    /// Draws a box with a tooltip (`whole`). Its content is cut off at its edge.
    fn card(&self, fill: &str, whole: &str, inside: &str) -> String {
        let Self { x, y, width, height } = self;
        format!(
            "<svg x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\"><title>{}</title>\
             <rect x=\"0.5\" y=\"0.5\" width=\"{}\" height=\"{}\" rx=\"5\" fill=\"{fill}\" stroke=\"#90a4ae\"/>\n\
             {inside}</svg>\n",
            escaped(whole),
            width - 1,
            height - 1
        )
    }
}

/// Escapes text for XML, without characters that XML does not allow.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for sign in text.chars() {
        match sign {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            sign if sign.is_control() || ('\u{fffe}'..='\u{ffff}').contains(&sign) => {}
            sign => escaped.push(sign),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::super::tests::scene;
    use super::super::{NetworkNode, PodNode};
    use super::*;
    use crate::cli::tests::same_file;

    /// Whether opening and closing tags match.
    fn is_well_formed(svg: &str) -> bool {
        let mut open = Vec::new();
        for tag in svg.split('<').skip(1) {
            let Some((tag, _)) = tag.split_once('>') else { return false };
            let name = tag.trim_start_matches('/').split([' ', '/']).next().unwrap_or_default();
            match (tag.starts_with('/'), tag.ends_with('/')) {
                (true, _) if open.pop() != Some(name) => return false,
                (false, false) => open.push(name),
                _ => {}
            }
        }
        open.is_empty()
    }

    #[test]
    fn every_pod_network_and_link_is_drawn_within_the_picture() {
        for pods in [1, 2, 200] {
            let drawn = scene(pods);
            let svg = render(&drawn);
            assert!(is_well_formed(&svg), "{svg}");
            assert_eq!(svg.matches("<path ").count(), drawn.links.len());
            assert_eq!(svg.matches("<svg x=").count(), drawn.pods.len() + drawn.networks.len());
            assert_eq!(svg.matches(RED).count(), 2, "one link is isolated: its line and its row");
        }
    }

    /// The pods of docs/policies.md and two more, as docs/graph.svg shows them.
    #[test]
    fn the_picture_in_the_documents_is_drawn_so() {
        let rows = [
            (0, 0, "eth0", "10.210.0.2/24", "", "full"),
            (0, 1, "net1", "10.211.0.2/32", "shop/cart shop/deny", "full"),
            (1, 0, "eth0", "10.210.0.3/24", "", "full"),
            (1, 1, "net1", "10.211.0.3/32", "shop/db shop/deny", "full"),
            (2, 0, "eth0", "10.210.0.4/24", "", "full"),
            (2, 1, "net1", "10.211.0.4/32", "shop/deny shop/web", "full"),
            (2, 2, "lan0", "10.20.0.150/24", "", "full-unless-privileged"),
            (3, 0, "eth0", "10.210.0.5/24", "", "full"),
            (3, 3, "net1", "10.40.0.2/24", "", "none"),
        ];
        let link =
            |(pod, network, ifname, address, policies, enforcement): (_, _, &str, &str, &str, &str)| Link {
                pod,
                network,
                ifname: ifname.to_owned(),
                addresses: vec![address.to_owned()],
                policies: policies.split_whitespace().map(str::to_owned).collect(),
                ingress: !policies.is_empty(),
                egress: policies.contains("cart"),
                enforcement: enforcement.to_owned(),
            };
        let pod = |name: &str| PodNode { pod: format!("shop/{name}"), container_id: name.to_owned() };
        let network = |(network, kind): (&str, &str)| NetworkNode {
            network: network.to_owned(),
            kinds: [kind.to_owned()].into(),
        };
        let networks = [
            ("kube-system/default", "bridge"),
            ("shop/storage", "veth"),
            ("shop/lan", "macvlan"),
            ("shop/fast", "exec:sriov"),
        ];
        let drawn = Drawn {
            networks: networks.map(network).into(),
            pods: ["cart", "db", "web", "probe"].map(pod).into(),
            links: rows.map(link).into(),
            left_out: 0,
        };
        same_file("../docs/graph.svg", &render(&drawn));
    }

    /// Boxes of one side are below each other, and within the picture.
    #[test]
    fn no_box_covers_another() {
        let networks_of_each = [(0, 0), (1, 1), (3, 64), (200, 1), (200, 64), (200, 65)];
        for (pods, networks) in networks_of_each {
            let drawn = net(pods, networks);
            let layout = Layout::of(&drawn);
            let pods = layout.pods.iter().map(|top| (*top, *top + pod_height(networks)));
            let mut tops: Vec<usize> = layout.networks.clone();
            tops.sort_unstable();
            let networks = tops.into_iter().map(|top| (top, top + NETWORK));
            for boxes in [pods.collect::<Vec<_>>(), networks.collect()] {
                assert!(boxes.windows(2).all(|pair| pair[0].1 < pair[1].0), "{boxes:?}");
                assert!(boxes.last().is_none_or(|last| last.1 <= layout.height), "{boxes:?}");
            }
        }
    }

    /// Every pod in every network, all with the longest names.
    fn net(pods: usize, networks: usize) -> Drawn {
        let long = |kind: &str, at: usize| format!("{}/{kind}{at}{}", "n".repeat(63), "m".repeat(180));
        let links = (0..pods * networks).map(|at| Link {
            pod: at / networks,
            network: at % networks,
            ifname: format!("net{at}"),
            addresses: vec!["2001:db8:1111:2222:3333:4444:5555:6666/128".to_owned(); 3],
            policies: vec![long("policy", at); 5],
            ingress: true,
            egress: at % 2 == 0,
            enforcement: "none".to_owned(),
        });
        Drawn {
            links: links.collect(),
            pods: (0..pods)
                .map(|at| PodNode { pod: long("pod", at), container_id: "f".repeat(64) })
                .collect(),
            networks: (0..networks)
                .map(|at| NetworkNode { network: long("net", at), kinds: [long("exec:", at)].into() })
                .collect(),
            left_out: 0,
        }
    }

    /// In the widest of the fonts, the width of a letter is 0.61 of its size.
    #[test]
    fn names_are_cut_to_what_boxes_have_room_for() {
        for (characters, size, width) in [
            (POD_NAME, 12, POD_WIDTH),
            (POD_ROW, 11, POD_WIDTH),
            (NETWORK_NAME, 12, NETWORK_WIDTH),
            (NETWORK_KINDS, 11, NETWORK_WIDTH),
        ] {
            assert!(10 + characters * size * 61 / 100 < width, "{characters}");
        }
        let svg = render(&net(2, 2));
        let shown = svg.split("<text ").skip(1).filter_map(|text| text.split('>').nth(1));
        assert!(
            shown.map(|text| text.trim_end_matches("</text").chars().count()).all(|it| it < 120),
            "{svg}"
        );
    }

    #[test]
    fn what_others_write_stays_text() {
        let mut drawn = scene(1);
        let hostile = "<script>\"x\"&'\u{7}";
        drawn.pods[0].pod = hostile.into();
        drawn.networks[0].network = format!("]]>--><!-- {hostile}");
        drawn.networks[0].kinds = [format!("exec:{hostile}")].into();
        drawn.links[0].ifname = hostile.into();
        drawn.links[0].policies = vec![format!("shop/{hostile}")];
        let svg = render(&drawn);
        assert!(is_well_formed(&svg) && !svg.contains("<script"), "{svg}");
        assert!(svg.contains("&lt;script&gt;&quot;x&quot;&amp;&#39;"));
    }
}
