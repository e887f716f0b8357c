//! Masquerade and ports of the node: configurations, with the step or the error that results.

use serde_json::json;

use super::tests::request;
use super::*;
use crate::step::Translate;

fn planned(kind: &str, keys: Value, protected: bool) -> Result<Vec<Step>, PlanError> {
    let protect = Protect::verified();
    let mut config = json!({
        "cniVersion": "1.1.0", "name": "net", "type": kind, "isGateway": true,
        "ipam": {"type": "host-local", "subnet": "10.1.0.0/24"}
    });
    if let (Some(config), Value::Object(keys)) = (config.as_object_mut(), keys) {
        config.extend(keys);
    }
    let (config, args) = (config.as_object().unwrap(), CniArgs::default());
    driver(kind).unwrap().plan(&Request { protect: protected.then_some(&protect), ..request(config, &args) })
}

/// The translation, and the step that follows it.
fn translation(kind: &str, keys: Value) -> Option<(Translate, Step)> {
    let steps = planned(kind, keys, true).unwrap_or_else(|error| panic!("{}", Chain(&error)));
    let at = steps.iter().position(|step| matches!(step, Step::Translate(_)))?;
    let [Step::Translate(translate), next, ..] = &steps[at..] else { panic!("{steps:?}") };
    Some((translate.clone(), next.clone()))
}

fn refused(kind: &str, keys: Value) -> (u32, String) {
    let error = CniError::from(planned(kind, keys.clone(), true).expect_err(&keys.to_string()));
    (error.code, error.msg)
}

#[test]
fn what_is_translated_is_known_before_the_first_packet_is_judged() {
    let keys = json!({
        "ipMasq": true, "ipMasqBackend": "nftables", "nonMasqueradeCIDRs": ["10.0.0.7/8", "fd00::/8"],
        "runtimeConfig": {"portMappings": [
            {"hostPort": 8080, "containerPort": 80, "protocol": "TCP", "hostIP": ""},
            {"hostPort": 8080, "containerPort": 80, "protocol": "tcp"},
            {"hostPort": 0, "containerPort": 81, "protocol": "tcp"},
            {"containerPort": 82},
            {"hostPort": 53, "containerPort": 5353, "protocol": "udp", "hostIP": "192.0.2.1"},
            {"hostPort": 8080, "containerPort": 81, "protocol": "sctp", "hostIP": "::"}
        ]}
    });
    for (kind, device, bridged) in [("bridge", "cni0", true), ("veth", "naca4978b4555a3", false)] {
        let (found, next) = translation(kind, keys.clone()).unwrap();
        let expected = json!({
            "device": device, "bridged": bridged, "masquerade": ["10.0.0.0/8", "fd00::/8"],
            "ports": [
                {"hostPort": 8080, "containerPort": 80, "protocol": "tcp"},
                {"hostPort": 53, "containerPort": 5353, "protocol": "udp", "hostIP": "192.0.2.1"},
                {"hostPort": 8080, "containerPort": 81, "protocol": "sctp", "hostIP": "::"}
            ]
        });
        assert_eq!(serde_json::to_value(&found).unwrap(), expected);
        assert_eq!(serde_json::from_value::<Translate>(expected).unwrap(), found);
        assert!(matches!(next, Step::Protect(_)), "{next:?}");
        let steps = planned(kind, keys.clone(), true).unwrap();
        let port = steps.iter().find_map(|step| match step {
            Step::CreateLink(link) => link.port(),
            _ => None,
        });
        // Packets of a pod to itself by its port may leave the bridge by the port on which they arrived.
        assert_eq!(port.map(|port| port.hairpin), bridged.then_some(true));
    }
}

#[test]
fn without_a_wish_there_is_no_step() {
    for keys in [
        json!({}),
        json!({"ipMasq": false, "ipMasqBackend": "", "nonMasqueradeCIDRs": []}),
        json!({"ipMasq": false, "ipMasqBackend": "iptables"}),
        json!({"ipMasq": null, "runtimeConfig": {"portMappings": []}}),
        json!({"runtimeConfig": {"portMappings": [{"hostPort": 0, "containerPort": 80}]}}),
    ] {
        for kind in ["bridge", "veth"] {
            assert_eq!(translation(kind, keys.clone()), None, "{keys}");
        }
    }
}

/// The agent has one implementation, and existing configurations name either of the reference plugin's.
///
/// Rows: BRG-ipMasqBackend.
#[test]
fn what_is_translated_does_not_depend_on_the_name_of_a_backend() {
    let with =
        |backend: Value| translation("bridge", json!({"ipMasq": true, "ipMasqBackend": backend})).unwrap().0;
    let expected = with(Value::Null);
    for backend in ["", "nftables", "iptables"] {
        assert_eq!(with(json!(backend)), expected, "{backend}");
    }
    let refused = refused("bridge", json!({"ipMasq": false, "ipMasqBackend": "ebtables"}));
    let told = "key ipMasqBackend: \"ebtables\" is neither nftables nor iptables";
    assert_eq!(refused, (code::INVALID_CONFIG, told.to_owned()));
}

