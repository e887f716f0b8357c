//! Sends requests to the API server, each with a deadline and a bound on its answer. Requests are not
//! repeated here.
//!
//! The connection is made anew, from the kubeconfig or the service account's files, after an answer or
//! failure that another token, another certificate of the server or a dead connection would explain
//! (`renewal`). In between, the library reads a token file again every minute.

use std::error::Error as StdError;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ::kube::client::{Body, ClientBuilder};
use ::kube::config::{Config, InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError};
use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::BodyExt;
use serde::Deserialize;

use super::access::Missing;
use super::renewal::{Answered, Renewal};
use crate::error_chain::Chain;
use crate::sync::{Mutex, locked};

/// Timeout of connecting.
const CONNECT: Duration = Duration::from_secs(5);
/// Timeout until an answer begins.
const ANSWER: Duration = Duration::from_secs(30);
/// Longest pause requested by a server that is honoured.
const MOST_ASKED: Duration = Duration::from_secs(60);
/// Most bytes of a `Status` that refuses a request.
const STATUS: usize = 64 << 10;

/// The origin of the server's address, its certificates and the agent's identity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Access {
    /// The service account of the agent's pod.
    InCluster,
    /// A kubeconfig file: its current context.
    Kubeconfig(PathBuf),
}

/// Why there is no connection to a server.
#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    /// The agent's pod has no service account.
    #[error("read the service account of the agent's pod")]
    InCluster(#[source] InClusterError),
    /// The file cannot be read, is no kubeconfig, or its current context is incomplete.
    #[error("kubeconfig {path}")]
    Kubeconfig {
        /// The file.
        path: PathBuf,
        /// The error in it.
        #[source]
        source: Box<KubeconfigError>,
    },
    /// The file obtains credentials by running a program.
    #[error(
        "kubeconfig {path}: the agent runs no credential plugin ({what}); use a tokenFile or a client certificate"
    )]
    Plugin {
        /// The file.
        path: PathBuf,
        /// The key.
        what: &'static str,
    },
    /// The certificates or the identity are unusable.
    #[error("set up the connection to the API server")]
    Client(#[source] Box<::kube::Error>),
}

/// Why a request has no result.
#[derive(Debug, thiserror::Error)]
pub(super) enum RequestError {
    /// There is no connection.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// The request could not be sent, or its answer not be read.
    #[error("{method} {path}")]
    Transport {
        /// Method.
        method: Method,
        /// Path.
        path: String,
        /// The cause.
        #[source]
        source: Box<dyn StdError + Send + Sync>,
    },
    /// The server refused it.
    #[error("{method} {path}: {status}")]
    Refused {
        /// Method.
        method: Method,
        /// Path.
        path: String,
        /// The refusal.
        status: Refusal,
    },
    /// No answer in time.
    #[error("{method} {path}: no answer within {} ms", within.as_millis())]
    Late {
        /// Method.
        method: Method,
        /// Path.
        path: String,
        /// The deadline.
        within: Duration,
    },
    /// A watch ended at once.
    #[error("{path}: the watch ended at once, without an event")]
    Ended {
        /// Path.
        path: String,
    },
    /// The answer is larger than its bound.
    #[error("{path}: the answer is larger than {most} bytes")]
    TooLarge {
        /// Path.
        path: String,
        /// The bound.
        most: usize,
    },
    /// The answer is not what was asked for.
    #[error("{path}: the answer is not a list or object of the Kubernetes API")]
    Decode {
        /// Path.
        path: String,
        /// The error in it.
        #[source]
        source: serde_json::Error,
    },
}

/// A refusal by the server.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{code} {message}")]
pub(super) struct Refusal {
    /// HTTP status.
    pub(super) code: u16,
    /// Its message.
    pub(super) message: String,
    /// How long the server asks to wait.
    pub(super) retry_after: Option<Duration>,
    /// The requested version is newer than any that the server has.
    pub(super) is_of_future: bool,
}

impl RequestError {
    /// The refusal, if the server refused the request.
    pub(super) fn refusal(&self) -> Option<&Refusal> {
        match self {
            Self::Refused { status, .. } => Some(status),
            _ => None,
        }
    }

