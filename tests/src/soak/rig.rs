//! Two nodes with their agents, the wires between them, and the API server.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::decide::{Key, NAMESPACES, PodSpec};
use super::model::{Attachment, World, node_name};
use super::network::{ALL, NETWORKS, Network, address_of, default_subnets, second, selections};
use super::standing::Standing;
use super::stranger::Stranger;
use crate::api_server::{ApiServer, Credential, FaultId, Options, TOKEN};
use crate::node::{MAX_ATTACHMENTS, WIRE, ip};
use crate::{Node, Pod, manifest, tools, wires};

/// The reference plugins that are used if they are installed.
const REFERENCE: [&str; 2] = ["ptp", "host-local"];
/// The other end of [`WIRE`] in every test: a link by this name is the rig's own.
pub(super) const UPLINK: &str = "wire1";
/// The bridge that the nodes' wire connects.
const LAN: &str = "br-lan";

/// A pod that should run.
#[derive(Debug)]
pub(super) struct Live {
    pub(super) spec: PodSpec,
    pub(super) sandbox: Pod,
    pub(super) attached: bool,
    /// Networks that its ADD may have attached: those stay.
    pub(super) may_stay: BTreeSet<Network>,
    /// The addresses of its interface of the default network.
    pub(super) eth0: BTreeSet<IpAddr>,
    /// Its attachments, as last published.
    pub(super) attachments: Vec<Attachment>,
    /// Its author has written into its status.
    pub(super) forged: bool,
}

/// An ended sandbox for which no DEL was sent.
#[derive(Debug)]
pub(super) struct Lost {
    pub(super) container: String,
    pub(super) attachments: Vec<Attachment>,
}

/// Everything that runs.
#[derive(Debug)]
pub(super) struct Rig {
    pub(super) nodes: [Node; 2],
    pub(super) running: [bool; 2],
    pub(super) server: ApiServer,
    pub(super) live: BTreeMap<Key, Live>,
    pub(super) lost: [Vec<Lost>; 2],
    /// Completed pods: they have no sandbox, and their objects still exist; and whether their author has written into
    /// the status.
    pub(super) finished: BTreeMap<Key, bool>,
    /// Pods that stay.
    pub(super) standing: Standing,
    pub(super) stranger: Stranger,
    pub(super) reference: bool,
    /// Whether current changes will appear in no watch when the server works again.
    pub(super) forgets: bool,
    /// The fault that affects written statuses.
    pub(super) of_statuses: Option<FaultId>,
    /// The logs of ended agents.
    logs: [String; 2],
}

/// Returns the directory of the reference plugins. If they are missing, that is reported as skipped, and fails in CI.
pub(super) fn reference() -> Option<PathBuf> {
    tools::directory("soak with reference plugins", "NETATTACH_REFERENCE_PLUGINS", &REFERENCE)
}

