//! `netattachctl test`: attaches two sandboxes of its own to networks as a runtime would, and sends traffic
//! between them.
//!
//! Only this process holds the sandboxes' namespaces, so nothing is left however the process ends: if it is
//! killed, the namespaces are gone, and the agent detaches sandboxes without a namespace
//! (`collectAfterSeconds`). If the agent reads manifests, the sandboxes are pods during the test, and
//! policies stop some of the traffic (`policy`). In a cluster this takes rights that no node has:
//! `kubectl netattach test` creates pods and policies with the rights of its user (`cluster`), and has the
//! sandboxes attached in the agent's pod. A network that only some namespaces may use refuses them.

mod cluster;
mod policy;

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::output::Format;
use super::table::{self, Align, Column};
use super::{Answer, CliError, ask, doctor, other, time, visible};
use crate::cni::{CniResult, Version};
use crate::error_chain::Chain;
use crate::netns::{Netns, NetnsError, within};
use crate::rpc::message::{AttachCall, CniCall, Request, Response, SandboxName};
use policy::{Manifest, Pods, STEPS, Step};

/// The text that is sent and echoed.
const GREETING: &[u8] = b"netattach";

/// Pause between two attempts: an address of IPv6 is usable a second after it was set.
const PAUSE: Duration = Duration::from_millis(100);

/// What to test.
#[derive(Debug, Args)]
pub(super) struct Test {
    /// Only the default network and these; otherwise every network that is defined
    #[arg(long, value_name = "NAMESPACE/NAME")]
    network: Vec<String>,
    /// How long an attempt to connect may take
    #[arg(long, value_name = "DURATION", default_value = "5s", value_parser = time::duration)]
    timeout: Duration,
    /// Settings of the agent [default: those of the netattachd that runs, else the built-in ones]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Attach the sandboxes as the pods NAME-a and NAME-b, which are there, and try one policy, which is in force
    #[arg(long, hide = true, value_name = "NAMESPACE/NAME", value_parser = pods, requires = "policy")]
    pods: Option<Pods>,
    /// The number of that policy
    #[arg(long, hide = true, value_name = "NUMBER", value_parser = step, requires = "pods")]
    policy: Option<Step>,
}

fn pods(text: &str) -> Result<Pods, String> {
    let (namespace, name) = text.split_once('/').ok_or("a namespace and a name")?;
    Ok(Pods { namespace: namespace.to_owned(), name: name.to_owned() })
}

fn step(text: &str) -> Result<Step, String> {
    let number = text.parse::<usize>().ok().and_then(|number| STEPS.get(number));
    number.copied().ok_or_else(|| format!("a number below {}", STEPS.len()))
}

/// The outcome of one attempt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Outcome {
    network: String,
    /// `attach`, `IPv4` or `IPv6` with the direction, or `policy` with its rule and the expected result for
    /// a direction.
    what: String,
    /// Whether it succeeded.
    passed: bool,
    /// How long it took, or why it failed.
    detail: String,
}

/// A sandbox of this process.
struct Sandbox {
    id: String,
    netns: Netns,
    /// `CNI_ARGS`: its pod, if it is one.
    arguments: String,
    /// Its addresses, by network.
    addresses: BTreeMap<String, Vec<IpAddr>>,
}

impl Test {
    pub(super) fn run(&self, socket: &Path, format: Format) -> Result<Answer, CliError> {
        let Response::Networks(defined) = ask(socket, &Request::Networks)? else {
            return other(&Request::Networks);
        };
        if let Some(unknown) = self.network.iter().find(|name| !defined.iter().any(|it| it.network == **name))
        {
            let known = super::missing::list(defined.iter().map(|it| &it.network));
            return Err(CliError::NotFound(format!("network {unknown} is not defined; there are {known}")));
        }
        let is_wanted = |name: &str| self.network.is_empty() || self.network.iter().any(|it| it == name);
        let default =
            defined.iter().find(|it| it.default).map_or("default", |it| it.network.as_str()).to_owned();
        let others = defined.iter().filter(|it| !it.default && is_wanted(&it.network));
        let others: Vec<&str> = others.map(|it| it.network.as_str()).collect();
        let mut sandboxes = Vec::new();
        let manifest = match &self.pods {
            None => Manifest::write(&doctor::settings(self.config.as_deref())),
            Some(_) => Ok(None),
        };
        let made = manifest.as_ref().ok().and_then(Option::as_ref);
        let outcomes = self.outcomes(socket, (&default, &others), made, &mut sandboxes);
        let mut left = Vec::new();
        for sandbox in &sandboxes {
            left.extend(sandbox.call(socket, "DEL").err());
        }
        let outcomes = outcomes?;
        let failed = outcomes.iter().filter(|it| !it.passed).count() + left.len();
        let mut text = format.show(&outcomes, |width| render(&outcomes, width))?;
        if !format.is_data() {
            text.extend(left.iter().map(|error| visible::line(&format!("not detached: {error}"))));
            match &manifest {
                Ok(Some(_)) => {}
                Ok(None) => text.push_str(
                    "policies: not tested, as the agent's pods are a cluster's, in which a node makes none; by your own \
                     rights: kubectl netattach test --node NODE\n",
                ),
                Err(error) => {
                    text.push_str(&format!("policies: not tested, as no manifest can be written: {error}\n"));
                }
            }
        }
        Ok((text, if failed == 0 { Ok(()) } else { Err(CliError::Unwell(failed)) }))
    }

