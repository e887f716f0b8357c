//! `netattachctl policy`

use super::table::{self, Align};
use super::{name_cells, or_dash};
use crate::rpc::message::{AttachmentPolicy, Condition, PolicyReport, RuleFlows};

/// The table of attachments, or `nothing` in its place, then what is wrong, if anything is.
pub(super) fn render(report: &PolicyReport, nothing: &str) -> String {
    let mut text = match report.attachments.as_slice() {
        [] => nothing.to_owned(),
        rows => {
            let columns = [
                ("POD", Align::Left),
                ("NETWORK", Align::Left),
                ("INTERFACE", Align::Left),
                ("INGRESS", Align::Right),
                ("EGRESS", Align::Right),
                ("SELECTED-BY", Align::Left),
            ];
            table::render(columns, &rows.iter().map(row).collect::<Vec<_>>())
        }
    };
    if !report.rules.is_empty() {
        text.push('\n');
        text.push_str(&rules(&report.rules));
    }
    if !report.conditions.is_empty() {
        text.push('\n');
        text.push_str(&problems(&report.conditions));
    }
    text
}

/// A table of rules and what they have allowed.
fn rules(rules: &[RuleFlows]) -> String {
    let columns =
        [("POLICY", Align::Right), ("RULE", Align::Right), ("FLOWS", Align::Right), ("FROM", Align::Left)];
    let row = |rule: &RuleFlows| {
        [rule.policy.to_string(), rule.rule.to_string(), rule.flows.to_string(), rule.text.clone()]
    };
    table::render(columns, &rules.iter().map(row).collect::<Vec<_>>())
}

/// A table of objects and what is wrong with them.
pub(super) fn problems(conditions: &[Condition]) -> String {
    let rows: Vec<_> = conditions.iter().map(|c| [c.object.clone(), c.problem.clone()]).collect();
    table::render([("OBJECT", Align::Left), ("PROBLEM", Align::Left)], &rows)
}

fn row(policy: &AttachmentPolicy) -> [String; 6] {
    let [pod, network, ifname] = name_cells(&policy.name);
    let selected_by = Some(policy.selected_by.join(",")).filter(|text| !text.is_empty());
    [pod, network, ifname, or_dash(policy.ingress), or_dash(policy.egress), or_dash(selected_by)]
}

#[cfg(test)]
mod tests {
    use super::super::tests::name;
    use super::*;

    #[test]
    fn attachments_come_before_problems() {
        let report = PolicyReport {
            attachments: vec![
                AttachmentPolicy {
                    name: name(1, "shop/cart-0", "shop/storage", "net1"),
                    ingress: Some(12),
                    egress: None,
                    selected_by: vec!["shop/db".to_owned(), "shop/deny".to_owned()],
                },
                AttachmentPolicy {
                    name: name(2, "shop/cart-1", "shop/storage", "net1"),
                    ingress: None,
                    egress: None,
                    selected_by: vec![],
                },
            ],
            rules: vec![RuleFlows { policy: 12, rule: 1, text: "shop/db ingress[0]".to_owned(), flows: 5 }],
            conditions: vec![Condition {
                object: "MultiNetworkPolicy shop/db".to_owned(),
                problem: "network shop/typo does not exist".to_owned(),
            }],
        };
        assert_eq!(
            render(&report, "nothing"),
            "\
POD          NETWORK       INTERFACE  INGRESS  EGRESS  SELECTED-BY
shop/cart-0  shop/storage  net1            12       -  shop/db,shop/deny
shop/cart-1  shop/storage  net1             -       -  -

POLICY  RULE  FLOWS  FROM
    12     1      5  shop/db ingress[0]

OBJECT                      PROBLEM
MultiNetworkPolicy shop/db  network shop/typo does not exist
"
        );
    }

    #[test]
    fn problems_are_shown_without_attachments_too() {
        let report = PolicyReport {
            attachments: vec![],
            rules: vec![],
            conditions: vec![Condition { object: "a".to_owned(), problem: "b".to_owned() }],
        };
        assert_eq!(render(&report, "nothing\n"), "nothing\n\nOBJECT  PROBLEM\na       b\n");
    }
}
