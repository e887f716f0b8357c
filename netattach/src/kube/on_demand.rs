//! Kinds that are followed only while they are needed: when they are first listed, and how long they are
//! kept. Of the pods of other nodes, those on the default network alone are left out until they are needed.
//!
//! Authors of objects determine what is needed, and can change that repeatedly. Each first list of a large
//! kind, by all agents together, is expensive for the API server. So lists that nothing waits for are
//! spread over time, and a kind that is needed again soon after it was dropped is kept longer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::follow::Follower;
use crate::pace::spread;

/// Longest delay of the first list of a kind that nothing waits for: all nodes may need it, up to a hundred thousand
/// objects each.
const SPREAD: Duration = Duration::from_secs(60);
/// How long a kind is followed after the last object that needs it is deleted; doubles each time that it is
/// needed again within [`MOST_KEPT`].
const KEPT: Duration = Duration::from_secs(60);
const MOST_KEPT: Duration = Duration::from_secs(3600);

/// How urgently a kind is needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Want {
    /// Nothing needs it.
    Not,
    /// It will be needed, and nothing waits for it.
    Soon,
    /// Something waits for it.
    Now,
}

/// What is left out of a kind: of most kinds nothing ([`Target::left_out`](super::resource::Target)).
#[derive(Debug, Default)]
pub(super) struct LeftOut {
    /// While nothing needs more.
    pub(super) usually: Arc<str>,
    /// While more is needed.
    pub(super) then: Arc<str>,
}

/// Follows a kind while it is wanted. `more`: whether more of it is needed than usually.
pub(super) async fn follow_wanted(
    mut follower: Follower,
    left_out: LeftOut,
    mut wanted: watch::Receiver<Want>,
    mut more: watch::Receiver<bool>,
) {
    let mut keeping = Keeping::default();
    while wanted.wait_for(|want| *want != Want::Not).await.is_ok() {
        if !is_time(&mut wanted, spread(SPREAD)).await {
            continue;
        }
        let kept = keeping.begins(Instant::now());
        let mut urgency = wanted.clone();
        let mut with_more = *more.borrow_and_update() || left_out.then == left_out.usually;
        loop {
            follower.left_out = Arc::clone(if with_more { &left_out.then } else { &left_out.usually });
            follower.view.begins(follower.resource, with_more);
            tokio::select! {
                () = follower.run() => break,
                () = unwanted(&mut wanted, kept) => break,
                // What is known stays until the list with more is complete.
                () = needed(&mut more, &mut urgency, spread(SPREAD)), if !with_more => with_more = true,
            }
        }
        keeping.ends(Instant::now());
        follower.view.forget(follower.resource);
    }
}

/// Waits until more is needed, and then for that time, or until something waits for the kind. What is known is
/// followed meanwhile: it must not grow old and then pass for what is.
async fn needed(more: &mut watch::Receiver<bool>, wanted: &mut watch::Receiver<Want>, delay: Duration) {
    if more.wait_for(|more| *more).await.is_err() {
        std::future::pending::<()>().await;
    }
    let _ = tokio::time::timeout(delay, wanted.wait_for(|want| *want == Want::Now)).await;
}

/// Waits for that time, or until something waits for the kind. Returns whether it is still needed.
async fn is_time(wanted: &mut watch::Receiver<Want>, delay: Duration) -> bool {
    match tokio::time::timeout(delay, wanted.wait_for(|want| *want != Want::Soon)).await {
        Ok(want) => want.is_ok_and(|want| *want == Want::Now),
        Err(_) => true,
    }
}

/// Waits until it has not been needed for that long.
async fn unwanted(wanted: &mut watch::Receiver<Want>, kept: Duration) {
    loop {
        if wanted.wait_for(|want| *want == Want::Not).await.is_err() {
            return;
        }
        if tokio::time::timeout(kept, wanted.wait_for(|want| *want != Want::Not)).await.is_err() {
            return;
        }
    }
}

/// How long the kind is kept. Pure.
#[derive(Debug, Default)]
struct Keeping {
    kept: Duration,
    /// When following it last ended.
    ended: Option<Instant>,
}

impl Keeping {
    /// Following starts. Returns how long the kind is kept once it is no longer needed.
    fn begins(&mut self, now: Instant) -> Duration {
        let is_soon = self.ended.is_some_and(|ended| now.duration_since(ended) < MOST_KEPT);
        self.kept = if is_soon { (self.kept * 2).min(MOST_KEPT) } else { KEPT };
        self.kept
    }

    /// Following ends.
    fn ends(&mut self, now: Instant) {
        self.ended = Some(now);
    }
}