    fn outcomes(
        &self,
        socket: &Path,
        (default, others): (&str, &[&str]),
        made: Option<&Manifest>,
        sandboxes: &mut Vec<Sandbox>,
    ) -> Result<Vec<Outcome>, CliError> {
        let mut outcomes = Vec::new();
        let pods = self.pods.as_ref().or(made.map(|it| &it.pods));
        for name in ["a", "b"] {
            let mut sandbox = Sandbox::new(name, pods.map(|it| it.arguments(name)).unwrap_or_default())?;
            let added = sandbox.call(socket, "ADD");
            let attached = added.and_then(|result| sandbox.note(default, &result));
            // An attachment that has begun must be detached.
            sandboxes.push(sandbox);
            if let Err(error) = attached {
                outcomes.push(Outcome::failed(default, "attach", error));
                return Ok(outcomes);
            }
        }
        for network in others {
            for sandbox in sandboxes.iter_mut() {
                if let Err(error) = sandbox.attach(socket, network) {
                    outcomes.push(Outcome::failed(network, "attach", error));
                    break;
                }
            }
        }
        let [a, b] = sandboxes.as_slice() else { return Ok(outcomes) };
        if let Some(step) = self.policy {
            outcomes.extend(step.outcomes([a, b], others, self.timeout));
            return Ok(outcomes);
        }
        for network in std::iter::once(&default).chain(others) {
            let (Some(of_a), Some(of_b)) = (a.addresses.get(*network), b.addresses.get(*network)) else {
                continue;
            };
            for (from, to, addresses) in [(a, b, of_b), (b, a, of_a)] {
                for address in addresses {
                    let family = if address.is_ipv4() { "IPv4" } else { "IPv6" };
                    let what = format!("{family} {}", if to.id == b.id { "a to b" } else { "b to a" });
                    outcomes.push(match exchange(from, to, *address, self.timeout) {
                        Ok(took) => Outcome {
                            network: (*network).to_owned(),
                            what,
                            passed: true,
                            detail: format!("{:.1} ms", took.as_secs_f64() * 1000.0),
                        },
                        Err(error) => Outcome::failed(network, &what, error.to_string()),
                    });
                }
            }
        }
        if let Some(made) = made.filter(|_| !others.is_empty()) {
            match made.outcomes([a, b], others, self.timeout) {
                Ok(of_policies) => outcomes.extend(of_policies),
                Err(error) => outcomes.push(Outcome::failed("-", "policy", error.to_string())),
            }
        }
        Ok(outcomes)
    }
}

impl Outcome {
    fn failed(network: &str, what: &str, detail: String) -> Self {
        Self { network: network.to_owned(), what: what.to_owned(), passed: false, detail }
    }
}

impl Sandbox {
    fn new(name: &str, arguments: String) -> Result<Self, CliError> {
        let netns = Netns::private()?;
        let id = format!("netattachctl-test-{}-{name}", std::process::id());
        Ok(Self { id, netns, arguments, addresses: BTreeMap::new() })
    }

    /// Calls the agent as a runtime would. Returns the result, or the failure on one line.
    fn call(&self, socket: &Path, command: &str) -> Result<String, String> {
        let netns = format!("/proc/{}/fd/{}", std::process::id(), self.netns.as_fd().as_raw_fd());
        let env: [(&str, &str); 6] = [
            ("CNI_ARGS", &self.arguments),
            ("CNI_COMMAND", command),
            ("CNI_CONTAINERID", &self.id),
            ("CNI_NETNS", &netns),
            ("CNI_IFNAME", "eth0"),
            ("CNI_PATH", "/opt/cni/bin"),
        ];
        let env = env.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        let stdin =
            json!({"cniVersion": "1.1.0", "name": "netattachctl-test", "type": "netattach"}).to_string();
        match ask(socket, &Request::Cni(CniCall { env, stdin })) {
            Ok(Response::Cni(reply)) if reply.exit == 0 => Ok(reply.stdout),
            Ok(Response::Cni(reply)) => {
                let error: serde_json::Value = serde_json::from_str(&reply.stdout).unwrap_or_default();
                let part =
                    |key: &str| error.get(key).and_then(|it| it.as_str()).unwrap_or_default().to_owned();
                Err([part("msg"), part("details")].join(" ").trim().to_owned())
            }
            Ok(_) => Err("the agent answered another question".to_owned()),
            Err(error) => Err(Chain(&error).to_string()),
        }
    }

