//! The privileges that a pod's manifest gives its containers over the pod's network.

use serde::Deserialize;

use crate::objects::budget::Bounded;
use crate::objects::{Grant, Powers};

/// Most capabilities of a list that are read; Linux has 41.
const MOST: usize = 128;

/// `securityContext` of a container, reduced to capabilities.
#[derive(Debug, Deserialize)]
pub(in crate::source) struct SecurityContext {
    privileged: Option<bool>,
    capabilities: Option<Capabilities>,
}

#[derive(Debug, Deserialize)]
struct Capabilities {
    add: Option<Bounded<String, MOST>>,
    drop: Option<Bounded<String, MOST>>,
}

/// The privileges of a pod with these containers: name and security context.
///
/// Anything left unspecified counts as granted: container runtimes give `CAP_NET_RAW` to containers that do not drop it
/// (containerd and Docker do, CRI-O does not), and it does not matter whether a process runs as root, as files in its
/// image can give it its container's capabilities.
pub(in crate::source) fn powers<'a>(
    containers: impl Iterator<Item = (&'a str, Option<&'a SecurityContext>)> + Clone,
) -> Powers {
    if containers.clone().next().is_none() {
        return Powers::default();
    }
    let grant = |has: fn(&SecurityContext) -> bool, unless_said: bool| {
        let mut with = containers.clone().filter(|(_, context)| context.map_or(unless_said, has));
        with.next().map_or(Grant::No, |(name, _)| Grant::To(name.to_owned()))
    };
    Powers {
        admin: grant(|context| context.adds("NET_ADMIN") || context.adds("SYS_ADMIN"), false),
        raw: grant(|context| context.adds("NET_RAW") || !context.drops("NET_RAW"), true),
        // Not determined by the containers.
        own_runtime: false,
    }
}

impl SecurityContext {
    fn adds(&self, capability: &str) -> bool {
        let added = self.capabilities.as_ref().and_then(|of| of.add.as_ref());
        // The capability may be among those that were not read.
        let may_name = |added: &Bounded<String, MOST>| added.has_more || names(&added.items, capability);
        self.privileged == Some(true) || added.is_some_and(may_name)
    }

    fn drops(&self, capability: &str) -> bool {
        let dropped = self.capabilities.as_ref().and_then(|of| of.drop.as_ref());
        dropped.is_some_and(|dropped| names(&dropped.items, capability))
    }
}

/// Whether a list names a capability. Runtimes accept names in any case and with or without their prefix.
fn names(list: &[String], capability: &str) -> bool {
    list.iter().any(|written| {
        let written = written.to_ascii_uppercase();
        let written = written.strip_prefix("CAP_").unwrap_or(&written);
        written == capability || written == "ALL"
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::source::read::security_context::*;

    fn of(contexts: &[serde_json::Value]) -> Powers {
        let read =
            |context: &serde_json::Value| serde_json::from_value::<Option<SecurityContext>>(context.clone());
        let read: Vec<_> = contexts.iter().map(|context| read(context).unwrap()).collect();
        let names = ["first", "second"];
        powers(names.into_iter().zip(read.iter().map(Option::as_ref)))
    }

    #[test]
    fn a_capability_is_had_by_whoever_adds_it_or_does_not_drop_what_runtimes_give() {
        let to = |name: &str| Grant::To(name.to_owned());
        let bare = json!({"capabilities": {"drop": ["ALL"]}});
        let table = [
            (vec![], Grant::Unknown, Grant::Unknown),
            (vec![json!(null)], Grant::No, to("first")),
            (vec![json!({"runAsNonRoot": true})], Grant::No, to("first")),
            (vec![bare.clone()], Grant::No, Grant::No),
            (vec![json!({"capabilities": {"drop": ["cap_net_raw"]}})], Grant::No, Grant::No),
            (vec![bare.clone(), json!({"privileged": true})], to("second"), to("second")),
            (
                vec![bare.clone(), json!({"capabilities": {"add": ["NET_ADMIN"], "drop": ["all"]}})],
                to("second"),
                Grant::No,
            ),
            (
                vec![json!({"capabilities": {"add": ["SYS_ADMIN"], "drop": ["NET_RAW"]}})],
                to("first"),
                Grant::No,
            ),
            (vec![json!({"capabilities": {"add": ["ALL"], "drop": ["ALL"]}})], to("first"), to("first")),
            (
                vec![json!({"capabilities": {"add": vec!["CHOWN"; MOST + 1], "drop": ["ALL"]}})],
                to("first"),
                to("first"),
            ),
        ];
        for (contexts, admin, raw) in table {
            assert_eq!(of(&contexts), Powers { admin, raw, own_runtime: false }, "{contexts:?}");
        }
    }
}