    /// The HTTP status, if the server refused the request.
    pub(super) fn code(&self) -> Option<u16> {
        self.refusal().map(|refusal| refusal.code)
    }

    /// Returns how long the server asks to wait, at most a minute.
    pub(super) fn asked_pause(&self) -> Duration {
        self.refusal().and_then(|refusal| refusal.retry_after).unwrap_or_default().min(MOST_ASKED)
    }

    /// Classifies the error for the renewal of the connection.
    fn answered(&self) -> Answered {
        match self {
            // Another token or certificate may help.
            Self::Transport { .. } | Self::Access(_) => Answered::Broken,
            Self::Late { within, .. } => Answered::Late(*within),
            other if other.code() == Some(StatusCode::UNAUTHORIZED.as_u16()) => Answered::Broken,
            _ => Answered::Well,
        }
    }
}

/// Is notified of every request, answered or not.
pub trait Watcher: fmt::Debug + Send + Sync {
    /// A request took `took` until its answer began; `code` is the HTTP status.
    fn answered(&self, verb: &'static str, resource: &str, code: Option<u16>, took: Duration);
}

/// A connection to the server. Requests are sent from the runtime of the thread that made it.
pub(super) struct Client {
    access: Access,
    current: Mutex<::kube::Client>,
    renewal: Mutex<Renewal>,
    /// The agent's missing rights, as far as known.
    pub(super) missing: Missing,
    watcher: Option<Arc<dyn Watcher>>,
}

/// A request.
#[derive(Debug, Clone)]
pub(super) struct Ask {
    pub(super) method: Method,
    /// Path and query.
    pub(super) target: String,
    /// Accepted form of the answer.
    pub(super) accept: &'static str,
    /// Content type and body.
    pub(super) body: Option<(&'static str, Vec<u8>)>,
}

impl Ask {
    pub(super) fn get(target: impl Into<String>) -> Self {
        Self { method: Method::GET, target: target.into(), accept: "application/json", body: None }
    }

    /// Returns the path without the query, for messages.
    fn path(&self) -> String {
        self.target.split('?').next().unwrap_or_default().to_owned()
    }

    /// Returns the verb, as in RBAC.
    fn verb(&self) -> &'static str {
        let (path, query) = self.target.split_once('?').unwrap_or((&self.target, ""));
        match self.method {
            Method::GET if query.split('&').any(|it| matches!(it, "watch=1" | "watch=true")) => "watch",
            Method::GET if self.named(path).1 => "get",
            Method::GET => "list",
            Method::POST => "create",
            Method::PATCH => "patch",
            Method::DELETE => "delete",
            _ => "other",
        }
    }

    /// Returns the resource, such as `pods`, or `pods/status`.
    fn resource(&self) -> &str {
        self.named(self.target.split('?').next().unwrap_or_default()).0
    }

    /// Returns the resource of a path, and whether the path names one object: `/api/v1/...` or
    /// `/apis/GROUP/VERSION/...`, then optionally `namespaces/NAMESPACE`, then the resource, a name, a
    /// subresource.
    fn named<'p>(&self, path: &'p str) -> (&'p str, bool) {
        let rest = match path.strip_prefix("/apis/") {
            Some(rest) => rest.splitn(3, '/').nth(2),
            None => path.strip_prefix("/api/").and_then(|rest| rest.split_once('/')).map(|(_, rest)| rest),
        };
        let rest = rest.unwrap_or_default();
        let in_namespace = rest.strip_prefix("namespaces/").and_then(|rest| rest.split_once('/'));
        let rest = in_namespace.map_or(rest, |(_, rest)| rest);
        let mut parts = rest.splitn(3, '/');
        let (resource, name, sub) = (parts.next().unwrap_or_default(), parts.next(), parts.next());
        (
            sub.filter(|_| resource == "pods")
                .map_or(resource, |sub| if sub == "status" { "pods/status" } else { "pods/eviction" }),
            name.is_some(),
        )
    }

