//! One policy replaces another while packets are judged.

use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use super::*;

/// Exchanges under load, at each size.
const SWAPS: usize = 1000;
/// A packet costs microseconds; a test must not wait for ever for a loader that is stuck.
const PATIENCE: Duration = Duration::from_secs(60);

/// A rule for each of `rules` hosts of `10.128.0.0/9`, all with one port; the peer is allowed by TCP 80 too.
fn large(rules: u32, tcp_port: u16) -> CompiledPolicy {
    let peers = (0..rules).map(|host| {
        let [_, a, b, c] = host.to_be_bytes();
        (IpAddr::from([10, 128 | a, b, c]).into(), NOTHING + 1)
    });
    let entry = |class, traffic| PortPrefix { class: NOTHING + class, traffic };
    CompiledPolicy {
        peers: peers
            .chain([
                (format!("{PEER_V4}/32").parse().unwrap(), NOTHING + 2),
                ("fd00::2/128".parse().unwrap(), NOTHING + 2),
            ])
            .collect(),
        ports: [
            (entry(1, port(6, tcp_port)), 1),
            (entry(2, port(6, 80)), rules),
            (entry(2, port(6, tcp_port)), 2),
        ]
        .into(),
        rules: (1..=rules)
            .map(|rule| (rule, Origin::Other(format!("test/large ingress[{}]", rule - 1))))
            .collect(),
    }
}

/// Packets that both policies allow must pass and packets that neither allows must not, at every moment: any other
/// verdict would come from neither policy. New contents are written, and old ones are removed, all the while.
///
/// Rows: C32, C95.
#[test]
fn no_packet_is_judged_by_neither_the_old_nor_the_new_policy() {
    for (rules, written_anew) in [(10_000, 10), (100_000, 2)] {
        let entries = 4 * rules;
        let rig = Rig::sized(|config| Config {
            max_rules: entries,
            max_peers_v4: entries,
            max_flows_v4: 65_536,
            max_flows_v6: 65_536,
            ..config
        });
        rig.put(Checks::default());
        let (first, second) = (large(rules, 81), large(rules, 82));
        let (done, rounds) = (AtomicBool::new(false), AtomicU32::new(0));
        let mut ids = [rig.install(&first), rig.install(&second)];
        let set = |id| rig.dataplane.policies().set(POD, PolicyIds { ingress: id, egress: 0 }).unwrap();
        set(ids[0]);
        let wrong = std::thread::scope(|scope| {
            let load = scope.spawn(|| {
                let mut wrong = Vec::new();
                let started = Instant::now();
                let mut source = 1024;
                while !done.load(Ordering::Relaxed) && started.elapsed() < PATIENCE {
                    source = if source == u16::MAX { 1024 } else { source + 1 };
                    for (packet, expected) in [
                        (to_pod().tcp(source, 80, SYN), -1),
                        (to_pod6().tcp(source, 80, SYN), -1),
                        (to_pod().tcp(source, 83, SYN), 2),
                        (to_pod6().udp(source, 80), 2),
                    ] {
                        let verdict = rig.test_run(ToPod, &packet.frame(), 1).return_value as i32;
                        if verdict != expected {
                            wrong.push((packet, verdict));
                        }
                    }
                    rounds.fetch_add(1, Ordering::Relaxed);
                }
                wrong
            });
            for swap in 0..SWAPS {
                let next = (swap + 1) % 2;
                if swap % (SWAPS / written_anew) == 0 {
                    let old = std::mem::replace(&mut ids[next], rig.install([&first, &second][next]));
                    rig.dataplane.wait_for_readers().unwrap();
                    rig.dataplane.policies().remove(&[old].into()).unwrap();
                }
                set(ids[next]);
                let before = rounds.load(Ordering::Relaxed);
                while rounds.load(Ordering::Relaxed) == before && !load.is_finished() {
                    std::thread::yield_now();
                }
            }
            done.store(true, Ordering::Relaxed);
            load.join().unwrap()
        });
        assert_eq!(wrong.len(), 0, "{rules} rules: {:?}", wrong.first());
        assert!(
            rounds.into_inner() >= SWAPS as u32,
            "{rules} rules: the load ended before the last exchange"
        );
    }
}
