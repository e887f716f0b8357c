//! How long a pod waits for a VF, beside a runtime that executes the reference's `host-device` for it.

use std::time::Instant;

use netattach_tests::runtime::{Call, Runtime, config};

use super::native::Own;
use super::*;

/// How often each has its turn, after one that does not count.
const ROUNDS: usize = 9;
/// How many times as long as the agent's ADD that of `host-device` has to take.
const FASTER: f64 = 3.0;

/// The agent's ADD has more to do: the pod's default network, the VF's address by the physical function, policy. That of
/// `host-device` moves the VF and gives it an address.
#[test]
fn a_vf_is_attached_three_times_as_fast_as_by_the_reference_host_device() {
    let test = "a_vf_is_attached_three_times_as_fast";
    let Some(from) = plugins(test, &["host-device", "host-local"]) else { return };
    let Some(own) = Own::new(test, &json!({})) else { return };
    let (pod, vf) = (&own.pods[0], &own.vfs[0]);
    let runtime = Runtime { node: Namespace::of_this_process().unwrap(), plugins: from };
    let ipam = own.node.host_local(&["10.61.0.0/24"]);
    let moved = config("1.0.0", "host-device", &json!({"pciBusID": vf.address, "ipam": ipam}));
    let call = Call { container: "moved", ifname: "net1", netns: pod.namespace.path(), args: "" };
    let by_agent = || {
        let began = Instant::now();
        own.node.call("ADD", pod).run().success();
        let took = began.elapsed();
        own.node.del(pod).success();
        took
    };
    let by_reference = || {
        let began = Instant::now();
        let result = runtime.add(call, &moved).unwrap();
        let took = began.elapsed();
        runtime.after("DEL", call, &moved, &result).unwrap();
        took
    };
    let mut ratios = Vec::new();
    for round in 0..=ROUNDS {
        // What one leaves to the kernel to do does not always fall on the same.
        let (ours, theirs) = if round % 2 == 0 {
            let ours = by_agent();
            (ours, by_reference())
        } else {
            let theirs = by_reference();
            (by_agent(), theirs)
        };
        assert!(eventually(PATIENCE, || vf.on_node().is_some()));
        ratios.push(theirs.as_secs_f64() / ours.as_secs_f64());
    }
    let counted = &mut ratios[1..];
    counted.sort_by(f64::total_cmp);
    let median = counted[ROUNDS / 2];
    assert!(median >= FASTER, "{median:.2} times as long: {counted:?}");
}
