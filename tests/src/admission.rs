//! ValidatingAdmissionPolicies, as a server applies them: conditions, variables and validations are CEL, evaluated by
//! an independent crate. A real server also checks types, which a crate without the API's schemas cannot do.
//!
//! Semantics: <https://kubernetes.io/docs/reference/access-authn-authz/validating-admission-policy/>.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock};

use anyhow::{Context as _, Result, anyhow, ensure};
use cel::{Context, Env, Program, Value as Cel};
use serde::Deserialize;
use serde_json::{Value, json};

/// The functions of CEL, optional values among them: servers have those from Kubernetes 1.29 on.
static LANGUAGE: LazyLock<Arc<Env>> = LazyLock::new(|| Arc::new(Env::stdlib()));

/// A write in the form that the policies get.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Review {
    /// `CREATE`, `UPDATE` or `DELETE`.
    pub operation: &'static str,
    /// API group.
    pub group: String,
    /// Its version.
    pub version: String,
    /// Plural name, with its subresource.
    pub resource: String,
    /// The user, as `request.userInfo`.
    pub user: Value,
    /// The object as it would be; null for a deletion.
    pub object: Value,
    /// The present object; null for a create.
    pub old: Value,
}

/// Policies, in their order.
#[derive(Debug)]
pub struct Policies(Vec<Policy>);

#[derive(Debug)]
struct Policy {
    name: String,
    rules: Vec<Rule>,
    conditions: Vec<Program>,
    variables: Vec<(String, Program)>,
    validations: Vec<Validation>,
}

#[derive(Debug)]
struct Validation {
    program: Program,
    message: String,
    code: u16,
}

/// A refusal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// HTTP status.
    pub code: u16,
    /// The server's message after the words that name the object.
    pub message: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Spec {
    failure_policy: String,
    match_constraints: Constraints,
    match_conditions: Vec<Named>,
    #[serde(default)]
    variables: Vec<Named>,
    validations: Vec<Written>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Constraints {
    resource_rules: Vec<Rule>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Rule {
    api_groups: Vec<String>,
    api_versions: Vec<String>,
    operations: Vec<String>,
    resources: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Named {
    name: String,
    expression: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    expression: String,
    message: String,
    #[serde(default)]
    reason: Option<String>,
}

impl Policies {
    /// Returns the policies of `deploy/base`.
    ///
    /// # Errors
    /// One cannot be read.
    pub fn of_deploy() -> Result<Self> {
        Self::read(include_str!("../../deploy/base/own-node.yaml"))
    }

    /// The policies among the documents of a text.
    ///
    /// # Errors
    /// A document is no YAML, or an expression no CEL; a policy has a key that is not implemented here.
    pub fn read(text: &str) -> Result<Self> {
        let mut policies = Vec::new();
        for document in serde_norway::Deserializer::from_str(text) {
            let object = Value::deserialize(document)?;
            if object["kind"] == "ValidatingAdmissionPolicy" {
                let name = object["metadata"]["name"].as_str().context("a policy has no name")?.to_owned();
                let spec = Spec::deserialize(&object["spec"]).with_context(|| name.clone())?;
                policies.push(Policy::compile(name, spec)?);
            }
        }
        Ok(Self(policies))
    }

    /// Applies the policies to a write.
    ///
    /// # Errors
    /// The first refusal. An expression that fails refuses as well: `failurePolicy: Fail`.
    pub fn judge(&self, review: &Review) -> Result<(), Refusal> {
        self.0.iter().try_for_each(|policy| policy.judge(review))
    }

    /// The policies that are about a write.
    pub fn about(&self, review: &Review) -> Vec<&str> {
        self.0.iter().filter(|policy| policy.is_about(review)).map(|policy| policy.name.as_str()).collect()
    }
}

impl Policy {
    fn compile(name: String, spec: Spec) -> Result<Self> {
        ensure!(spec.failure_policy == "Fail", "{name}: failurePolicy is {}", spec.failure_policy);
        let compile =
            |text: &str| LANGUAGE.compile(text).map_err(|errors| anyhow!("{name}: {text}: {errors}"));
        let named = |one: &Named| Ok((one.name.clone(), compile(&one.expression)?));
        let validation = |one: Written| {
            let code = match one.reason.as_deref() {
                None | Some("Invalid") => 422,
                Some("Forbidden") => 403,
                Some(other) => return Err(anyhow!("{name}: the reason {other} is not known here")),
            };
            Ok(Validation { program: compile(&one.expression)?, message: one.message, code })
        };
        Ok(Self {
            rules: spec.match_constraints.resource_rules,
            conditions: spec
                .match_conditions
                .iter()
                .map(|one| compile(&one.expression))
                .collect::<Result<_>>()?,
            variables: spec.variables.iter().map(named).collect::<Result<_>>()?,
            validations: spec.validations.into_iter().map(validation).collect::<Result<_>>()?,
            name,
        })
    }

    fn is_about(&self, review: &Review) -> bool {
        let has = |list: &[String], value: &str| list.iter().any(|one| one == "*" || one == value);
        self.rules.iter().any(|rule| {
            has(&rule.api_groups, &review.group)
                && has(&rule.api_versions, &review.version)
                && has(&rule.operations, review.operation)
                && rule.resources.contains(&review.resource)
        })
    }

    fn judge(&self, review: &Review) -> Result<(), Refusal> {
        let refused = |message: &str, code| {
            let name = &self.name;
            let message =
                format!("ValidatingAdmissionPolicy '{name}' with binding '{name}' denied request: {message}");
            Refusal { code, message }
        };
        let failed = |error: String| refused(&format!("expression evaluation failed: {error}"), 422);
        if !self.is_about(review) {
            return Ok(());
        }
        let resource = review.resource.as_str();
        let (name, subresource) = resource.split_once('/').unwrap_or((resource, ""));
        let request = json!({
            "operation": review.operation,
            "resource": {"group": review.group, "version": review.version, "resource": name},
            "subResource": subresource,
            "userInfo": review.user,
        });
        let mut context = Context::with_env(Arc::clone(&LANGUAGE));
        for (name, value) in [("request", &request), ("object", &review.object), ("oldObject", &review.old)] {
            context.add_variable(name, value).map_err(|error| failed(error.to_string()))?;
        }
        for condition in &self.conditions {
            match condition.execute(&context) {
                Ok(Cel::Bool(true)) => {}
                Ok(Cel::Bool(false)) => return Ok(()),
                other => return Err(failed(format!("{other:?}"))),
            }
        }
        // A variable that cannot be had fails those that name it, and no other.
        let mut variables = HashMap::new();
        for (name, program) in &self.variables {
            if let Ok(value) = program.execute(&context) {
                variables.insert(name.clone(), value);
                context.add_variable_from_value("variables", variables.clone());
            }
        }
        for validation in &self.validations {
            match validation.program.execute(&context) {
                Ok(Cel::Bool(true)) => {}
                Ok(Cel::Bool(false)) => return Err(refused(&validation.message, validation.code)),
                other => return Err(failed(format!("{other:?}"))),
            }
        }
        Ok(())
    }
}
