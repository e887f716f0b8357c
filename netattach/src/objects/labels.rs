//! Label selectors with every operator: equality, `In`, `NotIn`, `Exists`, `DoesNotExist`.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Deref;

use serde::Deserialize;

use super::budget::{Bounded, BoundedMap, REQUIREMENTS, VALUES, shown};
use super::unknown_keys::keyed;

/// Labels of an object.
pub type Labels = BTreeMap<String, String>;

/// Requirements that must all hold; an empty list selects everything.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Selector {
    /// The requirements, `matchLabels` first.
    pub requirements: Vec<Requirement>,
}

/// One requirement on an object's labels.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Requirement {
    /// The label exists with one of these values.
    In {
        /// Label.
        key: String,
        /// Accepted values.
        values: Values,
    },
    /// The label is missing or has none of these values.
    NotIn {
        /// Label.
        key: String,
        /// Refused values.
        values: Values,
    },
    /// The label exists.
    Exists {
        /// Label.
        key: String,
    },
    /// The label is missing.
    DoesNotExist {
        /// Label.
        key: String,
    },
}

/// Values of a requirement: sorted, each once, so that a value is found without comparing all of them.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Values(Box<[String]>);

impl From<Vec<String>> for Values {
    fn from(mut values: Vec<String>) -> Self {
        values.sort_unstable();
        values.dedup();
        Self(values.into())
    }
}

impl Deref for Values {
    type Target = [String];

    fn deref(&self) -> &[String] {
        &self.0
    }
}

impl Values {
    fn have(&self, value: &str) -> bool {
        let compare = |own: &String| {
            #[cfg(test)]
            tests::COMPARED.with(|compared| compared.update(|compared| compared + 1));
            own.as_str().cmp(value)
        };
        self.0.binary_search_by(compare).is_ok()
    }
}

impl Selector {
    /// The cost of comparing it with one set of labels, at most: the sum of its requirements' costs, in lookups of one
    /// label. 0 for a selector that selects everything; at most 704 by [`REQUIREMENTS`] and [`VALUES`].
    pub fn weight(&self) -> usize {
        self.requirements.iter().map(Requirement::weight).sum()
    }

    /// The number of values of all requirements together.
    pub(crate) fn values(&self) -> usize {
        self.requirements.iter().map(|requirement| requirement.values().len()).sum()
    }

    /// Whether every requirement holds for `labels`.
    pub fn matches(&self, labels: &Labels) -> bool {
        self.requirements.iter().all(|requirement| requirement.holds(labels))
    }
}

impl Requirement {
    /// The label of the requirement.
    pub fn key(&self) -> &str {
        match self {
            Self::In { key, .. }
            | Self::NotIn { key, .. }
            | Self::Exists { key }
            | Self::DoesNotExist { key } => key,
        }
    }

    /// The values of `In` and `NotIn`.
    pub(crate) fn values(&self) -> &[String] {
        match self {
            Self::In { values, .. } | Self::NotIn { values, .. } => values,
            Self::Exists { .. } | Self::DoesNotExist { .. } => &[],
        }
    }

    /// One lookup of the label, and one comparison for each halving of the values.
    fn weight(&self) -> usize {
        1 + self.values().len().next_power_of_two().ilog2() as usize
    }

    fn holds(&self, labels: &Labels) -> bool {
        match self {
            Self::In { key, values } => labels.get(key).is_some_and(|value| values.have(value)),
            Self::NotIn { key, values } => labels.get(key).is_none_or(|value| !values.have(value)),
            Self::Exists { key } => labels.contains_key(key),
            Self::DoesNotExist { key } => !labels.contains_key(key),
        }
    }
}

/// Why a selector is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SelectorError {
    /// An unknown key, such as `matchLabel`.
    #[error("unknown key {0:?}")]
    UnknownKey(String),
    /// An unknown operator.
    #[error("operator of {key:?} is {operator:?}, but must be In, NotIn, Exists or DoesNotExist")]
    UnknownOperator {
        /// Label.
        key: String,
        /// Operator as written.
        operator: String,
    },
    /// More requirements than [`REQUIREMENTS`].
    #[error("has more than {REQUIREMENTS} requirements")]
    TooMany,
    /// More values than [`VALUES`].
    #[error("requirement on {key:?} has more than {VALUES} values")]
    TooManyValues {
        /// Label.
        key: String,
    },
    /// `In` and `NotIn` need values, the other two must have none.
    #[error("{operator} of {key:?} has {found} values, but must have {expected}")]
    Values {
        /// Label.
        key: String,
        /// Operator.
        operator: String,
        /// Number of values found.
        found: usize,
        /// Number of values expected.
        expected: &'static str,
    },
}

