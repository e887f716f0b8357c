//! `netattachctl policy` and `policy dump`: policies in force, and their compiled form.

use std::collections::BTreeSet;
use std::path::Path;

use clap::{Args, Subcommand};

use super::attach::WordsError;
use super::filter::{Filter, line_name};
use super::missing::list;
use super::output::Format;
use super::table::{self, Align, Column, Width};
use super::{Answer, CliError, ask, name_cells, or_dash, other};
use crate::objects::ObjectName;
use crate::rpc::message::dump::{Dump, Use};
use crate::rpc::message::{AttachmentPolicy, Condition, PolicyReport, Request, Response, RuleFlows};

/// What to show of policies.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(super) struct Policy {
    #[command(flatten)]
    filter: Filter,
    #[command(subcommand)]
    form: Option<Form>,
}

#[derive(Debug, Subcommand)]
enum Form {
    /// Show policies as they are in the kernel's maps
    Dump {
        /// Only the policy of this number in the maps, or policies with rules of this object
        #[arg(value_name = "NUMBER|NAMESPACE/NAME")]
        name: Option<String>,
    },
}

impl Policy {
    fn request(&self) -> Result<Request, WordsError> {
        match &self.form {
            None => Ok(Request::Policy),
            Some(Form::Dump { name }) => {
                let wrong = name.as_ref().filter(|name| !is_policy(name));
                wrong.map_or(Ok(Request::PolicyDump(name.clone())), |name| {
                    Err(WordsError::Policy(name.clone()))
                })
            }
        }
    }

    pub(super) fn filter(&self) -> &Filter {
        &self.filter
    }

    /// Whether the compiled form is requested.
    pub(super) fn is_dump(&self) -> bool {
        self.form.is_some()
    }

    pub(super) fn run(&self, socket: &Path, format: Format) -> Result<Answer, CliError> {
        let request = self.request()?;
        let chosen = self.filter.choose(socket)?;
        match ask(socket, &request)? {
            Response::PolicyDump(dumps) => {
                let found = self.found(&dumps, socket)?;
                Ok((format.show(&dumps, |width| render_dumps(&dumps, width))?, found))
            }
            Response::Policy(mut report) => {
                let found = chosen.found(report.attachments.iter().map(|row| &row.name));
                report.attachments = chosen.retain(report.attachments, |row| &row.name);
                let names = report.attachments.iter().map(|row| line_name(&row.name));
                let text = |width| match &found {
                    Ok(()) => render(&report, self.filter.nothing(), width),
                    // The request was for attachments that do not exist, so rules and problems are not shown.
                    Err(_) => String::new(),
                };
                Ok((format.list(&report, names, text)?, found))
            }
            _ => other(&request),
        }
    }

    /// Returns an error that lists the existing policies if the requested policy is not in the maps.
    fn found(&self, dumps: &[Dump], socket: &Path) -> Result<Result<(), CliError>, CliError> {
        let Some(Form::Dump { name: Some(name) }) = &self.form else { return Ok(Ok(())) };
        if !dumps.is_empty() {
            return Ok(Ok(()));
        }
        let Response::Policy(report) = ask(socket, &Request::Policy)? else { return other(&Request::Policy) };
        Ok(Err(CliError::NotFound(format!("there is no policy {name} in the maps; {}", present(&report)))))
    }
}

/// The policy numbers and objects that `dump` accepts.
fn present(report: &PolicyReport) -> String {
    let rows = &report.attachments;
    let numbers: BTreeSet<u32> = rows.iter().flat_map(|row| [row.ingress, row.egress]).flatten().collect();
    let in_force = rows.iter().filter(|row| row.ingress.is_some() || row.egress.is_some());
    let objects: BTreeSet<&str> = in_force.flat_map(|row| &row.selected_by).map(String::as_str).collect();
    if numbers.is_empty() {
        return "no policy isolates an attachment of this node".to_owned();
    }
    let numbers = list(numbers.iter().map(ToString::to_string));
    format!("the maps have {numbers}, of {}", list(objects))
}

