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
        let target = Target { resource, path: "/p", node: "n", watch_seconds: 60 };
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
    let at_once = "/p?fieldSelector=spec.nodeName%3Dn";
    let paged = |rest: &str| format!("{at_once}&limit={rest}");
    let ended = || Ok("7".to_owned());
    assert_eq!(listed(&PODS, vec![page(300, "")]), (texts(&[at_once]), 300, Vec::new(), ended()));
    let too_large = || Answer::of(200, " ".repeat(PAGE + 1));
    let answers = vec![too_large(), too_large(), page(50, "a"), page(1, "")];
    let asked = vec![at_once.to_owned(), paged("100"), paged("50"), paged("50&continue=a")];
    assert_eq!(listed(&PODS, answers), (asked, 51, Vec::new(), ended()));
    // A server may send pages to clients that did not request them.
    let asked = vec![at_once.to_owned(), paged("100&continue=a")];
    assert_eq!(listed(&PODS, vec![page(5, "a"), page(1, "")]), (asked, 6, Vec::new(), ended()));
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