/// Rows: BRG-portSenders.
#[test]
fn what_cannot_be_translated_is_refused_with_its_reason() {
    let ports = |elements: Value| json!({"runtimeConfig": {"portMappings": elements}});
    let wrong =
        |reason: &str| (code::INVALID_CONFIG, format!("key runtimeConfig.portMappings: element 0: {reason}"));
    for (element, reason) in [
        (json!(7), "an object is needed"),
        (json!({"hostPort": 65536, "containerPort": 80}), "hostPort must be a port from 1 to 65535"),
        (json!({"hostPort": -1, "containerPort": 80}), "hostPort must be a port from 1 to 65535"),
        (json!({"hostPort": 80}), "containerPort must be a port from 1 to 65535"),
        (json!({"hostPort": 80, "containerPort": 0}), "containerPort must be a port from 1 to 65535"),
        (
            json!({"hostPort": 80, "containerPort": 80, "protocol": "icmp"}),
            "protocol \"icmp\" is none of tcp, udp and sctp",
        ),
        (json!({"hostPort": 80, "containerPort": 80, "protocol": 6}), "protocol must be a text"),
        (
            json!({"hostPort": 80, "containerPort": 80, "hostIP": "node"}),
            "hostIP \"node\" is not an IP address",
        ),
        (
            json!({"hostPort": 80, "containerPort": 80, "hostIP": "224.0.0.1"}),
            "hostIP 224.0.0.1 is a multicast address, which no node has",
        ),
        (
            json!({"hostPort": 80, "containerPort": 80, "hostIP": "::ffff:192.0.2.1"}),
            "hostIP ::ffff:192.0.2.1 is an IPv4 address: write 192.0.2.1",
        ),
        (
            json!({"hostPort": 80, "containerPort": 80, "hostIP": "::1"}),
            "hostIP ::1: the kernel routes nothing from there to a pod",
        ),
    ] {
        assert_eq!(refused("bridge", ports(json!([element]))), wrong(reason));
    }
    let config = |message: &str| (code::INVALID_CONFIG, message.to_owned());
    assert_eq!(
        refused("bridge", ports(json!({}))),
        config("key runtimeConfig.portMappings: a list is needed, not an object")
    );
    let one = |container: u16, at: &str| json!({"hostPort": 80, "containerPort": container, "hostIP": at});
    assert_eq!(
        refused("bridge", ports(json!([one(80, ""), one(81, "192.0.2.1")]))),
        config(
            "key runtimeConfig.portMappings: element 1: port 80 of the node leads to port 80 of the pod already"
        )
    );
    let many: Vec<Value> = (1..=257).map(|port| json!({"hostPort": port, "containerPort": 80})).collect();
    assert!(refused("bridge", ports(json!(many))).1.contains("portMappings"));
    assert_eq!(
        refused("veth", json!({"nonMasqueradeCIDRs": ["10.0.0.0/8"]})),
        config("key nonMasqueradeCIDRs: excepts from masquerade, but ipMasq is not true")
    );
    assert_eq!(
        refused("veth", json!({"ipMasq": true, "nonMasqueradeCIDRs": ["10.0.0.0"]})),
        config("key nonMasqueradeCIDRs: \"10.0.0.0\" is not a network such as 10.0.0.0/8")
    );
    for keys in [json!({"ipMasq": true}), ports(json!([one(80, "")]))] {
        let key = if keys["ipMasq"] == true { "ipMasq" } else { "runtimeConfig.portMappings" };
        let mut alone = keys.clone();
        alone["isGateway"] = json!(false);
        assert_eq!(
            refused("bridge", alone),
            config(&format!(
                "key {key}: needs isGateway or isDefaultGateway: the node translates only what it routes"
            ))
        );
    }
    let who = refused("ptp", json!({"portSenders": "some"}));
    assert_eq!(who, config("key portSenders: \"some\" is none of near, all and none"));
}

/// Rows: BRG-portSenders, BRG-nonMasqueradeBuiltin.
#[test]
fn without_an_agent_the_same_is_translated_but_for_what_only_an_agent_knows() {
    let ports = json!([{"hostPort": 8080, "containerPort": 80}]);
    for kind in ["bridge", "ptp", "veth"] {
        for senders in ["near", "all", "none"] {
            let keys = json!({
                "ipMasq": true, "nonMasqueradeCIDRs": ["10.0.0.0/8"], "portSenders": senders,
                "runtimeConfig": {"portMappings": ports}
            });
            let step = |protected: bool| {
                let steps = planned(kind, keys.clone(), protected).unwrap();
                steps.into_iter().find(|step| matches!(step, Step::Translate(_))).unwrap()
            };
            assert_eq!(step(false), step(true));
            let Step::Translate(translate) = step(false) else { panic!("{kind}") };
            assert_eq!(Some(translate.senders), crate::step::PortSenders::named(senders));
        }
        let of_node = json!({"ipMasq": true, "nonMasqueradeBuiltin": true});
        assert!(planned(kind, of_node.clone(), true).is_ok());
        let error = CniError::from(planned(kind, of_node, false).unwrap_err());
        let told = "key nonMasqueradeBuiltin: needs netattachd, which keeps the list";
        assert_eq!((error.code, error.msg.as_str()), (code::INVALID_CONFIG, told));
    }
}
