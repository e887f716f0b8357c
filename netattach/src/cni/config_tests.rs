//! Tests of [`super`]: loading and version negotiation of network configurations.

use proptest::prelude::*;
use serde_json::json;

use super::*;

fn parse(value: Value) -> Result<NetworkList, ConfigError> {
    NetworkList::parse(value.to_string().as_bytes())
}

fn refusal(value: Value) -> String {
    let error = parse(value).unwrap_err();
    Chain(&error).to_string()
}

fn list_with(mut extra: Value) -> Value {
    let map = extra.as_object_mut().unwrap();
    map.entry("name").or_insert("n".into());
    map.entry("plugins").or_insert(json!([{"type": "a"}]));
    extra
}

/// Rows: CFG-20.
#[test]
fn a_list_keeps_every_key_at_both_levels() {
    let value = json!({
        "cniVersion": "1.0.0", "name": "n", "author": {"x": [1]},
        "plugins": [{"type": "a", "big": 9007199254740993_u64, "nested": {"z": null, "a": 1}}, {"type": "b"}],
        "disableCheck": true, "disableGC": "TRUE", "loadOnlyInlinedPlugins": "true",
    });
    let list = parse(value.clone()).unwrap();
    assert_eq!(list.to_value(), value);
    assert_eq!(list.get("author"), Some(&json!({"x": [1]})));
    assert_eq!((list.name.as_str(), list.version), ("n", Version::V1_0_0));
    assert_eq!((list.disable_check, list.disable_gc, list.only_inlined), (true, true, true));
    assert_eq!(list.plugins.iter().map(PluginConf::plugin_type).collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(list.plugins[0].raw()["big"].as_u64(), Some(9007199254740993));
    assert_eq!(NetworkList::from_map(list.to_value().as_object().unwrap().clone()).unwrap(), list);
}

/// Rows: CHK-07.
#[test]
fn the_switches_of_a_list_mean_nothing_in_a_single_plugin_and_are_handed_on() {
    let value =
        json!({"cniVersion": "1.1.0", "name": "n", "type": "a", "disableCheck": true, "disableGC": true});
    let list = parse(value.clone()).unwrap();
    assert_eq!((list.disable_check, list.disable_gc), (false, false));
    assert_eq!(Value::Object(list.plugins[0].raw().clone()), value);
}

/// Rows: CFG-13.
#[test]
fn a_single_plugin_becomes_a_list_of_one_with_the_whole_object() {
    let value = json!({"cniVersion": "0.3.1", "name": "n", "type": "a", "mtu": 1400});
    let list = parse(value.clone()).unwrap();
    assert_eq!((list.name.as_str(), list.version), ("n", Version::V0_3_1));
    assert_eq!(Value::Object(list.plugins[0].raw().clone()), value);
    assert_eq!(list.plugins.len(), 1);
    assert_eq!(
        NetworkList::from_map(list.to_value().as_object().unwrap().clone()).unwrap().plugins,
        list.plugins
    );
}

/// Rows: CFG-02, NPWG-3.4.2-inject-name-conf, NPWG-3.4.2-inject-name-list, NPWG-3.4.2-keep-name.
#[test]
fn a_configuration_without_a_name_takes_the_given_one() {
    for value in [json!({"type": "a"}), json!({"plugins": [{"type": "a"}], "name": ""})] {
        let bytes = value.to_string();
        assert_eq!(parse(value).unwrap_err().to_string(), "key name: missing");
        let list = NetworkList::parse_with_default_name(bytes.as_bytes(), "nad").unwrap();
        assert_eq!(list.name, "nad");
    }
    let list = NetworkList::parse_with_default_name(br#"{"type":"a","name":"own"}"#, "nad").unwrap();
    assert_eq!(list.name, "own");
}

/// Rows: CFG-02, CFG-03, CFG-04, CFG-07, CFG-08.
#[test]
fn what_is_wrong_is_named_by_its_key() {
    for (value, message) in [
        (json!([]), "key .: expected an object, found an array"),
        (json!({"name": "n"}), "keys plugins and type are both missing"),
        (json!({"name": 5, "type": "a"}), "key name: expected a string, found a number"),
        (list_with(json!({"cniVersion": 1})), "key cniVersion: expected a string, found a number"),
        (list_with(json!({"disableCheck": "yes"})), "key disableCheck: invalid value \"yes\""),
        (list_with(json!({"disableGC": 1})), "key disableGC: expected a boolean, found a number"),
        (list_with(json!({"plugins": {}})), "key plugins: expected an array, found an object"),
        (list_with(json!({"plugins": []})), "key plugins: no plugins in list"),
        (
            list_with(json!({"plugins": [{"type": "a"}, {}]})),
            "plugin 1 of the list: key type: expected a string, found null",
        ),
        (list_with(json!({"plugins": [{"type": ""}]})), "plugin 0 of the list: key type: invalid value \"\""),
        (
            list_with(json!({"plugins": [null]})),
            "plugin 0 of the list: key .: expected an object, found null",
        ),
        (
            list_with(json!({"plugins": [{"type": "a", "capabilities": {"mac": "yes"}}]})),
            "plugin 0 of the list: key capabilities.mac: expected a boolean, found a string",
        ),
        (
            list_with(json!({"plugins": [{"type": "a", "ipam": "host-local"}]})),
            "plugin 0 of the list: key ipam: expected an object, found a string",
        ),
    ] {
        assert_eq!(refusal(value), message);
    }
}

/// Rows: CFG-18.
#[test]
fn the_grammar_of_a_name_is_not_checked_here() {
    assert_eq!(parse(json!({"name": "a/b", "type": "t"})).unwrap().name, "a/b");
}

/// Rows: CFG-01.
#[test]
fn text_that_is_not_json_is_a_decoding_failure() {
    let error = NetworkList::parse(b"{").unwrap_err();
    assert_eq!(error.to_string(), "parse network configuration");
    assert_eq!(CniError::from(error).code, code::DECODING_FAILURE);
}

/// Rows: CFG-06, CFG-05.
#[test]
fn a_list_file_may_leave_its_plugins_to_the_folder() {
    assert_eq!(NetworkList::parse_list(br#"{"name":"n"}"#).unwrap().plugins, []);
    let inlined = NetworkList::parse_list(br#"{"name":"n","loadOnlyInlinedPlugins":true}"#);
    assert!(matches!(inlined, Err(ConfigError::NoPlugins)));
}

/// Rows: VER-02, VER-15, VER-16, VER-17, VER-18.
#[test]
fn the_newest_common_version_is_chosen() {
    for (value, version) in [
        (json!({}), Version::V0_1_0),
        (json!({"cniVersions": ["0.3.1", "1.1.0", "99.0.0"]}), Version::V1_1_0),
        (json!({"cniVersions": ["0.3.1"], "cniVersion": "1.0.0"}), Version::V1_0_0),
        (json!({"cniVersions": ["99.0.0"], "cniVersion": "1.0.0"}), Version::V1_0_0),
        (json!({"cniVersions": []}), Version::V0_1_0), // Sent as 0.1.0, which "" means
        (json!({"cniVersions": ["1.0"]}), Version::V1_0_0),
    ] {
        assert_eq!(parse(list_with(value.clone())).unwrap().version, version, "{value}");
    }
}

/// Rows: VER-19, VER-20, VER-21.
#[test]
fn versions_that_cannot_be_used_are_refused_by_name() {
    let supported = "(supported: 0.1.0, 0.2.0, 0.3.0, 0.3.1, 0.4.0, 1.0.0, 1.1.0)";
    for (value, code, message) in [
        // Refused here instead of by each plugin in turn; the outcome of ADD is the same.
        (
            json!({"cniVersion": "1.2.3"}),
            1,
            format!("key cniVersion: version \"1.2.3\" is not supported {supported}"),
        ),
        (
            json!({"cniVersions": ["99.0.0"]}),
            1,
            format!("key cniVersions: version \"99.0.0\" is not supported {supported}"),
        ),
        (
            json!({"cniVersions": ["1.0.0", "abc"]}),
            6,
            "key cniVersions[1]: \"abc\" is not a version such as 1.1.0".to_owned(),
        ),
        (json!({"cniVersions": "1.0.0"}), 7, "key cniVersions: expected an array, found a string".to_owned()),
        (json!({"cniVersions": [1]}), 7, "key cniVersions[0]: expected a string, found a number".to_owned()),
        (
            json!({"cniVersions": ["1.0.0"], "cniVersion": "x"}),
            6,
            "key cniVersion: \"x\" is not a version such as 1.1.0".to_owned(),
        ),
    ] {
        let error = parse(list_with(value)).unwrap_err();
        assert_eq!((error.code(), Chain(&error).to_string()), (code, message));
    }
}

#[test]
fn a_section_error_names_the_path() {
    #[derive(Debug, PartialEq, serde::Deserialize)]
    struct Bridge {
        mtu: u32,
    }
    let plugin = |value: Value| PluginConf::new(value.as_object().unwrap().clone()).unwrap();
    assert_eq!(plugin(json!({"type": "bridge", "mtu": 9})).section::<Bridge>().unwrap(), Bridge { mtu: 9 });
    let error = plugin(json!({"type": "bridge", "mtu": -1})).section::<Bridge>().unwrap_err();
    assert_eq!(CniError::from(error), CniError::new(7, "key mtu: invalid value: integer `-1`, expected u32"));
}

#[test]
fn shared_keys_of_a_plugin_are_read_in_one_place() {
    let plugin = PluginConf::new(
        json!({"type": "a", "ipam": {"type": "host-local"}, "capabilities": {"mac": true, "ips": false, "x": true}})
            .as_object()
            .unwrap()
            .clone(),
    )
    .unwrap();
    assert_eq!((plugin.plugin_type(), plugin.ipam_type()), ("a", Some("host-local")));
    assert_eq!(plugin.capabilities().collect::<Vec<_>>(), ["mac", "x"]);
}

proptest! {
    #[test]
    fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = NetworkList::parse(&bytes);
        let _ = NetworkList::parse_list(&bytes);
    }

    #[test]
    fn any_document_is_read_or_refused_and_what_is_read_survives_writing(
        value in crate::cni::result::arbitrary::document(&[
            "name", "type", "plugins", "cniVersion", "cniVersions", "disableCheck", "disableGC", "ipam",
            "capabilities", "loadOnlyInlinedPlugins",
        ]),
    ) {
        if let Value::Object(map) = value
            && let Ok(list) = NetworkList::from_map(map)
        {
            let Value::Object(again) = list.to_value() else { panic!("a list is an object") };
            prop_assert_eq!(NetworkList::from_map(again).unwrap().plugins, list.plugins);
        }
    }
}
