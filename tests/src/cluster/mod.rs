//! A real cluster: etcd and kube-apiserver in a namespace of their own, with certificates, RBAC and bound tokens, and a
//! bridge that nodes are connected to. Nothing of it outlasts the value.
//!
//! `pki` makes the certificates, `client` sends requests to the server, `exec` runs commands in containers through
//! it, `kubectl` is the real one, `program` runs a daemon, `kinds` has the paths of objects; `worker` is a node with
//! a kubelet, `site` a whole cluster before netattach is installed, `ready` measures the time until it is ready,
//! `left` the leftovers on its node.

mod client;
mod exec;
mod kinds;
mod kubectl;
pub mod left;
mod pki;
mod program;
pub mod ready;
pub mod site;
mod worker;

use std::fs;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::Namespace;
use crate::node::ip;
use crate::tools;
use crate::traffic::eventually;

pub use self::client::{Client, Reply, Watch};
pub use self::exec::Executed;
pub use self::kubectl::{Ended, Kubectl};
use self::pki::Pki;
use self::program::Program;
pub use self::worker::{Bare, Loss, Setup, Worker};

/// The programs of a cluster.
const PROGRAMS: [&str; 7] = [
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "kube-proxy",
    "device-plugin",
];
/// The controllers of the controller manager: enough for Deployments, their budgets and Services, and for nodes to be
/// ready.
const CONTROLLERS: &str =
    "deployment,replicaset,garbagecollector,namespace,nodelifecycle,endpoint,endpointslice,disruption";
/// Additional controllers if pods have service accounts: those for `kubectl apply -k` of a DaemonSet, and for the
/// Jobs that remove its leftovers.
const MORE_CONTROLLERS: &str = "daemonset,job,serviceaccount,root-ca-cert-publisher";
/// The server's address on the bridge of nodes.
const SERVER: Ipv4Addr = Ipv4Addr::new(172, 30, 0, 1);
const BRIDGE: &str = "cluster";
const PORT: u16 = 6443;
/// Addresses of Services; the server takes the first one for itself.
const SERVICES: &str = "10.96.0.0/16";
const SERVER_SERVICE: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 1);
const ETCD: &str = "http://127.0.0.1:2379";
const ISSUER: &str = "https://kubernetes.default.svc.cluster.local";
/// A server that takes longer to get ready counts as hung.
const PATIENCE: Duration = Duration::from_secs(60);
/// The manifests that are installed in every cluster.
const MANIFESTS: [&str; 3] = [
    include_str!("../../../deploy/base/crds/network-attachment-definitions.yaml"),
    include_str!("../../../deploy/base/crds/multi-networkpolicies.yaml"),
    include_str!("../../../deploy/base/rbac.yaml"),
];

/// A cluster without nodes: a test sets the state of its pods.
#[derive(Debug)]
pub struct Cluster {
    // Before the directory that they write to, and in the order in which they end.
    controllers: Vec<Program>,
    server: Program,
    etcd: Program,
    namespace: Arc<Namespace>,
    pki: Pki,
    tools: PathBuf,
    dir: TempDir,
    nodes: AtomicU8,
    accounts: bool,
}

impl Cluster {
    /// Returns the cluster that the tests of this process share while one of them runs: objects of tests are
    /// separated by their namespaces. `None` without the programs: the test is reported as skipped.
    ///
    /// # Errors
    /// The cluster cannot be made.
    pub fn shared(test: &str) -> Result<Option<Arc<Self>>> {
        static SHARED: Mutex<Weak<Cluster>> = Mutex::new(Weak::new());
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(cluster) = shared.upgrade() {
            return Ok(Some(cluster));
        }
        let Some(cluster) = Self::new(test)? else { return Ok(None) };
        let cluster = Arc::new(cluster);
        *shared = Arc::downgrade(&cluster);
        Ok(Some(cluster))
    }

    /// A cluster, with the definitions and rights of `deploy` installed.
    ///
    /// # Errors
    /// The cluster cannot be made.
    pub fn new(test: &str) -> Result<Option<Self>> {
        let Some(cluster) = Self::start(test, false)? else { return Ok(None) };
        cluster.install()?;
        Ok(Some(cluster))
    }

    /// Returns a cluster in which nothing is installed, and whose pods have the tokens of their service accounts.
    ///
    /// # Errors
    /// The cluster cannot be made.
    pub fn empty(test: &str) -> Result<Option<Self>> {
        Self::start(test, true)
    }

