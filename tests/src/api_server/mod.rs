//! A Kubernetes API server for tests, in the test's process: objects without validation, but with the semantics that
//! clients rely on (lists in pages of one version, watches with bookmarks and history, merge patches, uids), and with
//! deliberate faults.
//!
//! Semantics: <https://kubernetes.io/docs/reference/using-api/api-concepts/>.
//!
//! | module | provides |
//! |---|---|
//! | [`kinds`] | the kinds of objects |
//! | `query`, `selector`, `list`, `watch`, `write`, `merge` | parsing of requests; the verbs |
//! | `store`, `state` | the objects and their history; state shared by the parts |
//! | `shape`, `status`, `discovery`, `content` | answers and their bodies |
//! | [`faults`], [`log`] | deliberate faults; the requests of clients |
//! | `listen`, `serve`, `authority` | connections, requests, certificates |

mod authority;
mod content;
mod discovery;
pub mod faults;
pub mod kinds;
mod list;
mod listen;
pub mod log;
mod merge;
mod query;
mod selector;
mod serve;
mod shape;
mod state;
mod status;
mod store;
mod watch;
mod write;

use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use netattach::netns::Netns;
use serde_json::{Value, json};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

pub use self::faults::{CutOff, Fault, FaultId, Faults, When};
pub use self::kinds::Kind;
pub use self::log::Request;
pub use self::query::Verb;
pub use self::write::ForeignUid;

use self::authority::Authority;
use self::listen::{Listener, Place};
use self::state::{Admission, Settings, Shared};
use crate::Namespace;
use crate::admission::{Policies, Review};
use crate::traffic::{PATIENCE, eventually, stretched};

/// The token that is accepted from the start.
pub const TOKEN: &str = "the-first-token";

/// Properties of a server.
#[derive(Debug, Clone)]
pub struct Options {
    /// Address to listen at.
    pub address: IpAddr,
    /// Minor version of Kubernetes that it reports, which determines whether it streams lists on request, refuses to,
    /// or ignores the parameters.
    pub minor: u32,
    /// Time between bookmarks of a watch. Real servers take about a minute.
    pub bookmarks: Duration,
    /// Its behaviour for a patch whose `metadata.uid` is another object's.
    pub foreign_uid: ForeignUid,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            address: Ipv4Addr::LOCALHOST.into(),
            minor: 31,
            bookmarks: Duration::from_secs(1),
            foreign_uid: ForeignUid::Invalid,
        }
    }
}

