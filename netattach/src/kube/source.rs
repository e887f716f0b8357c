//! The cluster as a source: a thread follows the API server, and readers share its snapshots.

use std::future::pending;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::sync::{Semaphore, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::timeout_at;

use super::access::{self, RightsError, Uses};
use super::backoff::Backoff;
use super::client::{Access, AccessError, Ask, Client, RequestError, Watcher};
use super::evict::{self, Candidate, NotEvicted};
use super::follow::Follower;
use super::list::{UNKNOWN, version_now};
use super::nodes;
use super::on_demand::{LeftOut, follow_wanted};
use super::patch;
use super::publish::Publisher;
use super::ranges;
use super::resource::{
    ALWAYS, DEFAULT_ALONE, NETWORK_POLICIES, NODES, NODES_PATH, OWN_NODE, REMOTE_PODS, Resource, Target,
    pod_path,
};
use super::taint;
use super::view::View;
use crate::error_chain::Chain;
use crate::npwg::NetworkRef;
use crate::objects::{ObjectName, Objects, Pod};
use crate::pace::spread;
use crate::source::{NotSynced, PodFuture, Source, WantedPod, Warning, follow};
use crate::sync::{Mutex, locked};

/// How long to wait for the watch to show a missing pod before the server is asked for it.
const LAG: Duration = Duration::from_millis(500);
/// How long before the caller's deadline a request ends, so that its failure can be reported.
const TO_TELL: Duration = Duration::from_millis(50);
/// Pauses between two requests for one pod: the first, and the longest.
const AGAIN: Duration = Duration::from_millis(500);
const MOST_AGAIN: Duration = Duration::from_secs(4);
/// Most time after which a node that is not watched is looked at for its startup taint.
const UNWATCHED: Duration = Duration::from_secs(30);
/// How long the startup taint may not be removable before that is reported: the node may have been changed meanwhile.
const TAINT_REPORTED: Duration = Duration::from_secs(10);
/// Most concurrent requests for pods.
const QUESTIONS: usize = 8;
/// Most bytes of a pod.
const POD: usize = 4 << 20;

/// Which parts of the cluster are followed.
#[derive(Debug, Clone)]
pub struct ClusterOptions {
    /// How the server is reached.
    pub access: Access,
    /// Name of this node, as `spec.nodeName` of its pods has it.
    pub node: String,
    /// Whether NetworkPolicies are enforced.
    pub network_policies: bool,
    /// The default network, if it can be an object.
    pub default_network: Option<NetworkRef>,
    /// How long a watch of pods lasts, in seconds.
    pub watch_seconds: u32,
    /// Whether a taint of the node is to be removed.
    pub startup_taint: bool,
    /// Whether pods may be evicted.
    pub eviction: bool,
    /// Whether the cluster's ranges are needed.
    pub ranges: bool,
    /// Which nodes are needed.
    pub nodes: NodesWanted,
    /// Is notified of every request.
    pub watcher: Option<Arc<dyn Watcher>>,
}

impl ClusterOptions {
    /// Returns the features that need rights of their own.
    fn uses(&self) -> Uses {
        Uses {
            network_policies: self.network_policies,
            startup_taint: self.startup_taint,
            eviction: self.eviction,
            nodes: self.nodes == NodesWanted::All,
            ranges: self.ranges,
        }
    }
}

/// Returns the rights that an agent with these options lacks, each with the rule that grants it.
///
/// # Errors
/// The server cannot be connected to or did not answer.
pub async fn missing_rights(options: ClusterOptions) -> Result<Vec<Warning>, RightsError> {
    let uses = options.uses();
    let client = Client::new(options.access, None).await?;
    access::missing(&client, uses).await
}

/// Which objects of nodes are needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodesWanted {
    /// All nodes: the agent makes the network between them.
    All,
    /// This node, while a definition takes its range from it; and whether there are others.
    OwnAndWhetherOthers,
    /// This node, while a definition takes its range from it.
    Own,
}

/// Why the cluster cannot be followed.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// The server cannot be connected to.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// The thread cannot be started.
    #[error("start the thread that follows the API server")]
    Thread(#[source] std::io::Error),
}

