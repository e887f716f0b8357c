//! A cluster of one node with a kubelet and containerd, and the checks of the pods of a Deployment there.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::process::Command;
use std::time::{Duration, Instant};

use netattach_tests::Namespace;
use netattach_tests::cluster::{Client, Cluster, Setup, Worker};
use netattach_tests::machine::IMAGE;
use netattach_tests::node::executable;
use netattach_tests::snapshot::{Maps, Snapshot, has_resting_numbers};
use netattach_tests::traffic::{Echo, SILENCE, connects, eventually};
use serde_json::{Value, json};

pub(crate) const STATUS: &str = "k8s.v1.cni.cncf.io/network-status";
pub(crate) const NETWORKS: &str = "k8s.v1.cni.cncf.io/networks";
const POLICY_FOR: &str = "k8s.v1.cni.cncf.io/policy-for";
/// How long the API server is down, in the short form and the nightly one: longer than `status` takes to report it.
pub(crate) const OUTAGE: [Duration; 2] = [Duration::from_secs(20), Duration::from_secs(120)];
/// How long a cluster on a busy machine may take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);
/// Between two datagrams: the cluster needs the processors meanwhile.
pub(crate) const PACE: Duration = Duration::from_millis(5);
pub(crate) const PODS: &str = "/api/v1/namespaces/default/pods";
const DEPLOYMENTS: &str = "/apis/apps/v1/namespaces/default/deployments";
/// The networks of the pods of a Deployment, with their subnets.
const OF_PODS: [(&str, &str); 3] =
    [("storage", "10.51.0.0/24"), ("lan", "10.52.0.0/24"), ("segment", "10.53.0.0/24")];
/// The port of the server in pods of a Deployment, which the policy allows to clients.
pub(crate) const PORT: u16 = 5432;
pub(crate) struct Rig {
    pub(crate) worker: Worker,
    pub(crate) admin: Client,
    before: Snapshot,
    random: Random,
    // After the node that uses it.
    pub(crate) cluster: Cluster,
}

/// A server in a pod that only clients reach, and pods to reach it from.
pub(crate) struct Policed {
    pub(crate) server: SocketAddr,
    pub(crate) client: Namespace,
    other: Namespace,
    _echoes: [Echo; 2],
}

impl Policed {
    /// Asserts that the client reaches the server only on the port of the policy, and another pod not at all.
    #[track_caller]
    pub(crate) fn assert_holds(&self) {
        let reached = eventually(PATIENCE, || connects(&self.client, self.server, SILENCE));
        assert!(reached, "the client is allowed");
        assert!(!connects(&self.other, self.server, SILENCE), "another pod is not");
        let beside = SocketAddr::new(self.server.ip(), self.server.port() + 1);
        assert!(!connects(&self.client, beside, SILENCE), "another port is not");
    }
}

/// An attached pod of the API, and the agent's data about it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Running {
    pub(crate) name: String,
    pub(crate) container: String,
    /// Addresses by network.
    pub(crate) addresses: BTreeMap<String, String>,
}

impl Rig {
    /// Returns a node, and nothing else. The controllers assign it a range of `ranges`.
    pub(crate) fn bare(test: &str, setup: &Setup<'_>, ranges: Option<&str>) -> Option<Self> {
        let mut cluster = Cluster::new(test).unwrap()?;
        cluster.start_controllers().unwrap();
        if let Some(ranges) = ranges {
            cluster.start_ranges(ranges).unwrap();
        }
        if setup.taint.is_some() {
            cluster.grant("startup-taint").unwrap();
        }
        let admin = cluster.admin().unwrap();
        let worker = Worker::start(test, &cluster, test, setup).unwrap()?;
        let before = Snapshot::take(worker.node(), &[]).unwrap();
        Some(Self { worker, admin, before, random: Random::new(), cluster })
    }

