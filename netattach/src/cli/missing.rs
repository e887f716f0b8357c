//! Messages for names that do not exist, listing those that do.

use std::collections::BTreeSet;

use super::filter::Chosen;
use crate::rpc::message::AttachmentName;

/// Most existing names that are listed.
const LISTED: usize = 10;

impl Chosen {
    /// Whether the filter excludes anything.
    fn is_set(&self) -> bool {
        let Self { namespace, pod, network, selected, container } = self;
        namespace.is_some() || pod.is_some() || network.is_some() || selected.is_some() || container.is_some()
    }

    /// Explains why none of these attachments matches. `None` if one does, or if the filter is not set.
    pub(super) fn missing<'n>(
        &self,
        names: impl Iterator<Item = &'n AttachmentName> + Clone,
    ) -> Option<String> {
        if !self.is_set() || names.clone().any(|name| self.matches(name)) {
            return None;
        }
        let pods: BTreeSet<String> =
            names.clone().filter_map(|name| name.pod.as_ref()).map(ToString::to_string).collect();
        let networks_of = |wanted: &Self| -> BTreeSet<&str> {
            names.clone().filter(|name| wanted.matches(name)).map(|name| name.network.as_str()).collect()
        };
        if let Some((selector, _)) = &self.selected {
            return Some(format!(
                "no pod with labels {selector} that matches is attached on this node; {}",
                are(pods, "pods")
            ));
        }
        if let Some((id, of)) = &self.container {
            let others: BTreeSet<String> = of.iter().map(super::filter::line_name).collect();
            return Some(format!("no attachment of container {id} matches; it has {}", list(others)));
        }
        if let (Some(namespace), None) = (&self.namespace, &self.pod)
            && !names.clone().any(|name| name.pod.as_ref().is_some_and(|pod| pod.namespace == *namespace))
        {
            return Some(format!(
                "no pod of namespace {namespace} is attached on this node; {}",
                are(pods, "pods")
            ));
        }
        let of_pod = networks_of(&Self { pod: self.pod.clone(), ..Self::default() });
        Some(match (&self.pod, &self.network) {
            (Some(pod), Some(network)) if !of_pod.is_empty() => {
                format!(
                    "pod {pod} is not attached to network {network} on this node; it is attached to {}",
                    list(of_pod)
                )
            }
            (Some(pod), _) => {
                format!("pod {pod} is not attached on this node; {}", are(pods, "pods"))
            }
            (None, Some(network)) => {
                let all = networks_of(&Self { namespace: self.namespace.clone(), ..Self::default() });
                format!("no pod of this node is attached to network {network}; {}", are(all, "networks"))
            }
            (None, None) => return None,
        })
    }
}

fn are<T: AsRef<str>>(names: BTreeSet<T>, what: &str) -> String {
    if names.is_empty() {
        "nothing is attached".to_owned()
    } else {
        format!("attached {what}: {}", list(names))
    }
}

/// The first names, separated by commas, and the number of the others.
pub(super) fn list<T: AsRef<str>>(names: impl IntoIterator<Item = T>) -> String {
    let mut names = names.into_iter();
    let shown: Vec<T> = names.by_ref().take(LISTED).collect();
    let shown = shown.iter().map(AsRef::as_ref).collect::<Vec<_>>().join(", ");
    match names.count() {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::name;
    use super::*;

    #[test]
    fn a_missing_object_is_reported_with_the_existing_ones() {
        let names = [
            name(1, "shop/cart", "kube-system/default", "eth0"),
            name(2, "shop/cart", "shop/lan", "net1"),
            name(3, "shop/db", "shop/storage", "net1"),
        ];
        let said = |pod: Option<&str>, network: Option<&str>| {
            let chosen = Chosen {
                pod: pod.map(|pod| pod.parse().unwrap()),
                network: network.map(str::to_owned),
                ..Chosen::default()
            };
            chosen.missing(names.iter())
        };
        assert_eq!(said(None, None), None);
        assert_eq!(said(Some("shop/cart"), Some("lan")), None);
        assert_eq!(
            said(Some("nope/nope"), None).as_deref(),
            Some("pod nope/nope is not attached on this node; attached pods: shop/cart, shop/db")
        );
        assert_eq!(
            said(None, Some("wan")).as_deref(),
            Some(
                "no pod of this node is attached to network wan; attached networks: kube-system/default, shop/lan, shop/storage"
            )
        );
        assert_eq!(
            said(Some("shop/cart"), Some("storage")).as_deref(),
            Some(
                "pod shop/cart is not attached to network storage on this node; it is attached to kube-system/default, shop/lan"
            )
        );
        let chosen = Chosen { pod: Some("a/b".parse().unwrap()), ..Chosen::default() };
        assert_eq!(
            chosen.missing([].iter()).as_deref(),
            Some("pod a/b is not attached on this node; nothing is attached")
        );
        let chosen = Chosen { namespace: Some("ops".into()), ..Chosen::default() };
        assert_eq!(
            chosen.missing(names.iter()).as_deref(),
            Some("no pod of namespace ops is attached on this node; attached pods: shop/cart, shop/db")
        );
        let chosen = Chosen { selected: Some(("app=x".into(), [].into())), ..Chosen::default() };
        assert_eq!(
            chosen.missing(names.iter()).as_deref(),
            Some(
                "no pod with labels app=x that matches is attached on this node; attached pods: shop/cart, shop/db"
            )
        );
        let container = Some(("c1".into(), vec![names[2].clone()]));
        let chosen = Chosen { container, network: Some("lan".into()), ..Chosen::default() };
        assert_eq!(
            chosen.missing(names.iter()).as_deref(),
            Some("no attachment of container c1 matches; it has shop/db/net1")
        );
    }

    #[test]
    fn a_list_ends_somewhere() {
        assert_eq!(list(["a", "b"]), "a, b");
        let many: Vec<String> = (0..25).map(|number| number.to_string()).collect();
        assert_eq!(list(&many), "0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 15 more");
    }
}
