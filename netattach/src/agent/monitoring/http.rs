//! Serves `/metrics`, `/livez` and `/readyz` over HTTP.
//!
//! The server is hyper's, which the client of the Kubernetes API needs anyway, so the project has no HTTP
//! parser of its own for untrusted input. The resources that a client can take are limited: the number of
//! connections, the size of a request, the duration of a connection and the number of concurrent scrapes
//! are bounded, and a connection serves one request.
//!
//! `/livez` fails when only a new process helps: the agent's only async thread does not answer, or no
//! thread is free for an operation, or a thread that reads the agent's state hangs. An unreachable API
//! server, network or plugin is no reason to restart an agent. `/readyz` is what STATUS tells the runtime:
//! it fails for problems that would fail every ADD.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

use crate::agent::Agent;
use crate::error_chain::Chain;
use crate::own_thread;
use crate::rpc::message::Condition;
use crate::settings::OfAttachments;
use crate::sync::{Mutex, locked};

/// Most concurrent connections from pods and other hosts, and from the node itself, which probes the agent;
/// further ones are closed. The two are counted separately, so that other hosts cannot block the probes, on
/// whose failure the kubelet restarts the agent.
const MOST_OF_OTHERS: usize = 16;
const MOST_OF_NODE: usize = 64;
/// Most bytes of a request's head, and most header fields.
const MOST_HEAD: usize = 16 << 10;
const MOST_FIELDS: usize = 64;
/// Longest time until a request's head has arrived.
const HEAD_PATIENCE: Duration = Duration::from_secs(5);
/// Longest duration of a connection.
const PATIENCE: Duration = Duration::from_secs(30);
/// Most concurrent requests of each kind that need a thread; further ones are refused.
const MOST_AT_WORK: usize = 2;
/// How long the work for `/livez` may take. Probes should wait longer, to get the reason.
const LIVE_PATIENCE: Duration = Duration::from_secs(5);
/// Pause before binding a port again that is in use.
const RETRY: Duration = Duration::from_secs(10);

/// Content type of answers for people.
const TEXT: &str = "text/plain; charset=utf-8";

/// Content type of metrics.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

type Answer = Response<Full<Bytes>>;

/// The server of one address.
#[derive(Debug)]
pub(in crate::agent) struct Http {
    address: SocketAddr,
    /// Why nothing is served now.
    problem: Mutex<Option<String>>,
    /// Limits of the requests that need a thread.
    live: Arc<Semaphore>,
    scrapes: Arc<Semaphore>,
    /// The series that attachments have of their own.
    of_attachments: OfAttachments,
}

impl Http {
    pub(in crate::agent) fn new(address: SocketAddr, of_attachments: OfAttachments) -> Self {
        let limit = || Arc::new(Semaphore::new(MOST_AT_WORK));
        Self { address, problem: Mutex::default(), live: limit(), scrapes: limit(), of_attachments }
    }

    /// Returns the problem that nothing is served.
    pub(in crate::agent) fn condition(&self) -> Option<Condition> {
        let problem = locked(&self.problem).clone()?;
        Some(Condition { object: format!("metrics and probes on {}", self.address), problem })
    }

    /// Serves until the future is dropped. If the port is in use, binding is retried: attaching pods does
    /// not depend on this server.
    pub(in crate::agent) async fn keep(self: Arc<Self>, agent: Arc<Agent>) {
        let [of_node, of_others] = [MOST_OF_NODE, MOST_OF_OTHERS].map(|most| Arc::new(Semaphore::new(most)));
        let listener = self.bind().await;
        loop {
            let (connection, peer) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    // The error concerns one connection, or no descriptor is free: both are temporary.
                    tracing::debug!(error = %Chain(&error), "connection not accepted");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            let places = if peer.ip().to_canonical().is_loopback() { &of_node } else { &of_others };
            let Ok(place) = Arc::clone(places).try_acquire_owned() else { continue };
            let (server, agent) = (Arc::clone(&self), Arc::clone(&agent));
            tokio::spawn(async move {
                // A client that is too slow, or does not speak HTTP, gets no answer.
                let _ = tokio::time::timeout(PATIENCE, server.answer_on(connection, agent)).await;
                drop(place);
            });
        }
    }

