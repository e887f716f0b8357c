//! Reads the events of a watch as the server sends them, line by line.

use std::time::Duration;

use ::kube::client::Body;
use bytes::BytesMut;
use http_body_util::BodyExt;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::client::{Ask, Client, Refusal, RequestError};
use super::list::{GONE, UNKNOWN};
use super::resource::Target;

/// Most bytes of one event: an object has at most about 3 MiB, because etcd accepts no request of more than
/// 1.5 MiB.
const EVENT: usize = 16 << 20;
/// How much longer than requested a watch may last; after that the connection is dead.
const GRACE: Duration = Duration::from_secs(5);
/// How long a watch may be silent, if a longer watch was requested. Servers send a bookmark about once a
/// minute (kubernetes, `staging/src/k8s.io/apiserver/pkg/storage/cacher`: `defaultBookmarkFrequency`), so
/// the connection is probably dead. For a server without bookmarks this costs one more watch from the last
/// version.
const SILENCE: Duration = Duration::from_secs(90);
/// Least duration of a watch without an event, or half the requested time: a watch that ends sooner has
/// failed.
const LEAST: Duration = Duration::from_secs(1);

/// An event.
pub(super) enum Event<'a> {
    /// The object is new or changed.
    Applied(&'a RawValue),
    /// The object is deleted, or no longer selected. Contains its last state.
    Deleted(&'a RawValue),
    /// Only a version, in an otherwise empty object.
    Bookmark(&'a RawValue),
}

#[derive(Deserialize)]
struct Line<'a> {
    #[serde(rename = "type")]
    kind: &'a str,
    #[serde(borrow)]
    object: &'a RawValue,
}

/// Why a watch has ended early.
#[derive(Debug)]
pub(super) enum Broken {
    /// It may continue from the last version.
    Off(RequestError),
    /// It cannot continue from the last version: the kind must be listed again.
    Beyond(RequestError),
}

impl Broken {
    /// Whether a watch may continue from the last version.
    pub(super) fn may_go_on(&self) -> bool {
        match self {
            Self::Off(error) => !matches!(error.code(), Some(GONE | UNKNOWN)),
            Self::Beyond(_) => false,
        }
    }

    /// Whether the server refuses to continue from the last version, for a reason that may be permanent.
    /// Other refusals are temporary or concern the agent's identity, and say nothing about the version.
    pub(super) fn denies_position(&self) -> bool {
        let Self::Off(error) = self else { return false };
        let passes = |code: u16| matches!(code, 401 | 403 | 429 | 500..=599);
        error.refusal().is_some_and(|refusal| refusal.is_of_future || !passes(refusal.code))
    }

    pub(super) fn error(self) -> RequestError {
        let (Self::Off(error) | Self::Beyond(error)) = self;
        error
    }
}

/// The times of a watch.
#[derive(Debug, Clone, Copy)]
struct Times {
    /// After this time it is dead: the server would have ended it.
    whole: Duration,
    /// After this time it counts as working, even without an event.
    least: Duration,
    /// If nothing was received for this long, another watch continues.
    silence: Duration,
}

impl Times {
    fn of(asked: Duration) -> Self {
        let whole = asked + GRACE;
        let silence = if asked > SILENCE { SILENCE } else { whole };
        Self { whole, least: LEAST.min(asked / 2), silence }
    }
}

/// Follows the changes of a kind from a version on, until the watch ends: the server ends it after the
/// resource's time, or it is silent for too long. `lives` is called once, after the first event or when the
/// watch has lasted for a while.
///
/// # Errors
/// [`Broken`]; with the status 410 if the server no longer has that version.
pub(super) async fn watch(
    client: &Client,
    target: &Target<'_>,
    version: &str,
    lives: impl FnMut(),
    mut take: impl FnMut(Event<'_>),
) -> Result<(), Broken> {
    let take = |event: Event<'_>| {
        client.heard();
        take(event);
    };
    let ask = Ask { accept: target.resource.accept_object(), ..Ask::get(target.watch(version)) };
    let answer = client.send(&ask).await.map_err(Broken::Off)?;
    let times = Times::of(Duration::from_secs(target.watch_seconds().into()));
    read(&ask, answer.into_body(), times, lives, take).await
}

async fn read(
    ask: &Ask,
    body: Body,
    times: Times,
    mut lives: impl FnMut(),
    mut take: impl FnMut(Event<'_>),
) -> Result<(), Broken> {
    let begun = tokio::time::Instant::now();
    let ends = begun + times.whole;
    let mut last = begun;
    let mut has_lived = false;
    let mut lines = Lines { body, read: BytesMut::new(), scanned: 0 };
    loop {
        let until = if has_lived { ends.min(last + times.silence) } else { begun + times.least };
        // Waiting may be cancelled at any time: received bytes are in `lines`.
        let next = tokio::time::timeout_at(until, lines.next()).await;
        if next.is_ok() {
            last = tokio::time::Instant::now();
        }
        match next {
            Err(_) if has_lived && until == ends => return Err(Broken::Off(ask.late(times.whole))),
            Err(_) if has_lived => return Ok(()),
            Err(_) => {}
            Ok(Ok(Some(line))) if line.trim_ascii().is_empty() => continue,
            Ok(Ok(Some(line))) => take(event(ask, &line)?),
            Ok(Ok(None)) if has_lived => return Ok(()),
            Ok(Ok(None)) => return Err(Broken::Off(ask.ended())),
            Ok(Err(Unread::TooLong)) => return Err(Broken::Beyond(ask.too_large(EVENT))),
            Ok(Err(Unread::Failed(source))) => return Err(Broken::Off(ask.failed(source))),
        }
        if !has_lived {
            has_lived = true;
            lives();
        }
    }
}

fn event<'a>(ask: &Ask, line: &'a [u8]) -> Result<Event<'a>, Broken> {
    let line: Line<'a> =
        serde_json::from_slice(line).map_err(|source| Broken::Beyond(ask.undecodable(source)))?;
    match line.kind {
        "ADDED" | "MODIFIED" => Ok(Event::Applied(line.object)),
        "DELETED" => Ok(Event::Deleted(line.object)),
        "BOOKMARK" => Ok(Event::Bookmark(line.object)),
        _ => Err(Broken::Beyond(ask.refused(refusal(line.object)))),
    }
}

/// Returns the `Status` in an event of type `ERROR`.
fn refusal(object: &RawValue) -> Refusal {
    #[derive(Deserialize, Default)]
    struct Status {
        #[serde(default)]
        code: u16,
        #[serde(default)]
        message: String,
    }
    let Status { code, message } = serde_json::from_str(object.get()).unwrap_or_default();
    Refusal { code, message, retry_after: None, is_of_future: false }
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
    /// How many bytes of `read` were searched for the end of a line.
    scanned: usize,
}

impl Lines {
    /// Returns the next whole line; `None` at the end. Bytes after the last line are an incomplete event
    /// and are dropped.
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

#[cfg(test)]
#[path = "watch_tests.rs"]
mod tests;
