//! The effects of writing verbs on the objects.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use super::kinds::{Kind, PODS};
use super::merge::merge;
use super::query::ObjectPath;
use super::status::Failure;
use super::store::{Key, Store};

/// The behaviour of a server for a patch whose `metadata.uid` is another object's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ForeignUid {
    /// 422: the field is immutable.
    Invalid,
    /// 409: a precondition failed.
    Conflict,
}

/// The requests of `DeleteOptions`.
#[derive(Debug, Default)]
pub(super) struct Deletion {
    pub(super) grace: Option<u64>,
    pub(super) uid: Option<String>,
}

/// The object that was deleted, or is about to be.
#[derive(Debug)]
pub(super) enum Deleted {
    Now(Arc<Value>),
    Later(Arc<Value>),
}

/// The key of an object.
pub(super) fn key(kind: &'static Kind, namespace: Option<&str>, name: &str) -> Key {
    (kind.resource, namespace.unwrap_or_default().to_owned(), name.to_owned())
}

/// Decides whether a write is admitted, given the present object, if there is one, and the new object.
pub(super) type Admit<'a> = &'a dyn Fn(Option<&Value>, &Value) -> Result<(), Failure>;

/// Creates an object. With `None` for `admit` it is the test's own: its `uid` and other fields of the server are
/// kept.
pub(super) fn create(
    store: &mut Store,
    kind: &'static Kind,
    namespace: Option<&str>,
    mut object: Value,
    admit: Option<Admit<'_>>,
) -> Result<Arc<Value>, Failure> {
    let trusted = admit.is_none();
    if !object["metadata"].is_object() {
        return Err(Failure::bad_request("the object has no metadata".to_owned()));
    }
    let metadata = &mut object["metadata"];
    let uid = random_uid();
    if let (None, Some(prefix)) = (metadata["name"].as_str(), metadata["generateName"].as_str()) {
        metadata["name"] = json!(format!("{prefix}{}", &uid[..5]));
    }
    let Some(name) = metadata["name"].as_str().map(str::to_owned) else {
        return Err(Failure::invalid(
            kind,
            "",
            "metadata.name",
            "Required value: name or generateName is required",
        ));
    };
    if let Some(namespace) = namespace {
        if metadata["namespace"].as_str().is_some_and(|own| own != namespace) {
            let why = "the namespace of the provided object does not match the namespace sent on the request";
            return Err(Failure::bad_request(why.to_owned()));
        }
        metadata["namespace"] = json!(namespace);
    }
    let key = key(kind, namespace, &name);
    if store.get(&key).is_some() {
        return Err(Failure::exists(kind, &name));
    }
    if !trusted || metadata["uid"].is_null() {
        metadata["uid"] = json!(uid);
    }
    if !trusted || metadata["creationTimestamp"].is_null() {
        metadata["creationTimestamp"] = json!(now());
    }
    metadata["generation"] = json!(1);
    if !trusted && kind.status {
        object["status"] = if *kind == PODS { json!({"phase": "Pending"}) } else { json!({}) };
    }
    if let Some(admit) = admit {
        admit(None, &object)?;
    }
    Ok(store.commit(key, Some(without_type(object))))
}

/// Replaces an object (PUT), or its status.
pub(super) fn replace(
    store: &mut Store,
    path: &ObjectPath,
    new: Value,
    admit: Admit<'_>,
) -> Result<Arc<Value>, Failure> {
    change(store, path, ForeignUid::Conflict, admit, |_| new)
}

/// Applies a merge patch to an object, or to its status.
pub(super) fn patch(
    store: &mut Store,
    path: &ObjectPath,
    patch: &Value,
    foreign: ForeignUid,
    admit: Admit<'_>,
) -> Result<Arc<Value>, Failure> {
    change(store, path, foreign, admit, |mut object| {
        merge(&mut object, patch);
        object
    })
}

fn change(
    store: &mut Store,
    path: &ObjectPath,
    foreign: ForeignUid,
    admit: Admit<'_>,
    edit: impl FnOnce(Value) -> Value,
) -> Result<Arc<Value>, Failure> {
    let kind = path.kind;
    let name = path.name.as_deref().unwrap_or_default();
    let key = key(kind, path.namespace.as_deref(), name);
    let old = store.get(&key).ok_or_else(|| Failure::not_found(kind, name))?;
    let mut new = without_type(edit(old.as_ref().clone()));
    if !new["metadata"].is_object() {
        return Err(Failure::bad_request("the object has no metadata".to_owned()));
    }
    check_identity(kind, name, &old, &new, foreign)?;
    for field in
        ["namespace", "uid", "creationTimestamp", "deletionTimestamp", "resourceVersion", "generation"]
    {
        set(&mut new["metadata"], field, old["metadata"].get(field));
    }
    match path.subresource.as_deref() {
        Some("status") => {
            set(&mut new["metadata"], "ownerReferences", old["metadata"].get("ownerReferences"));
            set(&mut new, "spec", old.get("spec"));
        }
        _ if kind.status => set(&mut new, "status", old.get("status")),
        _ => {}
    }
    admit(Some(&old), &new)?;
    if new == *old {
        return Ok(old);
    }
    if kind.custom && new["spec"] != old["spec"] {
        let generation = old["metadata"]["generation"].as_u64().unwrap_or(0) + 1;
        new["metadata"]["generation"] = json!(generation);
    }
    Ok(store.commit(key, Some(new)))
}