/// The credentials of a client.
#[derive(Debug, Clone)]
pub enum Credential<'a> {
    /// A token in the kubeconfig.
    Token(&'a str),
    /// A file with a token.
    TokenFile(&'a Path),
}

/// A running API server; it ends with this value. Its objects and its log live as long.
#[derive(Debug)]
pub struct ApiServer {
    shared: Arc<Shared>,
    authority: Authority,
    address: SocketAddr,
    places: Vec<Place>,
    listeners: Vec<Listener>,
    runtime: Handle,
    end: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl ApiServer {
    /// A server in the namespace of this process.
    ///
    /// # Errors
    /// It cannot listen.
    pub fn start(options: &Options) -> Result<Self> {
        Self::start_at(options, None)
    }

    /// A server in a namespace, whose loopback has to be up for the default address.
    ///
    /// # Errors
    /// It cannot listen.
    pub fn start_in(options: &Options, namespace: &Namespace) -> Result<Self> {
        Self::start_at(options, Some(Netns::open(namespace.path())?))
    }

    fn start_at(options: &Options, netns: Option<Netns>) -> Result<Self> {
        let authority = Authority::new()?;
        let settings =
            Settings { bookmarks: options.bookmarks, minor: options.minor, foreign_uid: options.foreign_uid };
        let shared = Arc::new(Shared::new(settings, authority.server(options.address)?, TOKEN));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (end, ended) = oneshot::channel::<()>();
        let thread = std::thread::Builder::new().name("api-server".into()).spawn(move || {
            // An error means that the owner is gone.
            let _ = runtime.block_on(ended);
            runtime.shutdown_background();
        })?;
        let mut server = Self {
            shared,
            authority,
            address: SocketAddr::new(options.address, 0),
            places: vec![Place { netns, address: SocketAddr::new(options.address, 0) }],
            listeners: Vec::new(),
            runtime: handle,
            end: Some(end),
            thread: Some(thread),
        };
        server.start_again()?;
        Ok(server)
    }

    /// Listens in one more namespace, at the same address and port.
    ///
    /// # Errors
    /// It cannot listen there.
    pub fn listen_in(&mut self, namespace: &Namespace) -> Result<()> {
        let place = Place { netns: Some(Netns::open(namespace.path())?), address: self.address };
        self.listeners.push(Listener::open(&place, &self.shared, &self.runtime)?.0);
        self.places.push(place);
        Ok(())
    }

    /// Returns the URL for clients.
    pub fn url(&self) -> String {
        format!("https://{}", self.address)
    }

    /// Its address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The certificate of the authority that signed its own, in PEM.
    pub fn authority(&self) -> &str {
        self.authority.pem()
    }

    /// Writes a kubeconfig file.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn kubeconfig(&self, path: &Path, credential: &Credential<'_>) -> Result<PathBuf> {
        let user = match credential {
            Credential::Token(token) => json!({"token": token}),
            Credential::TokenFile(file) => json!({"tokenFile": file}),
        };
        let authority = STANDARD.encode(self.authority());
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "tests",
            "clusters": [{"name": "tests", "cluster": {"server": self.url(), "certificate-authority-data": authority}}],
            "users": [{"name": "tests", "user": user}],
            "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": "tests"}}]
        });
        fs::write(path, config.to_string())?;
        Ok(path.to_owned())
    }

    /// Accepts these tokens only.
    pub fn accept_tokens(&self, tokens: &[&str]) {
        *self.shared.tokens() = tokens.iter().map(|token| (*token).to_owned()).collect();
    }

    /// Reports from now on that clients lack exactly these rights, verb and resource. Requests are answered all the
    /// same; a fault can refuse them.
    pub fn deny(&self, rights: &[(&str, &str)]) {
        let owned = |(verb, resource): &(&str, &str)| ((*verb).to_owned(), (*resource).to_owned());
        *self.shared.denied() = rights.iter().map(owned).collect();
    }

    /// Applies these policies to every write of clients from now on, as writes of that user: `request.userInfo` of a
    /// policy.
    pub fn admit_by(&self, policies: Policies, user: Value) {
        *self.shared.admission() = Some(Admission { policies, user, reviews: Mutex::default() });
    }

    /// Returns the writes that the policies were applied to, whatever the result.
    pub fn reviews(&self) -> Vec<Review> {
        let admission = self.shared.admission();
        let reviews = admission.as_ref().map(|it| it.reviews.lock().unwrap_or_else(PoisonError::into_inner));
        reviews.map(|reviews| reviews.clone()).unwrap_or_default()
    }

    /// Presents a certificate by an authority that no client knows to connections from now on, until the next
    /// [`ApiServer::rotate_authority`] or [`ApiServer::own_certificate`].
    ///
    /// # Errors
    /// The certificate cannot be made.
    pub fn foreign_certificate(&self) -> Result<()> {
        *self.shared.tls() = Authority::new()?.server(self.address.ip())?;
        Ok(())
    }

    /// Shows a certificate by its own authority again.
    ///
    /// # Errors
    /// The certificate cannot be made.
    pub fn own_certificate(&self) -> Result<()> {
        *self.shared.tls() = self.authority.server(self.address.ip())?;
        Ok(())
    }

    /// Uses another authority from now on ([`ApiServer::authority`]), and presents a certificate by it.
    ///
    /// # Errors
    /// The certificate cannot be made.
    pub fn rotate_authority(&mut self) -> Result<()> {
        self.authority = Authority::new()?;
        self.own_certificate()
    }

    /// Returns the deliberate faults.
    pub fn faults(&self) -> &Faults {
        &self.shared.faults
    }

    /// Forgets the history of changes: a watch that begins before now, and a page of an earlier list, get 410.
    /// Running watches continue.
    pub fn compact(&self) {
        self.shared.change(store::Store::compact);
    }

    /// Freezes lists of a resource in the present state, until [`Faults::clear`]: one server of several is behind, or
    /// has been started from an older snapshot of its cache. A list is then older than the state that its client has
    /// received; watches that begin with it report everything since.
    pub fn list_as_now(&self, resource: &str) {
        let version = self.shared.store().version();
        self.shared.faults.list_at(resource, version);
    }

    /// Serves a kind, in all its versions or one, or stops serving it. Watches of it end then.
    ///
    /// # Errors
    /// There is no such kind.
    pub fn serve(&self, resource: &str, version: Option<&str>, served: bool) -> Result<()> {
        let kind = Kind::named(resource).with_context(|| format!("there is no kind {resource}"))?;
        for own in kind.versions.iter().filter(|own| version.is_none_or(|version| version == **own)) {
            self.shared.serve(kind, own, served);
        }
        Ok(())
    }

    /// Closes the listeners: connections are refused. Open connections stay.
    pub fn refuse_connections(&mut self) {
        for listener in self.listeners.drain(..) {
            listener.close(&self.runtime);
        }
    }

    /// Resets every open connection.
    pub fn reset_connections(&self) {
        for connection in self.shared.connections().open.values() {
            connection.reset();
        }
    }

    /// Stops the server: no listener, no connection. Its objects stay.
    pub fn stop(&mut self) {
        self.refuse_connections();
        for connection in self.shared.connections().open.values() {
            connection.close();
        }
        eventually(PATIENCE, || self.shared.connections().open.is_empty());
    }

    /// Listens again at the same address.
    ///
    /// # Errors
    /// It cannot listen.
    pub fn start_again(&mut self) -> Result<()> {
        self.refuse_connections();
        for place in &mut self.places {
            place.address = self.address;
            let (listener, address) = Listener::open(place, &self.shared, &self.runtime)?;
            self.address = address;
            self.listeners.push(listener);
        }
        Ok(())
    }

    /// Connections so far, and those that are open.
    pub fn connections(&self) -> (u64, usize) {
        let connections = self.shared.connections();
        (connections.accepted, connections.open.len())
    }
}