    pub(super) fn failed(&self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> RequestError {
        RequestError::Transport { method: self.method.clone(), path: self.path(), source: source.into() }
    }

    pub(super) fn refused(&self, status: Refusal) -> RequestError {
        RequestError::Refused { method: self.method.clone(), path: self.path(), status }
    }

    pub(super) fn late(&self, within: Duration) -> RequestError {
        RequestError::Late { method: self.method.clone(), path: self.path(), within }
    }

    pub(super) fn ended(&self) -> RequestError {
        RequestError::Ended { path: self.path() }
    }

    pub(super) fn too_large(&self, most: usize) -> RequestError {
        RequestError::TooLarge { path: self.path(), most }
    }

    pub(super) fn undecodable(&self, source: serde_json::Error) -> RequestError {
        RequestError::Decode { path: self.path(), source }
    }
}

impl Client {
    /// Connects at the first request.
    ///
    /// # Errors
    /// The kubeconfig or the service account cannot be used.
    pub(super) async fn new(access: Access, watcher: Option<Arc<dyn Watcher>>) -> Result<Self, AccessError> {
        let current = Mutex::new(connect(&access).await?);
        let renewal = Mutex::new(Renewal::new(Instant::now()));
        Ok(Self { access, current, renewal, missing: Missing::default(), watcher })
    }

    /// Sends a request, and returns the answer when it begins.
    ///
    /// # Errors
    /// [`RequestError`].
    pub(super) async fn send(&self, ask: &Ask) -> Result<Response<Body>, RequestError> {
        self.send_within(ask, ANSWER).await
    }

    async fn send_within(&self, ask: &Ask, within: Duration) -> Result<Response<Body>, RequestError> {
        let begun = Instant::now();
        let sent = self.try_send(ask, within).await;
        if let Some(watcher) = &self.watcher {
            let code = sent.as_ref().map_or_else(RequestError::code, |answer| Some(answer.status().as_u16()));
            watcher.answered(ask.verb(), ask.resource(), code, begun.elapsed());
        }
        self.note(sent.as_ref().map_or_else(RequestError::answered, |_| Answered::Well)).await;
        sent
    }

    async fn try_send(&self, ask: &Ask, within: Duration) -> Result<Response<Body>, RequestError> {
        let mut request = Request::builder()
            .method(ask.method.clone())
            .uri(&ask.target)
            .header(header::ACCEPT, ask.accept)
            .header(header::USER_AGENT, concat!("netattachd/", env!("CARGO_PKG_VERSION")));
        if let Some((kind, _)) = &ask.body {
            request = request.header(header::CONTENT_TYPE, *kind);
        }
        let body = ask.body.as_ref().map(|(_, body)| body.clone()).unwrap_or_default();
        let request = request.body(Body::from(body)).map_err(|error| ask.failed(error))?;
        let client = locked(&self.current).clone();
        let answer = match tokio::time::timeout(within, client.send(request)).await {
            Err(_) => return Err(ask.late(within)),
            Ok(Err(error)) => return Err(ask.failed(error)),
            Ok(Ok(answer)) => answer,
        };
        if answer.status().is_success() {
            return Ok(answer);
        }
        if answer.status() == StatusCode::FORBIDDEN {
            self.missing.refused(&ask.target);
        }
        Err(ask.refused(refusal(answer).await))
    }

    /// Sends a request and reads its answer, of at most `most` bytes, within `within`.
    ///
    /// # Errors
    /// [`RequestError`].
    pub(super) async fn read(&self, ask: &Ask, most: usize, within: Duration) -> Result<Bytes, RequestError> {
        let whole = async {
            let answer = self.send_within(ask, within).await?;
            read_body(answer.into_body(), most).await.map_err(|error| match error {
                Unread::TooLarge => ask.too_large(most),
                Unread::Failed(source) => ask.failed(source),
            })
        };
        if let Ok(read) = tokio::time::timeout(within, whole).await {
            return read;
        }
        self.note(Answered::Late(within)).await;
        Err(ask.late(within))
    }

    /// Makes the connection anew if the result of a request requires it.
    async fn note(&self, answered: Answered) {
        let is_due = locked(&self.renewal).is_due(answered, Instant::now());
        if is_due {
            self.renew().await;
        }
    }

    /// Records that something was received on a connection: an event of a watch.
    pub(super) fn heard(&self) {
        locked(&self.renewal).heard(Instant::now());
    }