    fn start(test: &str, accounts: bool) -> Result<Option<Self>> {
        let Some(tools) = tools::directory(test, "NETATTACH_KUBERNETES", &PROGRAMS) else { return Ok(None) };
        let namespace = Arc::new(Namespace::new()?);
        ip(&namespace, &["link", "set", "lo", "up"])?;
        ip(&namespace, &["link", "add", BRIDGE, "up", "type", "bridge"])?;
        ip(&namespace, &["address", "add", &format!("{SERVER}/16"), "dev", BRIDGE])?;
        // The server determines the address that it advertises from this route.
        ip(&namespace, &["route", "add", "default", "dev", BRIDGE])?;
        let dir = tempfile::Builder::new().prefix("netattach-cluster-").tempdir()?;
        let pki = Pki::new(dir.path())?;
        let etcd = start_etcd(&tools, &namespace, dir.path())?;
        let server = start_server(&tools, &namespace, dir.path(), &pki, accounts)?;
        let (controllers, nodes) = (Vec::new(), AtomicU8::new(0));
        let cluster = Self { controllers, server, etcd, namespace, pki, tools, dir, nodes, accounts };
        cluster.wait_until_ready()?;
        Ok(Some(cluster))
    }

    /// Starts the scheduler and the controllers of Deployments and nodes.
    ///
    /// # Errors
    /// They cannot be started.
    pub fn start_controllers(&mut self) -> Result<()> {
        let own =
            self.pki.client("controllers", Some("system:masters"))?.write(self.dir.path(), "controllers")?;
        let credentials = json!({"client-certificate": own.certificate, "client-key": own.key});
        let config = write_config(self.dir.path(), "controllers", &credentials, self.pki.authority_file())?;
        let mut manager = vec![format!("--controllers={CONTROLLERS}")];
        if self.accounts {
            manager = vec![
                format!("--controllers={CONTROLLERS},{MORE_CONTROLLERS}"),
                format!("--root-ca-file={}", self.pki.authority_file().display()),
            ];
        }
        for (name, more) in [("kube-controller-manager", manager), ("kube-scheduler", Vec::new())] {
            let mut program = Command::new(self.tools.join(name));
            program.arg("--kubeconfig").arg(&config).args(["--leader-elect=false", "--port=0"]);
            program.arg("--secure-port=0").args(more);
            self.controllers.push(Program::start_outside(
                &self.namespace,
                program,
                &self.dir.path().join(format!("{name}.log")),
            )?);
        }
        Ok(())
    }

