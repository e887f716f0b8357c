//! Access of namespaces to networks (section 7.4): namespace isolation, and the list on the definition itself.
//!
//! Both must allow the access. They are checked wherever a namespace refers to a network: in a pod's selection, in its
//! choice of a default network, in a policy. Every namespace may use the default network of the agent's own settings.

use std::collections::BTreeSet;

use serde_json::value::RawValue;

use super::Definition;
use super::budget::{ALLOWED_NAMESPACES, Bounded, shown};
use super::labels::{Labels, Selector, SelectorError, Written};
use crate::npwg::NetworkRef;

/// Annotation of a definition: the namespaces whose pods may use it. Names separated by commas, a JSON list of names,
/// or a label selector (a JSON object) for the namespaces' labels. Without it every namespace may use the definition;
/// the list is complete, so the definition's own namespace is allowed only if it is in it. It has at most
/// [`ALLOWED_NAMESPACES`] names, or values in the selector: a longer one is invalid.
pub const ALLOWED_NAMESPACES_ANNOTATION: &str = "netattach.dev/allowed-namespaces";

/// The node's restriction on networks of other namespaces.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Restrictions {
    /// The node's default network, if it has a definition. Every pod has it, so any policy may refer to it.
    pub default_network: Option<NetworkRef>,
    /// Namespace isolation: pods may use only networks of their own namespace. `None`: no isolation.
    pub isolation: Option<Isolation>,
}

/// The exceptions from isolation.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Isolation {
    /// The namespaces whose networks every namespace may use.
    pub global_namespaces: BTreeSet<String>,
}

/// Why a namespace may not use a network.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Forbidden {
    /// Refused by namespace isolation.
    #[error(
        "namespace {namespace} may not use network {network}: namespaceIsolation is on, and {} is not among globalNamespaces",
        network.namespace
    )]
    Isolated {
        /// The namespace refused.
        namespace: String,
        /// The network requested.
        network: NetworkRef,
    },
    /// Refused by the definition's list.
    #[error(
        "namespace {namespace} may not use network {network}: its annotation {ALLOWED_NAMESPACES_ANNOTATION} does not allow it"
    )]
    NotListed {
        /// The namespace refused.
        namespace: String,
        /// The network requested.
        network: NetworkRef,
    },
    /// The definition's list is invalid, so it allows no namespace.
    #[error("no namespace may use network {network}: annotation {ALLOWED_NAMESPACES_ANNOTATION}")]
    Unreadable {
        /// The network.
        network: NetworkRef,
        /// The cause.
        #[source]
        source: AllowedNamespacesError,
    },
}

/// Why the list of a definition is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AllowedNamespacesError {
    /// It looks like JSON but is invalid.
    #[error("{text:?} is no json: {problem}")]
    Json {
        /// The text as written, cut off if it is long.
        text: String,
        /// The parser's message.
        problem: String,
    },
    /// An entry is not a namespace name.
    #[error("{0} is not the name of a namespace")]
    Name(String),
    /// The label selector is invalid.
    #[error("label selector")]
    Selector(#[source] SelectorError),
    /// More than [`ALLOWED_NAMESPACES`].
    #[error("has more than {ALLOWED_NAMESPACES} names or values: select the namespaces by a label")]
    TooMany,
}

impl Restrictions {
    /// Checks whether a policy of a namespace may refer to a network: as for pods, and the node's default network in
    /// any case.
    ///
    /// # Errors
    /// [`Forbidden`] with the rule that refuses it.
    pub fn check_policy(
        &self,
        network: &NetworkRef,
        definition: Option<&Definition>,
        namespace: &str,
        labels: &Labels,
    ) -> Result<(), Forbidden> {
        if self.default_network.as_ref() == Some(network) {
            return Ok(());
        }
        self.check(network, definition, namespace, labels)
    }

    /// Checks whether pods of a namespace may use a network. `definition` is `None` for one that does not exist, which
    /// isolation hides like any other.
    ///
    /// # Errors
    /// [`Forbidden`] with the rule that refuses it.
    pub fn check(
        &self,
        network: &NetworkRef,
        definition: Option<&Definition>,
        namespace: &str,
        labels: &Labels,
    ) -> Result<(), Forbidden> {
        let (who, what) = (|| namespace.to_owned(), || network.clone());
        if let Some(isolation) = &self.isolation
            && network.namespace != namespace
            && !isolation.global_namespaces.contains(&network.namespace)
        {
            return Err(Forbidden::Isolated { namespace: who(), network: what() });
        }
        let Some(allowed) = definition.and_then(|known| known.allowed.as_ref()) else { return Ok(()) };
        match &allowed.0 {
            Err(source) => Err(Forbidden::Unreadable { network: what(), source: source.clone() }),
            Ok(allowed) if allowed.includes(namespace, labels) => Ok(()),
            Ok(_) => Err(Forbidden::NotListed { namespace: who(), network: what() }),
        }
    }
}