/// The cluster's objects. Dropping it ends the thread.
pub struct Cluster {
    view: Arc<View>,
    client: Arc<Client>,
    /// The runtime of the thread.
    runtime: tokio::runtime::Handle,
    node: Arc<str>,
    watch_seconds: u32,
    questions: Arc<Semaphore>,
    publisher: Arc<Publisher>,
    /// Since when the startup taint cannot be removed, and why.
    tainted: Mutex<Option<(Instant, String)>>,
    _stop: oneshot::Sender<()>,
    ended: watch::Receiver<()>,
}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cluster").field("node", &self.node).finish_non_exhaustive()
    }
}

impl Cluster {
    /// Starts to follow the cluster; connects in the background.
    ///
    /// # Errors
    /// [`ClusterError`]. An unreachable server is no error: connecting is retried.
    pub fn start(options: ClusterOptions) -> Result<Self, ClusterError> {
        let always = ALWAYS.into_iter();
        let optional = options.network_policies.then_some(&NETWORK_POLICIES);
        let nodes = (options.nodes == NodesWanted::All).then_some(&NODES);
        let resources: Vec<&'static Resource> = always.chain(optional).chain(nodes).collect();
        let view = Arc::new(View::new(resources.iter().copied()));
        let default_network = options.default_network.as_ref();
        let left_out = left_out(options.network_policies, default_network);
        if left_out.is_some() {
            view.change(|cache| cache.leave_out_default(default_network.cloned()));
        }
        let (uses, watch_seconds) = (options.uses(), options.watch_seconds);
        let node: Arc<str> = options.node.into();
        let publisher = Arc::new(Publisher::new(Arc::clone(&view), Arc::clone(&node)));
        let (stop, stopped) = oneshot::channel::<()>();
        let (alive, ended) = watch::channel(());
        let (started, start) = mpsc::channel();
        let work = Work {
            resources,
            view: Arc::clone(&view),
            publisher: Arc::clone(&publisher),
            node: Arc::clone(&node),
            nodes: options.nodes,
            ranges: options.ranges,
            watch_seconds,
            left_out: left_out.unwrap_or_default(),
            uses,
        };
        let thread = move || {
            // Dropped when the thread ends for any reason.
            let _alive = alive;
            let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
                Ok(runtime) => runtime,
                Err(error) => return drop(started.send(Err(ClusterError::Thread(error)))),
            };
            runtime.block_on(async {
                let client = match Client::new(options.access, options.watcher).await {
                    Ok(client) => Arc::new(client),
                    Err(error) => return drop(started.send(Err(error.into()))),
                };
                let handle = tokio::runtime::Handle::current();
                if started.send(Ok((Arc::clone(&client), handle))).is_ok() {
                    work.run(client, stopped).await;
                }
            });
        };
        thread::Builder::new().name("kubernetes".to_owned()).spawn(thread).map_err(ClusterError::Thread)?;
        let no_answer = || ClusterError::Thread(std::io::Error::other("the thread has ended"));
        let (client, runtime) = start.recv().map_err(|_| no_answer())??;
        let questions = Arc::new(Semaphore::new(QUESTIONS));
        Ok(Self {
            view,
            client,
            runtime,
            node,
            watch_seconds,
            questions,
            publisher,
            tainted: Mutex::new(None),
            _stop: stop,
            ended,
        })
    }

    /// Publishes the network-status of this node's pods.
    pub fn publisher(&self) -> Arc<Publisher> {
        Arc::clone(&self.publisher)
    }

    /// Waits for the end of the thread, which only a bug in the agent causes.
    pub fn ended(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut ended = self.ended.clone();
        async move { while ended.changed().await.is_ok() {} }
    }

    /// Removes the taints with a key from this node.
    pub async fn remove_taint(&self, key: &str) -> TaintRemoval {
        let (client, node, key) = (Arc::clone(&self.client), Arc::clone(&self.node), key.to_owned());
        let watch_seconds = self.watch_seconds;
        let removed = self.runtime.spawn(async move {
            // Asked first: the watch from there shows what happens to the node after it was read.
            let version = version_now(&client, &own_node(&node, watch_seconds)).await;
            (taint::remove(&client, &node, &key).await, version)
        });
        // No answer: the thread has ended.
        let Ok((removed, version)) = removed.await else { return TaintRemoval::Failed };
        match removed {
            Ok(true) => tracing::info!("the startup taint of the node is removed"),
            Ok(false) => {}
            Err(error) => {
                let why = Chain(&error).to_string();
                tracing::warn!(error = why, "the startup taint may stay on the node; will try again");
                locked(&self.tainted).get_or_insert_with(|| (Instant::now(), String::new())).1 = why;
                return if error.is_lasting() { TaintRemoval::Refused } else { TaintRemoval::Failed };
            }
        }
        *locked(&self.tainted) = None;
        TaintRemoval::Done(Untainted { version: version.inspect_err(not_watched).ok() })
    }

    /// Returns a warning about a startup taint that stays, while no pods are scheduled to the node.
    fn tainted_warning(&self) -> Option<Warning> {
        let tainted = locked(&self.tainted);
        let (since, why) = tainted.as_ref().filter(|(since, _)| since.elapsed() >= TAINT_REPORTED)?;
        let since = since.elapsed().as_secs();
        Some(Warning { object: "startup taint".to_owned(), problem: format!("for {since} s: {why}") })
    }

    /// Waits until this node may have a taint with that key again.
    pub async fn tainted_again(&self, key: &str, since: Untainted) {
        if let Some(version) = since.version {
            let (client, node, key) = (Arc::clone(&self.client), Arc::clone(&self.node), key.to_owned());
            let watch_seconds = self.watch_seconds;
            // Aborts its task when it is dropped, which ends the watch.
            let mut watching = JoinSet::new();
            watching.spawn_on(
                async move { taint::returns(&client, &own_node(&node, watch_seconds), &key, version).await },
                &self.runtime,
            );
            match watching.join_next().await {
                Some(Ok(Ok(()))) => return,
                Some(Ok(Err(error))) => not_watched(&error),
                // The thread has ended.
                Some(Err(_)) | None => {}
            }
        }
        // The watches of all agents may end for one reason.
        tokio::time::sleep(UNWATCHED / 2 + spread(UNWATCHED / 2)).await;
    }

    /// Returns a pod as the server has it now, to decide whether to evict it.
    ///
    /// # Errors
    /// [`NotEvicted`].
    pub async fn candidate(&self, name: &ObjectName) -> Result<Candidate, NotEvicted> {
        let (client, name) = (Arc::clone(&self.client), name.clone());
        self.on_thread(async move { evict::candidate(&client, &name).await }).await
    }

    /// Evicts the pod of that name and uid.
    ///
    /// # Errors
    /// [`NotEvicted`].
    pub async fn evict(&self, name: &ObjectName, uid: &str) -> Result<(), NotEvicted> {
        let (client, name, uid) = (Arc::clone(&self.client), name.clone(), uid.to_owned());
        self.on_thread(async move { evict::evict(&client, &name, &uid).await }).await
    }

    async fn on_thread<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, NotEvicted>> + Send + 'static,
    ) -> Result<T, NotEvicted> {
        let ended = |_| Err(NotEvicted::Failed("the agent is shutting down".to_owned()));
        self.runtime.spawn(work).await.unwrap_or_else(ended)
    }

    /// Asks the server for a pod until the answer is the wanted one, which is then in the next snapshot.
    /// Otherwise never returns: the caller has a deadline.
    async fn ask_for(&self, wanted: &WantedPod, deadline: Instant) {
        let mut pauses = Backoff::new(AGAIN, MOST_AGAIN);
        let mut is_told = false;
        loop {
            match self.ask(&wanted.name, deadline).await {
                Ok(Asked::Found(Some(pod))) if wanted.is(&pod) => return,
                // Changes of what the server has answered come by the watch.
                Ok(Asked::Found(_) | Asked::Elsewhere) => return pending().await,
                Ok(Asked::NoTime) => {}
                Err(error) => {
                    if is_told {
                        tracing::debug!(pod = %wanted.name, error = %Chain(&error), "the API server was asked for a pod again");
                    } else {
                        tracing::warn!(pod = %wanted.name, error = %Chain(&error), "the API server was asked for a pod");
                        is_told = true;
                    }
                    if error.code() == Some(UNKNOWN) {
                        return pending().await;
                    }
                }
            }
            tokio::time::sleep(pauses.next()).await;
        }
    }

    /// Asks the server for a pod, on the thread's runtime, if a slot is free before the deadline, which
    /// also bounds the answer. Dropping the future cancels the request.
    async fn ask(&self, name: &ObjectName, deadline: Instant) -> Result<Asked, RequestError> {
        let (client, view, node) = (Arc::clone(&self.client), Arc::clone(&self.view), Arc::clone(&self.node));
        let (questions, name) = (Arc::clone(&self.questions), name.clone());
        let asking = async move {
            let Ok(Ok(_place)) = timeout_at(deadline.into(), questions.acquire_owned()).await else {
                return Ok::<_, RequestError>(Asked::NoTime);
            };
            let within = deadline.saturating_duration_since(Instant::now()).saturating_sub(TO_TELL);
            // A question without time for an answer would count as one that the server has not answered.
            if within.is_zero() {
                return Ok(Asked::NoTime);
            }
            let json = ask(&client, &name, within).await?;
            if node_of(&json).as_deref() != Some(&*node) {
                return Ok(Asked::Elsewhere);
            }
            Ok(Asked::Found(view.change(|cache| cache.fetched(&json, Instant::now()))))
        };
        // Unlike a task, a `JoinSet` aborts its tasks when it is dropped, so that a cancelled caller
        // leaves no request.
        let mut asked: JoinSet<Result<Asked, RequestError>> = JoinSet::new();
        asked.spawn_on(asking, &self.runtime);
        // If there is no answer, the thread has ended.
        asked.join_next().await.and_then(Result::ok).unwrap_or(Ok(Asked::NoTime))
    }
}

