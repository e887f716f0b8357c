//! Tests on a whole machine: container runtimes that call netattach (`containers`), other queries between agent and
//! runtime (`looks`), podman with only the executables (`plain`), the container image (`image`), and README and
//! guides as written (`guides`), with the migration from Multus (`migrate`).
#![expect(clippy::unwrap_used, reason = "a test reports by panicking")]

mod containers;
mod guides;
mod image;
mod looks;
mod migrate;
mod plain;
