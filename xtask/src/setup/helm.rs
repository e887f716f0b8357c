//! The renderer for the chart of `deploy/helm` in a test: written for that, as Debian has no helm, and built by
//! Debian's Go with its package of sprig. Everything is below `target/tools`; nothing is installed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;

use super::apt::{self, Suite};
use crate::progress::{Done, Progress};
use crate::{child, tree};

const SUITE: &str = "bookworm";
const MAIN: &str = include_str!("helm-renderer.go");
const GO: &str = "usr/lib/go-1.19";
/// The compiler with its library, sprig, and sprig's dependencies.
const PACKAGES: [&str; 17] = [
    "golang-1.19-go",
    "golang-1.19-src",
    "golang-github-ghodss-yaml-dev",
    "golang-github-google-uuid-dev",
    "golang-github-huandu-xstrings-dev",
    "golang-github-imdario-mergo-dev",
    "golang-github-masterminds-goutils-dev",
    "golang-github-masterminds-semver-dev",
    "golang-github-masterminds-sprig-dev",
    "golang-github-mitchellh-copystructure-dev",
    "golang-github-mitchellh-reflectwalk-dev",
    "golang-github-shopspring-decimal-dev",
    "golang-github-spf13-cast-dev",
    "golang-golang-x-crypto-dev",
    "golang-golang-x-sys-dev",
    "golang-gopkg-yaml.v2-dev",
    "golang-gopkg-yaml.v3-dev",
];

/// Directory of the renderer, built by setup.
pub fn helm_renderer() -> PathBuf {
    tree::tools().join("helm-renderer")
}

/// Builds the renderer unless it is here. Without `required`, a machine without apt does without it.
pub(super) fn ensure(required: bool, progress: &Progress) -> anyhow::Result<Done> {
    let stamp = format!("{SUITE} {}\n{MAIN}", PACKAGES.join(" "));
    let stamp_file = helm_renderer().join("recipe");
    if fs::read_to_string(&stamp_file).is_ok_and(|found| found == stamp) {
        return Ok(Done::Unchanged("present".to_owned()));
    }
    if !apt::is_here() {
        return apt::without("Go and sprig", required);
    }
    fs::create_dir_all(tree::tools()).context("create a directory for tools")?;
    let scratch = tempfile::tempdir_in(tree::tools()).context("create a scratch directory")?;
    let suite = Suite::open(SUITE, progress)?;
    suite.unpack(&PACKAGES, scratch.path(), progress)?;
    suite.close()?;
    let program = build(scratch.path(), progress)?;
    fs::create_dir_all(helm_renderer()).context("create a directory for the renderer")?;
    // The stamp is written last, so that it exists only beside a complete build.
    fs::rename(program, helm_renderer().join("helm-renderer")).context("put the renderer into place")?;
    fs::write(&stamp_file, stamp).context("note by which recipe the renderer was built")?;
    Ok(Done::Changed("built".to_owned()))
}

fn build(scratch: &Path, progress: &Progress) -> anyhow::Result<PathBuf> {
    let path = scratch.join("usr/share/gocode");
    let source = path.join("src/helm-renderer");
    fs::create_dir_all(&source).context("create a directory for the source")?;
    fs::write(source.join("main.go"), MAIN).context("write the source")?;
    let program = scratch.join("helm-renderer");
    let mut go = Command::new(scratch.join(GO).join("bin/go"));
    go.args(["build", "-ldflags", "-s -w", "-o"]).arg(&program).arg(".").current_dir(&source);
    go.env("GOROOT", scratch.join(GO)).env("GOPATH", &path).env("GOCACHE", scratch.join("cache"));
    go.env("HOME", scratch).env("GO111MODULE", "off").env("CGO_ENABLED", "0");
    child::run(&mut go, progress).context("compile the renderer of the chart")?;
    Ok(program)
}