/// A selector as written in a manifest.
#[derive(Debug, Default)]
pub(crate) struct Written {
    match_labels: Option<BoundedMap<REQUIREMENTS>>,
    match_expressions: Option<Bounded<WrittenExpression, REQUIREMENTS>>,
    unknown: BTreeSet<String>,
}

keyed!(Written { "matchLabels" => match_labels, "matchExpressions" => match_expressions });

#[derive(Debug, Deserialize)]
struct WrittenExpression {
    key: String,
    operator: String,
    values: Option<Bounded<String, VALUES>>,
}

impl TryFrom<Written> for Selector {
    type Error = SelectorError;

    fn try_from(written: Written) -> Result<Self, Self::Error> {
        if let Some(key) = written.unknown.into_iter().next() {
            return Err(SelectorError::UnknownKey(key));
        }
        let (labels, expressions) = (written.match_labels, written.match_expressions.unwrap_or_default());
        let has_more = labels.as_ref().is_some_and(|labels| labels.has_more) || expressions.has_more;
        let equalities = labels.into_iter().flat_map(|labels| labels.entries);
        let mut requirements: Vec<Requirement> =
            equalities.map(|(key, value)| Requirement::In { key, values: vec![value].into() }).collect();
        if has_more || requirements.len() + expressions.items.len() > REQUIREMENTS {
            return Err(SelectorError::TooMany);
        }
        for expression in expressions.items {
            requirements.push(requirement(expression)?);
        }
        requirements.shrink_to_fit();
        Ok(Self { requirements })
    }
}