impl Rig {
    /// With room for that many attachments that stay.
    pub(super) fn new(reference: Option<&Path>, standing: u32) -> Result<Self> {
        let mut nodes = [Node::new(&[])?, Node::new(&[])?];
        let stranger = connect(&nodes)?;
        nodes[0].namespace.loopback_up()?;
        nodes[1].namespace.loopback_up()?;
        let mut server = ApiServer::start_in(&Options::default(), &nodes[0].namespace)?;
        server.listen_in(&nodes[1].namespace)?;
        for namespace in NAMESPACES {
            server.create(&manifest::namespace(
                namespace,
                &json!({"kubernetes.io/metadata.name": namespace}),
            ))?;
        }
        server.create(&manifest::namespace(NETWORKS, &json!({})))?;
        for (number, node) in nodes.iter_mut().enumerate() {
            let name = node_name(number);
            server.create(&json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}))?;
            let kubeconfig = server.kubeconfig(&node.path("kubeconfig"), &Credential::Token(TOKEN))?;
            node.join(kubeconfig, &name)?;
            node.set("collectAfterSeconds", json!(1));
            node.set("maxAttachments", json!(MAX_ATTACHMENTS + standing));
            // One network is created by an executed plugin.
            node.set("delegation", json!({"exec": ["ptp"]}));
            if let Some(from) = reference {
                wires::install(node, from, &REFERENCE)?;
            }
        }
        let mut rig = Self {
            nodes,
            running: [false; 2],
            server,
            live: BTreeMap::new(),
            lost: [Vec::new(), Vec::new()],
            finished: BTreeMap::new(),
            standing: Standing::default(),
            stranger,
            forgets: false,
            of_statuses: None,
            reference: reference.is_some(),
            logs: [String::new(), String::new()],
        };
        for network in ALL {
            for node in 0..2 {
                if rig.reference || network != Network::Ptp {
                    rig.define(network, node, 1500)?;
                }
            }
        }
        for node in 0..2 {
            rig.define_second(node)?;
        }
        rig.start_agents()?;
        Ok(rig)
    }

    /// Starts the agents that do not run.
    pub(super) fn start_agents(&mut self) -> Result<()> {
        for (node, running) in self.nodes.iter_mut().zip(&mut self.running) {
            if !*running {
                node.start()?;
                *running = true;
            }
        }
        Ok(())
    }

    /// Ends an agent: by SIGKILL, or by SIGTERM.
    pub(super) fn end_agent(&mut self, node: usize, kill: bool) -> Result<()> {
        if !std::mem::replace(&mut self.running[node], false) {
            return Ok(());
        }
        let log = if kill { self.nodes[node].kill()? } else { self.nodes[node].stop()? };
        self.logs[node].push_str(&log);
        Ok(())
    }

    /// Writes the logs of the agents, after ending them; returns their directory.
    pub(super) fn write_logs(&mut self, directory: &Path, story: &[String]) -> Result<()> {
        fs::create_dir_all(directory)?;
        for node in 0..2 {
            self.end_agent(node, true)?;
            fs::write(directory.join(format!("{}.log", node_name(node))), &self.logs[node])?;
        }
        let mut requests = String::new();
        for request in self.server.requests() {
            let _ = writeln!(requests, "{request:?}");
        }
        fs::write(directory.join("requests.log"), requests)?;
        fs::write(directory.join("steps.log"), story.join("\n"))?;
        Ok(())
    }

    /// Makes or changes a network's definition.
    pub(super) fn define(&self, network: Network, node: usize, mtu: u16) -> Result<()> {
        let leases = self.nodes[if network.spans_nodes() { 0 } else { node }].path("leases");
        let subnets = network.subnets(node);
        let ranges: Vec<Value> = subnets.iter().map(|subnet| json!([{"subnet": subnet}])).collect();
        let pool = json!({"type": "host-local", "dataDir": leases, "ranges": ranges});
        let asked = json!({"type": "static"});
        let config = match network {
            Network::Seg => json!({"type": "macvlan", "master": WIRE, "mode": "bridge", "ipam": asked}),
            Network::Lan => json!({"type": "bridge", "bridge": LAN, "ipam": asked}),
            Network::Pool => json!({"type": "bridge", "bridge": "br-pool", "ipam": pool}),
            Network::Link => json!({"type": "veth", "ipam": pool}),
            Network::Ptp => json!({"type": "ptp", "ipam": pool}),
        };
        let mut config = config;
        config["cniVersion"] = json!("1.0.0");
        config["name"] = json!(network.definition(node));
        config["mtu"] = json!(mtu);
        config["capabilities"] = json!({"ips": network.spans_nodes()});
        self.server.apply(&manifest::network(NETWORKS, &network.definition(node), &config))?;
        Ok(())
    }

    /// Makes the definition that pods of a node can choose in place of the default network.
    fn define_second(&self, node: usize) -> Result<()> {
        let mut config = self.nodes[node].default_config();
        config["bridge"] = json!("br-second");
        let subnets = default_subnets(node, true);
        config["ipam"] = self.nodes[node].host_local(&subnets.iter().map(String::as_str).collect::<Vec<_>>());
        self.server.create(&manifest::network(NETWORKS, &second(node), &config))?;
        Ok(())
    }

    /// Forgets the sandboxes that agents have detached by themselves.
    pub(super) fn forget_collected(&mut self) -> Result<()> {
        for (node, lost) in self.nodes.iter().zip(&mut self.lost) {
            if !lost.is_empty() {
                let rows = node.ctl(&["attachments"])?;
                let rows = rows.as_array().context("attachments are a list")?;
                lost.retain(|it| rows.iter().any(|row| row["container_id"] == it.container));
            }
        }
        Ok(())
    }

    /// Records that a pod has no sandbox any more, so that its addresses are free.
    pub(super) fn is_gone(&mut self, live: &Live) {
        for network in ALL.into_iter().filter(|network| network.spans_nodes()) {
            let name = format!("{NETWORKS}/{}", network.definition(live.spec.node));
            let had = live.attachments.iter().filter(|it| it.network == name).flat_map(|it| &it.addresses);
            for address in had {
                self.stranger.note(network, *address);
            }
        }
    }

    /// Returns the addresses that pods have had, that no sandbox has, and that none will have when its networks are
    /// defined again.
    pub(super) fn free(&self) -> Vec<(Network, IpAddr)> {
        let is_asked_for = |live: &Live, network: Network, address: IpAddr| {
            let asked = live.spec.networks.get(&network).map(|host| network.addresses(*host));
            asked.into_iter().flatten().any(|it| address_of(&it) == Some(address))
        };
        let of_lost = self.lost.iter().flatten().flat_map(|it| &it.attachments);
        let held = self.live.values().flat_map(|live| &live.attachments).chain(of_lost);
        let held: BTreeSet<IpAddr> = held.flat_map(|it| &it.addresses).copied().collect();
        let is_free = |(network, address): &(Network, IpAddr)| {
            !held.contains(address) && !self.live.values().any(|live| is_asked_for(live, *network, *address))
        };
        self.stranger.gone().filter(is_free).collect()
    }

    /// A pod's object.
    pub(super) fn object(spec: &PodSpec) -> Value {
        let ports: Vec<Value> = [("web", spec.web), ("dns", 53)]
            .into_iter()
            .flat_map(|(name, port)| {
                ["UDP", "TCP"].map(|it| json!({"name": name, "containerPort": port, "protocol": it}))
            })
            .collect();
        let mut annotations = json!({"k8s.v1.cni.cncf.io/networks": selections(&spec.networks, spec.node)});
        if spec.second {
            annotations["v1.multus-cni.io/default-network"] =
                json!(format!("{NETWORKS}/{}", second(spec.node)));
        }
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "namespace": spec.key.0, "name": spec.key.1, "uid": spec.uid, "labels": spec.labels,
                "annotations": annotations
            },
            "spec": {
                "nodeName": node_name(spec.node),
                "containers": [{"name": "main", "image": "example.com/x", "ports": ports}]
            },
            "status": {"phase": "Running"}
        })
    }

    /// Returns the current objects, and the holders of addresses.
    pub(super) fn world(&self) -> World {
        let pods = self.keys().into_iter().filter_map(|key| {
            let object = self.server.get("pods", &key.0, &key.1)?;
            Some((key, object))
        });
        let labels = |name: &str| {
            let object = self.server.get("namespaces", "", name)?;
            Some((name.to_owned(), object["metadata"]["labels"].clone()))
        };
        let policies = (0..).map(|number| format!("policy-{number}")).take(8).collect::<Vec<_>>();
        let policies = NAMESPACES
            .iter()
            .flat_map(|namespace| policies.iter().map(move |name| (namespace, name)))
            .filter_map(|(namespace, name)| self.server.get("multi-networkpolicies", namespace, name));
        let lost = self.lost.iter().flatten().flat_map(|it| it.attachments.clone());
        let live = self.live.values().filter(|it| it.attached).flat_map(|it| it.attachments.clone());
        World {
            pods: pods.collect(),
            namespaces: NAMESPACES.iter().filter_map(|name| labels(name)).collect(),
            policies: policies.collect(),
            attachments: lost.chain(live).collect(),
            claims: Vec::new(),
        }
        .with_claims()
    }

    /// Every name that a pod can have.
    fn keys(&self) -> Vec<Key> {
        let numbers = 0..16;
        let of = |namespace: &&str| {
            let namespace = (*namespace).to_owned();
            numbers.clone().map(move |number| (namespace.clone(), format!("p{number}")))
        };
        NAMESPACES.iter().flat_map(of).collect()
    }
}

/// Wires between the nodes: one is the parent of macvlans, the other connects the bridges.
fn connect(nodes: &[Node; 2]) -> Result<Stranger> {
    let between = Stranger::between(nodes)?;
    for node in nodes {
        ip(&node.namespace, &["link", "add", LAN, "type", "bridge"])?;
        ip(&node.namespace, &["link", "set", LAN, "up"])?;
        ip(&node.namespace, &["link", "set", UPLINK, "master", LAN])?;
    }
    Ok(between)
}
