//! A container runtime for tests: CNI executables run in the namespace of a node, with pods beside it.

use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::Namespace;

/// A node with its plugins.
#[derive(Debug)]
pub struct Runtime {
    /// The node's namespace: plugins start here.
    pub node: Namespace,
    /// `CNI_PATH`.
    pub plugins: PathBuf,
}

/// One call of a plugin.
#[derive(Debug, Clone, Copy)]
pub struct Call<'a> {
    /// `CNI_CONTAINERID`.
    pub container: &'a str,
    /// `CNI_IFNAME`.
    pub ifname: &'a str,
    /// `CNI_NETNS`.
    pub netns: &'a Path,
    /// `CNI_ARGS`.
    pub args: &'a str,
}

/// A plugin's answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// Exit status.
    pub exit: Option<i32>,
    /// Its standard output; null if it printed nothing.
    pub stdout: Value,
    /// Its standard error.
    pub stderr: String,
}

impl Runtime {
    /// Runs the plugin that `config` names, with a configuration for one plugin.
    pub fn run(&self, verb: &str, call: Call<'_>, config: &Value) -> Result<Answer> {
        run(&self.node, &self.plugins, verb, call, config)
    }

    /// Starts a call like [`Runtime::run`], and does not wait for its end.
    pub fn start(&self, verb: &str, call: Call<'_>, config: &Value) -> Result<Child> {
        start(&self.node, &self.plugins, verb, call, config)
    }

    /// ADD; the result.
    pub fn add(&self, call: Call<'_>, config: &Value) -> Result<Value> {
        let answer = self.run("ADD", call, config)?;
        ensure!(answer.exit == Some(0), "ADD {config}: {answer:?}");
        Ok(answer.stdout)
    }

    /// A verb without output, after an ADD with this result.
    pub fn after(&self, verb: &str, call: Call<'_>, config: &Value, result: &Value) -> Result<()> {
        let answer = self.run(verb, call, &with_result(config, result))?;
        ensure!(answer.exit == Some(0) && answer.stdout.is_null(), "{verb} {config}: {answer:?}");
        Ok(())
    }

    /// Code and message of a call that has to fail.
    pub fn refusal(&self, verb: &str, call: Call<'_>, config: &Value) -> Result<(u64, String)> {
        let answer = self.run(verb, call, config)?;
        ensure!(answer.exit == Some(1), "{verb} {config}: {answer:?}");
        let code = answer.stdout["code"].as_u64().context("an error without code")?;
        Ok((code, answer.stdout["msg"].as_str().context("an error without msg")?.to_owned()))
    }
}

/// Runs the plugin of the directory that `config` names, in the namespace of a node.
///
/// # Errors
/// The plugin does not run, or prints something other than one JSON value.
pub fn run(node: &Namespace, plugins: &Path, verb: &str, call: Call<'_>, config: &Value) -> Result<Answer> {
    let output = start(node, plugins, verb, call, config)?.wait_with_output()?;
    let stdout = match output.stdout.as_slice() {
        [] => Value::Null,
        bytes => serde_json::from_slice(bytes)
            .with_context(|| format!("{} printed {:?}", config["type"], String::from_utf8_lossy(bytes)))?,
    };
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    Ok(Answer { exit: output.status.code(), stdout, stderr })
}

/// Starts the plugin of the directory that `config` names in the namespace of a node, and sends it its configuration.
fn start(node: &Namespace, plugins: &Path, verb: &str, call: Call<'_>, config: &Value) -> Result<Child> {
    let program = plugins.join(config["type"].as_str().context("a configuration without a type")?);
    let mut command = Command::new(&program);
    command
        .env_clear()
        // The directories where the reference's `portmap` looks for iptables.
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .env("CNI_COMMAND", verb)
        .env("CNI_CONTAINERID", call.container)
        .env("CNI_IFNAME", call.ifname)
        .env("CNI_NETNS", call.netns)
        .env("CNI_ARGS", call.args)
        .env("CNI_PATH", plugins)
        // Reference plugins start `ip`.
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = node.run(|| command.spawn()).with_context(|| format!("start {}", program.display()))?;
    let mut stdin = child.stdin.take().context("a child without stdin")?;
    match stdin.write_all(config.to_string().as_bytes()) {
        // VERSION ends without reading.
        Err(error) if error.kind() == ErrorKind::BrokenPipe => {}
        written => written?,
    }
    drop(stdin);
    Ok(child)
}

/// Adds the `prevResult` that a runtime passes after ADD to a configuration.
pub fn with_result(config: &Value, result: &Value) -> Value {
    let mut config = config.clone();
    config["prevResult"] = result.clone();
    config
}

/// The result of a plugin before, as a runtime passes it in a version; `result` has the form of 0.4.0. The two oldest
/// versions have the first address of each family, and no interfaces.
pub fn in_form_of(version: &str, result: &Value) -> Value {
    if version >= "0.3.0" {
        let mut result = result.clone();
        result["cniVersion"] = json!(version);
        return result;
    }
    let mut oldest = json!({"cniVersion": version, "dns": {}});
    for ip in result["ips"].as_array().into_iter().flatten() {
        let is_v6 = ip["address"].as_str().is_some_and(|address| address.contains(':'));
        let family = if is_v6 { "ip6" } else { "ip4" };
        if oldest.get(family).is_none() {
            oldest[family] = json!({"ip": ip["address"]});
            if let Some(gateway) = ip.get("gateway") {
                oldest[family]["gateway"] = gateway.clone();
            }
        }
    }
    oldest
}

/// The version of a configuration.
pub fn version_of(config: &Value) -> &str {
    config["cniVersion"].as_str().unwrap_or("0.1.0")
}

/// A configuration of one plugin from common keys and `extra`.
pub fn config(version: &str, kind: &str, extra: &Value) -> Value {
    let mut config = json!({"cniVersion": version, "name": "net", "type": kind});
    if let (Some(config), Some(extra)) = (config.as_object_mut(), extra.as_object()) {
        config.extend(extra.clone());
    }
    config
}
