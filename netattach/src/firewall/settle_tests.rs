//! Attachments are added and removed, and the rules are checked after each change.

use proptest::prelude::*;

use super::*;

fn empty() -> View {
    let filter = |version| Filter { version, is_there: false, chains: BTreeSet::new(), rules: Vec::new() };
    View::of([filter(Version::V4), filter(Version::V6)])
}

/// The tables after changes, as the kernel carries them out.
fn after(view: &View, changes: &[(Version, Change)]) -> View {
    let mut filters = view.filters.clone();
    for (version, change) in changes {
        let filter = filters.iter_mut().find(|filter| filter.version == *version).unwrap();
        assert!(filter.is_there || *change == Change::MakeTable, "{change:?}");
        let last = filter.rules.iter().map(|placed| placed.handle).max().unwrap_or_default();
        let placed = |chain: &String, rule: &Rule| Placed {
            chain: chain.clone(),
            handle: last + 1,
            rule: Some(rule.clone()),
        };
        match change {
            Change::MakeTable => filter.is_there = true,
            Change::MakeChain(chain) => assert!(filter.chains.insert(chain.clone()), "{chain}"),
            Change::Remove { chain, handle } => {
                let before = filter.rules.len();
                filter.rules.retain(|placed| (&placed.chain, placed.handle) != (chain, *handle));
                assert_eq!(filter.rules.len() + 1, before);
            }
            Change::First(chain, rule) => filter.rules.insert(0, placed(chain, rule)),
            Change::Last(chain, rule) => filter.rules.push(placed(chain, rule)),
        }
        let known = |placed: &Placed| filter.chains.contains(&placed.chain);
        assert!(filter.rules.iter().all(known), "{filter:?}");
    }
    View::of(filters)
}

/// The rules of a table in the form of `iptables-save`, each followed by the container in its comment.
fn listed(view: &View, version: Version) -> Vec<String> {
    let filter = view.filters.iter().find(|filter| filter.version == version).unwrap();
    let shown = |placed: &Placed| {
        let rule = placed.rule.as_ref().unwrap();
        let whose = Note::of(&rule.comment).map_or("", |note| note.attachment.rsplit(' ').nth(1).unwrap());
        format!("{} {rule} {whose}", placed.chain).trim_end().to_owned()
    };
    filter.rules.iter().map(shown).collect()
}

fn admitted(addresses: &[&str], closed: Option<(Ingress, &str)>) -> Admitted {
    Admitted {
        addresses: addresses.iter().map(|address| address.parse().unwrap()).collect(),
        admin_chain: "CNI-ADMIN".into(),
        closed: closed.map(|(ingress, bridge)| (ingress, bridge.to_owned())),
    }
}

fn note(container: &str) -> String {
    Owner::executables().note("lan", container, "eth0")
}

fn with(view: &View, container: &str, admitted: &Admitted) -> View {
    let note = note(container);
    let wanted = [Wanted { note: &note, admitted }];
    let changed = after(view, &settle(view, &wanted, &|there| there.is_of(&note)));
    assert_eq!(settle(&changed, &wanted, &|there| there.is_of(&note)), []);
    changed
}

fn without(view: &View, container: &str) -> View {
    let note = note(container);
    after(view, &settle(view, &[], &|there| there.is_of(&note)))
}

#[test]
fn the_first_attachment_makes_what_the_reference_makes() {
    let view = with(&empty(), "a", &admitted(&["10.1.0.2"], None));
    let established = "-m conntrack --ctstate RELATED,ESTABLISHED";
    assert_eq!(
        listed(&view, Version::V4),
        [
            "CNI-FORWARD -j CNI-ADMIN",
            "FORWARD -j CNI-FORWARD",
            &format!("CNI-FORWARD -d 10.1.0.2/32 {established} -j ACCEPT a"),
            "CNI-FORWARD -s 10.1.0.2/32 -j ACCEPT a",
        ]
    );
    assert_eq!(view.filters[1], empty().filters[1]);
    assert_eq!(
        listed(&without(&view, "a"), Version::V4),
        ["CNI-FORWARD -j CNI-ADMIN", "FORWARD -j CNI-FORWARD"]
    );
}

