//! Tests of [`super`]: the variables that each verb needs, and the error code of each refusal.

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::cni::IpConfig;

fn env(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

/// A complete environment for `command`, with some variables replaced; an empty value removes one.
fn env_for(command: &str, replaced: &[(&str, &str)]) -> BTreeMap<String, String> {
    let mut vars = env(&[
        ("CNI_COMMAND", command),
        ("CNI_CONTAINERID", "c1"),
        ("CNI_NETNS", "/run/netns/a"),
        ("CNI_IFNAME", "eth0"),
        ("CNI_PATH", "/opt/cni/bin:/usr/lib/cni"),
    ]);
    vars.extend(env(replaced));
    vars
}

fn parse(command: &str, replaced: &[(&str, &str)], config: Value) -> Result<Request, CniError> {
    Request::parse(&env_for(command, replaced), config.to_string().as_bytes())
}

fn config(version: &str) -> Value {
    json!({"cniVersion": version, "name": "n", "type": "t"})
}

const ALL_REPLACED: [(&str, &str); 4] =
    [("CNI_CONTAINERID", ""), ("CNI_NETNS", ""), ("CNI_IFNAME", ""), ("CNI_PATH", "")];

/// Keys unknown to netattach stay in the configuration.
///
/// Rows: ENV-34.
#[test]
fn an_add_carries_everything() {
    let config = json!({"cniVersion": "1.1.0", "name": "n", "type": "t", "x": {"b": 1, "a": 2}});
    let request =
        parse("ADD", &[("CNI_ARGS", "K=v"), ("CNI_NETNS_OVERRIDE", "TRUE")], config.clone()).unwrap();
    let expected = Request {
        command: Command::Add,
        container_id: "c1".into(),
        netns: Some("/run/netns/a".into()),
        ifname: "eth0".into(),
        args: CniArgs::parse("K=v").unwrap(),
        path: vec!["/opt/cni/bin".into(), "/usr/lib/cni".into()],
        netns_override: true,
        config: config.as_object().unwrap().clone(),
        version: Version::V1_1_0,
        name: "n".into(),
        valid_attachments: None,
        tolerated: None,
    };
    assert_eq!(request, expected);
    assert_eq!(request.config.keys().collect::<Vec<_>>(), ["cniVersion", "name", "type", "x"]);
}

/// Rows: ENV-01, ENV-02, ENV-03, ENV-06, ENV-08.
#[test]
fn missing_variables_are_named_together_by_verb() {
    for (command, missing) in [
        ("ADD", "CNI_CONTAINERID,CNI_NETNS,CNI_IFNAME,CNI_PATH"), // ENV-01
        ("CHECK", "CNI_CONTAINERID,CNI_NETNS,CNI_IFNAME,CNI_PATH"), // ENV-01
        ("DEL", "CNI_CONTAINERID,CNI_IFNAME,CNI_PATH"),           // ENV-02
        ("GC", "CNI_PATH"),                                       // ENV-03
        ("STATUS", "CNI_PATH"),                                   // ENV-03
        ("", "CNI_COMMAND"),                                      // ENV-10
    ] {
        // ENV-06, ENV-08
        let expected = CniError::new(4, format!("required env variables [{missing}] missing"));
        assert_eq!(parse(command, &ALL_REPLACED, config("1.1.0")), Err(expected.clone()));
        let absent = env(&[("CNI_COMMAND", command)]);
        assert_eq!(Request::parse(&absent, b""), Err(expected));
    }
}

/// Rows: ENV-04.
#[test]
fn version_needs_neither_variables_nor_stdin() {
    let request = Request::parse(&env(&[("CNI_COMMAND", "VERSION")]), b"not json").unwrap();
    assert_eq!((request.command, request.version), (Command::Version, Version::LATEST));
}

/// Rows: VER-13.
#[test]
fn the_version_reply_lists_all_versions() {
    assert_eq!(
        version_reply(),
        json!({"cniVersion": "1.1.0",
               "supportedVersions": ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"]})
    );
}

/// Rows: ENV-09.
#[test]
fn about_names_the_program_and_the_versions() {
    assert_eq!(
        about("CNI plugin netattach v1"),
        "CNI plugin netattach v1\nCNI protocol versions supported: 0.1.0, 0.2.0, 0.3.0, 0.3.1, 0.4.0, 1.0.0, 1.1.0"
    );
}

/// Rows: ENV-07.
#[test]
fn an_invalid_variable_is_reported_before_missing_ones() {
    let error = parse("ADD", &[("CNI_CONTAINERID", "-a"), ("CNI_PATH", "")], config("1.0.0")).unwrap_err();
    assert_eq!(error, CniError::new(4, "invalid characters in containerID").with_details("-a"));
    let error = parse("ADD", &[("CNI_IFNAME", ".."), ("CNI_NETNS", "")], config("1.0.0")).unwrap_err();
    assert_eq!(error, CniError::new(4, "interface name is . or .."));
}

/// Rows: IDN-11.
#[test]
fn del_refuses_the_identifiers_that_add_refuses_and_goes_on_with_unreadable_arguments() {
    let del = |name, value| parse("DEL", &[(name, value), ("CNI_ARGS", "x")], config("1.0.0"));
    let refused = [
        ("CNI_CONTAINERID", "../../x", "invalid characters in containerID"),
        ("CNI_CONTAINERID", "-a", "invalid characters in containerID"),
        ("CNI_IFNAME", "../x", "interface name contains / or : or white space"),
        ("CNI_IFNAME", "..", "interface name is . or .."),
        ("CNI_IFNAME", "much too long a name", "interface name is too long"),
    ];
    for (name, value, msg) in refused {
        let error = del(name, value).unwrap_err();
        assert_eq!((error.code, error.msg.as_str()), (4, msg), "{value}");
    }
    let request = del("CNI_IFNAME", "eth0").unwrap();
    assert_eq!((request.args.raw(), request.tolerated.map(|error| error.code)), ("x", Some(4)));
    assert_eq!(parse("DEL", &[], config("1.0.0")).unwrap().tolerated, None);
}

/// Rows: ENV-02.
#[test]
fn del_may_come_without_a_namespace() {
    assert_eq!(parse("DEL", &[("CNI_NETNS", "")], config("1.0.0")).unwrap().netns, None);
}

/// Rows: ENV-05, ENV-28.
#[test]
fn the_override_is_a_word_or_a_digit() {
    for (text, value) in [("1", true), ("TrUe", true), ("0", false), ("yes", false), ("", false)] {
        let request = parse("ADD", &[("CNI_NETNS_OVERRIDE", text)], config("1.0.0")).unwrap();
        assert_eq!(request.netns_override, value, "{text:?}"); // ENV-05: optional
    }
}

/// Rows: ENV-11.
#[test]
fn an_unknown_command_is_refused_after_the_configuration_was_read() {
    assert_eq!(parse("FOO", &[], config("1.0.0")), Err(CniError::new(4, "unknown CNI_COMMAND: FOO")));
    assert_eq!(parse("FOO", &[], json!({})).unwrap_err().code, 7);
    assert_eq!(parse("add", &[], config("1.0.0")), Err(CniError::new(4, "unknown CNI_COMMAND: add")));
}

/// Rows: ENV-13, ENV-14, ENV-15, ENV-16, ENV-17, VER-07.
#[test]
fn a_bad_configuration_is_refused_with_its_code() {
    for (stdin, code, msg, details) in [
        // ENV-13
        ("", 6, "network configuration is not JSON: EOF while parsing a value at line 1 column 0", ""),
        ("[]", 6, "network configuration is an array, not an object", ""),
        ("{}", 7, "missing network name", ""),             // ENV-14
        (r#"{"name":""}"#, 7, "missing network name", ""), // ENV-14
        (r#"{"name":1}"#, 6, "key name: expected a string, found a number", ""),
        (r#"{"name":"a/b"}"#, 7, "invalid characters found in network name", "a/b"), // ENV-15
        (r#"{"name":"n","cniVersion":1}"#, 6, "key cniVersion: expected a string, found a number", ""), // ENV-16
        (
            r#"{"name":"n","cniVersion":"1.2.0"}"#, // ENV-17, VER-07
            1,
            "incompatible CNI versions",
            "config is \"1.2.0\", plugin supports [0.1.0, 0.2.0, 0.3.0, 0.3.1, 0.4.0, 1.0.0, 1.1.0]",
        ),
    ] {
        let error = Request::parse(&env_for("ADD", &[]), stdin.as_bytes()).unwrap_err();
        assert_eq!(error, CniError::new(code, msg).with_details(details), "{stdin}");
    }
}

/// Rows: ENV-16, ENV-18, ENV-19, ENV-20, VER-02.
#[test]
fn verbs_are_gated_by_the_configurations_version() {
    let incompatible = |msg: &str| Err(CniError::new(1, msg));
    for (command, version, expected) in [
        ("CHECK", "0.3.1", incompatible("config version does not allow CHECK")), // ENV-18
        ("CHECK", "", incompatible("config version does not allow CHECK")),
        ("GC", "1.0.0", incompatible("config version does not allow GC")), // ENV-19
        ("STATUS", "1.0.0", incompatible("config version does not allow STATUS")), // ENV-19
        ("CHECK", "1.2.0", incompatible("plugin version does not allow CHECK")), // ENV-20
        ("GC", "2.0.0", incompatible("plugin version does not allow GC")), // ENV-20
        ("STATUS", "1.1.1", incompatible("plugin version does not allow STATUS")), // ENV-20
        // ENV-16
        ("GC", "x", Err(CniError::new(6, "key cniVersion: \"x\" is not a version such as 1.1.0"))),
        ("CHECK", "0.4.0", Ok(Version::V0_4_0)),
        ("GC", "1.1.0", Ok(Version::V1_1_0)),
        ("STATUS", "1.1.0", Ok(Version::V1_1_0)),
        ("DEL", "0.1.0", Ok(Version::V0_1_0)),
        ("ADD", "", Ok(Version::V0_1_0)), // VER-02
    ] {
        let version = parse(command, &[], config(version)).map(|request| request.version);
        assert_eq!(version, expected, "{command}");
    }
}

/// Rows: REQ-11.
#[test]
fn gc_accepts_either_key_and_tells_absent_from_empty() {
    let gc = |key: &str, value: Value| {
        let mut config = config("1.1.0");
        config.as_object_mut().unwrap().insert(key.into(), value);
        parse("GC", &ALL_REPLACED[..3], config).map(|request| request.valid_attachments)
    };
    let entry = json!([{"containerID": "c", "ifname": "eth0"}]);
    let id = AttachmentId { container_id: "c".into(), ifname: "eth0".into() };
    assert_eq!(gc("cni.dev/valid-attachments", entry.clone()), Ok(Some(vec![id.clone()])));
    assert_eq!(gc("cni.dev/attachments", entry), Ok(Some(vec![id])));
    assert_eq!(gc("cni.dev/attachments", json!([])), Ok(Some(vec![])));
    assert_eq!(gc("other", json!([])), Ok(None));
    assert_eq!(
        gc("cni.dev/attachments", json!([{"containerID": "c"}])),
        Err(CniError::new(6, "key cni.dev/attachments: [0]: missing field `ifname`"))
    );
}

/// Rows: ENV-31.
#[test]
fn a_malformed_args_variable_is_refused_at_add() {
    // ENV-31
    let error = parse("ADD", &[("CNI_ARGS", "A=1;B")], config("1.0.0")).unwrap_err();
    assert_eq!(error, CniError::new(4, "ARGS: invalid pair \"B\""));
}

/// Rows: CNV-12.
#[test]
fn the_previous_result_must_be_of_the_configurations_family() {
    let prev = |version: &str, prev: Value| {
        let mut config = config(version);
        config.as_object_mut().unwrap().insert("prevResult".into(), prev);
        parse("ADD", &[], config).unwrap().prev_result()
    };
    let one = CniResult { ips: vec![IpConfig::new("10.0.0.2/24".parse().unwrap())], ..CniResult::default() };
    let ips = json!([{"address": "10.0.0.2/24"}]);
    assert_eq!(prev("1.0.0", json!({"cniVersion": "1.1.0", "ips": ips})), Ok(Some(one.clone())));
    assert_eq!(prev("1.0.0", json!({"CNIVersion": "1.1.0", "ips": ips})), Ok(Some(one.clone())));
    assert_eq!(prev("0.4.0", json!({"ips": ips})), Ok(Some(one)));
    assert_eq!(prev("1.0.0", Value::Null), Ok(None));
    assert_eq!(
        prev("1.0.0", json!({"cniVersion": "0.4.0", "ips": ips})),
        Err(CniError::new(
            6,
            "could not parse prevResult: its version 0.4.0 has another shape than the configuration's 1.0.0"
        ))
    );
}

#[test]
fn an_unreadable_request_is_answered_in_the_latest_version() {
    for (stdin, version) in [
        ("{", Version::LATEST),
        (r#"{"cniVersion":"9.0.0"}"#, Version::LATEST),
        (r#"{"cniVersion":"0.3.1"}"#, Version::V0_3_1),
        ("{}", Version::V0_1_0),
    ] {
        assert_eq!(error_version(stdin.as_bytes()), version);
    }
}

proptest! {
    #[test]
    fn any_environment_and_bytes_are_read_or_refused(
        command in "ADD|DEL|CHECK|GC|STATUS|VERSION|.{0,3}",
        values in proptest::collection::vec(".{0,20}", 6),
        stdin in proptest::collection::vec(any::<u8>(), 0..100),
    ) {
        let names = ["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_PATH", "CNI_ARGS", "CNI_NETNS_OVERRIDE"];
        let mut vars = env(&[("CNI_COMMAND", &command)]);
        vars.extend(names.iter().zip(&values).map(|(name, value)| ((*name).to_owned(), value.clone())));
        let _ = Request::parse(&vars, &stdin);
    }

    #[test]
    fn any_document_is_read_or_refused(
        command in "ADD|DEL|CHECK|GC|STATUS",
        config in crate::cni::result::arbitrary::document(&[
            "cniVersion", "name", "prevResult", "cni.dev/attachments", "cni.dev/valid-attachments",
            "containerID", "ifname", "type", "ips", "runtimeConfig",
        ]),
    ) {
        if let Ok(request) = parse(&command, &[], config) {
            let _ = request.prev_result();
            let _ = request.plugin();
            let _ = request.runtime_config("mac");
        }
    }
}
