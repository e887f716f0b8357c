//! Tests of converting outputs of steps to results, and back.

use serde_json::{Value, json};

use super::*;
use crate::cni::{Request, Version};
use crate::link;
use crate::plan::resolve::one;
use crate::plan::{check, fixtures, hook_kind};
use crate::spec::{self, Device, DeviceId};
use crate::step::{Claim, EnforceWhen, HookKind, NotObservable, Outputs, Representor};

const POD: &str = "/run/netns/c1";

fn planned(kind: &str, keys: &Value) -> AttachmentPlan {
    let mut config = json!({"cniVersion": "1.1.0", "name": "net", "type": kind});
    config.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
    let env = [
        ("CNI_COMMAND", "ADD"),
        ("CNI_CONTAINERID", "c1"),
        ("CNI_IFNAME", "eth0"),
        ("CNI_NETNS", POD),
        ("CNI_PATH", "/opt/cni/bin"),
    ];
    let env = env.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
    let request = Request::parse(&env, config.to_string().as_bytes()).unwrap();
    one(&fixtures::sandbox("c1"), link::driver(kind).unwrap(), &request, &link::Facts::default()).unwrap()
}

fn made(name: &str, mac: &str) -> Interface {
    Interface { name: name.into(), index: 7, mac: mac.parse().ok(), mtu: 1500 }
}

/// The outputs that the steps of a plan would have: two addresses, one of them without gateway.
fn outputs(attachment: &AttachmentPlan) -> Outputs {
    let brought = |step: &Step| match step {
        Step::EnsureBridge(bridge) => Output::Bridge(crate::step::Bridge {
            link: made(&bridge.name, "02:00:00:00:00:01"),
            made: true,
            ours: false,
        }),
        Step::CreateLink(link) => Output::Link {
            parent: None,
            host: link.node_end().map(|name| made(name, "02:00:00:00:00:02")),
            pod: made(link.pod_name(), "02:00:00:00:00:03"),
        },
        Step::RaiseLoopback => Output::Loopback {
            addresses: ["127.0.0.1/8", "192.0.2.1/32", "127.0.0.2/8", "::1/128"]
                .map(|address| address.parse().unwrap())
                .to_vec(),
        },
        Step::Lease(_) => Output::Lease {
            addresses: vec![
                LeasedAddress { address: "10.1.0.2/24".parse().unwrap(), gateway: "10.1.0.1".parse().ok() },
                LeasedAddress { address: "fd00:1::2/64".parse().unwrap(), gateway: None },
            ],
            dns: cni::Dns { nameservers: vec!["10.0.0.53".into()], ..cni::Dns::default() },
            routes: vec![cni::Route::new("10.9.0.0/16".parse().unwrap(), None)],
            server: None,
        },
        Step::Delegate(_) => Output::Delegate { result: json!({"ips": [{"address": "10.7.0.2/24"}]}).into() },
        _ => Output::Nothing,
    };
    let all = attachment.steps.iter().enumerate();
    all.map(|(index, step)| (StepRef(0, index as u16), brought(step))).collect()
}

fn told(attachment: &AttachmentPlan) -> CniResult {
    result(&fixtures::sandbox("c1"), attachment, outputs(attachment).of(0)).unwrap()
}

fn pool() -> Value {
    json!({"type": "host-local", "ranges": [[{"subnet": "10.1.0.0/24"}], [{"subnet": "fd00:1::/64"}]]})
}