/// The objects, from the test's side: without a request, and so without an entry in the log.
impl ApiServer {
    /// Creates an object. Its `uid` is kept if it has one, and its status too.
    ///
    /// # Errors
    /// It exists, or is of no known kind.
    pub fn create(&self, object: &Value) -> Result<Value> {
        let kind = Kind::of(object).context("the object is of no known kind")?;
        let namespace = object["metadata"]["namespace"].as_str();
        let made = self.shared.change(|store| write::create(store, kind, namespace, object.clone(), None));
        Ok(said(made)?.as_ref().clone())
    }

    /// Makes an object or replaces it whole, status included; the `uid` stays.
    ///
    /// # Errors
    /// It is of no known kind, or has no name.
    pub fn apply(&self, object: &Value) -> Result<Value> {
        let kind = Kind::of(object).context("the object is of no known kind")?;
        let metadata = &object["metadata"];
        let name = metadata["name"].as_str().context("the object has no name")?;
        let key = write::key(kind, metadata["namespace"].as_str(), name);
        let Some(old) = self.shared.store().get(&key) else { return self.create(object) };
        let mut new = write::without_type(object.clone());
        for field in ["uid", "creationTimestamp", "generation"] {
            new["metadata"][field] = old["metadata"][field].clone();
        }
        Ok(self.shared.change(|store| store.commit(key, Some(new))).as_ref().clone())
    }

    /// Puts something in an object's place that need not be an object of its kind.
    ///
    /// # Errors
    /// There is no such kind.
    pub fn put_as_is(&self, resource: &str, namespace: &str, name: &str, anything: Value) -> Result<()> {
        let key = key(resource, namespace, name)?;
        self.shared.change(|store| store.commit(key, Some(anything)));
        Ok(())
    }

    /// Returns an object, without `apiVersion` and `kind`; `None`: there is none. Namespace `""`: it has none.
    pub fn get(&self, resource: &str, namespace: &str, name: &str) -> Option<Value> {
        self.shared.store().get(&key(resource, namespace, name).ok()?).map(|object| object.as_ref().clone())
    }

    /// Merges a patch into an object, status included.
    ///
    /// # Errors
    /// There is no such object.
    pub fn patch(&self, resource: &str, namespace: &str, name: &str, patch: &Value) -> Result<Value> {
        let key = key(resource, namespace, name)?;
        self.shared.change(|store| {
            let old =
                store.get(&key).with_context(|| format!("there is no {resource} {namespace}/{name}"))?;
            let mut new = old.as_ref().clone();
            merge::merge(&mut new, patch);
            Ok(store.commit(key, Some(new)).as_ref().clone())
        })
    }

    /// Deletes an object at once.
    ///
    /// # Errors
    /// There is no such object.
    pub fn delete(&self, resource: &str, namespace: &str, name: &str) -> Result<()> {
        let key = key(resource, namespace, name)?;
        self.shared.change(|store| {
            store.get(&key).with_context(|| format!("there is no {resource} {namespace}/{name}"))?;
            store.commit(key, None);
            Ok(())
        })
    }

    /// Begins the deletion of an object: it gets a `deletionTimestamp`.
    ///
    /// # Errors
    /// There is no such object.
    pub fn begin_deletion(&self, resource: &str, namespace: &str, name: &str) -> Result<Value> {
        let ending =
            json!({"metadata": {"deletionTimestamp": write::now(), "deletionGracePeriodSeconds": 30}});
        self.patch(resource, namespace, name, &ending)
    }
}

/// The requests of clients.
impl ApiServer {
    /// All requests so far.
    pub fn requests(&self) -> Vec<Request> {
        self.shared.log.since(0)
    }

    /// Returns the number of requests so far: a mark for [`ApiServer::requests_since`].
    pub fn mark(&self) -> usize {
        self.shared.log.len()
    }

    /// The requests after a mark.
    pub fn requests_since(&self, mark: usize) -> Vec<Request> {
        self.shared.log.since(mark)
    }

    /// Waits until the requests after a mark are as wanted; whether they got so in time.
    pub fn wait_for(&self, mark: usize, wanted: impl FnMut(&[Request]) -> bool) -> bool {
        self.shared.log.wait(mark, stretched(PATIENCE), wanted)
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn key(resource: &str, namespace: &str, name: &str) -> Result<store::Key> {
    let kind = Kind::named(resource).with_context(|| format!("there is no kind {resource}"))?;
    Ok(write::key(kind, Some(namespace), name))
}

fn said<T>(result: Result<T, status::Failure>) -> Result<T> {
    result.map_err(|failure| anyhow!("{}", failure.text()))
}
