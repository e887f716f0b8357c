//! A server that fails, is down, or has another authority: known objects stay in force, and missed changes are made
//! up for.

use std::collections::BTreeSet;
use std::fs;
use std::time::Duration;

use netattach_tests::api_server::{Credential, CutOff, Fault, Options, Request, TOKEN, Verb, When};
use netattach_tests::manifest::NAMESPACE;
use netattach_tests::node_root::with_own_mounts;
use netattach_tests::service_account::ServiceAccount;
use netattach_tests::traffic::{PATIENCE, eventually};
use rustix::process::{Pid, Signal, kill_process};

use crate::rig::{NODE, Rig, calls};

/// While the server is spoiled, a known pod is attached and detached; a pod that is created meanwhile is attached
/// when the server is mended, without a request: it is known by list or watch. A deleted pod is gone.
fn outlived(spoil: impl FnOnce(&mut Rig), mend: impl FnOnce(&mut Rig)) {
    let mut rig = Rig::started();
    let [known, ended] = ["known", "ended"].map(|name| rig.pod(name));
    rig.settle("first");
    rig.add(&ended).success();
    rig.published("ended");
    spoil(&mut rig);
    let mark = rig.server.mark();
    rig.add(&known).success();
    rig.node.check(&ended).success();
    rig.del(&ended).success();
    let during = rig.server.requests_since(mark);
    assert!(during.iter().all(|one| one.verb != Verb::Get), "{:?}", calls(&during));
    let late = rig.pod("late");
    rig.server.delete("pods", NAMESPACE, "ended").unwrap();
    let mark = rig.server.mark();
    mend(&mut rig);
    rig.await_watch(mark, "pods");
    rig.add(&late).success();
    rig.published("known");
    rig.published("late");
    let after = rig.server.requests_since(mark);
    assert!(after.iter().all(|one| one.verb != Verb::Get), "{:?}", calls(&after));
    rig.del(&known).success();
}

#[test]
fn connections_that_are_reset() {
    outlived(|_| {}, |rig| rig.server.reset_connections());
}

#[test]
fn a_history_that_is_forgotten() {
    outlived(
        |_| {},
        |rig| {
            let mark = rig.server.mark();
            // At once, before a bookmark has the next position.
            rig.server.compact();
            rig.server.reset_connections();
            // Everything is listed again.
            let lists = |one: &Request| one.verb == Verb::List && one.resource == "pods";
            assert!(rig.server.wait_for(mark, |requests| requests.iter().any(lists)));
        },
    );
}

#[test]
fn a_server_that_is_away() {
    outlived(|rig| rig.server.stop(), |rig| rig.server.start_again().unwrap());
}

#[test]
fn a_listener_that_is_closed_while_a_watch_ends() {
    outlived(
        |rig| {
            rig.server.refuse_connections();
            rig.server.reset_connections();
        },
        |rig| rig.server.start_again().unwrap(),
    );
}

#[test]
fn a_server_that_is_overloaded() {
    outlived(
        |rig| {
            rig.server.faults().always(When::any(), Fault::AnswerRetryAfter(429, 1));
            rig.server.reset_connections();
        },
        |rig| rig.server.faults().clear(),
    );
}

#[test]
fn a_server_that_fails_in_every_way() {
    outlived(
        |rig| {
            let faults = rig.server.faults();
            faults.times(1, When::verb(Verb::Patch), Fault::Reset);
            faults.times(1, When::verb(Verb::Patch), Fault::Answer(504));
            faults.times(
                1,
                When::on(Verb::Watch, "pods"),
                Fault::CutOff { after: 0, how: CutOff::Error(500) },
            );
            faults.times(
                1,
                When::on(Verb::Watch, "pods"),
                Fault::CutOff { after: 0, how: CutOff::Error(410) },
            );
            let lists = || When::on(Verb::List, "pods");
            faults.times(1, lists(), Fault::CutOff { after: 0, how: CutOff::Reset });
            faults.times(1, lists(), Fault::CutOff { after: 0, how: CutOff::End });
            let last = faults.times(1000, lists(), Fault::Answer(504));
            rig.server.reset_connections();
            assert!(eventually(PATIENCE, || rig.server.faults().hits(last) > 0));
        },
        |rig| rig.server.faults().clear(),
    );
}