#[test]
fn a_bridge_that_is_the_gateway_says_so_of_every_address() {
    let keys = json!({"bridge": "br0", "isDefaultGateway": true, "ipam": pool()});
    let attachment = planned("bridge", &keys);
    let host = link::host_name("c1", "eth0");
    let expected = json!({
        "cniVersion": "1.1.0",
        "interfaces": [
            {"name": "br0", "mac": "02:00:00:00:00:01", "mtu": 1500},
            {"name": host, "mac": "02:00:00:00:00:02", "mtu": 1500},
            {"name": "eth0", "mac": "02:00:00:00:00:03", "mtu": 1500, "sandbox": POD},
        ],
        "ips": [
            {"interface": 2, "address": "10.1.0.2/24", "gateway": "10.1.0.1"},
            {"interface": 2, "address": "fd00:1::2/64", "gateway": "fd00:1::1"},
        ],
        "routes": [
            {"dst": "10.9.0.0/16"}, {"dst": "0.0.0.0/0", "gw": "10.1.0.1"}, {"dst": "::/0", "gw": "fd00:1::1"},
        ],
        "dns": {"nameservers": ["10.0.0.53"]},
    });
    assert_eq!(told(&attachment).to_value(Version::LATEST).unwrap(), expected);
}

#[test]
fn a_routed_veth_tells_what_the_pod_has() {
    let attachment = planned("veth", &json!({"ipam": pool(), "dns": {"nameservers": []}}));
    let told = told(&attachment).to_value(Version::LATEST).unwrap();
    let expected = json!([
        {"interface": 1, "address": "10.1.0.2/32", "gateway": "169.254.1.1"},
        {"interface": 1, "address": "fd00:1::2/128", "gateway": "fe80::1"},
    ]);
    assert_eq!(told["ips"], expected);
    let expected = json!([
        {"dst": "10.9.0.0/16"}, {"dst": "10.1.0.0/24", "gw": "169.254.1.1"}, {"dst": "fd00:1::/64", "gw": "fe80::1"},
    ]);
    assert_eq!(told["routes"], expected);
    // An empty list counts as a list: it overrides the lease's servers.
    assert_eq!(told.get("dns"), None);
}

#[test]
fn loopback_tells_one_address_of_its_own_for_each_family() {
    let told = told(&planned("loopback", &json!({})));
    let addresses: Vec<_> = told.ips.iter().map(|ip| ip.address.to_string()).collect();
    assert_eq!(addresses, ["127.0.0.1/8", "::1/128"]);
}

#[test]
fn a_result_read_back_and_reported_again_is_the_same() {
    let [delegated, by_server] = ["executed-ipam", "dhcp"].map(|kind| json!({"type": kind}));
    for (kind, keys) in [
        ("bridge", json!({"bridge": "br0", "isGateway": true, "ipam": pool()})),
        ("bridge", json!({})),
        ("bridge", json!({"isDefaultGateway": true, "ipam": delegated})),
        ("macvlan", json!({"ipam": pool()})),
        ("macvlan", json!({"ipam": by_server, "dns": {"domain": "example.org"}})),
        ("veth", json!({"isDefaultGateway": true, "ipam": pool()})),
        ("loopback", json!({})),
    ] {
        let attachment = planned(kind, &keys);
        let told = told(&attachment);
        let back = from_prev_result(&attachment, &told).unwrap();
        assert_eq!(back.keys().count(), attachment.steps.len(), "{kind} {keys}");
        assert_eq!(result(&fixtures::sandbox("c1"), &attachment, back.of(0)).unwrap(), told, "{kind} {keys}");
    }
}

#[test]
fn a_result_is_the_same_in_a_version_whether_it_was_read_from_another_or_not() {
    let (executed, printed) = delegated();
    let own = planned("bridge", &json!({"bridge": "br0", "isGateway": true, "ipam": pool()}));
    let oldest = AttachmentPlan { version: Version::V0_4_0, ..own.clone() };
    let brought = outputs(&own);
    for (attachment, outputs) in [(&own, &brought), (&oldest, &brought), (&executed, &printed)] {
        let sandbox = fixtures::sandbox("c1");
        let reported = as_reported(&sandbox, attachment, outputs.of(0)).unwrap();
        let read = Version::ALL.map(|version| cni::result::in_version(&reported, version).unwrap());
        assert_eq!(in_versions(&sandbox, attachment, outputs.of(0), Version::ALL).unwrap(), read);
    }
}

