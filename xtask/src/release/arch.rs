//! The architectures that executables are built for.

use std::env;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, bail};
use clap::ValueEnum;

use crate::progress::{Done, Progress, UserError};
use crate::{child, setup, tree};

/// An architecture, by Go's and so the image specification's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Arch {
    /// x86-64.
    Amd64,
    /// AArch64: built, and never run by a test.
    Arm64,
}

impl Arch {
    /// That of this machine.
    ///
    /// # Errors
    /// It is one that nothing is built for.
    pub fn host() -> anyhow::Result<Self> {
        match env::consts::ARCH {
            "x86_64" => Ok(Self::Amd64),
            "aarch64" => Ok(Self::Arm64),
            other => bail!("netattach is not built for {other}"),
        }
    }

    /// Name in images and file names.
    pub fn name(self) -> &'static str {
        match self {
            Self::Amd64 => "amd64",
            Self::Arm64 => "arm64",
        }
    }

    /// The compiler's target.
    pub fn triple(self) -> &'static str {
        match self {
            Self::Amd64 => "x86_64-unknown-linux-gnu",
            Self::Arm64 => "aarch64-unknown-linux-gnu",
        }
    }

    /// What the names of GNU tools for it begin with, and how Debian spells that in the names of packages.
    fn tools(self) -> (&'static str, &'static str) {
        match self {
            Self::Amd64 => ("x86_64-linux-gnu", "x86-64-linux-gnu"),
            Self::Arm64 => ("aarch64-linux-gnu", "aarch64-linux-gnu"),
        }
    }

    /// Whether the tests of this machine cover it.
    pub fn is_tested(self) -> bool {
        Self::host().is_ok_and(|host| host == self)
    }

    /// Variables of cargo's and of the crate `cc` for a build on a machine of another architecture; none for its own.
    pub(crate) fn variables(self) -> Vec<(String, String)> {
        if self.is_tested() {
            return Vec::new();
        }
        let (tools, triple) = (self.tools().0, self.triple());
        let underscored = triple.replace('-', "_");
        vec![
            (format!("CARGO_TARGET_{}_LINKER", underscored.to_uppercase()), format!("{tools}-gcc")),
            (format!("CC_{underscored}"), format!("{tools}-gcc")),
            (format!("AR_{underscored}"), format!("{tools}-ar")),
        ]
    }

    /// Installs the tools that a build for it needs, unless they are installed: none for this machine's own.
    pub(super) fn ensure(self, progress: &Progress) -> anyhow::Result<Done> {
        if self.is_tested() {
            return Ok(Done::Unchanged(self.triple().to_owned()));
        }
        let had = self.has_standard_library()?;
        if let Some(why) = self.lacking(progress)? {
            return Err(why);
        }
        let (prefix, package) = self.tools();
        let installed =
            setup::ensure_cross_compiler(&format!("{prefix}-gcc"), &format!("gcc-{package}"), progress)?;
        let done = format!("{}, untested", self.triple());
        Ok(if had && !installed { Done::Unchanged(done) } else { Done::Changed(done) })
    }

    /// Why nothing can be built for it: its standard library is neither installed nor available. `None`: it is
    /// installed, perhaps by this call.
    pub(crate) fn lacking(self, progress: &Progress) -> anyhow::Result<Option<anyhow::Error>> {
        if self.has_standard_library()? {
            return Ok(None);
        }
        let mut add = Command::new("rustup");
        add.args(["target", "add", self.triple()]).current_dir(tree::root());
        let added = child::run(&mut add, progress);
        if added.is_ok() && self.has_standard_library()? {
            return Ok(None);
        }
        Ok(Some(self.no_standard_library(added.err())))
    }

    fn has_standard_library(self) -> anyhow::Result<bool> {
        let mut ask = Command::new("rustc");
        ask.args(["--print", "target-libdir", "--target", self.triple()]).current_dir(tree::root());
        let directory = child::ask(&mut ask).context("ask rustc for its libraries")?;
        let entries = Path::new(&directory).read_dir().into_iter().flatten().filter_map(Result::ok);
        Ok(entries.into_iter().any(|entry| {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            name.starts_with("libstd-") && name.ends_with(".rlib")
        }))
    }

    /// A distribution's library belongs to the distribution's own compiler: another version's metadata is refused.
    fn no_standard_library(self, cause: Option<anyhow::Error>) -> anyhow::Error {
        let user = UserError::new(
            format!("there is no standard library for {}, and rustup could not get it", self.triple()),
            format!(
                "run `rustup target add {}` where there is a network; a compiler of Debian's needs libstd-rust-dev:{} of its version",
                self.triple(),
                self.name()
            ),
        );
        cause.unwrap_or_else(|| anyhow::anyhow!("rustup left nothing")).context(user)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_for_another_architecture_names_its_tools() {
        let other = if Arch::Amd64.is_tested() { Arch::Arm64 } else { Arch::Amd64 };
        assert_eq!(Arch::host().unwrap().variables(), []);
        let expected = match other {
            Arch::Arm64 => [
                ("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", "aarch64-linux-gnu-gcc"),
                ("CC_aarch64_unknown_linux_gnu", "aarch64-linux-gnu-gcc"),
                ("AR_aarch64_unknown_linux_gnu", "aarch64-linux-gnu-ar"),
            ],
            Arch::Amd64 => [
                ("CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_LINKER", "x86_64-linux-gnu-gcc"),
                ("CC_x86_64_unknown_linux_gnu", "x86_64-linux-gnu-gcc"),
                ("AR_x86_64_unknown_linux_gnu", "x86_64-linux-gnu-ar"),
            ],
        };
        assert_eq!(other.variables(), expected.map(|(key, value)| (key.to_owned(), value.to_owned())));
    }
}
