//! The log line of a request: one per request, with its container and pod, networks and addresses, and the
//! reason if it failed. A failed request names the networks that were to be attached, or the present
//! attachments.

use std::sync::Arc;
use std::time::Duration;

use crate::attach::Attached;
use crate::cni::CniError;
use crate::journal::JournalKey;
use crate::npwg::NetworkRef;
use crate::objects::ObjectName;
use crate::plan::result;
use crate::rpc::message::{CniCall, SandboxName};

/// A request of the runtime, with the fields that the log shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::agent) struct Asked {
    verb: String,
    container: Option<String>,
    ifname: Option<String>,
    pod: Option<String>,
}

impl Asked {
    pub(in crate::agent) fn of(call: &CniCall) -> Self {
        let variable = |name| call.variable(name).map(str::to_owned);
        let arguments: Vec<(&str, &str)> = call
            .variable("CNI_ARGS")
            .into_iter()
            .flat_map(|text| text.split(';'))
            .filter_map(|it| it.split_once('='))
            .collect();
        let argument = |name| arguments.iter().find(|(key, _)| *key == name).map(|(_, value)| *value);
        let pod = argument("K8S_POD_NAMESPACE").zip(argument("K8S_POD_NAME"));
        Self {
            verb: variable("CNI_COMMAND").unwrap_or_default(),
            container: variable("CNI_CONTAINERID"),
            ifname: variable("CNI_IFNAME"),
            pod: pod.map(|(namespace, name)| format!("{namespace}/{name}")),
        }
    }

    /// The verb, empty if the call has none.
    pub(in crate::agent) fn verb(&self) -> &str {
        &self.verb
    }

    /// Returns the attributes of the request for traces.
    pub(in crate::agent) fn attributes(&self) -> Vec<(&'static str, String)> {
        let Self { verb: _, container, ifname, pod } = self;
        let (namespace, name) = match pod.as_deref().and_then(|pod| pod.split_once('/')) {
            Some((namespace, name)) => (Some(namespace.to_owned()), Some(name.to_owned())),
            None => (None, None),
        };
        let all = [
            ("k8s.namespace.name", namespace),
            ("k8s.pod.name", name),
            ("container.id", container.clone()),
            ("network.interface.name", ifname.clone()),
        ];
        all.into_iter().filter_map(|(key, value)| Some((key, value?))).collect()
    }

    /// Returns the key of the sandbox, whether or not it exists.
    pub(in crate::agent) fn sandbox(&self) -> JournalKey {
        let text = |variable: &Option<String>| variable.clone().unwrap_or_default();
        JournalKey { container_id: text(&self.container), ifname: text(&self.ifname) }
    }

    /// Whether its log line names networks and addresses. STATUS, VERSION and GC concern no single
    /// container, whatever their variables say, and a runtime sends STATUS every few seconds.
    pub(super) fn is_about_a_container(&self) -> bool {
        matches!(self.verb.as_str(), "ADD" | "DEL" | "CHECK")
    }

    /// The pod of an ADD.
    pub(super) fn added_pod(&self) -> Option<ObjectName> {
        self.pod.as_ref().filter(|_| self.verb == "ADD")?.parse().ok()
    }

    /// Logs the result: one line for each request. Read-only requests are logged at level debug; results of
    /// STATUS are logged when they change.
    pub(in crate::agent) fn answered(&self, made: &Made, error: Option<&CniError>, took: Duration) {
        let Self { verb, container, ifname, pod } = self;
        let Made { networks, addresses } = made;
        let ms = milliseconds(took);
        match error {
            None if matches!(verb.as_str(), "ADD" | "DEL") => {
                tracing::info!(verb, pod, container, ifname, networks, addresses, ms, "done");
            }
            None => tracing::debug!(verb, pod, container, ifname, ms, "done"),
            Some(CniError { code, msg, details }) if verb == "STATUS" => {
                tracing::debug!(verb, ms, code, msg, details, "failed");
            }
            Some(CniError { code, msg, details }) => tracing::warn!(
                verb, pod, container, ifname, networks, addresses, ms, code, msg, details, "failed"
            ),
        }
    }
}

/// Converts to milliseconds, with microsecond precision.
fn milliseconds(took: Duration) -> f64 {
    (took.as_secs_f64() * 1e6).round() / 1e3
}

/// The networks and addresses of a sandbox, for log lines.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in crate::agent) struct Made {
    networks: String,
    addresses: String,
}

/// Most networks and most addresses of one line.
const LISTED: usize = 32;

impl Made {
    /// Returns these networks, without addresses.
    pub(in crate::agent) fn named(networks: &[NetworkRef]) -> Self {
        let networks = networks.iter().map(ToString::to_string).collect();
        Self { networks: listed(networks), addresses: String::new() }
    }

