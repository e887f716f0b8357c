//! The licence of every dependency against the list in deny.toml.
//!
//! deny.toml keeps cargo-deny's format, so that cargo-deny can use it; building it here would take
//! longer than all other checks together.

use std::fs;

use anyhow::Context;
use serde::Deserialize;
use spdx::expression::ExpressionReq;
use spdx::{Expression, Licensee};

use super::{Violation, report};
use crate::progress::Done;
use crate::{child, tree};

const LIST: &str = "deny.toml";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Deny {
    licenses: Licences,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Licences {
    allow: Vec<String>,
}

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    version: String,
    license: Option<String>,
}

pub(super) fn check() -> anyhow::Result<Done> {
    let list = fs::read_to_string(tree::root().join(LIST)).context("read deny.toml")?;
    let allowed = allowed(&list)?;
    // Only dependencies on the platforms we ship for: a dependency of another platform is never distributed.
    let mut cargo = child::cargo();
    cargo.args(["metadata", "--format-version", "1", "--locked"]);
    for triple in ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"] {
        cargo.args(["--filter-platform", triple]);
    }
    let metadata: Metadata = serde_json::from_slice(&child::stdout_of(&mut cargo)?)
        .context("read cargo's description of the workspace")?;
    let violations = metadata.packages.iter().filter_map(|package| judge(package, &allowed)).collect();
    report(violations, format!("{} packages", metadata.packages.len()))
}

fn allowed(list: &str) -> anyhow::Result<Vec<Licensee>> {
    let deny: Deny = toml::from_str(list).context("read deny.toml")?;
    deny.licenses
        .allow
        .iter()
        .map(|name| {
            Licensee::parse(name).with_context(|| format!("deny.toml allows `{name}`, which is no licence"))
        })
        .collect()
}

fn judge(package: &Package, allowed: &[Licensee]) -> Option<Violation> {
    let violation = |found: String| Violation {
        path: LIST.to_owned(),
        line: 1,
        found: format!("{} {}: {found}", package.name, package.version),
        rule: "every dependency has a licence that deny.toml allows",
        why: "the executables are distributed under Apache-2.0",
    };
    let Some(text) = &package.license else { return Some(violation("names no licence".to_owned())) };
    // Old manifests write `/` for `OR`.
    match Expression::parse_mode(text, spdx::ParseMode::LAX) {
        Err(_) => Some(violation(format!("`{text}` is not an SPDX expression"))),
        Ok(expression) => {
            let fine = expression
                .evaluate(|requirement| allowed.iter().any(|licensee| licensee.satisfies(requirement)));
            let refused = || unmet(&expression, allowed).join(", ");
            (!fine).then(|| violation(format!("`{text}`: {} not allowed", refused())))
        }
    }
}

fn unmet(expression: &Expression, allowed: &[Licensee]) -> Vec<String> {
    let unmet = |wanted: &&ExpressionReq| !allowed.iter().any(|licensee| licensee.satisfies(&wanted.req));
    expression.requirements().filter(unmet).map(|wanted| wanted.req.to_string()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(license: Option<&str>) -> Option<String> {
        let allowed = allowed("[licenses]\nallow = [\"MIT\", \"Apache-2.0\", \"Unicode-3.0\"]").unwrap();
        let package = Package {
            name: "x".to_owned(),
            version: "1.0.0".to_owned(),
            license: license.map(str::to_owned),
        };
        judge(&package, &allowed).map(|violation| violation.found)
    }

    #[test]
    fn a_licence_passes_when_the_list_satisfies_its_expression() {
        for text in ["MIT", "MIT OR GPL-2.0", "MIT/Apache-2.0", "(MIT OR Apache-2.0) AND Unicode-3.0"] {
            assert_eq!(verdict(Some(text)), None, "{text}");
        }
    }

    #[test]
    fn a_licence_fails_by_name() {
        let table = [
            (Some("GPL-3.0-only"), "x 1.0.0: `GPL-3.0-only`: GPL-3.0-only not allowed"),
            (Some("MIT AND ISC"), "x 1.0.0: `MIT AND ISC`: ISC not allowed"),
            (Some("do what you like"), "x 1.0.0: `do what you like` is not an SPDX expression"),
            (None, "x 1.0.0: names no licence"),
        ];
        for (license, expected) in table {
            assert_eq!(verdict(license).as_deref(), Some(expected));
        }
    }

    #[test]
    fn a_list_with_an_unknown_word_is_refused() {
        let error = allowed("[licenses]\nallow = [\"Nonsense\"]").unwrap_err();
        assert_eq!(error.to_string(), "deny.toml allows `Nonsense`, which is no licence");
        assert!(allowed("[licenses]\nallow = []\n[advisories]\n").is_err());
    }
}
