//! When a pod without its networks is repaired, and when not.

use crate::agent::pods::missed::*;

const AFTER: Duration = Duration::from_secs(60);

fn pod(name: &str) -> PodRef {
    PodRef { name: ObjectName::new("shop", name), uid: Some(format!("uid-{name}")) }
}

fn owner(kind: &str) -> Owner {
    Owner { kind: kind.to_owned(), name: "web".to_owned(), uid: "o".to_owned() }
}

fn said(repairs: &Repairs) -> Vec<String> {
    let front = "runs without the networks that it selects: the runtime did not ask for them; ";
    let rest = |it: Condition| it.problem.strip_prefix(front).unwrap_or(&it.problem).to_owned();
    repairs.conditions().into_iter().map(rest).collect()
}

#[test]
fn only_what_every_look_of_the_grace_time_finds_is_due() {
    let repairs = Repairs::new(Repair::Evict, AFTER);
    let start = Instant::now();
    let look = |after: u64, found: &[&PodRef], unreadable| {
        let found = found.iter().map(|pod| (*pod).clone()).collect();
        repairs.take_in(found, unreadable, start + Duration::from_secs(after)).len()
    };
    let a = pod("a");
    assert_eq!(look(0, &[&a], 0), 0);
    assert_eq!(said(&repairs), ["it is about to be evicted"]);
    assert_eq!(look(59, &[&a], 0), 0);
    assert_eq!(look(60, &[&a], 0), 1);
    assert_eq!(look(61, &[&a], 1), 0, "a record that cannot be read may be its own");
    assert!(said(&repairs)[0].starts_with("nothing is done about it while 1 records cannot be read"));
    assert_eq!(look(62, &[], 0), 0, "it is attached");
    assert_eq!(look(63, &[&a], 0), 0, "the time begins anew");
    let next = PodRef { uid: Some("other".to_owned()), ..a.clone() };
    assert_eq!(look(123, &[&next], 0), 0, "another pod of that name");
    assert_eq!(look(183, &[&next], 0), 1);
}

#[test]
fn a_pod_that_the_runtime_asks_for_is_left_to_it_and_one_that_is_only_reported_is_never_due() {
    let repairs = Repairs::new(Repair::Attach, AFTER);
    repairs.asked_for(&pod("a").name);
    let start = Instant::now();
    assert_eq!(repairs.take_in(vec![pod("a"), pod("b")], 0, start), []);
    assert_eq!(repairs.conditions().len(), 1, "its ADD fails, or is under way");
    assert_eq!(repairs.take_in(vec![pod("a"), pod("b")], 0, start + ASKED), [pod("b")]);
    assert_eq!(repairs.take_in(vec![pod("a")], 0, start + ASKED + AFTER), [pod("a")]);
    let reports = Repairs::new(Repair::Report, AFTER);
    assert_eq!(reports.take_in(vec![pod("a")], 0, start), []);
    assert_eq!(reports.take_in(vec![pod("a")], 0, start + AFTER), []);
    assert_eq!(said(&reports), ["delete it, so that it is recreated"]);
    reports.take_in(vec![pod("a")], 2, start + AFTER);
    let may_be_attached = "nothing is done about it while 2 records cannot be read: one may be its own";
    assert_eq!(said(&reports), [may_be_attached], "it may be attached");
}

#[test]
fn a_pod_is_evicted_only_when_the_next_one_would_get_its_networks_and_one_after_another() {
    let repairs = Repairs::new(Repair::Evict, AFTER);
    repairs.asked_for(&pod("before").name);
    let start = Instant::now();
    repairs.take_in(vec![pod("a"), pod("b")], 0, start);
    let now = start + AFTER;
    let waits = repairs.may_evict_any(&pod("a"), now).unwrap_err();
    assert!(waits.starts_with("it is evicted once the runtime asks"), "{waits}");
    std::thread::sleep(Duration::from_millis(1));
    repairs.asked_for(&pod("other").name);
    assert_eq!(repairs.may_evict_any(&pod("a"), now), Ok(()));
    repairs.was_evicted(&pod("a"), None, now);
    assert_eq!(
        repairs.may_evict_any(&pod("b"), now),
        Err("it is about to be evicted, one pod after another".to_owned())
    );
    assert_eq!(repairs.may_evict_any(&pod("b"), now + EVICTIONS), Ok(()));
    assert_eq!(repairs.take_in(vec![pod("a")], 0, now + EVICTIONS), [], "it ends");
}

#[test]
fn of_one_controller_few_are_evicted_in_an_hour_and_of_a_daemon_set_one() {
    for (kind, most) in [("ReplicaSet", MOST_OF_ONE), (DAEMON_SET, 1)] {
        let repairs = Repairs::new(Repair::Evict, AFTER);
        let now = Instant::now();
        for _ in 0..most {
            assert_eq!(repairs.may_evict_of(&owner(kind), now), Ok(()));
            repairs.was_evicted(&pod("a"), Some(&owner(kind)), now);
        }
        assert_eq!(
            repairs.may_evict_of(&owner(kind), now),
            Err(format!("{most} pods of {kind} web were evicted in the last hour; it is not evicted too"))
        );
        assert_eq!(repairs.may_evict_of(&owner(kind), now + COUNTED), Ok(()));
    }
}

#[test]
fn tries_are_further_and_further_apart_and_end() {
    let repairs = Repairs::new(Repair::Evict, AFTER);
    let start = Instant::now();
    repairs.take_in(vec![pod("a")], 0, start);
    let mut now = start + AFTER;
    let mut pauses = Vec::new();
    while let [due] = repairs.take_in(vec![pod("a")], 0, now).as_slice() {
        repairs.put_off(due, "429".to_owned(), PutOff::Tried(Duration::ZERO), now);
        let again = locked(&repairs.state).cases[&due.name].again;
        pauses.push((again - now).as_secs());
        now = again;
    }
    assert_eq!(pauses[..7], [10, 20, 40, 80, 160, 320, 600]);
    assert_eq!((pauses.len(), pauses[pauses.len() - 1]), (MOST_TRIES as usize, 600));
    assert_eq!(said(&repairs), ["given up after 20 tries: 429"]);
}

#[test]
fn the_server_can_ask_for_a_longer_pause() {
    let repairs = Repairs::new(Repair::Evict, AFTER);
    let start = Instant::now();
    repairs.take_in(vec![pod("a")], 0, start);
    repairs.put_off(&pod("a"), "429".to_owned(), PutOff::Tried(Duration::from_secs(90)), start + AFTER);
    let look =
        |after: u64| repairs.take_in(vec![pod("a")], 0, start + AFTER + Duration::from_secs(after)).len();
    assert_eq!([look(89), look(90)], [0, 1]);
}