    fn attach(&mut self, socket: &Path, network: &str) -> Result<(), String> {
        let (namespace, name) = network.split_once('/').unwrap_or(("", network));
        let request = Request::Attach(AttachCall {
            sandbox: SandboxName::Container(self.id.clone()),
            selection: json!({"namespace": namespace, "name": name}),
            by: "netattachctl-test".to_owned(),
            traceparent: None,
        });
        match ask(socket, &request) {
            Ok(Response::Attached(attached)) => self.note(network, &attached.result.to_string()),
            Ok(_) => Err("the agent answered another question".to_owned()),
            Err(error) => Err(Chain(&error).to_string()),
        }
    }

    /// Records the addresses of a result.
    fn note(&mut self, network: &str, result: &str) -> Result<(), String> {
        let value: serde_json::Value = serde_json::from_str(result).map_err(|error| error.to_string())?;
        let result = CniResult::parse(&value, Version::LATEST).map_err(|error| Chain(&error).to_string())?;
        let addresses = result.ips.iter().map(|ip| ip.address.addr()).collect();
        self.addresses.insert(network.to_owned(), addresses);
        Ok(())
    }
}

/// Sends a greeting by TCP and receives the echo. Returns the duration of the successful connection.
fn exchange(from: &Sandbox, to: &Sandbox, address: IpAddr, timeout: Duration) -> io::Result<Duration> {
    let deadline = Instant::now() + timeout;
    let entered = |error: NetnsError| io::Error::other(Chain(&error).to_string());
    let listener = retry(deadline, || {
        within(&to.netns, || TcpListener::bind(SocketAddr::new(address, 0))).map_err(entered)?
    })?;
    let target = listener.local_addr()?;
    listener.set_nonblocking(true)?;
    let answering = std::thread::spawn(move || answer(&listener, deadline));
    let sent = retry(deadline, || {
        let began = Instant::now();
        let connected = within(&from.netns, || {
            TcpStream::connect_timeout(&target, deadline.saturating_duration_since(began).max(PAUSE))
        });
        greet(&mut connected.map_err(entered)??, timeout).map(|()| began.elapsed())
    });
    // The thread ends by the deadline; if it failed, so did the exchange.
    let _ = answering.join();
    sent
}

fn greet(stream: &mut TcpStream, timeout: Duration) -> io::Result<()> {
    stream.set_read_timeout(Some(timeout))?;
    stream.write_all(GREETING)?;
    let mut answer = [0; GREETING.len()];
    stream.read_exact(&mut answer)?;
    if answer == *GREETING { Ok(()) } else { Err(io::Error::other("another answer came back")) }
}

/// Echoes what connections send, until one has received its echo.
fn answer(listener: &TcpListener, deadline: Instant) -> io::Result<()> {
    loop {
        let (stream, _) = retry(deadline, || listener.accept())?;
        if send_back(stream, deadline).is_ok() {
            return Ok(());
        }
    }
}

fn send_back(mut stream: TcpStream, deadline: Instant) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(deadline.saturating_duration_since(Instant::now()).max(PAUSE)))?;
    let mut greeting = [0; GREETING.len()];
    stream.read_exact(&mut greeting)?;
    stream.write_all(&greeting)
}

/// Retries until the deadline.
fn retry<T>(deadline: Instant, mut attempt: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match attempt() {
            Err(_) if Instant::now() + PAUSE < deadline => {
                std::thread::sleep(PAUSE.min(Duration::from_millis(20)))
            }
            outcome => return outcome,
        }
    }
}

fn render(outcomes: &[Outcome], width: table::Width) -> String {
    let columns = [
        Column::new("NETWORK", Align::Left),
        Column::new("WHAT", Align::Left),
        Column::new("PASSED", Align::Left),
        Column::new("DETAIL", Align::Prose),
    ];
    let rows: Vec<_> = outcomes
        .iter()
        .map(|it| {
            let passed = if it.passed { "yes" } else { "NO" };
            [it.network.clone(), it.what.clone(), passed.to_owned(), it.detail.clone()]
        })
        .collect();
    table::of_columns(columns, &rows, width)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{is_narrow, is_pinned};
    use super::*;

    #[test]
    fn its_form_for_programs_is_pinned() {
        let outcome = |what: &str, passed, detail: &str| Outcome {
            network: "shop/storage".to_owned(),
            what: what.to_owned(),
            passed,
            detail: detail.to_owned(),
        };
        let refused = outcome("IPv6, there", false, "connect: Network is unreachable (os error 101)");
        is_pinned("test", &[outcome("attach", true, "12 ms"), refused]);
    }

    #[test]
    fn its_table_is_no_wider_than_others() {
        let long = |text: &str| format!("{text}-{}", "x".repeat(200));
        let outcomes = [Outcome {
            network: long("shop/storage"),
            what: format!("policy {}", long("from a")),
            passed: false,
            detail: "a word and ".repeat(40),
        }];
        is_narrow(&render(&outcomes, table::Width::Limited));
    }
}