#[cfg(test)]
mod tests {
    use super::super::resource::{ALWAYS, REMOTE_PODS};
    use super::super::test_server::{self, Answer};
    use super::super::view::View;
    use super::*;

    #[test]
    fn what_is_needed_again_soon_is_kept_the_longer_up_to_a_bound() {
        let (mut keeping, mut now) = (Keeping::default(), Instant::now());
        let mut kept = |pause: Duration| {
            now += pause;
            let kept = keeping.begins(now);
            now += kept;
            keeping.ends(now);
            kept.as_secs()
        };
        let soon: Vec<u64> = (0..8).map(|_| kept(Duration::from_secs(1))).collect();
        assert_eq!(soon, [60, 120, 240, 480, 960, 1920, 3600, 3600]);
        assert_eq!([kept(MOST_KEPT), kept(Duration::from_secs(1))], [60, 120], "it was not needed for long");
    }

    #[tokio::test]
    async fn what_is_left_out_is_listed_once_it_is_needed() {
        let (asked, mut all) = watch::channel(Vec::new());
        let script = move |target: &str| {
            asked.send_modify(|asked| asked.push(target.to_owned()));
            let list = "{\"metadata\": {\"resourceVersion\": \"7\"}, \"items\": []}";
            match target.contains("watch=true") {
                true => Answer { ends: None, ..Answer::of(200, "") },
                false => Answer::of(200, list),
            }
        };
        let follower = Follower {
            client: test_server::client(script).await,
            view: Arc::new(View::new(ALWAYS)),
            resource: &REMOTE_PODS,
            node: "n".into(),
            watch_seconds: 60,
            left_out: Arc::default(),
        };
        let left_out = LeftOut { usually: "default,a.b".into(), then: "default".into() };
        let (_want, wanted) = watch::channel(Want::Now);
        let (need, more) = watch::channel(false);
        let of = |number: usize| move |asked: &Vec<String>| asked.len() >= number;
        tokio::select! {
            () = follow_wanted(follower, left_out, wanted, more) => panic!("it follows without end"),
            () = async {
                all.wait_for(of(2)).await.unwrap();
                need.send_replace(true);
                all.wait_for(of(4)).await.unwrap();
            } => {}
        }
        let selected = |values: &str| {
            format!(
                "/api/v1/pods?labelSelector=netattach.dev%2Fnetworks%2Cnetattach.dev%2Fnetworks%20notin%20%28{values}%29&"
            )
        };
        let expected = ["default%2Ca.b", "default%2Ca.b", "default", "default"];
        for (asked, values) in all.borrow().iter().zip(expected) {
            assert!(asked.starts_with(&selected(values)), "{asked}");
        }
    }

    #[tokio::test]
    async fn a_list_with_more_waits_its_time_unless_something_waits_for_it() {
        const LONG: Duration = Duration::from_secs(600);
        const SHORT: Duration = Duration::from_millis(20);
        for (want, delay) in [(Want::Now, LONG), (Want::Soon, SHORT)] {
            let (_want, mut wanted) = watch::channel(want);
            let (need, mut more) = watch::channel(false);
            let began = Instant::now();
            let change = async {
                tokio::time::sleep(SHORT).await;
                need.send_replace(true);
            };
            tokio::join!(needed(&mut more, &mut wanted, delay), change);
            let least = if want == Want::Soon { SHORT * 2 } else { SHORT };
            assert!(began.elapsed() >= least && began.elapsed() < LONG / 10, "{want:?}");
        }
    }

    #[tokio::test]
    async fn a_first_list_waits_its_time_unless_something_waits_for_it_or_nothing_wants_it() {
        const LONG: Duration = Duration::from_secs(600);
        const SHORT: Duration = Duration::from_millis(20);
        let table = [
            (Want::Now, None, LONG, true),
            (Want::Soon, None, SHORT, true),
            (Want::Soon, Some(Want::Now), LONG, true),
            (Want::Soon, Some(Want::Not), LONG, false),
        ];
        for (first, then, delay, expected) in table {
            let (sender, mut wanted) = watch::channel(first);
            let began = Instant::now();
            let change = async {
                tokio::time::sleep(SHORT / 2).await;
                then.map(|then| sender.send_replace(then));
            };
            let (found, ()) = tokio::join!(is_time(&mut wanted, delay), change);
            assert_eq!(found, expected, "{first:?} {then:?}");
            assert!(began.elapsed() >= SHORT / 2 && began.elapsed() < LONG / 10, "{first:?} {then:?}");
        }
        assert!(spread(LONG) < LONG);
    }
}