#[test]
fn a_link_that_a_result_does_not_list_has_no_output() {
    let attachment = planned("bridge", &json!({"bridge": "br0"}));
    let mut told = told(&attachment);
    told.interfaces.pop();
    let back = from_prev_result(&attachment, &told).unwrap();
    assert_eq!(back.keys().copied().collect::<Vec<_>>(), [StepRef(0, 0), StepRef(0, 2)]);
}

/// The result of another plugin for an interface that it made; one of the addresses belongs to another interface.
fn delegated() -> (AttachmentPlan, Outputs) {
    let mut attachment = planned("bridge", &json!({}));
    let delegate = |plugin: &str| {
        let (plugin, config) = (plugin.to_owned(), serde_json::Map::new());
        Step::Delegate(crate::step::Delegate { plugin, config, role: Role::Plugin })
    };
    attachment.steps = vec![delegate("host-device"), delegate("tuning"), Step::FindDevice];
    let printed = |address: &str| {
        let result = json!({
            "interfaces": [{"name": "eth0", "sandbox": POD}, {"name": "eth0"}],
            "ips": [
                {"interface": 0, "address": address, "gateway": "10.7.0.1"},
                {"interface": 1, "address": "10.8.0.1/24"},
                {"address": "fd00:7::2/64"},
            ],
        });
        Output::Delegate { result: result.into() }
    };
    let outputs = Outputs::from_iter([
        (StepRef(0, 0), printed("10.7.0.2/24")),
        (StepRef(0, 1), printed("10.7.0.3/24")),
        (
            StepRef(0, 2),
            Output::Device {
                vantage: HookKind::Pod,
                host: None,
                pod: Some(made("eth0", "02:00:00:00:00:03")),
                addresses: vec!["10.7.0.9/24".parse().unwrap()],
            },
        ),
    ]);
    (attachment, outputs)
}

#[test]
fn an_interface_of_other_plugins_has_the_addresses_that_the_last_of_them_printed_for_it() {
    let (attachment, outputs) = delegated();
    let leased = leased(&attachment, outputs.of(0)).unwrap();
    let addresses: Vec<_> = leased.addresses.iter().map(|leased| leased.address.to_string()).collect();
    assert_eq!(addresses, ["10.7.0.3/24", "fd00:7::2/64"]);
}

/// Rows: CHN-addresses.
#[test]
fn an_interface_to_which_no_result_attributes_an_address_has_those_of_the_kernel() {
    let (attachment, mut outputs) = delegated();
    let found = |outputs: &Outputs| -> Vec<String> {
        let found = own(POD, &attachment, outputs.of(0)).unwrap();
        found.addresses.iter().map(|leased| leased.address.to_string()).collect()
    };
    assert_eq!(found(&outputs), ["10.7.0.3/24", "fd00:7::2/64"], "what a result says counts");
    let of = |sandbox: Option<&str>, name: &str| json!({"name": name, "sandbox": sandbox});
    for (interface, what) in [
        (of(Some("/run/netns/c2"), "eth0"), "another sandbox's"),
        (of(None, "eth0"), "the node's"),
        (of(Some(POD), "eth1"), "another interface's"),
    ] {
        let result = json!({"interfaces": [interface], "ips": [{"interface": 0, "address": "10.8.0.1/24"}]});
        outputs.insert(StepRef(0, 1), Output::Delegate { result: result.into() });
        assert_eq!(found(&outputs), ["10.7.0.9/24"], "{what}");
    }
    let nobodys = json!({"ips": [{"interface": 3, "address": "10.8.0.1/24"}]});
    outputs.insert(StepRef(0, 1), Output::Delegate { result: nobodys.into() });
    assert_eq!(found(&outputs), ["10.7.0.9/24"], "of none that is listed");
    outputs.remove(&StepRef(0, 2));
    assert_eq!(found(&outputs), [] as [String; 0]);

    let asked = protect(EnforceWhen::Always);
    let allowed = Protect { allowed: vec!["10.7.0.100".parse().unwrap()], ..asked.clone() };
    let own = own(POD, &attachment, outputs.of(0)).unwrap();
    assert!(is_unaddressed(&asked, &attachment, &own));
    assert!(!is_unaddressed(&allowed, &attachment, &own));
    assert!(
        !is_unaddressed(&asked, &planned("bridge", &json!({})), &own),
        "one of ours is known to have none"
    );
}