    /// With three networks: a routed link, a bridge and macvlans, and a policy on the first that lets only clients
    /// reach the pods of Deployments, on one port.
    pub(crate) fn new(test: &str, setup: &Setup<'_>) -> Option<Self> {
        let rig = Self::bare(test, setup, None)?;
        let Self { worker, admin, .. } = &rig;
        let leases = worker.node().path("leases");
        let links = [
            json!({"type": "veth"}),
            json!({"type": "bridge", "bridge": "br-lan"}),
            json!({"type": "macvlan", "master": "eth0"}),
        ];
        for ((name, subnet), mut config) in OF_PODS.into_iter().zip(links) {
            config["cniVersion"] = json!("1.0.0");
            config["ipam"] =
                json!({"type": "host-local", "dataDir": leases, "ranges": [[{"subnet": subnet}]]});
            admin.create(&definition(name, &config)).unwrap();
        }
        let policy = json!({
            "apiVersion": "k8s.cni.cncf.io/v1beta1", "kind": "MultiNetworkPolicy",
            "metadata": {
                "namespace": "default", "name": "web", "annotations": {POLICY_FOR: "default/storage"}
            },
            "spec": {
                "podSelector": {"matchLabels": {"app": "web"}}, "policyTypes": ["Ingress"],
                "ingress": [{
                    "from": [{"podSelector": {"matchLabels": {"app": "client"}}}],
                    "ports": [{"protocol": "TCP", "port": PORT}, {"protocol": "UDP", "port": PORT}]
                }]
            }
        });
        admin.create(&policy).unwrap();
        Some(rig)
    }

    pub(crate) fn get(&self, path: &str) -> Value {
        self.admin.get(path).map_or(Value::Null, |reply| reply.body)
    }

    /// Returns the output of `netattachctl status`, whatever its exit code.
    pub(crate) fn status(&self) -> Value {
        let mut ctl = Command::new(executable("netattachctl").unwrap());
        ctl.arg("--socket").arg(self.worker.node().socket()).args(["status", "-o", "json"]);
        serde_json::from_slice(&ctl.output().unwrap().stdout).unwrap_or_default()
    }

