//! How the programs of a cluster are built.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};

use crate::child;
use crate::progress::Progress;
use crate::setup::apt::Suite;

/// The Debian suite with the source of Kubernetes.
const SUITE: &str = "bookworm";
/// The source package. It has all sources that the programs are built of.
const SOURCE: &str = "kubernetes";
/// The version that the programs report: the package's, by which they choose the features that they support.
const VERSION: &str = "v1.20.2";
/// The compiler with its library, and the package below.
const COMPILER: [&str; 3] = ["golang-1.19-go", "golang-1.19-src", "golang-github-modern-go-reflect2-dev"];
/// Path of the compiler in these packages.
const GO: &str = "usr/lib/go-1.19";
/// The copy of this package in the source crashes when it is compiled by Go 1.18 or later; the one that Debian has by
/// itself does not.
const REFLECT: &str = "github.com/modern-go/reflect2";
/// Leaves out the drivers of clouds and of Docker, which are half of the code.
const TAGS: &str = "providerless,dockerless";
/// The executable, by its names.
const PROGRAMS: [&str; 5] =
    ["kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy"];
const MAIN: &str = include_str!("programs.go");
/// The mark of packages whose types the API server describes. The descriptions are not in the source.
const DESCRIBED: &str = "+k8s:openapi-gen=";
const DESCRIPTIONS: &str = "pkg/generated/openapi";

/// A device plugin for the kubelet, written for the tests.
const DEVICE_PLUGIN: &str = "device-plugin";
const DEVICE_PLUGIN_MAIN: &str = include_str!("device-plugin.go");

/// Parts that are built separately, and rebuilt separately when their recipe changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    /// The programs of a cluster.
    Cluster,
    /// The device plugin: its build takes half a minute, the other one minutes.
    DevicePlugin,
}

impl Part {
    /// All of them.
    pub(super) const ALL: [Self; 2] = [Self::Cluster, Self::DevicePlugin];

    /// The file that says by which recipe it was built.
    pub(super) fn stamp_file(self) -> &'static str {
        match self {
            Self::Cluster => "recipe",
            Self::DevicePlugin => "device-plugin.recipe",
        }
    }

    /// Differs when something else would be built.
    pub(super) fn stamp(self) -> String {
        let compiler = COMPILER.join(" ");
        match self {
            Self::Cluster => format!("{VERSION} {compiler} {TAGS} {}\n{MAIN}", PROGRAMS.join(" ")),
            Self::DevicePlugin => format!("{VERSION} {compiler}\n{DEVICE_PLUGIN_MAIN}"),
        }
    }
}

/// Builds parts in a directory; returns the directory that holds their programs and nothing else.
pub(super) fn follow(parts: &[Part], scratch: &Path, progress: &Progress) -> anyhow::Result<PathBuf> {
    let build = Build {
        compiler: scratch.join("go").join(GO),
        path: scratch.join("path"),
        tree: scratch.join("path/src/k8s.io/kubernetes"),
        cache: scratch.join("cache"),
        temporary: scratch.join("tmp"),
    };
    for directory in [&build.tree, &build.cache, &build.temporary] {
        fs::create_dir_all(directory).with_context(|| format!("create {}", directory.display()))?;
    }
    let programs = scratch.join("programs");
    fs::create_dir_all(&programs).context("create a directory for the programs")?;
    fetch(scratch, &build.tree, progress)?;
    for part in parts {
        match part {
            Part::Cluster => build.cluster(scratch, &programs, progress)?,
            Part::DevicePlugin => build.device_plugin(&programs, progress)?,
        }
    }
    Ok(programs)
}