/// Returns the pods of other nodes that are left out: those on the default network alone, because only NetworkPolicies
/// and policies for that network have them as peers. `None`: NetworkPolicies are enforced, and all are needed.
fn left_out(network_policies: bool, default_network: Option<&NetworkRef>) -> Option<LeftOut> {
    if network_policies {
        return None;
    }
    let own = default_network.and_then(|network| patch::value_of(&network.to_string()));
    let usually = own.map_or_else(|| DEFAULT_ALONE.to_owned(), |own| format!("{DEFAULT_ALONE},{own}"));
    Some(LeftOut { usually: usually.into(), then: DEFAULT_ALONE.into() })
}

/// What came of the removal of this node's startup taint.
#[derive(Debug)]
pub enum TaintRemoval {
    /// The node has none: [`Cluster::tainted_again`] looks from there on.
    Done(Untainted),
    /// The API server refuses it, until somebody changes something.
    Refused,
    /// It is not certain that the node has none, for a reason that passes.
    Failed,
}

/// A node that was found without its startup taint.
#[derive(Debug)]
pub struct Untainted {
    /// A version of nodes before that; `None`: unknown.
    version: Option<String>,
}

fn own_node(node: &str, watch_seconds: u32) -> Target<'_> {
    Target { resource: &OWN_NODE, path: NODES_PATH, node, watch_seconds, left_out: "" }
}

