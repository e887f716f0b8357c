//! Rights that the agent lacks: seen in the status, with the rule that gives them.

use netattach_tests::api_server::{Fault, Options, Verb, When};
use netattach_tests::traffic::{PATIENCE, eventually};

use crate::rig::Rig;

#[test]
fn rights_that_are_missing_from_the_start_are_told_with_their_rules_and_whole_ones_are_not_asked_for_again() {
    let mut rig = Rig::new(&Options::default());
    rig.server.deny(&[("patch", "pods/status"), ("create", "events"), ("patch", "events")]);
    rig.start();
    rig.await_trouble(
        "access to pods/status",
        PATIENCE,
        "the agent may not patch them; its ClusterRole lacks the rule {apiGroups: [\"\"], resources: [\"pods/status\"], verbs: [\"patch\"]}",
    );
    rig.await_trouble("access to events", PATIENCE, "verbs: [\"create\", \"patch\"]}");
    assert_eq!(rig.trouble("access to pods"), None);
}

#[test]
fn a_right_that_is_taken_away_is_told_after_the_first_request_that_was_refused() {
    let rig = Rig::started();
    rig.settle("a");
    assert_eq!(rig.trouble("access to pods/status"), None);
    rig.server.deny(&[("patch", "pods/status")]);
    let fault = rig.server.faults().always(When::on(Verb::Patch, "pods/status"), Fault::Answer(403));
    let pod = rig.pod("b");
    rig.add(&pod).success();
    rig.await_trouble("access to pods/status", PATIENCE, "the agent may not patch them");
    rig.server.deny(&[]);
    // The next refusal shows that rights may have changed, and they are all there.
    assert!(eventually(PATIENCE * 3, || rig.trouble("access to pods/status").is_none()));
    rig.server.faults().lift(fault);
}