    /// A pod without a controller, of that specification, on these networks.
    pub(crate) fn pod(&self, name: &str, labels: &Value, networks: &str, spec: &Value) {
        let annotations = match networks {
            "" => json!({}),
            networks => json!({NETWORKS: networks}),
        };
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "namespace": "default", "name": name, "labels": labels, "annotations": annotations
            },
            "spec": spec
        });
        self.admin.create(&pod).unwrap();
    }

    /// Waits until a pod is ready and its status is published; returns it.
    #[track_caller]
    pub(crate) fn ready(&self, name: &str, networks: usize) -> Value {
        let path = format!("{PODS}/{name}");
        let mut pod = Value::Null;
        let ready = eventually(PATIENCE, || {
            pod = self.get(&path);
            is_ready(&pod) && published(&pod).len() == networks
        });
        assert!(ready, "{pod:#}\n{}", self.get("/api/v1/namespaces/default/events"));
        pod
    }

    /// Deletes a pod, and waits until it is gone.
    #[track_caller]
    pub(crate) fn delete(&self, name: &str) {
        let path = format!("{PODS}/{name}");
        self.admin.delete(&path).unwrap().expect(200).unwrap();
        let gone = || self.admin.get(&path).is_ok_and(|reply| reply.status == 404);
        assert!(eventually(PATIENCE, gone), "{:#}", self.get(&path));
    }

    /// A Deployment of pods on all three networks, with this as their label `app`.
    pub(crate) fn deploy(&self, name: &str, replicas: usize) {
        let annotations = json!({NETWORKS: "storage, lan, segment"});
        self.deploy_pods(name, replicas, &annotations, &busybox(&json!({})));
    }

    /// A Deployment of pods of that specification, with this as their label `app`.
    pub(crate) fn deploy_pods(&self, name: &str, replicas: usize, annotations: &Value, spec: &Value) {
        let deployment = json!({
            "apiVersion": "apps/v1", "kind": "Deployment",
            "metadata": {"namespace": "default", "name": name},
            "spec": {
                "replicas": replicas, "selector": {"matchLabels": {"app": name}},
                "strategy": {"rollingUpdate": {"maxSurge": 2, "maxUnavailable": 3}},
                "template": {
                    "metadata": {"labels": {"app": name}, "annotations": annotations}, "spec": spec
                }
            }
        });
        self.admin.create(&deployment).unwrap();
    }

    pub(crate) fn scale(&self, name: &str, replicas: usize) {
        self.change(name, &json!({"spec": {"replicas": replicas}}));
    }

    /// Starts a rollout: all pods are replaced by others.
    pub(crate) fn restart(&self, name: &str) {
        // A different value each time.
        let now = std::time::UNIX_EPOCH.elapsed().unwrap();
        let annotations = json!({"restarted": now.as_nanos().to_string()});
        self.change(name, &json!({"spec": {"template": {"metadata": {"annotations": annotations}}}}));
    }

    fn change(&self, name: &str, patch: &Value) {
        self.admin.merge(&format!("{DEPLOYMENTS}/{name}"), patch).unwrap().expect(200).unwrap();
    }

    pub(crate) fn delete_deployment(&self, name: &str) {
        self.admin.delete(&format!("{DEPLOYMENTS}/{name}")).unwrap().expect(200).unwrap();
    }

    /// The pods of this many replicas of each Deployment, once all that must hold of them does.
    #[track_caller]
    pub(crate) fn settled(&self, replicas: &[(&str, usize)]) -> Vec<Running> {
        let mut seen = Err(String::new());
        eventually(PATIENCE, || {
            seen = self.look(replicas);
            seen.is_ok()
        });
        seen.unwrap_or_else(|why| panic!("{why}"))
    }

    /// Checks that every pod is ready and attached to four networks, in one sandbox, which the runtime has; the
    /// published status shows its attachments; and nothing is held for any other pod.
    pub(crate) fn look(&self, replicas: &[(&str, usize)]) -> Result<Vec<Running>, String> {
        let pods = self.get(PODS);
        let pods = pods["items"].as_array().ok_or("no pods are listed")?;
        let mut of_app: BTreeMap<&str, usize> = BTreeMap::new();
        for pod in pods {
            let app = pod["metadata"]["labels"]["app"].as_str().unwrap_or_default();
            *of_app.entry(app).or_default() += 1;
        }
        let expected: BTreeMap<&str, usize> =
            replicas.iter().copied().filter(|(_, number)| *number > 0).collect();
        if of_app != expected {
            return Err(format!("pods: {of_app:?} in place of {expected:?}"));
        }
        let rows = self.worker.node().ctl(&["attachments"]).map_err(|error| format!("{error:#}"))?;
        let rows = rows.as_array().ok_or("no attachments are listed")?;
        let mut running = Vec::new();
        for pod in pods {
            running.push(attached(pod, rows).map_err(|why| format!("{}: {why}", pod["metadata"]["name"]))?);
        }
        let each = OF_PODS.len() + 1;
        if rows.len() != running.len() * each {
            return Err(format!("{} attachments of {} pods", rows.len(), running.len()));
        }
        let mut cri = self.worker.containerd().cri().map_err(|error| format!("{error:#}"))?;
        for pod in &running {
            let (ready, _) = cri.sandbox_status(&pod.container).map_err(|error| format!("{error:#}"))?;
            if !ready {
                return Err(format!("{}: its sandbox is not ready", pod.name));
            }
        }
        let held = self.held();
        let leases = running.len() * (each + 1);
        if held != (running.len(), leases) {
            return Err(format!("records and leases: {held:?} of {} pods", running.len()));
        }
        Ok(running)
    }

    /// Pod and container of each attachment.
    pub(crate) fn attached(&self) -> Vec<[String; 2]> {
        let rows = self.worker.node().ctl(&["attachments"]).unwrap();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let of_row = |row: &Value| [text(&row["pod"]["name"]), text(&row["container_id"])];
        rows.as_array().unwrap().iter().map(of_row).collect()
    }

    /// Records and leases on the disk. The default network has two families.
    pub(crate) fn held(&self) -> (usize, usize) {
        let files = Snapshot::take(self.worker.node(), &[]).unwrap().files;
        let below = |directory: &str| files.keys().filter(|path| path.starts_with(directory)).count();
        (below("state/journal/"), below("leases/"))
    }

    /// Waits until nothing is left that did not exist before the first pod.
    #[track_caller]
    pub(crate) fn assert_nothing_is_left(&self) {
        let gone = eventually(PATIENCE, || self.get(PODS)["items"] == json!([]));
        assert!(gone, "{:#}", self.get(PODS));
        let left = || {
            // It cannot be taken while the packet filter is being changed.
            let after = Snapshot::take(self.worker.node(), &[]).map_err(|error| format!("{error:#}"))?;
            let links = |snapshot: &Snapshot| -> BTreeSet<String> {
                let links = snapshot.node.links.iter().filter(|(_, link)| link.kind != "bridge");
                links.map(|(name, _)| name.clone()).collect()
            };
            let namespaces = std::fs::read_dir("/run/netns").into_iter().flatten().flatten();
            let namespaces: Vec<_> = namespaces.map(|entry| entry.file_name()).collect();
            Ok::<_, String>((
                (after.files.clone(), after.dataplane.clone()),
                (links(&after), links(&self.before)),
                (after.pins, self.before.pins.clone()),
                namespaces,
            ))
        };
        let is_clean = || {
            let Ok(((files, maps), (links, links_before), (pins, pins_before), namespaces)) = left() else {
                return false;
            };
            files.is_empty()
                && maps == Maps::default()
                && links == links_before
                && pins == pins_before
                && namespaces.is_empty()
                && has_resting_numbers(self.worker.node()).is_ok_and(|has_some| !has_some)
        };
        assert!(eventually(PATIENCE, is_clean), "{:#?}", left());
    }

    /// The namespace of a pod.
    pub(crate) fn namespace(&self, pod: &Running) -> Namespace {
        self.worker.namespace_of(&pod.name).unwrap()
    }

    /// Servers in the first pod of the Deployment `web`, of pods that are sorted by name: one client is before it.
    pub(crate) fn policed(&self, pods: &[Running]) -> Policed {
        let [client, server, other, ..] = pods else { panic!("a client and two servers: {pods:?}") };
        let [client_at, other, server_at] = [client, other, server].map(|pod| self.namespace(pod));
        let at = |port: u16| address(server, "storage", port);
        let echoes = [PORT, PORT + 1].map(|port| Echo::serve(&server_at, at(port)).unwrap());
        Policed { server: at(PORT), client: client_at, other, _echoes: echoes }
    }

    /// Kills the agent at random moments and starts it again, until the pods are settled and it was killed this often.
    #[track_caller]
    pub(crate) fn settled_with_kills(&mut self, replicas: &[(&str, usize)], kills: u32) -> Vec<Running> {
        let deadline = Instant::now() + PATIENCE;
        let mut killed = 0;
        loop {
            std::thread::sleep(self.random.up_to(Duration::from_millis(2500)));
            match self.look(replicas) {
                Ok(running) if killed >= kills => return running,
                Ok(_) => {}
                Err(why) => assert!(Instant::now() < deadline, "{why}"),
            }
            // After twice as many kills, the agent is left alone until the pods are settled.
            if killed < 2 * kills {
                self.kill_for_a_moment();
                killed += 1;
            }
        }
    }

    /// Kills the agent at random moments and starts it again, for that long.
    pub(crate) fn kill_for(&mut self, time: Duration) {
        let until = Instant::now() + time;
        while Instant::now() < until {
            std::thread::sleep(self.random.up_to(Duration::from_millis(2500)));
            self.kill_for_a_moment();
        }
    }

    fn kill_for_a_moment(&mut self) {
        self.worker.node_mut().kill().unwrap();
        std::thread::sleep(self.random.up_to(Duration::from_millis(1500)));
        self.worker.node_mut().start().unwrap();
    }
}

