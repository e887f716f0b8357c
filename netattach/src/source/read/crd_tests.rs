//! Checks that objects refused by the CustomResourceDefinition of NetworkAttachmentDefinition in `deploy` are refused
//! here as well.

use serde_json::json;

use super::*;
use crate::source::files::documents::{yaml, yaml_documents};

fn crd() -> Value {
    let text = include_str!("../../../../deploy/base/crds/network-attachment-definitions.yaml");
    yaml(yaml_documents(text).next().unwrap()).unwrap()
}

/// Whether an API server accepts an object: the name it always requires, and the types of the schema.
fn accepted_by_the_schema(schema: &Value, object: &Value) -> bool {
    let named = object["metadata"]["name"].as_str().is_some_and(|name| !name.is_empty());
    named && fits(schema, object)
}

fn fits(schema: &Value, value: &Value) -> bool {
    match schema["type"].as_str() {
        Some("string") => value.is_string(),
        Some("object") => value.as_object().is_some_and(|object| {
            let properties = schema["properties"].as_object().into_iter().flatten();
            let mut known = properties.filter_map(|(key, schema)| Some((schema, object.get(key)?)));
            known.all(|(schema, value)| fits(schema, value))
        }),
        other => panic!("type {other:?} is in the schema"),
    }
}

/// Rows: NPWG-3.1-crd-identity.
#[test]
fn the_definition_to_install_has_the_names_of_the_standard() {
    let spec = &crd()["spec"];
    let names = &spec["names"];
    let versions: Vec<&Value> = spec["versions"].as_array().unwrap().iter().collect();
    assert_eq!(crd()["metadata"]["name"], "network-attachment-definitions.k8s.cni.cncf.io");
    assert_eq!((&spec["group"], &spec["scope"]), (&json!("k8s.cni.cncf.io"), &json!("Namespaced")));
    assert_eq!(names["kind"], "NetworkAttachmentDefinition");
    assert_eq!(names["plural"], "network-attachment-definitions");
    assert_eq!(names["singular"], "network-attachment-definition");
    assert_eq!(names["shortNames"], json!(["net-attach-def", "nad"]));
    let [version] = versions[..] else { panic!("one version") };
    assert_eq!(
        (&version["name"], &version["served"], &version["storage"]),
        (&json!("v1"), &json!(true), &json!(true))
    );
}

/// Rows: NPWG-3.1-config-is-string, NPWG-3.2-spec-optional, NPWG-3.2-name-mandatory.
#[test]
fn what_the_definition_refuses_no_manifest_may_say() {
    let crd = crd();
    let schema = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
    let table = [
        (json!({"name": "a"}), json!({"config": "{}"}), true),
        (json!({"name": "a"}), json!({}), true),
        (json!({"name": "a"}), Value::Null, true),
        (json!({"name": "a"}), json!({"config": {"type": "bridge"}}), false),
        (json!({"name": "a"}), json!({"config": ["{}"]}), false),
        (json!({"name": "a"}), json!({"config": 3}), false),
        (json!({"name": "a"}), json!(["{}"]), false),
        (json!({"name": "a"}), json!("{}"), false),
        (json!({}), json!({"config": "{}"}), false),
        (json!({"name": ""}), json!({"config": "{}"}), false),
    ];
    for (metadata, spec, accepted) in table {
        let mut object = json!({
            "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition", "metadata": metadata
        });
        if !spec.is_null() {
            object["spec"] = spec;
        }
        assert_eq!(accepted_by_the_schema(schema, &object), accepted, "schema: {object}");
        let read = objects(&object).remove(0);
        assert_eq!(read.is_ok(), accepted, "manifest: {object}");
    }
}
