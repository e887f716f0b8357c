//! Everything that a plan leaves behind is removed, for any configuration, with and without a record of the plan.

use proptest::prelude::*;

use super::*;
use crate::plan::undo::{Inverse, inverse};
use crate::plan::{AttachmentPlan, Sandbox, fixtures};

/// A configuration of a driver in which each key is absent, valid, or wrong.
fn configuration() -> impl Strategy<Value = (&'static str, Map<String, Value>)> {
    let values = [
        ("bridge", vec![json!("br0"), json!(""), json!(7)]),
        ("isGateway", vec![json!(true), json!(false), json!("x")]),
        ("isDefaultGateway", vec![json!(true), json!(null)]),
        ("hairpinMode", vec![json!(true)]),
        ("promiscMode", vec![json!(true)]),
        ("mtu", vec![json!(1400), json!(0), json!(7), json!("x")]),
        ("master", vec![json!("eth0"), json!("")]),
        ("mode", vec![json!("vepa"), json!("x")]),
        ("mac", vec![json!(MAC), json!("x")]),
        ("vlan", vec![json!(0), json!(7)]),
        ("ipMasq", vec![json!(true)]),
        (
            "ipam",
            vec![
                pool(),
                json!({"type": "host-local", "dataDir": "/run/leases", "subnet": "10.1.0.0/24"}),
                json!({"type": "host-local", "subnet": "10.1.0.0/31"}),
                json!({"type": "host-local"}),
                json!({"type": "static", "addresses": [{"address": "10.1.0.7/24"}]}),
                json!({"type": "static"}),
                json!({"type": "dhcp"}),
                json!({"type": ""}),
                json!({}),
                json!(7),
            ],
        ),
    ];
    let keys: Vec<_> = values
        .into_iter()
        .map(|(key, values)| {
            prop::option::of(prop::sample::select(values))
                .prop_map(move |value| value.map(|value| (key.to_owned(), value)))
        })
        .collect();
    (prop::sample::select(kinds().collect::<Vec<_>>()), keys).prop_map(|(kind, keys)| {
        let mut config = object(json!({"cniVersion": "1.1.0", "name": "net", "type": kind}));
        config.extend(keys.into_iter().flatten());
        (kind, config)
    })
}

/// Whether a step leaves something that belongs to the attachment and does not disappear with its link.
fn leaves_its_own(step: &Step) -> bool {
    match step {
        Step::Lease(config) => config.is_kept(),
        Step::CreateLink(_)
        | Step::ClaimDevice(_)
        | Step::Delegate(_)
        | Step::Remember(_)
        | Step::Protect(_)
        | Step::Translate(_)
        | Step::Admit(_)
        | Step::RestrictSender
        | Step::PrepareDeviceInfo(_)
        | Step::NoteProperties(_)
        | Step::ChooseTables(_)
        | Step::ChooseVrf(_)
        | Step::ChooseHostAccess
        | Step::RouteBySource => true,
        Step::TakeMade(_)
        | Step::EnsureBridge(_)
        | Step::ProtectAddresses
        | Step::GiveHostAccess
        | Step::SetDevice(_)
        | Step::MoveDevice
        | Step::RaiseLoopback
        | Step::FindReach
        | Step::FindDevice
        | Step::Gateway { .. }
        | Step::EnsureForwarding
        | Step::RouteToPod
        | Step::Configure(_)
        | Step::Tune(_)
        | Step::UseTables(_)
        | Step::JoinVrf(_)
        | Step::ReadDeviceInfo(_)
        | Step::MoveDefaultRoutes { .. } => false,
    }
}

/// Whether a caller without a record always runs the inverse, because the configuration does not tell if it is needed.
fn is_asked_for_anyway(step: &Step) -> bool {
    matches!(step, Step::Translate(_) | Step::RestrictSender)
}

/// The inverses of the steps, with only the part of a lease's configuration that releasing reads.
fn inverses(sandbox: &Sandbox, attachment: &AttachmentPlan) -> Vec<String> {
    let steps = attachment.steps.iter().filter(|step| !is_asked_for_anyway(step));
    let inverses = steps.filter_map(|step| inverse(sandbox, attachment, step, None));
    let text = |inverse| match inverse {
        Inverse::Release { config, owner } => format!("release {:?} of {owner}", config.pool()),
        other => format!("{other:?}"),
    };
    inverses.map(text).collect()
}

proptest! {
    #[test]
    fn what_a_plan_leaves_behind_is_taken_back_with_and_without_a_record((kind, config) in configuration()) {
        let args = CniArgs::default();
        let protect = Protect::verified();
        let (driver, sandbox) = (driver(kind).unwrap(), Sandbox { ifname: "net1".into(), ..fixtures::sandbox("c1") });
        // DEL can derive the remains from any configuration.
        let remains = fixtures::attachment(kind, driver.remains(&request(&config, &args)));

        if let Ok(steps) = driver.plan(&request(&config, &args)) {
            let planned = fixtures::attachment(kind, steps);
            prop_assert_eq!(inverses(&sandbox, &planned), inverses(&sandbox, &remains));
            for step in planned.steps.iter().filter(|step| is_asked_for_anyway(step)) {
                let same = |other: &Step| std::mem::discriminant(other) == std::mem::discriminant(step);
                prop_assert!(remains.steps.iter().any(same), "{step:?}");
            }
        }
        if let Ok(steps) = driver.plan(&Request { protect: Some(&protect), ..request(&config, &args) }) {
            let planned = fixtures::attachment(kind, steps);
            for step in &planned.steps {
                prop_assert_eq!(inverse(&sandbox, &planned, step, None).is_some(), leaves_its_own(step));
            }
        }
    }
}
