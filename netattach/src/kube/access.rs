//! Finds the rights in the cluster that the agent lacks: asks the server for each right once
//! (`SelfSubjectAccessReview`), and again while one is missing or after a request was refused with 403.

use std::collections::BTreeMap;
use std::time::Duration;

use http::Method;
use serde::Deserialize;
use serde_json::json;
use tokio::sync::Notify;

use super::client::{AccessError, Ask, Client};
use crate::error_chain::Chain;
use crate::source::Warning;
use crate::sync::{Mutex, locked};

/// Timeout of one question, and most bytes of its answer.
const PATIENCE: Duration = Duration::from_secs(5);
const ANSWER: usize = 64 << 10;
/// How often missing rights are asked for again.
const AGAIN: Duration = Duration::from_secs(60);
/// Least time between two rounds, however many requests are refused.
const LEAST: Duration = Duration::from_secs(10);

/// A right, as in a rule of a ClusterRole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Right {
    group: &'static str,
    /// The resource with its subresource.
    resource: &'static str,
    verb: &'static str,
}

/// Features that need rights beyond reading the objects that are always followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Uses {
    pub(super) network_policies: bool,
    pub(super) startup_taint: bool,
    pub(super) eviction: bool,
    pub(super) nodes: bool,
    pub(super) ranges: bool,
}

/// The path of the questions.
const REVIEWS: &str = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";

const NETWORKS_GROUP: &str = "k8s.cni.cncf.io";

/// The rights that the agent needs, in the order of its rules.
fn needed(uses: Uses) -> Vec<Right> {
    let followed = |group, resource| ["list", "watch"].map(|verb| Right { group, resource, verb });
    let mut rights = vec![Right { group: "", resource: "pods", verb: "get" }];
    rights.extend(followed("", "pods"));
    rights.extend(followed("", "namespaces"));
    rights.extend(followed(NETWORKS_GROUP, "network-attachment-definitions"));
    rights.extend(followed(NETWORKS_GROUP, "multi-networkpolicies"));
    if uses.network_policies {
        rights.extend(followed("networking.k8s.io", "networkpolicies"));
    }
    if uses.nodes {
        rights.extend(followed("", "nodes"));
    } else if uses.ranges {
        rights.push(Right { group: "", resource: "nodes", verb: "list" });
    }
    if uses.ranges {
        rights.push(Right { group: "networking.k8s.io", resource: "servicecidrs", verb: "list" });
    }
    rights.push(Right { group: "", resource: "pods/status", verb: "patch" });
    rights.extend(["create", "patch"].map(|verb| Right { group: "events.k8s.io", resource: "events", verb }));
    if uses.startup_taint {
        rights.extend(["get", "patch"].map(|verb| Right { group: "", resource: "nodes", verb }));
    }
    if uses.eviction {
        rights.push(Right { group: "", resource: "pods/eviction", verb: "create" });
    }
    rights
}

/// The missing rights, as far as the server reports them.
#[derive(Debug, Default)]
pub(super) struct Missing {
    rights: Mutex<Vec<Right>>,
    refused: Notify,
}

impl Missing {
    /// Records that a request was refused with 403: rights have changed, or some are missing. Not called
    /// for the question itself, which some servers allow no client.
    pub(super) fn refused(&self, target: &str) {
        if target != REVIEWS {
            self.refused.notify_one();
        }
    }

    /// Returns a warning for each kind: the missing verbs, and the rule that grants them.
    pub(super) fn warnings(&self) -> Vec<Warning> {
        warnings(&locked(&self.rights))
    }

    /// Asks for the rights, without end.
    pub(super) async fn follow(&self, client: &Client, uses: Uses) {
        let needed = needed(uses);
        loop {
            let missing = review(client, &needed).await;
            let is_whole = missing.as_ref().is_some_and(Vec::is_empty);
            // If the question failed, the last answer stays.
            if let Some(missing) = missing {
                let mut known = locked(&self.rights);
                let new: Vec<Right> = missing.iter().filter(|it| !known.contains(it)).copied().collect();
                for Warning { object, problem } in warnings(&new) {
                    tracing::warn!(object, problem, "rights are missing");
                }
                *known = missing;
            }
            tokio::time::sleep(LEAST).await;
            if is_whole {
                self.refused.notified().await;
            } else {
                // Asks again in either case. The notification is kept if this future is dropped.
                let _ = tokio::time::timeout(AGAIN, self.refused.notified()).await;
            }
        }
    }
}

/// Why rights are not known.
#[derive(Debug, thiserror::Error)]
pub enum RightsError {
    /// The server cannot be connected to.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// The server did not answer, or answered something else.
    #[error("ask the API server what the agent may do: {0}")]
    Asked(String),
}