    /// Returns the attachments of these records.
    pub(in crate::agent) fn of(sandbox: &[Arc<Attached>]) -> Self {
        let (mut networks, mut addresses) = (Vec::new(), Vec::new());
        for attached in sandbox {
            for (number, plan) in attached.plan.attachments.iter().enumerate() {
                networks.push(plan.network.to_string());
                // Attachment numbers fit: see `Plan::steps`. A result that cannot be read was not at ADD either.
                let outputs = attached.outputs.of(number as u16);
                let result = result::result(&attached.plan.sandbox, plan, outputs).unwrap_or_default();
                addresses.extend(result.ips.iter().map(|ip| ip.address.to_string()));
            }
        }
        Self { networks: listed(networks), addresses: listed(addresses) }
    }
}

fn listed(mut words: Vec<String>) -> String {
    let more = words.len().saturating_sub(LISTED);
    words.truncate(LISTED);
    words.extend((more > 0).then(|| format!("and {more} more")));
    words.join(",")
}

/// Logs that a container was detached without a DEL, with the reason and the attachments.
pub(in crate::agent) fn collected(container: &str, why: &str, detached: &[Arc<Attached>], took: Duration) {
    let pod = detached.iter().find_map(|it| it.plan.sandbox.pod.as_ref()).map(ToString::to_string);
    let Made { networks, addresses } = Made::of(detached);
    let ms = milliseconds(took);
    tracing::info!(pod, container, networks, addresses, ms, why, "detached without a DEL");
}

/// A request to attach a live sandbox to one more network, or to detach it, with the fields that the log shows.
#[derive(Debug)]
pub(super) struct AskedLive {
    pub(in crate::agent) verb: &'static str,
    pub(in crate::agent) sandbox: SandboxName,
    /// The selection, or the interface.
    pub(in crate::agent) what: String,
}

impl AskedLive {
    /// Returns the attributes of the request for traces; `container` is set if the sandbox was found.
    pub(in crate::agent) fn attributes(&self, container: Option<&str>) -> Vec<(&'static str, String)> {
        let Self { sandbox, what, .. } = self;
        let mut all = match sandbox {
            SandboxName::Pod(ObjectName { namespace, name, .. }) => {
                vec![("k8s.namespace.name", namespace.to_string()), ("k8s.pod.name", name.to_string())]
            }
            SandboxName::Container(_) => Vec::new(),
        };
        let named = match sandbox {
            SandboxName::Container(id) => Some(id.as_str()),
            SandboxName::Pod(_) => None,
        };
        all.extend(container.or(named).map(|id| ("container.id", id.to_owned())));
        let key = if self.verb == "detach" { "network.interface.name" } else { "netattach.selection" };
        all.push((key, what.clone()));
        all
    }

    /// Logs the result; `container` is set if the sandbox was found.
    pub(in crate::agent) fn answered(
        &self,
        container: Option<&str>,
        Made { networks, addresses }: &Made,
        error: Option<&CniError>,
        took: Duration,
    ) {
        let Self { verb, sandbox, what } = self;
        let pod = match sandbox {
            SandboxName::Pod(name) => Some(name.to_string()),
            SandboxName::Container(_) => None,
        };
        let container = container.or(match sandbox {
            SandboxName::Container(id) => Some(id.as_str()),
            SandboxName::Pod(_) => None,
        });
        let ms = milliseconds(took);
        match error {
            None => tracing::info!(verb, pod, container, what, networks, addresses, ms, "done"),
            Some(CniError { code, msg, details }) => tracing::warn!(
                verb, pod, container, what, networks, addresses, ms, code, msg, details, "failed"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_and_times_are_short() {
        let words = |count: usize| (0..count).map(|it| it.to_string()).collect::<Vec<_>>();
        assert_eq!(listed(words(3)), "0,1,2");
        assert_eq!(listed(words(LISTED)).split(',').count(), LISTED);
        assert!(listed(words(LISTED + 2)).ends_with(",31,and 2 more"));
        assert_eq!(milliseconds(Duration::from_nanos(1_234_567)), 1.235);
    }

    #[test]
    fn a_request_is_named_by_its_verb_its_container_and_its_pod() {
        let call = |env: &[(&str, &str)]| CniCall {
            env: env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect(),
            stdin: String::new(),
        };
        let some = |text: &str| Some(text.to_owned());
        let args = "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=a;x";
        let whole =
            [("CNI_COMMAND", "ADD"), ("CNI_CONTAINERID", "c"), ("CNI_IFNAME", "eth0"), ("CNI_ARGS", args)];
        assert_eq!(
            Asked::of(&call(&whole)),
            Asked { verb: "ADD".into(), container: some("c"), ifname: some("eth0"), pod: some("shop/a") }
        );
        let none = Asked { verb: String::new(), container: None, ifname: None, pod: None };
        assert_eq!(Asked::of(&call(&[("CNI_ARGS", "K8S_POD_NAME=a"), ("CNI_IFNAME", "")])), none);
        // Variables left in the environment do not make a read-only request one about a container.
        let verbs = ["ADD", "DEL", "CHECK", "STATUS", "VERSION", "GC", ""];
        let about = verbs.map(|verb| {
            Asked::of(&call(&[("CNI_COMMAND", verb), ("CNI_CONTAINERID", "c")])).is_about_a_container()
        });
        assert_eq!(about, [true, true, true, false, false, false, false]);
    }
}
