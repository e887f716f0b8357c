//! The figures as a table, and compared with their limits.

use std::fmt::Write;

use super::kind::{SIDES, Side};
use super::{Figures, Report};
use crate::attach::parts;
use crate::limit::{self, Limit};
use crate::{Series, document};

/// Maximum ratio of an ADD, and of its part in the agent, to its floor.
const TO_FLOOR: f64 = 3.0;

/// Returns the limits. Each figure is the better end of its interval: if even that is beyond the limit, the limit is
/// missed, whatever else the machine did.
pub(super) fn limits(figures: &[Figures]) -> Vec<Limit> {
    let mut limits = Vec::new();
    for figures in figures {
        let name = figures.kind.name();
        if figures.kind.is_link() {
            let [low, _] = figures.to_floor().interval();
            limits.push(Limit::new(format!("`{name}`: ADD, to its floor"), low, TO_FLOOR, "times"));
            let [low, _] = figures.within.ratios(&figures.floor).interval();
            limits.push(Limit::new(
                format!("`{name}`: the agent's part, to its floor"),
                low,
                TO_FLOOR,
                "times",
            ));
        }
        if let Some(reference) = &figures.reference {
            let [low, _] = figures.agent.ratios(reference).interval();
            let most = 1.0 / figures.kind.faster();
            limits.push(Limit::new(format!("`{name}`: ADD, to the reference's"), low, most, "times"));
        }
    }
    limits
}

/// Returns the table, its explanation, the limits, and the parts of the times that are beyond their limits.
pub(in crate::attach) fn table(report: &Report) -> String {
    let header = [
        "",
        "floor",
        "netattach",
        "to floor",
        "95 %",
        "agent",
        "to floor",
        "netattach-cni",
        "to floor",
        "reference",
        "to netattach",
        "95 %",
        "to netattach-cni",
    ];
    let rows: Vec<Vec<String>> = report.kinds.iter().map(row).collect();
    let place = if report.emulated { "In an emulated machine: " } else { "" };
    let mut text = document::aligned(&header, &rows);
    let _ = writeln!(
        text,
        "\nMilliseconds of the ADD of a pod with one interface, medians of {}, in turns whose order alternates; medians of the \
         ratios of each round, and between which values those lie with 95 % probability. {place}{}.\n",
        report.rounds, report.origin
    );
    for side in SIDES {
        let _ = writeln!(text, "- {}: {}", side.name(), side.description());
        if side == Side::Agent {
            let _ = writeln!(text, "- agent: the part of that within the agent, as it logs it");
        }
    }
    for left_out in &report.left_out {
        let _ = writeln!(text, "- left out: `{}`: {}", left_out.kind, left_out.why);
    }
    let _ = write!(text, "\n{}", limit::table(&report.limits));
    let _ = writeln!(text, "\nFound: the better end of the interval of 95 %.\n");
    for figures in report.kinds.iter().filter(|figures| !figures.parts.is_empty()) {
        let _ = write!(text, "`{}`. {}", figures.kind.name(), parts::table(&figures.parts));
    }
    text
}

fn row(figures: &Figures) -> Vec<String> {
    let median = |series: &Series| format!("{:.2}", series.median);
    let between = |series: &Series| {
        let [low, high] = series.interval();
        format!("{low:.2} to {high:.2}")
    };
    let Figures { kind, floor, agent, within, executable, reference, .. } = figures;
    let to_floor = figures.to_floor();
    let mut row = vec![
        kind.name().to_owned(),
        median(floor),
        median(agent),
        median(&to_floor),
        between(&to_floor),
        median(within),
        median(&within.ratios(floor)),
        median(executable),
        median(&executable.ratios(floor)),
    ];
    match reference {
        Some(reference) => {
            let faster = reference.ratios(agent);
            let executed = median(&reference.ratios(executable));
            row.extend([median(reference), median(&faster), between(&faster), executed]);
        }
        None => row.extend(["-"; 4].map(str::to_owned)),
    }
    row
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::kind::Kind;
    use super::*;

    pub(in crate::attach::kinds) fn figures(kind: Kind, agent: f64, reference: Option<f64>) -> Figures {
        let one = |figure: f64| Series::new(vec![figure]);
        Figures {
            kind,
            floor: one(1.0),
            agent: one(agent),
            within: one(agent / 2.0),
            executable: one(4.0),
            reference: reference.map(one),
            parts: Vec::new(),
        }
    }

    #[test]
    fn what_is_limited_depends_on_the_kind() {
        let found = [
            figures(Kind::Masqueraded, 2.0, Some(32.0)),
            figures(Kind::Veth, 4.0, None),
            figures(Kind::Loopback, 4.0, Some(8.0)),
        ];
        let expected = [
            Limit::new("`bridge, ipMasq`: ADD, to its floor", 2.0, 3.0, "times"),
            Limit::new("`bridge, ipMasq`: the agent's part, to its floor", 1.0, 3.0, "times"),
            Limit::new("`bridge, ipMasq`: ADD, to the reference's", 0.0625, 0.125, "times"),
            Limit::new("`veth`: ADD, to its floor", 4.0, 3.0, "times"),
            Limit::new("`veth`: the agent's part, to its floor", 2.0, 3.0, "times"),
            Limit::new("`loopback`: ADD, to the reference's", 0.5, 0.25, "times"),
        ];
        assert_eq!(limits(&found), expected);
    }

    #[test]
    fn a_kind_without_a_reference_has_dashes() {
        let cells = ["veth", "1.00", "2.00", "2.00", "2.00 to 2.00", "1.00", "1.00", "4.00", "4.00"];
        let dashes = ["-"; 4];
        assert_eq!(row(&figures(Kind::Veth, 2.0, None)), [&cells[..], &dashes].concat());
        let cells = [&cells[1..], &["8.00", "4.00", "4.00 to 4.00", "2.00"]].concat();
        assert_eq!(row(&figures(Kind::Ptp, 2.0, Some(8.0)))[1..], cells);
    }
}
