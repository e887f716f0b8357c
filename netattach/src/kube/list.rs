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
/// Objects of a kind, on all nodes, from which on its objects on one node are listed as of a version ([`since`]). Fewer
/// are read from etcd as quickly, and a server waits up to 3 s until its cache has the version: where there are many
/// pods, one of them changes several times a second.
const MANY: u64 = 2000;
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
    /// Number of further objects, if the server counts them.
    #[serde(default)]
    remaining_item_count: Option<u64>,
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
    let mut since = if limit.is_none() { since(client, target).await? } else { None };
    let mut tries = Tries::new();
    loop {
        let query = target.list(limit, next.as_deref(), since.as_deref());
        let ask = Ask { accept: target.resource.accept_list(), ..Ask::get(query) };
        let read = client.read(&ask, PAGE, PATIENCE).await;
        match read.and_then(|body| taken(&ask, &body, &mut take)) {
            Ok(PageMetadata { resource_version, next: position, .. }) => {
                let Some(position) = position.filter(|position| !position.is_empty()) else {
                    return Ok(resource_version);
                };
                (next, since) = (Some(position), None);
                limit = limit.or(Some(page));
                tries = Tries::new();
            }
            Err(RequestError::TooLarge { .. }) if limit != Some(1) => {
                // With a limit, a version would be the only one that the list may have.
                (limit, since) = (Some(limit.map_or(page, |limit| limit / 2)), None);
            }
            // The server's cache does not reach the version soon enough, or it takes no version.
            Err(error) if since.is_some() && is_without_version(&error) => since = None,
            // Before the first page there is no position to continue from.
            Err(error) if next.is_none() || !may_come(&error) || tries.left == 0 => return Err(error),
            Err(error) => {
                failed(&error);
                tokio::time::sleep(tries.pause(&error)).await;
            }
        }
    }
}

/// Returns a version that a list of the kind's objects on one node need not precede: the newest one, read now. `None`:
/// there are few on all nodes.
///
/// A list without a version has to be the newest, for which servers up to 1.30 read all objects of the kind from etcd.
/// Of a version that was the newest after the list was begun, or a later one, it is as certain, and every server answers
/// it from its cache. The version is of the same kind, because servers can keep kinds in several etcds.
async fn since(client: &Client, target: &Target<'_>) -> Result<Option<String>, RequestError> {
    let PageMetadata { resource_version, remaining_item_count, .. } = newest(client, target).await?;
    let is_many = remaining_item_count.is_some_and(|remaining| remaining >= MANY);
    Ok(Some(resource_version).filter(|version| is_many && !version.is_empty()))
}

/// Whether a list may succeed without a version.
fn is_without_version(error: &RequestError) -> bool {
    error.refusal().is_some_and(|refusal| refusal.is_of_future) || error.code() == Some(BAD_REQUEST)
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
    Ok(newest(client, target).await?.resource_version)
}

/// Asks for the metadata of one object of the kind.
async fn newest(client: &Client, target: &Target<'_>) -> Result<PageMetadata, RequestError> {
    let ask = Ask { accept: METADATA_LIST, ..Ask::get(target.newest()) };
    let body = client.read(&ask, VERSION, VERSION_PATIENCE).await?;
    taken(&ask, &body, |_| {})
}

#[cfg(test)]
#[path = "list_tests.rs"]
mod tests;
