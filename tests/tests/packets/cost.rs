//! What a packet costs.

use super::*;

/// Not a test of anything: prints what a packet costs. `cargo test --release -- --ignored --nocapture`.
#[test]
#[ignore = "prints nanoseconds per packet"]
#[allow(clippy::print_stdout, reason = "its whole purpose")]
fn nanoseconds_per_packet() {
    const REPEAT: u32 = 1_000_000;
    let print = |what: &str, rig: &Rig, hook, frame: &[u8]| {
        let once = rig.test_run(hook, frame, 1);
        let result = rig.test_run(hook, frame, REPEAT);
        println!("{what:44} {:>5} ns  verdict {}", result.duration.as_nanos(), once.return_value as i32);
    };
    let started = std::time::Instant::now();
    let open = Rig::new();
    println!("loaded in {:?}", started.elapsed());
    for name in Program::ALL.map(Program::name) {
        let program = SchedClassifier::from_pin(open.root.join("v3/prog").join(name)).unwrap();
        let info = program.info().unwrap();
        println!(
            "{} verified instructions {:?}",
            info.name_as_str().unwrap(),
            info.verified_instruction_count()
        );
    }
    print("not isolated, to the pod", &open, ToPod, &to_pod().tcp(1, 2, ACK).frame());
    print("not isolated, from the pod, IPv4", &open, FromPod, &from_pod().tcp(1, 2, ACK).frame());
    print("not isolated, from the pod, IPv6", &open, FromPod, &from_pod6().tcp(1, 2, ACK).frame());
    let rig = Rig::isolated(Some(&allow_all()), Some(&allow_all()));
    print("established, to the pod, IPv4", &rig, ToPod, &to_pod().tcp(1, 2, ACK).frame());
    print("established, from the pod, IPv4", &rig, FromPod, &from_pod().tcp(1, 2, ACK).frame());
    print("established, to the pod, IPv6", &rig, ToPod, &to_pod6().tcp(1, 2, ACK).frame());
    print("established, from the pod, IPv6", &rig, FromPod, &from_pod6().tcp(1, 2, ACK).frame());
    // A SYN on a closing flow is judged and entered anew each time.
    let flags = SYN | tcp::FIN;
    print("new flow, to the pod, IPv4", &rig, ToPod, &to_pod().tcp(3, 2, flags).frame());
    print("new flow, from the pod, IPv4", &rig, FromPod, &from_pod().tcp(4, 2, flags).frame());
    print("new flow, to the pod, IPv6", &rig, ToPod, &to_pod6().tcp(3, 2, flags).frame());
    rig.enforce(Some(&deny_all()), None);
    let fast = super::fast::FastRig::new();
    print("open, by the fast path, IPv4", &fast.rig, FromPod, &from_pod().tcp(1, 2, ACK).frame());
    let ingress = fast.rig.install(&allow_all());
    fast.rig.dataplane.set_policy(super::fast::PEER, PolicyIds { ingress, egress: 0 }).unwrap();
    print(
        "established, receiver isolated, fast path",
        &fast.rig,
        FromPod,
        &from_pod().tcp(1, 2, ACK).frame(),
    );
    fast.rig.enforce(Some(&allow_all()), None);
    print("established, both isolated, fast path", &fast.rig, FromPod, &from_pod().tcp(1, 2, ACK).frame());
    print("denied, to the pod, IPv4", &rig, ToPod, &to_pod().tcp(9, 2, SYN).frame());
}

/// As above: how long it takes to go through the flow table, which every DEL on a node with policies does.
#[test]
#[ignore = "prints milliseconds per pass"]
#[allow(clippy::print_stdout, reason = "its whole purpose")]
fn milliseconds_per_pass_over_the_flow_table() {
    let whole = netattach_common::capacity::FLOWS_V4 as u32;
    let rig = Rig::sized(|config| Config {
        max_flows_v4: whole,
        max_flows_v6: netattach_common::capacity::FLOWS_V6 as u32,
        ..config
    });
    rig.enforce(None, Some(&allow_all()));
    assert_eq!(rig.run(FromPod, &from_pod().udp(1, 2).frame()), Ok(()));
    let mut flows = rig.flows();
    let (key, flow) = flows.iter().next().unwrap().unwrap();
    let table = rig.dataplane.flows().unwrap();
    let somebody = (1, "10.9.9.9".parse().unwrap());
    let mut filled = 1;
    for entries in [1, 1000, 10_000, 100_000, whole * 9 / 10] {
        for number in filled..entries {
            let bytes = number.to_be_bytes();
            let key = FlowKey { zone: 1, tags: [bytes[1], bytes[2], bytes[3]], ..key };
            flows.insert(key, flow, 0).unwrap();
        }
        filled = entries;
        let times: Vec<_> = (0..5)
            .map(|_| {
                let started = std::time::Instant::now();
                table.purge([somebody]).unwrap();
                started.elapsed()
            })
            .collect();
        println!(
            "{entries:>7} flows {:>8.2?} (best of 5, worst {:.2?})",
            times.iter().min().unwrap(),
            times.iter().max().unwrap()
        );
    }
}