/// Returns the rights that are missing now, each with the rule that grants it.
///
/// # Errors
/// [`RightsError::Asked`].
pub(super) async fn missing(client: &Client, uses: Uses) -> Result<Vec<Warning>, RightsError> {
    let missing = ask_for(client, &needed(uses)).await.map_err(RightsError::Asked)?;
    Ok(warnings(&missing))
}

/// Returns those of the rights that the server denies; `None` if one question failed.
async fn review(client: &Client, rights: &[Right]) -> Option<Vec<Right>> {
    let asked = ask_for(client, rights).await;
    asked.inspect_err(|error| tracing::debug!(error, "the agent's rights are not known")).ok()
}

/// Returns those of the rights that the server denies.
async fn ask_for(client: &Client, rights: &[Right]) -> Result<Vec<Right>, String> {
    #[derive(Deserialize)]
    struct Review {
        status: Status,
    }
    #[derive(Deserialize)]
    struct Status {
        #[serde(default)]
        allowed: bool,
    }
    let mut missing = Vec::new();
    for right in rights {
        let ask = question(right);
        let answer = client.read(&ask, ANSWER, PATIENCE).await.map_err(|error| Chain(&error).to_string())?;
        let review: Review = serde_json::from_slice(&answer).map_err(|error| error.to_string())?;
        if !review.status.allowed {
            missing.push(*right);
        }
    }
    Ok(missing)
}

fn question(right: &Right) -> Ask {
    let (resource, subresource) = right.resource.split_once('/').unwrap_or((right.resource, ""));
    let mut attributes = json!({ "group": right.group, "resource": resource, "verb": right.verb });
    if !subresource.is_empty() {
        attributes["subresource"] = subresource.into();
    }
    let review = json!({
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": { "resourceAttributes": attributes },
    });
    Ask {
        method: Method::POST,
        body: Some(("application/json", review.to_string().into_bytes())),
        ..Ask::get(REVIEWS)
    }
}