#[test]
fn an_interface_of_other_plugins_is_where_it_was_found() {
    let (attachment, mut outputs) = delegated();
    let pod = made("eth0", "02:00:00:00:00:03");
    assert_eq!(link(outputs.of(0)), Some((None, pod)));
    // The attachment has no `Protect` step, so the interface is left alone regardless of the findings.
    assert_eq!(hook_kind::of(&attachment, outputs.of(0)), HookKind::Nowhere(NotObservable::NotJudged));
    let mut attachment = attachment;
    attachment.steps.push(Step::Protect(protect(EnforceWhen::Selected)));
    assert_eq!(hook_kind::of(&attachment, outputs.of(0)), HookKind::Pod);
    outputs.remove(&StepRef(0, 2));
    assert_eq!(hook_kind::of(&attachment, outputs.of(0)), HookKind::Nowhere(NotObservable::NoInterface));
    attachment.steps.pop();
    attachment.steps.push(Step::Protect(protect(EnforceWhen::Never)));
    assert_eq!(hook_kind::of(&attachment, outputs.of(0)), HookKind::Nowhere(NotObservable::LeftAlone));
}

fn protect(when: EnforceWhen) -> Protect {
    Protect { fast_path: false, when, ..Protect::verified() }
}

const VF: &str = "0000:03:02.1";

/// A pod's VF of a card in mode switchdev, driven by the kernel or by a process.
fn vf(userspace: Option<&str>) -> (AttachmentPlan, Outputs) {
    let device = Device {
        pod_name: "net1".to_owned(),
        id: DeviceId::Bus(VF.to_owned()),
        userspace: userspace.map(str::to_owned),
        function: Some(spec::VirtualFunction { physical: "0000:03:00.0".to_owned(), number: 1 }),
        rdma: None,
        switchdev: true,
    };
    let mut pod = made("net1", "02:00:00:00:00:03");
    let driven = userspace.map(|_| Interface { index: 0, mtu: 0, ..pod.clone() });
    let claim = Claim {
        device: VF.to_owned(),
        generation: 1,
        home: None,
        is_back: false,
        settings: Some(spec::VfSettings { mac: pod.mac, ..spec::VfSettings::default() }),
        physical: None,
        representor: Some(Representor {
            device: Interface { index: 9, ..made("eth3", "02:00:00:00:00:09") },
            mtu: 1500,
            up: false,
            accept_ra: None,
            addr_gen_mode: None,
            arp_ignore: None,
            driven,
        }),
    };
    pod.index = 4;
    let claimed = (Step::ClaimDevice(device), Output::Claimed(Box::new(claim)));
    let moved = (Step::MoveDevice, Output::Link { host: None, pod, parent: None });
    let made = std::iter::once(claimed).chain(userspace.is_none().then_some(moved));
    let (mut steps, outputs): (Vec<_>, Vec<_>) = made.unzip();
    steps.push(Step::Protect(protect(EnforceWhen::Always)));
    let outputs = outputs.into_iter().enumerate();
    let outputs = outputs.map(|(index, output)| (StepRef(0, index as u16), output)).collect();
    (fixtures::attachment("sriov", steps), outputs)
}