/// Rows: FWL-admin.
#[test]
fn a_chain_that_a_definition_names_is_asked_for_its_own_pods_after_the_administrators() {
    let mine = Admitted { admin_chain: "MINE".into(), ..admitted(&["10.1.0.3"], None) };
    let usual = admitted(&["10.1.0.2"], None);
    let asked = |view: &View| -> Vec<String> {
        let lines = listed(view, Version::V4).into_iter();
        lines.filter(|line| line.starts_with("CNI-FORWARD ") && !line.contains("-j ACCEPT")).collect()
    };
    let all = [
        "CNI-FORWARD -j CNI-ADMIN",
        "CNI-FORWARD -s 10.1.0.3/32 -j MINE b",
        "CNI-FORWARD -d 10.1.0.3/32 -j MINE b",
    ];
    let alone = with(&empty(), "b", &mine);
    assert_eq!(asked(&alone), all[1..]);
    assert_eq!(asked(&without(&alone, "b")), [""; 0]);
    for view in [with(&alone, "a", &usual), with(&with(&empty(), "a", &usual), "b", &mine)] {
        assert_eq!(asked(&view), all);
        let lines = listed(&view, Version::V4);
        let last_asked = lines.iter().rposition(|line| line.contains("-j MINE"));
        let first_passed = lines.iter().position(|line| line.contains("-j ACCEPT"));
        assert!(last_asked.is_some() && last_asked < first_passed, "{lines:?}");
        assert_eq!(asked(&without(&view, "b")), all[..1]);
    }
    // The reference plugin has it asked for all pods.
    let mut by_reference = with(&empty(), "a", &usual);
    by_reference.filters[0].chains.insert("MINE".to_owned());
    by_reference.filters[0].rules.insert(
        0,
        Placed { chain: CNI_FORWARD.to_owned(), handle: 99, rule: Some(Rule::jump("MINE", ADMIN_COMMENT)) },
    );
    let jumps = ["CNI-FORWARD -j MINE", "CNI-FORWARD -j CNI-ADMIN"];
    assert_eq!(asked(&with(&by_reference, "b", &mine)), jumps);
}

#[test]
fn a_late_del_leaves_another_ones_rules_of_the_address() {
    let view = with(&empty(), "a", &admitted(&["fd00::2"], None));
    let view = with(&view, "b", &admitted(&["fd00::2"], None));
    let left = listed(&without(&view, "a"), Version::V6);
    assert_eq!(
        left[2..],
        [
            "CNI-FORWARD -d fd00::2/128 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT b".to_owned(),
            "CNI-FORWARD -s fd00::2/128 -j ACCEPT b".to_owned(),
        ]
    );
    assert_eq!(without(&view, "c").filters, view.filters);
}

#[test]
fn what_comes_from_a_closed_bridge_is_stopped_before_it_passes() {
    // The bridge is closed after another network's pods have their rules.
    let view = with(&empty(), "a", &admitted(&["10.1.0.2"], None));
    let view = with(&view, "b", &admitted(&["10.2.0.2"], Some((Ingress::Isolated, "br1"))));
    let of = |view: &View, chain: &str| -> Vec<String> {
        let of_chain = |line: &String| line.strip_prefix(chain).is_some_and(|rest| rest.starts_with(' '));
        listed(view, Version::V4).into_iter().filter(of_chain).collect()
    };
    let forward = ["FORWARD -j CNI-ISOLATION-STAGE-1", "FORWARD -j CNI-FORWARD"];
    assert_eq!(of(&view, "FORWARD"), forward);
    let mut stage = of(&view, STAGE_1);
    stage.sort();
    assert_eq!(
        stage,
        [
            "CNI-ISOLATION-STAGE-1 -i br1 ! -o br1 -j CNI-ISOLATION-STAGE-2",
            "CNI-ISOLATION-STAGE-1 -i br1 -o br1 -j DROP",
        ]
    );
    assert_eq!(of(&view, STAGE_2), ["CNI-ISOLATION-STAGE-2 -o br1 -j DROP"]);
    // Another program has removed the jump to the accepting chain: the jump to the dropping chain is first again.
    let mut broken = view.clone();
    broken.filters[0]
        .rules
        .retain(|placed| placed.chain != FORWARD || !placed.rule.as_ref().unwrap().leads_to(CNI_FORWARD));
    let repaired = with(&broken, "a", &admitted(&["10.1.0.2"], None));
    assert_eq!(of(&repaired, "FORWARD"), forward);
    let open = without(&view, "b");
    assert_eq!((of(&open, STAGE_1), of(&open, STAGE_2)), (Vec::new(), Vec::new()));
}

