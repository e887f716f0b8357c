//! `cargo xtask demo`: a demonstration of netattach in eight steps, which checks itself.
//!
//! Commands are shown as one would type them, and run by a shell that finds our executables first; only for a tool
//! that might be missing (jq) or would also list objects of other programs (bpftool) is the output produced here.
//! Nothing is left behind, however the demo ends: it runs in namespaces of its own, see [`stage`].
//!
//! `cluster` is another, on a real cluster. `transcript` prints both, `traffic` sends between the pods, and `kernel` lists
//! BPF objects as bpftool does.

pub mod cluster;
mod kernel;
mod stage;
mod traffic;
mod transcript;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::process::Stdio;
use std::time::Instant;

use anyhow::{Context, bail};
use rustix::process::Signal;
use serde_json::Value;

use self::kernel::Listing;
use self::stage::{BPFFS, HOME, PODS, Stage, each};
use self::traffic::{Conversation, Verdict};
pub use self::transcript::Transcript;
use crate::progress::UserError;
use crate::setup::Scope;
use crate::{child, dist, progress, setup};

const AGENT: &str = "netattachd --source manifests --state-dir state --bpffs /sys/fs/bpf/netattach-demo";
const RUNTIME_CONFIG: &str =
    r#"{"cniVersion":"1.0.0","name":"demo","type":"netattach","stateDir":"/run/netattach-demo/state"}"#;
/// The client's first rule is changed to name the other pod.
const EDIT: &str = "sed -i '0,/app: client/ s//app: other/' manifests/30-policy.yaml";
/// More than two seconds of traffic, so that a restart fits in.
const PINGS: u32 = 200;

/// Sets up, builds and runs the demonstration.
///
/// # Errors
/// Something cannot be prepared, or was not as expected.
pub fn run() -> anyhow::Result<()> {
    if !child::is_root() {
        bail!(UserError::new(
            "the demo makes network namespaces and loads BPF programs, which takes root",
            "run `cargo xtask demo` as root; it leaves nothing behind",
        ));
    }
    setup::run(Scope::Usual)?;
    dist::build()?;
    let started = Instant::now();
    let mut story = Story { stage: Stage::enter()?, transcript: Transcript::begin(), bare: Vec::new() };
    if let Err(error) = story.tell() {
        progress::line("\nThe agent's last words:");
        story.transcript.output(&Stage::agent_log());
        return Err(error);
    }
    let (ticks, seconds) = (story.transcript.ticks(), started.elapsed().as_secs_f64());
    progress::line(&format!(
        "\nAll {ticks} checks were as expected, in {seconds:.1} s. Nothing is left of the demo."
    ));
    Ok(())
}

struct Story {
    stage: Stage,
    transcript: Transcript,
    /// The node's links before the first pod.
    bare: Vec<String>,
}

impl Story {
    fn tell(&mut self) -> anyhow::Result<()> {
        self.start_the_agent()?;
        self.attach_three_pods()?;
        self.look_into_a_pod()?;
        self.ping()?;
        self.enforce_a_policy()?;
        self.change_the_policy()?;
        self.kill_the_agent()?;
        self.detach_everything()
    }

    fn start_the_agent(&mut self) -> anyhow::Result<()> {
        self.transcript.step(
            "Start the agent on a directory of manifests",
            "The same objects as in a cluster, read from files: no API server. The node is a network namespace.",
        );
        self.show(&format!("cd {HOME} && ls manifests"))?;
        self.bare = self.stage.links(None)?;
        self.transcript.command(&format!("{AGENT} &"));
        let took = self.stage.start_agent(AGENT)?;
        self.show("netattachctl status")?;
        self.transcript.expect(
            &format!("programs and maps loaded, policies compiled, ready after {} ms", took.as_millis()),
            &true,
            &self.stage.json("netattachctl status -o json")?["ready"]
                .as_array()
                .is_some_and(|conditions| conditions.iter().all(|condition| condition["met"] == true)),
        )
    }

