//! The log line for a failed request: one per request, naming its container and pod.

use crate::cni::CniError;
use crate::objects::ObjectName;
use crate::rpc::message::{CniCall, SandboxName};

/// A request of the runtime, with the fields that the log shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Asked {
    verb: String,
    container: Option<String>,
    ifname: Option<String>,
    pod: Option<String>,
}

impl Asked {
    pub(super) fn of(call: &CniCall) -> Self {
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

    /// The pod of an ADD.
    pub(super) fn added_pod(&self) -> Option<ObjectName> {
        self.pod.as_ref().filter(|_| self.verb == "ADD")?.parse().ok()
    }

    /// Logs that the request failed. Outcomes of STATUS are logged when they change, not at each request.
    pub(super) fn failed(&self, error: &CniError) {
        let Self { verb, container, ifname, pod } = self;
        let CniError { code, msg, details } = error;
        if verb == "STATUS" {
            tracing::debug!(code, msg, details, "request failed");
        } else {
            tracing::warn!(verb, container, ifname, pod, code, msg, details, "request failed");
        }
    }
}

/// Logs that `attach` or `detach` failed.
pub(super) fn dynamic_failed(verb: &str, sandbox: &SandboxName, what: &str, error: &CniError) {
    let CniError { code, msg, details } = error;
    tracing::warn!(verb, of = %sandbox, what, code, msg, details, "request failed");
}

#[cfg(test)]
mod tests {
    use super::*;

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
    }
}