/// The list of a definition, or why it is invalid. Read once with the definition: policies and pods of all namespaces
/// ask for it, far more often than it changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllowedNamespaces(Result<Allowed, AllowedNamespacesError>);

impl AllowedNamespaces {
    /// Reads the annotation's text.
    pub fn read(text: &str) -> Self {
        Self(Allowed::parse(text))
    }

    /// The number of names, or of the selector's requirements and values.
    pub(crate) fn len(&self) -> usize {
        match &self.0 {
            Ok(Allowed::Names(names)) => names.len(),
            Ok(Allowed::Labels(selector)) => selector.requirements.len() + selector.values(),
            Err(_) => 0,
        }
    }

    /// Its approximate memory in bytes.
    pub(crate) fn memory(&self) -> usize {
        /// Of a name in a set, besides its text.
        const NAME: usize = 64;
        match &self.0 {
            Ok(Allowed::Names(names)) => names.iter().map(|name| NAME + name.len()).sum(),
            Ok(Allowed::Labels(selector)) => selector.memory(),
            Err(_) => 0,
        }
    }
}

/// The parsed annotation.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Allowed {
    Names(BTreeSet<String>),
    Labels(Selector),
}

impl Allowed {
    fn parse(text: &str) -> Result<Self, AllowedNamespacesError> {
        if !text.trim_start().starts_with(['[', '{']) {
            let names = text.split(',').map(str::trim).filter(|name| !name.is_empty());
            let mut read = BTreeSet::new();
            for (at, text) in names.enumerate() {
                if at >= ALLOWED_NAMESPACES {
                    return Err(AllowedNamespacesError::TooMany);
                }
                read.insert(name(text)?);
            }
            return Ok(Self::Names(read));
        }
        let json = |error: serde_json::Error| AllowedNamespacesError::Json {
            text: shown(text),
            problem: error.to_string(),
        };
        if text.trim_start().starts_with('[') {
            let entries: Bounded<&RawValue, ALLOWED_NAMESPACES> = serde_json::from_str(text).map_err(json)?;
            if entries.has_more {
                return Err(AllowedNamespacesError::TooMany);
            }
            let names = entries.items.iter().map(|entry| match serde_json::from_str::<String>(entry.get()) {
                Ok(text) => name(&text),
                Err(_) => Err(AllowedNamespacesError::Name(shown(entry.get()))),
            });
            return names.collect::<Result<_, _>>().map(Self::Names);
        }
        let written: Written = serde_json::from_str(text).map_err(json)?;
        let selector = Selector::try_from(written).map_err(AllowedNamespacesError::Selector)?;
        if selector.values() > ALLOWED_NAMESPACES {
            return Err(AllowedNamespacesError::TooMany);
        }
        Ok(Self::Labels(selector))
    }

    fn includes(&self, namespace: &str, labels: &Labels) -> bool {
        match self {
            Self::Names(names) => names.contains(namespace),
            Self::Labels(selector) => selector.matches(labels),
        }
    }
}

