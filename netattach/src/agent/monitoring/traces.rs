//! Traces of requests, sent to a collector by OTLP over HTTP, as JSON.
//!
//! A request is a trace of its own, or part of the one that the runtime names in `TRACEPARENT` (W3C Trace
//! Context, version 00): one span for the request and one for each part of the work
//! ([`timing`](crate::timing)). No operation waits for the collector: spans that it does not accept in time
//! are dropped, which is logged once.
//!
//! The exporter is our own: see docs/decisions/0031.

use std::fmt::Write;
use std::hash::{BuildHasher, RandomState};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use http::{Method, Request, StatusCode, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::sync::mpsc;

use crate::error_chain::Chain;
use crate::settings::Endpoint;
use crate::sync::{Mutex, locked};
use crate::timing::{Run, Times};

/// Most requests that wait to be sent; the spans of further ones are dropped.
const MOST_WAITING: usize = 256;
/// Most requests of one message.
const MOST_AT_ONCE: usize = 64;
/// How long requests are gathered for one message.
const GATHER: Duration = Duration::from_secs(1);
/// Timeout of a request to the collector.
const PATIENCE: Duration = Duration::from_secs(5);
/// Most bytes of its answer that are read.
const MOST_ANSWER: usize = 64 << 10;

/// The trace that a request belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Context {
    /// 32 hexadecimal digits.
    trace: String,
    /// The span that the request is within, 16 hexadecimal digits.
    parent: Option<String>,
}

/// A request that has been answered.
#[derive(Debug)]
struct Traced {
    context: Context,
    span: String,
    verb: String,
    attributes: Vec<(&'static str, String)>,
    failure: Option<String>,
    began: (SystemTime, Instant),
    took: Duration,
    runs: Vec<Run>,
}

/// Where spans are sent.
#[derive(Debug)]
pub(in crate::agent) struct Traces {
    waiting: mpsc::Sender<Traced>,
    ids: Ids,
}

/// A request that is being answered.
#[derive(Debug)]
pub(in crate::agent) struct Trace {
    context: Option<Context>,
    began: (SystemTime, Instant),
    runs: Mutex<Vec<Run>>,
}

impl Trace {
    /// Records the timings of the work. Work that starts over is recorded once more.
    pub(in crate::agent) fn worked(&self, times: &Times) {
        if self.context.is_some() {
            *locked(&self.runs) = times.runs().to_vec();
        }
    }
}

impl Traces {
    /// Returns the sender, and the task that sends to this collector.
    pub(in crate::agent) fn to(
        endpoint: Endpoint,
        node: String,
    ) -> (Self, impl Future<Output = ()> + Send + 'static) {
        let (waiting, taken) = mpsc::channel(MOST_WAITING);
        (Self { waiting, ids: Ids::default() }, export(endpoint, node, taken))
    }

    /// Begins a request. If `traces` is `None`, it is not traced.
    pub(in crate::agent) fn begin(traces: Option<&Self>, parent: Option<&str>) -> Trace {
        let context = traces.and_then(|traces| match parent.and_then(parse) {
            Some((_, false)) => None,
            Some((context, true)) => Some(context),
            None => Some(Context { trace: traces.ids.hex(32), parent: None }),
        });
        Trace { context, began: (SystemTime::now(), Instant::now()), runs: Mutex::default() }
    }

