//! The requests of a follower, and when it reports that a kind is not followed.

use super::super::resource::{ALWAYS, PODS};
use super::super::test_server::{self, Answer};
use super::*;
use crate::sync::{Mutex, locked};

/// The requests, and whether the kind was reported as not followed by then.
type Asked = Vec<(String, bool)>;

fn event(kind: &str, object: &str) -> String {
    format!("{{\"type\": \"{kind}\", \"object\": {object}}}\n")
}

fn error(code: u16) -> Answer {
    ends(&event("ERROR", &format!("{{\"code\": {code}, \"message\": \"no\"}}")))
}

fn ends(body: &str) -> Answer {
    Answer::of(200, body)
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
            // Before each list.
            None if target.ends_with("/pods?limit=1") => listed(lists),
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
        let follower = Follower {
            client,
            view: Arc::clone(&view),
            resource: &PODS,
            node,
            watch_seconds: 60,
            left_out: "".into(),
        };
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

/// Returns the first requests if each watch gets the same answer.
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
    // A watch with an event restarts the count.
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

/// A proxy that ends each answer after its first bytes.
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
    // A history that begins later is no fault the first time.
    let expected =
        table(&[("list", false), ("watch 1", false), ("list", false), ("watch 2", false), ("list", true)]);
    assert_eq!(first(5, || error(410)), expected);
    // A server that refuses the watch is not queried more often.
    let refused = || Answer::of(503, "");
    let expected = table(&[("list", false), ("watch 1", false), ("watch 1", true), ("watch 1", true)]);
    assert_eq!(first(4, refused), expected);
}

#[test]
fn a_watch_that_lives_is_followed_again() {
    let bookmark = event("BOOKMARK", "{\"metadata\": {\"resourceVersion\": \"5\"}}");
    for body in [bookmark, String::new()] {
        let watches = move |number| match number {
            1 => error(500),
            _ => Answer { code: 200, body: body.clone(), ends: None },
        };
        let asked = followed(watches, |asked, why| asked.len() >= 4 && why.is_none());
        assert_eq!(asked, table(&[("list", false), ("watch 1", false), ("list", true), ("watch 2", true)]));
    }
}

/// A server that was restored to an earlier state may know neither the position nor that it ever had it.
#[test]
fn a_position_that_is_refused_three_times_in_a_row_is_given_up() {
    let of_future = r#"{"message": "Timeout: Too large resource version: 1, current: 0"}"#;
    for (code, body) in [(400, ""), (504, of_future)] {
        let expected = table(&[
            ("list", false),
            ("watch 1", false),
            ("watch 1", true),
            ("watch 1", true),
            ("list", true),
            ("watch 2", true),
        ]);
        assert_eq!(first(6, move || Answer::of(code, body)), expected, "{code}");
    }
}

/// The first requests for a kind, without the host, to a server that answers by path, query and number.
fn asked_for(
    resource: &'static Resource,
    count: usize,
    mut answer: impl FnMut(&str, usize) -> Answer + Send + 'static,
) -> Vec<String> {
    let asked = Arc::new(Mutex::new(Vec::new()));
    let all = Arc::clone(&asked);
    let script = move |target: &str| {
        let mut all = locked(&all);
        all.push(target.to_owned());
        answer(target, all.len())
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let client = test_server::client(script).await;
        let view = Arc::new(View::new([resource]));
        let follower =
            Follower { client, view, resource, node: Arc::from("n"), watch_seconds: 60, left_out: "".into() };
        let enough = async {
            while locked(&asked).len() < count {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::select! {
            () = follower.run() => {}
            () = enough => {}
        }
    });
    let mut asked = locked(&asked).clone();
    asked.truncate(count);
    asked
}

fn listed(version: u32) -> Answer {
    Answer::of(200, format!("{{\"metadata\": {{\"resourceVersion\": \"{version}\"}}, \"items\": []}}"))
}

/// A watch that ends as it should, without a line.
fn silent() -> Answer {
    Answer { ends: Some(Duration::from_millis(1200)), ..Answer::of(200, "") }
}

#[test]
fn a_watch_without_a_line_is_followed_by_a_list_where_the_server_is_at_an_earlier_version() {
    const PATH: &str = "/api/v1/pods?fieldSelector=spec.nodeName%3Dn";
    let watch = |version: u32| {
        format!("{PATH}&watch=true&allowWatchBookmarks=true&timeoutSeconds=60&resourceVersion={version}")
    };
    let (list, newest) = (|| PATH.to_owned(), || "/api/v1/pods?limit=1".to_owned());
    let of = |versions: [u32; 3]| {
        move |target: &str, number: usize| match target.contains("watch=true") {
            true => silent(),
            // The first list with the request before it, the look after the watch, and what follows.
            false => listed(versions[number.saturating_sub(3).min(2)]),
        }
    };
    assert_eq!(
        asked_for(&PODS, 7, of([7, 3, 4])),
        [newest(), list(), watch(7), newest(), newest(), list(), watch(4)]
    );
    for versions in [[7, 7, 7], [7, 10, 10]] {
        let expected = [newest(), list(), watch(7), newest(), watch(7), newest()];
        assert_eq!(asked_for(&PODS, 6, of(versions)), expected);
    }
}

#[test]
fn a_newer_version_of_a_kind_is_followed_once_it_is_served() {
    let policies = ALWAYS[3];
    let [newer, older] = *policies.paths else { panic!("{policies:?}") };
    let query = "watch=true&allowWatchBookmarks=true&timeoutSeconds=240&resourceVersion=1";
    let bookmark = event("BOOKMARK", "{\"metadata\": {\"resourceVersion\": \"1\"}}");
    let answer = move |target: &str, number: usize| match target.contains("watch=true") {
        true => ends(&bookmark),
        // The first list, and the probe after the first watch.
        false if target.starts_with(newer) && number < 5 => Answer::of(404, ""),
        false => listed(1),
    };
    assert_eq!(
        asked_for(policies, 8, answer),
        [
            format!("{newer}?limit=100"),
            format!("{older}?limit=100"),
            format!("{older}?{query}"),
            format!("{newer}?limit=1"),
            format!("{older}?{query}"),
            format!("{newer}?limit=1"),
            format!("{newer}?limit=100"),
            format!("{newer}?{query}"),
        ]
    );
}

#[test]
fn lists_for_room_become_rarer_while_nothing_fits() {
    let now = tokio::time::Instant::now();
    let mut room = ForRoom::new(now);
    room.listed(true, now);
    assert_eq!(room.next, now, "a list that was made for something else");
    for (has_admitted, full) in
        [(false, 2), (false, 4), (false, 8), (false, 16), (false, 16), (true, 2), (true, 2), (false, 4)]
    {
        room.is_next = true;
        room.listed(has_admitted, now);
        let pause = room.next - now;
        assert!(pause >= ROOM * full / 2 && pause <= ROOM * full, "{pause:?} of {full}");
    }
}

#[test]
fn versions_that_are_no_numbers_are_not_compared() {
    let table =
        [("9", "10", true), ("10", "9", false), ("10", "10", false), ("a", "10", false), ("9", "b", false)];
    assert_eq!(table.map(|(version, other, _)| (version, other, is_before(version, other))), table);
}