    async fn bind(&self) -> TcpListener {
        loop {
            match TcpListener::bind(self.address).await {
                Ok(listener) => {
                    *locked(&self.problem) = None;
                    tracing::info!(address = %self.address, "metrics and probes are served");
                    return listener;
                }
                Err(error) => {
                    let problem = format!("not served, will try again: {error}; see metrics.listen");
                    let before = locked(&self.problem).replace(problem.clone());
                    if before.as_ref() != Some(&problem) {
                        tracing::warn!(address = %self.address, problem, "metrics and probes");
                    }
                    tokio::time::sleep(RETRY).await;
                }
            }
        }
    }

    async fn answer_on(self: Arc<Self>, connection: TcpStream, agent: Arc<Agent>) -> hyper::Result<()> {
        let service = service_fn(move |request: Request<Incoming>| {
            let (server, agent) = (Arc::clone(&self), Arc::clone(&agent));
            async move { Ok::<_, Infallible>(server.answer(&request, &agent).await) }
        });
        http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_PATIENCE)
            .max_buf_size(MOST_HEAD)
            .max_headers(MOST_FIELDS)
            .keep_alive(false)
            .serve_connection(TokioIo::new(connection), service)
            .await
    }

    async fn answer<B>(&self, request: &Request<B>, agent: &Arc<Agent>) -> Answer {
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            let mut refused = text(StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD\n");
            refused.headers_mut().insert(header::ALLOW, HeaderValue::from_static("GET, HEAD"));
            return refused;
        }
        match request.uri().path() {
            "/livez" => self.live(agent).await,
            "/readyz" => ready(agent),
            "/metrics" => self.metrics(agent).await,
            _ => text(StatusCode::NOT_FOUND, "there are /metrics, /livez and /readyz\n"),
        }
    }

    async fn metrics(&self, agent: &Arc<Agent>) -> Answer {
        let (agent, of_attachments) = (Arc::clone(agent), self.of_attachments);
        self.metrics_by(move || agent.monitoring.metrics().text(&agent, of_attachments)).await
    }

    async fn metrics_by(&self, write: impl FnOnce() -> Result<String, String> + Send + 'static) -> Answer {
        let Ok(at_work) = Arc::clone(&self.scrapes).try_acquire_owned() else {
            return text(
                StatusCode::SERVICE_UNAVAILABLE,
                format!("{MOST_AT_WORK} scrapes are being answered\n"),
            );
        };
        let written = own_thread::blocking(move || {
            let written = write();
            drop(at_work);
            written
        });
        match written.await {
            Ok(Ok(written)) => typed(StatusCode::OK, OPEN_METRICS, written),
            Ok(Err(error)) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
            Err(ending) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("{ending}\n")),
        }
    }

    /// Lets a thread of the engine read the attachments. That an answer is sent at all shows that the async
    /// thread works.
    async fn live(&self, agent: &Arc<Agent>) -> Answer {
        let agent = Arc::clone(agent);
        self.live_by(move || agent.engine.registry().len(), LIVE_PATIENCE).await
    }

    async fn live_by(&self, look: impl FnOnce() -> usize + Send + 'static, patience: Duration) -> Answer {
        let Ok(at_work) = Arc::clone(&self.live).try_acquire_owned() else {
            return text(
                StatusCode::INTERNAL_SERVER_ERROR,
                "threads that earlier probes asked for have not answered\n",
            );
        };
        let look = own_thread::blocking(move || {
            let sandboxes = look();
            // A hanging thread keeps its permit, so that probes do not use up the threads.
            drop(at_work);
            sandboxes
        });
        match tokio::time::timeout(patience, look).await {
            Ok(Ok(sandboxes)) => text(StatusCode::OK, format!("ok: {sandboxes} sandboxes\n")),
            Ok(Err(ending)) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("{ending}\n")),
            Err(_) => {
                let seconds = patience.as_secs();
                text(StatusCode::INTERNAL_SERVER_ERROR, format!("no thread has answered for {seconds} s\n"))
            }
        }
    }
}