/// A definition in the namespace `default`.
pub(crate) fn definition(name: &str, config: &Value) -> Value {
    json!({
        "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
        "metadata": {"namespace": "default", "name": name}, "spec": {"config": config.to_string()}
    })
}

/// The specification of a pod that sleeps, with these resources.
pub(crate) fn busybox(resources: &Value) -> Value {
    json!({
        "terminationGracePeriodSeconds": 0,
        "containers": [
            {"name": "main", "image": IMAGE, "imagePullPolicy": "Never", "resources": resources}
        ]
    })
}

/// Returns the address of a pod on a network.
pub(crate) fn address(pod: &Running, network: &str, port: u16) -> SocketAddr {
    SocketAddr::new(pod.addresses[&format!("default/{network}")].parse().unwrap(), port)
}

pub(crate) fn is_ready(pod: &Value) -> bool {
    let conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
    conditions.filter(|it| it["type"] == "Ready").any(|it| it["status"] == "True")
        && pod["metadata"]["deletionTimestamp"].is_null()
}

/// The published status of a pod.
pub(crate) fn published(pod: &Value) -> Vec<Value> {
    let status = pod["metadata"]["annotations"][STATUS].as_str().unwrap_or("[]");
    serde_json::from_str(status).unwrap()
}

fn attached(pod: &Value, rows: &[Value]) -> Result<Running, String> {
    if !is_ready(pod) {
        return Err(format!("not ready: {:#}", pod["status"]));
    }
    let name = pod["metadata"]["name"].as_str().unwrap_or_default().to_owned();
    let rows: Vec<&Value> = rows.iter().filter(|row| row["pod"]["name"] == *name).collect();
    if rows.iter().any(|row| row["state"] != "attached") {
        return Err(format!("not attached: {rows:?}"));
    }
    let containers: BTreeSet<&str> = rows.iter().filter_map(|row| row["container_id"].as_str()).collect();
    let [container] = Vec::from_iter(containers)[..] else { return Err(format!("one sandbox: {rows:?}")) };
    let of_agent: BTreeMap<String, String> = rows
        .iter()
        .map(|row| {
            let net = row["addresses"][0].as_str().unwrap_or_default();
            let ip = net.split('/').next().unwrap_or_default();
            (row["network"].as_str().unwrap_or_default().to_owned(), ip.to_owned())
        })
        .collect();
    let published = published(pod);
    // By interface: the default network has another name in the status of a node with a file for it.
    let of_status: BTreeSet<&str> = published.iter().filter_map(|entry| entry["ips"][0].as_str()).collect();
    let told: BTreeSet<&str> = of_agent.values().map(String::as_str).collect();
    if told != of_status || told.len() != OF_PODS.len() + 1 {
        return Err(format!("published: {of_status:?}, attached: {of_agent:?}"));
    }
    let ip = pod["status"]["podIP"].as_str().unwrap_or_default();
    if !told.contains(ip) {
        return Err(format!("its address is {ip}, attached: {of_agent:?}"));
    }
    Ok(Running { name, container: container.to_owned(), addresses: of_agent })
}

/// Numbers that differ from run to run (xorshift).
pub(crate) struct Random {
    state: u64,
}

impl Random {
    fn new() -> Self {
        let given = std::env::var("NETATTACH_SEED").ok().and_then(|seed| seed.parse().ok());
        let now = std::time::UNIX_EPOCH.elapsed().map_or(1, |since| since.as_nanos() as u64);
        let seed = given.unwrap_or(now) | 1;
        // Shown when the test fails.
        eprintln!("NETATTACH_SEED={seed}");
        Self { state: seed }
    }

    fn up_to(&mut self, most: Duration) -> Duration {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        most.mul_f64((self.state >> 11) as f64 / (1_u64 << 53) as f64)
    }
}