fn not_watched(error: &RequestError) {
    tracing::debug!(error = %Chain(error), "the node is not watched for its startup taint; it is looked at instead");
}

/// What the server was asked for a pod.
enum Asked {
    /// The pod on this node as it is in the snapshots now; `None`: it cannot be read.
    Found(Option<Arc<Pod>>),
    /// It is on another node.
    Elsewhere,
    /// The server was not asked: no slot was free before the deadline, or the thread has ended.
    NoTime,
}

async fn ask(client: &Client, name: &ObjectName, within: Duration) -> Result<Box<RawValue>, RequestError> {
    let ask = Ask::get(pod_path(name));
    let body = client.read(&ask, POD, within).await?;
    serde_json::from_slice(&body).map_err(|source| ask.undecodable(source))
}

/// Returns the node of a pod.
fn node_of(json: &RawValue) -> Option<String> {
    #[derive(Deserialize)]
    struct Written {
        spec: Spec,
    }
    #[derive(Deserialize)]
    struct Spec {
        #[serde(rename = "nodeName")]
        node_name: Option<String>,
    }
    serde_json::from_str::<Written>(json.get()).ok()?.spec.node_name
}

/// The work of the thread.
struct Work {
    resources: Vec<&'static Resource>,
    view: Arc<View>,
    publisher: Arc<Publisher>,
    node: Arc<str>,
    nodes: NodesWanted,
    ranges: bool,
    uses: Uses,
    watch_seconds: u32,
    left_out: LeftOut,
}

