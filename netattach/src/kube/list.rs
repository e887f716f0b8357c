//! Lists objects in pages, so that besides the kept objects at most one page is in memory.

use std::time::Duration;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::backoff::Backoff;
use super::client::{Ask, Client, RequestError};
use super::resource::{METADATA_LIST, Target};

/// Most bytes of one page. A larger page is requested again with half as many objects: an object has at
/// most about 3 MiB, because etcd accepts no request of more than 1.5 MiB.
const PAGE: usize = 16 << 20;
/// Timeout of one page.
const PATIENCE: Duration = Duration::from_secs(60);
/// Pauses before a page is requested again, and the number of attempts: for about ten minutes in total. A
/// server drops the position of a list after five to ten minutes (kube-apiserver,
/// `--etcd-compaction-interval`).
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const MOST_PAUSE: Duration = Duration::from_secs(30);
const TRIES: u32 = 30;
/// Timeout of the request for a version, and most bytes of its answer: the metadata of one object.
const VERSION_PATIENCE: Duration = Duration::from_secs(10);
const VERSION: usize = 4 << 20;
/// HTTP status for a position in a list, or a version, that the server no longer has.
pub(super) const GONE: u16 = 410;
/// HTTP status of a kind that is not served.
pub(super) const UNKNOWN: u16 = 404;
/// HTTP status for a position that the server considers invalid.
const BAD_REQUEST: u16 = 400;

#[derive(Deserialize)]
struct Page<'a> {
    metadata: PageMetadata,
    #[serde(borrow, default)]
    items: Option<Vec<&'a RawValue>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct PageMetadata {
    #[serde(default)]
    resource_version: String,
    #[serde(default, rename = "continue")]
    next: Option<String>,
}

/// Reads all objects of a kind, calls `take` for each, and returns the version of the list, from which to
/// watch.
///
/// If a page after the first fails, it is requested again from the same position, up to [`TRIES`] times in
/// a row, and each failure is reported to `failed`: an overloaded server need not answer a page twice. The
/// position expires after some minutes; the error then has the status [`GONE`] and the list begins anew.
///
/// # Errors
/// [`RequestError`]; `take` may have been called for some of the objects.
pub(super) async fn list(
    client: &Client,
    target: &Target<'_>,
    mut take: impl FnMut(&RawValue),
    mut failed: impl FnMut(&RequestError),
) -> Result<String, RequestError> {
    let page = target.resource.page;
    let mut next: Option<String> = None;
    let mut limit = target.resource.first_page();
    let mut tries = Tries::new();
    loop {
        let ask =
            Ask { accept: target.resource.accept_list(), ..Ask::get(target.list(limit, next.as_deref())) };
        let read = client.read(&ask, PAGE, PATIENCE).await;
        match read.and_then(|body| taken(&ask, &body, &mut take)) {
            Ok(PageMetadata { resource_version, next: position }) => {
                let Some(position) = position.filter(|position| !position.is_empty()) else {
                    return Ok(resource_version);
                };
                next = Some(position);
                limit = limit.or(Some(page));
                tries = Tries::new();
            }
            Err(RequestError::TooLarge { .. }) if limit != Some(1) => {
                limit = Some(limit.map_or(page, |limit| limit / 2));
            }
            // Before the first page there is no position to continue from.
            Err(error) if next.is_none() || !may_come(&error) || tries.left == 0 => return Err(error),
            Err(error) => {
                failed(&error);
                tokio::time::sleep(tries.pause(&error)).await;
            }
        }
    }
}

/// Calls `take` for the objects of a page.
fn taken(ask: &Ask, body: &[u8], take: impl FnMut(&RawValue)) -> Result<PageMetadata, RequestError> {
    let page: Page<'_> = serde_json::from_slice(body).map_err(|source| ask.undecodable(source))?;
    page.items.into_iter().flatten().for_each(take);
    Ok(page.metadata)
}

/// Whether a failed page may succeed from the same position.
fn may_come(error: &RequestError) -> bool {
    let is_too_large = matches!(error, RequestError::TooLarge { .. });
    !is_too_large && !matches!(error.code(), Some(GONE | UNKNOWN | BAD_REQUEST))
}

/// Attempts for one page.
struct Tries {
    backoff: Backoff,
    left: u32,
}

impl Tries {
    fn new() -> Self {
        Self { backoff: Backoff::new(FIRST_PAUSE, MOST_PAUSE), left: TRIES }
    }

    /// Returns the pause before the next attempt.
    fn pause(&mut self, error: &RequestError) -> Duration {
        self.left = self.left.saturating_sub(1);
        self.backoff.next().max(error.asked_pause())
    }
}

/// Returns the version that a list of the kind would have now.
///
/// # Errors
/// [`RequestError`]; with the status 404 if the kind is not served at that path.
pub(super) async fn version_now(client: &Client, target: &Target<'_>) -> Result<String, RequestError> {
    let ask = Ask { accept: METADATA_LIST, ..Ask::get(target.list(Some(1), None)) };
    let body = client.read(&ask, VERSION, VERSION_PATIENCE).await?;
    Ok(taken(&ask, &body, |_| {})?.resource_version)
}

#[cfg(test)]
#[path = "list_tests.rs"]
mod tests;
