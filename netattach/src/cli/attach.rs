//! `netattachctl attach` and `detach`: one more network for a live pod.

use std::path::Path;

use clap::Args;
use clap::builder::NonEmptyStringValueParser;
use ipnet::IpNet;
use serde_json::{Map, Value};

use super::filter::{ContainerIdError, attachments, short_id, whole_id};
use super::output::Format;
use super::table::{self, Align::Left};
use super::{Answer, CliError, ask, name_cells, or_dash, other};
use crate::cni::{CniResult, Version};
use crate::objects::ObjectName;
use crate::rpc::message::{AttachCall, DetachCall, Dynamic, Request, Response, SandboxName};
use crate::rpc::shim::TRACE_VARIABLE;

/// Which live sandbox.
#[derive(Debug, Args)]
struct Target {
    /// The pod, which must have one sandbox on this node
    #[arg(value_name = "NAMESPACE/POD", required_unless_present = "container_id")]
    pod: Option<ObjectName>,
    /// The container, instead of the pod: its id, or a beginning that no other id has
    #[arg(long, value_name = "ID", conflicts_with = "pod", value_parser = NonEmptyStringValueParser::new())]
    container_id: Option<String>,
}

/// What to attach to what.
#[derive(Debug, Args)]
#[command(allow_missing_positional = true)]
pub(super) struct Attach {
    #[command(flatten)]
    target: Target,
    /// The network; without a namespace, in the pod's
    #[arg(value_name = "[NAMESPACE/]NETWORK", value_parser = NonEmptyStringValueParser::new())]
    network: String,
    /// Name of the interface in the pod [default: the first free one of net1, net2, ...]
    #[arg(long, value_name = "NAME")]
    ifname: Option<String>,
    /// Addresses to ask for, separated by commas
    #[arg(long, value_name = "ADDRESS[/PREFIX]", value_delimiter = ',')]
    ips: Vec<String>,
    /// Ethernet address to ask for
    #[arg(long, value_name = "ADDRESS")]
    mac: Option<String>,
    /// Further keys of a selection, as in the pod's annotation: a JSON object
    #[arg(long, value_name = "JSON")]
    with: Option<String>,
    /// Name of the requester, for the record and the pod's network-status
    #[arg(long, value_name = "NAME", default_value = "netattachctl")]
    by: String,
}

/// What to detach from what.
#[derive(Debug, Args)]
#[command(allow_missing_positional = true)]
pub(super) struct Detach {
    #[command(flatten)]
    target: Target,
    /// The interface in the pod
    #[arg(value_name = "INTERFACE", value_parser = NonEmptyStringValueParser::new())]
    ifname: String,
}

/// The command line cannot be made into a request.
#[derive(Debug, thiserror::Error)]
pub enum WordsError {
    /// Neither a pod nor a container is given.
    #[error("name the pod, or the container with --container-id")]
    NoTarget,
    /// `--with` is not a JSON object.
    #[error("--with is not a JSON object")]
    With(#[source] serde_json::Error),
    /// A key is given twice.
    #[error("--with has the key {0}, which the command line gives already")]
    Twice(String),
    /// The argument of `policy dump` is neither a policy number nor an object name.
    #[error("{0:?} is neither the number of a policy in the maps nor NAMESPACE/NAME of a policy object")]
    Policy(String),
    /// No record has both that verdict and that reason.
    #[error("no flow or packet that is {verdict} has the reason {reason}")]
    Contradiction {
        /// `--verdict`.
        verdict: &'static str,
        /// `--reason`.
        reason: String,
    },
}

impl Target {
    fn name(&self) -> Result<SandboxName, WordsError> {
        match (&self.pod, &self.container_id) {
            (Some(pod), _) => Ok(SandboxName::Pod(pod.clone())),
            (None, Some(id)) => Ok(SandboxName::Container(id.clone())),
            (None, None) => Err(WordsError::NoTarget),
        }
    }