/// A number, or `[networkpolicy ]namespace/name`.
fn is_policy(name: &str) -> bool {
    let object = name.strip_prefix("networkpolicy ").unwrap_or(name);
    name.parse::<u32>().is_ok() || object.parse::<ObjectName>().is_ok()
}

/// Compiled policies: for each a heading with its attachments, then rules, peers and ports.
fn render_dumps(dumps: &[Dump], width: Width) -> String {
    dumps.iter().map(|dump| render_dump(dump, width)).collect::<Vec<_>>().join("\n")
}

fn render_dump(dump: &Dump, width: Width) -> String {
    let way = |used: &Use| match (used.ingress, used.egress) {
        (true, true) => format!("{} both ways", used.attachment),
        (true, false) => format!("{} ingress", used.attachment),
        (false, _) => format!("{} egress", used.attachment),
    };
    let attachments = or_dash(
        Some(dump.attachments.iter().map(way).collect::<Vec<_>>().join(", ")).filter(|it| !it.is_empty()),
    );
    let heading = format!("policy {}, attachments {attachments}\n", dump.policy);
    let mut text = table::sentences(&heading, width);
    let rules: Vec<_> = dump.rules.iter().map(|rule| [rule.rule.to_string(), rule.from.clone()]).collect();
    let peers: Vec<_> =
        dump.peers.iter().map(|peer| [peer.net.to_string(), peer.class.to_string()]).collect();
    let ports: Vec<_> = dump
        .ports
        .iter()
        .map(|port| [port.class.to_string(), port.traffic.clone(), port.rule.to_string()])
        .collect();
    if !rules.is_empty() {
        text.push_str(&table::render([("RULE", Align::Right), ("FROM", Align::Left)], &rules));
    }
    if !peers.is_empty() {
        text.push_str(&table::render([("PEER", Align::Left), ("CLASS", Align::Right)], &peers));
    }
    if !ports.is_empty() {
        let columns = [("CLASS", Align::Right), ("TRAFFIC", Align::Left), ("RULE", Align::Right)];
        text.push_str(&table::render(columns, &ports));
    }
    if dump.left_out > 0 {
        text.push_str(&format!("{} more entries are in the maps\n", dump.left_out));
    }
    text
}

