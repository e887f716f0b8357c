//! The writes that the queue returns.

use std::sync::mpsc::channel;

use super::*;
use crate::npwg::STATUS_ANNOTATION;
use crate::source::read::manifest::Object;
use crate::source::read::{Kind, api_object};

fn name() -> ObjectName {
    ObjectName::new("shop", "a")
}

fn attached(text: &str) -> Status {
    Status::Attached { text: text.to_owned(), label: String::new() }
}

/// Returns the pod as the watch shows it.
fn shown(uid: &str, text: Option<&str>, terminating: bool) -> Pod {
    let json = object(uid, text, terminating);
    pod(&json)
}

fn object(uid: &str, text: Option<&str>, terminating: bool) -> Value {
    let mut json = serde_json::json!({"metadata": {"namespace": "shop", "name": "a", "uid": uid}});
    if let Some(text) = text {
        json["metadata"]["annotations"][STATUS_ANNOTATION] = text.into();
        json["metadata"]["labels"]["netattach.dev/networks"] = "".into();
    }
    if terminating {
        json["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
    }
    json
}

fn pod(json: &Value) -> Pod {
    let raw = serde_json::value::to_raw_value(json).unwrap();
    let Ok(Object::Pod(pod)) = api_object(Kind::Pod, &raw) else { panic!("a pod") };
    std::sync::Arc::unwrap_or_clone(pod)
}

fn put(queue: &mut Queue, status: Status, now: Instant) {
    queue.put(name(), Some("1".to_owned()), status, None, now);
}

fn failed(why: &str, pause: Duration, maybe_written: bool) -> Outcome {
    Outcome::Failed { why: why.to_owned(), pause, maybe_written }
}

fn write(status: Status) -> Write {
    let patch = patch(Some("1"), Some(&shown("1", None, false)), &status);
    Write { name: name(), uid: Some("1".to_owned()), status, patch }
}

#[test]
fn the_newest_status_is_written_once_and_one_that_is_there_is_not() {
    let (now, pod) = (Instant::now(), shown("1", None, false));
    let mut queue = Queue::default();
    put(&mut queue, attached("[1]"), now);
    put(&mut queue, attached("[2]"), now);
    assert_eq!(queue.next(now, |_| Some(&pod)), Some(write(attached("[2]"))));
    // One write of a pod at a time.
    put(&mut queue, attached("[3]"), now);
    assert_eq!((queue.next(now, |_| Some(&pod)), queue.due()), (None, None));
    queue.done(write(attached("[2]")), &Outcome::Written(None), now);
    assert_eq!(queue.next(now, |_| Some(&pod)), Some(write(attached("[3]"))));
    queue.done(write(attached("[3]")), &Outcome::Written(None), now);
    // The watch still shows the pod without any.
    put(&mut queue, attached("[3]"), now);
    assert_eq!(queue.next(now, |_| Some(&pod)), None);
    let pod = shown("1", Some("[3]"), false);
    put(&mut queue, attached("[3]"), now);
    assert_eq!(queue.next(now, |_| Some(&pod)), None);
    // Another client has changed it since.
    let pod = shown("1", Some("[]"), false);
    put(&mut queue, attached("[3]"), now);
    assert_eq!(queue.next(now, |_| Some(&pod)), Some(write(attached("[3]"))));
}

#[test]
fn a_write_of_unknown_outcome_is_made_up_for() {
    // The server may have taken the withdrawal although its answer was lost.
    let (now, pod) = (Instant::now(), shown("1", Some("[1]"), false));
    let mut queue = Queue::default();
    put(&mut queue, Status::Detached, now);
    let withdrawal = queue.next(now, |_| Some(&pod)).unwrap();
    put(&mut queue, attached("[1]"), now);
    queue.done(withdrawal, &failed("reset", Duration::ZERO, true), now);
    let later = now + Duration::from_secs(60);
    assert_eq!(queue.next(later, |_| Some(&pod)), Some(write(attached("[1]"))));
    // A write that the server refused is not compensated.
    let mut queue = Queue::default();
    put(&mut queue, Status::Detached, now);
    let withdrawal = queue.next(now, |_| Some(&pod)).unwrap();
    put(&mut queue, attached("[1]"), now);
    queue.done(withdrawal, &failed("503", Duration::ZERO, false), now);
    assert_eq!(queue.next(later, |_| Some(&pod)), None);
}

#[test]
fn nothing_is_written_of_a_pod_that_is_gone_or_is_another_one() {
    let now = Instant::now();
    for (pod, status, written) in [
        (Some(shown("1", Some("[1]"), false)), Status::Detached, true),
        (Some(shown("1", None, true)), Status::Detached, false),
        (None, Status::Detached, false),
        (Some(shown("2", None, false)), attached("[1]"), false),
        (Some(shown("2", Some("[1]"), false)), Status::Detached, false),
        (Some(shown("1", None, false)), Status::Detached, false),
    ] {
        let mut queue = Queue::default();
        put(&mut queue, status.clone(), now);
        assert_eq!(queue.next(now, |_| pod.as_ref()), written.then(|| write(status)), "{pod:?}");
        assert_eq!(queue.due(), None);
    }
}

#[test]
fn a_failed_write_is_tried_again_later_and_whoever_waits_is_told() {
    let (now, pod) = (Instant::now(), shown("1", None, false));
    let mut queue = Queue::default();
    let (waiter, told) = channel();
    queue.put(name(), Some("1".to_owned()), attached("[1]"), Some(waiter), now);
    let first = queue.next(now, |_| Some(&pod)).unwrap();
    queue.done(first, &failed("503", Duration::from_secs(5), false), now);
    assert_eq!(queue.due(), Some(now + Duration::from_secs(5)));
    assert_eq!(queue.failing(), Some((1, now, "503")));
    assert!(told.try_recv().is_err());
    assert_eq!(queue.next(now, |_| Some(&pod)), None);
    let later = now + Duration::from_secs(5);
    let again = queue.next(later, |_| Some(&pod)).unwrap();
    queue.done(again, &Outcome::Written(None), later);
    assert_eq!((told.try_recv(), queue.failing(), queue.due()), (Ok(Ok(())), None, None));
    // A deleted pod is forgotten.
    let (waiter, told) = channel();
    queue.put(name(), Some("1".to_owned()), attached("[2]"), Some(waiter), later);
    let write = queue.next(later, |_| Some(&pod)).unwrap();
    queue.done(write, &Outcome::Gone("404".to_owned()), later);
    assert_eq!((told.try_recv(), queue.due()), (Ok(Err("404".to_owned())), None));
}

/// An agent that starts queues the status of all attached pods before the pods are known.
#[test]
fn the_ports_that_are_written_are_those_of_the_pod_as_it_is_known_by_then() {
    let now = Instant::now();
    let mut json = object("1", Some("[1]"), false);
    json["spec"]["containers"] =
        serde_json::json!([{"name": "app", "ports": [{"name": "http", "containerPort": 8080}]}]);
    let without = pod(&json);
    json["metadata"]["annotations"]["netattach.dev/ports"] = "{\"TCP/http\":[8080]}".into();
    let with = pod(&json);
    let mut queue = Queue::default();
    put(&mut queue, attached("[1]"), now);
    assert_eq!(queue.next(now, |_| Some(&with)), None, "they are there");
    put(&mut queue, attached("[1]"), now);
    let written = queue.next(now, |_| Some(&without)).unwrap();
    assert_eq!(written.patch, patch(Some("1"), Some(&with), &attached("[1]")));
    assert_eq!(written.patch["metadata"]["annotations"]["netattach.dev/ports"], "{\"TCP/http\":[8080]}");
    queue.done(written, &Outcome::Written(None), now);
    // A pod that the watch has not shown is unknown: its annotation stays.
    put(&mut queue, attached("[2]"), now);
    let blind = queue.next(now, |_| None).unwrap();
    assert_eq!(blind.patch, patch(Some("1"), None, &attached("[2]")));
    assert_eq!(blind.patch["metadata"]["annotations"], serde_json::json!({STATUS_ANNOTATION: "[2]"}));
}

#[test]
fn a_failure_is_that_of_its_pod_and_goes_with_it() {
    let (now, second) = (Instant::now(), Duration::from_secs(1));
    let pod = shown("1", None, false);
    let other = ObjectName::new("shop", "b");
    let mut queue = Queue::default();
    put(&mut queue, attached("[1]"), now);
    let first = queue.next(now, |_| Some(&pod)).unwrap();
    queue.done(first, &failed("503", Duration::ZERO, false), now);
    queue.put(other.clone(), None, attached("[7]"), None, now);
    assert_eq!(queue.failing(), Some((2, now, "503")));
    assert_eq!((queue.failure_of(&name()), queue.failure_of(&other)), (Some("503"), None));
    // A newer status of the same pod counts as unwritten since the same time.
    put(&mut queue, attached("[2]"), now + second);
    assert_eq!(queue.failing(), Some((2, now, "503")));
    // The name belongs to another pod now, so nothing is written.
    let successor = shown("2", None, false);
    let write = queue.next(now + second, |of| (*of == name()).then_some(&successor)).unwrap();
    assert_eq!((&write.name, queue.failing()), (&other, Some((2, now, "503"))));
    assert_eq!(queue.next(now + second, |_| Some(&successor)), None);
    assert_eq!(queue.failing(), None);
    queue.done(write, &failed("429", Duration::ZERO, false), now + 2 * second);
    assert_eq!(queue.failing(), Some((1, now + 2 * second, "429")));
}

#[test]
fn what_a_write_of_an_earlier_pod_has_come_to_is_not_its_successors() {
    let (now, pod, successor) = (Instant::now(), shown("1", None, false), shown("2", None, false));
    let second = Duration::from_secs(1);
    let mut queue = Queue::default();
    let (waiter, told) = channel();
    queue.put(name(), Some("1".to_owned()), attached("[1]"), Some(waiter), now);
    let first = queue.next(now, |_| Some(&pod)).unwrap();
    let (waiter, told_successor) = channel();
    queue.put(name(), Some("2".to_owned()), attached("[2]"), Some(waiter), now);
    queue.done(first, &failed("429", 60 * second, false), now);
    assert_eq!(told.try_recv(), Ok(Err("429".to_owned())));
    assert_eq!((queue.failing(), queue.due()), (None, Some(now)), "its pause is none of the successor's");
    let second_write = queue.next(now, |_| Some(&successor)).unwrap();
    assert_eq!((second_write.uid.as_deref(), &second_write.status), (Some("2"), &attached("[2]")));
    queue.done(second_write, &Outcome::Written(None), now);
    assert_eq!(told_successor.try_recv(), Ok(Ok(())));
    // A write that has not begun is given up with its pod.
    let (waiter, told) = channel();
    queue.put(name(), Some("1".to_owned()), attached("[1]"), Some(waiter), now);
    queue.put(name(), Some("2".to_owned()), attached("[2]"), None, now);
    assert_eq!(told.try_recv(), Ok(Err("another pod has its name now".to_owned())));
    // The server has answered about the pod: the reason that delayed an earlier write does not delay the next.
    put(&mut queue, attached("[1]"), now);
    let write = queue.next(now, |_| Some(&pod)).unwrap();
    queue.done(write, &failed("503", Duration::ZERO, false), now);
    let again = queue.next(now + second, |_| Some(&pod)).unwrap();
    put(&mut queue, attached("[3]"), now + second);
    assert_eq!(queue.failing(), Some((1, now, "503")));
    queue.done(again, &Outcome::Gone("404".to_owned()), now + second);
    assert_eq!(queue.failing(), None);
}

#[test]
fn what_another_has_changed_is_written_again_once_the_watch_has_shown_it() {
    let (now, bare) = (Instant::now(), shown("1", None, false));
    let (mine, other) = (shown("1", Some("[1]"), false), shown("1", Some("[7]"), false));
    let mut queue = Queue::default();
    put(&mut queue, attached("[1]"), now);
    let published =
        |queue: &mut Queue, pod: &Pod, at| queue.published(pod, None, Some("1"), &attached("[1]"), at);
    let (unknown, as_shown, drifted) = (Published::Unknown, Published::AsShown, Published::Drifted);
    assert_eq!(published(&mut queue, &other, now), unknown, "it is about to be written");
    assert_eq!(queue.next(now, |_| Some(&bare)), Some(write(attached("[1]"))));
    assert_eq!(published(&mut queue, &other, now), unknown, "it is being written");
    queue.done(write(attached("[1]")), &Outcome::Written(None), now);
    assert_eq!(published(&mut queue, &bare, now), unknown, "the watch lags");
    assert_eq!(published(&mut queue, &mine, now), as_shown);
    assert_eq!(published(&mut queue, &other, now), drifted, "it was there");
    put(&mut queue, attached("[1]"), now);
    assert_eq!(queue.next(now, |_| Some(&other)), Some(write(attached("[1]"))));
    queue.done(write(attached("[1]")), &Outcome::Written(None), now);
    assert_eq!(published(&mut queue, &other, now + LAG - Duration::from_millis(1)), unknown);
    let later = published(&mut queue, &other, now + LAG);
    assert_eq!(later, drifted, "it was changed before the watch could show it");
    assert_eq!(published(&mut queue, &shown("1", None, true), now), as_shown, "it is being deleted");
    assert_eq!(published(&mut queue, &shown("2", None, false), now), as_shown, "it is another pod");
}

#[test]
fn a_version_that_is_newer_than_what_was_written_shows_at_once_that_another_has_changed_it() {
    let (now, other) = (Instant::now(), shown("1", Some("[7]"), false));
    // The answer to the write, the state that the watch shows, and whether that is another client's change.
    for (written, shown, drifted) in [
        (Some(7), Some(6), false),
        (Some(7), Some(7), true),
        (Some(7), Some(8), true),
        (Some(7), None, false),
        (None, Some(8), false),
    ] {
        let mut queue = Queue::default();
        put(&mut queue, attached("[1]"), now);
        let write = queue.next(now, |_| Some(&other)).unwrap();
        queue.done(write, &Outcome::Written(written), now);
        let found = queue.published(&other, shown, Some("1"), &attached("[1]"), now);
        assert_eq!(found == Published::Drifted, drifted, "{written:?} {shown:?}");
    }
}

#[test]
fn what_was_written_of_pods_that_nobody_asks_about_again_is_forgotten() {
    let (now, pod) = (Instant::now(), shown("1", Some("[1]"), false));
    let (bare, other) = (shown("1", None, false), shown("2", None, false));
    let detached = |outcome: &Outcome| {
        let mut queue = Queue::default();
        put(&mut queue, Status::Detached, now);
        let write = queue.next(now, |_| Some(&pod)).unwrap();
        queue.done(write, outcome, now);
        queue
    };
    let sweeps = |queue: &mut Queue, times: &[(u64, Option<&Pod>)]| {
        let left = times.iter().map(|(after, pod)| {
            queue.sweep(now + Duration::from_secs(*after), |_| *pod);
            queue.written.len()
        });
        left.collect::<Vec<_>>()
    };
    // A completed pod that stays: not before the watch shows it, and only at intervals.
    let mut queue = detached(&Outcome::Written(None));
    let looks = [(0, Some(&pod)), (59, Some(&bare)), (60, Some(&pod)), (120, Some(&bare))];
    assert_eq!(sweeps(&mut queue, &looks), [1, 1, 1, 0]);
    // A pod that is being deleted, whatever the outcome of the write.
    assert_eq!(sweeps(&mut detached(&Outcome::Written(None)), &[(0, None)]), [0]);
    let mut queue = detached(&failed("reset", Duration::ZERO, true));
    assert_eq!(sweeps(&mut queue, &[(0, None), (60, Some(&pod))]), [1, 1], "it is still to be written");
    assert_eq!(queue.next(now + Duration::from_secs(60), |_| Some(&other)), None);
    assert_eq!(sweeps(&mut queue, &[(120, Some(&pod)), (180, None)]), [1, 0]);
}

#[test]
fn a_pod_that_is_being_deleted_is_withdrawn_if_it_does_not_end_soon() {
    let (now, ending) = (Instant::now(), shown("1", Some("[1]"), true));
    let second = Duration::from_secs(1);
    let mut queue = Queue::default();
    let (waiter, told) = channel();
    queue.put(name(), Some("1".to_owned()), attached("[1]"), Some(waiter), now);
    queue.done(write(attached("[1]")), &failed("503", Duration::ZERO, false), now);
    put(&mut queue, Status::Detached, now);
    assert_eq!(queue.next(now, |_| Some(&ending)), None);
    assert_eq!((told.try_recv(), queue.due(), queue.failing()), (Ok(Ok(())), Some(now + END), None));
    // A repeated DEL does not postpone it.
    put(&mut queue, Status::Detached, now + END - second);
    assert_eq!(queue.next(now + END - second, |_| Some(&ending)), None);
    assert_eq!(queue.due(), Some(now + END));
    assert_eq!(queue.next(now + END, |_| Some(&ending)), Some(write(Status::Detached)));
    // From then on it is an ordinary write.
    queue.done(write(Status::Detached), &failed("503", 5 * second, false), now + END);
    assert_eq!((queue.due(), queue.failing()), (Some(now + END + 5 * second), Some((1, now, "503"))));
    assert_eq!(queue.next(now + END + 5 * second, |_| Some(&ending)), Some(write(Status::Detached)));
    // An ordinary deletion costs no request.
    let mut queue = Queue::default();
    put(&mut queue, Status::Detached, now);
    assert_eq!(queue.next(now, |_| Some(&ending)), None);
    assert_eq!((queue.next(now + END, |_| None), queue.due()), (None, None));
    // A pod that has the name now is left alone.
    put(&mut queue, Status::Detached, now);
    assert_eq!(queue.next(now, |_| Some(&ending)), None);
    let next = shown("2", Some("[1]"), false);
    assert_eq!(queue.next(now + END, |_| Some(&next)), None);
    assert_eq!(queue.due(), None);
}

#[test]
fn the_label_of_a_pod_of_another_plugin_is_written_once_and_never_instead_of_a_status() {
    let now = Instant::now();
    let mut json = object("1", None, false);
    json["metadata"]["annotations"][STATUS_ANNOTATION] = "[7]".into();
    let bare = pod(&json);
    json["metadata"]["labels"]["netattach.dev/networks"] = "by-another".into();
    let labelled = pod(&json);
    let mut queue = Queue::default();
    queue.put_of_another(&bare, Status::ByAnother, now);
    assert_eq!(queue.next(now, |_| Some(&bare)), Some(write(Status::ByAnother)));
    queue.put_of_another(&bare, Status::ByAnother, now);
    queue.done(write(Status::ByAnother), &Outcome::Written(None), now);
    // The watch lags.
    queue.put_of_another(&bare, Status::ByAnother, now);
    assert_eq!(queue.next(now, |_| Some(&bare)), None);
    queue.put_of_another(&labelled, Status::ByAnother, now);
    assert_eq!(queue.due(), None);
    // Another removes the label.
    queue.put_of_another(&bare, Status::ByAnother, now);
    let again = queue.next(now, |_| Some(&bare)).unwrap();
    // A failed write is not tried sooner because the pod is looked at again.
    queue.done(again, &failed("503", Duration::from_secs(5), false), now);
    queue.put_of_another(&bare, Status::ByAnother, now);
    assert_eq!(queue.due(), Some(now + Duration::from_secs(5)));
    // The pod is attached here.
    put(&mut queue, attached("[1]"), now);
    queue.put_of_another(&labelled, Status::Unlabelled, now);
    assert_eq!(queue.next(now, |_| Some(&labelled)).unwrap().status, attached("[1]"));
}

#[test]
fn a_label_that_the_watch_does_not_show_for_long_is_written_again() {
    let now = Instant::now();
    let mut json = object("1", None, false);
    json["metadata"]["annotations"][STATUS_ANNOTATION] = "[7]".into();
    let bare = pod(&json);
    let mut queue = Queue::default();
    queue.put_of_another(&bare, Status::ByAnother, now);
    let first = queue.next(now, |_| Some(&bare)).unwrap();
    queue.done(first, &Outcome::Written(None), now);
    for (later, is_again) in [(LAG / 2, false), (LAG, true)] {
        queue.put_of_another(&bare, Status::ByAnother, now + later);
        assert_eq!(queue.next(now + later, |_| Some(&bare)).is_some(), is_again, "{later:?}");
    }
}