/// Rows: SRV-switchdev.
#[test]
fn a_representor_is_the_nodes_end_of_a_vf_whoever_drives_it() {
    let sandbox = fixtures::sandbox("c1");
    for (userspace, index, mtu) in [(None, 4, 1500), (Some("vfio-pci"), 0, 0)] {
        let (attachment, outputs) = vf(userspace);
        assert_eq!(hook_kind::of(&attachment, outputs.of(0)), HookKind::Node);
        let representor = Interface { index: 9, ..made("eth3", "02:00:00:00:00:09") };
        let pod = Interface { index, mtu, ..made("net1", "02:00:00:00:00:03") };
        let expected = Ends { host: Some(representor.clone()), pod, parent: None };
        assert_eq!(ends(outputs.of(0)), Some(expected), "{userspace:?}");
        let told = result(&sandbox, &attachment, outputs.of(0)).unwrap();
        let told = told.to_value(Version::LATEST).unwrap();
        let mut interfaces = json!([
            {"name": "eth3", "mac": "02:00:00:00:00:09", "mtu": 1500},
            {"name": "net1", "mac": "02:00:00:00:00:03", "sandbox": POD, "pciID": VF},
        ]);
        if userspace.is_none() {
            interfaces[1]["mtu"] = json!(1500);
        }
        assert_eq!(told["interfaces"], interfaces, "{userspace:?}");
        let wanted = check::expected(
            &attachment,
            outputs.of(0),
            &result(&sandbox, &attachment, outputs.of(0)).unwrap(),
            POD,
        );
        let wanted = wanted.unwrap();
        assert_eq!(wanted.host, Some(representor), "{userspace:?}");
        assert_eq!(wanted.pod.map(|pod| pod.index), userspace.is_none().then_some(4));
    }
}

/// Rows: STC-masquerade.
#[test]
fn the_subnet_of_what_a_pod_asks_for_is_the_authors() {
    let address = |text: &str| LeasedAddress { address: text.parse().unwrap(), gateway: None };
    let found = |step: Step, asked: &str, alone: bool| {
        let attachment = fixtures::attachment("veth", vec![step]);
        in_subnets_of_author(&fixtures::sandbox("c1"), &attachment, &[address(asked)], alone)
    };
    let plugin = |plugin: &str, role, config: &Value| {
        let config = config.as_object().unwrap().clone();
        Step::Delegate(Delegate { plugin: plugin.to_owned(), config, role })
    };
    for (own, asked, alone, expected) in [
        (json!([{"address": "10.9.0.2/24"}]), "10.9.0.7/0", true, "10.9.0.7/24"),
        (json!([{"address": "10.9.0.2/24"}]), "10.9.0.7/0", false, "10.9.0.7/24"),
        (json!([{"address": "10.9.0.2/24"}]), "10.8.0.7/8", true, "10.8.0.7/32"),
        (json!([{"address": "10.9.0.2/24"}]), "10.8.0.7/8", false, "10.8.0.7/8"),
        (json!([]), "fd00::7/3", true, "fd00::7/128"),
    ] {
        let config = json!({
            "cniVersion": "1.0.0", "name": "n", "ipam": {"type": "static", "addresses": own},
            "runtimeConfig": {"ips": [asked]},
        });
        let parsed = ipam::Kind::Static.parse(config.as_object().unwrap(), &CniArgs::default()).unwrap();
        for step in [Step::Lease(parsed), plugin("static", Role::Ipam, &config)] {
            assert_eq!(found(step, asked, alone), [address(expected)], "{config} {alone}");
        }
        // If the plugin is not known, no subnet counts as the author's. An address that no pod requests keeps its own
        // subnet, and so does one that comes with another plugin's interface.
        let host = IpNet::from(address(asked).address.addr()).to_string();
        let other = if alone { host.as_str() } else { asked };
        assert_eq!(found(plugin("other", Role::Ipam, &config), asked, alone), [address(other)], "{config}");
        for step in [plugin("other", Role::Ipam, &json!({})), plugin("other", Role::Plugin, &config)] {
            assert_eq!(found(step, asked, alone), [address(asked)], "{config}");
        }
    }
}
