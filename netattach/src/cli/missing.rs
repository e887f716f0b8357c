//! Messages for names that do not exist, listing those that do.

use std::collections::BTreeSet;

use super::Filter;
use crate::rpc::message::AttachmentName;

/// Most existing names that are listed.
const LISTED: usize = 10;

impl Filter {
    /// Whether the filter excludes anything.
    pub(super) fn is_set(&self) -> bool {
        self.pod.is_some() || self.network.is_some()
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
        let of_pod = networks_of(&Self { pod: self.pod.clone(), network: None });
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
                let all = networks_of(&Self::default());
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
            let filter =
                Filter { pod: pod.map(|pod| pod.parse().unwrap()), network: network.map(str::to_owned) };
            filter.missing(names.iter())
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
        let filter = Filter { pod: Some("a/b".parse().unwrap()), network: None };
        assert_eq!(
            filter.missing([].iter()).as_deref(),
            Some("pod a/b is not attached on this node; nothing is attached")
        );
    }

    #[test]
    fn a_list_ends_somewhere() {
        assert_eq!(list(["a", "b"]), "a, b");
        let many: Vec<String> = (0..25).map(|number| number.to_string()).collect();
        assert_eq!(list(&many), "0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 15 more");
    }
}
