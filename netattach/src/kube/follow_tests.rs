//! What a follower asks for, and when it reports that a kind is not followed.

use super::super::resource::PODS;
use super::super::test_server::{self, Answer};
use super::*;
use crate::sync::{Mutex, locked};

/// What was asked for, and whether the kind was reported by then.
type Asked = Vec<(String, bool)>;

fn event(kind: &str, object: &str) -> String {
    format!("{{\"type\": \"{kind}\", \"object\": {object}}}\n")
}

fn error(code: u16) -> Answer {
    ends(&event("ERROR", &format!("{{\"code\": {code}, \"message\": \"no\"}}")))
}

fn ends(body: &str) -> Answer {
    Answer { code: 200, body: body.to_owned(), stays: false }
}

/// Follows pods, whose lists have the versions 1, 2 and so on, and whose watches get these answers, until a condition of
/// the requests and of what is reported is met.
fn followed(
    mut watches: impl FnMut(usize) -> Answer + Send + 'static,
    mut until: impl FnMut(&Asked, Option<String>) -> bool,
) -> Asked {
    let view = Arc::new(View::new([&PODS]));
    let asked = Arc::new(Mutex::new(Asked::new()));
    let (reported, all) = (Arc::clone(&view), Arc::clone(&asked));
    let (mut lists, mut watched) = (0, 0);
    let script = move |target: &str| {
        let is_reported = reported.why_failing(&PODS).is_some();
        match target.split_once("resourceVersion=") {
            Some((_, version)) => {
                watched += 1;
                locked(&all).push((format!("watch {version}"), is_reported));
                watches(watched)
            }
            None => {
                lists += 1;
                locked(&all).push(("list".to_owned(), is_reported));
                ends(&format!("{{\"metadata\": {{\"resourceVersion\": \"{lists}\"}}, \"items\": []}}"))
            }
        }
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let client = test_server::client(script).await;
        let node = Arc::from("node-1");
        let follower = Follower { client, view: Arc::clone(&view), resource: &PODS, node, watch_seconds: 60 };
        let met = async {
            while !until(&locked(&asked), view.why_failing(&PODS)) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::select! {
            () = follower.run() => {}
            () = met => {}
        }
    });
    locked(&asked).clone()
}

/// The first requests where each watch gets the same answer.
fn first(count: usize, answer: impl Fn() -> Answer + Send + 'static) -> Asked {
    let mut asked = followed(move |_| answer(), |asked, _| asked.len() >= count);
    asked.truncate(count);
    asked
}

fn table(rows: &[(&str, bool)]) -> Asked {
    rows.iter().map(|(what, reported)| ((*what).to_owned(), *reported)).collect()
}

#[test]
fn watches_that_end_at_once_are_reported_from_the_second_in_a_row_on() {
    let expected = table(&[("list", false), ("watch 1", false), ("watch 1", false), ("watch 1", true)]);
    assert_eq!(first(4, || ends("")), expected);
    // One that has an event begins anew.
    let watches = |number| match number {
        2 => ends(&event("BOOKMARK", "{\"metadata\": {\"resourceVersion\": \"5\"}}")),
        _ => ends(""),
    };
    let mut asked = followed(watches, |asked, _| asked.len() >= 6);
    asked.truncate(6);
    let expected = [("list", false), ("watch 1", false), ("watch 1", false), ("watch 5", false)];
    assert_eq!(asked[..4], table(&expected));
    assert_eq!(asked[4..], table(&[("watch 5", false), ("watch 5", true)]));
}

/// Something between that ends each answer after its first bytes.
#[test]
fn watches_that_end_after_an_event_come_one_a_second() {
    let begun = Instant::now();
    let asked = first(4, || ends(&event("BOOKMARK", "{\"metadata\": {\"resourceVersion\": \"5\"}}")));
    assert_eq!(asked, table(&[("list", false), ("watch 1", false), ("watch 5", false), ("watch 5", false)]));
    assert!(begun.elapsed() >= BETWEEN_WATCHES * 2, "{:?}", begun.elapsed());
}

#[test]
fn what_a_watch_cannot_go_on_from_is_listed_again() {
    let relisted =
        table(&[("list", false), ("watch 1", false), ("list", true), ("watch 2", true), ("list", true)]);
    assert_eq!(first(5, || error(500)), relisted);
    assert_eq!(first(5, || ends("nonsense\n")), relisted);
    // A history that begins later is no fault, once.
    let expected =
        table(&[("list", false), ("watch 1", false), ("list", false), ("watch 2", false), ("list", true)]);
    assert_eq!(first(5, || error(410)), expected);
    // A server that refuses the watch is not asked for more.
    let refused = || Answer { code: 503, body: String::new(), stays: false };
    let expected = table(&[("list", false), ("watch 1", false), ("watch 1", true), ("watch 1", true)]);
    assert_eq!(first(4, refused), expected);
}

#[test]
fn a_watch_that_lives_is_followed_again() {
    let bookmark = event("BOOKMARK", "{\"metadata\": {\"resourceVersion\": \"5\"}}");
    for body in [bookmark, String::new()] {
        let watches = move |number| match number {
            1 => error(500),
            _ => Answer { code: 200, body: body.clone(), stays: true },
        };
        let asked = followed(watches, |asked, why| asked.len() >= 4 && why.is_none());
        assert_eq!(asked, table(&[("list", false), ("watch 1", false), ("list", true), ("watch 2", true)]));
    }
}