#[test]
fn watches_that_break_off_at_once() {
    outlived(
        |rig| {
            let fault = Fault::CutOff { after: 0, how: CutOff::End };
            let fault = rig.server.faults().always(When::on(Verb::Watch, "pods"), fault);
            rig.server.reset_connections();
            assert!(eventually(PATIENCE, || rig.server.faults().hits(fault) > 2));
        },
        |rig| rig.server.faults().clear(),
    );
}

#[test]
fn a_certificate_that_is_not_trusted() {
    outlived(
        |rig| {
            rig.server.foreign_certificate().unwrap();
            rig.server.reset_connections();
        },
        |rig| rig.server.own_certificate().unwrap(),
    );
}

#[test]
fn a_token_that_expired_and_its_file_that_is_renewed() {
    let (rig, token, known) = Rig::with_an_expired_token();
    let mark = rig.server.mark();
    rig.add(&known).success();
    assert!(rig.server.wait_for(mark, |requests| requests.iter().any(|one| one.answer == Some(401))));
    let late = rig.pod("late");
    let mark = rig.server.mark();
    fs::write(&token, "renewed").unwrap();
    rig.await_watch(mark, "pods");
    rig.published("known");
    rig.add(&late).success();
}

#[test]
fn an_authority_that_changed_with_the_kubeconfig() {
    let mut rig = Rig::started();
    rig.settle("first");
    rig.server.rotate_authority().unwrap();
    rig.server.reset_connections();
    let late = rig.pod("late");
    let mark = rig.server.mark();
    let token = Credential::Token(TOKEN);
    rig.server.kubeconfig(&rig.node.path("kubeconfig"), &token).unwrap();
    rig.await_watch(mark, "pods");
    rig.add(&late).success();
}

/// The agent's present token has not been refused.
#[test]
fn a_token_that_changed_in_the_kubeconfig_is_used_from_a_signal_on() {
    let rig = Rig::started();
    rig.settle("first");
    rig.server.accept_tokens(&[TOKEN, "renewed"]);
    rig.server.kubeconfig(&rig.node.path("kubeconfig"), &Credential::Token("renewed")).unwrap();
    let tokens_of = |name: &str| -> BTreeSet<Option<String>> {
        let mark = rig.server.mark();
        rig.settle(name);
        rig.server.requests_since(mark).into_iter().map(|one| one.token).collect()
    };
    assert_eq!(tokens_of("before"), [Some(TOKEN.to_owned())].into());
    kill_process(Pid::from_raw(rig.node.agent_pid().cast_signed()).unwrap(), Signal::HUP).unwrap();
    let mut later = 0..;
    let is_used = || {
        let name = format!("later-{}", later.next().unwrap_or_default());
        tokens_of(&name).contains(&Some("renewed".to_owned()))
    };
    assert!(eventually(PATIENCE, is_used));
}

/// In a pod of the cluster: the kubelet replaces the files of its service account, first both, then only the token.
#[test]
fn an_authority_and_a_token_that_changed_with_the_service_account() {
    with_own_mounts(|mounts| {
        let mut rig = Rig::new(&Options::default());
        let account = ServiceAccount::mount(mounts, TOKEN, rig.server.authority()).unwrap();
        rig.node.join_by_service_account(rig.server.address(), NODE).unwrap();
        rig.start();
        rig.settle("first");
        let known = rig.pod("known");
        rig.settle("second");
        rig.server.rotate_authority().unwrap();
        rig.server.reset_connections();
        // The agent notices before the files change.
        let (begun, _) = rig.server.connections();
        assert!(eventually(PATIENCE, || rig.server.connections().0 > begun + 1), "it does not connect");
        rig.add(&known).success();
        let mark = rig.server.mark();
        let late = rig.pod("late");
        account.write("renewed", rig.server.authority()).unwrap();
        rig.server.accept_tokens(&["renewed"]);
        rig.await_watch(mark, "pods");
        rig.add(&late).success();
        rig.published("known");
        rig.published("late");

        rig.server.accept_tokens(&["renewed-again"]);
        rig.server.reset_connections();
        let refused = |one: &Request| one.answer == Some(401);
        assert!(rig.server.wait_for(mark, |requests| requests.iter().any(refused)));
        let mark = rig.server.mark();
        let later = rig.pod("later");
        account.write("renewed-again", rig.server.authority()).unwrap();
        rig.await_watch(mark, "pods");
        rig.add(&later).success();
        rig.published("later");
        for pod in [&known, &late, &later] {
            rig.del(pod).success();
        }
    });
}

