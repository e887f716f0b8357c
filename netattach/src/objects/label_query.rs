//! Label selectors as people write them on a command line: `app=web,tier in (front,back),!canary`.
//!
//! The grammar is that of the API's `labelSelector` parameter, without `<` and `>`.

use super::budget::{REQUIREMENTS, VALUES};
use super::labels::{Requirement, Selector};

/// A text is not a label selector.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QueryError {
    /// A requirement has no such form.
    #[error(
        "{0:?} is not a requirement on a label: key=value, key!=value, key in (a,b), key notin (a,b), key or !key"
    )]
    Form(String),
    /// A parenthesis is open at the end, or closed without being open.
    #[error("the parentheses of {0:?} do not match")]
    Parentheses(String),
    /// More requirements or values than a selector may have.
    #[error("a selector has at most {REQUIREMENTS} requirements, each with at most {VALUES} values")]
    TooMany,
}

/// Reads a selector.
///
/// # Errors
/// [`QueryError`], which names the part that is wrong.
pub fn parse(text: &str) -> Result<Selector, QueryError> {
    let parts = parts(text)?;
    if parts.len() > REQUIREMENTS {
        return Err(QueryError::TooMany);
    }
    let requirements = parts.into_iter().map(requirement).collect::<Result<_, _>>()?;
    Ok(Selector { requirements })
}

/// Splits at the commas that stand outside of parentheses.
fn parts(text: &str) -> Result<Vec<&str>, QueryError> {
    let (mut parts, mut from, mut inside) = (Vec::new(), 0, false);
    for (at, sign) in text.char_indices() {
        match sign {
            '(' if !inside => inside = true,
            ')' if inside => inside = false,
            '(' | ')' => return Err(QueryError::Parentheses(text.to_owned())),
            ',' if !inside => {
                parts.push(text[from..at].trim());
                from = at + 1;
            }
            _ => {}
        }
    }
    if inside {
        return Err(QueryError::Parentheses(text.to_owned()));
    }
    parts.push(text[from..].trim());
    Ok(parts)
}

fn requirement(part: &str) -> Result<Requirement, QueryError> {
    let form = || QueryError::Form(part.to_owned());
    let key = |text: &str| {
        let text = text.trim();
        let is_key =
            !text.is_empty() && text.chars().all(|it| it.is_ascii_alphanumeric() || "-_./".contains(it));
        if is_key { Ok(text.to_owned()) } else { Err(form()) }
    };
    let value = |text: &str| {
        let text = text.trim();
        let is_value = text.chars().all(|it| it.is_ascii_alphanumeric() || "-_.".contains(it));
        if is_value { Ok(text.to_owned()) } else { Err(form()) }
    };
    if let Some((before, values)) = part.split_once('(') {
        let values = values.strip_suffix(')').ok_or_else(form)?;
        let values = values.split(',').map(value).collect::<Result<Vec<_>, _>>()?;
        if values.len() > VALUES {
            return Err(QueryError::TooMany);
        }
        let (name, operator) = before.trim().rsplit_once(char::is_whitespace).ok_or_else(form)?;
        let key = key(name)?;
        return match operator {
            "in" => Ok(Requirement::In { key, values: values.into() }),
            "notin" => Ok(Requirement::NotIn { key, values: values.into() }),
            _ => Err(form()),
        };
    }
    if let Some((name, other)) = part.split_once("!=") {
        return Ok(Requirement::NotIn { key: key(name)?, values: vec![value(other)?].into() });
    }
    if let Some((name, same)) = part.split_once("==").or_else(|| part.split_once('=')) {
        return Ok(Requirement::In { key: key(name)?, values: vec![value(same)?].into() });
    }
    match part.strip_prefix('!') {
        Some(name) => Ok(Requirement::DoesNotExist { key: key(name)? }),
        None => Ok(Requirement::Exists { key: key(part)? }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objects::labels::Values;

    #[test]
    fn a_query_is_the_selector_that_a_manifest_would_have() {
        let of = |requirements: Vec<Requirement>| Ok(Selector { requirements });
        let one = |key: &str, values: &[&str]| {
            let values: Vec<String> = values.iter().map(|value| (*value).to_owned()).collect();
            (key.to_owned(), Values::from(values))
        };
        let is_in = |key: &str, values: &[&str]| {
            let (key, values) = one(key, values);
            Requirement::In { key, values }
        };
        let not_in = |key: &str, values: &[&str]| {
            let (key, values) = one(key, values);
            Requirement::NotIn { key, values }
        };
        assert_eq!(parse("app=web"), of(vec![is_in("app", &["web"])]));
        assert_eq!(parse("app==web"), of(vec![is_in("app", &["web"])]));
        assert_eq!(parse("app="), of(vec![is_in("app", &[""])]));
        assert_eq!(
            parse(" app.kubernetes.io/name != web , tier in (front, back),zone notin (a)"),
            of(vec![
                not_in("app.kubernetes.io/name", &["web"]),
                is_in("tier", &["front", "back"]),
                not_in("zone", &["a"])
            ])
        );
        assert_eq!(
            parse("canary,!old"),
            of(vec![
                Requirement::Exists { key: "canary".into() },
                Requirement::DoesNotExist { key: "old".into() }
            ])
        );
    }

    #[test]
    fn what_is_no_query_is_refused_by_its_part() {
        let form = |part: &str| Err(QueryError::Form(part.to_owned()));
        for (text, expected) in [
            ("", form("")),
            ("app=web,", form("")),
            ("=web", form("=web")),
            ("a b", form("a b")),
            ("app in", form("app in")),
            ("app within (a)", form("app within (a)")),
            ("in (a)", form("in (a)")),
            ("app=a b", form("app=a b")),
            ("replicas>3", form("replicas>3")),
            ("app in (a", Err(QueryError::Parentheses("app in (a".into()))),
            ("app in ((a))", Err(QueryError::Parentheses("app in ((a))".into()))),
            ("app)", Err(QueryError::Parentheses("app)".into()))),
        ] {
            assert_eq!(parse(text), expected, "{text}");
        }
        let many = |number: usize| (0..number).map(|key| format!("k{key}")).collect::<Vec<_>>().join(",");
        assert_eq!(parse(&many(REQUIREMENTS)).unwrap().requirements.len(), REQUIREMENTS);
        assert_eq!(parse(&many(REQUIREMENTS + 1)), Err(QueryError::TooMany));
        assert_eq!(parse(&format!("a in ({})", many(VALUES + 1))), Err(QueryError::TooMany));
    }
}