fn requirement(expression: WrittenExpression) -> Result<Requirement, SelectorError> {
    let WrittenExpression { key, operator, values } = expression;
    let Bounded { items: values, has_more } = values.unwrap_or_default();
    if has_more {
        return Err(SelectorError::TooManyValues { key: shown(&key) });
    }
    let wants_values = match operator.as_str() {
        "In" | "NotIn" => true,
        "Exists" | "DoesNotExist" => false,
        _ => {
            return Err(SelectorError::UnknownOperator { key: shown(&key), operator: shown(&operator) });
        }
    };
    if wants_values == values.is_empty() {
        let expected = if wants_values { "at least one" } else { "none" };
        return Err(SelectorError::Values { key: shown(&key), operator, found: values.len(), expected });
    }
    Ok(match operator.as_str() {
        "In" => Requirement::In { key, values: values.into() },
        "NotIn" => Requirement::NotIn { key, values: values.into() },
        "Exists" => Requirement::Exists { key },
        _ => Requirement::DoesNotExist { key },
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use std::cell::Cell;

    use crate::objects::labels::*;
    use serde_json::{Value, json};

    thread_local! {
        /// How many values of requirements were compared with a label's, by this thread.
        pub(crate) static COMPARED: Cell<usize> = const { Cell::new(0) };
    }

    /// Values are as many as written, and are found whatever their order; a selector compares no more of them than
    /// its weight.
    #[test]
    fn values_are_sorted_and_a_selector_costs_its_weight() {
        let values = |number: usize| (0..number).rev().map(|value| format!("v{value}")).collect::<Vec<_>>();
        let expression = |values: &[String]| json!({"key": "a", "operator": "NotIn", "values": values});
        let whole = json!({"matchExpressions": vec![expression(&values(VALUES)); REQUIREMENTS]});
        let whole = selector(whole).unwrap();
        assert_eq!((whole.weight(), whole.values()), (704, REQUIREMENTS * VALUES));
        for value in ["", "a", "v", "v1023", "v0", "w"] {
            let before = COMPARED.get();
            let labels = Labels::from([("a".to_owned(), value.to_owned())]);
            assert_eq!(whole.matches(&labels), !["v0", "v1023"].contains(&value), "{value}");
            let compared = COMPARED.get() - before;
            assert!(compared > 0 && compared <= whole.weight(), "{value}: {compared}");
        }
        let again =
            selector(json!({"matchExpressions": [expression(&vec!["v".to_owned(); VALUES])]})).unwrap();
        assert_eq!((again.weight(), again.values()), (1, 1), "equal values are one");
        assert_eq!(Selector::default().weight(), 0);
        let four = selector(json!({"matchLabels": {"a": "b"}, "matchExpressions": [expression(&values(4))]}));
        assert_eq!(four.unwrap().weight(), 1 + 3);
    }

    fn selector(written: Value) -> Result<Selector, SelectorError> {
        serde_json::from_value::<Written>(written).unwrap().try_into()
    }

    /// Rows: C10, C11, C12.
    #[test]
    fn requirements_are_all_needed() {
        let labels: Labels =
            [("app", "web"), ("tier", "front")].map(|(k, v)| (k.to_owned(), v.to_owned())).into();
        let expression = |key: &str, operator: &str, values: Value| json!({"matchExpressions": [{"key": key, "operator": operator, "values": values}]});
        let table = [
            ("C10", json!({}), true),
            ("C11", json!({"matchLabels": {"app": "web", "tier": "front"}}), true),
            ("C11", json!({"matchLabels": {"app": "web", "tier": "back"}}), false),
            ("C12", expression("app", "In", json!(["db", "web"])), true),
            ("C12", expression("app", "In", json!(["db"])), false),
            ("C12", expression("none", "In", json!(["web"])), false),
            ("C12", expression("app", "NotIn", json!(["db", "web"])), false),
            ("C12", expression("app", "NotIn", json!(["db"])), true),
            ("C12", expression("none", "NotIn", json!(["db"])), true),
            ("C12", expression("app", "Exists", json!(null)), true),
            ("C12", expression("none", "Exists", json!([])), false),
            ("C12", expression("app", "DoesNotExist", json!(null)), false),
            ("C12", expression("none", "DoesNotExist", json!(null)), true),
            (
                "C12",
                json!({"matchLabels": {"app": "web"}, "matchExpressions": [{"key": "tier", "operator": "DoesNotExist"}]}),
                false,
            ),
        ];
        for (row, written, expected) in table {
            assert_eq!(selector(written.clone()).unwrap().matches(&labels), expected, "{row}: {written}");
        }
    }

    #[test]
    fn a_selector_takes_as_many_requirements_and_values_as_its_budget_has() {
        let expressions = |number: usize, values: usize| {
            let values: Vec<String> = (0..values).map(|value| value.to_string()).collect();
            let one = |key| json!({"key": format!("k{key}"), "operator": "NotIn", "values": values});
            (0..number).map(one).collect::<Vec<_>>()
        };
        let labels = |number: usize| -> serde_json::Map<String, Value> {
            (0..number).map(|key| (format!("l{key}"), json!("v"))).collect()
        };
        let whole = selector(json!({"matchLabels": labels(REQUIREMENTS)})).unwrap();
        assert_eq!(whole.requirements.len(), REQUIREMENTS);
        let both =
            json!({"matchLabels": labels(2), "matchExpressions": expressions(REQUIREMENTS - 2, VALUES)});
        assert_eq!(selector(both).unwrap().requirements.len(), REQUIREMENTS);
        let too_many = [
            json!({"matchLabels": labels(REQUIREMENTS + 1)}),
            json!({"matchExpressions": expressions(REQUIREMENTS + 1, 1)}),
            json!({"matchLabels": labels(1), "matchExpressions": expressions(REQUIREMENTS, 1)}),
        ];
        for written in too_many {
            assert_eq!(selector(written), Err(SelectorError::TooMany));
        }
        let values = json!({"matchExpressions": expressions(1, VALUES + 1)});
        assert_eq!(selector(values), Err(SelectorError::TooManyValues { key: "k0".to_owned() }));
    }

    #[test]
    fn what_is_not_a_selector_is_refused() {
        let expression = |operator: &str, values: Value| json!({"matchExpressions": [{"key": "a", "operator": operator, "values": values}]});
        let table = [
            (json!({"matchLabel": {"a": "b"}}), r#"unknown key "matchLabel""#),
            (
                expression("in", json!(["x"])),
                r#"operator of "a" is "in", but must be In, NotIn, Exists or DoesNotExist"#,
            ),
            (expression("In", json!([])), r#"In of "a" has 0 values, but must have at least one"#),
            (expression("NotIn", json!(null)), r#"NotIn of "a" has 0 values, but must have at least one"#),
            (expression("Exists", json!(["x"])), r#"Exists of "a" has 1 values, but must have none"#),
        ];
        for (written, expected) in table {
            assert_eq!(selector(written).unwrap_err().to_string(), expected);
        }
    }
}
