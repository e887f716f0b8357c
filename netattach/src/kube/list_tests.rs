//! The pages that a list requests, and when it starts over.

use std::sync::Arc;

use super::super::resource::{ALWAYS, PODS, Resource};
use super::super::test_server::{self, Answer};
use super::*;
use crate::sync::{Mutex, locked};

/// The result of listing a kind from a server with given answers: the requests, the number of objects, the codes of
/// the failures in between, and the final version or code.
/// the codes of the failures between, and the version or the code at the end.
type Listed = (Vec<String>, usize, Vec<Option<u16>>, Result<String, Option<u16>>);

fn listed(resource: &'static Resource, answers: Vec<Answer>) -> Listed {
    let asked = Arc::new(Mutex::new(Vec::new()));
    let all = Arc::clone(&asked);
    let mut answers = answers.into_iter();
    let script = move |target: &str| {
        locked(&all).push(target.to_owned());
        answers.next().unwrap_or_else(|| Answer::of(500, ""))
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (mut taken, mut failures) = (0, Vec::new());
    let ended = runtime.block_on(async {
        let client = test_server::client(script).await;
        let target = Target { resource, path: "/p", node: "n", watch_seconds: 60, left_out: "" };
        list(&client, &target, |_| taken += 1, |error| failures.push(error.code())).await
    });
    let ended = ended.map_err(|error| error.code());
    (locked(&asked).clone(), taken, failures, ended)
}

/// A page with that many objects, and the position of the next page.
fn page(objects: usize, next: &str) -> Answer {
    let items = vec!["{}"; objects].join(",");
    let metadata = format!("{{\"resourceVersion\": \"7\", \"continue\": \"{next}\"}}");
    Answer::of(200, format!("{{\"metadata\": {metadata}, \"items\": [{items}]}}"))
}

/// The answer to the request for the newest version, 5, by a server with that many further objects.
fn of_all(remaining: u64) -> Answer {
    let metadata =
        format!(r#"{{"resourceVersion": "5", "continue": "x", "remainingItemCount": {remaining}}}"#);
    Answer::of(200, format!("{{\"metadata\": {metadata}, \"items\": [{{}}]}}"))
}

fn texts(all: &[&str]) -> Vec<String> {
    all.iter().map(|text| (*text).to_owned()).collect()
}

#[test]
fn a_page_that_fails_is_asked_for_again_from_the_same_position() {
    let namespaces = ALWAYS[1];
    let answers = || vec![page(2, "a"), Answer::of(503, ""), Answer::of(200, "half"), page(3, "b")];
    let (first, a, b) = ("/p?limit=200", "/p?limit=200&continue=a", "/p?limit=200&continue=b");
    let whole = [answers(), vec![page(1, "")]].into_iter().flatten().collect();
    assert_eq!(
        listed(namespaces, whole),
        (texts(&[first, a, a, a, b]), 6, vec![Some(503), None], Ok("7".to_owned()))
    );
    // No retry for versions that the server no longer has, requests that it refuses, and kinds that it does not
    // serve.
    for code in [410, 400, 404] {
        let ended = [answers(), vec![Answer::of(code, "")]].into_iter().flatten().collect();
        assert_eq!(
            listed(namespaces, ended),
            (texts(&[first, a, a, a, b]), 5, vec![Some(503), None], Err(Some(code)))
        );
    }
    // Nothing is lost either if the first page fails.
    assert_eq!(listed(namespaces, Vec::new()), (texts(&[first]), 0, Vec::new(), Err(Some(500))));
}

#[test]
fn the_pods_of_a_node_are_asked_for_at_once_and_in_pages_where_that_is_too_much() {
    let (newest, at_once) = ("/p?limit=1", "/p?fieldSelector=spec.nodeName%3Dn");
    let since = format!("{at_once}&resourceVersion=5");
    let paged = |rest: &str| format!("{at_once}&limit={rest}");
    let ended = || Ok("7".to_owned());
    let asked = |all: &[&str]| -> Vec<String> {
        std::iter::once(newest).chain(all.iter().copied()).map(str::to_owned).collect()
    };
    let few = || of_all(MANY - 1);
    assert_eq!(listed(&PODS, vec![few(), page(300, "")]), (asked(&[at_once]), 300, Vec::new(), ended()));
    let too_large = || Answer::of(200, " ".repeat(PAGE + 1));
    for (number, first) in [(MANY - 1, at_once), (MANY, since.as_str())] {
        let answers = vec![of_all(number), too_large(), too_large(), page(50, "a"), page(1, "")];
        let requests = asked(&[first, &paged("100"), &paged("50"), &paged("50&continue=a")]);
        assert_eq!(listed(&PODS, answers), (requests, 51, Vec::new(), ended()));
        // A server may send pages to clients that did not request them.
        let answers = vec![of_all(number), page(5, "a"), page(1, "")];
        let requests = asked(&[first, &paged("100&continue=a")]);
        assert_eq!(listed(&PODS, answers), (requests, 6, Vec::new(), ended()));
    }
}

#[test]
fn of_many_pods_those_of_a_node_are_asked_for_as_of_the_newest_version() {
    let (newest, at_once) = ("/p?limit=1", "/p?fieldSelector=spec.nodeName%3Dn");
    let since = "/p?fieldSelector=spec.nodeName%3Dn&resourceVersion=5";
    let ended = || Ok("7".to_owned());
    let whole = vec![of_all(MANY), page(3, "")];
    assert_eq!(listed(&PODS, whole), (texts(&[newest, since]), 3, Vec::new(), ended()));
    // A server whose cache does not reach it within its time, and one that takes no version.
    let late = r#"{"message": "Timeout: Too large resource version: 5, current: 4"}"#;
    for (code, body) in [(504, late), (400, "")] {
        let answers = vec![of_all(MANY), Answer::of(code, body), page(3, "")];
        assert_eq!(listed(&PODS, answers), (texts(&[newest, since, at_once]), 3, Vec::new(), ended()));
    }
    // Other failures are the list's.
    let answers = vec![of_all(MANY), Answer::of(503, "")];
    assert_eq!(listed(&PODS, answers), (texts(&[newest, since]), 0, Vec::new(), Err(Some(503))));
    assert_eq!(listed(&PODS, Vec::new()), (texts(&[newest]), 0, Vec::new(), Err(Some(500))));
}

#[test]
fn a_page_is_given_up_after_some_ten_minutes() {
    let mut tries = Tries::new();
    let mut whole = Duration::ZERO;
    while tries.left > 0 {
        whole += tries.pause(&Ask::get("/p").late(PATIENCE));
    }
    let minutes = |number: u64| Duration::from_secs(60 * number);
    assert!(whole > minutes(5) && whole < minutes(12), "{whole:?}");
}
