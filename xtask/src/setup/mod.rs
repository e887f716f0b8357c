//! `cargo xtask setup`: finds and installs tools that this machine lacks, and reports them.
//!
//! Every step checks before it acts, so that a second run changes nothing and takes a moment.
//!
//! `bpf_toolchain` has the compiler of the BPF object; `musl` the C library of the CNI executable; `cross` the compiler for
//! another architecture; `kubectl` renders manifests, `helm` the chart; `tools`, `runtimes`, `kubernetes` and `machine` are
//! programs that tests run, with the `kernel`s and `modules` of guests, `netdevsim` among them; `previous` builds the release
//! that landed last; `apt` fetches packages.

mod apt;
pub mod bpf_toolchain;
mod cross;
mod helm;
mod kernel;
mod kubectl;
mod kubernetes;
mod machine;
mod modules;
pub mod musl;
mod netdevsim;
mod previous;
mod runtimes;
mod tools;

use crate::progress;

pub use cross::ensure_cross_compiler;
pub use helm::helm_renderer;
pub use kernel::Kernel;
pub use kubectl::kubectl;
pub use kubernetes::{Building, kubernetes};
pub use machine::{Emulator, machine};
pub use previous::previous;
pub use runtimes::runtimes;
pub use tools::{bpftool, busybox, prometheus, reference_plugins};

/// The purpose of the set-up.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// Building, the demo and the benchmarks.
    Usual,
    /// The fuzz targets.
    Fuzzing,
    /// Every test. A machine that cannot have the container runtimes does without them.
    Testing,
    /// The gate: every test without exception.
    Gate,
    /// The usual tools, and those that the dataplane is compared with.
    Comparing,
    /// The usual and the virtual machines.
    Machine,
}

/// Installs everything that tests use: the verb.
///
/// # Errors
/// The first step that cannot be completed, with advice.
pub fn everything() -> anyhow::Result<()> {
    run(Scope::Testing)?;
    Building::start(false).wait()
}

/// Builds the release that landed last, which tests of upgrades need: `--previous`.
///
/// # Errors
/// As [`run`]; or the clone does not have that commit, or it cannot be built.
pub fn upgrades() -> anyhow::Result<()> {
    run(Scope::Usual)?;
    progress::step("release that landed last", previous::ensure)
}

/// Installs missing tools, all but the programs of a cluster, which [`Building`] makes.
///
/// # Errors
/// The first step that cannot be completed, with advice.
pub fn run(scope: Scope) -> anyhow::Result<()> {
    compilers(scope)?;
    rest(scope)
}

/// Installs what everything is compiled and linked with: the first part of [`run`].
///
/// # Errors
/// As [`run`].
pub fn compilers(scope: Scope) -> anyhow::Result<()> {
    progress::heading("setup");
    progress::step("static C library", tools::ensure_static_libc)?;
    if scope == Scope::Fuzzing {
        // It may bring another version of the C compiler, by which everything is linked.
        progress::step("C++ compiler", tools::ensure_cxx)?;
    }
    progress::step("BPF compiler", bpf_toolchain::ensure_compiler)?;
    progress::step("BPF linker", bpf_toolchain::ensure_linker)?;
    // Behind the compiler, which may be Debian's.
    progress::step("musl", musl::ensure)
}

/// Installs the others: the second part of [`run`].
///
/// # Errors
/// As [`run`].
pub fn rest(scope: Scope) -> anyhow::Result<()> {
    progress::step("bpftool", tools::ensure_bpftool)?;
    let network = [("ip", "iproute2"), ("ping", "iputils-ping")];
    progress::step("ip, ping", |progress| tools::ensure_programs(&network, progress))?;
    progress::step("reference plugins", tools::ensure_reference_plugins)?;
    if matches!(scope, Scope::Testing | Scope::Gate) {
        progress::step("Prometheus", tools::ensure_prometheus)?;
        progress::step("DHCP server", tools::ensure_busybox)?;
        let units = [("systemd-analyze", "systemd")];
        progress::step("systemd-analyze", |progress| tools::ensure_programs(&units, progress))?;
        progress::step("container runtimes", |progress| runtimes::ensure(scope == Scope::Gate, progress))?;
        progress::step("kubectl", |progress| kubectl::ensure(scope == Scope::Gate, progress))?;
        progress::step("renderer of the chart", |progress| helm::ensure(scope == Scope::Gate, progress))?;
    }
    if scope == Scope::Machine {
        // For the busybox of pods.
        progress::step("container runtimes", |progress| runtimes::ensure(true, progress))?;
    }
    if matches!(scope, Scope::Testing | Scope::Gate | Scope::Machine) {
        progress::step("virtual machines", |progress| machine::ensure(scope != Scope::Testing, progress))?;
    }
    if matches!(scope, Scope::Comparing | Scope::Testing | Scope::Gate) {
        progress::step("iptables", tools::ensure_iptables)?;
        progress::step("nft", tools::ensure_nft)?;
    }
    progress::step("bpffs", tools::ensure_bpffs)
}
