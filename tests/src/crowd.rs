//! Pods that administrate their network, and have made more there than a handle reads.

use std::fmt::Write;
use std::fs;

use anyhow::{Result, ensure};
use netattach::netlink::{Error, Handle, MOST_IN_POD};

use crate::Namespace;
use crate::node::ip;

/// Sources of the pod's own rules; no attachment has them.
#[must_use]
pub fn address(number: usize) -> String {
    let [_, a, b, c] = (number as u32).to_be_bytes();
    format!("11.{a}.{b}.{c}/32")
}

/// Creates more objects of a kind until a handle does not read them all: by lines of `ip -batch`.
///
/// # Errors
/// `ip` fails, or all of them are read, whatever their number.
pub fn crowd<T>(
    pod: &Namespace,
    list: fn(&mut Handle) -> Result<Vec<T>, Error>,
    line: impl Fn(usize) -> String,
) -> Result<()> {
    const AT_ONCE: usize = MOST_IN_POD / 8;
    for round in 0..9 {
        if let Err(error) = list(&mut Handle::open_in(pod.netns())?) {
            ensure!(error.is_too_many(), "{error}");
            return Ok(());
        }
        batch(pod, (round * AT_ONCE..(round + 1) * AT_ONCE).map(&line))?;
    }
    anyhow::bail!("they are all read")
}

/// Creates rules that route packets from these sources by the pod's own table.
///
/// # Errors
/// As of [`crowd`].
pub fn crowd_of_rules(pod: &Namespace) -> Result<()> {
    // The last ones first: the kernel searches the position of each from the front.
    crowd(pod, Handle::rules, |number| {
        format!("rule add from {} lookup 1000 priority {}", address(number), 100_000 - number)
    })
}

fn batch(pod: &Namespace, lines: impl Iterator<Item = String>) -> Result<()> {
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("batch");
    let mut text = String::new();
    for line in lines {
        writeln!(text, "{line}")?;
    }
    fs::write(&file, text)?;
    ip(pod, &["-batch", &file.to_string_lossy()])
}