    /// As [`Target::name`], with the full id of a container that is given by a prefix.
    fn whole(&self, socket: &Path) -> Result<SandboxName, CliError> {
        match self.name()? {
            SandboxName::Container(id) => match whole_id(&id, &attachments(socket)?) {
                // A container that is being attached is not listed yet, but the agent knows it.
                Err(ContainerIdError::Unknown(id)) => Ok(SandboxName::Container(id)),
                whole => Ok(SandboxName::Container(whole?)),
            },
            pod @ SandboxName::Pod(_) => Ok(pod),
        }
    }
}

impl Attach {
    /// The pod, if it is named.
    pub(super) fn pod(&self) -> Option<ObjectName> {
        self.target.pod.clone()
    }

    pub(super) fn run(&self, socket: &Path, format: Format) -> Result<Answer, CliError> {
        let request = self.request(self.target.name()?)?;
        let request = match &self.target.container_id {
            Some(_) => self.request(self.target.whole(socket)?)?,
            None => request,
        };
        let Response::Attached(attached) = ask(socket, &request)? else { return other(&request) };
        Ok((format.show(&attached.result, |_| render(&attached))?, Ok(())))
    }

    fn request(&self, sandbox: SandboxName) -> Result<Request, WordsError> {
        let selection = Value::Object(self.selection()?);
        Ok(Request::Attach(AttachCall {
            sandbox,
            selection,
            by: self.by.clone(),
            traceparent: traceparent(),
        }))
    }

    /// The selection element, as in the pod's annotation; the agent validates it.
    fn selection(&self) -> Result<Map<String, Value>, WordsError> {
        let mut selection = Map::new();
        let name = match self.network.split_once('/') {
            Some((namespace, name)) => {
                selection.insert("namespace".into(), namespace.into());
                name
            }
            None => &self.network,
        };
        selection.insert("name".into(), name.into());
        for (key, text) in [("interface", &self.ifname), ("mac", &self.mac)] {
            selection.extend(text.as_ref().map(|text| (key.to_owned(), Value::from(text.as_str()))));
        }
        if !self.ips.is_empty() {
            selection.insert("ips".into(), self.ips.iter().map(String::as_str).collect());
        }
        let with: Map<String, Value> = match &self.with {
            Some(text) => serde_json::from_str(text).map_err(WordsError::With)?,
            None => Map::new(),
        };
        for (key, value) in with {
            if selection.insert(key.clone(), value).is_some() {
                return Err(WordsError::Twice(key));
            }
        }
        Ok(selection)
    }
}

impl Detach {
    /// The pod, if it is named.
    pub(super) fn pod(&self) -> Option<ObjectName> {
        self.target.pod.clone()
    }

    pub(super) fn run(&self, socket: &Path, format: Format) -> Result<Answer, CliError> {
        let request = self.request(self.target.whole(socket)?);
        let Response::Detached = ask(socket, &request)? else { return other(&request) };
        Ok((format.show(&serde_json::json!({}), |_| self.confirm())?, Ok(())))
    }

    fn request(&self, sandbox: SandboxName) -> Request {
        Request::Detach(DetachCall {
            sandbox,
            ifname: self.ifname.clone(),
            must_be_attached: true,
            traceparent: traceparent(),
        })
    }

