//! Lists in pages, and the versions at which watches begin.

use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::{Value, json};

use super::query::{ObjectPath, Query};
use super::selector::Selector;
use super::shape::Shape;
use super::state::Shared;
use super::status::Failure;
use super::store::{Key, Store};
use super::watch::{From, Watch};

/// The first minor version of servers that know the parameter `resourceVersionMatch`; those before ignore it.
const KNOWS_MATCHES: u32 = 19;

/// Whether a server of that minor version streams the list that a watch requests to begin with: the feature gate
/// `WatchList` is on by default in 1.32, and from 1.34 on.
///
/// # Errors
/// The error for `sendInitialEvents` and `resourceVersionMatch` of a server that does not stream.
fn streams(minor: u32, query: &Query) -> Result<bool, Failure> {
    const MATCH: &str = "resourceVersionMatch";
    let given = |key: &str| query.get(key).map(String::as_str).unwrap_or_default();
    if !matches!(given("sendInitialEvents"), "true" | "1") || minor < KNOWS_MATCHES {
        return Ok(false);
    }
    let mut forbidden = Vec::new();
    match minor {
        ..27 => {
            forbidden.push((MATCH, "resourceVersionMatch is forbidden for watch"));
            if given("resourceVersion").is_empty() {
                forbidden
                    .push((MATCH, "resourceVersionMatch is forbidden unless resourceVersion is provided"));
            }
        }
        27..=31 | 33 => forbidden.push((
            "sendInitialEvents",
            "sendInitialEvents is forbidden for watch unless the WatchList feature gate is enabled",
        )),
        _ if given(MATCH) != "NotOlderThan" => {
            forbidden.push((MATCH, "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan"))
        }
        _ => return Ok(true),
    }
    Err(Failure::forbidden_options(&forbidden))
}

/// The position at which a page begins.
#[derive(Debug)]
struct Token {
    /// Version of the list; `None`: the present objects, after an expired token.
    version: Option<u64>,
    /// The last object of the page before.
    after: (String, String),
}

impl Token {
    fn encode(version: Option<u64>, last: &Key) -> String {
        URL_SAFE_NO_PAD.encode(json!({"rv": version, "after": [last.1, last.2]}).to_string())
    }

    fn decode(text: &str) -> Option<Self> {
        let value: Value = serde_json::from_slice(&URL_SAFE_NO_PAD.decode(text).ok()?).ok()?;
        let word = |index: usize| Some(value["after"][index].as_str()?.to_owned());
        Some(Self { version: value["rv"].as_u64(), after: (word(0)?, word(1)?) })
    }
}

fn selector(path: &ObjectPath, query: &Query) -> Result<Selector, Failure> {
    let text = |key: &str| query.get(key).map_or("", String::as_str);
    Selector::parse(path.kind, text("labelSelector"), text("fieldSelector"))
}

fn number(query: &Query, key: &str) -> Result<Option<u64>, Failure> {
    match query.get(key).map(String::as_str) {
        None | Some("") => Ok(None),
        Some(text) => text
            .parse()
            .map(Some)
            .map_err(|_| Failure::bad_request(format!("{key}: Invalid value: {text:?}"))),
    }
}

/// A list, or a page of one: every page is of the version of the first. A list at version 0 is never cut into pages, as
/// real servers answer it from their cache.
/// `newest`: the version of a list of any version, if it is not the store's own.
pub(super) fn page(
    store: &Store,
    newest: Option<u64>,
    path: &ObjectPath,
    shape: &Shape,
    query: &Query,
) -> Result<Value, Failure> {
    let selector = selector(path, query)?;
    let asked = number(query, "resourceVersion")?;
    let token = match query.get("continue").filter(|text| !text.is_empty()) {
        Some(_) if asked.is_some_and(|asked| asked != 0) => {
            let why = "specifying resource version is not allowed when using continue";
            return Err(Failure::bad_request(why.to_owned()));
        }
        Some(text) => {
            let bad = || Failure::bad_request("continue key is not valid".to_owned());
            Some(Token::decode(text).ok_or_else(bad)?)
        }
        None => None,
    };
    let exact = query.get("resourceVersionMatch").is_some_and(|text| text == "Exact");
    let version = match (&token, asked) {
        (Some(token), _) => token.version,
        (None, Some(asked)) if asked > store.version() => {
            return Err(Failure::version_too_large(asked, store.version()));
        }
        (None, Some(asked)) if exact && asked < store.oldest() => {
            return Err(Failure::expired(asked, store.oldest()));
        }
        (None, Some(asked)) if exact => Some(asked),
        _ => None,
    };
    if let (Some(token), Some(version)) = (&token, version)
        && version < store.oldest()
    {
        let last = (path.kind.resource, token.after.0.clone(), token.after.1.clone());
        return Err(Failure::continue_expired(&Token::encode(None, &last)));
    }
    let version = version.or(newest).unwrap_or(store.version());
    let wanted = |(key, object): &(Key, std::sync::Arc<Value>)| {
        path.namespace.as_ref().is_none_or(|namespace| *namespace == key.1)
            && token.as_ref().is_none_or(|token| (&key.1, &key.2) > (&token.after.0, &token.after.1))
            && selector.matches(object)
    };
    let found: Vec<_> = store.list_at(path.kind, version).into_iter().filter(wanted).collect();
    let limit = number(query, "limit")?.filter(|limit| *limit > 0 && asked != Some(0));
    let limit =
        limit.map_or(found.len(), |limit| usize::try_from(limit).unwrap_or(usize::MAX).min(found.len()));
    let (items, rest) = found.split_at(limit);
    let rest = match items.last() {
        Some((last, _)) if !rest.is_empty() => {
            Some((Token::encode(Some(version), last), selector.is_empty().then_some(rest.len())))
        }
        _ => None,
    };
    Ok(shape.list(version, items.iter().map(|(_, object)| object.as_ref()), rest))
}

/// A watch.
pub(super) fn watch(
    shared: &Shared,
    path: &ObjectPath,
    shape: Shape,
    query: &Query,
) -> Result<Watch, Failure> {
    let says = |key: &str| query.get(key).is_some_and(|text| matches!(text.as_str(), "true" | "1"));
    let bookmarks = says("allowWatchBookmarks");
    let streamed = streams(shared.settings.minor, query)?;
    let from = match number(query, "resourceVersion")? {
        _ if streamed => From::Present { marked: bookmarks },
        None | Some(0) => From::Present { marked: false },
        Some(version) => From::Version(version),
    };
    let time = number(query, "timeoutSeconds")?.map(Duration::from_secs);
    Ok(Watch { shape, path: path.clone(), selector: selector(path, query)?, from, bookmarks, time })
}