/// Gets the compiler, etcd, and the source of Kubernetes into `tree`.
fn fetch(scratch: &Path, tree: &Path, progress: &Progress) -> anyhow::Result<()> {
    let suite = Suite::with_sources(SUITE, progress)?;
    suite.unpack(&COMPILER, &scratch.join("go"), progress)?;
    suite.unpack(&["etcd-server"], &scratch.join("etcd"), progress)?;
    let archive = suite.source(SOURCE, &scratch.join("source"), progress)?;
    suite.close()?;
    let mut unpack = Command::new("tar");
    unpack.arg("--extract").arg("--file").arg(archive).args(["--strip-components", "1"]);
    child::run(unpack.arg("--directory").arg(tree), progress).context("unpack the source of Kubernetes")?;
    Ok(())
}

struct Build {
    compiler: PathBuf,
    path: PathBuf,
    tree: PathBuf,
    cache: PathBuf,
    temporary: PathBuf,
}

impl Build {
    /// A program of the build: it runs at lower priority than other work, including the compile of the tests
    /// ([`child::nice`]), as tests with a cluster do not run first; and it does not outlive the thread that waits for
    /// it.
    fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("nice");
        command.args(["-n", "15", "setpriv", "--pdeathsig", "TERM"]).arg(program);
        command.current_dir(&self.tree).env_clear();
        command.envs(std::env::var_os("PATH").map(|path| ("PATH", path)));
        command
            .env("HOME", &self.temporary)
            .env("TMPDIR", &self.temporary)
            .env("GOROOT", &self.compiler)
            .env("GOPATH", &self.path)
            .env("GOCACHE", &self.cache)
            .env("GO111MODULE", "off")
            // Saves a fifth of the time for twice the memory of a compiler that uses little.
            .env("GOGC", "400")
            .env("CGO_ENABLED", "0");
        command
    }

    fn go(&self, to: &Path, what: &str, more: &[&str], progress: &Progress) -> anyhow::Result<()> {
        let mut go = self.command(&self.compiler.join("bin/go"));
        go.args(["build", "-v"]).args(more).arg("-o").arg(to).arg(what);
        child::run(&mut go, progress).with_context(|| format!("compile {what}"))?;
        Ok(())
    }

    /// Generates the descriptions of the API's types.
    fn describe(&self, progress: &Progress) -> anyhow::Result<()> {
        let generator = self.temporary.join("openapi-gen");
        self.go(&generator, "./vendor/k8s.io/kube-openapi/cmd/openapi-gen", &[], progress)?;
        progress.note("describe the types of the API");
        let packages: Vec<String> = described(&self.tree)?
            .into_iter()
            .map(|package| format!("k8s.io/kubernetes/{package}"))
            .collect();
        ensure!(!packages.is_empty(), "the source describes no types");
        let mut generate = self.command(&generator);
        generate.args(["--logtostderr", "--input-dirs", &packages.join(",")]);
        generate.args(["--output-package", &format!("k8s.io/kubernetes/{DESCRIPTIONS}")]);
        generate.args(["--output-file-base", "zz_generated.openapi"]);
        generate.args(["--go-header-file", "vendor/k8s.io/code-generator/hack/boilerplate.go.txt"]);
        generate.arg("--report-filename").arg(self.temporary.join("report"));
        child::run(&mut generate, progress).context("describe the types of the API")?;
        Ok(())
    }

    /// Builds the programs of a cluster.
    fn cluster(&self, scratch: &Path, programs: &Path, progress: &Progress) -> anyhow::Result<()> {
        let reflect = self.tree.join("vendor").join(REFLECT);
        fs::remove_dir_all(&reflect).context("remove a package of the source")?;
        fs::rename(scratch.join("go/usr/share/gocode/src").join(REFLECT), &reflect)
            .context("replace a package of the source")?;
        self.describe(progress)?;
        self.link(&programs.join(SOURCE), progress)?;
        for name in PROGRAMS {
            symlink(SOURCE, programs.join(name)).with_context(|| format!("name {name}"))?;
        }
        fs::rename(scratch.join("etcd/usr/bin/etcd"), programs.join("etcd")).context("keep etcd")
    }

    /// Builds the device plugin.
    fn device_plugin(&self, programs: &Path, progress: &Progress) -> anyhow::Result<()> {
        let what = self.main(DEVICE_PLUGIN, DEVICE_PLUGIN_MAIN)?;
        self.go(&programs.join(DEVICE_PLUGIN), &what, &["-ldflags", "-s -w"], progress)
    }

    /// Adds a main file to the source; returns the package to compile.
    fn main(&self, name: &str, text: &str) -> anyhow::Result<String> {
        let directory = self.tree.join("cmd").join(name);
        fs::create_dir_all(&directory).context("create a directory for a main file")?;
        fs::write(directory.join("main.go"), text).context("write a main file")?;
        Ok(format!("./cmd/{name}"))
    }

    /// Compiles the programs.
    fn link(&self, to: &Path, progress: &Progress) -> anyhow::Result<()> {
        let what = self.main("programs", MAIN)?;
        let version = ["component-base/version", "client-go/pkg/version"]
            .map(|package| format!("-X k8s.io/kubernetes/vendor/k8s.io/{package}.gitVersion={VERSION}"));
        let flags = format!("-s -w {}", version.join(" "));
        self.go(to, &what, &["-tags", TAGS, "-ldflags", &flags], progress)
    }
}