fn name(text: &str) -> Result<String, AllowedNamespacesError> {
    if crate::npwg::network::is_label(text) {
        Ok(text.to_owned())
    } else {
        Err(AllowedNamespacesError::Name(format!("{:?}", shown(text))))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::error_chain::Chain;
    use crate::objects::access::*;

    fn lan(allowed: Option<&str>) -> Definition {
        Definition {
            namespace: "infra".into(),
            name: "lan".into(),
            config: None,
            annotations: Default::default(),
            allowed: allowed.map(AllowedNamespaces::read),
        }
    }

    /// The error that `shop`, with the label `team=a`, gets for the network `infra/lan`.
    fn told(restrictions: &Restrictions, definition: Option<&Definition>) -> String {
        let labels = [("team".to_owned(), "a".to_owned())].into();
        let network = NetworkRef::new("infra", "lan");
        match restrictions.check(&network, definition, "shop", &labels) {
            Ok(()) => "yes".to_owned(),
            Err(forbidden) => Chain(&forbidden).to_string(),
        }
    }

    fn isolated(global: &[&str]) -> Restrictions {
        let global_namespaces = global.iter().map(|name| (*name).to_owned()).collect();
        Restrictions { isolation: Some(Isolation { global_namespaces }), ..Restrictions::default() }
    }

    const ISOLATED: &str = "namespace shop may not use network infra/lan: namespaceIsolation is on, and infra is not among globalNamespaces";

    /// Rows: NPWG-7.4-restriction.
    #[test]
    fn isolated_namespaces_use_their_own_networks_and_those_of_global_namespaces() {
        let open = lan(None);
        assert_eq!(told(&Restrictions::default(), Some(&open)), "yes");
        assert_eq!(told(&isolated(&["default"]), Some(&open)), ISOLATED);
        assert_eq!(told(&isolated(&["default"]), None), ISOLATED, "whether it exists is not told");
        assert_eq!(told(&isolated(&["infra"]), Some(&open)), "yes");
        let own = isolated(&[]).check(&open.reference(), Some(&open), "infra", &Labels::new());
        assert_eq!(own, Ok(()));
    }

    /// Rows: NPWG-7.4-restriction.
    #[test]
    fn a_definition_says_which_namespaces_may_use_it() {
        let no = "namespace shop may not use network infra/lan: its annotation netattach.dev/allowed-namespaces does not allow it";
        let unreadable =
            "no namespace may use network infra/lan: annotation netattach.dev/allowed-namespaces: ";
        let table = [
            ("shop", "yes"),
            ("infra, shop", "yes"),
            (r#"["infra", "shop"]"#, "yes"),
            (r#"{"matchLabels": {"team": "a"}}"#, "yes"),
            ("{}", "yes"),
            ("", no),
            ("infra", no),
            ("[]", no),
            (r#"{"matchLabels": {"team": "b"}}"#, no),
            ("*", r#"unreadable: "*" is not the name of a namespace"#),
            ("[3]", "unreadable: 3 is not the name of a namespace"),
            (r#"{"matchLabel": {}}"#, r#"unreadable: label selector: unknown key "matchLabel""#),
            ("[", r#"unreadable: "[" is no json: EOF while parsing a list at line 1 column 1"#),
        ];
        for (annotation, expected) in table {
            let expected = expected.replace("unreadable: ", unreadable);
            assert_eq!(told(&Restrictions::default(), Some(&lan(Some(annotation)))), expected);
        }
    }

    #[test]
    fn a_list_beyond_its_bound_allows_nobody() {
        let names = |number: usize| -> Vec<String> {
            (1..number).map(|number| format!("n{number}")).chain(["shop".to_owned()]).collect()
        };
        let selector = |number: usize| {
            let of =
                |key: &str, values: &[String]| json!({"key": key, "operator": "NotIn", "values": values});
            let values = names(number);
            let (one, other) = values.split_at(2);
            json!({"matchExpressions": [of("a", one), of("b", other)]}).to_string()
        };
        let told = |text: &str| told(&Restrictions::default(), Some(&lan(Some(text))));
        let separated = |number: usize| names(number).join(",");
        let listed = |number: usize| json!(names(number)).to_string();
        let forms: [&dyn Fn(usize) -> String; 3] = [&separated, &listed, &selector];
        for (form, of) in forms.into_iter().enumerate() {
            assert_eq!(told(&of(ALLOWED_NAMESPACES)), "yes", "{form}");
            let message = told(&of(ALLOWED_NAMESPACES + 1));
            assert!(message.starts_with("no namespace may use network infra/lan"), "{form}: {message}");
            assert!(message.contains("more than 1024 names or values"), "{form}: {message}");
        }
        // A long text is not repeated in messages.
        let message = told(&format!("[\"{}\"]", "A".repeat(200_000)));
        assert!(message.len() < 1000, "{}", message.len());
        let message = told(&format!("[{}", " ".repeat(200_000)));
        assert!(message.len() < 1000, "{}", message.len());
    }

    #[test]
    fn a_list_counts_with_its_names_in_memory() {
        let list = |text: &str| AllowedNamespaces::read(text);
        assert_eq!((list("a,b,a").len(), list("a,bc").memory()), (2, 2 * 64 + 3));
        let selector = list(r#"{"matchLabels": {"team": "a"}}"#);
        assert!(selector.len() == 2 && selector.memory() > 64, "{selector:?}");
        assert_eq!((list("*").len(), list("*").memory()), (0, 0));
    }

    #[test]
    fn both_rules_have_to_agree() {
        assert_eq!(told(&isolated(&["default"]), Some(&lan(Some("shop")))), ISOLATED);
    }
}
