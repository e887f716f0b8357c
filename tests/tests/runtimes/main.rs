//! Tests on a whole machine: container runtimes that call netattach (`containers`), what agent and runtime ask of each other
//! beside that (`looks`), podman with the executables alone (`plain`), the container image (`image`), and README and guides as written (`guides`), the migration
//! from Multus among them (`migrate`).
#![expect(clippy::unwrap_used, reason = "a test reports by panicking")]

mod containers;
mod guides;
mod image;
mod looks;
mod migrate;
mod plain;