    /// Starts the controller that assigns each node a part of that IPv4 range.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start_ranges(&mut self, range: &str) -> Result<()> {
        let own = self.pki.client("ranges", Some("system:masters"))?.write(self.dir.path(), "ranges")?;
        let credentials = json!({"client-certificate": own.certificate, "client-key": own.key});
        let config = write_config(self.dir.path(), "ranges", &credentials, self.pki.authority_file())?;
        let mut program = Command::new(self.tools.join("kube-controller-manager"));
        program.arg("--kubeconfig").arg(&config).args([
            "--leader-elect=false",
            "--port=0",
            "--secure-port=0",
        ]);
        program.args(["--controllers=nodeipam", "--allocate-node-cidrs=true", "--cluster-cidr", range]);
        let log = self.dir.path().join("ranges.log");
        self.controllers.push(Program::start_outside(&self.namespace, program, &log)?);
        Ok(())
    }

    /// Kills the API server, like a crash. Its stored objects stay.
    pub fn stop_server(&mut self) {
        self.server.end();
    }

    /// Starts the API server again.
    ///
    /// # Errors
    /// It does not get ready.
    pub fn start_server(&mut self) -> Result<()> {
        self.server = start_server(&self.tools, &self.namespace, self.dir.path(), &self.pki, self.accounts)?;
        self.wait_until_ready()
    }

    /// A client with all rights.
    ///
    /// # Errors
    /// The certificate cannot be made.
    pub fn admin(&self) -> Result<Client> {
        let identity = self.pki.client("admin", Some("system:masters"))?;
        Client::new(self.namespace.clone(), self.address(), self.pki.authority(), Some(&identity), None)
    }

    /// A client with the rights of the agent.
    ///
    /// # Errors
    /// The server issues no token.
    pub fn agent(&self) -> Result<Client> {
        let token = self.token("kube-system", "netattach", Duration::from_secs(3600))?;
        Client::new(self.namespace.clone(), self.address(), self.pki.authority(), None, Some(token))
    }

    /// Returns a token of a service account that is valid for that long, at least ten minutes.
    ///
    /// # Errors
    /// The server issues none.
    pub fn token(&self, namespace: &str, account: &str, valid: Duration) -> Result<String> {
        let request = json!({
            "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
            "spec": {"audiences": [ISSUER], "expirationSeconds": valid.as_secs()}
        });
        let path = format!("/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token");
        let reply = self.admin()?.post(&path, &request)?.expect(201)?;
        Ok(reply["status"]["token"].as_str().context("a token is text")?.to_owned())
    }

    /// Writes a configuration with which the agent reaches the server, with a token in a separate file, as in a pod.
    /// Returns its path.
    ///
    /// # Errors
    /// The server issues no token, or a file cannot be written.
    pub fn agent_config(&self, directory: &Path) -> Result<PathBuf> {
        let (token, authority) = (directory.join("token"), directory.join("ca.crt"));
        fs::write(&token, self.token("kube-system", "netattach", Duration::from_secs(3600))?)?;
        fs::write(&authority, self.pki.authority())?;
        write_config(directory, "agent", &json!({"tokenFile": token}), &authority)
    }

    /// Connects a namespace to the bridge by `eth0`; returns its address.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn connect(&self, node: &Namespace) -> Result<Ipv4Addr> {
        let number = self.nodes.fetch_add(1, Ordering::Relaxed) + 1;
        let address = Ipv4Addr::new(172, 30, 1, number);
        self.connect_at(node, address)?;
        Ok(address)
    }

    /// Connects the namespace in which a node is restarted, at its previous address.
    fn reconnect(&self, node: &Namespace, address: Ipv4Addr) -> Result<()> {
        // The kernel may not have removed the former one's end yet.
        let _ = ip(&self.namespace, &["link", "delete", &port_of(address)]);
        self.connect_at(node, address)
    }

    fn connect_at(&self, node: &Namespace, address: Ipv4Addr) -> Result<()> {
        let port = port_of(address);
        ip(node, &["link", "set", "lo", "up"])?;
        ip(node, &["link", "add", "eth0", "type", "veth", "peer", "name", &port])?;
        ip(node, &["link", "set", &port, "netns", &self.namespace.task()])?;
        ip(&self.namespace, &["link", "set", &port, "master", BRIDGE, "up"])?;
        ip(node, &["address", "add", &format!("{address}/16"), "dev", "eth0"])?;
        ip(node, &["link", "set", "eth0", "up"])?;
        ip(node, &["route", "add", "default", "via", &SERVER.to_string()])
    }

    /// Returns the namespace of the server, from which nodes are reached as from outside of the cluster.
    pub fn outside(&self) -> &Namespace {
        &self.namespace
    }

    /// Resident memory of the server and of etcd, in bytes.
    ///
    /// # Errors
    /// A program has ended.
    pub fn resident(&self) -> Result<u64> {
        Ok(self.server.resident()? + self.etcd.resident()?)
    }

    /// Returns the address of the server.
    fn address(&self) -> (IpAddr, u16) {
        (IpAddr::V4(SERVER), PORT)
    }

    fn wait_until_ready(&self) -> Result<()> {
        let admin = self.admin()?;
        let ready = || self.server.has_ended() || admin.get("/readyz").is_ok_and(|reply| reply.status == 200);
        ensure!(eventually(PATIENCE, ready), "kube-apiserver does not get ready:\n{}", self.server.said());
        ensure!(!self.server.has_ended(), "kube-apiserver has ended:\n{}", self.server.said());
        Ok(())
    }

    /// Creates the objects of `deploy`, and waits until the new kinds are served.
    fn install(&self) -> Result<()> {
        let admin = self.admin()?;
        for text in MANIFESTS {
            for document in serde_norway::Deserializer::from_str(text) {
                admin.create(&Value::deserialize(document)?)?;
            }
        }
        for (version, resource) in [
            ("v1", "network-attachment-definitions"),
            ("v1beta1", "multi-networkpolicies"),
            ("v1beta2", "multi-networkpolicies"),
        ] {
            let path = format!("/apis/k8s.cni.cncf.io/{version}/{resource}");
            let served = || admin.get(&path).is_ok_and(|reply| reply.status == 200);
            ensure!(eventually(PATIENCE, served), "{path} is not served");
        }
        Ok(())
    }

    /// Adds the rules of that component of `deploy/components` to the agent's role.
    ///
    /// # Errors
    /// The server refuses it, or the component adds nothing.
    pub fn grant(&self, component: &str) -> Result<()> {
        const ROLE: &str = "/apis/rbac.authorization.k8s.io/v1/clusterroles/netattach";
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../deploy/components")
            .join(component)
            .join("kustomization.yaml");
        let component: Value = serde_norway::from_str(&fs::read_to_string(path)?)?;
        let patch = component["patches"][0]["patch"].as_str().context("a component without a patch")?;
        let changes: Vec<Value> = serde_norway::from_str(patch)?;
        let admin = self.admin()?;
        let role = admin.get(ROLE)?.expect(200)?;
        let mut rules = role["rules"].as_array().context("a role without rules")?.clone();
        rules.extend(changes.iter().map(|change| change["value"].clone()));
        admin.merge(ROLE, &json!({"rules": rules}))?.expect(200)?;
        Ok(())
    }
}