#[test]
fn what_is_lacking_is_said() {
    let wanted = admitted(&["10.1.0.2"], None);
    let view = with(&empty(), "a", &wanted);
    let note = note("a");
    let first = |view: &View| {
        settle(view, &[Wanted { note: &note, admitted: &wanted }], &|_| false).first().map(said)
    };
    assert_eq!(first(&view), None);
    assert_eq!(first(&empty()).as_deref(), Some("table ip filter is gone"));
    let mut broken = view.clone();
    broken.filters[0].rules.pop();
    let expected = "table ip filter lacks a rule: -A CNI-FORWARD -s 10.1.0.2/32 -j ACCEPT";
    assert_eq!(first(&broken).as_deref(), Some(expected));
}

proptest! {
    /// After any sequence of changes the rules are those of the present attachments, in both tables.
    #[test]
    fn the_rules_are_those_of_who_is_there(
        steps in prop::collection::vec((0_usize..4, any::<bool>(), 0_u8..3, 0_usize..3, 0_usize..2), 0..24)
    ) {
        let mut view = empty();
        let mut live: std::collections::BTreeMap<usize, Admitted> = Default::default();
        let name = |container: usize| ["a", "b", "c", "d"][container];
        for (container, comes, address, ingress, bridge) in steps {
            if comes {
                let addresses = [format!("10.1.0.{address}"), format!("fd00::{address}")];
                let ingress = Ingress::ALL[ingress];
                let closed = (!ingress.is_open()).then_some((ingress, ["br0", "br1"][bridge]));
                let wanted = admitted(&[&addresses[0], &addresses[1]], closed);
                view = with(&view, name(container), &wanted);
                live.insert(container, wanted);
            } else {
                view = without(&view, name(container));
                live.remove(&container);
            }
            for filter in &view.filters {
                let of = |chain: &str| {
                    let rules = filter.rules.iter().filter(move |placed| placed.chain == chain);
                    let rules = rules.map(|placed| placed.rule.clone().unwrap());
                    rules.collect::<Vec<_>>()
                };
                let noted = of(CNI_FORWARD).into_iter().filter(|rule| Note::of(&rule.comment).is_some());
                let mut noted: Vec<Rule> = noted.collect();
                noted.sort();
                let notes: Vec<(String, &Admitted)> =
                    live.iter().map(|(container, admitted)| (note(name(*container)), admitted)).collect();
                let expected = notes.iter().flat_map(|(note, admitted)| {
                    rules_of(&Wanted { note, admitted }, filter.version)
                });
                let mut expected: Vec<Rule> = expected.collect();
                expected.sort();
                prop_assert_eq!(noted, expected);
                let bridges: BTreeSet<(&str, Rule)> =
                    live.values().filter_map(closed).flat_map(|it| rules_of_bridge(&it)).collect();
                for chain in [STAGE_1, STAGE_2] {
                    let mut found = of(chain);
                    found.sort();
                    let its = bridges.iter().filter(|(of, _)| *of == chain).map(|(_, rule)| rule.clone());
                    prop_assert_eq!(found, its.collect::<Vec<_>>());
                }
            }
        }
    }
}