/// Returns the conditions without which every ADD fails, one per line, named as in `netattachctl status`.
fn ready(agent: &Agent) -> Answer {
    let failed = agent.health.ready().err();
    let mut lines: Vec<String> = agent
        .conditions_of_ready()
        .iter()
        .map(|it| {
            let sign = if it.met { '+' } else { '-' };
            format!("[{sign}] {}: {}", it.condition, it.detail)
        })
        .collect();
    let (status, summary) = match failed {
        None => (StatusCode::OK, "ready".to_owned()),
        Some(error) => (StatusCode::SERVICE_UNAVAILABLE, format!("not ready: {error}")),
    };
    lines.push(summary);
    text(status, lines.iter().map(|line| line.replace(['\n', '\r'], " ") + "\n").collect::<String>())
}

fn text(status: StatusCode, body: impl Into<Bytes>) -> Answer {
    typed(status, TEXT, body)
}

fn typed(status: StatusCode, kind: &'static str, body: impl Into<Bytes>) -> Answer {
    let mut answer = Response::new(Full::new(body.into()));
    *answer.status_mut() = status;
    answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    answer
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use http_body_util::BodyExt;

    use super::*;
    use crate::settings::MetricsSettings;

    fn server() -> Http {
        Http::new(([127, 0, 0, 1], 0).into(), MetricsSettings::default().of_attachments())
    }

    async fn said(answer: Answer) -> (u16, String) {
        let status = answer.status().as_u16();
        let body = answer.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    /// Work that blocks until the sender is dropped.
    fn hanging<T>(answer: T) -> (mpsc::Sender<()>, impl FnOnce() -> T) {
        let (end, ended) = mpsc::channel::<()>();
        let work = move || {
            let _ = ended.recv();
            answer
        };
        (end, work)
    }

    #[tokio::test]
    async fn threads_that_hang_are_told_and_no_probe_takes_more_of_them() {
        let server = server();
        let mut ends = Vec::new();
        for _ in 0..MOST_AT_WORK {
            let (end, look) = hanging(0);
            ends.push(end);
            let answer = said(server.live_by(look, Duration::ZERO).await).await;
            assert_eq!(answer, (500, "no thread has answered for 0 s\n".to_owned()));
        }
        let late = said(server.live_by(|| 3, LIVE_PATIENCE).await).await;
        assert_eq!(late, (500, "threads that earlier probes asked for have not answered\n".to_owned()));
        drop(ends);
        drop(server.live.acquire_many(MOST_AT_WORK as u32).await.unwrap());
        let well = said(server.live_by(|| 3, Duration::MAX).await).await;
        assert_eq!(well, (200, "ok: 3 sandboxes\n".to_owned()));
    }

    #[tokio::test]
    async fn scrapes_beyond_those_at_work_are_refused() {
        let server = Arc::new(server());
        let mut scrapes = Vec::new();
        for _ in 0..MOST_AT_WORK {
            let (end, write) = hanging(Ok("all\n".to_owned()));
            let at = Arc::clone(&server);
            scrapes.push((end, tokio::spawn(async move { at.metrics_by(write).await })));
        }
        while server.scrapes.available_permits() > 0 {
            tokio::task::yield_now().await;
        }
        let late = said(server.metrics_by(|| Ok(String::new())).await).await;
        assert_eq!(late, (503, "2 scrapes are being answered\n".to_owned()));
        for (end, scrape) in scrapes {
            drop(end);
            assert_eq!(said(scrape.await.unwrap()).await, (200, "all\n".to_owned()));
        }
    }
}