    /// Ends a request.
    pub(in crate::agent) fn end(
        &self,
        trace: &Trace,
        verb: &str,
        attributes: Vec<(&'static str, String)>,
        failure: Option<String>,
    ) {
        let Some(context) = trace.context.clone() else { return };
        let traced = Traced {
            context,
            span: self.ids.hex(16),
            verb: verb.to_owned(),
            attributes,
            failure,
            began: trace.began,
            took: trace.began.1.elapsed(),
            runs: std::mem::take(&mut locked(&trace.runs)),
        };
        // A collector that is slow or absent delays no pod.
        if self.waiting.try_send(traced).is_err() {
            tracing::debug!("a trace is dropped");
        }
    }
}

/// Parses `00-TRACE-PARENT-FLAGS`; the second value is whether the trace is sampled.
fn parse(text: &str) -> Option<(Context, bool)> {
    let mut parts = text.split('-');
    let (version, trace, parent, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    let is_hex = |text: &str, length: usize| {
        text.len() == length && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    };
    let is_id = |text: &str, length| is_hex(text, length) && text.bytes().any(|byte| byte != b'0');
    // A later version may have more parts; 00 has none.
    let is_known = is_hex(version, 2) && version != "ff" && (version != "00" || parts.next().is_none());
    if !is_known || !is_id(trace, 32) || !is_id(parent, 16) || !is_hex(flags, 2) {
        return None;
    }
    let sampled = u8::from_str_radix(flags, 16).ok()? & 1 == 1;
    Some((Context { trace: trace.to_owned(), parent: Some(parent.to_owned()) }, sampled))
}

/// Generates ids that no other process has: they need to be unique, not secret.
#[derive(Debug, Default)]
struct Ids {
    state: RandomState,
    given: AtomicU64,
}

impl Ids {
    /// Returns an id of so many hexadecimal digits, at most 32; not 0.
    fn hex(&self, digits: usize) -> String {
        let mut text = String::new();
        for _ in 0..2 {
            let next = (self.given.fetch_add(1, Ordering::Relaxed), SystemTime::now());
            // Writing to memory does not fail.
            let _ = write!(text, "{:016x}", self.state.hash_one(next) | 1);
        }
        text.truncate(digits);
        text
    }
}

async fn export(endpoint: Endpoint, node: String, mut waiting: mpsc::Receiver<Traced>) {
    let ids = Ids::default();
    let mut failed = false;
    loop {
        let mut some = Vec::new();
        // The sender lives as long as the agent.
        let Some(first) = waiting.recv().await else { return };
        some.push(first);
        let until = tokio::time::Instant::now() + GATHER;
        while some.len() < MOST_AT_ONCE {
            match tokio::time::timeout_at(until, waiting.recv()).await {
                Ok(Some(one)) => some.push(one),
                Ok(None) | Err(_) => break,
            }
        }
        let message = message(&node, &some, &ids).to_string();
        let sent = tokio::time::timeout(PATIENCE, send(&endpoint, message)).await;
        match sent.unwrap_or_else(|_| Err(format!("no answer within {} s", PATIENCE.as_secs()))) {
            Ok(()) if failed => {
                tracing::info!(%endpoint, "traces are taken again");
                failed = false;
            }
            Ok(()) => {}
            Err(error) if !failed => {
                tracing::warn!(%endpoint, error, "traces are dropped until the collector takes them");
                failed = true;
            }
            Err(_) => {}
        }
    }
}

/// Uses one connection for each message: messages are rare, and the collector is near.
async fn send(endpoint: &Endpoint, message: String) -> Result<(), String> {
    let named = tokio::net::lookup_host((endpoint.host.as_str(), endpoint.port)).await;
    let addresses: Vec<SocketAddr> = named.map_err(said)?.collect();
    let connection = TcpStream::connect(&addresses[..]).await.map_err(said)?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(connection)).await.map_err(said)?;
    // The task ends with the sender.
    tokio::spawn(connection);
    let request = Request::builder()
        .method(Method::POST)
        .uri(&endpoint.path)
        .header(header::HOST, endpoint.authority())
        .header(header::CONTENT_TYPE, "application/json")
        .header(header::USER_AGENT, concat!("netattachd/", env!("CARGO_PKG_VERSION")))
        .body(Full::new(Bytes::from(message)))
        .map_err(said)?;
    let answer = sender.send_request(request).await.map_err(said)?;
    let status = answer.status();
    // Read to the end, so that the collector sees an orderly close.
    let body = Limited::new(answer.into_body(), MOST_ANSWER).collect().await;
    if status == StatusCode::OK {
        body.map(drop).map_err(|error| Chain(&*error).to_string())
    } else {
        Err(status.to_string())
    }
}

/// Formats an error with its causes: hyper's own text is only "connection error".
fn said(error: impl std::error::Error + 'static) -> String {
    Chain(&error).to_string()
}

/// `ExportTraceServiceRequest`, in the JSON encoding of OTLP.
fn message(node: &str, requests: &[Traced], ids: &Ids) -> Value {
    let resource = [
        ("service.name", "netattachd".to_owned()),
        ("service.version", env!("CARGO_PKG_VERSION").to_owned()),
        ("host.name", node.to_owned()),
    ];
    let spans: Vec<Value> = requests.iter().flat_map(|traced| spans(traced, ids)).collect();
    json!({"resourceSpans": [{
        "resource": {"attributes": attributes(&resource)},
        "scopeSpans": [{"scope": {"name": "netattach"}, "spans": spans}],
    }]})
}

fn attributes(pairs: &[(&'static str, String)]) -> Vec<Value> {
    pairs.iter().map(|(key, value)| json!({"key": key, "value": {"stringValue": value}})).collect()
}

/// The span of a request, and those of its parts.
fn spans(traced: &Traced, ids: &Ids) -> Vec<Value> {
    /// `SPAN_KIND_SERVER` and `SPAN_KIND_INTERNAL`.
    const SERVER: u8 = 2;
    const INTERNAL: u8 = 1;
    /// `STATUS_CODE_ERROR`.
    const ERROR: u8 = 2;
    let (wall, begun) = traced.began;
    let since = wall.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let nanos = |offset: Duration| (since + offset).as_nanos().to_string();
    let mut whole = json!({
        "traceId": traced.context.trace, "spanId": traced.span, "name": traced.verb, "kind": SERVER,
        "startTimeUnixNano": nanos(Duration::ZERO), "endTimeUnixNano": nanos(traced.took),
        "attributes": attributes(&traced.attributes),
    });
    if let Some(parent) = &traced.context.parent {
        whole["parentSpanId"] = parent.as_str().into();
    }
    if let Some(message) = &traced.failure {
        whole["status"] = json!({"code": ERROR, "message": message});
    }
    let mut spans = vec![whole];
    // The work runs after the request has arrived.
    spans.extend(traced.runs.iter().map(|run| {
        let offset = run.begun.saturating_duration_since(begun);
        json!({
            "traceId": traced.context.trace, "spanId": ids.hex(16), "parentSpanId": traced.span,
            "name": run.name, "kind": INTERNAL,
            "startTimeUnixNano": nanos(offset), "endTimeUnixNano": nanos(offset + run.took),
        })
    }));
    spans
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
    const PARENT: &str = "b7ad6b7169203331";

    #[test]
    fn a_context_is_continued_if_it_is_one() {
        let context = || Context { trace: TRACE.into(), parent: Some(PARENT.into()) };
        let table = [
            (format!("00-{TRACE}-{PARENT}-01"), Some((context(), true))),
            (format!("00-{TRACE}-{PARENT}-00"), Some((context(), false))),
            (format!("01-{TRACE}-{PARENT}-03-more"), Some((context(), true))),
            (format!("00-{TRACE}-{PARENT}-01-more"), None),
            (format!("ff-{TRACE}-{PARENT}-01"), None),
            (format!("00-{TRACE}-0000000000000000-01"), None),
            (format!("00-{}-{PARENT}-01", TRACE.to_uppercase()), None),
            (format!("00-{TRACE}-{PARENT}"), None),
            (format!("00-{TRACE}-{PARENT}-1"), None),
            (String::new(), None),
        ];
        for (text, expected) in table {
            assert_eq!(parse(&text), expected, "{text}");
        }
    }

    #[test]
    fn a_request_and_its_parts_are_spans_of_one_trace() {
        let begun = Instant::now();
        let wall = SystemTime::UNIX_EPOCH + Duration::from_secs(5);
        let run =
            Run { name: "journal", begun: begun + Duration::from_nanos(10), took: Duration::from_nanos(20) };
        let traced = Traced {
            context: Context { trace: TRACE.into(), parent: Some(PARENT.into()) },
            span: "00f067aa0ba902b7".into(),
            verb: "ADD".into(),
            attributes: vec![("k8s.pod.name", "a".into())],
            failure: Some("no link".into()),
            began: (wall, begun),
            took: Duration::from_nanos(50),
            runs: vec![run],
        };
        let mut written = message("node-1", &[traced], &Ids::default());
        let part = &mut written["resourceSpans"][0]["scopeSpans"][0]["spans"][1];
        assert_eq!(part["spanId"].take().as_str().map(str::len), Some(16));
        let value = |text: &str| json!({"stringValue": text});
        assert_eq!(
            written,
            json!({"resourceSpans": [{
                "resource": {"attributes": [
                    {"key": "service.name", "value": value("netattachd")},
                    {"key": "service.version", "value": value(env!("CARGO_PKG_VERSION"))},
                    {"key": "host.name", "value": value("node-1")},
                ]},
                "scopeSpans": [{"scope": {"name": "netattach"}, "spans": [
                    {
                        "traceId": TRACE, "spanId": "00f067aa0ba902b7", "parentSpanId": PARENT, "name": "ADD", "kind": 2,
                        "startTimeUnixNano": "5000000000", "endTimeUnixNano": "5000000050",
                        "attributes": [{"key": "k8s.pod.name", "value": value("a")}],
                        "status": {"code": 2, "message": "no link"},
                    },
                    {
                        "traceId": TRACE, "spanId": null, "parentSpanId": "00f067aa0ba902b7", "name": "journal", "kind": 1,
                        "startTimeUnixNano": "5000000010", "endTimeUnixNano": "5000000030",
                    },
                ]}],
            }]})
        );
    }

    #[tokio::test]
    async fn of_a_collector_that_does_not_answer_it_is_said_what_it_did() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let endpoint = Endpoint { host: "127.0.0.1".into(), port, path: "/v1/traces".into() };
        let leaves = async {
            let (stream, _) = listener.accept().await.unwrap();
            stream.readable().await.unwrap();
        };
        let (sent, ()) = tokio::join!(send(&endpoint, "{}".to_owned()), leaves);
        assert_eq!(sent, Err("connection closed before message completed".to_owned()));
    }

    #[test]
    fn ids_differ_and_are_not_zero() {
        let ids = Ids::default();
        let given: std::collections::BTreeSet<String> = (0..1000).map(|_| ids.hex(16)).collect();
        assert_eq!(given.len(), 1000);
        assert!(given.iter().all(|id| id.len() == 16 && id.bytes().any(|byte| byte != b'0')));
        assert_eq!(ids.hex(32).len(), 32);
    }
}
