//! `netattachctl validate`: checks manifests and settings without an agent.

use std::path::PathBuf;

use clap::Args;

use super::output::Format;
use super::table;
use super::{Answer, CliError, visible};
use crate::agent::validate::{Finding, Validated, validate};

/// What to check.
#[derive(Debug, Args)]
pub(super) struct Validate {
    /// Directory of manifests: Pod, NetworkAttachmentDefinition, Namespace, MultiNetworkPolicy, NetworkPolicy
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// Settings of the agent, which are checked too and which the manifests are checked with
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Directory with the configurations of definitions that have none of their own [default: cniConfDir of the settings]
    #[arg(long, value_name = "DIR")]
    cni_conf_dir: Option<PathBuf>,
}

impl Validate {
    pub(super) fn run(&self, format: Format) -> Result<Answer, CliError> {
        let validated = validate(&self.directory, self.config.as_deref(), self.cni_conf_dir.as_deref())?;
        let problems = validated.findings.len() + validated.more;
        let outcome = if problems == 0 { Ok(()) } else { Err(CliError::Invalid(problems)) };
        Ok((format.show(&validated, |width| table::sentences(&render(&validated), width))?, outcome))
    }
}

/// A paragraph for each problem, then what was read.
fn render(validated: &Validated) -> String {
    let mut text: String = validated.findings.iter().map(paragraph).collect();
    if validated.more > 0 {
        text.push_str(&format!("{} more problems\n\n", validated.more));
    }
    let counts: Vec<String> = validated
        .objects
        .iter()
        .filter(|(_, count)| **count > 0)
        .map(|(kind, count)| format!("{count} {}", kind.replace('_', " ")))
        .collect();
    let read = if counts.is_empty() { "nothing".to_owned() } else { counts.join(", ") };
    text + &format!("read: {read}\n")
}

fn paragraph(finding: &Finding) -> String {
    let Finding { file, document, object, path, problem, remedy } = finding;
    let mut place = file.display().to_string();
    if let Some(document) = document {
        place.push_str(&format!(", document {document}"));
    }
    for part in [object, path] {
        if !part.is_empty() {
            place.push_str(&format!(": {part}"));
        }
    }
    let lines = [place, format!("  {problem}"), format!("  remedy: {remedy}"), String::new()];
    lines.iter().map(|line| visible::line(line)).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use clap::Parser;

    use super::super::tests::{is_narrow, same_as_golden};
    use super::super::{Arguments, Exit, run};
    use super::*;

    fn validated(files: &[(&str, &str)], more: &[&str]) -> (String, Result<(), CliError>) {
        let dir = tempfile::tempdir().unwrap();
        let manifests = dir.path().join("manifests");
        fs::create_dir(&manifests).unwrap();
        for (name, content) in files {
            let path = if *name == "settings.yaml" { dir.path().join(name) } else { manifests.join(name) };
            fs::write(path, content).unwrap();
        }
        let settings = dir.path().join("settings.yaml");
        let mut words = vec!["netattachctl", "validate", manifests.to_str().unwrap()];
        if settings.exists() {
            words.extend(["--config", settings.to_str().unwrap()]);
        }
        words.extend(more);
        let mut out = Vec::new();
        let result = run(&Arguments::try_parse_from(words).unwrap(), &mut out);
        let text = String::from_utf8(out).unwrap();
        (text.replace(dir.path().to_str().unwrap(), "DIR"), result)
    }

    const NETWORK: &str = r#"
apiVersion: k8s.cni.cncf.io/v1
kind: NetworkAttachmentDefinition
metadata: {name: lan, namespace: shop}
spec: {config: '{"cniVersion": "1.0.0", "type": "veth", "ipam": {"type": "host-local", "subnet": "10.0.0.0/24"}}'}
"#;

    const POD: &str = r#"
apiVersion: v1
kind: Pod
metadata: {name: cart, namespace: shop, annotations: {k8s.v1.cni.cncf.io/networks: lan}}
spec: {containers: [{name: c, image: i}]}
"#;

    #[test]
    fn its_form_for_programs_is_pinned() {
        let wrong = POD.replace("networks: lan", "networks: nowhere");
        let files = [("lan.yaml", NETWORK), ("pod.yaml", &wrong), ("settings.yaml", "maxAttachment: 5\n")];
        let (text, _) = validated(&files, &["-o", "json"]);
        same_as_golden("validate", &text);
    }

    #[test]
    fn what_is_right_is_counted() {
        let (text, result) = validated(&[("lan.yaml", NETWORK), ("pod.yaml", POD)], &[]);
        result.unwrap();
        assert_eq!(text, "read: 1 networks, 1 pods\n");
    }

    #[test]
    fn each_problem_has_its_file_object_path_and_remedy() {
        let wrong_network = NETWORK.replace("10.0.0.0/24", "10.0.0.1/24");
        let wrong_pod = POD.replace("networks: lan", "networks: nowhere").replace("name: cart", "name: db");
        let policy = "
apiVersion: k8s.cni.cncf.io/v1beta1
kind: MultiNetworkPolicy
metadata: {name: web, namespace: shop, annotations: {k8s.v1.cni.cncf.io/policy-for: lost}}
spec: {podSelector: {}, policyTypes: [Ingress]}
";
        let (text, result) = validated(
            &[
                ("a.yaml", &format!("{wrong_network}---{POD}---{wrong_pod}")),
                ("broken.yaml", "kind: ["),
                ("policy.yaml", policy),
                ("settings.yaml", "maxAttachment: 5\n"),
            ],
            &["-o", "wide"],
        );
        let error = result.unwrap_err();
        assert_eq!(error.exit(), Exit::Failed);
        for expected in [
            "DIR/manifests/a.yaml, document 0: NetworkAttachmentDefinition shop/lan: spec.config\n",
            "DIR/manifests/a.yaml, document 2: Pod shop/db: metadata.annotations[k8s.v1.cni.cncf.io/networks]\n",
            "DIR/manifests/broken.yaml",
            "DIR/manifests/policy.yaml, document 0: MultiNetworkPolicy shop/web: \
             metadata.annotations[k8s.v1.cni.cncf.io/policy-for]\n  is for network shop/lost, which is not defined",
            "DIR/settings.yaml: settings: maxAttachment\n",
            "network shop/nowhere is not defined",
            "subnet 10.0.0.1/24 has host bits set; the network is 10.0.0.0/24",
        ] {
            assert!(text.contains(expected), "{expected}\n--- in\n{text}");
        }
        assert_eq!(text.matches("\n  remedy: ").count(), 5, "{text}");
        assert_eq!(error.to_string(), "5 problems; each is shown with its remedy");
    }

    #[test]
    fn a_problem_is_no_wider_than_a_table() {
        let long = format!("{} nowhere-{}", "wrong ".repeat(30), "x".repeat(40));
        let wrong = POD.replace("networks: lan", &format!("networks: '{long}'"));
        let (text, _) = validated(&[("lan.yaml", NETWORK), ("pod.yaml", &wrong)], &[]);
        is_narrow(&text);
    }

    #[test]
    fn a_directory_that_is_not_there_is_one_line() {
        let arguments =
            Arguments::try_parse_from(["netattachctl", "validate", "/nonexistent/manifests"]).unwrap();
        let error = run(&arguments, &mut Vec::new()).unwrap_err();
        let text = crate::error_chain::Chain(&error).to_string();
        assert!(text.contains("/nonexistent/manifests") && !text.contains('\n'), "{text}");
    }
}