    fn attach_three_pods(&mut self) -> anyhow::Result<()> {
        self.transcript.step(
            "Attach three pods, as a container runtime does",
            "CNI ADD: environment and standard input of the plugin `netattach`, which hands them to the agent.",
        );
        self.show(&format!("echo '{RUNTIME_CONFIG}' > runtime.conf"))?;
        for (number, pod) in PODS.into_iter().enumerate() {
            let call = cni_call("ADD", pod);
            self.transcript.command(&call);
            let started = Instant::now();
            let result = self.stage.json(&call)?;
            let took = started.elapsed();
            let addresses: Vec<&str> = each(&result["ips"]).filter_map(|ip| ip["address"].as_str()).collect();
            let last = number + 2;
            self.transcript.expect(
                &format!("{pod} has {} after {:.1} ms", addresses.join(" and "), took.as_secs_f64() * 1e3),
                &vec![format!("10.200.0.{last}/24"), format!("fd00:200::{last}/64")],
                &addresses.iter().map(|address| (*address).to_owned()).collect(),
            )?;
        }
        let listed = self.show(
            "netattachctl attachments | awk '{ printf \"%-12s %-20s %-10s %-8s %s\\n\", $1, $2, $3, $4, $5 }'",
        )?;
        self.transcript.expect("three pods with eight interfaces", &8, &listed.lines().skip(1).count())
    }

    fn look_into_a_pod(&mut self) -> anyhow::Result<()> {
        self.transcript.step(
            "Look into the client",
            "Its annotation asks for `storage`, and twice for `lan` with names, addresses and MACs of its choice.",
        );
        self.show("ip -n client -br addr")?;
        self.show("ip -n client route")?;
        self.show("ip -n client -6 route | grep -v ^fe80")?;
        let seen = interfaces(&self.stage.json("ip -n client -j addr")?);
        let expected = [
            ("eth0", vec!["10.200.0.3/24", "fd00:200::3/64"]),
            ("lan0 02:da:0a:00:00:10", vec!["10.202.0.10/24"]),
            ("lan1 02:da:0a:00:00:11", vec!["10.202.0.11/24"]),
            ("net1", vec!["10.201.0.3/32", "fd00:201::3/128"]),
        ];
        let expected = expected.map(|(name, addresses)| {
            (name.to_owned(), addresses.into_iter().map(str::to_owned).collect::<Vec<_>>())
        });
        self.transcript.expect(
            "every interface has the name, MAC and addresses it was to have",
            &BTreeMap::from(expected),
            &seen,
        )?;
        let file = "/run/netattach/network-status/shop/client.json";
        self.transcript.command(&format!("jq -c '.[]' {file}"));
        let status = self.stage.json(&format!("cat {file}"))?;
        each(&status).for_each(|entry| self.transcript.output(&entry.to_string()));
        let networks: Vec<_> = each(&status).map(|entry| [&entry["name"], &entry["interface"]]).collect();
        let expected = [
            ["kube-system/default", "eth0"],
            ["shop/storage", "net1"],
            ["shop/lan", "lan0"],
            ["shop/lan", "lan1"],
        ]
        .map(|pair| pair.map(Value::from));
        let expected: Vec<_> = expected.iter().map(|[name, interface]| [name, interface]).collect();
        self.transcript.expect(
            "network-status names them in order, as the pod's annotation would",
            &expected,
            &networks,
        )
    }

    fn ping(&mut self) -> anyhow::Result<()> {
        self.transcript.step(
            "Ping across every network",
            "From the client: to the other pod over bridge and routed veth, and out of `lan` to a machine on the wire.",
        );
        for (over, arguments) in [
            ("the bridge, IPv4", "10.200.0.4"),
            ("the bridge, IPv6", "fd00:200::4"),
            ("the routed veth, IPv4", "10.201.0.4"),
            ("the routed veth, IPv6", "fd00:201::4"),
            ("the first macvlan", "-I lan0 10.202.0.1"),
            ("the second macvlan", "-I lan1 10.202.0.1"),
        ] {
            let line = format!("ip netns exec client ping -c 1 -W 2 {arguments}");
            self.transcript.command(&line);
            let said = self.stage.run(&line)?;
            let answer = said.lines().find(|line| line.contains(" bytes from ")).unwrap_or_default();
            self.transcript.output(answer);
            let received = said.contains(" 1 received");
            self.transcript.expect(&format!("an answer over {over}"), &true, &received)?;
        }
        Ok(())
    }