#[test]
fn a_server_that_is_away_for_long_is_seen_in_the_status() {
    let mut rig = Rig::started();
    let known = rig.pod("known");
    rig.settle("first");
    assert_eq!(rig.trouble("pods of this node"), None);
    rig.server.stop();
    rig.add(&known).success();
    for (object, text) in [
        ("pods of this node", "the last known objects stay in force: GET /api/v1/pods"),
        ("namespaces", "not followed for "),
        ("network-status", "of 1 pods not published for "),
    ] {
        rig.await_trouble(object, Duration::from_secs(40), text);
    }
    rig.node.check(&known).success();
    // The condition of that name alone, which no ADD waits for.
    assert_eq!(rig.unmet(), ["API server"]);
    assert_eq!(rig.status().success(), serde_json::Value::Null);
    rig.server.start_again().unwrap();
    assert!(eventually(PATIENCE * 2, || rig.unmet().is_empty()), "{:?}", rig.unmet());
    assert!(
        eventually(PATIENCE * 2, || {
            [
                "pods of this node",
                "namespaces",
                "network-attachment-definitions",
                "multi-networkpolicies",
                "network-status",
            ]
            .iter()
            .all(|object| rig.trouble(object).is_none())
        }),
        "{:#}",
        rig.node.ctl(&["status"]).unwrap()
    );
    rig.published("known");
    let log = rig.node.stop().unwrap();
    let told = log.lines().filter(|line| line.contains("not followed; it will be tried again")).count();
    assert_eq!(told, 4, "one line for each kind, not for each try:\n{log}");
    assert_eq!(log.matches("followed again").count(), 4, "{log}");
}

#[test]
fn a_watch_that_is_silent_does_not_keep_a_pod_waiting() {
    let rig = Rig::started();
    rig.settle("first");
    // From now on the watch of the pods has half an event without an end.
    let fault = Fault::CutOff { after: 0, how: CutOff::Silence };
    rig.server.faults().times(1, When::on(Verb::Watch, "pods"), fault);
    let mark = rig.server.mark();
    rig.server.reset_connections();
    rig.await_watch(mark, "pods");
    let pod = rig.pod("a");
    let mark = rig.server.mark();
    rig.add(&pod).success();
    rig.published("a");
    assert_eq!(
        calls(&rig.server.requests_since(mark)),
        [(Verb::Get, "pods shop/a".to_owned()), (Verb::Patch, "pods/status shop/a".to_owned())]
    );
}

#[test]
fn a_connection_that_died_in_silence_is_replaced_after_the_time_of_a_watch() {
    let mut rig = Rig::new(&Options::default());
    rig.node.set("kubernetes", serde_json::json!({"watchSeconds": 1}));
    rig.start();
    rig.settle("first");
    let fault = Fault::CutOff { after: 0, how: CutOff::Silence };
    let fault = rig.server.faults().times(1, When::on(Verb::Watch, "pods"), fault);
    assert!(eventually(PATIENCE, || rig.server.faults().hits(fault) == 1));
    let mark = rig.server.mark();
    let pod = rig.pod("late");
    rig.await_watch(mark, "pods");
    rig.add(&pod).success();
    rig.published("late");
    let asked = rig.server.requests_since(mark);
    assert!(asked.iter().all(|one| one.verb != Verb::Get && one.verb != Verb::List), "{:?}", calls(&asked));
}