    fn confirm(&self) -> String {
        let pod = self.target.name().map(|name| name.to_string()).unwrap_or_default();
        format!("{} is detached from {pod}.\n", self.ifname)
    }
}

/// The attachment as a table with one row.
fn render(attached: &Dynamic) -> String {
    let [pod, network, ifname] = name_cells(&attached.name);
    // Cannot fail: the agent wrote the result in this version.
    let result = CniResult::parse(&attached.result, Version::LATEST).unwrap_or_default();
    let in_pod = result.interfaces.iter().find(|interface| interface.sandbox.is_some());
    let addresses: Vec<String> = result.ips.iter().map(|ip| IpNet::to_string(&ip.address)).collect();
    let row = [
        pod,
        short_id(&attached.container_id),
        network,
        ifname,
        or_dash(in_pod.and_then(|interface| interface.mac.as_ref())),
        or_dash(Some(addresses.join(",")).filter(|text| !text.is_empty())),
    ];
    let columns = ["POD", "CONTAINER", "NETWORK", "INTERFACE", "MAC", "ADDRESSES"];
    table::render(columns.map(|title| (title, Left)), &[row])
}

/// Returns the trace that this command is part of, if its caller sets it.
fn traceparent() -> Option<String> {
    std::env::var(TRACE_VARIABLE).ok()
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use serde_json::json;

    use super::super::tests::name;
    use super::super::{Arguments, Command};
    use super::*;

    fn request(words: &[&str]) -> Result<Request, String> {
        let words = ["netattachctl"].iter().chain(words);
        let arguments = Arguments::try_parse_from(words).map_err(|error| error.kind().to_string())?;
        match arguments.command {
            Command::Attach(attach) => {
                let sandbox = attach.target.name().map_err(|error| error.to_string())?;
                attach.request(sandbox).map_err(|error| error.to_string())
            }
            Command::Detach(detach) => {
                Ok(detach.request(detach.target.name().map_err(|error| error.to_string())?))
            }
            _ => Err("another command".into()),
        }
    }

    #[test]
    fn words_become_a_selection() {
        let pod = SandboxName::Pod("shop/cart".parse().unwrap());
        let container = SandboxName::Container("c1".into());
        let attach = |sandbox: &SandboxName, selection: Value, by: &str| {
            Ok(Request::Attach(AttachCall {
                sandbox: sandbox.clone(),
                selection,
                by: by.into(),
                traceparent: None,
            }))
        };
        assert_eq!(
            request(&["attach", "shop/cart", "lan"]),
            attach(&pod, json!({"name": "lan"}), "netattachctl")
        );
        assert_eq!(
            request(&[
                "attach",
                "--container-id",
                "c1",
                "ops/lan",
                "--ifname",
                "lan0",
                "--mac",
                "02:00:00:00:00:01",
                "--ips",
                "10.0.0.7/24,fd00::7",
                "--with",
                r#"{"cni-args": {"a": 1}}"#,
                "--by",
                "vm.example.org",
            ]),
            attach(
                &container,
                json!({"namespace": "ops", "name": "lan", "interface": "lan0", "mac": "02:00:00:00:00:01",
                    "ips": ["10.0.0.7/24", "fd00::7"], "cni-args": {"a": 1}}),
                "vm.example.org"
            )
        );
        assert_eq!(
            request(&["detach", "--container-id", "c1", "lan0"]),
            Ok(Request::Detach(DetachCall {
                sandbox: container,
                ifname: "lan0".into(),
                must_be_attached: true,
                traceparent: None
            }))
        );
        assert_eq!(
            request(&["detach", "shop/cart", "net1"]),
            Ok(Request::Detach(DetachCall {
                sandbox: pod,
                ifname: "net1".into(),
                must_be_attached: true,
                traceparent: None
            }))
        );
    }

    #[test]
    fn words_that_make_no_request_are_refused() {
        let empty = "one of the values isn't valid for an argument";
        let table: [(&[&str], &str); 8] = [
            (&["attach", "shop/cart", ""], empty),
            (&["detach", "shop/cart", ""], empty),
            (&["detach", "--container-id", "", "net1"], empty),
            (&["attach", "lan"], "one or more required arguments were not provided"),
            (&["attach", "cart", "lan"], "invalid value for one of the arguments"),
            (
                &["attach", "--container-id", "c1", "shop/cart", "lan"],
                "an argument cannot be used with one or more of the other specified arguments",
            ),
            (&["attach", "shop/cart", "lan", "--with", "[]"], "--with is not a JSON object"),
            (
                &["attach", "shop/cart", "lan", "--with", r#"{"name": "wan"}"#],
                "--with has the key name, which the command line gives already",
            ),
        ];
        for (words, message) in table {
            assert_eq!(request(words), Err(message.to_owned()), "{words:?}");
        }
    }

    #[test]
    fn the_attachment_is_a_line() {
        let attached = Dynamic {
            name: name(3, "shop/cart", "shop/lan", "net2"),
            container_id: "c1".into(),
            result: json!({"cniVersion": "1.1.0",
                "interfaces": [{"name": "veth1"}, {"name": "net2", "mac": "02:00:00:00:00:01", "sandbox": "/x"}],
                "ips": [{"address": "10.0.0.7/24", "interface": 1}]}),
        };
        assert_eq!(
            render(&attached),
            "\
POD        CONTAINER  NETWORK   INTERFACE  MAC                ADDRESSES
shop/cart  c1         shop/lan  net2       02:00:00:00:00:01  10.0.0.7/24
"
        );
    }
}
