//! Reads the events of a watch as the server sends them, line by line.

use std::time::Duration;

use ::kube::client::Body;
use bytes::BytesMut;
use http_body_util::BodyExt;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::client::{Ask, Client, Refusal, RequestError};
use super::resource::Target;

/// Most bytes of one event: an object is at most some 3 MiB, because etcd takes no request of more than 1.5 MiB.
const EVENT: usize = 16 << 20;
/// How much longer than it asked for a watch may take: then the connection is dead.
const GRACE: Duration = Duration::from_secs(5);

/// What an event says.
pub(super) enum Event<'a> {
    /// The object is new or changed.
    Applied(&'a RawValue),
    /// The object is gone, or is none of those asked for any more. As it was at last.
    Deleted(&'a RawValue),
    /// Nothing but a version, in an object of no other use.
    Bookmark(&'a RawValue),
}

#[derive(Deserialize)]
struct Line<'a> {
    #[serde(rename = "type")]
    kind: &'a str,
    #[serde(borrow)]
    object: &'a RawValue,
}

/// Follows the changes of a kind from a version on, until the watch ends: the server ends it after the time that the
/// resource says.
///
/// # Errors
/// [`RequestError`]; with the status 410 if the server does not have that version any more.
pub(super) async fn watch(
    client: &Client,
    target: &Target<'_>,
    version: &str,
    mut began: impl FnMut(),
    mut take: impl FnMut(Event<'_>),
) -> Result<(), RequestError> {
    let ask = Ask { accept: target.resource.accept_object(), ..Ask::get(target.watch(version)) };
    let answer = client.send(&ask).await?;
    began();
    let whole = Duration::from_secs(target.watch_seconds().into()) + GRACE;
    let ends = tokio::time::Instant::now() + whole;
    let mut lines = Lines { body: answer.into_body(), read: BytesMut::new(), scanned: 0 };
    loop {
        let line = match tokio::time::timeout_at(ends, lines.next()).await {
            Err(_) => return Err(ask.late(whole)),
            Ok(Ok(Some(line))) => line,
            Ok(Ok(None)) => return Ok(()),
            Ok(Err(Unread::TooLong)) => return Err(ask.too_large(EVENT)),
            Ok(Err(Unread::Failed(source))) => return Err(ask.failed(source)),
        };
        if line.trim_ascii().is_empty() {
            continue;
        }
        let line: Line<'_> = serde_json::from_slice(&line).map_err(|source| ask.undecodable(source))?;
        match line.kind {
            "ADDED" | "MODIFIED" => take(Event::Applied(line.object)),
            "DELETED" => take(Event::Deleted(line.object)),
            "BOOKMARK" => take(Event::Bookmark(line.object)),
            _ => return Err(ask.refused(refusal(line.object))),
        }
    }
}

/// An event of type `ERROR` has a `Status`.
fn refusal(object: &RawValue) -> Refusal {
    #[derive(Deserialize, Default)]
    struct Status {
        #[serde(default)]
        code: u16,
        #[serde(default)]
        message: String,
    }
    let Status { code, message } = serde_json::from_str(object.get()).unwrap_or_default();
    Refusal { code, message, retry_after: None }
}

/// Why a line cannot be read.
enum Unread {
    TooLong,
    Failed(::kube::Error),
}

/// The lines of a body.
struct Lines {
    body: Body,
    read: BytesMut,
    /// How much of `read` has no end of a line.
    scanned: usize,
}

impl Lines {
    /// The next whole line; `None` at the end. What is after the last line is not a whole event and is dropped.
    async fn next(&mut self) -> Result<Option<BytesMut>, Unread> {
        loop {
            if let Some(at) = memchr::memchr(b'\n', &self.read[self.scanned..]) {
                let line = self.read.split_to(self.scanned + at + 1);
                self.scanned = 0;
                return Ok(Some(line));
            }
            self.scanned = self.read.len();
            if self.scanned > EVENT {
                return Err(Unread::TooLong);
            }
            let Some(frame) = self.body.frame().await else { return Ok(None) };
            if let Ok(data) = frame.map_err(Unread::Failed)?.into_data() {
                self.read.extend_from_slice(&data);
            }
        }
    }
}
