//! The settings of a namespace that affect routing, besides its routes: rules of both families, and the sysctls of
//! its interfaces.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::Namespace;

/// The directories of interfaces' sysctls, by the names used here.
const FAMILIES: [(&str, &str); 2] =
    [("ipv4", "/proc/sys/net/ipv4/conf"), ("ipv6", "/proc/sys/net/ipv6/conf")];

/// The sysctls of an interface, by names such as `ipv6.accept_ra`.
pub type Sysctls = BTreeMap<String, String>;

/// Rules and sysctls of a namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Settings {
    /// Rules of both families, as `ip` lists them.
    pub rules: Vec<String>,
    /// Sysctls by interface, including `all` and `default`.
    pub sysctls: BTreeMap<String, Sysctls>,
}

impl Settings {
    /// Returns the settings of a namespace.
    ///
    /// # Errors
    /// They cannot be read.
    pub fn of(namespace: &Namespace) -> Result<Self> {
        let rules = rules(namespace)?;
        let mut interfaces: Vec<String> = namespace.run(|| names(Path::new(FAMILIES[0].1)))?;
        interfaces.sort();
        let of_one = |name: String| Ok((name.clone(), sysctls(namespace, &name)?));
        Ok(Self { rules, sysctls: interfaces.into_iter().map(of_one).collect::<Result<_>>()? })
    }

    /// Without one of the sysctls, of whatever interface.
    pub fn without(mut self, sysctl: &str) -> Self {
        self.sysctls.values_mut().for_each(|its| drop(its.remove(sysctl)));
        self
    }
}

/// The rules of both families, as `ip` lists them.
///
/// # Errors
/// `ip` does not answer.
pub fn rules(namespace: &Namespace) -> Result<Vec<String>> {
    let mut rules = Vec::new();
    for family in ["-4", "-6"] {
        let output = namespace.run(|| Command::new("ip").args([family, "rule"]).output())?;
        ensure!(output.status.success(), "ip {family} rule: {}", String::from_utf8_lossy(&output.stderr));
        let listed = String::from_utf8(output.stdout)?;
        rules.extend(listed.lines().map(|line| format!("{family} {}", line.trim_end())));
    }
    Ok(rules)
}

/// The sysctls of an interface, or of `all`.
///
/// # Errors
/// One cannot be read that should be.
pub fn sysctls(namespace: &Namespace, interface: &str) -> Result<Sysctls> {
    namespace.run(|| {
        let mut found = Sysctls::new();
        for (family, directory) in FAMILIES {
            let directory = Path::new(directory).join(interface);
            // An interface whose MTU is too small for IPv6 has no IPv6 sysctls.
            if !directory.exists() {
                continue;
            }
            // Readable only once it is set.
            for name in names(&directory)?.into_iter().filter(|name| name != "stable_secret") {
                let path = directory.join(&name);
                let value = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
                found.insert(format!("{family}.{name}"), value.trim_end().to_owned());
            }
        }
        Ok(found)
    })
}

fn names(directory: &Path) -> Result<Vec<String>> {
    let entries = fs::read_dir(directory).with_context(|| format!("list {}", directory.display()))?;
    entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
}