/// The table of attachments, or `nothing` if there are none, then the problems, if any.
fn render(report: &PolicyReport, nothing: &str, width: Width) -> String {
    let mut text = match report.attachments.as_slice() {
        [] => nothing.to_owned(),
        rows => {
            let columns = [
                Column::new("POD", Align::Left),
                Column::new("NETWORK", Align::Left),
                Column::new("INTERFACE", Align::Left),
                Column::new("INGRESS", Align::Right),
                Column::new("EGRESS", Align::Right),
                Column::new("ENFORCED", Align::Left),
                Column::new("SELECTED-BY", Align::Left),
            ];
            table::of_columns(columns, &rows.iter().map(row).collect::<Vec<_>>(), width)
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

/// A table of rules and the flows that they allowed.
fn rules(rules: &[RuleFlows]) -> String {
    let columns =
        [("POLICY", Align::Right), ("RULE", Align::Right), ("FLOWS", Align::Right), ("FROM", Align::Left)];
    let row = |rule: &RuleFlows| {
        [rule.policy.to_string(), rule.rule.to_string(), rule.flows.to_string(), rule.text.clone()]
    };
    table::render(columns, &rules.iter().map(row).collect::<Vec<_>>())
}

/// A table of objects and their problems.
pub(super) fn problems(conditions: &[Condition]) -> String {
    let rows: Vec<_> = conditions.iter().map(|c| [c.object.clone(), c.problem.clone()]).collect();
    table::render([("OBJECT", Align::Left), ("PROBLEM", Align::Prose)], &rows)
}

fn row(policy: &AttachmentPolicy) -> [String; 7] {
    let [pod, network, ifname] = name_cells(&policy.name);
    let selected_by = Some(policy.selected_by.join(",")).filter(|text| !text.is_empty());
    let enforced = policy.enforcement.to_string();
    [pod, network, ifname, or_dash(policy.ingress), or_dash(policy.egress), enforced, or_dash(selected_by)]
}

#[cfg(test)]
mod tests {
    use super::super::tests::name;
    use super::*;
    use crate::rpc::message::Level;

    #[test]
    fn attachments_come_before_problems() {
        let report = PolicyReport {
            attachments: vec![
                AttachmentPolicy {
                    name: name(1, "shop/cart-0", "shop/storage", "net1"),
                    ingress: Some(12),
                    egress: None,
                    enforcement: Level::Full,
                    selected_by: vec!["shop/db".to_owned(), "shop/deny".to_owned()],
                },
                AttachmentPolicy {
                    name: name(2, "shop/cart-1", "shop/storage", "net1"),
                    ingress: None,
                    egress: None,
                    enforcement: Level::Full,
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
            render(&report, "nothing", Width::Limited),
            "\
POD          NETWORK       INTERFACE  INGRESS  EGRESS  ENFORCED  SELECTED-BY
shop/cart-0  shop/storage  net1            12       -  full      shop/db,shop/deny
shop/cart-1  shop/storage  net1             -       -  full      -

POLICY  RULE  FLOWS  FROM
    12     1      5  shop/db ingress[0]

OBJECT                      PROBLEM
MultiNetworkPolicy shop/db  network shop/typo does not exist
"
        );
    }

    #[test]
    fn a_dump_shows_rules_peers_and_ports() {
        use crate::rpc::message::dump::{Peer, Port, Rule};
        let dump = Dump {
            policy: 7,
            attachments: vec![
                Use { attachment: 3, ingress: true, egress: false },
                Use { attachment: 4, ingress: true, egress: true },
            ],
            rules: vec![Rule { rule: 1, from: "shop/db ingress[0]".to_owned() }],
            peers: vec![Peer { net: "10.0.0.0/8".parse().unwrap(), class: 2 }],
            ports: vec![Port { class: 2, traffic: "tcp/80".to_owned(), rule: 1 }],
            left_out: 5,
        };
        assert_eq!(
            render_dumps(&[dump], Width::Limited),
            "\
policy 7, attachments 3 ingress, 4 both ways
RULE  FROM
   1  shop/db ingress[0]
PEER        CLASS
10.0.0.0/8      2
CLASS  TRAFFIC  RULE
    2  tcp/80      1
5 more entries are in the maps
"
        );
    }

    #[test]
    fn an_unknown_policy_is_reported_with_the_existing_ones() {
        let row = |ingress, egress, selected_by: &[&str]| AttachmentPolicy {
            name: name(1, "shop/cart", "shop/lan", "net1"),
            ingress,
            egress,
            enforcement: Level::Full,
            selected_by: selected_by.iter().map(|name| (*name).to_owned()).collect(),
        };
        let report = PolicyReport {
            attachments: vec![
                row(Some(12), Some(7), &["shop/db", "shop/deny"]),
                row(Some(7), None, &["shop/deny"]),
                row(None, None, &["shop/nowhere"]),
            ],
            ..PolicyReport::default()
        };
        assert_eq!(present(&report), "the maps have 7, 12, of shop/db, shop/deny");
        assert_eq!(present(&PolicyReport::default()), "no policy isolates an attachment of this node");
        for (name, expected) in
            [("7", true), ("shop/db", true), ("networkpolicy shop/db", true), ("db", false), ("", false)]
        {
            assert_eq!(is_policy(name), expected, "{name}");
        }
    }

    #[test]
    fn problems_are_shown_without_attachments_too() {
        let report = PolicyReport {
            attachments: vec![],
            rules: vec![],
            conditions: vec![Condition { object: "a".to_owned(), problem: "b".to_owned() }],
        };
        assert_eq!(render(&report, "nothing\n", Width::Limited), "nothing\n\nOBJECT  PROBLEM\na       b\n");
    }
}