/// Checks the object's name, uid and version against those of the write, if it has them.
fn check_identity(
    kind: &Kind,
    name: &str,
    old: &Value,
    new: &Value,
    foreign: ForeignUid,
) -> Result<(), Failure> {
    let said = |field: &str| new["metadata"][field].as_str();
    if said("name").is_some_and(|said| said != name) {
        let why = format!(
            "the name of the object ({}) does not match the name on the URL ({name})",
            new["metadata"]["name"]
        );
        return Err(Failure::bad_request(why));
    }
    let uid = old["metadata"]["uid"].as_str();
    match said("uid") {
        Some(said) if Some(said) != uid => {
            return Err(match foreign {
                ForeignUid::Invalid => {
                    let why = format!("Invalid value: {said:?}: field is immutable");
                    Failure::invalid(kind, name, "metadata.uid", &why)
                }
                ForeignUid::Conflict => {
                    let uid = uid.unwrap_or_default();
                    let why = format!(
                        "Precondition failed: UID in precondition: {said}, UID in object meta: {uid}"
                    );
                    Failure::conflict(kind, name, &why)
                }
            });
        }
        _ => {}
    }
    if said("resourceVersion").is_some_and(|said| Some(said) != old["metadata"]["resourceVersion"].as_str()) {
        let why =
            "the object has been modified; please apply your changes to the latest version and try again";
        return Err(Failure::conflict(kind, name, why));
    }
    Ok(())
}

/// Deletes an object, at once or after its grace period: then it gets a `deletionTimestamp` first. Pods with a node
/// have 30 s by default.
pub(super) fn delete(
    store: &mut Store,
    kind: &'static Kind,
    namespace: Option<&str>,
    name: &str,
    asked: &Deletion,
) -> Result<Deleted, Failure> {
    let key = key(kind, namespace, name);
    let old = store.get(&key).ok_or_else(|| Failure::not_found(kind, name))?;
    let uid = old["metadata"]["uid"].as_str().unwrap_or_default();
    if let Some(asked) = asked.uid.as_deref().filter(|asked| *asked != uid) {
        let why = format!("Precondition failed: UID in precondition: {asked}, UID in object meta: {uid}");
        return Err(Failure::conflict(kind, name, &why));
    }
    let on_a_node = *kind == PODS && old["spec"]["nodeName"].as_str().is_some_and(|node| !node.is_empty());
    let grace = asked.grace.unwrap_or(if on_a_node { 30 } else { 0 });
    let finalized = old["metadata"]["finalizers"].as_array().is_some_and(|list| !list.is_empty());
    if (*kind == PODS && grace > 0) || finalized {
        if !old["metadata"]["deletionTimestamp"].is_null() {
            return Ok(Deleted::Later(old));
        }
        let mut ending = old.as_ref().clone();
        ending["metadata"]["deletionTimestamp"] = json!(now());
        ending["metadata"]["deletionGracePeriodSeconds"] = json!(grace);
        return Ok(Deleted::Later(store.commit(key, Some(ending))));
    }
    Ok(Deleted::Now(store.commit(key, None)))
}

fn set(target: &mut Value, field: &str, value: Option<&Value>) {
    let Value::Object(map) = target else { return };
    match value {
        Some(value) => {
            map.insert(field.to_owned(), value.clone());
        }
        None => {
            map.shift_remove(field);
        }
    }
}

/// Objects are kept without `apiVersion` and `kind`: those depend on the version that is asked for.
pub(super) fn without_type(mut object: Value) -> Value {
    set(&mut object, "apiVersion", None);
    set(&mut object, "kind", None);
    object
}

/// A random `uid`.
pub(super) fn random_uid() -> String {
    let uid = std::fs::read_to_string("/proc/sys/kernel/random/uuid");
    uid.expect("the kernel has random UUIDs").trim().to_owned()
}

/// Now, as timestamps of objects are written.
pub(super) fn now() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = date(days);
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", rest / 3600, rest / 60 % 60, rest % 60)
}

/// Returns the date of a day after 1970-01-01 (proleptic Gregorian): years begin in March, so that a leap day is the
/// last day of its year.
fn date(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    (year, month, day)
}