/// The end of a node's link that is on the bridge.
fn port_of(node: Ipv4Addr) -> String {
    format!("node{}", node.octets()[3])
}

fn start_etcd(tools: &Path, namespace: &Namespace, dir: &Path) -> Result<Program> {
    let mut etcd = Command::new(tools.join("etcd"));
    etcd.arg("--data-dir").arg(dir.join("etcd")).args(["--listen-client-urls", ETCD]);
    etcd.args(["--advertise-client-urls", ETCD, "--listen-peer-urls", "http://127.0.0.1:2380"]);
    // Losing the data with the machine is no problem: the test is lost too.
    etcd.args(["--log-level", "warn", "--unsafe-no-fsync"]);
    Program::start_outside(namespace, etcd, &dir.join("etcd.log"))
}

fn start_server(
    tools: &Path,
    namespace: &Namespace,
    dir: &Path,
    pki: &Pki,
    accounts: bool,
) -> Result<Program> {
    let names = [IpAddr::V4(SERVER), IpAddr::V4(SERVER_SERVICE), IpAddr::V4(Ipv4Addr::LOCALHOST)];
    let own = pki.server("kube-apiserver", &names)?.write(dir, "apiserver")?;
    let kubelets = pki.client("kube-apiserver", Some("system:masters"))?.write(dir, "kubelet-client")?;
    let mut server = Command::new(tools.join("kube-apiserver"));
    let mut set = |name: &str, value: &str| {
        server.arg(format!("--{name}={value}"));
    };
    let path = |path: &Path| path.display().to_string();
    set("etcd-servers", ETCD);
    set("bind-address", "0.0.0.0");
    set("secure-port", &PORT.to_string());
    set("advertise-address", &SERVER.to_string());
    set("allow-privileged", "true");
    set("tls-cert-file", &path(&own.certificate));
    set("tls-private-key-file", &path(&own.key));
    set("client-ca-file", &path(pki.authority_file()));
    set("authorization-mode", "Node,RBAC");
    set("enable-admission-plugins", "NodeRestriction");
    match accounts {
        // As on present servers: a token only for the pod, without a secret.
        true => set("feature-gates", "BoundServiceAccountTokenVolume=true"),
        // The admission plugin requires objects that a controller creates for service accounts.
        false => set("disable-admission-plugins", "ServiceAccount"),
    }
    set("kubelet-client-certificate", &path(&kubelets.certificate));
    set("kubelet-client-key", &path(&kubelets.key));
    set("kubelet-certificate-authority", &path(pki.authority_file()));
    set("kubelet-preferred-address-types", "InternalIP");
    set("service-account-issuer", ISSUER);
    set("service-account-key-file", &path(&pki.accounts().certificate));
    set("service-account-signing-key-file", &path(&pki.accounts().key));
    set("service-cluster-ip-range", SERVICES);
    set("v", "1");
    Program::start_outside(namespace, server, &dir.join("apiserver.log"))
}

/// Writes a configuration of clients of the server. JSON is YAML too.
fn write_config(directory: &Path, user: &str, credentials: &Value, authority: &Path) -> Result<PathBuf> {
    let config = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "cluster",
        "clusters": [{
            "name": "cluster",
            "cluster": {"server": format!("https://{SERVER}:{PORT}"), "certificate-authority": authority}
        }],
        "users": [{"name": user, "user": credentials}],
        "contexts": [{"name": "cluster", "context": {"cluster": "cluster", "user": user}}]
    });
    let path = directory.join(format!("{user}.kubeconfig"));
    fs::write(&path, config.to_string())?;
    Ok(path)
}