    /// Makes the connection anew.
    pub(super) async fn renew(&self) {
        match connect(&self.access).await {
            Ok(client) => *locked(&self.current) = client,
            Err(error) => {
                tracing::warn!(error = %Chain(&error), "the connection to the API server is not renewed")
            }
        }
    }
}

async fn connect(access: &Access) -> Result<::kube::Client, AccessError> {
    let mut config = match access {
        Access::InCluster => Config::incluster().map_err(AccessError::InCluster)?,
        Access::Kubeconfig(path) => read_kubeconfig(path).await?,
    };
    config.connect_timeout = Some(CONNECT);
    // Requests have deadlines of their own, and callers decide whether to repeat them.
    config.default_retry = false;
    let failed = |error| AccessError::Client(Box::new(error));
    Ok(ClientBuilder::try_from(config).map_err(failed)?.build())
}

async fn read_kubeconfig(path: &Path) -> Result<Config, AccessError> {
    let wrong = |source| AccessError::Kubeconfig { path: path.to_owned(), source: Box::new(source) };
    let written = Kubeconfig::read_from(path).map_err(wrong)?;
    let plugin = written.auth_infos.iter().filter_map(|named| named.auth_info.as_ref()).find_map(|user| {
        let exec = user.exec.is_some().then_some("exec");
        exec.or(user.auth_provider.is_some().then_some("auth-provider"))
    });
    if let Some(what) = plugin {
        return Err(AccessError::Plugin { path: path.to_owned(), what });
    }
    Config::from_custom_kubeconfig(written, &KubeConfigOptions::default()).await.map_err(wrong)
}

/// Why a body was not read.
enum Unread {
    TooLarge,
    Failed(Box<dyn StdError + Send + Sync>),
}

async fn read_body(mut body: Body, most: usize) -> Result<Bytes, Unread> {
    let mut read = bytes::BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| Unread::Failed(Box::new(error)))?;
        let Ok(data) = frame.into_data() else { continue };
        if read.len() + data.len() > most {
            return Err(Unread::TooLarge);
        }
        read.extend_from_slice(&data);
    }
    Ok(read.freeze())
}

async fn refusal(answer: Response<Body>) -> Refusal {
    #[derive(Deserialize, Default)]
    struct Status {
        #[serde(default)]
        message: String,
    }
    let code = answer.status();
    let retry_after = answer.headers().get(header::RETRY_AFTER).and_then(|value| value.to_str().ok());
    let retry_after = retry_after.and_then(|seconds| seconds.parse().ok()).map(Duration::from_secs);
    let body = tokio::time::timeout(CONNECT, read_body(answer.into_body(), STATUS)).await;
    let body = body.ok().and_then(Result::ok).unwrap_or_default();
    let Status { message } = serde_json::from_slice(&body).unwrap_or_default();
    // The text of its cause `ResourceVersionTooLarge`, which servers before 1.18 do not name (apimachinery,
    // `NewTooLargeResourceVersion`).
    let is_of_future = message.contains("Too large resource version");
    let message = match message.as_str() {
        "" => code.canonical_reason().unwrap_or("refused").to_owned(),
        message => message.chars().take(500).collect(),
    };
    Refusal { code: code.as_u16(), message, retry_after, is_of_future }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_counted_by_verb_and_resource() {
        let table = [
            (Method::GET, "/api/v1/pods?fieldSelector=x&watch=1", ("watch", "pods")),
            (Method::GET, "/api/v1/pods?limit=500", ("list", "pods")),
            (Method::GET, "/api/v1/namespaces", ("list", "namespaces")),
            (Method::GET, "/api/v1/namespaces/shop/pods/cart", ("get", "pods")),
            (Method::PATCH, "/api/v1/namespaces/shop/pods/cart/status", ("patch", "pods/status")),
            (Method::POST, "/api/v1/namespaces/shop/pods/cart/eviction", ("create", "pods/eviction")),
            (Method::POST, "/apis/events.k8s.io/v1/namespaces/shop/events", ("create", "events")),
            (
                Method::GET,
                "/apis/k8s.cni.cncf.io/v1/network-attachment-definitions?limit=500",
                ("list", "network-attachment-definitions"),
            ),
            (Method::PUT, "/", ("other", "")),
        ];
        for (method, target, expected) in table {
            let ask = Ask { method, ..Ask::get(target) };
            assert_eq!((ask.verb(), ask.resource()), expected, "{target}");
        }
    }
}