    fn enforce_a_policy(&mut self) -> anyhow::Result<()> {
        self.transcript.step(
            "Enforce a MultiNetworkPolicy",
            "manifests/30-policy.yaml: the server accepts the client on TCP 8080, on both its networks, and no other pod.",
        );
        for port in [8080, 9090] {
            traffic::serve("server", port)?;
        }
        let before = self.dropped_at_the_server()?;
        self.transcript.output("The server listens on ports 8080 and 9090. Who gets an answer?");
        for (pod, to, expected) in [
            ("client", "10.200.0.2:8080", Verdict::Answered),
            ("client", "[fd00:200::2]:8080", Verdict::Answered),
            ("client", "10.201.0.2:8080", Verdict::Answered),
            ("client", "10.200.0.2:9090", Verdict::Silence),
            ("other", "10.200.0.2:8080", Verdict::Silence),
            ("other", "[fd00:200::2]:8080", Verdict::Silence),
            ("other", "10.201.0.2:8080", Verdict::Silence),
        ] {
            self.connect(pod, to, &expected)?;
        }
        self.show("netattachctl policy --pod shop/server")?;
        self.show("netattachctl stats --pod shop/server")?;
        let policies = self.stage.json("netattachctl policy --pod shop/server -o json")?;
        let selected: Vec<_> = each(&policies["attachments"]).map(|row| row["selected_by"].clone()).collect();
        let both = vec![Value::from(vec!["shop/server"]); 2];
        self.transcript.expect("the policy selects both interfaces of the server", &both, &selected)?;
        let after = self.dropped_at_the_server()?;
        // The node's own multicast may be denied meanwhile, too.
        let counted = before.iter().zip(after).all(|(before, after)| after > *before);
        let what = "what it denied is counted: the port on the default network, the peer on both";
        self.transcript.expect(what, &true, &counted)
    }

    fn change_the_policy(&mut self) -> anyhow::Result<()> {
        self.transcript.step(
            "Change the policy",
            "The agent watches the file: the first rule is to name the other pod in place of the client.",
        );
        self.transcript.command(EDIT);
        let to = address("10.200.0.2:8080")?;
        let start = Instant::now();
        self.stage.run(EDIT)?;
        let took = traffic::first_answer("other", to, start)?;
        self.transcript.output(&format!(
            "The other pod is answered {} ms after the edit began, sed included.",
            took.as_millis()
        ));
        self.connect("other", "10.200.0.2:8080", &Verdict::Answered)?;
        self.connect("client", "10.200.0.2:8080", &Verdict::Silence)
    }