impl Work {
    /// Runs until it is stopped, or until a part of it ends, which is a bug in the agent.
    async fn run(self, client: Arc<Client>, stopped: oneshot::Receiver<()>) {
        let mut parts = JoinSet::new();
        for resource in self.resources {
            let follower = follower_of(&client, &self.view, &self.node, self.watch_seconds, resource);
            parts.spawn(async move { follower.run().await });
        }
        let (client, view, node) = (Arc::clone(&client), Arc::clone(&self.view), Arc::clone(&self.node));
        let watch_seconds = self.watch_seconds;
        let on_demand = |resource, left_out, wanted| {
            let follower = follower_of(&client, &view, &node, watch_seconds, resource);
            follow_wanted(follower, left_out, wanted, view.wants_more_remote())
        };
        parts.spawn(on_demand(&REMOTE_PODS, self.left_out, view.wants_remote()));
        if self.nodes != NodesWanted::All {
            parts.spawn(on_demand(&OWN_NODE, LeftOut::default(), view.wants_own_node()));
        }
        if self.nodes == NodesWanted::OwnAndWhetherOthers {
            parts.spawn(nodes::look_for_others(Arc::clone(&client), Arc::clone(&view)));
        }
        if self.ranges {
            parts.spawn(ranges::follow(Arc::clone(&client), Arc::clone(&view), Arc::clone(&node)));
        }
        parts.spawn(async move { view.publish().await });
        let (asking, uses) = (Arc::clone(&client), self.uses);
        parts.spawn(async move { asking.missing.follow(&asking, uses).await });
        parts.spawn(self.publisher.events().run(Arc::clone(&client)));
        parts.spawn(self.publisher.run(client));
        tokio::select! {
            // Dropping the sender stops it too.
            _ = stopped => {}
            _ = parts.join_next() => {}
        }
    }
}

fn follower_of(
    client: &Arc<Client>,
    view: &Arc<View>,
    node: &Arc<str>,
    watch_seconds: u32,
    resource: &'static Resource,
) -> Follower {
    Follower {
        client: Arc::clone(client),
        view: Arc::clone(view),
        resource,
        node: Arc::clone(node),
        watch_seconds,
        left_out: Arc::default(),
    }
}

impl Source for Cluster {
    fn snapshot(&self) -> Arc<Objects> {
        self.view.snapshot()
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.view.changes()
    }

    /// Objects are always followed; this reloads the identity and the certificates.
    fn reread(&self) {
        let client = Arc::clone(&self.client);
        self.runtime.spawn(async move { client.renew().await });
    }

    /// An unavailable server is no reason to refuse ADDs: see [`Source::warnings`].
    fn synced(&self) -> Result<(), NotSynced> {
        self.view.synced()
    }

    fn reachable(&self) -> Option<Result<(), String>> {
        Some(self.view.followed())
    }

    fn warnings(&self) -> Vec<Warning> {
        let mut warnings = self.view.warnings();
        warnings.extend(self.publisher.warning());
        warnings.extend(self.tainted_warning());
        warnings.extend(self.client.missing.warnings());
        warnings
    }

    /// The watch may lag behind the runtime: waits for it for a moment, then also asks the server,
    /// repeatedly until the deadline.
    fn pod<'a>(&'a self, wanted: &'a WantedPod, deadline: Instant) -> PodFuture<'a> {
        Box::pin(async move {
            if let Some(pod) = wanted.find(&self.snapshot()) {
                return Some(Arc::clone(pod));
            }
            // Before the first snapshot no request is decided anyway.
            self.synced().ok()?;
            let moment = deadline.min(Instant::now() + LAG);
            if let Some(pod) = follow(self, wanted, moment).await {
                return Some(pod);
            }
            // Both futures may be dropped: the request is cancelled, and changes stay unseen.
            tokio::select! {
                biased;
                // The pod is in the next snapshot, from which the request is answered.
                () = self.ask_for(wanted, deadline) => {}
                found = follow(self, wanted, deadline) => return found,
            }
            follow(self, wanted, deadline.max(Instant::now() + LAG)).await
        })
    }

    fn reading(&self) -> Duration {
        self.view.reading()
    }
}
