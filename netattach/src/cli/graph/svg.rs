//! The graph as SVG: pods on the left, networks on the right, a line for each attachment. Plain shapes and text, nothing that
//! is loaded from elsewhere.

use super::{Drawn, isolation};

/// Height of a pod or network with the space below it, in pixels.
const ROW: usize = 44;
/// Width of a box.
const BOX: usize = 300;
/// Where networks begin.
const RIGHT: usize = 760;
const MARGIN: usize = 20;
/// Characters of a name that a box has room for.
const NAME: usize = 38;

pub(super) fn render(drawn: &Drawn) -> String {
    let rows = drawn.pods.len().max(drawn.networks.len()).max(1);
    let (width, height) = (RIGHT + BOX + MARGIN, rows * ROW + 2 * MARGIN + ROW);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n"
    );
    let top = |at: usize, count: usize| MARGIN + at * ROW + (rows - count.min(rows)) * ROW / 2;
    let pod_top = |at| top(at, drawn.pods.len());
    let network_top = |at| top(at, drawn.networks.len());
    for link in &drawn.links {
        let (from, to) = (pod_top(link.pod) + ROW / 3, network_top(link.network) + ROW / 3);
        let is_isolated = link.ingress || link.egress;
        let (colour, dash) = match (is_isolated, link.enforcement.as_str()) {
            (true, "none") => ("#c62828", " stroke-dasharray=\"2 3\""),
            (true, _) => ("#c62828", ""),
            (false, _) => ("#78909c", ""),
        };
        let (left, right) = (MARGIN + BOX, RIGHT);
        let half = (right - left) / 2;
        svg.push_str(&format!(
            "<path d=\"M{left} {from} C{} {from} {} {to} {right} {to}\" fill=\"none\" stroke=\"{colour}\"{dash}><title>{}</title></path>\n",
            left + half,
            right - half,
            escaped(&format!(
                "{} {}: {}{}; enforced: {}",
                drawn.pods[link.pod].pod,
                link.ifname,
                link.addresses.join(", "),
                isolation(link),
                link.enforcement
            ))
        ));
        // Beside the pod, where lines of other pods do not run.
        svg.push_str(&format!(
            "<text x=\"{}\" y=\"{}\" fill=\"{colour}\" font-size=\"10\">{}</text>\n",
            left + 6,
            from.saturating_sub(4),
            escaped(&link.ifname)
        ));
    }
    for (at, pod) in drawn.pods.iter().enumerate() {
        svg.push_str(&rectangle(MARGIN, pod_top(at), "#e3f2fd", &pod.pod, &pod.container_id));
    }
    for (at, network) in drawn.networks.iter().enumerate() {
        let kinds = network.kinds.iter().cloned().collect::<Vec<_>>().join(", ");
        svg.push_str(&rectangle(RIGHT, network_top(at), "#e8f5e9", &network.network, &kinds));
    }
    let legend = match drawn.left_out {
        0 => "red: isolated by a policy (dashed: not enforced); hover over a line for addresses and policies"
            .to_owned(),
        more => format!("{more} more pods are not shown; red: isolated by a policy (dashed: not enforced)"),
    };
    svg.push_str(&format!(
        "<text x=\"{MARGIN}\" y=\"{}\" fill=\"#455a64\">{legend}</text>\n</svg>\n",
        height - MARGIN
    ));
    svg
}

fn rectangle(x: usize, y: usize, fill: &str, name: &str, more: &str) -> String {
    let height = ROW - 12;
    let (name, whole) =
        (escaped(&super::super::table::cut(name, NAME)), escaped(&format!("{name} ({more})")));
    format!(
        "<g><title>{whole}</title><rect x=\"{x}\" y=\"{y}\" width=\"{BOX}\" height=\"{height}\" rx=\"5\" fill=\"{fill}\" \
         stroke=\"#90a4ae\"/><text x=\"{}\" y=\"{}\" fill=\"#263238\">{name}</text></g>\n",
        x + 10,
        y + 20
    )
}

/// Text in XML. Characters that XML has no place for are left out.
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
    use super::*;

    /// Opening and closing tags match.
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
            assert_eq!(svg.matches("<g>").count(), drawn.pods.len() + drawn.networks.len());
            assert_eq!(svg.matches("#c62828").count(), 2, "one link is isolated: its line and its name");
        }
    }

    #[test]
    fn what_others_write_stays_text() {
        let mut drawn = scene(1);
        drawn.pods[0].pod = "<script>\"x\"&'\u{7}".into();
        let svg = render(&drawn);
        assert!(is_well_formed(&svg) && !svg.contains("<script"), "{svg}");
        assert!(svg.contains("&lt;script&gt;&quot;x&quot;&amp;&#39;"));
    }
}