    fn kill_the_agent(&mut self) -> anyhow::Result<()> {
        self.transcript.step(
            "Kill the agent under traffic, and start it again",
            "Programs and maps are pinned and stay attached: neither traffic nor policy needs the agent.",
        );
        let before = Listing::read(&self.stage)?;
        self.show_listing(&before);
        let mut conversation = Conversation::from("other", address("10.200.0.2:8080")?)?;

        let line = format!("ip netns exec client ping -i 0.01 -c {PINGS} 10.200.0.4");
        self.transcript.command(&format!("{line} &"));
        let mut ping = self
            .stage
            .shell(&format!("exec {line}"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .context("start ping")?;
        let mut said = BufReader::new(ping.stdout.take().context("ping has no output")?).lines();
        while !said.next().context("ping ended at once")??.contains(" bytes from ") {}

        self.transcript.command(&format!("kill -9 {}", self.stage.agent_pid()?));
        self.stage.end_agent(Signal::KILL)?;
        self.connect("client", "10.200.0.2:8080", &Verdict::Silence)?;
        self.connect("other", "10.200.0.2:8080", &Verdict::Answered)?;
        let echo = conversation.say("still there?")?;
        let what = "without an agent the policy holds, and an open connection talks on";
        self.transcript.expect(what, &"still there?".to_owned(), &echo)?;

        self.transcript.command(&format!("{AGENT} &"));
        let took = self.stage.start_agent(AGENT)?;
        let under_traffic = ping.try_wait().context("poll ping")?.is_none();
        let what = format!("it is ready again after {} ms, still under traffic", took.as_millis());
        self.transcript.expect(&what, &true, &under_traffic)?;
        let summary = said.map_while(Result::ok).find(|line| line.contains(" packets transmitted"));
        ping.wait().context("wait for ping")?;
        let summary = summary.context("ping ended without a summary")?;
        self.transcript.output(&summary);
        let received = format!("{PINGS} packets transmitted, {PINGS} received");
        self.transcript.expect("not one packet is lost", &true, &summary.starts_with(&received))?;
        let echo = conversation.say("and now?")?;
        self.transcript.expect("the open connection has seen nothing", &"and now?".to_owned(), &echo)?;

        let after = Listing::read(&self.stage)?;
        self.show_listing(&after);
        self.transcript.expect("the same programs and maps on the same devices", &before, &after)?;
        let attachments = self.stage.json("netattachctl attachments -o json")?;
        self.transcript.expect(
            "the new agent knows all attachments, from its journal",
            &8,
            &each(&attachments).count(),
        )
    }

    fn detach_everything(&mut self) -> anyhow::Result<()> {
        self.transcript.step(
            "Detach everything, and look for what is left",
            "CNI DEL with the same words; the journal knows what to undo.",
        );
        for pod in PODS {
            let call = cni_call("DEL", pod);
            self.transcript.command(&call);
            let started = Instant::now();
            self.stage.run(&call)?;
            self.transcript.expect(
                &format!("{pod} has only its loopback left after {} ms", started.elapsed().as_millis()),
                &vec!["lo".to_owned()],
                &self.stage.links(Some(pod))?,
            )?;
        }
        self.show("netattachctl attachments | head -1")?;
        let mut links = self.bare.clone();
        // As with every CNI bridge plugin, the bridge is the network's and outlives its pods.
        links.push("demo0".to_owned());
        links.sort();
        let what = "links: the node's own, and the bridge, which belongs to the network";
        self.transcript.expect(what, &links, &self.stage.links(None)?)?;
        let ports = self.stage.json("ip -j link show master demo0")?;
        self.transcript.expect("the bridge has no ports", &0, &each(&ports).count())?;
        let nothing = Vec::<String>::new();
        let leases = stage::leases(&Path::new(HOME).join("networks"))?;
        self.transcript.expect("addresses: no lease", &nothing, &leases)?;
        let mut journal = stage::files_below(&Path::new(HOME).join("state"))?;
        // The list of pools that were ever used; no record of a pod.
        journal.retain(|file| !file.ends_with("/pools.jsonl") && !file.ends_with("/spare"));
        self.transcript.expect("journal: no record", &nothing, &journal)?;
        let status = stage::files_below(Path::new("/run/netattach/network-status"))?;
        self.transcript.expect("network-status: no file", &nothing, &status)?;
        let entries = kernel::attachment_entries(&self.stage)?;
        self.transcript.expect("BPF maps: no device and no address of an attachment", &0, &entries)?;

        let listing = Listing::read(&self.stage)?;
        self.transcript.expect("BPF programs: attached to nothing", &0, &listing.attached.len())?;
        let farewell = format!("kill {} && rm -r {BPFFS}", self.stage.agent_pid()?);
        self.transcript.command(&farewell);
        self.stage.end_agent(Signal::TERM)?;
        self.stage.run(&format!("rm -r {BPFFS}"))?;
        stage::until("programs and maps are freed", || kernel::is_gone(&self.stage, &listing))?;
        self.transcript.expect("the kernel has freed all programs and maps", &true, &true)
    }

    /// Prints a line of shell, runs it and prints its output.
    fn show(&self, line: &str) -> anyhow::Result<String> {
        self.transcript.command(line);
        let said = self.stage.run(line)?;
        self.transcript.output(&said);
        Ok(said)
    }

    /// Denied by port on the default network, by peer there, and by peer on `storage`.
    fn dropped_at_the_server(&self) -> anyhow::Result<[u64; 3]> {
        let stats = self.stage.json("netattachctl stats --pod shop/server -o json")?;
        let count = |ifname: &str, reason: &str| {
            let row = each(&stats).find(|row| row["ifname"] == ifname);
            row.and_then(|row| row["dropped"][reason].as_u64()).unwrap_or(0)
        };
        Ok([count("eth0", "ingress-port"), count("eth0", "ingress-peer"), count("net1", "ingress-peer")])
    }

    fn show_listing(&self, listing: &Listing) {
        self.transcript.command("bpftool prog; bpftool map; bpftool net    # ours, by name and id");
        self.transcript.columns(&listing.summary());
    }

    fn connect(&mut self, pod: &str, to: &str, expected: &Verdict) -> anyhow::Result<()> {
        let seen = traffic::attempt(pod, address(to)?)?;
        self.transcript.expect(&format!("{pod:<6} -> tcp {to:<19} {seen}"), expected, &seen)
    }
}

/// One call of the plugin as a container runtime makes it, as a line of shell.
fn cni_call(verb: &str, pod: &str) -> String {
    format!(
        "CNI_COMMAND={verb} CNI_CONTAINERID=demo-{pod} CNI_NETNS=/run/netns/{pod} CNI_IFNAME=eth0 \\\n  \
         CNI_PATH=/opt/cni/bin CNI_ARGS='K8S_POD_NAMESPACE=shop;K8S_POD_NAME={pod}' netattach < runtime.conf"
    )
}

fn address(text: &str) -> anyhow::Result<SocketAddr> {
    text.parse().with_context(|| format!("{text} is no address with a port"))
}

/// Interfaces of `ip -j addr` but the loopback: name, with its MAC if it was asked for, to global addresses.
fn interfaces(listed: &Value) -> BTreeMap<String, Vec<String>> {
    let mut interfaces = BTreeMap::new();
    for link in each(listed).filter(|link| link["ifname"] != "lo") {
        let (name, mac) = (link["ifname"].as_str().unwrap_or(""), link["address"].as_str().unwrap_or(""));
        let name = if mac.starts_with("02:da:0a") { format!("{name} {mac}") } else { name.to_owned() };
        let addresses = each(&link["addr_info"])
            .filter(|address| address["scope"] == "global")
            .filter_map(|address| Some(format!("{}/{}", address["local"].as_str()?, address["prefixlen"])))
            .collect();
        interfaces.insert(name, addresses);
    }
    interfaces
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn interfaces_are_known_by_name_requested_mac_and_global_addresses() {
        let address = |local: &str, scope: &str| json!({"local": local, "prefixlen": 24, "scope": scope});
        let listed = json!([
            {"ifname": "lo", "address": "00:00:00:00:00:00", "addr_info": [address("127.0.0.1", "host")]},
            {"ifname": "eth0", "address": "1a:29:bf:42:dc:9f",
             "addr_info": [address("10.0.0.2", "global"), address("fe80::1", "link")]},
            {"ifname": "lan0", "address": "02:da:0a:00:00:10", "addr_info": []},
        ]);
        let expected = BTreeMap::from([
            ("eth0".to_owned(), vec!["10.0.0.2/24".to_owned()]),
            ("lan0 02:da:0a:00:00:10".to_owned(), vec![]),
        ]);
        assert_eq!(interfaces(&listed), expected);
    }

    #[test]
    fn the_edit_names_text_that_the_policy_has() {
        let policy =
            std::fs::read_to_string(crate::tree::root().join("examples/demo/30-policy.yaml")).unwrap();
        let (_, ingress) = policy.split_once("  ingress:").unwrap();
        assert!(policy.find("app: client") > policy.find("  ingress:"));
        assert!(ingress.contains("app: client"));
    }
}
