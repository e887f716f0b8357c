//! Lists objects in pages, so that at most one page is in memory beside what is kept of the others.

use std::time::Duration;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::client::{Ask, Client, RequestError};
use super::resource::Target;

/// Most bytes of one page. A page that is larger is asked for again with half as many objects: an object is at most
/// some 3 MiB, because etcd takes no request of more than 1.5 MiB.
const PAGE: usize = 16 << 20;
/// How long one page may take.
const PATIENCE: Duration = Duration::from_secs(60);
/// HTTP status of a position in a list, or in the history, that the server does not have any more.
pub(super) const GONE: u16 = 410;
/// HTTP status of a kind that is not served.
pub(super) const UNKNOWN: u16 = 404;

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

/// Reads all objects of a kind, each with `take`, and returns the version of the list, from which to watch.
///
/// The position in a list expires when it takes too long, some minutes; then the error has the status [`GONE`] and the
/// list begins anew.
///
/// # Errors
/// [`RequestError`]; `take` was called for a part of the objects then.
pub(super) async fn list(
    client: &Client,
    target: &Target<'_>,
    mut take: impl FnMut(&RawValue),
) -> Result<String, RequestError> {
    let mut next = None;
    let mut limit = target.resource.page;
    loop {
        let ask =
            Ask { accept: target.resource.accept_list(), ..Ask::get(target.list(limit, next.as_deref())) };
        let body = match client.read(&ask, PAGE, PATIENCE).await {
            Err(RequestError::TooLarge { .. }) if limit > 1 => {
                limit /= 2;
                continue;
            }
            body => body?,
        };
        let page: Page<'_> = serde_json::from_slice(&body).map_err(|source| ask.undecodable(source))?;
        page.items.into_iter().flatten().for_each(&mut take);
        match page.metadata.next {
            Some(position) if !position.is_empty() => next = Some(position),
            _ => return Ok(page.metadata.resource_version),
        }
    }
}