fn warnings(missing: &[Right]) -> Vec<Warning> {
    let mut kinds: BTreeMap<(&str, &str), Vec<&str>> = BTreeMap::new();
    for right in missing {
        kinds.entry((right.group, right.resource)).or_default().push(right.verb);
    }
    let warning = |((group, resource), verbs): ((&str, &str), Vec<&str>)| Warning {
        object: format!("access to {resource}"),
        problem: format!(
            "the agent may not {} them; its ClusterRole lacks the rule {{apiGroups: [{group:?}], resources: [{resource:?}], verbs: {verbs:?}}}",
            verbs.join(", ")
        ),
    };
    kinds.into_iter().map(warning).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::Value;

    use crate::kube::access::*;

    /// The rights that rules grant, in order.
    fn given(rules: &[Value]) -> Vec<(String, String, String)> {
        let texts = |list: &Value| -> Vec<String> {
            list.as_array().unwrap().iter().map(|text| text.as_str().unwrap().to_owned()).collect()
        };
        let mut given = Vec::new();
        for rule in rules {
            for group in texts(&rule["apiGroups"]) {
                for resource in texts(&rule["resources"]) {
                    let verbs = texts(&rule["verbs"]).into_iter();
                    given.extend(verbs.map(|verb| (group.clone(), resource.clone(), verb)));
                }
            }
        }
        given.sort();
        given
    }

    /// The rules of `deploy/base`.
    fn of_base() -> Vec<Value> {
        let role = include_str!("../../../deploy/base/rbac.yaml");
        let document = role.split("---").find(|document| document.contains("kind: ClusterRole\n")).unwrap();
        let role: Value = serde_norway::from_str(document).unwrap();
        role["rules"].as_array().unwrap().clone()
    }

    /// The rules that a component adds to them.
    fn of_component(text: &str) -> Vec<Value> {
        let component: Value = serde_norway::from_str(text).unwrap();
        let [patch] = &component["patches"].as_array().unwrap()[..] else { panic!("{component}") };
        assert_eq!(patch["target"], json!({"kind": "ClusterRole", "name": "netattach"}));
        let changes: Vec<Value> = serde_norway::from_str(patch["patch"].as_str().unwrap()).unwrap();
        let added = |change: &Value| {
            assert_eq!((&change["op"], &change["path"]), (&json!("add"), &json!("/rules/-")));
            change["value"].clone()
        };
        changes.iter().map(added).collect()
    }

    /// Rights to read are granted to all agents; rights to write for a setting only by the component of
    /// that setting.
    #[test]
    fn every_right_that_is_used_is_in_the_published_role_and_no_other() {
        let reading = Uses { network_policies: true, nodes: true, ranges: true, ..Uses::default() };
        let evict = include_str!("../../../deploy/components/evict/kustomization.yaml");
        let startup_taint = include_str!("../../../deploy/components/startup-taint/kustomization.yaml");
        let table = [
            (reading, vec![]),
            (Uses { eviction: true, ..reading }, vec![evict]),
            (Uses { startup_taint: true, ..reading }, vec![startup_taint]),
            (Uses { eviction: true, startup_taint: true, ..reading }, vec![evict, startup_taint]),
        ];
        for (uses, components) in table {
            let mut rules = of_base();
            rules.extend(components.into_iter().flat_map(of_component));
            let owned =
                |right: &Right| (right.group.to_owned(), right.resource.to_owned(), right.verb.to_owned());
            let mut needed: Vec<_> = needed(uses).iter().map(owned).collect();
            needed.sort();
            assert_eq!(needed, given(&rules), "{uses:?}");
        }
    }

    /// The documentation describes the risk of each right.
    #[test]
    fn the_page_on_security_has_every_right_and_no_other() {
        let page = include_str!("../../../docs/security.md");
        let (_, table) = page.split_once("\n| right | ").unwrap();
        let rows = table.lines().skip(2).map_while(|line| line.strip_prefix("| `")?.split(" | ").next());
        let said: BTreeSet<(&str, &str)> = rows
            .flat_map(|cell| {
                let (verbs, resources) = cell.split_once(" of `").unwrap();
                let resources = resources.split('`').step_by(2).filter(|word| !word.is_empty());
                let verbs = verbs.split('`').step_by(2).filter(|word| !word.is_empty());
                resources.flat_map(move |resource| verbs.clone().map(move |verb| (resource, verb)))
            })
            .collect();
        let evict = include_str!("../../../deploy/components/evict/kustomization.yaml");
        let startup_taint = include_str!("../../../deploy/components/startup-taint/kustomization.yaml");
        let rules = [of_base(), of_component(evict), of_component(startup_taint)].concat();
        let given = given(&rules);
        assert_eq!(said, given.iter().map(|(_, resource, verb)| (&**resource, &**verb)).collect());
    }

    /// Settings that are off by default need no right to write anything but the status of pods and events.
    #[test]
    fn by_default_every_right_is_among_those_of_the_base() {
        let given = given(&of_base());
        for Right { group, resource, verb } in needed(Uses::default()) {
            assert!(given.contains(&(group.into(), resource.into(), verb.into())), "{verb} {resource}");
        }
        let written = given.iter().filter(|(.., verb)| !["get", "list", "watch"].contains(&verb.as_str()));
        let resources: Vec<&str> = written.map(|(_, resource, _)| resource.as_str()).collect();
        assert_eq!(resources, ["pods/status", "events", "events"]);
    }

    #[test]
    fn rights_that_only_a_setting_needs_are_asked_for_with_it_alone() {
        let plain: Vec<_> = needed(Uses::default()).iter().map(|right| right.resource).collect();
        for resource in ["nodes", "networkpolicies", "pods/eviction", "servicecidrs"] {
            assert!(!plain.contains(&resource), "{resource}");
        }
    }

    #[test]
    fn what_is_missing_is_told_with_the_rule_that_gives_it() {
        let right = |verb| Right { group: NETWORKS_GROUP, resource: "multi-networkpolicies", verb };
        let warnings = warnings(&[
            right("list"),
            right("watch"),
            Right { group: "", resource: "pods/status", verb: "patch" },
        ]);
        let told: Vec<(&str, &str)> =
            warnings.iter().map(|it| (it.object.as_str(), it.problem.as_str())).collect();
        assert_eq!(
            told,
            [
                (
                    "access to pods/status",
                    "the agent may not patch them; its ClusterRole lacks the rule {apiGroups: [\"\"], resources: [\"pods/status\"], verbs: [\"patch\"]}"
                ),
                (
                    "access to multi-networkpolicies",
                    "the agent may not list, watch them; its ClusterRole lacks the rule {apiGroups: [\"k8s.cni.cncf.io\"], resources: [\"multi-networkpolicies\"], verbs: [\"list\", \"watch\"]}"
                ),
            ]
        );
    }

    #[test]
    fn a_question_names_the_subresource_apart() {
        let ask = question(&Right { group: "", resource: "pods/eviction", verb: "create" });
        let body: Value = serde_json::from_slice(&ask.body.unwrap().1).unwrap();
        assert_eq!(
            body["spec"],
            json!({"resourceAttributes": {"group": "", "resource": "pods", "subresource": "eviction", "verb": "create"}})
        );
    }
}