/// The packages below a source tree whose types are described, as directories of it.
fn described(tree: &Path) -> anyhow::Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    for directory in ["cmd", "pkg", "plugin"] {
        collect(&tree.join(directory), directory, &mut found)?;
    }
    // Links into `staging`, by whose names the packages are imported.
    let vendored = tree.join("vendor/k8s.io");
    for entry in fs::read_dir(&vendored).context("list the packages of the source")? {
        let name = entry.context("list the packages of the source")?.file_name();
        let name = name.to_string_lossy();
        // Examples, which no program has in it.
        if !["code-generator", "sample-apiserver"].contains(&&*name) {
            collect(&vendored.join(&*name), &format!("vendor/k8s.io/{name}"), &mut found)?;
        }
    }
    Ok(found)
}

/// Adds the directories with a marked file, by their names.
fn collect(directory: &Path, name: &str, found: &mut BTreeSet<String>) -> anyhow::Result<()> {
    let failed = || format!("read {}", directory.display());
    for entry in fs::read_dir(directory).with_context(failed)? {
        let entry = entry.with_context(failed)?;
        let file = entry.file_name();
        let file = file.to_string_lossy();
        if entry.file_type().with_context(failed)?.is_dir() {
            collect(&entry.path(), &format!("{name}/{file}"), found)?;
        } else if file.ends_with(".go") && !file.starts_with("zz_generated") && !found.contains(name) {
            let text = fs::read_to_string(entry.path()).with_context(failed)?;
            if text.contains(DESCRIBED) {
                found.insert(name.to_owned());
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marked_packages_are_found_by_the_names_they_are_imported_by() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        let marked = "// +k8s:openapi-gen=true\npackage v1\n";
        for (path, text) in [
            ("cmd/x/main.go", "package main\n"),
            ("pkg/apis/a/v1/doc.go", marked),
            ("pkg/apis/a/v1/types.go", marked),
            ("pkg/b/zz_generated.x.go", marked),
            ("plugin/readme", marked),
            ("staging/src/k8s.io/api/core/v1/doc.go", marked),
            ("staging/src/k8s.io/code-generator/v1/doc.go", marked),
        ] {
            fs::create_dir_all(root.join(path).parent().unwrap()).unwrap();
            fs::write(root.join(path), text).unwrap();
        }
        fs::create_dir_all(root.join("vendor/k8s.io")).unwrap();
        for name in ["api", "code-generator"] {
            symlink(format!("../../staging/src/k8s.io/{name}"), root.join("vendor/k8s.io").join(name))
                .unwrap();
        }
        let found: Vec<String> = described(root).unwrap().into_iter().collect();
        assert_eq!(found, ["pkg/apis/a/v1", "vendor/k8s.io/api/core/v1"]);
    }
}
